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

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ..dtensor import Blocks, Box, Layout, intervals
from .parameter import block_channels

if TYPE_CHECKING:
    from ..program.context import Context

__all__ = ["cuts_channels", "lower_contraction", "masking", "partial_boxes", "read_boxes"]


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


class ContractionKernels(Protocol):
    """Kernels of a layer on blocks: of the boxes `x` that is read and `y` of which a summand is computed.

    They are made with arrays ``x, w, b, y``; ``x, dy, dw, db``; ``dy, w, dx``.
    """

    def forward(self, x: Box, y: Box, relu: bool) -> Callable[..., Any]: ...
    def filter(self, x: Box, y: Box) -> Callable[..., Any]: ...
    def data(self, x: Box, y: Box) -> Callable[..., Any]: ...


def lower_contraction(context: Context, kernels: ContractionKernels, relu: bool = False) -> Callable[[], None]:
    """A layer that contracts channels, on its blocks of filters and input channels. Halos are waited for."""
    layout, parts = context.output.layout, context.parts
    channels = context.inputs[0].layout.shape[-1]
    boxes, read = partial_boxes(layout, parts), read_boxes(context.clipped(0), channels, parts)
    box, x = boxes[context.rank], context.gather(0, read)
    summed = parts["input_channel"] > 1
    # Biases are added once, by the ranks that hold them.
    bias = context.params.get("b")
    bias = None if bias is None or not bias.size else bias
    y = context.scratch(box.shape) if summed else context.y
    inputs = ((*context.timing("forward").inputs[0][:-1], int(read.extents[-1].max())),)
    timed = partial(context.timing, inputs=inputs, filters=int(boxes.extents[-1].max()))
    forward = kernels.forward(x.box, box, relu and not summed)
    x.start()
    x.finish()
    context.run(context.kernel(forward, x=x.view, w=context.params["w"], b=bias, y=y), timing=timed("forward"))
    if summed:
        total = context.exchange(boxes, layout.boxes, y, context.y, combine="sum", kind="channel")
        context.start(total)
        context.finish(total)
        if relu:
            context.run(context.kernel(_rectifying, y=context.y))

    def backward() -> None:
        masked = None
        if relu:
            masked = context.scratch(context.box.shape)
            context.run(context.kernel(masking, y=context.y_again(), dy=context.dy, dx=masked))
        dy = context.gather_gradient(boxes, masked, kind="channel")
        dy.start()
        dy.finish()
        returned = None
        if context.needs_gradient(0):
            returned = context.return_gradient(0, read)
            data = context.kernel(kernels.data(x.box, box), dy=dy.view, w=context.params["w"], dx=returned.view)
            context.run(data, timing=timed("backward_data"))
            returned.start()
        grads = {"dw": context.grads["w"], "db": None if bias is None else context.grads["b"]}
        weights = context.kernel(kernels.filter(x.box, box), x=x.view, dy=dy.view, **grads)
        context.run(weights, timing=timed("backward_filter"))
        if returned is not None:
            returned.finish()

    return backward


def _rectifying(environment: Any, y: Any) -> Any:
    return environment.kernels.activation("relu", y, y, None, None)[0]


def masking(environment: Any, y: Any, dy: Any, dx: Any) -> Any:
    """The kernel ``dx = dy where y > 0``."""
    return environment.kernels.activation("relu", y, y, dy, dx)[1]
