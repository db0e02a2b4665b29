"""The `emulated` transport: real MPI on one machine that takes the time of another network.

A message of n bytes that was started at time t is there at ``t + alpha + beta * n``, not earlier; nobody
uses the CPU meanwhile. Messages travel independently of each other (full duplex, no contention).
It shows overlap where there is one machine only, and checks the performance model for networks that are not there.
"""

from __future__ import annotations

import time

import numpy as np
from mpi4py import MPI

from halograd.comm.channel import Channel
from halograd.comm.counters import Meter
from halograd.comm.errors import CommError
from halograd.comm.reduction import MpiReduction, Reduction
from halograd.comm.transports import base
from halograd.comm.transports.base import ALIGNMENT, Context, Pattern, Transport
from halograd.comm.transports.mpi import MpiChannel

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
    The time a message was sent travels with it and is compared with the receiver's clock (CLOCK_MONOTONIC,
    which all processes of a machine share): ranks on several nodes are refused.
    """

    def __init__(self, context: Context, alpha: float, beta: float) -> None:
        super().__init__(context)
        self.alpha = alpha
        self.beta = beta
        self._one_machine = False

    def waits_for_network(self) -> bool:
        return True

    def channel(self, pattern: Pattern, meter: Meter) -> Channel:
        self._check_clock()
        return EmulatedChannel(self._context, pattern, meter, self.alpha, self.beta)

    def reduction(self, buffer: np.ndarray, meter: Meter) -> Reduction:
        self._check_clock()
        seconds = ring_seconds(self._context.mpi.size, buffer.nbytes, self.alpha, self.beta)
        return EmulatedReduction(self._context, buffer, meter, seconds)

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


class EmulatedChannel(MpiChannel):
    """Persistent messages with a header that says when they were sent; travel on the progress thread."""

    header = ALIGNMENT

    def __init__(self, context: Context, pattern: Pattern, meter: Meter, alpha: float, beta: float) -> None:
        super().__init__(context, pattern, meter)
        self._stamps = [memory[: self.header].view(np.float64) for memory in self._sent.values()]
        self._arrivals = [
            (memory[: self.header].view(np.float64), alpha + beta * (memory.nbytes - self.header))
            for memory in self._received.values()
        ]

    def _start(self) -> None:
        for stamp in self._stamps:
            stamp[0] = self._started_at
        if self._requests:
            MPI.Prequest.Startall(self._requests)
            self._progress.submit(self._operation)

    def _finish(self) -> float:
        self._progress.sleep(self._operation)
        arrived = max((stamp[0] + seconds for stamp, seconds in self._arrivals), default=0.0)
        sleep_until(arrived)
        return max(arrived, self._operation.completed_at)


class EmulatedReduction(MpiReduction):
    """An all-reduce that takes the time of a ring, counted from when the last rank started it."""

    def __init__(self, context: Context, buffer: np.ndarray, meter: Meter, seconds: float) -> None:
        super().__init__(context.mpi, context.progress, buffer, meter)
        self._seconds = seconds
        self._last_start = np.zeros(1)

    def _post(self) -> list[MPI.Request]:
        self._last_start[0] = self._started_at
        return [*super()._post(), self._mpi.Iallreduce(MPI.IN_PLACE, self._last_start, MPI.MAX)]

    def _complete(self) -> float:
        self._progress.sleep(self._operation)
        arrived = self._last_start[0] + self._seconds
        sleep_until(arrived)
        return max(arrived, self._operation.completed_at)


def ring_seconds(size: int, nbytes: int, alpha: float, beta: float) -> float:
    """Time of a ring all-reduce (reduce-scatter, then all-gather) of `nbytes` over `size` ranks [s].

    References
    ----------
    Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH (2005),
    Section 4.5, without the time of the additions, which are really done.
    """
    return 2 * (size - 1) * alpha + 2 * (size - 1) / size * beta * nbytes


def sleep_until(deadline: float) -> None:
    """Return at `deadline` (`time.perf_counter` [s]), at most some 0.1 ms late, without using the CPU."""
    remaining = deadline - time.perf_counter()
    if remaining > LATE:
        time.sleep(remaining - LATE)
    while time.perf_counter() < deadline:
        time.sleep(NAP)
