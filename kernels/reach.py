"""Rules of attention along one axis: the keys that a query reads. Arithmetic only. ::

    Everywhere(4, 6)          all keys

    Windows(9, 4, shift=1)    0 | 1 2 3 4 | 5 6 7 8     a query reads the keys of its own window

    Neighborhood(7, 3)        0 1 2 . . . .    query 0, clamped at the end
                              . 1 2 3 . . .    query 2
                              . . . . 4 5 6    query 6
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

__all__ = ["Everywhere", "Interval", "Neighborhood", "Reach", "TileRun", "Windows", "runs"]

Interval = tuple[int, int]


class Reach(ABC):
    """Rule of one axis. Positions are global.

    Attributes
    ----------
    queries, keys : int
        Number of positions of the queries and of the keys in the global arrays.
    extent : int
        Upper bound of the distance of a query from a key that it reads, plus 1, in units of the dilation.
    dilation : int
        Distance of the keys that a query reads from each other.
    """

    queries: int
    keys: int
    extent: int
    dilation: int = 1

    @property
    def bias_extent(self) -> int:
        """Extent of a table of biases, which is read at ``(query - key) // dilation + extent - 1``."""
        return 2 * self.extent - 1

    @abstractmethod
    def keys_of(self, start: int, stop: int) -> Interval:
        """Return the interval of the keys that the queries ``[start, stop)`` read; ``(0, 0)`` without queries."""

    @abstractmethod
    def allowed(self, queries: Any, keys: Any) -> np.ndarray:
        """Return which of the positions `keys` each of the positions `queries` reads, as bool ``(queries, keys)``."""

    @abstractmethod
    def tiles(self, queries: Interval, keys: Interval) -> Iterator[tuple[range, range]]:
        """Yield groups of the queries in an interval, with those of the keys in an interval that the group reads.

        Every query occurs in one group, or in none if it reads none of the keys. Both ranges have the step `dilation`.
        """


@dataclass(frozen=True)
class Everywhere(Reach):
    """Every query reads all keys."""

    queries: int
    keys: int

    def __post_init__(self) -> None:
        _expect(min(self.queries, self.keys) >= 0, self)

    @property
    def extent(self) -> int:  # type: ignore[override]
        return max(1, self.queries, self.keys)

    def keys_of(self, start: int, stop: int) -> Interval:
        return (0, self.keys) if start < stop else (0, 0)

    def allowed(self, queries: Any, keys: Any) -> np.ndarray:
        return np.ones((len(queries), len(keys)), bool)

    def tiles(self, queries: Interval, keys: Interval) -> Iterator[tuple[range, range]]:
        if queries[0] < queries[1] and keys[0] < keys[1]:
            yield range(*queries), range(*keys)


class _OfOneAxis(Reach):
    """Rule for queries and keys at the same positions."""

    size: int

    @property
    def queries(self) -> int:  # type: ignore[override]
        return self.size

    @property
    def keys(self) -> int:  # type: ignore[override]
        return self.size


