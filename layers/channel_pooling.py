"""Mean and maximum over the channels: one number per sample and position."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..kernels.access import reads, writes
from ..lowering.context import Context, Lowered
from .global_pooling import Search, in_wide
from .layer import Layer, Passes, Shape
from .pooling import SearchStage

__all__ = ["ChannelMax", "ChannelMean"]


class _OverChannels(Layer):
    """Reduction ``(*spatial, C)`` -> ``(*spatial, 1)`` at every position; communication: none, unless cuts differ."""

    recomputation = "pointwise"

    inputs_taken = 1

    def output_shape(self, *shapes: Shape) -> Shape:
        return (*shapes[0][:-1], 1)

    def flops(self, *shapes: Shape) -> int:
        return math.prod(shapes[0])


class ChannelMean(_OverChannels):
    """Mean over the channels, ``y[..., 0] = (1 / C) * sum_c x[..., c]``, at every position or of vectors.

    With :class:`ChannelMax`, the two inputs of spatial attention in CBAM (Woo et al. 2018).
    """

    def lower(self, context: Context) -> Lowered:
        boxes = context.needed(0)
        x = context.gather(0, boxes).run()
        channels = context.shapes[0][-1]
        sums = context.scratch(context.box.shape, "float64")
        context.run(
            context.kernel(partial(_mean, channels), x=x.view, sums=sums, y=context.y), timing=context.timing("forward")
        )

        def backward() -> None:
            returned = context.return_gradient(0, boxes)
            kernel = context.kernel(partial(_spread, channels), dy=context.dy, dx=returned.view)
            context.run(kernel, timing=context.timing("backward_data"))
            returned.run()

        return Lowered(backward)


class ChannelMax(_OverChannels):
    """Maximum over the channels, at every position or of vectors.

    Of several equal maxima, the first receives the gradient. A NaN is larger than all numbers, and receives no
    gradient.
    """

    passes = Passes((8, 1), (5, 1))

    def lower(self, context: Context) -> Lowered:
        boxes = context.needed(0)
        x = context.gather(0, boxes).run()
        if not context.box.size:
            return Lowered(lambda: context.return_gradient(0, boxes).run())
        search = Search(len(x.view.shape) - 1, [(0, context.shapes[0][-1])])
        stage = SearchStage(context, search, in_wide(context, x.view), "forward")
        context.copy((stage.y, context.y))

        def backward() -> None:
            returned = context.return_gradient(0, boxes)
            direct = returned.view.dtype == context.wide
            dx = returned.view if direct else context.scratch(returned.view.shape, context.wide)
            stage.lower_backward(context, in_wide(context, context.dy), dx, "backward_data")
            context.copy(*([] if direct else [(dx, returned.view)]))
            returned.run()

        return Lowered(backward)


@reads("x")
@writes("sums", "y")
def _mean(channels: int, environment: Any, x: Any, sums: Any, y: Any) -> Callable[[], None]:
    def run() -> None:
        if y.size:
            np.add.reduce(x, axis=-1, dtype=np.float64, out=sums, keepdims=True)
            np.multiply(sums, 1 / channels, out=y, casting="same_kind")

    return run


@reads("dy")
@writes("dx")
def _spread(channels: int, environment: Any, dy: Any, dx: Any) -> Callable[[], None]:
    def run() -> None:
        if dx.size:
            np.multiply(dy, 1 / channels, out=dx)

    return run
