"""Layouts: which box of a global array every rank owns.

Pure arithmetic. A layout holds one box per rank, so two layouts are equal exactly if all their
boundaries are (comparing only "cut along height" is how others add blocks of different height).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from halograd.dtensor.box import Box

__all__ = ["Layout", "axis_names", "balanced_boundaries"]

_SPATIAL = ("depth", "height", "width")


def axis_names(ndim: int) -> tuple[str, ...]:
    """Names of the axes of an ``(N, *spatial, C)`` array.

    >>> axis_names(4)
    ('sample', 'height', 'width', 'channel')
    """
    spatial = ndim - 2
    if not 0 <= spatial <= 3:
        raise ValueError(f"expected an array of 2 to 5 axes (N, *spatial, C), got {ndim} axes")
    return ("sample", *_SPATIAL[3 - spatial :], "channel")


def balanced_boundaries(size: int, parts: int) -> tuple[int, ...]:
    """The ``parts + 1`` boundaries of a balanced split: the first ``size % parts`` blocks hold one more.

    >>> balanced_boundaries(10, 4)
    (0, 3, 6, 8, 10)
    """
    if parts < 1:
        raise ValueError(f"expected at least one part, got {parts}")
    base, more = divmod(size, parts)
    return tuple(i * base + min(i, more) for i in range(parts + 1))


@dataclass(frozen=True)
class Layout:
    """Boxes of a global array over the ranks ``0 .. size-1`` of a communicator.

    Attributes
    ----------
    shape
        Global shape.
    boxes
        Owned box per rank; empty for a rank that holds nothing.
    partial
        The boxes overlap and the array is their sum (a pending sum: `Partial`). Otherwise boxes
        that overlap hold equal values (`Replicate`), and disjoint boxes are a `Shard`.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    partial: bool = False

    def __post_init__(self) -> None:
        whole = Box.of_shape(self.shape)
        for rank, box in enumerate(self.boxes):
            if box.ndim != len(self.shape) or not whole.contains(box):
                raise ValueError(f"the box of rank {rank}, {box}, does not lie in an array of shape {self.shape}")
        owned = sum(box.size for box in self.boxes)
        if owned < whole.size:
            raise ValueError(
                f"a layout must own every element: {owned} of {whole.size} elements of {self.shape} are owned"
            )

    @classmethod
    def blocks(
        cls,
        shape: Sequence[int],
        parts: Sequence[int] | Mapping[str, int],
        size: int,
        boundaries: Mapping[int, Sequence[int]] | None = None,
    ) -> Layout:
        """Cut every axis into contiguous blocks, ranks in row-major order of the blocks.

        Parameters
        ----------
        shape
            Global shape.
        parts
            Parts per axis, as a sequence or by axis name; ranks beyond their product own nothing.
        size
            Number of ranks.
        boundaries
            Per axis, the ``parts + 1`` boundaries of uneven blocks; balanced where not given.

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
        ranges = [list(itertools.pairwise(c)) for c in cuts]
        boxes = [Box.of_ranges(r) for r in itertools.product(*ranges)]
        return cls(shape, (*boxes, *[_nothing(shape)] * (size - len(boxes))))

    @classmethod
    def replicated(cls, shape: Sequence[int], size: int) -> Layout:
        """Every rank holds the whole array."""
        return cls(tuple(shape), (Box.of_shape(shape),) * size)

    @classmethod
    def on_rank(cls, shape: Sequence[int], rank: int, size: int) -> Layout:
        """One rank holds the whole array, the others nothing."""
        whole, nothing = Box.of_shape(shape), _nothing(shape)
        return cls(tuple(shape), tuple(whole if r == rank else nothing for r in range(size)))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.boxes)

    @cached_property
    def overlapping(self) -> bool:
        """Whether some element lies in the boxes of two ranks."""
        return sum(box.size for box in self.boxes) > math.prod(self.shape)

    def summed(self) -> Layout:
        """The same boxes, as summands of the array (a pending sum)."""
        return Layout(self.shape, self.boxes, partial=True)


def _nothing(shape: Sequence[int]) -> Box:
    """The box of a rank that owns nothing: no samples, each of the usual shape, so that channels still fit weights."""
    return Box((0,) * len(shape), (0, *shape[1:]))


def _cuts(size: int, parts: int, given: Sequence[int] | None, axis: int) -> tuple[int, ...]:
    if given is None:
        return balanced_boundaries(size, parts)
    given = tuple(given)
    rising = all(a <= b for a, b in itertools.pairwise(given))
    if len(given) != parts + 1 or given[0] != 0 or given[-1] != size or not rising:
        raise ValueError(f"axis {axis}: expected {parts + 1} rising boundaries from 0 to {size}, got {given}")
    return given
