"""Process grids: which rank holds which block. Pure arithmetic, no MPI."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType

__all__ = ["ProcessGrid"]


class ProcessGrid:
    """Ranks in row-major order over named dimensions, the last one running fastest. Immutable.

    Parameters
    ----------
    parts
        Number of parts per dimension, in order, such as ``{"sample": 2, "height": 2, "width": 2}``.
    size
        Number of ranks there are. The grid may use fewer: the ranks behind it have no coordinates.

    Raises
    ------
    ValueError
        If a number of parts is not a positive integer, or the grid needs more ranks than there are.

    Examples
    --------
    With 7 ranks, 2 samples x 3 rows of blocks leave rank 6 idle::

                    height 0  1  2
        sample 0:          0  1  2
        sample 1:          3  4  5

    >>> grid = ProcessGrid({"sample": 2, "height": 3}, size=7)
    >>> grid.coords(4), grid.coords(6)
    ({'sample': 1, 'height': 1}, None)
    >>> grid.groups(["sample"])
    [(0, 1, 2), (3, 4, 5)]
    >>> grid.groups(["height"])
    [(0, 3), (1, 4), (2, 5)]
    """

    def __init__(self, parts: Mapping[str, int], size: int) -> None:
        for name, count in parts.items():
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise ValueError(f"parts of {name!r}: expected an integer >= 1, got {count!r}")
        needed = math.prod(parts.values())
        if needed > size:
            text = " x ".join(f"{name} {count}" for name, count in parts.items())
            raise ValueError(
                f"process grid {text} needs {needed} ranks, got {size}; start {needed} ranks or cut into fewer parts"
            )
        self.parts: Mapping[str, int] = MappingProxyType(dict(parts))
        self.size = size

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the dimensions, slowest first."""
        return tuple(self.parts)

    @property
    def shape(self) -> tuple[int, ...]:
        """Parts per dimension."""
        return tuple(self.parts.values())

    @property
    def used(self) -> int:
        """Number of ranks that have coordinates: ranks ``0 ... used - 1``."""
        return math.prod(self.parts.values())

    def coords(self, rank: int) -> dict[str, int] | None:
        """Coordinates of a rank, None if the grid does not use it."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank: expected 0 <= rank < {self.size}, got {rank}")
        if rank >= self.used:
            return None
        found: dict[str, int] = {}
        for name in reversed(self.names):
            rank, found[name] = divmod(rank, self.parts[name])
        return {name: found[name] for name in self.names}

    def rank(self, coords: Mapping[str, int]) -> int:
        """The rank at these coordinates (all dimensions, in any order)."""
        self._check_names(coords)
        missing = [name for name in self.names if name not in coords]
        if missing:
            raise ValueError(f"coordinates: expected one for each of {self.names}, {missing} missing")
        rank = 0
        for name, count in self.parts.items():
            if not 0 <= coords[name] < count:
                raise ValueError(f"coordinate {name!r}: expected 0 <= c < {count}, got {coords[name]}")
            rank = rank * count + coords[name]
        return rank

    def groups(self, shared: Iterable[str]) -> list[tuple[int, ...]]:
        """Ranks grouped by their coordinates in the dimensions `shared`, ordered by these.

        ``groups(["sample"])`` are the spatial groups (ranks that hold blocks of the same samples);
        ``groups([])`` is one group of all ranks that are used.
        """
        shared = tuple(shared)
        members: list[list[int]] = [[] for _ in range(self._count(shared))]
        for rank in range(self.used):
            color = self.color(rank, shared)
            assert color is not None
            members[color].append(rank)
        return [tuple(group) for group in members]

    def group(self, rank: int, shared: Iterable[str]) -> tuple[int, ...] | None:
        """The group of :meth:`groups` that `rank` is in, None if the grid does not use the rank."""
        shared = tuple(shared)
        color = self.color(rank, shared)
        return None if color is None else self.groups(shared)[color]

    def color(self, rank: int, shared: Iterable[str]) -> int | None:
        """Index in :meth:`groups` of the group of `rank`: the color to split a communicator with."""
        shared = tuple(shared)
        self._check_names(shared)
        coords = self.coords(rank)
        if coords is None:
            return None
        color = 0
        for name in self.names:
            if name in shared:
                color = color * self.parts[name] + coords[name]
        return color

    def _count(self, shared: tuple[str, ...]) -> int:
        self._check_names(shared)
        return math.prod(self.parts[name] for name in self.names if name in shared)

    def _check_names(self, names: Iterable[str]) -> None:
        unknown = [name for name in names if name not in self.parts]
        if unknown:
            raise ValueError(f"dimension: expected one of {self.names}, got {unknown[0]!r}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProcessGrid):
            return NotImplemented
        return (self.size, *self.parts.items()) == (other.size, *other.parts.items())

    def __hash__(self) -> int:
        return hash((self.size, *self.parts.items()))

    def __repr__(self) -> str:
        return f"ProcessGrid({dict(self.parts)}, size={self.size})"
