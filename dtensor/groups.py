"""Groups of ranks that share data, such as samples or a block of a parameter.

Ranks are numbered row-major over a grid. The ranks of a group have equal coordinates along some axes, and together all
coordinates along the others. The groups therefore follow from the shape of the grid, for any number of ranks::

    grid 2 x 3, equal along the first axis: (0 1 2) (3 4 5);  along the second: (0 3) (1 4) (2 5)

:class:`Groups` is pure arithmetic. :func:`group_of` and :func:`in_group` split a communicator into groups, once per
communicator and grouping.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

from .layout import Blocks

if TYPE_CHECKING:
    from ..comm import Communicator
    from ..comm.reduction import Reduction, ReductionSpec

__all__ = ["Groups", "group_of", "in_group", "reductions_in_groups", "sample_groups"]

Result = TypeVar("Result")

# Weak keys, so that the table keeps no parent in memory.
#: Communicators of the groups, by parent communicator and grouping; None on a rank without a group.
_groups: WeakKeyDictionary[Communicator, dict[Groups, Communicator | None]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Groups:
    """Disjoint groups of the ranks ``0 .. size - 1``.

    Attributes
    ----------
    runs
        ``(parts, kind)`` from the slowest axis to the fastest; neighboring axes of one kind are joined. ``"each"``:
        each part has groups of its own. ``"all"``: all parts are in one group. ``"first"``: the first part is in a
        group, and the other parts are in none.
    size
        Number of ranks; ranks beyond the grid are in no group.

    Examples
    --------
    >>> groups = Groups.agreeing((2, 3), (0,), 8)
    >>> [groups.color(rank) for rank in range(8)], groups.members(1)
    ([0, 0, 0, 1, 1, 1, None, None], range(3, 6))
    """

    runs: tuple[tuple[int, str], ...]
    size: int

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.runs, self.size))

    @classmethod
    def agreeing(cls, grid: Sequence[int], axes: Collection[int], size: int, first: Collection[int] = ()) -> Groups:
        """Return groups of ranks that have the same coordinates along `axes` of a grid.

        Along an axis in `first`, only ranks with coordinate 0 are in a group.
        """
        kinds = ["each" if d in axes else "first" if d in first else "all" for d in range(len(grid))]
        runs: list[tuple[int, str]] = []
        for parts, kind in zip(grid, kinds):
            if parts == 1:
                continue
            # Grids that divide ranks into the same groups then have equal runs, so the groups are created only once.
            if runs and runs[-1][1] == kind:
                parts *= runs.pop()[0]
            runs.append((parts, kind))
        return _groups_of(tuple(runs), size)

    @classmethod
    def whole(cls, size: int) -> Groups:
        """Return one group of all ranks."""
        return cls.agreeing((size,), (), size)

    @cached_property
    def placed(self) -> int:
        """Number of ranks that have a position in the grid."""
        return math.prod(parts for parts, _ in self.runs)

    @cached_property
    def count(self) -> int:
        """Number of groups."""
        return math.prod(parts for parts, kind in self.runs if kind == "each")

    @cached_property
    def members_each(self) -> int:
        """Number of ranks in each group."""
        return math.prod(parts for parts, kind in self.runs if kind == "all")

    @property
    def is_whole(self) -> bool:
        """Whether all ranks are in one group."""
        return self.members_each == self.size

    def color(self, rank: int) -> int | None:
        """Return the number of the group of a rank; None for a rank without a group."""
        if rank >= self.placed:
            return None
        # Ranks and groups are numbered row-major: the last axis is the fastest.
        color, scale = 0, 1
        for parts, kind in reversed(self.runs):
            rank, at = divmod(rank, parts)
            if kind == "each":
                color, scale = color + at * scale, scale * parts
            elif kind == "first" and at:
                return None
        return color

    def members(self, color: int) -> range | tuple[int, ...]:
        """Return the ranks of a group, in order: a range, unless the group spans axes that are not neighbors."""
        first, stride, spans = 0, 1, []
        for parts, kind in reversed(self.runs):
            if kind == "each":
                color, at = divmod(color, parts)
                first += at * stride
            elif kind == "all":
                spans.append(range(0, parts * stride, stride))
            stride *= parts
        if len(spans) > 1:
            # From the slowest axis to the fastest, which gives ascending ranks.
            return tuple(first + sum(steps) for steps in itertools.product(*reversed(spans)))
        # Without an axis of the kind "all", a group has one rank.
        (span,) = spans or [range(1)]
        return range(first, first + span.stop, span.step)

    def leads(self, rank: int) -> bool:
        """Return whether a rank is the first of its group."""
        color = self.color(rank)
        return color is not None and self.members(color)[0] == rank


#: Equal groupings are one object, which dictionaries find without a comparison.
_groups_of = lru_cache(maxsize=65536)(Groups)


def sample_groups(boxes: Blocks) -> Groups:
    """Return groups of ranks whose boxes ``(N, *spatial, C)`` hold the same samples and channels.

    Per-sample sums run over these groups.

    >>> groups = sample_groups(Blocks((((0, 2), (2, 3)), ((0, 4), (4, 8)), ((0, 3),)), 5))
    >>> [groups.color(rank) for rank in range(5)]
    [0, 0, 1, 1, None]
    """
    return Groups.agreeing(boxes.grid, (0, len(boxes.grid) - 1), boxes.size)


def group_of(comm: Communicator, groups: Groups) -> Communicator | None:
    """Return the communicator of this rank's group, None if it has no group. Collective over `comm`.

    If all ranks are in one group, the result is `comm` itself. Otherwise it is created once per communicator and
    grouping, and `comm` closes it.
    """
    if groups.is_whole:
        return comm
    groups_of_comm = _groups.setdefault(comm, {})
    if groups not in groups_of_comm:
        group = comm.split(groups.color(comm.rank))
        # Groups of one rank send nothing.
        if groups.members_each > 1:
            comm.share_devices(group)
        groups_of_comm[groups] = group
    return groups_of_comm[groups]


def in_group(comm: Communicator, groups: Groups, make: Callable[[Communicator], Result]) -> Result | None:
    """Return what `make` returns for the communicator of this rank's group; None without one. Collective over `comm`.

    While runners are built, groups set up their collectives only here. All ranks of `comm` agree before the work in
    groups begins, and after it has ended. This prevents a deadlock, in which a rank with an error waits in an agreement
    of `comm`, and the other ranks of its group wait in a collective of the group.

    Parameters
    ----------
    groups
        Grouping, the same on all ranks.
    make
        Function of the group's communicator; it may be collective over the group.
    """
    group = group_of(comm, groups)
    if group is comm:
        return make(comm)
    # A rank with a fault is in an agreement of `comm`: raise its fault here, not amid the collectives of a group.
    comm.agree(None)
    with comm.agreement():
        if group is None:
            return None
        with group.agreement():
            return make(group)


def reductions_in_groups(comm: Communicator, specs: Sequence[tuple[Groups, ReductionSpec]]) -> list[Reduction | None]:
    """Create the sums over the groups of this rank, all sums of one grouping together. Collective over `comm`.

    Returns
    -------
    Sums in the order of `specs`; None where this rank is in none of the groups.
    """
    by_groups: dict[Groups, list[int]] = {}
    for number, (groups, _) in enumerate(specs):
        by_groups.setdefault(groups, []).append(number)
    reductions: dict[int, Reduction] = {}
    for groups, numbers in by_groups.items():
        own_specs = [specs[number][1] for number in numbers]
        created = in_group(comm, groups, partial(_reductions, own_specs))
        reductions.update(zip(numbers, created or ()))
    return [reductions.get(number) for number in range(len(specs))]


def _reductions(specs: Sequence[ReductionSpec], group: Communicator) -> list[Reduction]:
    return group.reductions(specs)
