"""The `emulated` transport: shared memory of one machine that takes the time of another network.

A message of n bytes that was started at time t is there at ``t + alpha + beta * n``, not earlier; nobody
uses the CPU meanwhile (but for the last 0.1 ms before, where there is a core for every rank). Messages travel
independently of each other (full duplex, no contention). It shows overlap where there is one machine only, and
checks the performance model for networks that are not there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np

from halograd.comm.channel import Channel
from halograd.comm.counters import Meter
from halograd.comm.errors import CommError
from halograd.comm.reduction import Reduction
from halograd.comm.transports import base
from halograd.comm.transports.base import ALIGNMENT, Context, Pattern, Transport
from halograd.comm.transports.places import Places
from halograd.comm.transports.shared import SharedChannel, SharedTransport, Slots
from halograd.comm.transports.shared_sum import LARGEST_AT_ONCE, SharedSum, Stage, StagedSum

__all__ = ["EmulatedTransport", "sleep_until"]

# time.sleep wakes up late by 50 to 100 us: stop that much earlier, then take short naps.
LATE = 1e-4  # [s]
NAP = 1e-5  # [s]


class EmulatedTransport(Transport):
    """Messages of ``alpha + beta * bytes`` seconds.

    Parameters
    ----------
    alpha
        Latency of a message [s].
    beta
        Inverse bandwidth [s/B].

    Notes
    -----
    The time a message was sent lies beside it and is compared with the receiver's clock (CLOCK_MONOTONIC,
    which all processes of a machine share): ranks on several nodes are refused.
    """

    def __init__(self, context: Context, alpha: float, beta: float) -> None:
        super().__init__(context)
        self.alpha = alpha
        self.beta = beta
        self._one_machine = False
        self._shared = SharedTransport(context)

    def waits_for_network(self) -> bool:
        return True

    def channel(self, pattern: Pattern, meter: Meter) -> Channel:
        self._check_clock()
        return EmulatedChannel(pattern, meter, self._shared.slots(pattern), self._message_seconds, self._crowded)

    def _message_seconds(self, nbytes: int) -> float:
        return self.alpha + self.beta * nbytes

    def reduction(self, buffer: np.ndarray, meter: Meter) -> Reduction:
        self._check_clock()
        size = self._context.mpi.size
        seconds = ring_seconds(size, buffer.nbytes, self.alpha, self.beta)
        if size == 1 or not buffer.size:
            return super().reduction(buffer, meter)
        if buffer.nbytes <= LARGEST_AT_ONCE:
            return EmulatedSum(buffer, meter, self._shared.places(SharedSum.bytes_for(buffer)), seconds, self._crowded)
        places = self._shared.places(2 * ALIGNMENT)
        return EmulatedLargeSum(buffer, meter, self._shared.stage(), places, seconds, self._crowded)

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

    def __init__(
        self, pattern: Pattern, meter: Meter, slots: Slots, seconds: Callable[[int], float], nap: bool
    ) -> None:
        super().__init__(pattern, meter, slots)
        self._nap = nap
        self._arrivals = [
            tuple((stamp, seconds(count * pattern.dtype.itemsize)) for stamp in slots.stamps[peer])
            for peer, count in pattern.recvs.items()
        ]

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


class EmulatedSum(SharedSum):
    """A small all-reduce that takes the time of a ring, counted from when the last rank started it."""

    def __init__(self, buffer: np.ndarray, meter: Meter, places: Places, seconds: float, nap: bool) -> None:
        super().__init__(buffer, meter, places)
        self._seconds, self._nap = seconds, nap
        self._started = self.stamps

    def _start(self) -> None:
        self._started[self._count % 2][self._mine][0] = self._started_at
        super()._start()

    def _finish(self) -> float:
        self._flags.wait_for(self._count)
        arrived = max(float(stamp[0]) for stamp in self._started[(self._count - 1) % 2]) + self._seconds
        sleep_until(arrived, self._nap)
        self._add_up()
        return arrived

    def _close(self) -> None:
        self._started.clear()
        super()._close()


class EmulatedLargeSum(StagedSum):
    """A large all-reduce: it travels for the time of a ring while the ranks compute; added up where it is finished."""

    def __init__(
        self, buffer: np.ndarray, meter: Meter, stage: Stage, places: Places, seconds: float, nap: bool
    ) -> None:
        super().__init__(buffer, meter, stage)
        self._places, self._seconds, self._nap = places, seconds, nap
        self._started = [[view.view(np.float64) for view in places.views(i * ALIGNMENT, 8)] for i in range(2)]
        self._count = 0

    def _start(self) -> None:
        self._started[self._count % 2][self._places.mine][0] = self._started_at
        self._count += 1
        self._places.flags.raise_to(self._count)
        super()._start()

    def _make(self) -> None:
        self._places.flags.wait_for(self._count)
        self.arrived = max(float(stamp[0]) for stamp in self._started[(self._count - 1) % 2]) + self._seconds
        sleep_until(self.arrived, self._nap)
        super()._make()

    def _finish(self) -> float:
        super()._finish()
        return self.arrived

    def _close(self) -> None:
        self._started.clear()
        self._places.give_back()


def ring_seconds(size: int, nbytes: int, alpha: float, beta: float) -> float:
    """Time of a ring all-reduce (reduce-scatter, then all-gather) of `nbytes` over `size` ranks [s].

    References
    ----------
    Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH (2005),
    Section 4.5, without the time of the additions, which are really done.
    """
    return 2 * (size - 1) * alpha + 2 * (size - 1) / size * beta * nbytes


def sleep_until(deadline: float, nap: bool = True) -> None:
    """Return at `deadline` (`time.perf_counter` [s]), using the CPU for the last 0.1 ms at most.

    With `nap` not even then: it may be 0.1 ms later.
    """
    remaining = deadline - time.perf_counter()
    if remaining > LATE:
        time.sleep(remaining - LATE)
    while time.perf_counter() < deadline:
        if nap:
            time.sleep(NAP)
        else:
            os.sched_yield()
