"""Layers that join branches: sum and concatenation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..dtensor import Blocks, Box, Interval, Layout
from .contraction import masking
from .costs import Passes
from .layer import Layer, Shape

if TYPE_CHECKING:
    from ..program.context import Context
    from ..program.views import View

__all__ = ["Add", "Concat"]


class Add(Layer):
    """Sum of any number of inputs of one shape, ``y = x0 + x1 + ...``.

    Parameters
    ----------
    activation
        None or ``"relu"``, fused into the sum.

    Notes
    -----
    The gradient of every input is that of the output; it is passed on without a copy. Communication: none.
    """

    # The gradient of every summand is that of the sum: nothing is done.
    passes = Passes((1, 1), (0, 0))
    cuts_channels = "channelwise"

    def __init__(self, activation: str | None = None, name: str | None = None) -> None:
        super().__init__(name)
        if activation not in (None, "relu"):
            raise ValueError(f"activation: expected None or 'relu', got {activation!r}; others are layers of their own")
        self.activation = activation

    def output_shape(self, *shapes: Shape) -> Shape:
        if not shapes or any(s != shapes[0] for s in shapes):
            raise ValueError(f"Add: expected inputs of one shape, got {_list(shapes)}; crop, pad or resize them first")
        return shapes[0]

    def flops(self, *shapes: Shape) -> int:
        return (len(shapes) - 1) * math.prod(shapes[0])

    def lower(self, context: Context) -> Callable[[], None]:
        relu = self.activation == "relu"
        views = {f"x{i}": value.view for i, value in enumerate(context.inputs)}
        context.run(context.kernel(partial(_add, relu), y=context.y, **views), timing=context.timing("forward"))

        def backward() -> None:
            masked = None
            if relu:
                # No input's own storage, so that none adds its other gradients into it.
                masked = context.scratch(context.box.shape)
                context.run(context.kernel(masking, y=context.y, dy=context.dy, dx=masked))
            for i in range(len(context.inputs)):
                if context.needs_gradient(i):
                    context.pass_gradient(i, masked)

        return backward


def _add(relu: bool, environment: Any, y: Any, **summands: Any) -> Any:
    return environment.kernels.add(list(summands.values()), y, relu=relu)


class Concat(Layer):
    """Concatenation along the channels: inputs ``(N, *spatial, C_i)`` -> ``(N, *spatial, sum C_i)``.

    Notes
    -----
    Inputs and output are cut alike in samples and space. Communication: none, unless channels are cut.
    """

    passes = Passes()
    cuts_channels = "channelwise"

    def output_shape(self, *shapes: Shape) -> Shape:
        if not shapes or any(s[:-1] != shapes[0][:-1] for s in shapes):
            raise ValueError(
                f"Concat: expected inputs of one spatial shape, got {_list(shapes)}; crop, pad or resize them first"
            )
        return (*shapes[0][:-1], sum(s[-1] for s in shapes))

    def input_boxes(self, box: Box, *shapes: Shape) -> tuple[Box, ...]:
        low, high = box.ranges[-1]
        boxes, first = [], 0
        for shape in shapes:
            start = min(max(low - first, 0), shape[-1])
            boxes.append(box.replace(box.ndim - 1, start, min(max(high - first, start), shape[-1])))
            first += shape[-1]
        return tuple(boxes)

    def needed_blocks(self, i: int, inputs: Sequence[Layout], output: Layout) -> Blocks:
        """As `input_boxes`, of one input and per axis."""
        first, own = sum(layout.shape[-1] for layout in inputs[:i]), inputs[i].shape[-1]

        def channels(low: int, high: int) -> Interval:
            start = min(max(low - first, 0), own)
            return start, min(max(high - first, start), own)

        same = [lambda a, b: (a, b)] * (len(output.shape) - 1)
        return output.boxes.map(*same, channels)

    def lower(self, context: Context) -> Callable[[], None]:
        """Copies between packed arrays and a range of the channels of another.

        Where channels are cut, the blocks of the inputs do not lie where those of the output do: they are gathered.
        """
        boxes = [context.needed(i) for i in range(len(context.inputs))]
        inputs = [context.gather(i, blocks) for i, blocks in enumerate(boxes)]
        firsts = list(itertools.accumulate((shape[-1] for shape in context.shapes[:-1]), initial=0))

        def channels(i: int, view: View) -> View:
            """Those of this rank that come from input `i`."""
            box = inputs[i].box
            first = firsts[i] + box.start[-1] - context.box.start[-1]
            return view.part((0,) * (box.ndim - 1) + (first,), (*view.shape[:-1], box.shape[-1]))

        for x in inputs:
            x.start()
        for x in inputs:
            x.finish()
        pairs = [(x.view, channels(i, context.y)) for i, x in enumerate(inputs) if x.box.size]
        context.copy(*pairs, timing=context.timing("forward"))

        def backward() -> None:
            returned = {i: context.return_gradient(i, b) for i, b in enumerate(boxes) if context.needs_gradient(i)}
            pairs = [(channels(i, context.dy), some.view) for i, some in returned.items() if inputs[i].box.size]
            context.copy(*pairs, timing=context.timing("backward_data"))
            for some in returned.values():
                some.start()
            for some in returned.values():
                some.finish()

        return backward


def _list(shapes: tuple[Shape, ...]) -> str:
    return ", ".join(map(str, shapes)) or "no input"
