"""Boxes and windows: index ranges, and the ranges that a sliding operation relates. Pure arithmetic.

Every block, halo, strip and message of halograd is a :class:`Box` in global indices. A :class:`Window` gives, on one
axis, the inputs that an output needs and the outputs that an input reaches. It handles the strides, dilation, padding
and even kernels of every sliding operation; the halo of a block follows from it (DistDL's pair of range functions)::

    outputs           o0 o1 o2 o3            kernel 3, stride 2, padding (1, 0)
    inputs   . 0 1 2 3 4 5 6 7
             [---]                           o0 needs [-1, 2): -1 is padding
                 [---]                       o1 needs [1, 4)

Tests compare both ranges with brute force.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = ["Box", "Window", "hull", "input_box", "output_box"]


@dataclass(frozen=True, order=True, init=False)
class Box:
    """A half-open index range ``[start, stop)`` per axis, in global indices.

    A box with ``stop <= start`` on any axis is empty. Empty boxes compare by their bounds, so test emptiness with
    :attr:`size`, not with ``==``. Bounds may lie outside an array (a halo that reaches into the padding): clip with
    ``box & Box.of_shape(shape)``.

    >>> Box((0, 4), (6, 10)) & Box((2, 0), (9, 6))
    Box((2, 4), (6, 6))
    >>> Box((2, 4), (6, 6)).shape
    (4, 2)
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __init__(self, start: tuple[int, ...], stop: tuple[int, ...]) -> None:
        if len(start) != len(stop):
            raise ValueError(f"a box needs as many starts as stops, got {start} and {stop}")
        # A plan makes many boxes, and the `__init__` of a frozen dataclass takes three times as long.
        attributes = self.__dict__
        attributes["start"], attributes["stop"] = start, stop

    @classmethod
    def of_shape(cls, shape: Sequence[int]) -> Box:
        """Return the box of a whole array of this global shape."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def of_ranges(cls, ranges: Sequence[tuple[int, int]]) -> Box:
        """Return the box with these ``(start, stop)`` pairs."""
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

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def __and__(self, other: Box) -> Box:
        return Box(tuple(map(max, self.start, other.start)), tuple(map(min, self.stop, other.stop)))

    def contains(self, other: Box) -> bool:
        """Return whether every element of `other` lies in this box; an empty box lies in any box."""
        if other.size == 0:
            return True
        return all(map(operator.le, self.start, other.start)) and all(map(operator.ge, self.stop, other.stop))

    def shift(self, offset: Sequence[int]) -> Box:
        """Return this box moved by `offset`."""
        return Box(
            tuple(a + o for a, o in zip(self.start, offset)),
            tuple(b + o for b, o in zip(self.stop, offset)),
        )

    def slices(self, origin: Sequence[int] | None = None) -> tuple[slice, ...]:
        """Return slices that select this box in an array whose element ``[0, ...]`` is global `origin`."""
        at = origin if origin is not None else (0,) * self.ndim
        # By the extent: in an empty box, `stop` may be before `start`.
        return tuple(slice(a - o, a - o + n) for a, o, n in zip(self.start, at, self.shape))

    def replace(self, axis: int, start: int, stop: int) -> Box:
        """Return this box with another range on one axis."""
        starts, stops = list(self.start), list(self.stop)
        starts[axis], stops[axis] = start, stop
        return Box(tuple(starts), tuple(stops))

    def __repr__(self) -> str:
        return f"Box({self.start}, {self.stop})"


def hull(boxes: Sequence[Box]) -> Box:
    """Return the smallest box that contains all of `boxes`; empty boxes are ignored.

    >>> hull([Box((0,), (2,)), Box((5,), (6,)), Box((9,), (9,))])
    Box((0,), (6,))
    """
    if not boxes:
        raise ValueError("boxes: expected at least one box, got none")
    # If all boxes are empty, the first one gives the number of axes.
    full = [b for b in boxes if b.size] or [boxes[0]]
    return Box(
        tuple(min(b.start[d] for b in full) for d in range(full[0].ndim)),
        tuple(max(b.stop[d] for b in full) for d in range(full[0].ndim)),
    )


@dataclass(frozen=True)
class Window:
    """A sliding window on one axis.

    Output ``o`` reads the inputs ``o * stride - pad_lo + dilation * j`` for ``j`` in ``range(kernel)``.
    """

    kernel: int
    stride: int = 1
    pad_lo: int = 0
    pad_hi: int = 0
    dilation: int = 1

    def __post_init__(self) -> None:
        if min(self.kernel, self.stride, self.dilation) < 1:
            raise ValueError(
                f"kernel, stride and dilation must be at least 1, got {self.kernel}, {self.stride}, {self.dilation}"
            )
        if self.pad_lo < 0:
            raise ValueError(f"the padding before the first element must be >= 0, got {self.pad_lo}")

    @property
    def extent(self) -> int:
        """Number of inputs from the first to the last tap, both included."""
        return self.dilation * (self.kernel - 1) + 1

    def output_size(self, size: int) -> int:
        """Return the number of outputs of `size` inputs (floor rule); 0 if the window does not fit once."""
        return max(0, (size + self.pad_lo + self.pad_hi - self.extent) // self.stride + 1)

    def input_range(self, start: int, stop: int) -> tuple[int, int]:
        """Return the inputs that the outputs ``[start, stop)`` read; indices outside the array are padding."""
        first = start * self.stride - self.pad_lo
        if stop <= start:
            return first, first
        return first, (stop - 1) * self.stride - self.pad_lo + self.extent

    def output_range(self, start: int, stop: int, outputs: int) -> tuple[int, int]:
        """Return the outputs in ``[0, outputs)`` from which the gradient of the inputs ``[start, stop)`` follows.

        These are all outputs that read one of the inputs. If a stride leaves gaps, the range includes one more output
        on the left, so that the inputs read never begin after `start` (the vendor libraries reject negative padding on
        the left).
        """
        if stop <= start:
            return 0, 0
        # ceil((start + pad_lo - extent + 1) / stride): the first output whose last tap is at `start` or after it.
        reach = -((self.extent - 1 - start - self.pad_lo) // self.stride)
        # The last output whose first tap is at `start` or before it.
        anchor = (start + self.pad_lo) // self.stride
        first = max(0, min(reach, anchor))
        # ceil((stop + pad_lo) / stride): the first output whose first tap is at `stop` or after it.
        last = min(outputs, -(-(stop + self.pad_lo) // self.stride))
        return (first, last) if first < last else (0, 0)


def input_box(windows: Sequence[Window], box: Box, channels: int) -> Box:
    """Return the input box ``(N, *spatial, C)`` with all `channels` that the output `box` needs; not clipped."""
    if not box.size:
        return Box((0,) * box.ndim, (0,) * box.ndim)
    spatial = [w.input_range(a, b) for w, (a, b) in zip(windows, box.ranges[1:-1])]
    return Box.of_ranges([box.ranges[0], *spatial, (0, channels)])


def output_box(windows: Sequence[Window], box: Box, shape: Sequence[int]) -> Box:
    """Return the output box from which the gradient of the input `box` follows; `shape` is the global output shape."""
    empty = Box((0,) * box.ndim, (0,) * box.ndim)
    if not box.size:
        return empty
    spatial = [w.output_range(a, b, m) for w, (a, b), m in zip(windows, box.ranges[1:-1], shape[1:-1])]
    outputs = Box.of_ranges([box.ranges[0], *spatial, (0, shape[-1])])
    return outputs if outputs.size else empty
