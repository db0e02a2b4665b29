"""Whether something that runs again and again allocates arrays."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

from halograd.comm import Communicator

__all__ = ["check_allocations", "traced_peak"]


def traced_peak(run: Callable[[], object]) -> int:
    """Return the most memory [B] that Python holds at once of what `run` allocates. Local."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def check_allocations(comm: Communicator, run: Callable[[], object], peak: int) -> None:
    """Fail on all ranks if `run` takes more than `peak` [B] on one of them, or leaves more than 16 KiB. Collective."""
    comm.barrier()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        run()
        after, highest = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    fault = None
    if highest - before > peak or after - before > 16 * 1024:
        fault = AssertionError(f"peak {highest - before} B, left {after - before} B")
    comm.agree(fault)
