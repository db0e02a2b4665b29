"""Times of layers, each measured under the conditions of a step: most data not in the cache, the library loaded, and
its threads running.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...layers import Network
from ..kernel_times import LayerTime, LayerWork
from .bound import BoundLayer
from .cache import Conditions, Oversubscription, TimeCache

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
    previous layer is still in the cache. So each repetition flushes the cache, runs a second instance of the layer with
    one sample more (which warms the library and threads, but neither the data nor the code that kernels generate for
    their shapes), writes the input (or the gradient of the output) again, and times one pass. On a network of 35 layers
    the sum of such times is within 3 % of the measured step; repetitions of each layer on the same arrays give 12 %
    less.

    Parameters
    ----------
    kernels
        Backend.
    comm
        All ranks that measure together; the constructor and all methods of the timer are collective over them.
    flush
        Bytes that pass through the cache before each pass [B]; 0 for networks whose data stay in the cache.
    repeats
        Number of repetitions of a layer, if they do not take too long.
    """

    def __init__(self, kernels: Any, comm: Communicator, flush: int, repeats: int = REPEATS) -> None:
        self.kernels, self.comm, self.repeats = kernels, comm, repeats
        self._oversubscription = Oversubscription.of(comm, kernels)
        # Layers are lowered for one rank: a pass sends nothing.
        alone = comm.split(comm.rank)
        assert alone is not None
        self._alone = alone
        self._passing = kernels.zeros((flush,), "uint8")

    def measure(self, work: LayerWork) -> LayerTime:
        """Return the times of one layer (:func:`typical`), the same on all ranks. Collective.

        Each repetition counts with the time of its slowest rank, because in a step ranks synchronize after most layers.
        """
        with ExitStack() as stack:
            bound = stack.enter_context(self._bind(work))
            # The first run is slower: libraries generate code, and memory gets its pages.
            bound.run()
            seconds = self._clock(bound.forward)
            bound.write_dy()
            # The maximum, so that all ranks repeat equally often.
            rough = float(self.comm.allreduce_scalar(seconds + sum(self._backward(bound)), "max"))
            twin, flushed = None, len(self._passing)
            # No twin if all data stay in the cache, nor for large layers, whose code is negligible. A loss runs once in
            # a step: its code is as cold as its data. A twin of equal shapes would share generated code.
            if flushed > 0 and bound.memory_bytes <= 8 * flushed and not work.layer.compares(1):
                larger = tuple((batch + 1, *extents) for batch, *extents in work.inputs)
                twin = stack.enter_context(self._bind(replace(work, inputs=larger)))
                twin.run()
            repeats = max(FEWEST, min(self.repeats, int(ENOUGH / max(rough, 1e-9))))
            samples = self.comm.allgather_objects([self._once(bound, twin) for _ in range(repeats)])
        # From [ranks, repetitions, passes] to the slowest rank of each repetition, by pass.
        return LayerTime(*(typical(seconds) for seconds in np.max(samples, axis=0).T.tolist()))

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

    def _once(self, bound: BoundLayer, twin: BoundLayer | None) -> tuple[float, float, float]:
        """Run a forward and, if any, a backward pass; return the times of forward, data gradient, filter gradient [s].
        """
        # Nothing writes the samples, the inputs of a first layer.
        self._prepare(None if twin is None else twin.forward, bound.write_inputs if bound.input_gradient else None)
        forward = self._clock(bound.forward)
        if bound.trainable:
            self._prepare(None if twin is None else twin.run, bound.write_dy)
        return (forward, *self._backward(bound))

    def _prepare(self, warm: Callable[[], None] | None, write: Callable[[], None] | None) -> None:
        """Prepare the cache as in a step, by `warm` and `write`; synchronize the ranks, unless they share cores."""
        self._passing += 1  # reads and writes as many bytes as pass between two uses of a layer's data
        for run in (warm, write):
            if run is not None:
                run()
        # If ranks share cores, a waiting one would let others run, and use the cache, between the writing of the input
        # and the layer.
        if not self._oversubscription.shares_cores:
            self.comm.barrier()

    def _clock(self, run: Callable[[], object]) -> float:
        self.kernels.synchronize()  # work that was enqueued before is not part of the time
        begin = self._oversubscription.clock()
        run()
        self.kernels.synchronize()
        return self._oversubscription.clock() - begin

    def _backward(self, bound: BoundLayer) -> tuple[float, float]:
        """Run the backward pass, if any; return its time without the filter gradient, and that of this gradient [s]."""
        if not bound.trainable:
            return 0.0, 0.0
        filters: list[float] = []
        total = self._clock(lambda: bound.backward(lambda call: filters.append(self._clock(call))))
        return max(total - sum(filters), 0.0), sum(filters)


