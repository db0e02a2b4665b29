"""Communicators of ranks with the same color, made once per communicator and coloring."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from halograd.comm import Communicator

__all__ = ["group_of"]

Colors = tuple[int | None, ...]

_made: WeakKeyDictionary[Communicator, dict[Colors, Communicator | None]] = WeakKeyDictionary()


def group_of(comm: Communicator, colors: Sequence[int | None]) -> Communicator | None:
    """The ranks with the color of this one; `comm` itself if all have the same. Collective over `comm`.

    Parameters
    ----------
    colors
        Color per rank, the same sequence on all ranks; None for ranks that are in no group: they get None.

    Returns
    -------
    Made once per communicator and coloring: who colors alike shares it. `comm` closes it.
    """
    colors = tuple(colors)
    if len(set(colors)) == 1:
        return None if colors[0] is None else comm
    groups = _made.setdefault(comm, {})
    if colors not in groups:
        groups[colors] = comm.split(colors[comm.rank])
    return groups[colors]
