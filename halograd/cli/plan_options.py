"""What the commands of planning are given, checked: model, machine, ranks, memory, cuts. Nothing here runs MPI."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halograd.documents import parse_option, shown
from halograd.errors import UserError

if TYPE_CHECKING:
    from halograd.layers import Network, Strategy
    from halograd.perfmodel.kernel_times import KernelTimes
    from halograd.perfmodel.machine import Machine

__all__ = [
    "Asked",
    "Cache",
    "Dtype",
    "Full",
    "MachineName",
    "Memory",
    "ModelName",
    "Options",
    "Planner",
    "ask",
    "check_counts",
    "check_planner",
    "parse_grid",
    "parse_memory",
    "parse_options",
    "parse_ranks",
    "source_of",
    "strategy_of_grid",
]

ModelName = Annotated[str, typer.Argument(metavar="MODEL", help="A model by name, such as mesh_2k or resnet50.")]
MachineName = Annotated[
    str, typer.Option(metavar="NAME|FILE.toml", help="A shipped machine, or a machine file (`halograd profile`).")
]
Options = Annotated[
    list[str] | None, typer.Option("--option", metavar="KEY=VALUE", help="An option of the model; repeatable.")
]
Memory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Limit per rank, such as 16GiB; else that of the machine's device.")
]
Planner = Annotated[
    str, typer.Option(help="elimination, shortest_path, longest_path_first, exhaustive; or data, spatial, model, owt.")
]
Dtype = Annotated[str, typer.Option(help="Of the computation, such as float32.")]
Full = Annotated[bool, typer.Option("--full", help="Look at every legal cut, balanced or not.")]
Cache = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Of measured times; else $HALOGRAD_CACHE or ~/.cache/halograd.")
]


#: No number of ranks has more digits.
_WHOLE = r"[0-9]{1,9}"


@dataclass
class Asked:
    """A model on a machine, with the times of its kernels.

    Attributes
    ----------
    model, options, network
        Its name, the options given, and what they make.
    machine, machine_file
        The machine, and the name or path it was asked for by.
    dtype
        Of the computation.
    cache
        Folder of measured times, None: the usual one.
    """

    model: str
    options: Mapping[str, Any]
    network: Network
    machine: Machine
    machine_file: str
    dtype: str
    cache: Path | None = None

    def times(self, batch: int, ranks: int) -> KernelTimes:
        """Times of kernels for a run of this size: measured ones if the machine is this one, else its roofline."""
        from halograd.perfmodel.kernel_times import RooflineTimes

        return _measured(self, batch, ranks) or RooflineTimes(self.machine)


def source_of(times: KernelTimes, machine: Machine) -> str:
    """Where times come from, in words; to be asked when they were used."""
    from halograd.perfmodel.kernel_times import MeasuredTimes

    if not isinstance(times, MeasuredTimes):
        return f"roofline of {machine.name}"
    left = len(times.missing)
    return "measured here" + (
        f", {left} shapes of layers by roofline (`halograd profile` measures them)" if left else ""
    )


def ask(
    model: str,
    options: Sequence[str] | Mapping[str, Any] | None,
    machine: str,
    dtype: str,
    cache: Path | None = None,
    loaded: Machine | None = None,
) -> Asked:
    """The model and the machine, made; user errors in one line each.

    Parameters
    ----------
    options
        ``KEY=VALUE`` each, or a mapping.
    machine
        Its name, or the path of its file.
    loaded
        The machine, if it was read already.
    """
    from halograd.models import build
    from halograd.perfmodel.machine import Machine

    settings = dict(options) if isinstance(options, Mapping) else parse_options(options or ())
    network = build(model, **settings)
    if "loss" not in network.outputs:
        raise UserError(f"model: expected a network with a loss to train, got {model!r} without one")
    loaded = loaded or Machine.load(machine)
    if dtype not in loaded.peak_flops:
        raise UserError(
            f"--dtype: expected one of {', '.join(loaded.peak_flops)}, for which machine {loaded.name!r} has a peak, "
            f"got {shown(dtype)}; add it to [device.peak_flops] of a copy of the machine file"
        )
    return Asked(model, settings, network, loaded, machine, dtype, cache)


def parse_options(options: Sequence[str]) -> dict[str, Any]:
    """Options ``KEY=VALUE``, whose values are written as in TOML; a bare word is a text."""
    found: dict[str, Any] = {}
    for option in options:
        key, equals, text = (part.strip() for part in option.partition("="))
        if not equals or not key:
            raise UserError(f"--option: expected KEY=VALUE, such as resolution=512, got {shown(option)}")
        found[key] = parse_option("--option", key, text)
    return found


def parse_memory(text: str | None) -> float | None:
    """Bytes of ``16GiB`` [B]; None if nothing was given."""
    from halograd.perfmodel.machine_file import Bytes
    from halograd.schema import build

    return None if text is None else build(Bytes, text, at="--memory")


def check_planner(name: str) -> None:
    """Refuse a planner that there is not."""
    from halograd.perfmodel.cost.baselines import BASELINES
    from halograd.perfmodel.planners import PLANNERS

    known = (*PLANNERS, *BASELINES)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"--planner: expected one of {', '.join(known)}, got {shown(name)}{hint}")


def check_counts(**counts: float | None) -> None:
    """Refuse what is no number of ranks, samples or threads, or no time of a budget [s]; None was not given."""
    from halograd.perfmodel.cost.prediction import Ranks
    from halograd.schema import Count, NotNegative, Threads, build

    kinds: dict[str, Any] = {"ranks": Ranks, "threads": Threads, "budget": NotNegative}
    for name, count in counts.items():
        if count is not None:
            build(kinds.get(name, Count), count, at=f"--{name}")


def parse_ranks(text: str) -> list[int]:
    """Numbers of ranks; ``...`` goes on as the two before it do, up to the one behind it.

    >>> parse_ranks("4,8,...,64"), parse_ranks("16")
    ([4, 8, 16, 32, 64], [16])
    """
    words = [word.strip() for word in text.split(",")]
    found: list[int] = []
    for i, word in enumerate(words):
        if word in ("...", "\u2026"):
            found += _between(found, words[i + 1 :], text)
        elif re.fullmatch(_WHOLE, word) and int(word) > 0:
            found.append(int(word))
        else:
            raise UserError(
                f"--ranks: expected whole numbers >= 1 such as 4,8,...,2048, got {shown(word)} in {shown(text)}"
            )
    check_counts(ranks=max(found))
    if sorted(set(found)) != found:
        raise UserError(f"--ranks: expected rising numbers, got {shown(text)}")
    return found


def _between(before: Sequence[int], behind: Sequence[str], text: str) -> list[int]:
    """What ``...`` stands for."""
    ends = bool(behind and re.fullmatch(_WHOLE, behind[0]))
    if len(before) < 2 or before[-1] % before[-2] or before[-1] <= before[-2] or not ends:
        raise UserError(
            f"--ranks: expected two numbers before ... and one behind, such as 4,8,...,2048, got {shown(text)}"
        )
    ratio, last = before[-1] // before[-2], int(behind[0])
    found: list[int] = []
    while [*before, *found][-1] * ratio < last:
        found.append([*before, *found][-1] * ratio)
    if (found or before)[-1] * ratio != last:
        raise UserError(
            f"--ranks: expected {last} to be reached by times {ratio} from {before[-1]}, got {shown(text)}; "
            f"end with {(found or before)[-1] * ratio} or {(found or before)[-1]}"
        )
    return found


def parse_grid(text: str) -> dict[str, int]:
    """Parts per axis of ``sample=2,height=4``."""
    from halograd.layers.strategy import AXES

    found: dict[str, int] = {}
    for item in text.split(","):
        axis, equals, number = (part.strip() for part in item.partition("="))
        if not equals or not re.fullmatch(_WHOLE, number) or int(number) < 1:
            raise UserError(f"--grid: expected AXIS=PARTS,... such as sample=2,height=4,width=2, got {shown(item)}")
        if axis not in AXES:
            raise UserError(f"--grid: expected axes out of {', '.join(AXES)}, got {shown(axis)}")
        if axis in found:
            raise UserError(f"--grid: expected every axis once, got {axis!r} twice")
        found[axis] = int(number)
    return found


def strategy_of_grid(network: Network, grid: Mapping[str, int], batch: int, ranks: int) -> Strategy:
    """The same cut for all layers. Samples take the ranks that are left, if they are not in `grid`.

    Raises
    ------
    UserError
        The parts do not make up the ranks, or the network cannot be cut so.
    """
    from halograd.dtensor import axis_names
    from halograd.layers import Strategy

    parts = _complete(grid, ranks)
    names = axis_names(len(next(iter(network.inputs.values())).shape) + 1)[:-1]
    for axis, count in parts.items():
        if count > 1 and axis in ("depth", "height", "width") and axis not in names:
            raise UserError(
                f"--grid: {axis!r} is cut, but the samples of {network.name!r} have only the axes "
                f"{' and '.join(names[1:]) or 'sample'} to cut; use {' or '.join(names)}"
            )
    if parts.get("sample", 1) > batch:
        raise UserError(
            f"--grid: {parts['sample']} parts along 'sample', but the batch has {batch}; use at most {batch}"
        )
    strategy = Strategy(parts)
    strategy.validate(network, ranks)
    strategy.refuse_empty_blocks(network)
    return strategy


def _complete(grid: Mapping[str, int], ranks: int) -> dict[str, int]:
    """With the samples' parts."""
    product = 1
    for count in grid.values():
        product *= count
    written = " x ".join(f"{n} {axis}" for axis, n in grid.items())
    if "sample" in grid and product != ranks:
        raise UserError(
            f"--grid: {written} is {product} ranks, --ranks is {ranks}; choose parts whose product is {ranks}, or "
            "leave sample out to have it fill up"
        )
    if ranks % product:
        raise UserError(
            f"--grid: {written} is {product} ranks, which does not divide --ranks {ranks}; choose other parts"
        )
    return dict(grid) if "sample" in grid else {"sample": ranks // product, **grid}


# -- measured times -----------------------------------------------------------------------------

_DEVICE = re.compile(r"(?P<device>.*); (?P<kernels>\w+) (?P<version>.*), (?P<threads>\d+) thread\(s\)")


def _measured(asked: Asked, batch: int, ranks: int) -> KernelTimes | None:
    """Times from the cache, if the machine file was measured by `halograd profile` on this machine."""
    from halograd.perfmodel.profile import Profile, record_path

    match = _DEVICE.fullmatch(asked.machine.device)
    if Path(asked.machine_file).suffix != ".toml" or not record_path(asked.machine_file).exists() or match is None:
        return None
    from halograd.kernels import KernelError, get_backend
    from halograd.perfmodel.kernel_times import MeasuredTimes, RooflineTimes
    from halograd.perfmodel.profile import Crowd, TimeCache, cache_path, conditions_of
    from halograd.perfmodel.profile.cache import device_name

    try:
        backend = get_backend(match["kernels"], int(match["threads"]))
    except KernelError:
        return None
    with backend:
        if device_name(backend) != match["device"]:
            return None
        record = Profile.load(asked.machine_file)
        # The nodes of an emulated network are one host, where all ranks were measured at once.
        at_once = record.ranks if record.transport.startswith("emulated") else asked.machine.devices_per_node
        crowd = Crowd.here(min(ranks, at_once), backend)
        conditions = conditions_of(asked.network, batch, ranks, backend, crowd, asked.dtype)
    return MeasuredTimes(TimeCache(cache_path(asked.cache)), conditions, RooflineTimes(asked.machine))
