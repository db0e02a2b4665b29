"""Windows: which inputs an output needs, and which outputs an input reaches, on one axis.

Strides, dilation, padding and even kernels of every sliding operation live in this one file.
Pure arithmetic; the halo of a block follows from it (DistDL's pair of range functions)::

    outputs           o0 o1 o2 o3            kernel 3, stride 2, padding (1, 0)
    inputs   . 0 1 2 3 4 5 6 7
             [---]                           o0 needs [-1, 2): -1 is padding
                 [---]                       o1 needs [1, 4)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .box import Box

__all__ = ["Window", "input_box", "output_box"]


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
        """Inputs from the first to the last tap, both included."""
        return self.dilation * (self.kernel - 1) + 1

    def output_size(self, size: int) -> int:
        """Number of outputs of `size` inputs (floor rule); 0 if the window does not fit once."""
        return max(0, (size + self.pad_lo + self.pad_hi - self.extent) // self.stride + 1)

    def input_range(self, start: int, stop: int) -> tuple[int, int]:
        """Inputs that the outputs ``[start, stop)`` read; outside the array means padding."""
        first = start * self.stride - self.pad_lo
        if stop <= start:
            return first, first
        return first, (stop - 1) * self.stride - self.pad_lo + self.extent

    def output_range(self, start: int, stop: int, outputs: int) -> tuple[int, int]:
        """Outputs out of ``[0, outputs)`` from which the gradient of the inputs ``[start, stop)`` follows.

        All outputs that read one of them, and, where a stride leaves gaps, one output more on the
        left, so that the range of inputs read never begins after `start` (the vendor libraries
        reject a negative padding on the left).
        """
        if stop <= start:
            return 0, 0
        reach = -((self.extent - 1 - start - self.pad_lo) // self.stride)
        anchor = (start + self.pad_lo) // self.stride
        first = max(0, min(reach, anchor))
        last = min(outputs, -(-(stop + self.pad_lo) // self.stride))
        return (first, last) if first < last else (0, 0)


def input_box(windows: Sequence[Window], box: Box, channels: int) -> Box:
    """Input box ``(N, *spatial, C)`` that the output `box` needs, all `channels` of it; not clipped."""
    if not box.size:
        return Box((0,) * box.ndim, (0,) * box.ndim)
    spatial = [w.input_range(a, b) for w, (a, b) in zip(windows, box.ranges[1:-1])]
    return Box.of_ranges([box.ranges[0], *spatial, (0, channels)])


def output_box(windows: Sequence[Window], box: Box, shape: Sequence[int]) -> Box:
    """Output box from which the gradient of the input `box` follows; `shape` is the global output's."""
    empty = Box((0,) * box.ndim, (0,) * box.ndim)
    if not box.size:
        return empty
    spatial = [w.output_range(a, b, m) for w, (a, b), m in zip(windows, box.ranges[1:-1], shape[1:-1])]
    found = Box.of_ranges([box.ranges[0], *spatial, (0, shape[-1])])
    return found if found.size else empty
