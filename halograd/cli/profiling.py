"""`halograd profile`: what messages, kernels and layers take on this machine."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from halograd.comm import Communicator
    from halograd.layers import Network
    from halograd.perfmodel.layer_work import LayerKey, LayerWork
    from halograd.perfmodel.profile import Conditions, Crowd, Measured, Profile

__all__ = ["Overheads", "measure_overheads", "open_communicator", "profile"]

#: Layers whose times are written to the cache at a time.
EVERY = 4
#: Convolutions with batch norm in the network that shows what a step takes beside its layers.
UNITS = 12


def profile(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model by name, such as mesh_1k or resnet50.")],
    out: Annotated[Path, typer.Option(metavar="FILE.toml", help="The machine file to write.")] = Path("machine.toml"),
    batch: Annotated[int, typer.Option(help="Samples of a global batch.")] = 1,
    ranks: Annotated[int | None, typer.Option(help="Ranks to cut layers for; those that run, if left out.")] = None,
    options: Annotated[
        list[str] | None, typer.Option("--option", metavar="KEY=VALUE", help="An option of the model; repeatable.")
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads per rank.")] = 1,
    kernels: Annotated[str, typer.Option(help="Kernel backend.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32 or float64.")] = "float32",
    autotune: Annotated[bool, typer.Option("--autotune", help="Choose convolutions by measurement.")] = False,
    transport: Annotated[str, typer.Option(help="How messages travel.")] = "auto",
    budget: Annotated[float | None, typer.Option(help="Seconds after which no further layer is begun.")] = None,
    cache: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Of measured times; else $HALOGRAD_CACHE or ~/.cache/halograd."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure this machine: messages, sums, and every layer shape of a model under every cut.

    Start it as a run would be started: all ranks of a node measure at the same time. Times of layers are kept on
    disk, so a profile that was interrupted, or ran out of its budget, goes on where it stopped.

    \b
    Examples:
      halograd profile mesh_1k --threads 2 --out machine.toml
      mpiexec -n 2 halograd profile resnet50 --batch 8 --out machine.toml --budget 120
    """
    from halograd.cli.plan_options import check_counts
    from halograd.perfmodel.profile import cache_path

    begin = time.perf_counter()
    network = _network(model, options or [])
    check_counts(batch=batch, ranks=ranks, threads=threads, budget=budget)
    path = cache_path(cache)
    with open_communicator(transport) as comm, _backend(kernels, threads, autotune, dtype) as backend:
        found, layers = _measure(comm, backend, network, batch, ranks or comm.size, dtype, autotune, budget, path)
        if comm.rank == 0:
            found.save(out)
            show = _as_json if as_json else _as_text
            print(show(found, layers, out, path, time.perf_counter() - begin), flush=True)


def _measure(
    comm: Communicator,
    backend: Any,
    network: Network,
    batch: int,
    ranks: int,
    dtype: str,
    autotune: bool,
    budget: float | None,
    path: Path,
) -> tuple[Profile, Measured]:
    """The profile of the machine, and how far the layers of the network came. Collective."""
    from halograd.perfmodel.profile import (
        Crowd,
        LayerTimer,
        TimeCache,
        conditions_of,
        measure_layers,
        measure_machine,
        works_of,
    )

    begin = time.perf_counter()
    with comm.agreement():
        store = TimeCache(path if comm.rank == 0 else None, EVERY)
        every_cut = works_of(network, batch, ranks, dtype)
    with _bar(comm.rank == 0) as progress:
        found = measure_machine(comm, backend)
        overheads = measure_overheads(comm, backend, dtype)
        found = found.with_overheads(overheads.update, overheads.layer_overhead)
        crowd = Crowd.of(comm, backend)
        conditions = conditions_of(network, batch, ranks, backend, crowd, dtype, autotune)
        timer = LayerTimer(backend, comm, conditions.flush)
        left = None if budget is None else max(0.0, budget - (time.perf_counter() - begin))
        # First what the planner would ask for; then the other cuts.
        works = {**_asked(network, batch, ranks, dtype, found, conditions), **every_cut}
        layers = measure_layers(works, timer, store, conditions, left, progress)
        timer.close()
    return found, layers


