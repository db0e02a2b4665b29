"""Measurements on this machine: messages, device, layers of a network, and steps of a plan and of baselines.

`halograd profile` and ``strategy = "auto"`` use the same measurements. Timed steps decide between strategies with
similar predictions. This module is above `training`, because it times the executor.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from .comm import Communicator
from .documents import writing
from .errors import UserError
from .layers import BatchNorm, Conv, Dense, Input, MeanSquaredError, Network, Strategy
from .output import progress_bar, split_text
from .perfmodel.cost.network_costs import works_of
from .perfmodel.cuts import BASELINES, GRID
from .perfmodel.kernel_times import LayerWork, MeasuredTimes, RooflineTimes
from .perfmodel.machine import Machine
from .perfmodel.plans import Plan
from .perfmodel.profile.cache import Conditions, Oversubscription, TimeCache, cache_path
from .perfmodel.profile.device import measure_machine, rank_memory
from .perfmodel.profile.layers import (
    Coverage,
    LayerTimer,
    last_level_cache,
    measure_layers,
    passing_bytes,
)
from .perfmodel.profile.record import Profile, record_path
from .training import Executor
from .training.optimizers import SGD

__all__ = [
    "Measuring",
    "StepTrial",
    "fastest_or_first",
    "measure_overheads",
    "measure_steps",
    "near_baselines",
]

#: Number of layers whose times are written to the cache at once.
EVERY = 4
#: Number of convolutions with batch norm in the network that measures the overhead of a step.
UNITS = 12


class Measuring:
    """Measurements of this machine for a network, new or stored on disk. Methods but `times` are collective on `comm`.

    Times of layers are stored on disk, so an interrupted measurement, or one that used up its budget, can be continued.

    Parameters
    ----------
    comm
        All ranks that measure together.
    kernels
        Backend.
    network, batch
        Network whose layers are measured, and global number of samples.
    ranks
        Number of ranks of the planned run; None: the size of `comm`.
    dtype
        Dtype of the computation.
    autotune
        Whether the backend chooses convolutions by measurement.
    folder
        Folder of measured times; None: the default.

    Raises
    ------
    UserError
        The times on disk cannot be read; on all ranks.
    """

    def __init__(
        self,
        comm: Communicator,
        kernels: Any,
        network: Network,
        batch: int,
        ranks: int | None = None,
        dtype: str = "float32",
        autotune: bool = False,
        folder: Path | None = None,
    ) -> None:
        self.comm, self.kernels, self.dtype = comm, kernels, dtype
        self.path, self._oversubscription, self._autotune = (
            cache_path(folder),
            Oversubscription.of(comm, kernels),
            autotune,
        )
        flush = passing_bytes(network, batch, ranks or comm.size, dtype)
        self.conditions = Conditions.here(kernels, self._oversubscription, autotune, flush)
        # Only rank 0 reads and writes the times on disk, and decides what is measured.
        with comm.agreement():
            self.cache = TimeCache(self.path if comm.rank == 0 else None, EVERY)

    def machine(self) -> Profile:
        """Measure messages, device and overheads; return them as the profile of the machine."""
        profile = replace(measure_machine(self.comm, self.kernels), autotune=self._autotune)
        return profile.with_overheads(*measure_overheads(self.comm, self.kernels, profile.machine, self.dtype))

    def machine_file(self) -> Path:
        """Return the path of this machine's file: one per device, library, ranks, nodes, transport and dtype."""
        import platform

        nodes = sorted(self.comm.allgather_objects(platform.node()))
        conditions = Conditions.here(self.kernels, self._oversubscription, self._autotune)
        # All that changes the measured times is in the name, so a file of other conditions is not reused.
        text = "|".join([conditions.text, self.comm.transport, self.dtype, *nodes])
        name = hashlib.sha256(text.encode()).hexdigest()[:12]
        # The folder of the cache may differ between nodes: rank 0 writes the file, so its path counts.
        return Path(self.comm.bcast(str(self.path.parent / "machines" / f"{self.comm.size}-ranks-{name}.toml")))

    def known_machine(self, path: Path) -> Machine | None:
        """Return the machine from a stored file, with the memory that this job may use; None if it must be measured."""
        # Control groups and Slurm's allocation differ between jobs.
        machine, memory = None, rank_memory(self.comm, self.kernels.device)
        if self.comm.rank == 0 and path.exists() and record_path(path).exists():
            try:
                machine = Profile.load(path).machine
            except UserError:
                machine = None  # damaged: measure again
        machine = self.comm.bcast(machine)
        return None if machine is None else replace(machine, memory=memory)

    def keep_machine(self, path: Path) -> Machine:
        """Measure the machine, and store it in a file; return it with the memory that this job may use."""
        profile = self.machine()
        with self.comm.agreement():
            if self.comm.rank == 0:
                with writing(f"cache {path.parent}", "choose another with HALOGRAD_CACHE"):
                    path.parent.mkdir(parents=True, exist_ok=True)
                profile.save(path)
        machine = self.known_machine(path)
        assert machine is not None
        return machine

    def times(self, machine: Machine) -> MeasuredTimes:
        """Return kernel times: those known on rank 0; other layers are estimated, and listed as missing. Local."""
        return MeasuredTimes(self.cache, self.conditions, RooflineTimes(machine))

    def layers(
        self, works: Iterable[LayerWork], budget: float | None = None, again: bool = False, show: bool = True
    ) -> Coverage:
        """Measure the layers whose times are unknown; return how many were measured, known before, and left.

        Parameters
        ----------
        works
            Layers on local blocks; the same on all ranks.
        budget
            Time after which no further layer is measured [s]; None: no limit.
        again
            Whether to measure layers with known times too, and store the mean.
        show
            Whether to show a progress bar on the terminal of rank 0.
        """
        timer = LayerTimer(self.kernels, self.comm, self.conditions.flush)
        with progress_bar("layers", show and self.comm.rank == 0) as progress:
            state = measure_layers(works, timer, self.cache, self.conditions, budget, progress, again)
        timer.close()
        return state


