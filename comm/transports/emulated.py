"""The emulated network: shared memory of one machine that takes the time of another network.

A message of n bytes that was started at time t is there at ``t + alpha + beta * n``, not earlier; no rank
uses the CPU meanwhile (but for the last 0.1 ms before, where there is a core for every rank). Messages travel
independently of each other (full duplex, no contention). It shows overlap where there is one machine only, and
checks the performance model for networks that are not there.

The time a message was sent lies beside it and is compared with the receiver's clock (CLOCK_MONOTONIC, which all
processes of a machine share): ranks on several nodes are refused.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..sums import Method
from .memory import Flags, Signal

__all__ = ["EmulatedNetwork", "Stamped", "Stamps", "ring_seconds", "sleep_until"]

# time.sleep wakes up late by 50 to 100 us: stop that much earlier, then take short naps.
LATE = 1e-4  # [s]
NAP = 1e-5  # [s]

#: A float64 of one rank, of the first, third, ... exchange, and of the others.
Stamps = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class EmulatedNetwork:
    """Messages of ``alpha + beta * bytes`` seconds.

    Attributes
    ----------
    alpha
        Latency of a message [s].
    beta
        Inverse bandwidth [s/B].
    node
        So many consecutive ranks of the root communicator are on one node: between them it is shared memory, without
        delay. A collective among ranks of several nodes takes the time of a ring whose links all cross the network.
    """

    alpha: float
    beta: float
    node: int = 1

    def message(self, nbytes: int) -> float:
        """Return the time of a message [s]."""
        return self.alpha + self.beta * nbytes

    def collective(self, method: Method, ranks: int, nbytes: int) -> float:
        """Return the time of a sum of `nbytes` among ranks of several nodes [s]: that of a ring, or of half of one."""
        seconds = ring_seconds(ranks, method.payload(nbytes), self.alpha, self.beta)
        return seconds if method.adds and method.gathers else seconds / 2


class Stamped(Signal):
    """A signal that says when it was given, and that the others see when it would have arrived.

    Parameters
    ----------
    own
        Where this rank notes the time.
    stamps
        Where others have (and this one, if it counts), and how long theirs takes to arrive [s].
    nap
        Whether a rank that waits must leave its core alone all the time.
    now
        Gives the time that is noted; by default the clock.
    """

    def __init__(
        self,
        flags: Flags,
        others: Iterable[int] | None,
        own: Stamps,
        stamps: Sequence[tuple[Stamps, float]],
        nap: bool = True,
        now: Callable[[], float] | None = None,
        raises: bool = True,
    ) -> None:
        super().__init__(flags, others, raises)
        self._stamp, self._stamps, self._nap, self._now = own, list(stamps), nap, now
        self._delayed = any(seconds for _, seconds in self._stamps)
        self._turn = 1

    def begin(self) -> None:
        self._turn = 1 - self._turn
        if self._raises:
            self._stamp[self._turn][0] = time.perf_counter() if self._now is None else self._now()
        super().begin()

    def over(self) -> bool:
        if not super().over():
            return False
        self._look()
        return not self._delayed or time.perf_counter() >= self.arrived

    def wait(self) -> None:
        super().wait()
        self._look()
        if self._delayed:
            sleep_until(self.arrived, self._nap)

    def _look(self) -> None:
        arrived = 0.0
        for both, seconds in self._stamps:
            arrived = max(arrived, both[self._turn][0] + seconds)
        self.arrived = arrived


def ring_seconds(size: int, nbytes: int, alpha: float, beta: float) -> float:
    """Return the time of a ring all-reduce (reduce-scatter, then all-gather) of `nbytes` over `size` ranks [s].

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
