"""Calls of rank 0 for all ranks at the start of a job, before or without a halograd communicator.

A thousand ranks that open the same small file at once load a parallel file system for longer than the rest of the start
takes. So rank 0 reads the file, and broadcasts the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from halograd.errors import UserError

from ..comm import Communicator
from ..comm.errors import mark_agreed
from ..data.disk import DataError
from .config import Config, check_config, load_config

__all__ = ["agreed_root", "on_root", "read_config"]

Result = TypeVar("Result")
#: Errors of the user, special ones first.
_MISTAKES: dict[str, type[Exception]] = {"data": DataError, "user": UserError}


def agreed_root(comm: Communicator, call: Callable[[], Result]) -> Result:
    """Call :func:`on_root` within an agreement. Collective over `comm`."""
    comm.agree(None)
    return on_root(comm.mpi, call)


def on_root(world: Any, call: Callable[[], Result]) -> Result:
    """Return on all ranks the result of `call` on rank 0. Collective over `world`.

    Parameters
    ----------
    world
        An MPI communicator.
    call
        Local call with a result that can be pickled.

    Raises
    ------
    UserError, DataError
        The error of `call`, on all ranks. Any other error is raised on rank 0 and ends the job.
    """
    if world.size == 1:
        return call()
    found: Any = None
    raised: Exception | None = None
    if world.rank == 0:
        try:
            found = call()
        except Exception as error:
            raised = error
    found, mistake = world.bcast((found, _described(raised)))
    if mistake is None:
        return found
    kind, text = mistake
    if raised is not None and kind not in _MISTAKES:
        mark_agreed(raised, True, world.size)
        raise raised
    mistake = _MISTAKES.get(kind, UserError)(text)
    mark_agreed(mistake, world.rank == 0, world.size)
    raise mistake from raised


def _described(raised: Exception | None) -> tuple[str, str] | None:
    """Return kind and text of an error, to broadcast them."""
    if raised is None:
        return None
    kinds = (kind for kind, error in _MISTAKES.items() if isinstance(raised, error))
    kind = next(kinds, "fault")
    return kind, str(raised) if kind in _MISTAKES else "rank 0 failed with the error that it prints"


def read_config(world: Any, given: str | Path | Config, overrides: Sequence[str]) -> Config:
    """Return the configuration, read and checked by rank 0 unless given. Collective; see :func:`load_config`."""
    if isinstance(given, Config):
        return check_config(given.model_dump(mode="json", exclude_unset=True), overrides)
    return on_root(world, lambda: load_config(given, overrides))
