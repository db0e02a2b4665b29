"""Checks of the memory that a repeated call allocates.

Python traces the memory of the whole process, and another thread may allocate during a measurement. The call is
therefore repeated and the smallest value counts: what `run` itself allocates, it allocates every time.
"""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable

from halograd.comm import Communicator

__all__ = ["check_allocations", "traced"]

TIMES = 3


def traced(run: Callable[[], object]) -> tuple[int, int]:
    """Return the peak of memory [B] that `run` allocates, and the memory that remains allocated after it. Local.

    `run` is called `TIMES` times, on every rank if it communicates. Coverage, which allocates, pauses.
    """
    peaks, left = [], []
    tracer = sys.gettrace()
    sys.settrace(None)
    for _ in range(TIMES):
        tracemalloc.start()
        try:
            run()
            after, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        peaks.append(peak)
        left.append(after)
    sys.settrace(tracer)
    return min(peaks), min(left)


def check_allocations(comm: Communicator, run: Callable[[], object], peak: int) -> None:
    """Fail on all ranks if `run` takes more than `peak` [B] on one of them, or leaves more than 16 KiB. Collective."""
    comm.barrier()
    highest, left = traced(run)
    with comm.agreement():
        assert highest <= peak and left <= 16 * 1024, f"peak {highest} B, left {left} B"
