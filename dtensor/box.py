"""Boxes: half-open index ranges, one per axis, in global indices.

Every block, halo, strip and message of halograd is a box. This file is pure arithmetic: it knows
neither MPI nor arrays' contents, and is tested against brute force.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = ["Box", "hull"]


@dataclass(frozen=True, order=True)
class Box:
    """A half-open index range ``[start, stop)`` per axis, in global indices.

    A box with ``stop <= start`` on any axis is empty; all empty boxes of a rank compare by their
    bounds, so test emptiness with :attr:`size`, not with ``==``. Bounds may lie outside an array
    (a halo that reaches into the padding): clip with ``box & Box.of_shape(shape)``.

    >>> Box((0, 4), (6, 10)) & Box((2, 0), (9, 6))
    Box((2, 4), (6, 6))
    >>> Box((2, 4), (6, 6)).shape
    (4, 2)
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise ValueError(f"a box needs as many starts as stops, got {self.start} and {self.stop}")

    @classmethod
    def of_shape(cls, shape: Sequence[int]) -> Box:
        """The box of a whole array of this global shape."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def of_ranges(cls, ranges: Sequence[tuple[int, int]]) -> Box:
        """The box with these ``(start, stop)`` pairs."""
        start, stop = zip(*ranges) if ranges else ((), ())
        return cls(start, stop)

    @property
    def ndim(self) -> int:
        return len(self.start)

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        return tuple(zip(self.start, self.stop))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Extent per axis; an empty axis has extent 0."""
        return tuple([b - a if b > a else 0 for a, b in zip(self.start, self.stop)])

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def __and__(self, other: Box) -> Box:
        return Box(tuple(map(max, self.start, other.start)), tuple(map(min, self.stop, other.stop)))

    def contains(self, other: Box) -> bool:
        """Whether every element of `other` lies in this box (an empty box lies in any)."""
        if other.size == 0:
            return True
        return all(map(operator.le, self.start, other.start)) and all(map(operator.ge, self.stop, other.stop))

    def shift(self, offset: Sequence[int]) -> Box:
        """This box moved by `offset`."""
        return Box(
            tuple(a + o for a, o in zip(self.start, offset)),
            tuple(b + o for b, o in zip(self.stop, offset)),
        )

    def slices(self, origin: Sequence[int] | None = None) -> tuple[slice, ...]:
        """Slices that select this box in an array whose element ``[0, ...]`` is global `origin`."""
        at = origin if origin is not None else (0,) * self.ndim
        return tuple(slice(a - o, a - o + n) for a, o, n in zip(self.start, at, self.shape))

    def replace(self, axis: int, start: int, stop: int) -> Box:
        """This box with another range on one axis."""
        ranges = list(self.ranges)
        ranges[axis] = (start, stop)
        return Box.of_ranges(ranges)

    def __repr__(self) -> str:
        return f"Box({self.start}, {self.stop})"


def hull(boxes: Sequence[Box]) -> Box:
    """The smallest box that holds all of `boxes`; empty ones do not count.

    >>> hull([Box((0,), (2,)), Box((5,), (6,)), Box((9,), (9,))])
    Box((0,), (6,))
    """
    if not boxes:
        raise ValueError("the hull of no boxes is not defined: pass at least one")
    full = [b for b in boxes if b.size] or [boxes[0]]
    return Box(
        tuple(min(b.start[d] for b in full) for d in range(full[0].ndim)),
        tuple(max(b.stop[d] for b in full) for d in range(full[0].ndim)),
    )
