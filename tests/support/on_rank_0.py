"""Work of rank 0 during which the other ranks sleep, so that it has the cores."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import pytest

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["on_rank_0"]

Result = TypeVar("Result")


def on_rank_0(comm: MPI.Intracomm, work: Callable[[], Result]) -> Result:
    """Return what `work` returns on rank 0, on all ranks; a skip or a failure on rank 0 applies to all. Collective.

    MPI waits by polling, so ranks that wait in a barrier would take the cores from rank 0.
    """
    result, kind, text, error = None, "passed", "", None
    if comm.rank == 0:
        try:
            result = work()
        except pytest.skip.Exception as skip:
            kind, text, error = "skipped", str(skip), skip
        except Exception as failure:
            kind, text, error = "failed", repr(failure), failure
    done = comm.Ibarrier()
    while not done.Test():
        time.sleep(5e-3)
    result, kind, text = comm.bcast((result, kind, text))
    if error is not None:
        raise error
    if kind == "skipped":
        pytest.skip(text)
    assert kind == "passed", f"rank 0: {text}"
    return result
