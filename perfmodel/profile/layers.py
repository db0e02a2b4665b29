"""Times of layers, each measured as it runs within a step: data from memory, code and threads warm."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...layers import Network
from ..kernel_times import LayerTime, LayerWork
from .bound import BoundLayer
from .cache import Conditions, Crowd, TimeCache

if TYPE_CHECKING:
    from ...comm import Communicator

__all__ = ["Coverage", "LayerTimer", "last_level_cache", "measure_layers", "passing_bytes"]

REPEATS, FEWEST = 10, 3
#: Maximum time of a layer's repetitions [s]; there are at least `FEWEST` repetitions.
ENOUGH = 5.0
#: Code and objects of one layer, forward and backward: oneDNN generates code for every shape [B]. With it, the sum of
#: the layers of a network of 142 small layers is 12 % below its step; without it, half of the step is missing.
CODE = 128 << 10
#: Flushed bytes if the size of the cache is unknown [B], and the largest size that makes a difference.
CACHE, LARGEST = 32 << 20, 64 << 20


class LayerTimer:
    """Timer of layers on all ranks at the same time, so that they share the memory of their node as in a run.

    Between two uses of a layer's data in a step, the data of all other layers pass through the cache; the output of the
    layer before is still in the cache. So each repetition flushes the cache, runs a twin of the layer (which warms code
    and threads but not the data), writes the input (or the gradient of the output) again, and times one pass. On a
    network of 35 layers the sum of such times is within 3 % of the measured step; repetitions of each layer on the same
    arrays give 12 % less.

    Parameters
    ----------
    kernels
        Backend.
    comm
        All ranks that measure together. Its methods are collective over them.
    flush
        Bytes that pass through the cache [B]; 0 for networks whose data stay in it.
    repeats
        Number of repetitions of a layer, if they do not take too long.
    """

    def __init__(self, kernels: Any, comm: Communicator, flush: int, repeats: int = REPEATS) -> None:
        self.kernels, self.comm, self.repeats = kernels, comm, repeats
        self._crowd = Crowd.of(comm, kernels)
        alone = comm.split(comm.rank)
        assert alone is not None
        self._alone = alone
        self._passing = kernels.zeros((flush,), "uint8")

    def measure(self, work: LayerWork) -> LayerTime:
        """Return the typical times of one layer, the same on all ranks. Collective.

        Each repetition counts on its slowest rank.
        """
        with self._bind(work) as bound:
            timed = _Timed(bound, self.kernels, self._crowd)
            rough = self._rough(timed)
            if not self._needs_twin(work, bound):
                return self._repeat(timed, None, rough)
            with self._bind(work) as twin:
                twin.run()
                return self._repeat(timed, twin, rough)

    def close(self) -> None:
        """Free all resources. Collective."""
        self._alone.close()

    def _bind(self, work: LayerWork) -> BoundLayer:
        return BoundLayer(
            work.layer,
            work.inputs,
            work.dtype,
            self.kernels,
            self._alone,
            trainable=work.trainable,
            input_gradient=work.input_gradient,
            spread=work.spread,
        )

    def _needs_twin(self, work: LayerWork, bound: BoundLayer) -> bool:
        """Return whether a twin is needed.

        It is not if all data stay in the cache, nor for large layers, whose code is negligible. A loss runs once in a
        step: its code is as cold as its data.
        """
        flushed = len(self._passing)
        return flushed > 0 and bound.memory_bytes <= 8 * flushed and not work.layer.compares(1)

    def _rough(self, timed: _Timed) -> float:
        """Return the time of both passes on the slowest rank, after a warm-up [s]."""
        timed.bound.run()
        seconds = timed.forward()
        timed.bound.write_dy()
        return float(self.comm.allreduce_scalar(seconds + sum(timed.backward()), "max"))

    def _repeat(self, timed: _Timed, twin: BoundLayer | None, rough: float) -> LayerTime:
        repeats = max(FEWEST, min(self.repeats, int(ENOUGH / max(rough, 1e-9))))
        samples = self.comm.allgather_objects([self._once(timed, twin) for _ in range(repeats)])
        # The slowest rank counts each time: in a step, ranks synchronize after most layers and wait for the slowest.
        return LayerTime(*(typical(seconds) for seconds in np.max(samples, axis=0).T.tolist()))

    def _meet(self) -> None:
        """Synchronize the ranks before a measurement, unless they share cores.

        A waiting rank would then let other ranks run between a layer and the one before it.
        """
        if not self._crowd.in_turn:
            self.comm.barrier()

    def _once(self, timed: _Timed, twin: BoundLayer | None) -> tuple[float, float, float]:
        """Run and time one forward and one backward pass: forward, data and filter gradient [s]."""
        bound = timed.bound
        self._flush()
        if twin is not None:
            twin.forward()
        if bound.input_gradient:
            bound.write_inputs()  # no layer has just written the samples
        self._meet()
        forward = timed.forward()
        if not bound.trainable:
            return forward, 0.0, 0.0
        self._flush()
        if twin is not None:
            twin.run()
        bound.write_dy()
        self._meet()
        return (forward, *timed.backward())

    def _flush(self) -> None:
        """Read and write as many bytes as pass between two uses of a layer's data."""
        self._passing += 1