def _asked(
    network: Network, batch: int, ranks: int, dtype: str, found: Profile, conditions: Conditions
) -> dict[LayerKey, LayerWork]:
    """The work whose time the cost model wants to know for its candidates, boundary strips among it."""
    from halograd.perfmodel.cost.problem import network_costs
    from halograd.perfmodel.cost.simulate import Training
    from halograd.perfmodel.kernel_times import MeasuredTimes, RooflineTimes
    from halograd.perfmodel.profile import TimeCache

    times = MeasuredTimes(TimeCache(None), conditions, RooflineTimes(found.machine))
    network_costs(network, batch, ranks, found.machine, times, Training(dtype=dtype))
    return times.missing


class Overheads:
    """What a step takes beside its layers; names as in `Profile`.

    Attributes
    ----------
    update
        SGD with momentum, per byte of parameters [s/B].
    layer_overhead
        What each forward or backward of a layer takes longer than by itself [s].
    """

    def __init__(self, update: float, layer_overhead: float) -> None:
        self.update, self.layer_overhead = update, layer_overhead


def measure_overheads(comm: Communicator, backend: Any, dtype: str = "float32") -> Overheads:
    """Optimizer and loop of this machine, all ranks at the same time. Collective."""
    from halograd.perfmodel.profile import Crowd

    alone = comm.split(comm.rank)
    assert alone is not None
    crowd = Crowd.of(comm, backend)
    update = _update_rate(alone, backend, dtype, crowd)
    step, layers, passes = _small_network(comm, alone, backend, dtype, crowd)
    alone.close()
    slowest = [float(comm.allreduce_scalar(t, "max")) for t in (update, max(0.0, step - layers) / passes)]
    return Overheads(*slowest)


