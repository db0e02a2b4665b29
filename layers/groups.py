"""Communicators of groups of ranks, made once per communicator and grouping."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

from halograd.dtensor import Groups

if TYPE_CHECKING:
    from halograd.comm import Communicator

__all__ = ["group_of", "in_group"]

Made = TypeVar("Made")

_made: WeakKeyDictionary[Communicator, dict[Groups, Communicator | None]] = WeakKeyDictionary()


def group_of(comm: Communicator, groups: Groups) -> Communicator | None:
    """The group of this rank, None where it is in none; `comm` itself if all are of one. Collective over `comm`.

    Made once per communicator and groups. `comm` closes it.
    """
    if groups.is_whole:
        return comm
    made = _made.setdefault(comm, {})
    if groups not in made:
        made[groups] = comm.split(groups.color(comm.rank))
    return made[groups]


def in_group(comm: Communicator, groups: Groups, make: Callable[[Communicator], Made]) -> Made | None:
    """What `make` makes of the group of this rank; None for a rank that is in none. Collective over `comm`.

    Groups set up their collectives here and nowhere else while operators and reducers are built: a rank with a fault
    waits for an agreement of `comm`, and its group would wait for the rank. So all ranks of `comm` agree before the
    groups part, and when they have come together again.

    Parameters
    ----------
    groups
        The same on all ranks.
    make
        Collective over the group that it is given.
    """
    group = group_of(comm, groups)
    if group is comm:
        return make(comm)
    comm.agree(None)
    with comm.agreement():
        if group is None:
            return None
        with group.agreement():
            return make(group)
