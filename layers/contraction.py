"""Convolutions and dense layers whose channels are cut: filter and channel parallelism, and both.

A rank has a block of filters and a block of input channels. It gathers its block of input channels over the ranks
that own parts of it, computes with its block of the weights a partial sum for all its filters, and the partial sums
are added up at the owners, who have a part of the filters each. ::

    forward    x    gather over the ranks with other filters        (nothing to do if only the sum is cut)
               y    sum over the ranks with other input channels    (nothing to do if only the filters are cut)
    backward   dy   gather, adjoint of the sum of y
               dw   local; summed over the ranks with the same block of weights only
               dx   sum at the owners, adjoint of the gather of x, halo included

References: Dryden et al. 2019, Section III-D; Jia et al. 2018, Section 4 (channel cuts).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halograd.dtensor import Blocks, Exchange, Layout, intervals
from halograd.layers.binding import Binding
from halograd.layers.operator import Operator
from halograd.layers.parameter_blocks import block_channels

__all__ = ["ContractionOperator", "cuts_channels", "partial_boxes", "read_boxes"]


def cuts_channels(parts: Mapping[str, int]) -> bool:
    """Whether filters or input channels are cut."""
    return parts["channel"] * parts["input_channel"] > 1


def partial_boxes(output: Layout, parts: Mapping[str, int]) -> Blocks:
    """Per rank, the box of the output of which it computes a summand: all its filters. Pure arithmetic."""
    filters, inner = block_channels(output.shape[-1], parts), parts["input_channel"]
    return output.boxes.replace(-1, tuple(own for own in filters for _ in range(inner)))


def read_boxes(needed: Blocks, channels: int, parts: Mapping[str, int]) -> Blocks:
    """Per rank, the part of the `needed` box (all input channels) that it reads: its block of them. Pure arithmetic."""
    return needed.replace(-1, intervals(channels, parts["input_channel"]) * parts["channel"])


class ContractionOperator(Operator):
    """A layer that contracts channels, on its blocks of filters and input channels. Halos are waited for.

    Subclasses give the kernels.
    """

    def __init__(self, b: Binding, relu: bool = False) -> None:
        self.b, self.relu = b, relu
        layout = b.output.layout
        self.boxes = partial_boxes(layout, b.parts)
        self.box = self.boxes[b.rank]
        self.read = read_boxes(b.clipped(0), layout_channels(b), b.parts)
        self.x = b.gather(0, self.read)
        self.summed = b.parts["input_channel"] > 1
        # Biases are added once, by the ranks that hold them.
        self.bias = b.params.get("b") if b.params.get("b") is not None and b.params["b"].size else None
        y = b.scratch(self.box.shape) if self.summed else b.output.array
        self.kernel = self.forward_kernel(self.x.array, self.bias, y, relu and not self.summed)
        self.sum: Exchange | None = None
        self.rectify: Any = None
        if self.summed:
            self.sum = Exchange(
                b.comm, self.boxes, layout.boxes, y, b.output.array, combine="sum", kind="channel", name=b.name
            )
            if relu:
                self.rectify, _ = b.kernels.activation("relu", b.output.array, b.output.array, None, None)
        b.end_scratch()

    def forward_kernel(self, x: Any, bias: Any, y: Any, relu: bool) -> Any:
        """The kernel that writes the partial sum `y`."""
        raise NotImplementedError

    def filter_kernel(self, x: Any, dy: Any, dw: Any, db: Any) -> Any:
        """The kernel that writes the gradients of this rank's weights."""
        raise NotImplementedError

    def data_kernel(self, dy: Any, dx: Any) -> Any:
        """The kernel that writes the gradient of the box that was read."""
        raise NotImplementedError

    def forward(self) -> None:
        self.x.start()
        self.x.finish()
        self.kernel()
        if self.sum is not None:
            self.sum.run()
        if self.rectify is not None:
            self.rectify()

    def bind_backward(self) -> None:
        b = self.b
        region = b.output.gradient
        assert region is not None
        self.mask: Any = None
        if self.relu:
            region = type(region)(b.scratch(b.box.shape), b.box)
            _, self.mask = b.kernels.activation("relu", b.output.array, b.output.array, b.output.dy, region.array)
        self.dy = b.gather_gradient(self.boxes, region, kind="channel")
        db = b.grads["b"] if self.bias is not None else None
        self.filter = self.filter_kernel(self.x.array, self.dy.array, b.grads["w"], db)
        self.back: Any = None
        self.data: Any = None
        if b.needs_gradient(0):
            self.back = b.return_gradient(0, self.read)
            self.data = self.data_kernel(self.dy.array, self.back.array)
        b.end_scratch()

    def backward(self) -> None:
        if self.mask is not None:
            self.mask()
        self.dy.start()
        self.dy.finish()
        if self.data is not None:
            self.data()
            self.back.start()
        self.filter()
        if self.back is not None:
            self.back.finish()


def layout_channels(b: Binding) -> int:
    """Channels of the whole input."""
    return b.inputs[0].layout.shape[-1]
