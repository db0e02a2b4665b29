"""Groups of ranks, with a communicator each that is made once per communicator and grouping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

from ..dtensor import Blocks, Groups

if TYPE_CHECKING:
    from ..comm import Communicator
    from ..comm.reduction import Reduction, ReductionSpec

__all__ = ["group_of", "in_group", "reductions_in_groups", "sample_groups"]

Made = TypeVar("Made")

_made: WeakKeyDictionary[Communicator, dict[Groups, Communicator | None]] = WeakKeyDictionary()


def sample_groups(boxes: Blocks) -> Groups:
    """Ranks with boxes ``(N, *spatial, C)`` of the same samples and channels: sums "per sample" run over them.

    >>> groups = sample_groups(Blocks((((0, 2), (2, 3)), ((0, 4), (4, 8)), ((0, 3),)), 5))
    >>> [groups.color(rank) for rank in range(5)]
    [0, 0, 1, 1, None]
    """
    return Groups.agreeing(boxes.grid, (0, len(boxes.grid) - 1), boxes.size)


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


def reductions_in_groups(comm: Communicator, specs: Sequence[tuple[Groups, ReductionSpec]]) -> list[Reduction | None]:
    """Sums over the groups of this rank, those of each grouping made together. Collective over `comm`.

    Returns
    -------
    In the same order; None on ranks that are in none of the groups.
    """
    by_groups: dict[Groups, list[int]] = {}
    for number, (groups, _) in enumerate(specs):
        by_groups.setdefault(groups, []).append(number)
    found: dict[int, Reduction] = {}
    for groups, numbers in by_groups.items():
        wanted = [specs[number][1] for number in numbers]
        made = in_group(comm, groups, partial(_reductions, wanted))
        found.update(zip(numbers, made or ()))
    return [found.get(number) for number in range(len(specs))]


def _reductions(specs: Sequence[ReductionSpec], group: Communicator) -> list[Reduction]:
    return group.reductions(specs)
