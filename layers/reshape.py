"""Flatten and reshape: from blocks of space to whole samples, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..dtensor import Blocks, Box, Layout
from .layer import Layer, Passes, Shape

if TYPE_CHECKING:
    from ..program.context import Context

__all__ = ["Flatten", "Reshape"]


class _WholeSamples(Layer):
    """Between vectors, of which a rank has whole ones, and maps, of which it has blocks; in channels-last order."""

    passes = Passes()

    def input_boxes(self, box: Box, *shapes: Shape) -> tuple[Box, ...]:
        samples = box.ranges[0] if box.size else (0, 0)
        return (Box.of_ranges([samples, *((0, n) for n in shapes[0])]),)

    def needed_blocks(self, i: int, inputs: Sequence[Layout], output: Layout) -> Blocks:
        """What is owned is sent straight into the output: nothing is gathered beside the input."""
        return inputs[i].boxes


class Flatten(_WholeSamples):
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

    def lower(self, context: Context) -> Callable[[], None]:
        value = context.inputs[0]
        boxes = _whole(context.output.layout, context.shapes[0])
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


class Reshape(_WholeSamples):
    """A vector as a map, ``(N, F)`` -> ``(N, *spatial, C)``, in channels-last order: the inverse of :class:`Flatten`.

    Parameters
    ----------
    shape
        Of one sample, ``(*spatial, C)``.

    Notes
    -----
    Before: whole samples, spread over all ranks; after: blocks cut in samples and space. Communication per process:
    what it owns behind and not before; backward the same, reversed. A map of another shape is not made directly: that
    would bring whole samples together on a rank, as ``Reshape(shape)(Flatten()(x))`` does.
    """

    def __init__(self, shape: Sequence[int], name: str | None = None) -> None:
        super().__init__(name)
        self.shape = tuple(int(n) for n in shape)
        if len(self.shape) < 2 or min(self.shape) < 1:
            raise ValueError(f"Reshape: expected (*spatial, C), all at least 1, got {self.shape}; for (F,) use Flatten")

    def output_shape(self, *shapes: Shape) -> Shape:
        (shape,) = shapes
        if len(shape) != 1:
            raise ValueError(
                f"Reshape: expected samples of shape (F,), got {shape}; put Flatten before it, which brings whole "
                "samples together on a rank"
            )
        if math.prod(self.shape) != shape[0]:
            raise ValueError(f"Reshape: expected {math.prod(self.shape)} elements for {self.shape}, got {shape[0]}")
        return self.shape

    def lower(self, context: Context) -> Callable[[], None]:
        value, blocks = context.inputs[0], context.output.layout.boxes
        boxes = _whole(value.layout, self.shape)
        shape = boxes[context.rank].shape
        x = context.gather(0, value.layout.boxes)
        x.start()
        x.finish()
        move = context.exchange(boxes, blocks, x.view.reshape(*shape), context.y, kind="redistribute")
        context.start(move)
        context.finish(move)

        def backward() -> None:
            dx = context.gradient(0).reshape(*shape)
            back = context.exchange(blocks, boxes, context.dy, dx, kind="redistribute")
            context.start(back)
            context.finish(back)

        return backward


def _whole(vectors: Layout, shape: Shape) -> Blocks:
    """Per rank, its whole samples as maps of this shape."""
    return Blocks((vectors.boxes.axes[0], *(((0, n),) for n in shape)), vectors.size)
