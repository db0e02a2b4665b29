"""Times of messages through halograd's communicator: channels, exchanges of faces, all-reduces."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...comm.codec import UNCHANGED, Codec
from ...dtensor import Blocks, End, Exchange
from .record import Fit, fit_line, fit_sums

if TYPE_CHECKING:
    from ...comm import Channel, Communicator, Reduction

__all__ = ["LARGE", "SIZES", "MessageTimer", "Nodes", "fit_copy"]

#: Sizes of messages [B].
SIZES = (8, 64, 512, 4 << 10, 32 << 10, 128 << 10, 512 << 10, 2 << 20)
#: Sums are measured up to the size of gradients: in memory they pass through all caches, on a network they have another
#: algorithm [B].
LARGE = (8 << 20, 32 << 20)
#: Number of rounds over all sizes: a disturbance then affects one round and not one size.
ROUNDS = 9
#: Number of consecutive exchanges whose mean is used: they synchronize each other. For an exchange that takes longer
#: than `LONG` [s], a barrier synchronizes well enough.
IN_A_ROW, LONG = 4, 1e-3
#: Channels of the array whose faces are exchanged; a face across the width has runs of this many float32.
CHANNELS = 32

#: Function whose differences are durations [s], as `Oversubscription.clock`.
Clock = Callable[[], float]


@dataclass(frozen=True)
class Nodes:
    """Assignment of ranks to nodes.

    Attributes
    ----------
    nodes
        Per rank, the name of its node.
    """

    nodes: tuple[str, ...]

    def partner(self, rank: int, level: str) -> int | None:
        """Return the partner of a rank for the measurement of a level ("node" or "across"); None without one.

        Partners are mutual, and all pairs exchange at the same time.
        """
        # Positions 0 and 1 are partners, 2 and 3, and so on: x ^ 1 is the partner of x.
        here = [r for r, node in enumerate(self.nodes) if node == self.nodes[rank]]
        position = here.index(rank)
        if level == "node":
            return here[position ^ 1] if position ^ 1 < len(here) else None
        # Nodes in the order of their first ranks, paired as the ranks of a node are.
        order = list(dict.fromkeys(self.nodes))
        partner_node = order.index(self.nodes[rank]) ^ 1
        if partner_node >= len(order):
            return None
        there = [r for r, node in enumerate(self.nodes) if node == order[partner_node]]
        return there[position] if position < len(there) else None

    def has(self, level: str) -> bool:
        """Return whether a level ("node" or "across") has a pair of ranks."""
        return any(self.partner(rank, level) is not None for rank in range(len(self.nodes)))

    @property
    def fullest(self) -> int:
        """Number of ranks on the fullest node."""
        return max(self.nodes.count(node) for node in set(self.nodes))


class MessageTimer:
    """Timer of messages and sums on all ranks of a communicator. Its methods are collective.

    Parameters
    ----------
    comm
        The ranks, with the transport that is measured.
    sizes
        Bytes per message or sum [B], multiples of 4.
    rounds
        Number of measurements of each size.
    clock
        Function whose differences are durations on a rank [s].
    """

    def __init__(
        self, comm: Communicator, sizes: Sequence[int] = SIZES, rounds: int = ROUNDS, clock: Clock = time.perf_counter
    ) -> None:
        self.comm, self.sizes, self.rounds, self.clock = comm, tuple(sizes), rounds, clock

    def channel(self, partner: int | None) -> Fit:
        """Time messages in both directions with a partner, without packing (``comm.channel``).

        A rank with partner None sends nothing, and only waits for the others.
        """
        peers = [partner] if partner is not None else []
        both = [(dict.fromkeys(peers, n), dict.fromkeys(peers, n)) for n in self.sizes]
        channels = [self.comm.channel(*sizes, np.uint8, kind="profile") for sizes in both]

        def run(channel: Channel) -> None:
            if peers:
                channel.start()
                channel.finish()
                channel.release()

        return self._fit(self.sizes, channels, run)

    def face(self, partner: int | None, strided: bool) -> Fit:
        """Time the exchange of faces with a partner, packed and unpacked as halos (`Exchange`).

        Sizes are rounded up to multiples of `CHANNELS` values. A rank with partner None only waits for the others.

        Parameters
        ----------
        strided
            Whether the array is cut along its width, so that a face has `CHANNELS` values of each row; else it is cut
            along its height, and a face is a contiguous row.
        """
        itemsize = np.dtype(np.float32).itemsize
        rows = [max(1, -(-n // (CHANNELS * itemsize))) for n in self.sizes]
        # Both partners pass the same color; an exchange needs a communicator of its two ranks.
        pair = self.comm.split(None if partner is None else min(self.comm.rank, partner))
        exchanges = [] if pair is None else [_face(pair, n, strided) for n in rows]
        fit = self._fit([n * CHANNELS * itemsize for n in rows], exchanges, Exchange.run)
        if pair is not None:
            pair.close()
        return fit

    def reduction(self, method: str = "allreduce", codec: Codec = UNCHANGED) -> Fit:
        """Time blocking sums of float32 over all ranks (``reduction.run()``).

        `method` is a method of the communicator's reductions, and `codec` encodes the summands.
        """
        return self._fit(self.sizes, self._reductions(method, codec), lambda reduction: reduction.run(), fit_sums)

    def reduction_behind(
        self, waited: Fit, method: str = "allreduce", codec: Codec = UNCHANGED
    ) -> tuple[Fit, Fit]:
        """Time sums of float32 over all ranks during a computation.

        Some transports sum in the background; others (shared memory) sum only in ``finish()``.

        Parameters
        ----------
        waited
            Result of `reduction`; the computation takes a multiple of this time.

        Returns
        -------
        tuple of Fit
            Time from ``start()`` to the arrival of the sum (`waited` if ``finish()`` makes the sum), and the time of
            ``finish()`` after a long computation.
        """
        comm, sizes, reductions, spans = self.comm, self.sizes, self._reductions(method, codec), _Spans()
        arrival, left = np.empty((self.rounds, len(sizes))), np.empty((self.rounds, len(sizes)))
        # The recorded span of a sum ends at its arrival, which may be before `finish` is called.
        recorder, comm.instruments.recorder = comm.instruments.recorder, spans
        try:
            for k, i in itertools.product(range(self.rounds), range(len(sizes))):
                comm.barrier()
                reductions[i].start()
                # Long enough for the sum to end, if it travels in the background at all.
                _compute(2 * waited.at(sizes[i]) + 2e-3)
                comm.barrier()  # a late rank must not have had more time to sum
                before = self.clock()
                reductions[i].finish()
                left[k, i] = self.clock() - before
                arrival[k, i] = spans.last
        finally:
            comm.instruments.recorder = recorder
        for reduction in reductions:
            reduction.close()
        exposed = fit_line(sizes, _slowest(comm, left))
        # The largest sum shows it best: if it was in the background, finish() has little left to do.
        in_background = exposed.at(sizes[-1]) < waited.at(sizes[-1]) / 4
        fit = fit_sums(sizes, _slowest(comm, arrival))
        return (fit if in_background else waited), exposed

    def _reductions(self, method: str, codec: Codec) -> list[Reduction]:
        arrays = (np.zeros(n // 4, np.float32) for n in self.sizes)
        return [self.comm.reduction(array, kind="profile", method=method, codec=codec) for array in arrays]

    def _fit(
        self,
        sizes: Sequence[int],
        messages: Sequence[Any],
        run: Callable[[Any], object],
        fit: Callable[[Sequence[float], np.ndarray], Fit] = fit_line,
    ) -> Fit:
        """Time `run` with the messages of every size, after two warm-up runs, close them, and fit the times.

        A rank without messages only waits for the others.
        """

        def timed(i: int, in_a_row: int) -> float:
            self.comm.barrier()
            begin = self.clock()
            for _ in range(in_a_row):
                # A rank without a partner may have no messages, but takes part in the barriers.
                for message in messages[i : i + 1]:
                    run(message)
            return (self.clock() - begin) / in_a_row

        in_a_row = []
        for i in range(len(sizes)):
            for message in messages[i : i + 1]:
                run(message)
            # The maximum, so that all ranks repeat equally often.
            in_a_row.append(1 if self.comm.allreduce_scalar(timed(i, 1), "max") > LONG else IN_A_ROW)
        seconds = np.array([[timed(i, n) for i, n in enumerate(in_a_row)] for _ in range(self.rounds)])
        for message in messages:
            message.close()
        return fit(sizes, _slowest(self.comm, seconds))


def _face(pair: Communicator, count: int, strided: bool) -> Exchange:
    """Return the exchange that fills the margin of a block with the partner's face of ``count * CHANNELS`` values.

    Collective over `pair`. Along the cut axis, the array of each rank has 4 elements; the first rank owns the first
    two, and the second rank the last two: ``ab.. ..cd`` -> ``abc. .bcd``
    """
    axis, shape = (2, (1, count, 4, CHANNELS)) if strided else (1, (1, 4, count, CHANNELS))
    whole = Blocks([((0, n),) for n in shape], pair.size)
    sources = whole.replace(axis, ((0, 2), (2, 4)))
    targets = whole.replace(axis, ((2, 3), (1, 2)))  # the partner's column next to this rank's columns
    array, origin = np.ones(shape, np.float32), (0, 0, 0, 0)
    return Exchange(pair, End(sources, array, origin), End(targets, array, origin), kind="profile")


def fit_copy(sizes: Sequence[int] = SIZES, clock: Clock = time.perf_counter) -> Fit:
    """Time copies within the memory of a rank, and fit a line. Local; all ranks call it at the same time."""
    # Written arrays, so that no copy has to wait for the system to allocate pages.
    sources = [np.ones(n, np.uint8) for n in sizes]
    targets = [np.ones(n, np.uint8) for n in sizes]
    seconds = np.empty((ROUNDS, len(sizes)))
    for times in seconds:
        for i in range(len(sizes)):
            begin = clock()
            for _ in range(IN_A_ROW):
                np.copyto(targets[i], sources[i])
            times[i] = (clock() - begin) / IN_A_ROW
    return fit_line(sizes, np.median(seconds, axis=0))


class _Spans:
    """Recorder that stores the duration of the last communication [s]."""

    last = 0.0

    def span(self, name: str, category: str, t0: float, t1: float) -> None:
        if category == "communication":
            # Not 0: `fit_line` requires positive times.
            self.last = max(t1 - t0, 1e-9)


def _compute(seconds: float) -> None:
    """Keep this core busy for `seconds` [s], as kernels do: each call runs about 0.1 ms without Python's lock."""
    angles = np.ones(8192)
    result = np.empty_like(angles)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        np.cos(angles, out=result)


def _slowest(comm: Communicator, seconds: np.ndarray) -> np.ndarray:
    """Return, per size, the median over rounds of the time of the slowest rank [s], the same on all ranks. Collective.

    The minimum would be wrong: a step has many messages, and takes the sum of their typical times.
    """
    everywhere = np.array(comm.allgather_objects(seconds.tolist()))
    return np.median(everywhere.max(axis=0), axis=0)
