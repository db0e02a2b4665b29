"""Flatten: from blocks of space to whole samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

from halograd.dtensor import Blocks, Box, Exchange, Layout
from halograd.layers.binding import Binding
from halograd.layers.layer import Layer, Shape
from halograd.layers.operator import Operator

__all__ = ["Flatten"]


class Flatten(Layer):
    """``(N, *spatial, C)`` -> ``(N, prod(spatial) * C)``, in channels-last order: channels vary fastest.

    (Frameworks that store channels first flatten in another order; weights of a dense layer that are taken
    from there have to be permuted accordingly.)

    Notes
    -----
    Before: blocks cut in samples and space; after: whole samples, spread over all ranks.
    Communication per process: what it owns behind and not before; backward the same, reversed.
    """

    def output_shape(self, *shapes: Shape) -> Shape:
        return (math.prod(shapes[0]),)

    def input_boxes(self, box: Box, *shapes: Shape) -> tuple[Box, ...]:
        samples = box.ranges[0] if box.size else (0, 0)
        return (Box.of_ranges([samples, *((0, n) for n in shapes[0])]),)

    def needed_blocks(self, i: int, inputs: Sequence[Layout], output: Layout) -> Blocks:
        """What is owned is sent straight into the output: nothing is gathered beside the input."""
        return inputs[i].boxes

    def bind(self, binding: Binding) -> Operator:
        return _FlattenOperator(binding)


class _FlattenOperator(Operator):
    def __init__(self, b: Binding) -> None:
        self.b = b
        value = b.inputs[0]
        whole = tuple(((0, n),) for n in b.shapes[0])
        self.boxes = Blocks((b.output.layout.boxes.axes[0], *whole), b.comm.size)
        self.exchange = Exchange(
            b.comm,
            value.layout.boxes,
            self.boxes,
            value.array,
            b.output.array.reshape(self.boxes[b.rank].shape),
            kind="redistribute",
        )

    def forward(self) -> None:
        self.exchange.run()

    def bind_backward(self) -> None:
        b = self.b
        dy = b.output.dy.reshape(self.boxes[b.rank].shape)
        # Samples have one owner behind: the boxes are disjoint and every element arrives once.
        self.back = Exchange(b.comm, self.boxes, b.inputs[0].layout.boxes, dy, b.gradient(0), kind="redistribute")

    def backward(self) -> None:
        self.back.run()