# -- overhead of a step ---------------------------------------------------------------------------


def measure_overheads(
    comm: Communicator, backend: Any, machine: Machine, dtype: str = "float32"
) -> tuple[float, float]:
    """Measure the overheads of optimizer and executor, on all ranks at the same time. Collective.

    Returns
    -------
    tuple of float
        Time of SGD with momentum per byte of parameters [s/B]; additional time of a layer's forward or backward in a
        step, compared with the layer alone [s].
    """
    # All ranks measure at once, as in a run, but none waits for messages of another.
    alone = comm.split(comm.rank)
    assert alone is not None
    oversubscription = Oversubscription.of(comm, backend)
    update = _update_rate(alone, backend, dtype, oversubscription)
    network = _small_network()
    layers = _sum_of_layers(network, comm, backend, machine, dtype)
    step = _step(network, alone, backend, dtype, oversubscription)
    alone.close()
    # Forward and backward of each layer.
    passes = 2 * len(network.layers)
    return float(comm.allreduce_scalar(update, "max")), float(
        comm.allreduce_scalar(max(0.0, step - layers) / passes, "max")
    )


def _update_rate(alone: Communicator, backend: Any, dtype: str, oversubscription: Oversubscription) -> float:
    """Return the time of SGD with momentum per byte of parameters, which are read from main memory [s/B]."""
    # 4 MiB of weights in float32.
    features = 1024
    network = Network(Dense(features, bias=False)(Input((features,))))
    # Changing this array before an update removes the parameters from the cache.
    passing = backend.zeros((last_level_cache(),), "uint8")
    with Executor(network, alone, backend, 1, dtype=dtype) as executor:
        optimizer = SGD(executor.store, momentum=0.9)
        optimizer.begin_step(1e-3)
        # One parameter without bias, so one bucket.
        (bucket,) = executor.store.buckets

        nbytes = features * features * executor.dtype.itemsize
        run, before = partial(optimizer.update, bucket), partial(passing.__iadd__, 1)
        return median(_times(run, backend, oversubscription, before)) / nbytes


def _small_network() -> Network:
    """Return a network of small layers with different numbers of channels."""
    # Each unit has other channels: layers of equal shapes have one key, and would count once in the sum of times.
    y: Any = Input((12, 12, 8))
    for i in range(UNITS):
        y = BatchNorm(activation="relu")(Conv(8 + i, 3, padding=1, bias=False)(y))
    return Network({"loss": MeanSquaredError()(y, Input(y.shape, name="target"))})


def _sum_of_layers(network: Network, comm: Communicator, backend: Any, machine: Machine, dtype: str) -> float:
    """Return the sum of the times of all layers, each timed alone [s].

    A step takes longer than this sum, because of the executor's loop and of code that is not in the cache.
    """
    timer = LayerTimer(backend, comm, passing_bytes(network, 1, 1, dtype))
    layers = sum(timer.measure(work).total for work in works_of(network, 1, 1, machine, dtype).values())
    timer.close()
    return layers


def _step(network: Network, alone: Communicator, backend: Any, dtype: str, oversubscription: Oversubscription) -> float:
    with Executor(network, alone, backend, 1, dtype=dtype) as executor:

        def step() -> None:
            executor.forward()
            executor.backward()

        # Not the best step: the times of layers are means, so a step would seem to take less than its layers.
        return median(_times(step, backend, oversubscription, repeats=60))


