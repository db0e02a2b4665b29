"""Groups: the ranks of a grid that share something, such as samples, or a block of a parameter. Pure arithmetic.

Ranks are numbered row-major over a grid. Those of a group agree along some axes and take all places along others, so a
group is found by arithmetic, whatever the number of ranks::

    grid 2 x 3, agreeing along the first axis: (0 1 2) (3 4 5);  along the second: (0 3) (1 4) (2 5)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = ["Groups"]


@dataclass(frozen=True)
class Groups:
    """Disjoint groups of the ranks ``0 .. size - 1``.

    Attributes
    ----------
    runs
        ``(parts, place)`` from the slowest axis to the fastest, neighbors of one kind as one: ``"each"`` part has
        groups of its own, ``"all"`` are of one group, or the ``"first"`` only, and the others of none.
    size
        Number of ranks; those beyond the grid are in no group.

    Examples
    --------
    >>> groups = Groups.agreeing((2, 3), (0,), 8)
    >>> [groups.color(rank) for rank in range(8)], groups.members(1)
    ([0, 0, 0, 1, 1, 1, None, None], range(3, 6))
    """

    runs: tuple[tuple[int, str], ...]
    size: int

    @classmethod
    def agreeing(cls, grid: Sequence[int], axes: Collection[int], size: int, first: Collection[int] = ()) -> Groups:
        """Ranks that agree along `axes` of a grid; along the axes `first`, those at the first place only."""
        places = ["each" if d in axes else "first" if d in first else "all" for d in range(len(grid))]
        runs: list[tuple[int, str]] = []
        for parts, place in zip(grid, places):
            if parts == 1:
                continue
            if runs and runs[-1][1] == place:
                parts *= runs.pop()[0]
            runs.append((parts, place))
        return cls(tuple(runs), size)

    @classmethod
    def whole(cls, size: int) -> Groups:
        """All ranks together."""
        return cls.agreeing((size,), (), size)

    @cached_property
    def placed(self) -> int:
        """Ranks that have a place in the grid."""
        return math.prod(parts for parts, _ in self.runs)

    @cached_property
    def count(self) -> int:
        """Number of groups."""
        return math.prod(parts for parts, place in self.runs if place == "each")

    @cached_property
    def members_each(self) -> int:
        """Ranks of every group."""
        return math.prod(parts for parts, place in self.runs if place == "all")

    @property
    def is_whole(self) -> bool:
        """Whether all ranks are of one group."""
        return self.members_each == self.size

    def color(self, rank: int) -> int | None:
        """Number of the group of a rank; None for a rank that is in none."""
        if rank >= self.placed:
            return None
        color, scale = 0, 1
        for parts, place in reversed(self.runs):
            rank, at = divmod(rank, parts)
            if place == "each":
                color, scale = color + at * scale, scale * parts
            elif place == "first" and at:
                return None
        return color

    def members(self, color: int) -> range:
        """The ranks of a group, in order.

        Raises
        ------
        ValueError
            If they do not follow one another at one distance: of groups that take all places along two axes apart.
        """
        first, step, count, stride = 0, 1, 1, 1
        for parts, place in reversed(self.runs):
            if place == "each":
                color, at = divmod(color, parts)
                first += at * stride
            elif place == "all":
                if count > 1:
                    raise ValueError(f"expected groups along neighboring axes, got {self.runs}")
                count, step = parts, stride
            stride *= parts
        return range(first, first + count * step, step)

    def leads(self, rank: int) -> bool:
        """Whether a rank is the first of its group."""
        color = self.color(rank)
        return color is not None and self.members(color)[0] == rank
