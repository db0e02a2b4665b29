"""Communicators of ranks with the same color, made once per communicator and coloring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar
from weakref import WeakKeyDictionary

from halograd.comm import Communicator

__all__ = ["group_of", "in_group"]

Colors = tuple[int | None, ...]
Made = TypeVar("Made")

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


def in_group(comm: Communicator, colors: Sequence[int | None], make: Callable[[Communicator], Made]) -> Made | None:
    """What `make` makes of the group of this rank; None for a rank that is in none. Collective over `comm`.

    Groups set up their collectives here and nowhere else while operators and reducers are built: a rank with a fault
    waits for an agreement of `comm`, and its group would wait for the rank. So all ranks of `comm` agree before the
    groups part, and when they have come together again.

    Parameters
    ----------
    colors
        As for :func:`group_of`.
    make
        Collective over the group that it is given.
    """
    group = group_of(comm, colors)
    if group is comm:
        return make(comm)
    comm.agree(None)
    with comm.agreement():
        if group is None:
            return None
        with group.agreement():
            return make(group)
