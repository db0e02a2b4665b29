"""Boxes of all ranks as a product of intervals, one list per axis. Pure arithmetic.

Every layout that a strategy makes is a product of balanced cuts, and so is what a layer needs of its inputs. Then
what a rank shares with all others factors by axes, and the traffic of 1,024 ranks costs no loop over pairs of them::

    array of 4 x 6, grid 2 x 3           rank = 3 * row + column
      axis 0: [0, 2) [2, 4)
      axis 1: [0, 2) [2, 4) [4, 6)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from halograd.dtensor import Box, axis_names, balanced_boundaries

__all__ = ["PARTS", "Blocks", "Parts", "cut", "grid_of", "intervals", "parts_key"]

#: Axes of a strategy, in the order of the ranks.
PARTS = ("sample", "depth", "height", "width", "channel", "input_channel")
#: Parts per axis of a strategy, in that order.
Parts = tuple[int, ...]
Intervals = tuple[tuple[int, int], ...]


def parts_key(parts: Mapping[str, int]) -> Parts:
    """Parts per axis as a tuple in the order of `PARTS`.

    >>> parts_key({"height": 2})
    (1, 1, 2, 1, 1, 1)
    """
    return tuple(int(parts.get(axis, 1)) for axis in PARTS)


def grid_of(shape: Sequence[int], parts: Parts) -> tuple[int, ...]:
    """Parts per axis of an array ``(N, *spatial, C)``: what `layers.strategy.layout_of` makes of a strategy's.

    >>> grid_of((8, 32, 32, 3), (2, 1, 4, 1, 1, 1)), grid_of((8, 100), (2, 1, 4, 1, 3, 1))
    ((2, 4, 1, 1), (8, 3))
    """
    channels = parts[4] * parts[5]
    if len(shape) == 2:
        return (min(shape[0], math.prod(parts[:4])), channels)
    names = axis_names(len(shape))
    spatial = [parts[PARTS.index(name)] for name in names[1:-1]]
    return (parts[0], *spatial, channels)


@lru_cache(maxsize=65536)
def intervals(size: int, parts: int) -> Intervals:
    """The blocks of a balanced cut.

    >>> intervals(5, 2)
    ((0, 3), (3, 5))
    """
    bounds = balanced_boundaries(size, parts)
    return tuple(itertools.pairwise(bounds))


@dataclass(frozen=True)
class Blocks:
    """One box per rank: the product of one interval per axis.

    Attributes
    ----------
    axes
        Per axis of the array, the intervals of its parts; empty ones and such that overlap are allowed.
        Ranks ``0 .. ranks - 1`` are numbered row-major over the parts; others hold nothing.
    """

    axes: tuple[Intervals, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Blocks are looked up far more often than made, and are long.
        return hash(self.axes)

    @cached_property
    def grid(self) -> tuple[int, ...]:
        """Parts per axis."""
        return tuple(len(axis) for axis in self.axes)

    @cached_property
    def ranks(self) -> int:
        """Ranks that have a place in the grid (their boxes may be empty)."""
        return math.prod(self.grid)

    @cached_property
    def bounds(self) -> tuple[np.ndarray, ...]:
        """Per axis, an array ``(parts, 2)`` of starts and stops."""
        return tuple(np.array(axis, np.int64).reshape(-1, 2) for axis in self.axes)

    @cached_property
    def extents(self) -> tuple[np.ndarray, ...]:
        """Per axis, the length of every interval."""
        return tuple(np.maximum(0, b[:, 1] - b[:, 0]) for b in self.bounds)

    def coordinates(self, rank: int) -> tuple[int, ...] | None:
        """Place of a rank in the grid; None for a rank that holds nothing."""
        if rank >= self.ranks:
            return None
        found = []
        for parts in reversed(self.grid):
            rank, at = divmod(rank, parts)
            found.append(at)
        return tuple(reversed(found))

    def box(self, rank: int) -> Box:
        """Global box of a rank."""
        at = self.coordinates(rank)
        if at is None:
            return Box((0,) * len(self.axes), (0,) * len(self.axes))
        return Box.of_ranges([axis[i] for axis, i in zip(self.axes, at)])

    @cached_property
    def fullest(self) -> int:
        """Most elements of one rank."""
        return math.prod(int(e.max()) for e in self.extents)

    def sizes(self, ranks: int) -> np.ndarray:
        """Elements per rank of ``0 .. ranks - 1``."""
        return spread(outer(self.extents), ranks)

    def map(self, *changes: Callable[[int, int], tuple[int, int]] | None) -> Blocks:
        """Every axis' intervals mapped by a function of ``(start, stop)``; None: as they are."""
        axes = [
            axis if change is None else tuple(change(a, b) if b > a else (0, 0) for a, b in axis)
            for axis, change in zip(self.axes, changes)
        ]
        return Blocks(tuple(axes))


@lru_cache(maxsize=65536)
def cut(shape: tuple[int, ...], parts: Parts) -> Blocks:
    """Balanced blocks of a global array ``(N, *spatial, C)`` under the parts of a strategy."""
    return Blocks(tuple(intervals(n, p) for n, p in zip(shape, grid_of(shape, parts))))


def outer(axes: Sequence[np.ndarray]) -> np.ndarray:
    """Product over the axes of one number per part: one per rank, row-major."""
    total = np.ones(1, axes[0].dtype)
    for axis in axes:
        total = (total[:, None] * axis).reshape(-1)
    return total


def spread(values: np.ndarray, ranks: int) -> np.ndarray:
    """Values of the first ranks, zeros for the others."""
    if len(values) >= ranks:
        return values[:ranks]
    return np.concatenate([values, np.zeros(ranks - len(values), values.dtype)])
