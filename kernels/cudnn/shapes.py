"""How our packed arrays look to cuDNN, whose logical axes are (N, C, *spatial) and (K, C, *kernel). Arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from halograd.kernels.geometry import Geometry

__all__ = ["Shapes", "Tensor", "packed_strides", "read_part"]


def packed_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a packed array, in elements."""
    strides, run = [], 1
    for n in reversed(shape):
        strides.append(run)
        run *= n
    return tuple(reversed(strides))


def _channels_first(values: Sequence[int]) -> tuple[int, ...]:
    outer, *inner, last = values
    return (outer, last, *inner)


@dataclass(frozen=True)
class Tensor:
    """An array as cuDNN is told of it: logical extents (N, C, *spatial), and strides in elements."""

    dims: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def packed(cls, shape: Sequence[int]) -> Tensor:
        """A packed array ``(N, *spatial, C)`` or ``(K, *kernel, C)``."""
        return cls.leading(shape, shape[1:-1])

    @classmethod
    def leading(cls, shape: Sequence[int], spatial: Sequence[int]) -> Tensor:
        """The leading part, of extents `spatial`, of a packed array."""
        n, *_, channels = shape
        strides = list(packed_strides(shape))
        if n == 1:
            # Of one sample the leading rows are packed too; its own stride must say so, or engines take them for
            # strided and copy them first.
            strides[0] = packed_strides((n, *spatial, channels))[0]
        return cls((n, channels, *spatial), _channels_first(strides))

    @property
    def is_packed(self) -> bool:
        """Whether nothing lies between the elements."""
        n, channels, *spatial = self.dims
        return self.strides == _channels_first(packed_strides((n, *spatial, channels)))


def read_part(spatial: Sequence[int], geometry: Geometry) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The leading part of an array of extents `spatial` that is read, and the padding behind it, at least 0.

    cuDNN knows no negative padding. Where the stride skips the dropped rows anyway, there is nothing to drop.
    """
    part, behind = [], []
    outputs = geometry.output_shape(spatial)
    for n, o, (lo, hi), extent, stride in zip(spatial, outputs, geometry.padding, geometry.extent, geometry.stride):
        slack = hi < 0 and (n + lo - extent) // stride + 1 == o
        part.append(n if hi >= 0 or slack else n + hi)
        behind.append(max(0, hi))
    return tuple(part), tuple(behind)


@dataclass(frozen=True)
class Shapes:
    """A convolution as cuDNN is told of it.

    Attributes
    ----------
    x, w, y
        Image, weights and output, or their gradients. A 1-D convolution is a 2-D one of one row.
    before, behind, stride, dilation
        One number per spatial axis; the paddings are at least 0.
    part
        The leading spatial extents of `x` that are read (of our array: 1-D stays 1-D).
    """

    x: Tensor
    w: Tensor
    y: Tensor
    before: tuple[int, ...]
    behind: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    part: tuple[int, ...]

    @classmethod
    def of(cls, x: Sequence[int], w: Sequence[int], y: Sequence[int], geometry: Geometry) -> Shapes:
        """From shapes of arrays ``(N, *spatial, C)``, ``(K, *kernel, C / groups)`` and ``(N, *outputs, K)``."""
        part, behind = read_part(x[1:-1], geometry)
        before = tuple(lo for lo, _ in geometry.padding)
        rows = (1,) if geometry.ndim == 1 else ()
        none = (0,) if geometry.ndim == 1 else ()

        def lifted(shape: Sequence[int]) -> tuple[int, ...]:
            return (shape[0], *rows, *shape[1:])

        return cls(
            Tensor.leading(lifted(x), (*rows, *part)),
            Tensor.packed(lifted(w)),
            Tensor.packed(lifted(y)),
            (*none, *before),
            (*none, *behind),
            (*rows, *geometry.stride),
            (*rows, *geometry.dilation),
            part,
        )
