"""Times of the emulated network."""

from __future__ import annotations

import os
import time

__all__ = ["half_ring_seconds", "ring_seconds", "sleep_until"]

# time.sleep wakes up late by 50 to 100 us: stop that much earlier, then take short naps.
LATE = 1e-4  # [s]
NAP = 1e-5  # [s]


def ring_seconds(size: int, nbytes: int, alpha: float, beta: float) -> float:
    """Time of a ring all-reduce (reduce-scatter, then all-gather) of `nbytes` over `size` ranks [s].

    References
    ----------
    Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH (2005),
    Section 4.5, without the time of the additions, which are really done.
    """
    return 2 * (size - 1) * alpha + 2 * (size - 1) / size * beta * nbytes


def half_ring_seconds(size: int, nbytes: int, alpha: float, beta: float) -> float:
    """Time of one half of it [s]: a reduce-scatter, or an all-gather, of `nbytes` [B] in all."""
    return ring_seconds(size, nbytes, alpha, beta) / 2


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
