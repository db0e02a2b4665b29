"""Activations: elementwise functions, and softmax over the channels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from halograd.layers.binding import Binding
from halograd.layers.layer import Layer, Shape
from halograd.layers.operator import Operator

__all__ = ["GELU", "LeakyReLU", "ReLU", "Sigmoid", "Softmax", "Tanh"]


class _Activation(Layer):
    cuts_channels = "channelwise"

    """An elementwise function that the kernel backend has under the name `function`. Communication: none."""

    function = ""
    alpha = 0.0

    def flops(self, *shapes: Shape) -> int:
        return math.prod(shapes[0])

    def bind(self, binding: Binding) -> Operator:
        return _ActivationOperator(binding)


class ReLU(_Activation):
    """``y = max(x, 0)``; the gradient at 0 is 0."""

    function = "relu"


class LeakyReLU(_Activation):
    """``y = x`` where x > 0, else ``alpha * x``."""

    function = "leaky_relu"

    def __init__(self, alpha: float = 0.01, name: str | None = None) -> None:
        super().__init__(name)
        self.alpha = float(alpha)


class Sigmoid(_Activation):
    """``y = 1 / (1 + exp(-x))``."""

    function = "sigmoid"


class Tanh(_Activation):
    """``y = tanh(x)``."""

    function = "tanh"


class GELU(_Activation):
    """``y = x * (1 + erf(x / sqrt(2))) / 2``, the exact form of Hendrycks and Gimpel (2016)."""

    function = "gelu"


class _ActivationOperator(Operator):
    def __init__(self, b: Binding) -> None:
        self.b = b
        self.kernel, _ = self._bind(None, None)

    def _bind(self, dy: Any, dx: Any) -> tuple[Any, Any]:
        b = self.b
        assert isinstance(b.layer, _Activation)
        x = b.inputs[0].array
        return b.kernels.activation(b.layer.function, x, b.output.array, dy, dx, alpha=b.layer.alpha)

    def forward(self) -> None:
        self.kernel()

    def bind_backward(self) -> None:
        # Made again as a pair: the backward kernel may use what this forward kernel remembers.
        self.kernel.close()
        self.kernel, self.adjoint = self._bind(self.b.output.dy, self.b.gradient(0))

    def backward(self) -> None:
        self.adjoint()


class Softmax(Layer):
    """``y[..., c] = exp(x[..., c]) / sum_k exp(x[..., k])`` over the channels, at every position.

    (For training on classes use a cross-entropy loss on the logits: it contains the softmax.) Communication: none.
    """

    def flops(self, *shapes: Shape) -> int:
        return 4 * math.prod(shapes[0])

    def bind(self, binding: Binding) -> Operator:
        return _SoftmaxOperator(binding)


class _SoftmaxOperator(Operator):
    def __init__(self, b: Binding) -> None:
        self.b = b
        self.row = b.scratch((*b.box.shape[:-1], 1), b.wide)
        self.y: Any = None if b.wide == b.dtype else b.scratch(b.box.shape, b.wide)

    def forward(self) -> None:
        x, y, row = self.b.inputs[0].array, self.b.output.array, self.row
        if not y.size:
            return
        if self.y is not None:  # of 16 bits are only what comes and goes
            np.copyto(self.y, x)
            x = y = self.y
        np.amax(x, axis=-1, keepdims=True, out=row)
        np.subtract(x, row, out=y)
        np.exp(y, out=y)
        np.add.reduce(y, axis=-1, keepdims=True, out=row)
        np.divide(y, row, out=self.b.output.array)

    def bind_backward(self) -> None:
        b = self.b
        self.dx = b.gradient(0)
        self.product = self.dx if b.wide == b.dtype else b.scratch(b.box.shape, b.wide)
        self.sums = b.scratch((*b.box.shape[:-1], 1), b.wide)

    def backward(self) -> None:
        """``dx = y * (dy - sum_c dy * y)``."""
        y, dy, dx, sums = self.b.output.array, self.b.output.dy, self.dx, self.sums
        if not y.size:
            return
        np.multiply(dy, y, out=self.product)
        np.add.reduce(self.product, axis=-1, keepdims=True, out=sums)
        np.subtract(dy, sums, out=dx)
        np.multiply(dx, y, out=dx)