def _update_rate(alone: Communicator, backend: Any, dtype: str, crowd: Crowd) -> float:
    """Of SGD with momentum, parameters from memory [s/B]."""
    from halograd.layers import Dense, Input, Network
    from halograd.perfmodel.profile import last_level_cache
    from halograd.training import Executor
    from halograd.training.optimizers import SGD

    features = 1024
    network = Network(Dense(features, bias=False)(Input((features,))))
    passing = backend.zeros((last_level_cache(),), "uint8")
    with Executor(network, alone, backend, 1, dtype=dtype) as executor:
        optimizer = SGD(executor.store, momentum=0.9)
        optimizer.begin_step(1e-3)
        (bucket,) = executor.store.buckets

        def run() -> None:
            optimizer.update(bucket)
            backend.synchronize()

        nbytes = features * features * executor.dtype.itemsize
        times = _times(run, crowd, lambda: passing.__iadd__(1))
        return times[len(times) // 2] / nbytes


def _small_network(
    comm: Communicator, alone: Communicator, backend: Any, dtype: str, crowd: Crowd
) -> tuple[float, float, int]:
    """A network of small layers, no two alike: its step [s], the sum of its layers [s], forward and backward passes.

    What the step takes more is the executor's loop, and code that is colder than where a layer is timed alone.
    """
    from halograd.layers import BatchNorm, Conv, Input, MeanSquaredError, Network
    from halograd.perfmodel.profile import LayerTimer, passing_bytes, works_of
    from halograd.training import Executor

    y: Any = Input((12, 12, 8))
    for i in range(UNITS):
        y = BatchNorm(activation="relu")(Conv(8 + i, 3, padding=1, bias=False)(y))
    network = Network({"loss": MeanSquaredError()(y, Input(y.shape, name="target"))})
    timer = LayerTimer(backend, comm, passing_bytes(network, 1, 1, dtype))
    layers = sum(timer.measure(work).total for work in works_of(network, 1, 1, dtype).values())
    timer.close()
    with Executor(network, alone, backend, 1, dtype=dtype) as executor:

        def step() -> None:
            executor.forward()
            executor.backward()

        # The best: another process takes its time from a whole step, but rarely from one layer.
        return _times(step, crowd, repeats=60)[0], layers, 2 * len(network.layers)


def _times(
    run: Callable[[], Any], crowd: Crowd, before: Callable[[], Any] = lambda: None, repeats: int = 25
) -> list[float]:
    """Times of `run`, the shortest first [s], after two runs that do not count; `before` is not timed."""
    times = []
    for _ in range(repeats + 2):
        before()
        begin = crowd.clock()
        run()
        times.append(crowd.clock() - begin)
    return sorted(times[2:])


# -- arguments ----------------------------------------------------------------------------------


def _network(model: str, options: Sequence[str]) -> Network:
    """The model with the options ``KEY=VALUE``."""
    from halograd.cli.plan_options import parse_options
    from halograd.models import build

    return build(model, **parse_options(options))


@contextmanager
def open_communicator(transport: str) -> Iterator[Communicator]:
    """All ranks that were launched; this process alone without a launcher."""
    from mpi4py import MPI

    from halograd.comm import Communicator
    from halograd.comm.boot import launched_size
    from halograd.comm.errors import CommError
    from halograd.comm.transports import parse_transport
    from halograd.errors import UserError

    try:
        parse_transport(transport)
    except CommError as error:
        raise UserError(f"--{error}") from error
    with Communicator(MPI.COMM_SELF if launched_size() is None else MPI.COMM_WORLD, transport) as comm:
        yield comm


@contextmanager
def _backend(name: str, threads: int, autotune: bool, dtype: str) -> Iterator[Any]:
    from halograd.errors import UserError
    from halograd.kernels import KernelError, get_backend

    try:
        backend = get_backend(name, threads, autotune)
    except KernelError as error:
        raise UserError(f"--kernels: {error}") from error
    with backend:
        if dtype not in backend.dtypes:
            raise UserError(
                f"--dtype: expected one of {', '.join(backend.dtypes)} of {name}, got {dtype!r}; {backend.dtype_remedy}"
            )
        yield backend


@contextmanager
def _bar(speaks: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on rank 0's terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not (speaks and console.is_terminal)) as bar:
        task = bar.add_task("messages", total=None)
        yield lambda done, total: bar.update(task, description="layers", completed=done, total=total)


# -- output -------------------------------------------------------------------------------------


def _as_json(found: Profile, layers: Measured, out: Path, path: Path, seconds: float) -> str:
    record = {"machine": str(out), "cache": str(path), "seconds": seconds, "layers": vars(layers), **found.to_dict()}
    return json.dumps(record)


def _as_text(found: Profile, layers: Measured, out: Path, path: Path, seconds: float) -> str:
    machine = found.machine
    lines = [f"{machine.device}; {found.ranks} ranks, transport {found.transport}"]
    rates = ", ".join(f"{k} {v / 1e9:.1f} Gflop/s" for k, v in machine.peak_flops.items())
    lines.append(
        f"  per rank: {rates}, {machine.memory_bandwidth / 1e9:.1f} GB/s, smallest kernel {_us(machine.launch)}"
    )
    fits = [(f"exchange, {level}", fit) for level, fit in found.face.items()]
    fits += [(f"exchange of columns, {level}", fit) for level, fit in found.strided.items()]
    fits += [(f"sum over {n} ranks", fit) for n, fit in found.reduction.items()]
    fits += [(f"  behind computation, {n} ranks", fit) for n, fit in found.reduction_behind.items()]
    fits += [(f"  of it left to wait for, {n} ranks", fit) for n, fit in found.reduction_exposed.items()]
    for what, fit in fits:
        lines.append(f"  {what:<34} {_us(fit.alpha)} + {fit.beta * 1e9:.3f} ns/B, fit within {fit.error:.0%}")
    lines.append(f"  update {found.update * 1e9:.3f} ns/B of parameters; per layer {_us(found.layer_overhead)}")
    told = f"{layers.measured} layer shapes measured, {layers.known} known before"
    if layers.left:
        told += f", {layers.left} left: the budget is spent; the same command goes on"
    return "\n".join([*lines, f"{out}: written after {seconds:.0f} s; {told} (in {path})"])


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us"
