"""Global average pooling: one number per sample and channel, of samples that are cut in space."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..dtensor import Blocks, Layout
from .costs import Passes
from .layer import Layer, Shape

if TYPE_CHECKING:
    from ..program.context import Context

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

    passes = Passes()
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

    def lower(self, context: Context) -> Callable[[], None]:
        value, boxes = context.inputs[0], context.output.layout.boxes
        scale = 1.0 / math.prod(context.shapes[0][:-1])
        #: Per rank, the samples and channels of which it holds a summand.
        summands = without_space(value.layout.boxes)
        shape = summands[context.rank].shape
        partial_, total = context.scratch(shape, "float64"), context.scratch(context.box.shape, "float64")
        context.run(context.kernel(_sum, x=value.view, y=partial_), timing=context.timing("forward"))
        move = context.exchange(summands, boxes, partial_, total, combine="sum", kind="redistribute")
        context.start(move)
        context.finish(move)
        context.run(context.kernel(partial(_scale, scale), x=total, y=context.y))

        def backward() -> None:
            dx, dy = context.gradient(0), context.scratch(shape, value.dtype)
            back = context.exchange(boxes, summands, context.dy, dy, kind="redistribute")
            context.start(back)
            context.finish(back)
            spread = dy.reshape(shape[0], *(1 for _ in context.shapes[0][:-1]), shape[1])
            context.run(context.kernel(partial(_scale, scale), x=spread, y=dx), timing=context.timing("backward_data"))

        return backward


def _sum(environment: Any, x: Any, y: Any) -> Callable[[], None]:
    axes = tuple(range(1, x.ndim - 1))

    def run() -> None:
        if x.size:
            np.add.reduce(x, axis=axes, dtype=np.float64, out=y)

    return run


def _scale(scale: float, environment: Any, x: Any, y: Any) -> Callable[[], None]:
    def run() -> None:
        if y.size:
            np.multiply(x, scale, out=y, casting="same_kind")

    return run


def without_space(boxes: Blocks) -> Blocks:
    """Samples and channels of the boxes of ``(N, *spatial, C)``: what a sum over a block is of. Pure arithmetic.

    >>> without_space(Blocks((((0, 2), (2, 4)), ((0, 3), (3, 3)), ((0, 8),))), ).axes[0]
    ((0, 2), (0, 0), (2, 4), (2, 2))
    """
    samples, *spatial, channels = boxes.axes
    full = [all(b > a for a, b in place) for place in itertools.product(*spatial)]
    return Blocks((tuple((a, b if there else a) for a, b in samples for there in full), channels), boxes.size)
