"""Count of the MPI communicators and windows that this process holds; their number per process is limited.

MPICH and its derivatives have 2048 contexts per process (Open MPI 65536). MPICH returns an error for a communicator
beyond them, but a window beyond them ends the process without a message. Freeing either is collective, so no
destructor may do it: the garbage collectors of the ranks run at different times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from .errors import CommError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["LIMIT", "check", "free", "held", "hold", "shortage"]

Context = TypeVar("Context", "MPI.Comm", "MPI.Intracomm", "MPI.Win")

#: Number of contexts that this library may use; the rest is for the program and its other libraries.
LIMIT = 1536
# Of the whole process, because the libraries limit the number per process.
_held = 0


def held() -> int:
    """Return the number of open communicators and windows of this library. Local."""
    return _held


def hold(context: Context) -> Context:
    """Increase the count for a new communicator or window, which is returned; `free` decreases the count. Local."""
    global _held
    _held += 1
    return context


def free(context: MPI.Comm | MPI.Win) -> None:
    """Free a communicator or window that `hold` has counted. Collective over its ranks."""
    global _held
    context.Free()
    _held -= 1


def shortage() -> CommError | None:
    """Return the error of this rank if it may create no more contexts, else None; the ranks must agree on it. Local."""
    try:
        check(_held)
    except CommError as fault:
        return fault
    return None


def check(count: int) -> None:
    """Raise CommError if a rank with `count` contexts may create no more. Local."""
    if count >= LIMIT:
        raise CommError(
            f"communicators: expected fewer than {LIMIT} of them, with their groups and windows, open in a process, "
            f"got {count}; close each when it is done (`with Communicator(...) as comm:`, or comm.close())"
        )
