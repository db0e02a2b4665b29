"""Calls of rank 0 for all ranks.

On a parallel file system, opening a small file on a thousand ranks at once takes longer than the rest of the start. So
rank 0 reads the file, and broadcasts the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..comm.errors import agree, mark_agreed
from .config import Config, check_config, load_config

__all__ = ["on_root", "read_config"]

Result = TypeVar("Result")


def on_root(world: Any, call: Callable[[], Result]) -> Result:
    """Return on all ranks the result of `call` on rank 0. Collective over `world`; permitted within an agreement.

    Parameters
    ----------
    world
        An MPI communicator; None for this process alone.
    call
        Local call with a result that can be pickled.

    Raises
    ------
    Exception
        The error of `call`, on all ranks; or the error of a rank that cannot unpickle the result, because a file of the
        user is missing on its node.
    """
    if world is None or world.size == 1:
        return call()
    result: Any = None
    fault: Exception | None = None
    if world.rank == 0:
        try:
            result = call()
        except Exception as error:
            mark_agreed(error, True, world.size, needs_no_rank=True)
            fault = error
    # Before the broadcast: without a result there is none.
    agree(world, range(world.size), fault)
    try:
        result = world.bcast(result)  # a configuration loads the files of the user that it names when it is unpickled
    except Exception as error:
        fault = error
    # Again, because only some ranks may be unable to unpickle the result.
    agree(world, range(world.size), fault)
    return result


def read_config(world: Any, config: str | Path | Config, overrides: Sequence[str]) -> Config:
    """Return the configuration, read and checked by rank 0. Collective; see :func:`load_config`."""
    if isinstance(config, Config):
        # Plain data, so that the overrides are checked together with the values that were set.
        return on_root(world, lambda: check_config(config.model_dump(mode="json", exclude_unset=True), overrides))
    return on_root(world, lambda: load_config(config, overrides))
