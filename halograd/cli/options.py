"""Options of commands: groups that commands share, and the parsing of strings into numbers, cuts and settings."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..documents import parse_option, parse_pair, shown
from ..errors import UserError

if TYPE_CHECKING:
    from ..layers import Network, Strategy
    from ..perfmodel.cost import Training
    from ..planning import PlanRequest

__all__ = [
    "AsJson",
    "Batch",
    "Cache",
    "Full",
    "Memory",
    "ModelOptions",
    "Options",
    "Planner",
    "PredictionOptions",
    "Several",
    "check_counts",
    "grouped",
    "parse_grid",
    "parse_options",
    "parse_ranks",
    "strategy_of_grid",
]

Several = list[str] | None
Options = Annotated[Several, typer.Option("--option", metavar="KEY=VALUE", help="An option of the model; repeatable.")]
Batch = Annotated[int, typer.Option(help="Samples of a global batch.")]
Memory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Limit per rank, such as 16GiB; default: that of the device.")
]
Planner = Annotated[
    str,
    typer.Option(
        help="elimination, shortest_path, longest_path_first, exhaustive; data, spatial, model, owt, grid; "
        "or FILE.py:CLASS."
    ),
]
Dtype = Annotated[str, typer.Option(help="Type of the computation, such as float32.")]
Full = Annotated[bool, typer.Option("--full", help="Try every valid cut, balanced or not.")]
Cache = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Folder of measured times; default: $HALOGRAD_CACHE or ~/.cache/halograd."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def grouped(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command for typer in which the fields of dataclass parameters become options.

    typer makes an option of every parameter of a function, but a function with twenty parameters is hard to read and
    call.
    """
    hints = typing.get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            parameters += _parameters(groups[name])
        else:
            # Keyword-only, because options with defaults may precede those without.
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

    @wraps(command)
    def run(**values: Any) -> Any:
        # The fields of the groups are removed from `values`; the command takes what is left itself.
        groups_of_options = {
            name: kind(**{f.name: values.pop(f.name) for f in _fields(kind)}) for name, kind in groups.items()
        }
        return command(**groups_of_options, **values)

    # typer reads signature and annotations, and `wraps` has copied those of the command.
    vars(run)["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _fields(kind: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(kind)


def _parameters(kind: Any) -> list[inspect.Parameter]:
    # With extras, because typer finds an option in the metadata of Annotated.
    hints = typing.get_type_hints(kind, include_extras=True)
    none, kinds, only = dataclasses.MISSING, inspect.Parameter, inspect.Parameter.KEYWORD_ONLY
    return [
        kinds(f.name, only, default=kinds.empty if f.default is none else f.default, annotation=hints[f.name])
        for f in _fields(kind)
    ]


@dataclass(frozen=True)
class PredictionOptions:
    """Options for the form of predictions."""

    what: Annotated[str, typer.Option(help="logits, probabilities or classes.")] = "logits"
    format: Annotated[str, typer.Option(help="Format of OUT: hdf5, or FILE.py:CLASS, a writer of your own.")] = "hdf5"
    one_file: Annotated[
        bool, typer.Option("--one-file", help="Copy the parts of all ranks into OUT; as --format hdf5-whole.")
    ] = False
    flips: Annotated[
        str, typer.Option(metavar="AXIS,...", help="Mean over samples mirrored along depth, height, width.")
    ] = ""
    window: Annotated[
        str, typer.Option(metavar="N,...", help="Sliding windows of these extents, for samples that do not fit.")
    ] = ""
    overlap: Annotated[float | None, typer.Option(help="Share of a window that the next one has too [0.5].")] = None
    rollout: Annotated[
        int, typer.Option(metavar="N", help="Times to predict, each from the last predictions (data.lag).")
    ] = 0

    @property
    def writer(self) -> str:
        """Name of the format. Raises UserError for options that exclude each other."""
        if self.one_file and self.format != "hdf5":
            raise UserError(f"--one-file: expected --format hdf5 with it, got {self.format}; remove either")
        return "hdf5-whole" if self.one_file else self.format

    @property
    def axes(self) -> list[str]:
        """Axes of the flips."""
        return [axis.strip() for axis in self.flips.split(",")] if self.flips else []

    @property
    def extents(self) -> list[int]:
        """Extents of the window, per axis. Raises UserError for other strings."""
        try:
            return [int(n) for n in self.window.split(",")] if self.window else []
        except ValueError:
            raise UserError(f"--window: expected extents such as 128,128,128, got {self.window!r}") from None


MODEL = "A model by name, such as resnet50; net.py:build, torch:net.py:make or onnx:net.onnx."


@dataclass(frozen=True)
class ModelOptions:
    """Options that select the model and the machine to plan for."""

    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL)]
    machine: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE.toml", help="A shipped machine, or a machine file (`halograd profile`)."),
    ] = None
    options: Options = None
    dtype: Dtype = "float32"
    cache: Cache = None
    optimizer: Annotated[
        str, typer.Option(metavar="NAME", help="Optimizer, for the memory of its state: sgd (with momentum), adam, ...")
    ] = "sgd"

    def training(self) -> Training:
        """Return the settings of training that determine memory and update costs."""
        from ..planning import training_of

        return training_of(self.dtype, self.optimizer)

    def plan_request(self) -> PlanRequest:
        """Build the model, and read the machine. Raises UserError."""
        from ..perfmodel.machine import MACHINES
        from ..planning import PlanRequest

        if self.machine is None:
            raise UserError(f"--machine: expected one of {', '.join(MACHINES)}, or a machine file, got none")
        return PlanRequest.of(self.model, parse_options(self.options or ()), self.machine, self.dtype, self.cache)


