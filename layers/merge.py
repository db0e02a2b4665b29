"""Layers that join branches: sum and concatenation."""

from __future__ import annotations

import math
from typing import Any

from halograd.dtensor import Box
from halograd.layers.binding import Binding, Returned
from halograd.layers.layer import Layer, Shape
from halograd.layers.operator import Operator
from halograd.layers.value import Gathered

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

    def bind(self, binding: Binding) -> Operator:
        return _AddOperator(binding)


class _AddOperator(Operator):
    def __init__(self, b: Binding) -> None:
        assert isinstance(b.layer, Add)
        self.b = b
        self.relu = b.layer.activation == "relu"
        self.kernel = b.kernels.add([v.array for v in b.inputs], b.output.array, relu=self.relu)

    def forward(self) -> None:
        self.kernel()

    def bind_backward(self) -> None:
        b = self.b
        wanted = [i for i in range(len(b.inputs)) if b.needs_gradient(i)]
        self.mask: Any = None
        if not self.relu:
            for i in wanted:
                b.pass_gradient(i)
            return
        masked = b.share_gradient(wanted)
        _, self.mask = b.kernels.activation("relu", b.output.array, b.output.array, b.output.dy, masked)

    def backward(self) -> None:
        if self.mask is not None:
            self.mask()


class Concat(Layer):
    """Concatenation along the channels: inputs ``(N, *spatial, C_i)`` -> ``(N, *spatial, sum C_i)``.

    Notes
    -----
    Inputs and output are cut alike in samples and space. Communication: none, unless channels are cut.
    """

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

    def bind(self, binding: Binding) -> Operator:
        return _ConcatOperator(binding)


class _ConcatOperator(Operator):
    """Copies between packed arrays and a range of the channels of another.

    Where channels are cut, the blocks of the inputs do not lie where those of the output do: they are gathered.
    """

    def __init__(self, b: Binding) -> None:
        self.b = b
        self.boxes = [b.needed_boxes(i) for i in range(len(b.inputs))]
        self.x = [b.gather(i, boxes) for i, boxes in enumerate(self.boxes)]
        pairs = [(self._channels(b.output.array, i), x.array) for i, x in enumerate(self.x) if x.box.size]
        self.copy = b.kernels.device.copies(pairs)
        self.returned: list[Returned] = []

    def _channels(self, array: Any, i: int) -> Any:
        """View of this rank's channels that come from input `i`."""
        box = self.boxes[i][self.b.rank]
        first = sum(s[-1] for s in self.b.shapes[:i]) + box.start[-1] - self.b.box.start[-1]
        return array[..., first : first + box.shape[-1]]

    def forward(self) -> None:
        for x in self.x:
            x.start()
        for x in self.x:
            x.finish()
        self.copy()

    def bind_backward(self) -> None:
        b = self.b
        wanted = [i for i in range(len(b.inputs)) if b.needs_gradient(i)]
        self.returned = [b.return_gradient(i, self.boxes[i]) for i in wanted]
        pairs = [(r.array, self._channels(b.output.dy, i)) for r, i in zip(self.returned, wanted) if self.x[i].box.size]
        self.back = b.kernels.device.copies(pairs)

    def backward(self) -> None:
        self.back()
        for returned in self.returned:
            returned.start()
        for returned in self.returned:
            returned.finish()

    def close(self) -> None:
        items: tuple[Gathered | Returned, ...] = (*self.x, *self.returned)
        for item in items:
            item.close()


def _list(shapes: tuple[Shape, ...]) -> str:
    return ", ".join(map(str, shapes)) or "no input"
