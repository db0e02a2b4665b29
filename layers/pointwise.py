"""Elementwise functions without parameters that are parts of norms and of changes of units: exp, log, |x|, powers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..kernels.access import reads, writes
from ..lowering.context import Context, Lowered
from .layer import Layer, Passes, Shape

__all__ = ["Abs", "Exp", "Log", "Power"]


class _Function(Layer):
    """An elementwise function by NumPy's functions, with its gradient from the input or from the output.

    Communication: none.
    """

    recomputation = "pointwise"

    cuts_channels = "channelwise"
    passes = Passes((1, 1), (3, 2))
    inputs_taken = 1
    #: Whether the gradient is formed from the output, so that the input need not be kept.
    by_output = False

    def values(self, x: Any, y: Any) -> None:
        """Compute the function of `x` into `y`."""
        raise TypeError(f"{self.kind} must override values()")

    def slopes(self, z: Any, out: Any) -> None:
        """Compute the derivative into `out`, from the input `z` or, with `by_output`, from the output."""
        raise TypeError(f"{self.kind} must override slopes()")

    def flops(self, *shapes: Shape) -> int:
        return math.prod(shapes[0])

    def lower(self, context: Context) -> Lowered:
        x = context.inputs[0].view
        kernel = context.kernel(partial(_values, self), x=x, y=context.y)
        context.run(kernel, timing=context.timing("forward"))

        def backward() -> None:
            z = context.y_again() if self.by_output else x
            kernel = context.kernel(partial(_gradient, self), z=z, dy=context.dy, dx=context.gradient(0))
            context.run(kernel, timing=context.timing("backward_data"))

        return Lowered(backward)


@reads("x")
@writes("y")
def _values(layer: _Function, environment: Any, x: Any, y: Any) -> Callable[[], None]:
    def run() -> None:
        if y.size:
            layer.values(x, y)

    return run


@reads("z", "dy")
@writes("dx")
def _gradient(layer: _Function, environment: Any, z: Any, dy: Any, dx: Any) -> Callable[[], None]:
    def run() -> None:
        if dx.size:
            layer.slopes(z, dx)
            np.multiply(dx, dy, out=dx)

    return run


class Exp(_Function):
    """Exponential function ``y = exp(x)``."""

    by_output = True

    def values(self, x: Any, y: Any) -> None:
        np.exp(x, out=y)

    def slopes(self, z: Any, out: Any) -> None:
        np.copyto(out, z)


class Log(_Function):
    """Natural logarithm ``y = log(x)``, of positive inputs."""

    def values(self, x: Any, y: Any) -> None:
        np.log(x, out=y)

    def slopes(self, z: Any, out: Any) -> None:
        np.reciprocal(z, out=out)


class Abs(_Function):
    """Absolute value ``y = |x|``; the gradient at 0 is 0."""

    def values(self, x: Any, y: Any) -> None:
        np.absolute(x, out=y)

    def slopes(self, z: Any, out: Any) -> None:
        np.sign(z, out=out)


class Power(_Function):
    """Power ``y = x ** exponent``: 2 for squares, 0.5 for roots, -1 for reciprocals.

    Inputs must be positive (or, for a positive exponent, not negative) unless the exponent is an integer. The gradient
    of a root at 0 is limited to a large number, so that the gradient of a norm ``(x ** 2).sum() ** 0.5`` is 0 there.

    Parameters
    ----------
    exponent
        Any number other than 0.
    """

    def __init__(self, exponent: float, name: str | None = None) -> None:
        super().__init__(name)
        if not math.isfinite(exponent) or exponent == 0:
            raise ValueError(f"Power: expected a finite exponent other than 0, got {exponent!r}")
        self.exponent = float(exponent)

    def values(self, x: Any, y: Any) -> None:
        _power(x, self.exponent, y)

    def slopes(self, z: Any, out: Any) -> None:
        if self.exponent == 0.5:
            np.sqrt(z, out=out)
            np.maximum(out, _SMALLEST_ROOT[np.dtype(z.dtype).name], out=out)
            np.reciprocal(out, out=out)
        else:
            _power(z, self.exponent - 1, out)
        np.multiply(out, self.exponent, out=out)


#: Root of the smallest normal number of a dtype. bfloat16 has the exponents of float32.
_SMALLEST_ROOT = {"float16": 2.0**-7, "bfloat16": 2.0**-63, "float32": 2.0**-63, "float64": 2.0**-511}


def _power(x: Any, exponent: float, out: Any) -> None:
    """Compute a power; frequent ones by functions that are faster and correctly rounded."""
    if exponent in (0.5, -0.5):
        np.sqrt(x, out=out)
        if exponent < 0:
            np.reciprocal(out, out=out)
    elif exponent == -1:
        np.reciprocal(x, out=out)
    elif exponent == 1:
        np.copyto(out, x)
    elif exponent == 2:
        np.square(x, out=out)
    else:
        np.power(x, exponent, out=out)
