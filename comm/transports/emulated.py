"""The emulated network: shared memory of one machine with the message times of another network.

A message of n bytes that starts at time t arrives at ``t + alpha + beta * n``. Until then the waiting ranks use no CPU
time, except for the last 0.1 ms if there is a core for every rank. Messages travel independently of each other (full
duplex, no contention). The emulation shows overlap on a single machine, and validates the performance model for
networks that are not available.

The sender stores its send time next to the message, and the receiver compares it with its own clock (CLOCK_MONOTONIC,
which all processes of a machine share). So ranks on several machines are rejected.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from .memory import Flags, Signal

__all__ = ["TimestampedSignal", "Timestamps", "sleep_until"]

# time.sleep wakes up late by 50 to 100 us: stop that much earlier, then take short naps.
LATE = 1e-4  # [s]
NAP = 1e-5  # [s]

#: Timestamps of one rank, one float64 each: of the first, third, ... exchange, and of the second, fourth, ... one.
Timestamps = tuple[np.ndarray, np.ndarray]


class TimestampedSignal(Signal):
    """A signal with a timestamp: other ranks see it only at its emulated arrival time.

    Parameters
    ----------
    own
        Timestamps of this rank.
    awaited
        Timestamps of the awaited ranks (and of this one, if it counts), each with the travel time of its data [s].
    nap
        Whether a waiting rank must always leave its core to other ranks.
    now
        Function that returns the send time; by default `time.perf_counter`.
    """

    def __init__(
        self,
        flags: Flags,
        others: Iterable[int] | None,
        own: Timestamps,
        awaited: Sequence[tuple[Timestamps, float]],
        nap: bool = True,
        now: Callable[[], float] | None = None,
        raises: bool = True,
    ) -> None:
        super().__init__(flags, others, raises)
        self._own, self._awaited, self._nap, self._now = own, list(awaited), nap, now
        self._delayed = any(seconds for _, seconds in self._awaited)
        self._slot = 1

    def begin(self) -> None:
        # Two timestamps alternate: this rank may start again before a peer has read the last one.
        self._slot = 1 - self._slot
        if self._raises:
            # Before the flag is raised: a rank that sees the flag reads the timestamp.
            self._own[self._slot][0] = time.perf_counter() if self._now is None else self._now()
        super().begin()

    def over(self) -> bool:
        if not super().over():
            return False
        self._read_arrival()
        return not self._delayed or time.perf_counter() >= self.arrived

    def wait(self) -> None:
        super().wait()
        self._read_arrival()
        if self._delayed:
            sleep_until(self.arrived, self._nap)

    def _read_arrival(self) -> None:
        arrived = 0.0
        for sent, seconds in self._awaited:
            arrived = max(arrived, sent[self._slot][0] + seconds)
        self.arrived = arrived


def sleep_until(deadline: float, nap: bool = True) -> None:
    """Sleep until `deadline` (`time.perf_counter` [s]); use the CPU for the last 0.1 ms at most.

    With `nap`, the CPU is not used in that time either, and the function may return 0.1 ms late.
    """
    remaining = deadline - time.perf_counter()
    if remaining > LATE:
        time.sleep(remaining - LATE)
    while time.perf_counter() < deadline:
        if nap:
            time.sleep(NAP)
        else:
            os.sched_yield()