def _times(
    run: Callable[[], Any],
    backend: Any,
    oversubscription: Oversubscription,
    before: Callable[[], Any] = lambda: None,
    repeats: int = 25,
) -> list[float]:
    """Return times of `run` [s], after two warm-up runs. `before` runs before each of them and is not timed."""
    times = []
    for _ in range(repeats + 2):
        before()
        backend.synchronize()  # a device may still work on what `before` has enqueued
        begin = oversubscription.clock()
        run()
        backend.synchronize()
        times.append(oversubscription.clock() - begin)
    return times[2:]


#: Steps of a baseline are measured if its prediction is at most this fraction longer than that of the plan.
NEAR = 0.25
#: Minimum gain of a baseline over the plan, as a fraction of the step, to be chosen.
WORTH = 0.02
#: Number of rounds in which steps of each strategy are timed, and seconds per round; the fastest round counts.
TRIALS, SECONDS = 2, 0.5
#: Smallest and largest number of steps in a round.
LEAST, MOST = 3, 50

Opened = AbstractContextManager[Callable[[], object]]


@dataclass(frozen=True)
class StepTrial:
    """Plan with which a run trains, and the step times by which it was chosen.

    Attributes
    ----------
    plan
        Chosen plan: the fastest one, or the planner's if that is almost as fast.
    name
        Name of the plan in `seconds`.
    seconds
        Time of a step under each strategy that was tried [s]; empty without trials.
    alone
        Time of a step on one rank with the threads of all ranks [s]; None if it was not tried.
    """

    plan: Plan
    name: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    alone: float | None = None

    def lines(self, threads: int) -> list[str]:
        """Return a description of the trial in lines; `threads` is the number per rank."""
        if not self.seconds:
            return []
        tried = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in self.seconds.items())
        lines = [f"steps tried: {tried}; training with {self.name}"]
        if self.alone is not None:
            together, ranks = self.seconds[self.name], self.plan.ranks
            text = f"1 rank x {ranks * threads} threads would take {1e3 * self.alone:.2f} ms"
            # A smaller gain may be noise.
            if self.alone < (1 - WORTH) * together:
                text += f", {together / self.alone:.2f} x as fast: start one, with --threads {ranks * threads}"
            lines.append(f"cores: {split_text(ranks, threads)} take {1e3 * together:.2f} ms; {text}")
        return lines


def near_baselines(plan: Plan) -> list[str]:
    """Return the names of baselines and the grid that fit and may be as fast as a plan, the fastest first. Local."""
    slowest = (1 + NEAR) * plan.step_seconds
    near = [a for a in plan.alternatives if a.name in (*BASELINES, GRID) and a.fits and a.step_seconds <= slowest]
    # Strategies of equal time and memory, to the byte, have the same cuts; one of them is enough.
    costs = [(plan.step_seconds, plan.prediction.memory_bytes), *((a.step_seconds, a.memory_bytes) for a in near)]
    different = [a for i, a in enumerate(near, 1) if costs[i] not in costs[:i]]
    return [a.name for a in sorted(different, key=lambda a: a.step_seconds)]


def measure_steps(
    comm: Communicator, strategies: Mapping[str, Strategy], opened: Callable[[Strategy], Opened]
) -> dict[str, float]:
    """Time a step under each strategy, on the slowest rank [s]. Collective over `comm`.

    Parameters
    ----------
    strategies
        Strategies by name, in the same order on all ranks.
    opened
        Function that returns a context manager for a strategy, which yields a function that runs one step. Only one is
        open at a time.
    """
    fastest = dict.fromkeys(strategies, float("inf"))
    # Rounds alternate between strategies, so that a load of the machine that comes and goes affects all of them.
    for _ in range(TRIALS):
        for name, strategy in strategies.items():
            with opened(strategy) as step:
                fastest[name] = min(fastest[name], _median_step(comm, step))
    return fastest


def _median_step(comm: Communicator, step: Callable[[], object]) -> float:
    def timed() -> float:
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin

    timed()  # warm-up: touches pages, creates primitives
    slowest = float(comm.allreduce_scalar(timed(), "max"))
    # Steps communicate, so all ranks must run the same number: it follows from the time of the slowest.
    count = max(LEAST, min(MOST, int(SECONDS / max(slowest, 1e-6))))
    return float(comm.allreduce_scalar(median([timed() for _ in range(count)]), "max"))


def fastest_or_first(seconds: Mapping[str, float]) -> str:
    """Return the name of the fastest strategy, or the first name if that is almost as fast. Local."""
    favorite = next(iter(seconds))
    best = min(seconds, key=lambda name: seconds[name])
    return best if seconds[best] < (1 - WORTH) * seconds[favorite] else favorite
