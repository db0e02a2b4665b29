"""Count the communicators and windows of MPI that this process holds: a process may have only so many of them.

MPICH, and what is derived from it, has 2048 contexts per process (Open MPI 65536). It returns an error for a
communicator beyond them, but a window beyond them ends the process without a message. To free either is collective, so
that no destructor may do it: the garbage collectors of the ranks run at different times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from .errors import CommError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["LIMIT", "check", "free", "held", "hold", "shortage"]

Context = TypeVar("Context", "MPI.Comm", "MPI.Intracomm", "MPI.Win")

#: Of these, this library takes so many; the others are for the program and its other libraries.
LIMIT = 1536
_held = 0


def held() -> int:
    """Return how many communicators and windows are open. Local."""
    return _held


def hold(context: Context) -> Context:
    """Count what was just made, until `free`. Local."""
    global _held
    _held += 1
    return context


def free(context: MPI.Comm | MPI.Win) -> None:
    """Free what `hold` has counted. Collective over its ranks."""
    global _held
    context.Free()
    _held -= 1


def shortage() -> CommError | None:
    """Return the fault of this rank if it may make no more; for all ranks to agree on. Local."""
    try:
        check(_held)
    except CommError as fault:
        return fault
    return None


def check(count: int) -> None:
    """Raise CommError if a rank that holds so many may make no more. Local."""
    if count >= LIMIT:
        raise CommError(
            f"communicators: expected fewer than {LIMIT} of them, with their groups and windows, open in a process, "
            f"got {count}; close each when it is done (`with Communicator(...) as comm:`, or comm.close())"
        )
