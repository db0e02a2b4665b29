"""Geometry of a sliding operation on plain arrays: kernel, stride, dilation, padding, groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from halograd.kernels.errors import KernelError

__all__ = ["Geometry"]


@dataclass(frozen=True)
class Geometry:
    """How a window slides over the spatial axes of an array ``(N, *spatial, C)``.

    Output ``o`` of an axis reads the inputs ``o * stride - lo + dilation * j`` for ``j`` in
    ``range(kernel)``; those outside the array are padding.

    Parameters
    ----------
    kernel, stride, dilation
        One number per spatial axis, at least 1 each.
    padding
        ``(lo, hi)`` per spatial axis. ``lo`` is at least 0; a negative ``hi`` drops that many rows at
        the end (the vendor libraries know the same rule, and none accepts a negative ``lo``).
    groups
        Number of groups the channels of a convolution are divided into; pooling ignores it.

    Raises
    ------
    KernelError
        If the axes do not agree in number or a value is out of its range.

    Examples
    --------
    >>> Geometry((3, 3), (2, 2), (1, 1), ((1, 1), (1, 1))).output_shape((9, 8))
    (5, 4)
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    groups: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "kernel", tuple(self.kernel))
        object.__setattr__(self, "stride", tuple(self.stride))
        object.__setattr__(self, "dilation", tuple(self.dilation))
        object.__setattr__(self, "padding", tuple((lo, hi) for lo, hi in self.padding))
        lengths = {len(self.kernel), len(self.stride), len(self.dilation), len(self.padding)}
        if len(lengths) != 1 or not 1 <= self.ndim <= 3:
            raise KernelError(
                "expected kernel, stride, dilation and padding for the same 1, 2 or 3 spatial axes, got "
                f"{self.kernel}, {self.stride}, {self.dilation}, {self.padding}; give one entry per axis"
            )
        if min(*self.kernel, *self.stride, *self.dilation, self.groups) < 1:
            raise KernelError(
                "expected kernel, stride, dilation and groups of at least 1, got "
                f"{self.kernel}, {self.stride}, {self.dilation}, {self.groups}"
            )
        if any(lo < 0 for lo, _ in self.padding):
            raise KernelError(
                f"expected a padding of at least 0 before the first row, got {self.padding}; "
                "begin the input array at the first row that is read"
            )

    @classmethod
    def of(
        cls,
        kernel: Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int | tuple[int, int]] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> Geometry:
        """Geometry from shorthand: one number stands for all axes, one padding for both sides.

        >>> Geometry.of((3, 3), 2, 1).padding
        ((1, 1), (1, 1))
        """
        n = len(kernel)

        def every(value: int | Sequence[int]) -> tuple[int, ...]:
            return (value,) * n if isinstance(value, int) else tuple(value)

        pads = (padding,) * n if isinstance(padding, int) else tuple(padding)
        sides = tuple((p, p) if isinstance(p, int) else p for p in pads)
        return cls(tuple(kernel), every(stride), every(dilation), sides, groups)

    @property
    def ndim(self) -> int:
        """Number of spatial axes."""
        return len(self.kernel)

    @property
    def taps(self) -> int:
        """Number of positions in the window."""
        return math.prod(self.kernel)

    @property
    def extent(self) -> tuple[int, ...]:
        """Rows from the first to the last tap of each axis, both included."""
        return tuple(d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilation))

    def output_shape(self, spatial: Sequence[int]) -> tuple[int, ...]:
        """Spatial output shape (floor rule); 0 on an axis where the window does not fit once."""
        if len(spatial) != self.ndim:
            raise KernelError(
                f"expected {self.ndim} spatial extents for the kernel {self.kernel}, got {tuple(spatial)}"
            )
        return tuple(
            max(0, (n + lo + hi - e) // s + 1)
            for n, (lo, hi), e, s in zip(spatial, self.padding, self.extent, self.stride)
        )
