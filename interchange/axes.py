"""Axes of a value in ONNX as products of parts of the axes of a node, through chains of Reshape and Transpose.

A node has samples ``(*spatial, C)``. A dimension of the value in ONNX consists of factors in row-major order. A factor
is a digit of the index along one axis of the node: ``index // stride % extent``. So a reshape groups factors anew and a
transpose reorders dimensions, without computation. Pure arithmetic.

::

    node (H, W, C)     image (N, C, H, W)      N | C | H | W
                       tokens (N, H * W, C)    N | H W | C
                       heads (N, L, h, d)      N | H W | C // d | C % d
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Axes", "Factor"]

Shape = tuple[int, ...]


class Factor(NamedTuple):
    """Digit ``index // stride % extent`` of the index along an axis of ``(N, *spatial, C)``."""

    axis: int
    stride: int
    extent: int


Dimension = tuple[Factor, ...]


@dataclass(frozen=True)
class Axes:
    """Dimensions of a value in ONNX.

    Attributes
    ----------
    shape
        Shape of the node with the axis of samples, ``(N, *spatial, C)``.
    dims
        Factors of each dimension in row-major order; a dimension of extent 1 has none.
    """

    shape: Shape
    dims: tuple[Dimension, ...]

    @classmethod
    def whole(cls, shape: Shape, order: Iterable[int | None]) -> Axes:
        """Return dimensions that are whole axes of a node of this shape, in `order`; None: a dimension of extent 1."""
        return cls(shape, tuple(() if axis is None else _digits(shape, [axis]) for axis in order))

    def transposed(self, order: Sequence[int]) -> Axes:
        return Axes(self.shape, tuple(self.dims[axis] for axis in order))

    def reshaped(self, extents: Shape) -> Axes | None:
        """Return the axes after a reshape to `extents`; None if a dimension would need a part of a digit that is no
        digit itself.

        >>> heads = Axes.whole((1, 5, 8), (0, 1, 2)).reshaped((1, 5, 2, 4))
        >>> heads.dims[2:]
        ((Factor(axis=2, stride=4, extent=2),), (Factor(axis=2, stride=1, extent=4),))
        >>> heads.reshaped((1, 5, 8)) == Axes.whole((1, 5, 8), (0, 1, 2)), heads.reshaped((1, 8, 5))
        (True, None)
        """
        left = list(itertools.chain(*self.dims))
        dimensions: list[Dimension] = []
        for extent in extents:
            own = []
            while extent > 1 and left:
                axis, stride, size = left.pop(0)
                if extent % size == 0:
                    # The whole digit belongs to this dimension.
                    own.append(Factor(axis, stride, size))
                    extent //= size
                elif size % extent == 0:
                    # Its outer part completes this dimension, and its inner part is left for the next.
                    own.append(Factor(axis, stride * (size // extent), extent))
                    left.insert(0, Factor(axis, stride, size // extent))
                    extent = 1
                else:
                    return None
            if extent != 1:
                return None
            # Equal values have equal dimensions: adjacent digits of one axis are one digit.
            dimensions.append(_merged(own))
        return None if left else Axes(self.shape, tuple(dimensions))

    def chosen(self, dim: int, first: int, last: int) -> tuple[int, int, int, Axes] | None:
        """Return the axis of the node and its interval that the range ``[first, last)`` of dimension `dim` covers, and
        the axes of that part of the value; None unless the dimension is the outermost digit of one axis.

        >>> packed = Axes.whole((1, 5, 24), (0, 1, 2)).reshaped((1, 5, 3, 8))
        >>> packed.chosen(2, 1, 2)[:3]  # the second third of the channels
        (2, 8, 16)
        """
        if len(self.dims[dim]) != 1:
            return None
        ((axis, stride, extent),) = self.dims[dim]
        # A range of an inner digit is several intervals of the axis.
        if stride * extent != self.shape[axis]:
            return None
        shape = (*self.shape[:axis], stride * (last - first), *self.shape[axis + 1 :])
        dims = list(self.dims)
        dims[dim] = (Factor(axis, stride, last - first),) if last - first > 1 else ()
        return axis, stride * first, stride * last, Axes(shape, tuple(dims))

    def without(self, dim: int) -> Axes:
        """Return the axes without the dimension `dim`, whose extent is 1."""
        return Axes(self.shape, self.dims[:dim] + self.dims[dim + 1 :])

    def with_channels(self, channels: int) -> Axes | None:
        """Return the axes of a node with `channels` channels in place of this one's; None unless the last dimension is
        all channels.
        """
        last = len(self.shape) - 1
        if self.dims[-1] != _digits(self.shape, [last]):
            return None
        shape = (*self.shape[:-1], channels)
        return Axes(shape, (*self.dims[:-1], _digits(shape, [last])))

    @property
    def flattened(self) -> bool | None:
        """Whether a value of two dimensions has features in the order of the node (channels vary fastest); False:
        channels first; None: another order.
        """
        features, last = self.dims[1], len(self.shape) - 1
        if self.dims[0] != _digits(self.shape, [0]) or len(self.dims) != 2:
            return None
        if features == _digits(self.shape, range(1, last + 1)):
            return True
        return False if features == _digits(self.shape, [last, *range(1, last)]) else None

    @property
    def sample(self) -> tuple[Shape, bool] | None:
        """Shape of the samples ``(*spatial, C)`` of the node or of a reshape of it, and whether ONNX has the channels
        last; None for a value in another order.

        >>> image = Axes.whole((1, 4, 6, 3), (0, 3, 1, 2))
        >>> image.sample, image.reshaped((1, 3, 24)).transposed((0, 2, 1)).sample
        (((4, 6, 3), False), ((24, 3), True))
        >>> image.transposed((0, 1, 3, 2)).sample
        """
        extents = []
        for last in (False, True):
            shape = self.with_channels_at(last)
            if shape is not None:
                pure = all(factor.axis == len(self.shape) - 1 for factor in self.dims[-1 if last else 1])
                # Preferred are channels of the node, then more of them, then channels first.
                extents.append((pure, shape[-1] * pure, not last, shape))
        if not extents:
            return None
        _, _, first, shape = max(extents)
        return shape, not first

    def with_channels_at(self, last: bool) -> Shape | None:
        """Return the shape of the samples ``(*spatial, C)`` of a value whose channels are last, or first, in ONNX; None
        for a value in another order.
        """
        samples, *inner = self.dims
        # Layers take vectors, and samples of one to three spatial axes.
        if samples != _digits(self.shape, [0]) or not 2 <= len(inner) <= 4:
            return None
        order = inner if last else [*inner[1:], inner[0]]
        if _merged(itertools.chain(*order)) != _digits(self.shape, range(1, len(self.shape))):
            return None
        return tuple(math.prod(factor.extent for factor in dim) for dim in order)


def _digits(shape: Shape, axes: Iterable[int]) -> Dimension:
    """Return one digit per axis, without axes of extent 1."""
    return tuple(Factor(axis, 1, shape[axis]) for axis in axes if shape[axis] > 1)


def _merged(factors: Iterable[Factor]) -> Dimension:
    """Return the factors with adjacent digits of one axis joined."""
    merged: list[Factor] = []
    for factor in factors:
        if merged and merged[-1].axis == factor.axis and merged[-1].stride == factor.stride * factor.extent:
            factor = Factor(factor.axis, factor.stride, merged.pop().extent * factor.extent)
        merged.append(factor)
    return tuple(merged)
