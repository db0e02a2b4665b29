"""Commands that measure this machine: `halograd profile` (for plans) and `halograd bench`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..comm.codec import CODECS
from ..comm.sums import METHODS, Method, carrying
from ..documents import check_output
from ..errors import UserError
from ..local import open_communicator
from ..output import bytes_text, table
from .options import AsJson, Batch, Cache, Options, check_counts, parse_options

if TYPE_CHECKING:
    from ..comm import Communicator
    from ..perfmodel.profile.layers import Coverage
    from ..perfmodel.profile.record import Profile

__all__ = ["allreduce", "profile"]

#: Methods of `Communicator.reduction`, and the schemes of gradient reduction that use them.
SERVES = {
    "allreduce": "blocking, per_layer, bucketed, two_chunks",
    "ordered": "deterministic, payload",
    "hierarchical": "hierarchical",
    "accumulate": "host_accumulate",
    "reduce_scatter": "sharded, first half",
    "all_gather": "sharded, second half; replicated_dense",
}
SIZES = ("1 KiB", "16 KiB", "256 KiB", "1 MiB", "4 MiB", "16 MiB")


@dataclass(frozen=True)
class MeasuringOptions:
    """Settings of the measurement, which should be those of the run."""

    threads: Annotated[int, typer.Option(help="Threads per rank.")] = 1
    kernels: Annotated[str, typer.Option(help="Kernel backend.")] = "auto"
    dtype: Annotated[str, typer.Option(help="float32, float64, or 16 bits that the kernels compute in.")] = "float32"
    autotune: Annotated[bool, typer.Option("--autotune", help="Choose convolutions by measurement.")] = False
    transport: Annotated[str, typer.Option(help="How messages travel.")] = "auto"
    budget: Annotated[float | None, typer.Option(help="Seconds after which no further layer is measured.")] = None
    cache: Cache = None


def profile(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model by name, such as mesh_1k or resnet50.")],
    how: MeasuringOptions,
    out: Annotated[Path, typer.Option(metavar="FILE.toml", help="The machine file to write.")] = Path("machine.toml"),
    batch: Batch = 1,
    ranks: Annotated[int | None, typer.Option(help="Ranks to cut layers for; default: the ranks of this job.")] = None,
    options: Options = None,
    as_json: AsJson = False,
) -> None:
    """Measure this machine: messages, sums, and every layer shape of a model under every cut.

    Start it as you would start a run: all ranks of a node measure at the same time. Times of layers are stored on disk,
    so a profile that was interrupted, or used up its budget, continues where it stopped.

    \b
    Examples:
      halograd profile mesh_1k --threads 2 --out machine.toml
      mpiexec -n 2 halograd profile resnet50 --batch 8 --out machine.toml --budget 120
    """
    from ..measuring import Measuring
    from ..models import build
    from ..perfmodel.cost.network_costs import works_of

    begin = time.perf_counter()
    network = build(model, **parse_options(options or ()))
    check_counts(batch=batch, ranks=ranks, threads=how.threads, budget=how.budget)
    with open_communicator(how.transport) as comm, _backend(how) as backend:
        # Before minutes of measurements, not after them.
        with comm.agreement():
            if comm.rank == 0:
                check_output(out, "--out")
        cut = ranks or comm.size
        measuring = Measuring(comm, backend, network, batch, cut, how.dtype, how.autotune, how.cache)
        machine_profile = measuring.machine()
        # The budget is that of the whole command, messages and device included.
        left = None if how.budget is None else max(0.0, how.budget - (time.perf_counter() - begin))
        # First the cuts that the planner needs, then the others.
        quick, every = (
            works_of(network, batch, cut, machine_profile.machine, how.dtype, full) for full in (False, True)
        )
        layers = measuring.layers({**quick, **every}.values(), left)
        if comm.rank == 0:
            machine_profile.save(out)
            show = _as_json if as_json else _as_text
            print(show(machine_profile, layers, out, measuring.path, time.perf_counter() - begin), flush=True)


@contextmanager
def _backend(how: MeasuringOptions) -> Iterator[Any]:
    from ..kernels import BACKENDS, BackendOptions, KernelError

    kind = BACKENDS.find(how.kernels, "--kernels")
    try:
        backend = kind.open(BackendOptions(how.threads, how.autotune))
    except KernelError as error:
        raise UserError(f"--kernels: {error}") from error
    with backend:
        if how.dtype not in backend.dtypes:
            raise UserError(
                f"--dtype: expected one of {', '.join(backend.dtypes)} of {how.kernels}, got {how.dtype!r}; "
                f"{backend.dtype_remedy}"
            )
        yield backend


def _as_json(profile: Profile, layers: Coverage, out: Path, path: Path, seconds: float) -> str:
    record = {"machine": str(out), "cache": str(path), "seconds": seconds, "layers": vars(layers), **profile.to_dict()}
    return json.dumps(record)


def _as_text(profile: Profile, layers: Coverage, out: Path, path: Path, seconds: float) -> str:
    machine = profile.machine
    lines = [f"{machine.device}; {profile.ranks} ranks, transport {profile.transport}"]
    rates = ", ".join(f"{k} {v / 1e9:.1f} Gflop/s" for k, v in machine.peak_flops.items())
    lines.append(
        f"  per rank: {rates}, {machine.memory_bandwidth / 1e9:.1f} GB/s, smallest kernel {_us(machine.launch)}"
    )
    fits = [(f"exchange, {level}", fit) for level, fit in profile.face.items()]
    fits += [(f"exchange of columns, {level}", fit) for level, fit in profile.strided.items()]
    fits += [(f"sum over {n} ranks", fit) for n, fit in profile.reduction.items()]
    fits += [(f"  behind computation, {n} ranks", fit) for n, fit in profile.reduction_behind.items()]
    fits += [(f"  exposed part of it, {n} ranks", fit) for n, fit in profile.reduction_exposed.items()]
    for what, fit in fits:
        line = " or ".join(
            f"{_us(line_fit.alpha)} + {line_fit.beta * 1e9:.3f} ns/B" for line_fit in (fit.short, fit) if line_fit
        )
        lines.append(f"  {what:<34} {line}, fit within {fit.error:.0%}")
    lines.append(f"  update {profile.update * 1e9:.3f} ns/B of parameters; per layer {_us(profile.layer_overhead)}")
    counts = f"{layers.measured} layer shapes measured, {layers.known} known before"
    if layers.left:
        counts += f", {layers.left} left: the budget is spent; run the same command again to continue"
    return "\n".join([*lines, f"{out}: written after {seconds:.0f} s; {counts} (in {path})"])


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us"


# -- sums -----------------------------------------------------------------------------------------


def allreduce(
    sizes: Annotated[
        list[str] | None, typer.Option("--size", metavar="SIZE", help="Size of a sum, such as 4MiB; may be repeated.")
    ] = None,
    methods: Annotated[
        list[str] | None, typer.Option("--method", metavar="NAME", help="A method of summing; may be repeated.")
    ] = None,
    codecs: Annotated[
        list[str] | None, typer.Option("--codec", metavar="NAME", help="A codec of the sums; may be repeated.")
    ] = None,
    transports: Annotated[
        list[str] | None, typer.Option("--transport", metavar="NAME", help="A transport; may be repeated.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions of each sum; the best time counts.")] = 7,
    as_json: AsJson = False,
) -> None:
    """Time sums over all ranks: every size, by the method of every scheme, over every transport.

    Encoded sums (reduction.payload) are ordered sums, so a codec is timed with the method `ordered`.

    Each sum is timed alone, and overlapped with a longer computation; the remaining wait is the part that cannot be
    hidden. A line alpha + beta * bytes is fitted to the sizes.

    \b
    Examples:
      mpiexec -n 4 halograd bench allreduce
      mpiexec -n 4 halograd bench allreduce --transport auto --size 1MiB --size 64MiB --json
      mpiexec -n 4 halograd bench allreduce --codec bfloat16 --codec half.py:Half
    """
    nbytes = [_parse_size(text) for text in sizes or SIZES]
    chosen = _chosen(methods, codecs)
    rows: list[dict[str, Any]] = []
    title = ""
    for transport in transports or ("auto", "mpi"):
        with open_communicator(transport) as comm:
            rows += [_measured(comm, transport, method, nbytes, rounds) for method in chosen]
            nodes = len(set(comm.nodes))  # collective
            where = f"{comm.size} ranks on {nodes} node{'s' * (nodes > 1)}"
            # Empty on other ranks, which therefore print nothing: below, the communicator is closed.
            title = where if comm.rank == 0 else ""
    if title and as_json:
        print(json.dumps({"ranks": title, "units": {"bytes": "B", "seconds": "s"}, "sums": rows}))
    elif title:
        print("\n".join(_sums(title, nbytes, rows)))


def _measured(comm: Communicator, transport: str, method: Method, sizes: Sequence[int], rounds: int) -> dict[str, Any]:
    """Time one method of summing; the result has the reason instead of times if it is not possible. Collective."""
    from ..comm import CommError
    from ..perfmodel.profile.messages import MessageTimer

    name, codec = method.name, method.codec
    row = {"transport": transport, "method": name, "codec": str(codec), "schemes": SERVES[name]}
    if comm.size == 1:
        return row | {"refused": "a single rank has no sums"}
    try:
        timer = MessageTimer(comm, sizes, rounds)
        waited = timer.reduction(name, codec)
        _, left = timer.reduction_behind(waited, name, codec)
    except CommError as error:
        return row | {"refused": str(error)}
    return row | {"waited": waited.to_dict(), "left": left.to_dict()}


def _sums(title: str, sizes: Sequence[int], results: Sequence[dict[str, Any]]) -> list[str]:
    heading = ["transport", "method", "codec", *map(bytes_text, sizes), "alpha", "beta", "fit", "left alpha", "beta"]
    units = ["", "", "", *["[ms]"] * len(sizes), "[us]", "[ns/B]", "", "[us]", "[ns/B]"]
    rows = [units]
    for row in results:
        label = [row["transport"], row["method"], row["codec"]]
        if "refused" in row:
            rows.append([*label, *["-"] * (len(heading) - 3)])
            continue
        waited, left = row["waited"], row["left"]
        times = [f"{1e3 * t:.3f}" for t in waited["seconds"]]
        rows.append([*label, *times, *_line(waited), f"{waited['error']:.0%}", *_line(left)])
    lines = [f"{title}: a sum without computation, and its exposed part with long computation", ""]
    return [*lines, *table(heading, rows, left=3), *_refusals(results)]


def _line(fit: dict[str, Any]) -> tuple[str, str]:
    return f"{1e6 * fit['alpha']:.1f}", f"{1e9 * fit['beta']:.3f}"


def _refusals(rows: Sequence[dict[str, Any]]) -> list[str]:
    reasons = dict.fromkeys(f"{row['transport']}: {row['refused']}" for row in rows if "refused" in row)
    return ["", *reasons] if reasons else []


def _parse_size(text: str) -> int:
    """Return the size [B] in a string, rounded down to whole float32 elements, of which there must be at least one."""
    from ..planning import parse_memory

    try:
        nbytes = parse_memory(text)
    except UserError:
        nbytes = None
    if nbytes is None or nbytes < 4:
        raise UserError(f"--size: expected a size of at least 4 bytes, such as 256KiB or 4MiB, got {text!r}")
    # Whole float32 elements.
    return int(nbytes) // 4 * 4


def _chosen(methods: Sequence[str] | None, codecs: Sequence[str] | None) -> list[Method]:
    """Return the methods to time: by default every method without encoding, and the ordered method with each codec."""
    for name in methods or ():
        if name not in METHODS:
            raise UserError(f"--method: expected one of {', '.join(METHODS)}, got {name!r}")
    chosen = []
    # A method without --codec is timed without encoding, in float32.
    for codec in [CODECS.make(name, "--codec") for name in codecs or (["float32"] if methods else CODECS.names)]:
        # Only ordered sums encode what they send.
        names = methods or (METHODS if codec.identity else ["ordered"])
        chosen += [carrying(name, codec) for name in names if codec.identity or METHODS[name].encodes]
    return list(dict.fromkeys(chosen))
