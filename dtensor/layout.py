"""Layouts: the boxes of a global array that the ranks own. Pure arithmetic.

A layout is a product of intervals (:class:`Blocks`) that covers the array. Two layouts are equal exactly if all their
boundaries are equal: layouts with different block heights differ, although both are cut along height.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .blocks import Blocks, Intervals, intervals

__all__ = ["Layout", "axis_names"]

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
            parts = [parts.get(name, 1) for name in axis_names(len(shape))]
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


def _cuts(size: int, parts: int, given: Sequence[int] | None, axis: int) -> Intervals:
    if given is None:
        return intervals(size, parts)
    given = tuple(given)
    rising = all(a <= b for a, b in itertools.pairwise(given))
    if len(given) != parts + 1 or given[0] != 0 or given[-1] != size or not rising:
        raise ValueError(f"axis {axis}: expected {parts + 1} rising boundaries from 0 to {size}, got {given}")
    return tuple(itertools.pairwise(given))
