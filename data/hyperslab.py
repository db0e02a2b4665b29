"""Arithmetic of regular HDF5 selections, which virtual datasets consist of.

An axis of a selection takes `count` blocks of `block` indices, whose starts are `stride` apart::

    start=1, stride=4, count=3, block=2       . # # . . # # . . # # .
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from h5py import h5s

__all__ = ["Hyperslab", "hyperslabs"]

Indices = tuple[int, ...]


@dataclass(frozen=True)
class Hyperslab:
    """A regular selection, one number per axis; the count of one axis may be ``h5s.UNLIMITED``.

    >>> rows = Hyperslab((1, 0), (4, 1), (h5s.UNLIMITED, 1), (2, 3))
    >>> rows.within((8, 3))
    Hyperslab(start=(1, 0), stride=(4, 1), count=(2, 1), block=(2, 3))
    >>> rows.selected((6, 3)), rows.stop, rows.growing
    ((3, 3), (None, 3), 0)
    """

    start: Indices
    stride: Indices
    count: Indices
    block: Indices

    @property
    def growing(self) -> int | None:
        """The axis whose count is unlimited."""
        return next((axis for axis, n in enumerate(self.count) if n == h5s.UNLIMITED), None)

    @property
    def stop(self) -> tuple[int | None, ...]:
        """One past the last index, per axis; None where the axis has no end."""
        ends = (a + (n - 1) * s + b for a, s, n, b in zip(self.start, self.stride, self.count, self.block))
        return tuple(None if n == h5s.UNLIMITED else end for n, end in zip(self.count, ends))

    @property
    def block_size(self) -> int:
        """Number of selected elements; an unlimited axis counts one block."""
        counts = (1 if n == h5s.UNLIMITED else n for n in self.count)
        return math.prod(n * b for n, b in zip(counts, self.block))

    def within(self, shape: Indices) -> Hyperslab:
        """Return this selection without the blocks that begin outside an array of this shape."""
        begins = (max(0, -(-(n - a) // s)) for n, a, s in zip(shape, self.start, self.stride))
        return replace(self, count=tuple(min(n, most) for n, most in zip(self.count, begins)))

    def selected(self, shape: Indices) -> Indices:
        """Return the number of selected indices within an array of this shape, per axis."""
        inside = self.within(shape)
        full = (n * b for n, b in zip(inside.count, self.block))
        beyond = (max(0, end - n) if end is not None else 0 for end, n in zip(inside.stop, shape))
        return tuple(max(0, n - out) for n, out in zip(full, beyond))

    def part(self, axis: int, number: int) -> Hyperslab:
        """Return the selection of block `number` alone along an axis."""
        start = self.start[axis] + number * self.stride[axis]
        return replace(
            self,
            start=(*self.start[:axis], start, *self.start[axis + 1 :]),
            count=(*self.count[:axis], 1, *self.count[axis + 1 :]),
        )

    def size(self, shape: Indices) -> int:
        """Return the number of selected elements within an array of this shape."""
        return math.prod(self.selected(shape))


def hyperslabs(space: h5s.SpaceID, shape: Indices) -> list[Hyperslab]:
    """Return a selection as regular ones. An irregular selection becomes one per block.

    `shape` is the shape of the array, for a selection of all of it.

    Raises
    ------
    ValueError
        If it is a selection of points.
    """
    ones = (1,) * len(shape)
    kind = space.get_select_type()
    if kind == h5s.SEL_NONE:
        return []
    if kind == h5s.SEL_ALL:
        return [Hyperslab((0,) * len(shape), ones, ones, shape)]
    if kind != h5s.SEL_HYPERSLABS:
        raise ValueError("a selection of points, which virtual datasets do not have")
    if space.is_regular_hyperslab():
        return [Hyperslab(*(tuple(map(int, numbers)) for numbers in space.get_regular_hyperslab()))]
    found = []
    for low, high in space.get_select_hyper_blocklist().tolist():
        found.append(Hyperslab(tuple(low), ones, ones, tuple(b - a + 1 for a, b in zip(low, high))))
    return found
