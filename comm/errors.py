"""The error of the communication layer, and the agreement of ranks on errors."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from halograd.errors import UserError

from .progress import rest

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["CommError", "agree", "describe", "is_agreed", "is_shared", "mark_agreed", "recreate"]


class CommError(RuntimeError):
    """Error raised if communication fails or a request for it is invalid.

    The text gives what was expected, what was received, and the remedy.
    """


def mark_agreed(error: BaseException, arose_here: bool, ranks: int, needs_no_rank: bool = False) -> None:
    """Record in an error how many ranks raise it, whether it arose here, and whether its text names the rank already.
    Local.
    """
    vars(error).update(agreed=ranks, arose_here=arose_here, needs_no_rank=needs_no_rank)


def is_agreed(error: BaseException, ranks: int) -> bool:
    """Return whether at least `ranks` ranks raise this error, not only those of a smaller group. Local."""
    return int(getattr(error, "agreed", 0)) >= ranks


def is_shared(leaving: BaseException | None, ranks: int) -> bool:
    """Return whether all `ranks` ranks leave a ``with`` block the same way, so that its end may be collective. Local.

    This is so without an error, with an agreed error, and with `sys.exit` without a code.
    """
    if isinstance(leaving, SystemExit):
        return not leaving.code
    return leaving is None or is_agreed(leaving, ranks)


def agree(mpi_comm: MPI.Intracomm, ranks: Sequence[int], fault: Exception | None, mark: int = 0) -> np.ndarray:
    """Raise on all ranks if any rank has a fault; see `Communicator.agree`. Collective over `mpi_comm`.

    `ranks` are the rank numbers for messages. Returns the marks that the ranks pass, of 63 bits each, in order.
    """
    # A mark is not negative, so -1 is a fault.
    marks = np.zeros(mpi_comm.size, np.int64)
    request = mpi_comm.Iallgather(np.array([mark if fault is None else -1], np.int64), marks)
    polls = 0
    while not request.Test():  # with many ranks on few cores, a spinning rank would delay the others
        rest(polls)
        polls += 1
    faulty = marks < 0
    if not faulty.any():
        return marks
    # Only if all ranks have a fault do all of them enter this collective.
    if fault is not None and faulty.all() and len(set(mpi_comm.allgather(describe(fault)))) == 1:
        mark_agreed(fault, mpi_comm.rank == 0, mpi_comm.size)
        raise fault
    origin = int(np.argmax(faulty))
    module, name, text, names_rank = mpi_comm.bcast(None if fault is None else describe(fault), root=origin)
    others = int(faulty.sum()) - 1
    where = f"rank {ranks[origin]}" + (f" (and {others} more)" if others else "")
    error = recreate(module, name, text, "" if names_rank else f"{where}: ")
    mark_agreed(error, origin == mpi_comm.rank, mpi_comm.size, needs_no_rank=True)
    raise error from fault


def describe(fault: Exception) -> tuple[str, str, str, bool]:
    """Return the module and name of the type of a fault, its text, and whether the text names a rank already. Local."""
    # The memory errors of NumPy and CuPy cannot be constructed from a string.
    kind = MemoryError if isinstance(fault, MemoryError) and not isinstance(fault, UserError) else type(fault)
    # `str` of a KeyError has quotes around its text.
    text = str(fault.args[0]) if isinstance(fault, KeyError) and fault.args else str(fault)
    return kind.__module__, kind.__qualname__, text, bool(getattr(fault, "needs_no_rank", False))


def recreate(module: str, name: str, text: str, where: str) -> Exception:
    """Return an error of the type `name` of `module` with the text `where` + `text`. Local.

    It is a CommError, which names the type, if the type cannot be constructed from a string alone.
    """
    try:
        error = getattr(importlib.import_module(module), name)(f"{where}{text}")
        if isinstance(error, Exception):
            return error
    except Exception:  # the type cannot be imported, or needs more arguments, such as UnicodeDecodeError
        pass
    return CommError(f"{where}{name}: {text}")
