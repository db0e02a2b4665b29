"""Layouts: the boxes of a global array that the ranks own; and blocks, one box per rank. Pure arithmetic.

The parts of an array that ranks own, need or read are cut axis by axis: blocks are a product of intervals, with one
list of intervals per axis. So no box per rank is stored, and the elements that a rank shares with all others follow
from one axis at a time::

    array of 4 x 6, grid 2 x 3           rank = 3 * row + column
      axis 0: [0, 2) [2, 4)
      axis 1: [0, 2) [2, 4) [4, 6)

A layout is a product of intervals (:class:`Blocks`) that covers the array. Two layouts are equal exactly if all their
boundaries are equal: layouts with different block heights differ, although both are cut along height.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import overload

import numpy as np

from .box import Box

__all__ = [
    "Blocks",
    "Interval",
    "Intervals",
    "Layout",
    "axis_names",
    "balanced_boundaries",
    "intervals",
    "outer",
    "shared_boundaries",
]

_SPATIAL = ("depth", "height", "width")


def axis_names(ndim: int) -> tuple[str, ...]:
    """Return the names of the axes of an ``(N, *spatial, C)`` array.

    >>> axis_names(4)
    ('sample', 'height', 'width', 'channel')
    """
    spatial = ndim - 2
    if not 0 <= spatial <= 3:
        raise ValueError(f"expected an array of 2 to 5 axes (N, *spatial, C), got {ndim} axes")
    return ("sample", *_SPATIAL[3 - spatial :], "channel")


@dataclass(frozen=True)
class Layout:
    """Boxes of a global array on the ranks ``0 .. size-1`` of a communicator.

    Attributes
    ----------
    shape
        Global shape.
    boxes
        Owned box per rank; empty for a rank that holds nothing.
    partial
        Whether the boxes hold summands of the array (a pending sum: `Partial`). If not, boxes that overlap hold equal
        values (`Replicate`), and disjoint boxes are a `Shard`.
    """

    shape: tuple[int, ...]
    boxes: Blocks
    partial: bool = False

    def __post_init__(self) -> None:
        if len(self.boxes.axes) != len(self.shape) or not self.boxes.covers(self.shape):
            raise ValueError(
                f"a layout must own every element and nothing else: expected intervals that cover {self.shape}, got "
                f"{self.boxes.axes}"
            )

    @classmethod
    def blocks(
        cls,
        shape: Sequence[int],
        parts: Sequence[int] | Mapping[str, int],
        size: int,
        boundaries: Mapping[int, Sequence[int]] | None = None,
    ) -> Layout:
        """Cut every axis into contiguous blocks; ranks are in row-major order of the blocks.

        Parameters
        ----------
        shape
            Global shape.
        parts
            Parts per axis, as a sequence or by axis name; ranks beyond their product own nothing.
        size
            Number of ranks.
        boundaries
            Per axis, the ``parts + 1`` boundaries of uneven blocks; by default blocks are balanced.

        Examples
        --------
        >>> Layout.blocks((1, 5, 4, 3), (1, 2, 2, 1), 4).boxes[3]
        Box((0, 3, 2, 0), (1, 5, 4, 3))
        """
        shape = tuple(shape)
        if isinstance(parts, Mapping):
            names = axis_names(len(shape))
            # One part along an axis that the array lacks cuts nothing.
            if unknown := [name for name, n in parts.items() if name not in names and n != 1]:
                raise ValueError(f"parts: expected {', '.join(names)} for {shape}, got {unknown[0]!r}")
            parts = [parts.get(name, 1) for name in names]
        if len(parts) != len(shape):
            raise ValueError(f"expected parts for the {len(shape)} axes of {shape}, got {tuple(parts)}")
        if math.prod(parts) > size:
            raise ValueError(f"{tuple(parts)} parts need {math.prod(parts)} ranks, there are {size}")
        cuts = [_cuts(n, p, (boundaries or {}).get(d), d) for d, (n, p) in enumerate(zip(shape, parts))]
        return cls(shape, Blocks(cuts, size))

    @classmethod
    def replicated(cls, shape: Sequence[int], size: int) -> Layout:
        """Return the layout in which every rank holds the whole array."""
        return cls._along_first(shape, [shape[0]] * size)

    @classmethod
    def on_rank(cls, shape: Sequence[int], rank: int, size: int) -> Layout:
        """Return the layout in which one rank holds the whole array and the others hold nothing."""
        return cls._along_first(shape, [shape[0] if r == rank else 0 for r in range(size)])

    @classmethod
    def _along_first(cls, shape: Sequence[int], held: Sequence[int]) -> Layout:
        """Return the layout in which each rank holds the first `held` elements of axis 0, and all of the other axes."""
        # One part of axis 0 per rank, so that each rank may have another interval.
        return cls(tuple(shape), Blocks([tuple((0, n) for n in held), *(((0, n),) for n in shape[1:])]))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.boxes.size

    @property
    def overlapping(self) -> bool:
        """Whether the boxes of two ranks have an element in common."""
        return self.boxes.overlapping

    def summed(self) -> Layout:
        """Return the layout whose boxes hold summands of the array (a pending sum)."""
        return Layout(self.shape, self.boxes, partial=True)


def _cuts(size: int, parts: int, boundaries: Sequence[int] | None, axis: int) -> Intervals:
    if boundaries is None:
        return intervals(size, parts)
    boundaries = tuple(boundaries)
    rising = all(a <= b for a, b in itertools.pairwise(boundaries))
    if len(boundaries) != parts + 1 or boundaries[0] != 0 or boundaries[-1] != size or not rising:
        raise ValueError(f"axis {axis}: expected {parts + 1} rising boundaries from 0 to {size}, got {boundaries}")
    return tuple(itertools.pairwise(boundaries))


Interval = tuple[int, int]
Intervals = tuple[Interval, ...]


def balanced_boundaries(size: int, parts: int) -> tuple[int, ...]:
    """Return the ``parts + 1`` boundaries of a balanced split: the first ``size % parts`` blocks have one element more.

    >>> balanced_boundaries(10, 4)
    (0, 3, 6, 8, 10)
    """
    if parts < 1:
        raise ValueError(f"expected at least one part, got {parts}")
    base, more = divmod(size, parts)
    return tuple(i * base + min(i, more) for i in range(parts + 1))


def shared_boundaries(size: int, shares: Sequence[int]) -> tuple[int, ...]:
    """Return the boundaries, rounded to the nearest integers, of a split into parts in proportion to `shares`.

    An array of half the size has half the boundaries, up to rounding. So blocks stay at the same relative position
    after a strided layer.

    >>> shared_boundaries(10, (3, 1, 1)), shared_boundaries(5, (3, 1, 1))
    ((0, 6, 8, 10), (0, 3, 4, 5))
    """
    if not shares or min(shares) < 1:
        raise ValueError(f"expected shares >= 1, one per part, got {tuple(shares)}")
    whole = sum(shares)
    # Rounded to the nearest integer, halves upwards, without floating-point numbers.
    return (0, *((2 * size * held + whole) // (2 * whole) for held in itertools.accumulate(shares)))


@lru_cache(maxsize=65536)
def intervals(size: int, parts: int) -> Intervals:
    """Return the intervals of a balanced split.

    >>> intervals(5, 2)
    ((0, 3), (3, 5))
    """
    return tuple(itertools.pairwise(balanced_boundaries(size, parts)))


class Blocks(Sequence[Box]):
    """One box per rank: the product of one interval per axis.

    A `Blocks` object is a sequence of the boxes of all ranks.

    Parameters
    ----------
    axes
        Per axis of the array, the intervals of its parts. Intervals may be empty, overlap, or repeat (replicas).
        Ranks ``0 .. placed - 1`` are numbered row-major over the parts.
    size
        Number of ranks, including ranks without a box; by default `placed`.

    Attributes
    ----------
    grid
        Parts per axis.
    placed
        Number of ranks that have a position in the grid.

    Examples
    --------
    >>> blocks = Blocks((((0, 2), (2, 4)), ((0, 6),)), 3)
    >>> blocks[1], blocks[2].size
    (Box((2, 0), (4, 6)), 0)
    """

    def __init__(self, axes: Sequence[Intervals], size: int | None = None) -> None:
        self.axes = tuple(axes)
        self.grid = tuple(map(len, self.axes))
        self.placed = math.prod(self.grid)
        self.size = self.placed if size is None else size
        if self.size < self.placed:
            raise ValueError(f"{self.grid} parts need {self.placed} ranks, there are {self.size}")
        self._hash: int | None = None
        self._last: tuple[int, Box] | None = None  # a program looks up the same rank many times

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Blocks) and self.size == other.size and self.axes == other.axes)

    def __hash__(self) -> int:
        if self._hash is None:  # blocks are long, and are hashed far more often than created
            self._hash = hash((self.axes, self.size))
        return self._hash

    def __repr__(self) -> str:
        return f"Blocks({self.axes}, {self.size})"

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, rank: int) -> Box: ...
    @overload
    def __getitem__(self, rank: slice) -> Sequence[Box]: ...
    def __getitem__(self, rank: int | slice) -> Box | Sequence[Box]:
        if self._last is not None and self._last[0] == rank:
            return self._last[1]
        if isinstance(rank, slice):
            return [self[r] for r in range(self.size)[rank]]
        if not -self.size <= rank < self.size:
            raise IndexError(f"expected a rank below {self.size}, got {rank}")
        # A negative rank counts from the end, as in other sequences.
        at = self.coordinates(rank % self.size)
        box = self.nothing if at is None else Box.of_ranges([axis[i] for axis, i in zip(self.axes, at)])
        self._last = rank, box
        return box

    def __iter__(self) -> Iterator[Box]:
        # The product is row-major, as ranks are numbered.
        for ranges in itertools.product(*self.axes):
            yield Box.of_ranges(ranges)
        yield from itertools.repeat(self.nothing, self.size - self.placed)

    @cached_property
    def nothing(self) -> Box:
        """Box of a rank outside the grid: no samples, but the usual sample shape, so that channels match the weights.
        """
        return Box((0,) * len(self.axes), (0, *(max(b for _, b in axis) for axis in self.axes[1:])))

    def box(self, rank: int) -> Box:
        """Return the box of a rank; the rank may be larger than `size`."""
        return self[rank] if rank < self.size else self.nothing

    def coordinates(self, rank: int) -> tuple[int, ...] | None:
        """Return the coordinates of a rank in the grid; None for a rank outside it."""
        if rank >= self.placed:
            return None
        coordinates = []
        # Row-major: the last axis is the fastest.
        for parts in reversed(self.grid):
            rank, at = divmod(rank, parts)
            coordinates.append(at)
        return tuple(coordinates[::-1])

    @property
    def extents(self) -> tuple[np.ndarray, ...]:
        """Length of every interval, per axis."""
        return tuple(map(_extents, self.axes))

    @cached_property
    def longest(self) -> tuple[int, ...]:
        """Length of the longest interval, per axis."""
        return tuple(map(_longest, self.axes))

    @property
    def fullest(self) -> int:
        """Number of elements of the largest box."""
        return math.prod(self.longest)

    def sizes(self) -> np.ndarray:
        """Return the number of elements per rank."""
        return padded(outer(self.extents), self.size)

    @cached_property
    def overlapping(self) -> bool:
        """Whether the boxes of two ranks have an element in common."""
        # Two parts of an axis that overlap belong to ranks with equal parts along all other axes.
        return any(_overlap(axis) for axis in self.axes) and self.fullest > 0

    def covers(self, shape: Sequence[int]) -> bool:
        """Return whether every element of an array of this shape lies in some box, and every box in the array."""
        # Boxes are all products of the intervals, so they cover the array if each axis is covered.
        return all(_covers(axis, n) for axis, n in zip(self.axes, shape, strict=True))

    def contain(self, others: Blocks) -> bool:
        """Return whether the box of every rank contains the box of the same rank in `others`."""
        if self.axes == others.axes:
            return True
        if self.grid == others.grid:
            # Each interval that is not empty belongs to a box with elements, unless all boxes of `others` are empty.
            return all(_contains(a, b) for a, b in zip(self.axes, others.axes)) or not others.fullest
        # With different grids, a rank has unrelated intervals: compare its boxes.
        return all(a.contains(b) for a, b in zip(self, others))

    def map(self, *changes: Callable[[int, int], Interval] | None) -> Blocks:
        """Map the intervals of each axis by a function of ``(start, stop)``; None keeps them. Empty ones stay empty."""
        axes = [
            axis if change is None else tuple(change(a, b) if b > a else (0, 0) for a, b in axis)
            for axis, change in zip(self.axes, changes, strict=True)
        ]
        return Blocks(axes, self.size)

    def clipped(self, shape: Sequence[int]) -> Blocks:
        """Return the blocks clipped to an array of this shape."""
        return Blocks([_clip(axis, n) for axis, n in zip(self.axes, shape, strict=True)], self.size)

    def ended(self, owned: Blocks, slack: Sequence[int]) -> Blocks:
        """Return the blocks with each interval extended to the end of the owned one, if that is at most `slack`
        elements further.
        """
        axes = [_ended(axis, own, more) for axis, own, more in zip(self.axes, owned.axes, slack, strict=True)]
        return Blocks(axes, self.size)

    def replace(self, axis: int, parts: Intervals) -> Blocks:
        """Return the blocks with other intervals along one axis."""
        axes = list(self.axes)
        axes[axis] = parts
        return Blocks(axes, self.size)

    def joined(self, others: Sequence[Blocks]) -> Blocks:
        """Return, per rank and axis, the smallest interval that holds the intervals of `self` and `others`; all grids
        are equal.
        """
        axes = []
        for d, axis in enumerate(self.axes):
            rows = {axis, *(other.axes[d] for other in others)}
            # Without a change it is the same object, which comparisons of blocks recognize at once.
            axes.append(axis if len(rows) == 1 else tuple(_hull(row) for row in zip(*rows, strict=True)))
        return Blocks(axes, self.size)


def outer(axes: Sequence[np.ndarray]) -> np.ndarray:
    """Return, for each rank of the grid, the product of the values of its parts; each axis has one value per part."""
    total = np.ones(1, axes[0].dtype)
    for axis in axes:
        # Ranks are row-major: each further axis is faster than those before it.
        total = (total[:, None] * axis).reshape(-1)
    return total


def padded(values: np.ndarray, size: int) -> np.ndarray:
    """Return the values of `size` ranks: those of the first ranks, followed by zeros; further values are dropped."""
    return np.concatenate([values, np.zeros(max(0, size - len(values)), values.dtype)])[:size]


@lru_cache(maxsize=16384)
def _extents(axis: Intervals) -> np.ndarray:
    start, stop = np.array(axis, np.int64).reshape(-1, 2).T
    return np.maximum(0, stop - start)


@lru_cache(maxsize=16384)
def _longest(axis: Intervals) -> int:
    return max(0, max(stop - start for start, stop in axis))


@lru_cache(maxsize=16384)
def _overlap(axis: Intervals) -> bool:
    full = sorted((a, b) for a, b in axis if b > a)
    # In the order of their starts, some two neighbors overlap if any two intervals do.
    return any(b > c for (_, b), (c, _) in itertools.pairwise(full))


@lru_cache(maxsize=16384)
def _covers(axis: Intervals, size: int) -> bool:
    at = 0
    for a, b in sorted(axis):
        if b > a:
            if a > at or a < 0 or b > size:  # `at`: all elements before it are covered
                return False
            at = max(at, b)
    return at == size


@lru_cache(maxsize=16384)
def _contains(axis: Intervals, other: Intervals) -> bool:
    # An empty interval is contained in any other.
    return all(d <= c or (a <= c and d <= b) for (a, b), (c, d) in zip(axis, other))


@lru_cache(maxsize=16384)
def _ended(axis: Intervals, owned: Intervals, slack: int) -> Intervals:
    # Only intervals with elements, so that a rank that needs nothing still needs nothing.
    return tuple((a, d if a < b <= d <= b + slack else b) for (a, b), (_, d) in zip(axis, owned))


@lru_cache(maxsize=16384)
def _clip(axis: Intervals, size: int) -> Intervals:
    if all(a >= 0 and b <= size for a, b in axis):
        return axis  # the same object, which comparisons of blocks recognize at once
    return tuple((max(0, a), min(size, b)) for a, b in axis)


def _hull(parts: Sequence[Interval]) -> Interval:
    # Empty intervals do not count; if all are empty, the result is the first one.
    full = [(a, b) for a, b in parts if b > a] or [parts[0]]
    return min(a for a, _ in full), max(b for _, b in full)