@dataclass(frozen=True)
class Windows(_OfOneAxis):
    """Positions in windows that begin at ``shift + k * extent`` for all integers k. A query reads its own window.

    The first and the last window may be smaller: windows do not continue at the other end. Shifted windows are those of
    Liu et al., "Swin Transformer", 2021, including the mask.
    """

    size: int
    extent: int
    shift: int = 0

    def __post_init__(self) -> None:
        _expect(self.size >= 0 and self.extent >= 1, self)

    def _begin(self, position: int) -> int:
        """Return where the window of a position begins, or would begin if there were positions below 0."""
        return position - (position - self.shift) % self.extent

    def keys_of(self, start: int, stop: int) -> Interval:
        if start >= stop:
            return 0, 0
        return max(0, self._begin(start)), min(self.size, self._begin(stop - 1) + self.extent)

    def allowed(self, queries: Any, keys: Any) -> np.ndarray:
        rows, columns = ((np.asarray(p, np.int64) - self.shift) // self.extent for p in (queries, keys))
        return rows[:, None] == columns[None, :]

    def tiles(self, queries: Interval, keys: Interval) -> Iterator[tuple[range, range]]:
        for begin in range(self._begin(queries[0]), queries[1], self.extent):
            mine, theirs = (range(max(a, begin), min(b, begin + self.extent)) for a, b in (queries, keys))
            if mine and theirs:
                yield mine, theirs


@dataclass(frozen=True)
class Neighborhood(_OfOneAxis):
    """Every query reads the `extent` keys around it at distances that are multiples of the dilation.

    At both ends the neighborhood is moved inwards, so that it keeps its extent; if fewer positions have the same
    remainder modulo the dilation, it is all of them. With an even extent there is one more key below than above. The
    rule is that of Hassani et al., "Neighborhood Attention Transformer", 2023, and Hassani and Shi, "Dilated
    Neighborhood Attention Transformer", 2022.
    """

    size: int
    extent: int
    dilation: int = 1

    def __post_init__(self) -> None:
        _expect(self.size >= 0 and min(self.extent, self.dilation) >= 1, self)

    def _first(self, queries: Any) -> Any:
        """Return the number of the first key that each query reads, counted among the keys of its remainder."""
        index, remainder = np.divmod(queries, self.dilation)
        length = (self.size - remainder + self.dilation - 1) // self.dilation
        return np.clip(index - self.extent // 2, 0, np.maximum(length - self.extent, 0))

    def _keys(self, query: int) -> range:
        first, remainder = int(self._first(query)), query % self.dilation
        start = first * self.dilation + remainder
        return range(start, min(self.size, start + self.extent * self.dilation), self.dilation)

    def keys_of(self, start: int, stop: int) -> Interval:
        if start >= stop:
            return 0, 0
        # The bounds grow with the query among queries of one remainder.
        firsts = [self._keys(q) for q in range(start, min(stop, start + self.dilation))]
        lasts = [self._keys(q) for q in range(max(start, stop - self.dilation), stop)]
        return min(k[0] for k in firsts), max(k[-1] for k in lasts) + 1

    def allowed(self, queries: Any, keys: Any) -> np.ndarray:
        queries, keys = np.asarray(queries, np.int64)[:, None], np.asarray(keys, np.int64)[None, :]
        first, index = self._first(queries), keys // self.dilation
        near: np.ndarray = (index >= first) & (index < first + self.extent)
        return near & (queries % self.dilation == keys % self.dilation)

    def tiles(self, queries: Interval, keys: Interval) -> Iterator[tuple[range, range]]:
        for remainder in range(self.dilation):
            mine, theirs = (_congruent(*interval, remainder, self.dilation) for interval in (queries, keys))
            # Groups begin at fixed positions, so that those away from the ends are equal but for their position.
            skip = (mine.start // self.dilation) % self.extent
            for at in range(-skip, len(mine), self.extent):
                group = mine[max(0, at) : at + self.extent]
                if group and theirs:
                    start, stop = self._keys(group[0])[0], self._keys(group[-1])[-1] + 1
                    read = _congruent(max(start, keys[0]), min(stop, keys[1]), remainder, self.dilation)
                    if read:
                        yield group, read


def _expect(fits: bool, reach: Reach) -> None:
    if not fits:
        raise ValueError(f"expected sizes >= 0, extents and dilations >= 1, got {reach}; change the attention")


def _congruent(start: int, stop: int, remainder: int, modulus: int) -> range:
    """Return the positions of an interval that have a remainder."""
    return range(start + (remainder - start) % modulus, stop, modulus)


@dataclass(frozen=True)
class TileRun:
    """Tiles of one axis that differ in their position only.

    Attributes
    ----------
    queries, keys
        Positions of the first tile.
    count, step
        Number of tiles, and the distance of each from the one before it.
    allowed
        The keys that a query of a tile reads, bool ``(queries, keys)``; None: all of the tile.
    """

    queries: range
    keys: range
    count: int = 1
    step: int = 0
    allowed: np.ndarray | None = None


def runs(reach: Reach, queries: Interval, keys: Interval) -> list[TileRun]:
    """Return the tiles of :meth:`Reach.tiles` as runs."""
    found: list[TileRun] = []
    tiles = [(q, k, reach.allowed(q, k)) for q, k in reach.tiles(queries, keys)]
    for _, group in groupby(tiles, key=lambda t: (len(t[0]), len(t[1]), t[0].start - t[1].start, t[2].tobytes())):
        pending = list(group)
        while pending:
            q, k, allowed = pending[0]
            step = pending[1][0].start - q.start if len(pending) > 1 else 0
            count = 1
            while count < len(pending) and pending[count][0].start == q.start + count * step:
                count += 1
            found.append(TileRun(q, k, count, step, None if allowed.all() else allowed))
            pending = pending[count:]
    return found
