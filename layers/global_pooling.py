"""Global average pooling: one number per sample and channel, of samples that are cut in space."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from halograd.dtensor import Blocks, Exchange, Layout
from halograd.layers.binding import Binding
from halograd.layers.layer import Layer, Shape
from halograd.layers.operator import Operator

__all__ = ["GlobalAveragePool"]


class GlobalAveragePool(Layer):
    """Mean over all positions: ``(N, *spatial, C)`` -> ``(N, C)``.

    ``y[n, c] = (1 / positions) * sum_s x[n, s, c]``, accumulated in float64.

    Notes
    -----
    Before: blocks cut in samples and space; after: whole samples, spread over all ranks.
    Communication per process: one float64 per channel of each own sample that another rank owns behind, and
    backward, the adjoint, one number of the compute dtype (a broadcast to the ranks of the sample).
    """

    cuts_channels = "channelwise"

    def output_shape(self, *shapes: Shape) -> Shape:
        (shape,) = shapes
        if len(shape) < 2:
            raise ValueError(
                f"GlobalAveragePool: expected samples with spatial axes (*spatial, C), got {shape}; "
                "remove the layer: there is nothing to average over"
            )
        return (shape[-1],)

    def flops(self, *shapes: Shape) -> int:
        return math.prod(shapes[0])

    def needed_blocks(self, i: int, inputs: Sequence[Layout], output: Layout) -> Blocks:
        """Sums are made where the input is: nothing has to be gathered."""
        return inputs[i].boxes

    def bind(self, binding: Binding) -> Operator:
        return _GlobalAveragePoolOperator(binding)


class _GlobalAveragePoolOperator(Operator):
    def __init__(self, b: Binding) -> None:
        self.b = b
        layout = b.inputs[0].layout
        self.scale = 1.0 / math.prod(layout.shape[1:-1])
        self.axes = tuple(range(1, len(layout.shape) - 1))
        #: Per rank, the samples and channels of which it holds a summand.
        self.summands = without_space(layout.boxes)
        self.partial = b.scratch(self.summands[b.rank].shape, np.dtype("float64"))
        self.total = b.scratch(b.box.shape, np.dtype("float64"))
        self.exchange = Exchange(
            b.comm, self.summands, b.output.layout.boxes, self.partial, self.total, combine="sum", kind="redistribute"
        )

    def forward(self) -> None:
        b = self.b
        value = b.inputs[0]
        if value.box.size:
            np.add.reduce(value.array, axis=self.axes, dtype=np.float64, out=self.partial)
        self.exchange.run()
        np.multiply(self.total, self.scale, out=b.output.array, casting="same_kind")

    def bind_backward(self) -> None:
        b = self.b
        value = b.inputs[0]
        self.dx = b.gradient(0)
        self.dy = b.scratch(self.summands[b.rank].shape, value.dtype)
        self.broadcast = Exchange(
            b.comm, b.output.layout.boxes, self.summands, b.output.dy, self.dy, kind="redistribute"
        )
        samples, channels = self.dy.shape
        self.spread = self.dy.reshape(samples, *(1 for _ in self.axes), channels)

    def backward(self) -> None:
        self.broadcast.run()
        if self.dx.size:
            np.multiply(self.spread, self.scale, out=self.dx)


def without_space(boxes: Blocks) -> Blocks:
    """Samples and channels of the boxes of ``(N, *spatial, C)``: what a sum over a block is of. Pure arithmetic.

    >>> without_space(Blocks((((0, 2), (2, 4)), ((0, 3), (3, 3)), ((0, 8),))), ).axes[0]
    ((0, 2), (0, 0), (2, 4), (2, 2))
    """
    samples, *spatial, channels = boxes.axes
    full = [all(b > a for a, b in place) for place in itertools.product(*spatial)]
    return Blocks((tuple((a, b if there else a) for a, b in samples for there in full), channels), boxes.size)