def typical(seconds: Sequence[float]) -> float:
    """Return the mean of all times except the longest tenth (of several times, at least the longest one) [s].

    The median would be wrong: the time of a step of a hundred layers is the sum of means, and times have a tail. On a
    shared machine the sum of medians is some 5 to 10 % below a median step.
    """
    kept = sorted(seconds)[: max(1, len(seconds) - max(1, len(seconds) // 10))]
    return sum(kept) / len(kept)


def last_level_cache() -> int:
    """Return the size of the largest cache of the processor [B], at most `LARGEST`; `CACHE` if it is unknown."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        # Linux writes sizes such as 32768K.
        text = path.read_text().strip()
        if text.endswith("K") and text[:-1].isdigit():
            sizes.append(int(text[:-1]) << 10)
    return min(max(sizes, default=CACHE), LARGEST)


def passing_bytes(network: Network, batch: int, ranks: int, dtype: str = "float32") -> int:
    """Return the bytes that pass through a rank's cache between two uses of a layer's data [B].

    These are a rank's values of one step and all parameters, with their gradients, and the code of the kernels, rounded
    down to a power of two; at most the size of the cache, because more makes no difference. Networks of similar size
    have the same result, and share measured times.
    """
    values = sum(math.prod(node.shape) for node in network.nodes) * batch // ranks
    nbytes = 2 * (values + network.parameter_count) * np.dtype(dtype).itemsize + CODE * len(network.nodes)
    return min(1 << max(nbytes.bit_length() - 1, 0), last_level_cache())


@dataclass
class Coverage:
    """Progress of the measurement of layers.

    Attributes
    ----------
    known, measured, left
        Numbers of layers whose stored times are used, that were measured now, and that the budget did not allow.
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
    """Measure layers that the cache lacks, and return how many were measured.

    Collective over the ranks of `timer`; the cache of rank 0 decides, and only rank 0 writes it.

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
        Function that is called on rank 0 with the number of finished layers and of all layers.
    again
        Whether to measure layers in the cache again, and store the mean of both times.
    """
    comm, begin = timer.comm, time.perf_counter()
    todo = list(works)
    # Rank 0 decides, because measurements are collective and the caches of ranks may differ.
    needed = comm.bcast([again or cache.get(conditions, work.key) is None for work in todo])
    state = Coverage(known=needed.count(False))

    def report(done: int) -> None:
        if progress is not None and comm.rank == 0:
            progress(done, len(todo))

    try:
        for done, (work, missing) in enumerate(zip(todo, needed)):
            report(done)
            if not missing:
                continue
            # Clocks differ: that of rank 0 decides for all ranks.
            if comm.bcast(budget is not None and time.perf_counter() - begin > budget):
                state.left += 1
                continue
            measured = timer.measure(work)
            state.measured += 1
            if comm.rank == 0:
                before = cache.get(conditions, work.key)
                # Only `again` measures a layer that has a time.
                mean = measured if before is None else [(a + b) / 2 for a, b in zip(before, measured)]
                cache.put(conditions, work.key, mean)
    finally:
        if comm.rank == 0:
            cache.flush()
    report(len(todo))
    state.seconds = time.perf_counter() - begin
    return state
