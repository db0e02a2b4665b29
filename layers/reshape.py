"""Flatten: from blocks of space to whole samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..dtensor import Blocks, Box, Layout
from .costs import Passes
from .layer import Layer, Shape

if TYPE_CHECKING:
    from ..program.context import Context

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

    passes = Passes()

    def output_shape(self, *shapes: Shape) -> Shape:
        return (math.prod(shapes[0]),)

    def input_boxes(self, box: Box, *shapes: Shape) -> tuple[Box, ...]:
        samples = box.ranges[0] if box.size else (0, 0)
        return (Box.of_ranges([samples, *((0, n) for n in shapes[0])]),)

    def needed_blocks(self, i: int, inputs: Sequence[Layout], output: Layout) -> Blocks:
        """What is owned is sent straight into the output: nothing is gathered beside the input."""
        return inputs[i].boxes

    def lower(self, context: Context) -> Callable[[], None]:
        value = context.inputs[0]
        whole = tuple(((0, n),) for n in context.shapes[0])
        boxes = Blocks((context.output.layout.boxes.axes[0], *whole), context.size)
        shape = boxes[context.rank].shape
        move = context.exchange(value.layout.boxes, boxes, value.view, context.y.reshape(*shape), kind="redistribute")
        context.start(move)
        context.finish(move)

        def backward() -> None:
            dy, dx = context.dy.reshape(*shape), context.gradient(0)
            # Samples have one owner behind: the boxes are disjoint and every element arrives once.
            back = context.exchange(boxes, value.layout.boxes, dy, dx, kind="redistribute")
            context.start(back)
            context.finish(back)

        return backward