class _Timed:
    """A bound layer whose passes are timed, with the filter gradient separately."""

    def __init__(self, bound: BoundLayer, kernels: Any, crowd: Crowd) -> None:
        self.bound, self._kernels, self._crowd = bound, kernels, crowd
        self._of_weights = 0.0

    def _clock(self, run: Callable[[], object]) -> float:
        begin = self._crowd.clock()
        run()
        self._kernels.synchronize()
        return self._crowd.clock() - begin

    def forward(self) -> float:
        """Run and time the forward pass [s]."""
        return self._clock(self.bound.forward)

    def backward(self) -> tuple[float, float]:
        """Run and time the backward pass: the filter gradient, and all other work, separately [s]."""
        if not self.bound.trainable:
            return 0.0, 0.0
        self._of_weights = 0.0
        total = self._clock(lambda: self.bound.backward(self._time_weights))
        return max(total - self._of_weights, 0.0), self._of_weights

    def _time_weights(self, call: Callable[[], object]) -> None:
        self._of_weights += self._clock(call)


def typical(seconds: Sequence[float]) -> float:
    """Return the mean of all times except the longest tenth [s].

    It is not the median: the time of a step of a hundred layers is the sum of means, and times have a tail. On a shared
    machine the sum of medians is some 5 to 10 % below a median step.
    """
    kept = sorted(seconds)[: max(1, len(seconds) - max(1, len(seconds) // 10))]
    return sum(kept) / len(kept)


def last_level_cache() -> int:
    """Return the size of the largest cache of this machine's processor, up to the size that makes a difference [B]."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text.endswith("K") and text[:-1].isdigit():
            sizes.append(int(text[:-1]) << 10)
    return min(max(sizes, default=CACHE), LARGEST)


def passing_bytes(network: Network, batch: int, ranks: int, dtype: str = "float32") -> int:
    """Return the bytes that pass through a rank's cache between two uses of a layer's data, as a power of two [B].

    These are the values and gradients of one step, all parameters, and the code of the kernels; at most the size of the
    cache, because more makes no difference. Networks of similar size have the same number, and share measured times.
    """
    values = sum(math.prod(node.shape) for node in network.nodes) * batch // ranks
    nbytes = 2 * (values + network.parameter_count) * np.dtype(dtype).itemsize + CODE * len(network.nodes)
    return min(1 << max(nbytes.bit_length() - 1, 0), last_level_cache())


# -- as many as a budget allows ---------------------------------------------------------------------


@dataclass
class Coverage:
    """Progress of the measurement of layers.

    Attributes
    ----------
    known, measured, left
        Numbers of keys in the cache before, of keys measured now, and of keys that the budget did not allow.
    seconds
        Time spent [s].
    """

    known: int = 0
    measured: int = 0
    left: int = 0
    seconds: float = 0.0


def measure_layers(
    works: Iterable[LayerWork],
    timer: LayerTimer,
    cache: TimeCache,
    conditions: Conditions,
    budget: float | None = None,
    progress: Callable[[int, int], None] | None = None,
    again: bool = False,
) -> Coverage:
    """Measure layers that the cache lacks. Collective over the ranks of `timer`; rank 0 reads and writes the cache.

    Parameters
    ----------
    works
        Layers on local blocks; the same on all ranks.
    timer
        Timer of the layers.
    cache, conditions
        Cache of the times, and their conditions. Measured times stay even if the run is interrupted.
    budget
        Time after which no further layer is started [s]; None: no limit.
    progress
        Function that is called on rank 0 with the number of finished keys and of all keys.
    again
        Whether to measure layers in the cache again, and store the mean.
    """
    comm, begin = timer.comm, time.perf_counter()
    todo = list(works)
    wanted = comm.bcast([again or cache.get(conditions, work.key) is None for work in todo])
    state = Coverage(known=wanted.count(False))
    try:
        for done, (work, missing) in enumerate(zip(todo, wanted)):
            _tell(progress, comm, done, len(todo))
            if not missing:
                continue
            if comm.bcast(budget is not None and time.perf_counter() - begin > budget):
                state.left += 1
                continue
            found = timer.measure(work)
            state.measured += 1
            if comm.rank == 0:
                _keep(cache, conditions, work.key, found)
    finally:
        if comm.rank == 0:
            cache.flush()
    _tell(progress, comm, len(todo), len(todo))
    state.seconds = time.perf_counter() - begin
    return state


def _keep(cache: TimeCache, conditions: Conditions, key: str, found: tuple[float, ...]) -> None:
    """Store the time, or its mean with the earlier time."""
    before = cache.get(conditions, key)
    cache.put(conditions, key, found if before is None else [(a + b) / 2 for a, b in zip(before, found)])


def _tell(progress: Callable[[int, int], None] | None, comm: Communicator, done: int, total: int) -> None:
    if progress is not None and comm.rank == 0:
        progress(done, total)
