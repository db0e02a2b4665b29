"""The `emulated` transport: shared memory of one machine that takes the time of another network.

A message of n bytes that was started at time t is there at ``t + alpha + beta * n``, not earlier; nobody
uses the CPU meanwhile (but for the last 0.1 ms before, where there is a core for every rank). Messages travel
independently of each other (full duplex, no contention). It shows overlap where there is one machine only, and
checks the performance model for networks that are not there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import numpy as np

from halograd.comm.channel import Channel
from halograd.comm.counters import Meter
from halograd.comm.errors import CommError
from halograd.comm.ordered import Tags
from halograd.comm.reduction import Reduction
from halograd.comm.transports import base
from halograd.comm.transports.accumulator import TALLIES, Accumulator, Team
from halograd.comm.transports.base import ALIGNMENT, Context, Pattern, Transport, numbered
from halograd.comm.transports.emulated_sum import (
    EmulatedGather,
    EmulatedLargeScatter,
    EmulatedLargeSum,
    EmulatedRoundedSum,
    EmulatedScatter,
    EmulatedSum,
)
from halograd.comm.transports.node_sum import Across, EmulatedAcross, NodeSum, Room
from halograd.comm.transports.shared import SharedChannel, SharedTransport, Slots
from halograd.comm.transports.shared_sum import LARGEST_AT_ONCE
from halograd.comm.transports.timing import half_ring_seconds, ring_seconds, sleep_until

__all__ = ["EmulatedTransport", "ring_seconds", "sleep_until"]


class EmulatedTransport(Transport):
    """Messages of ``alpha + beta * bytes`` seconds.

    Parameters
    ----------
    alpha
        Latency of a message [s].
    beta
        Inverse bandwidth [s/B].
    node
        So many consecutive ranks of the root communicator are on one node: between them it is shared memory, without
        delay. A collective among ranks of several nodes takes the time of a ring whose links all cross the network.

    Notes
    -----
    The time a message was sent lies beside it and is compared with the receiver's clock (CLOCK_MONOTONIC,
    which all processes of a machine share): ranks on several nodes are refused.
    """

    def __init__(self, context: Context, alpha: float, beta: float, node: int = 1) -> None:
        super().__init__(context)
        self.alpha = alpha
        self.beta = beta
        self._node_of = numbered([rank // node for rank in context.ranks])
        self._one_machine = False
        self._shared = SharedTransport(context)
        self._accumulator: Accumulator | None = None

    def nodes(self) -> tuple[int, ...]:
        return self._node_of

    @property
    def _far(self) -> bool:
        """Whether a collective crosses the network."""
        return max(self._node_of) > 0

    def channel(self, pattern: Pattern, meter: Meter) -> Channel:
        self._check_clock()
        here = self._node_of[self._context.mpi.rank]
        seconds = {
            peer: self.alpha + self.beta * count * pattern.dtype.itemsize if self._node_of[peer] != here else 0.0
            for peer, count in pattern.recvs.items()
        }
        return EmulatedChannel(pattern, meter, self._shared.slots(pattern), seconds, self._crowded)

    def reduction(self, buffer: np.ndarray, meter: Meter) -> Reduction:
        return self._collective(buffer, meter, ring_seconds, EmulatedSum, EmulatedLargeSum) or super().reduction(
            buffer, meter
        )

    def ordered(self, buffer: np.ndarray, meter: Meter, tags: Tags) -> Reduction:
        """Sums in shared memory have this order anyway."""
        return self.reduction(buffer, meter)

    def rounded(self, buffer: np.ndarray, meter: Meter, tags: Tags) -> Reduction:
        self._check_clock()
        size = self._context.mpi.size
        if size == 1 or not buffer.size:
            return super().rounded(buffer, meter, tags)
        seconds = ring_seconds(size, buffer.nbytes // 2, self.alpha, self.beta) if self._far else 0.0
        places = self._shared.places(2 * ALIGNMENT)
        return EmulatedRoundedSum(buffer, meter, self._shared.stage(), places, seconds, self._crowded)

    def scatter(self, buffer: np.ndarray, meter: Meter) -> Reduction:
        return self._collective(
            buffer, meter, half_ring_seconds, EmulatedScatter, EmulatedLargeScatter
        ) or super().scatter(buffer, meter)

    def gather(self, buffer: np.ndarray, meter: Meter) -> Reduction:
        return self._collective(buffer, meter, half_ring_seconds, EmulatedGather) or super().gather(buffer, meter)

    def _collective(
        self,
        buffer: np.ndarray,
        meter: Meter,
        ring: Callable[[int, int, float, float], float],
        small: type[EmulatedSum],
        large: type[EmulatedLargeSum] | None = None,
    ) -> Reduction | None:
        """What takes the time of this ring, large ones made otherwise if need be; None where there is nothing to do."""
        self._check_clock()
        size = self._context.mpi.size
        if size == 1 or not buffer.size:
            return None
        seconds = ring(size, buffer.nbytes, self.alpha, self.beta) if self._far else 0.0
        if large is None or buffer.nbytes <= LARGEST_AT_ONCE:
            return small(buffer, meter, self._shared.places(small.bytes_for(buffer, size)), seconds, self._crowded)
        places = self._shared.places(2 * ALIGNMENT)
        return large(buffer, meter, self._shared.stage(), places, seconds, self._crowded)

    def sum_by_nodes(self, buffer: np.ndarray, across: Meter, within: Meter, in_background: bool) -> Reduction:
        self._check_clock()
        if self._accumulator is None:
            ranks = range(self._context.mpi.size)
            here = self._node_of[self._context.mpi.rank]
            heads = [self._node_of.index(node) for node in range(max(self._node_of) + 1)]
            team = Team(self._shared.places(TALLIES * ALIGNMENT), [r for r in ranks if self._node_of[r] == here], heads)
            self._accumulator = Accumulator(team, self._context.progress)
        team = self._accumulator.team
        room = Room(self._shared.places, team, buffer, (EmulatedAcross if self._far else Across).totals_needed)
        seconds = ring_seconds(len(team.heads), buffer.nbytes, self.alpha, self.beta)
        way = EmulatedAcross(team, room, seconds) if self._far else Across(team, room)
        return NodeSum(buffer, across, within, self._accumulator, room, way, in_background)

    @property
    def buffer_bytes(self) -> int:
        return self._shared.buffer_bytes

    @property
    def _crowded(self) -> bool:
        """Whether there are more ranks than cores: then a rank that waits must leave its core alone."""
        return self._context.mpi.size > len(os.sched_getaffinity(0))

    def close(self) -> None:
        self._shared.close()

    def _check_clock(self) -> None:
        """Raise on all ranks if they do not share a clock. Collective once."""
        if self._one_machine:
            return
        node = base.split_node(self._context.mpi)
        here, all_ranks = node.size, self._context.mpi.size
        node.Free()
        fault = None
        if here != all_ranks:
            fault = CommError(
                f"emulated network: expected all {all_ranks} ranks on one machine, whose clock they share, got "
                f"{here} here; run on one node or use transport='auto'"
            )
        self._context.agree(fault)
        self._one_machine = True


class EmulatedChannel(SharedChannel):
    """Messages that lie in shared memory from their start, and are looked at when they would have arrived."""

    def __init__(self, pattern: Pattern, meter: Meter, slots: Slots, seconds: Mapping[int, float], nap: bool) -> None:
        super().__init__(pattern, meter, slots)
        self._nap = nap
        self._arrivals = [tuple((stamp, seconds[peer]) for stamp in slots.stamps[peer]) for peer in pattern.recvs]

    def _start(self) -> None:
        self._slots.stamp[self.slot][0] = self._started_at
        super()._start()

    def _finish(self) -> float:
        super()._finish()
        slot = self.slot
        arrived = 0.0
        for both in self._arrivals:
            stamp, seconds = both[slot]
            arrived = max(arrived, stamp[0] + seconds)
        sleep_until(arrived, self._nap)
        return arrived

    def _close(self) -> None:
        self._arrivals.clear()
        super()._close()
