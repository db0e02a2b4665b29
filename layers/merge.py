"""Layers that join branches: sum and concatenation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from halograd.layers.binding import Binding
from halograd.layers.layer import Layer, Shape
from halograd.layers.operator import Operator

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
    Inputs and output are cut alike in samples and space. Communication: none.
    """

    def output_shape(self, *shapes: Shape) -> Shape:
        if not shapes or any(s[:-1] != shapes[0][:-1] for s in shapes):
            raise ValueError(
                f"Concat: expected inputs of one spatial shape, got {_list(shapes)}; crop, pad or resize them first"
            )
        return (*shapes[0][:-1], sum(s[-1] for s in shapes))

    def bind(self, binding: Binding) -> Operator:
        return _ConcatOperator(binding)


class _ConcatOperator(Operator):
    """Copies between packed arrays and a range of the channels of another."""

    def __init__(self, b: Binding) -> None:
        self.b = b
        self.forward_copies = [(self._channels(b.output.array, i), v.array) for i, v in enumerate(b.inputs)]
        self.backward_copies: list[tuple[Any, Any]] = []

    def _channels(self, array: Any, i: int) -> Any:
        """View of the channels that come from input `i`."""
        first = sum(s[-1] for s in self.b.shapes[:i])
        return array[..., first : first + self.b.shapes[i][-1]]

    def forward(self) -> None:
        if self.b.box.size:
            for target, source in self.forward_copies:
                np.copyto(target, source)

    def bind_backward(self) -> None:
        b = self.b
        wanted = [i for i in range(len(b.inputs)) if b.needs_gradient(i)]
        self.backward_copies = [(b.gradient(i), self._channels(b.output.dy, i)) for i in wanted]

    def backward(self) -> None:
        if self.b.box.size:
            for target, source in self.backward_copies:
                np.copyto(target, source)


def _list(shapes: tuple[Shape, ...]) -> str:
    return ", ".join(map(str, shapes)) or "no input"