def parse_options(options: Sequence[str]) -> dict[str, Any]:
    """Parse options ``KEY=VALUE``, whose values are written as in TOML; a bare word is a string."""
    pairs = (parse_pair("--option", option, "KEY=VALUE, such as resolution=512") for option in options)
    return {key: parse_option("--option", key, text.strip()) for key, text in pairs}


#: Pattern of numbers of ranks and of parts, with at most nine digits.
_WHOLE = r"[0-9]{1,9}"


def check_counts(**counts: float | None) -> None:
    """Check options: numbers of ranks, samples or threads, and a time budget [s]; None: not set. Raises UserError."""
    from ..perfmodel.plans import Ranks
    from ..schema import Count, NotNegative, Threads, build

    kinds: dict[str, Any] = {"ranks": Ranks, "threads": Threads, "budget": NotNegative}
    for name, count in counts.items():
        if count is not None:
            build(kinds.get(name, Count), count, at=f"--{name}")


def parse_ranks(text: str) -> list[int]:
    """Return numbers of ranks; ``...`` stands for the geometric progression up to the next number.

    >>> parse_ranks("4,8,...,64"), parse_ranks("16")
    ([4, 8, 16, 32, 64], [16])
    """
    words = [word.strip() for word in text.split(",")]
    ranks: list[int] = []
    for i, word in enumerate(words):
        # Some editors replace three dots by one character.
        if word in ("...", "\u2026"):
            ranks += _between(ranks, words[i + 1 :], text)
        elif re.fullmatch(_WHOLE, word) and int(word) > 0:
            ranks.append(int(word))
        else:
            raise UserError(
                f"--ranks: expected whole numbers >= 1 such as 4,8,...,2048, got {shown(word)} in {shown(text)}"
            )
    check_counts(ranks=max(ranks))
    if sorted(set(ranks)) != ranks:
        raise UserError(f"--ranks: expected rising numbers, got {shown(text)}")
    return ranks


def _between(before: Sequence[int], after: Sequence[str], text: str) -> list[int]:
    """Return the numbers that replace ``...`` between the numbers `before` and the words `after` of the list `text`."""
    ends = bool(after and re.fullmatch(_WHOLE, after[0]))
    if len(before) < 2 or before[-1] % before[-2] or before[-1] <= before[-2] or not ends:
        raise UserError(
            f"--ranks: expected two numbers before ... and one after, such as 4,8,...,2048, got {shown(text)}"
        )
    ratio, last = before[-1] // before[-2], int(after[0])
    ranks: list[int] = []
    # Without `last` itself, which is the next number of the list.
    while [*before, *ranks][-1] * ratio < last:
        ranks.append([*before, *ranks][-1] * ratio)
    if (ranks or before)[-1] * ratio != last:
        raise UserError(
            f"--ranks: expected {last} to be reached by times {ratio} from {before[-1]}, got {shown(text)}; "
            f"end with {(ranks or before)[-1] * ratio} or {(ranks or before)[-1]}"
        )
    return ranks


def parse_grid(text: str) -> dict[str, int]:
    """Parse parts per axis, written as ``sample=2,height=4``."""
    from ..layers.strategy import AXES

    grid: dict[str, int] = {}
    for item in text.split(","):
        axis, equals, number = (part.strip() for part in item.partition("="))
        if not equals or not re.fullmatch(_WHOLE, number) or int(number) < 1:
            raise UserError(f"--grid: expected AXIS=PARTS,... such as sample=2,height=4,width=2, got {shown(item)}")
        if axis not in AXES:
            raise UserError(f"--grid: expected axes out of {', '.join(AXES)}, got {shown(axis)}")
        if axis in grid:
            raise UserError(f"--grid: expected every axis once, got {axis!r} twice")
        grid[axis] = int(number)
    return grid


def strategy_of_grid(network: Network, grid: Mapping[str, int], batch: int, ranks: int) -> Strategy:
    """Return the strategy with one cut for all layers; if `grid` omits samples, they are cut among the remaining ranks.

    Raises
    ------
    UserError
        The product of the parts is not the number of ranks, or the network cannot be cut in this way.
    """
    from ..layers.strategy import Strategy, spatial_axes

    parts = _complete(grid, ranks)
    names = ("sample", *spatial_axes(network))
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
    """Return the grid, completed by the parts of the samples; raise UserError if it does not fit the ranks."""
    product = math.prod(grid.values())
    written = " x ".join(f"{n} {axis}" for axis, n in grid.items())
    if "sample" in grid and product != ranks:
        raise UserError(
            f"--grid: {written} is {product} ranks, --ranks is {ranks}; choose parts whose product is {ranks}, or "
            "leave sample out, which then takes the remaining ranks"
        )
    if ranks % product:
        raise UserError(
            f"--grid: {written} is {product} ranks, which does not divide --ranks {ranks}; choose other parts"
        )
    return dict(grid) if "sample" in grid else {"sample": ranks // product, **grid}
