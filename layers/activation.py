"""Activations: elementwise functions, as layers and within the kernels of other layers; softmax over the channels.

Functions that only serve to build norms or unit conversions (exp, log, ``|x|``, powers) exist as layers, but are not
fused into other kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..kernels.access import Access, makes, reads, writes
from ..kernels.kernel import FusedActivation, reads_input
from ..lowering.context import Context, Lowered
from ..lowering.views import Region, View
from .layer import ElementwiseLayer, Layer, Passes, Shape
from .lowering import Pair

__all__ = [
    "ELU",
    "GELU",
    "Abs",
    "Affine",
    "Clamp",
    "Exp",
    "HardSigmoid",
    "HardSwish",
    "LeakyReLU",
    "Log",
    "LogSoftmax",
    "Mish",
    "Power",
    "ReLU",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Softplus",
    "Tanh",
    "activated",
    "fused",
    "inside",
]


class _Activation(ElementwiseLayer):
    """An elementwise function with the name `function` in the kernel backend.

    Communication: none, or the halo of a margin if the output is wide.
    """

    widens = True

    function = ""
    alpha = 0.0

    def lower(self, context: Context) -> Lowered:
        by_input = reads_input(self.function, self.alpha)
        make = partial(_activation_by_input if by_input else _activation, self)
        kernel = context.kernel(make, x=context.read(0), y=context.y)
        # The pass `fuse` may compute the function in the kernel before, which keeps only the output for the gradient.
        kernel.function = None if by_input else FusedActivation(self.function, self.alpha)
        context.run(kernel, "forward", timing=context.timing("forward"))

        def backward() -> None:
            # A function whose gradient follows from its output need not keep its input; nor its output if the next
            # layer has kept a copy with halos.
            gradient_kernel, y = kernel, context.y if by_input else context.y_again()
            box = context.inputs[0].held_gradient[context.rank]
            # A wide input or output: the gradient covers another box than the output.
            if box != context.box:
                x = context.packed(Region(context.read(0) if by_input else y, context.box).part(box))
                # This kernel has no forward pass: the array that is not read only has to have the right shape.
                gradient_kernel = context.kernel(make, x=x, y=context.scratch(box.shape) if by_input else x)
            elif y != kernel.views["y"]:
                gradient_kernel = context.kernel(make, x=y, y=y)
            gradient_kernel.add(dy=context.gradient_for(0), dx=context.gradient(0))
            context.run(gradient_kernel, "backward", timing=context.timing("backward_data"))

        return Lowered(backward)


@makes(forward=Access(("x",), ("y",)), backward=Access(("y", "dy"), ("dx",)))
def _activation(layer: _Activation, environment: Any, x: Any, y: Any, dy: Any = None, dx: Any = None) -> Pair:
    return Pair(*environment.kernels.activation(layer.function, x, y, dy, dx, alpha=layer.alpha))


@makes(forward=Access(("x",), ("y",)), backward=Access(("x", "dy"), ("dx",)))
def _activation_by_input(*arguments: Any, **arrays: Any) -> Pair:
    """Return the kernels of a function whose gradient is formed from its input."""
    return _activation(*arguments, **arrays)


class ReLU(_Activation):
    """Rectified linear unit ``y = max(x, 0)``; the gradient at 0 is 0."""

    # Backward reads y (or x) and dy, writes dx.
    passes = Passes((1, 1), (1, 2))
    function = "relu"


class LeakyReLU(_Activation):
    """Leaky rectified linear unit: ``y = x`` where x > 0, else ``alpha * x``."""

    function = "leaky_relu"

    def __init__(self, alpha: float = 0.01, name: str | None = None) -> None:
        super().__init__(name)
        self.alpha = float(alpha)


class Sigmoid(_Activation):
    """Logistic function ``y = 1 / (1 + exp(-x))``."""

    function = "sigmoid"


class Tanh(_Activation):
    """Hyperbolic tangent ``y = tanh(x)``."""

    function = "tanh"


class GELU(_Activation):
    """Gaussian error linear unit ``y = x * (1 + erf(x / sqrt(2))) / 2`` (Hendrycks and Gimpel 2016).

    Parameters
    ----------
    approximate
        ``"none"``, or ``"tanh"`` for ``y = x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))) / 2``.
    """

    # The gradient is formed from the input: backward reads x and dy, writes dx.
    passes = Passes((1, 1), (2, 1))
    function = "gelu"

    def __init__(self, approximate: str = "none", name: str | None = None) -> None:
        super().__init__(name)
        if approximate not in ("none", "tanh"):
            raise ValueError(f"GELU: approximate: expected 'none' or 'tanh', got {approximate!r}")
        self.approximate = approximate
        if approximate == "tanh":
            self.function = "gelu_tanh"


class SiLU(_Activation):
    """Sigmoid linear unit ``y = x / (1 + exp(-x))``, also called swish (Ramachandran et al. 2017)."""

    passes = Passes((1, 1), (2, 1))
    function = "silu"


class ELU(_Activation):
    """Exponential linear unit: ``y = x`` where x > 0, else ``alpha * (exp(x) - 1)`` (Clevert et al. 2016)."""

    function = "elu"

    def __init__(self, alpha: float = 1.0, name: str | None = None) -> None:
        super().__init__(name)
        if not 0 <= alpha < math.inf:
            raise ValueError(f"alpha: expected a number >= 0, got {alpha!r}")
        self.alpha = float(alpha)


class HardSigmoid(_Activation):
    """Piecewise linear sigmoid ``y = min(max(x / 6 + 1/2, 0), 1)`` (Howard et al. 2019)."""

    function = "hard_sigmoid"


class HardSwish(_Activation):
    """Swish with the piecewise linear sigmoid: ``y = x * min(max(x / 6 + 1/2, 0), 1)`` (Howard et al. 2019)."""

    passes = Passes((1, 1), (2, 1))
    function = "hard_swish"


class Softplus(_Activation):
    """Smooth ReLU ``y = log(1 + exp(x))`` (Dugas et al. 2001), for positive outputs."""

    passes = Passes((1, 1), (2, 1))
    function = "softplus"


class Mish(_Activation):
    """Mish activation ``y = x * tanh(log(1 + exp(x)))`` (Misra 2019)."""

    passes = Passes((1, 1), (2, 1))
    function = "mish"


class Affine(ElementwiseLayer):
    """Affine map ``y = factor * x + shift`` with fixed coefficients; :class:`Scale` learns them.

    The operators of nodes create it: ``1 - x``, ``x / 255``. Communication: none.

    Parameters
    ----------
    factor, shift
        A number, or one number per channel.
    """

    def __init__(
        self, factor: float | Sequence[float] = 1.0, shift: float | Sequence[float] = 0.0, name: str | None = None
    ) -> None:
        super().__init__(name)
        if not (np.isfinite(factor).all() and np.isfinite(shift).all()):
            raise ValueError(f"Affine: expected two finite numbers, got {factor!r}, {shift!r}")
        self.factor, self.shift = _numbers(factor), _numbers(shift)

    def output_shape(self, *shapes: Shape) -> Shape:
        for name, numbers in (("factor", self.factor), ("shift", self.shift)):
            if isinstance(numbers, tuple) and len(numbers) != shapes[0][-1]:
                raise ValueError(f"Affine: {name}: expected one per channel, {shapes[0][-1]}, got {len(numbers)}")
        return shapes[0]

    def flops(self, *shapes: Shape) -> int:
        # A factor of 1 and a shift of 0 cost nothing.
        return ((self.factor != 1) + (self.shift != 0)) * math.prod(shapes[0])

    def lower(self, context: Context) -> Lowered:
        # Coefficients are given for all channels, and this block may have a part of them.
        first = context.box.start[-1]
        channels = slice(first, first + context.box.shape[-1])
        factor, shift = (n[channels] if isinstance(n, tuple) else n for n in (self.factor, self.shift))
        make = partial(_affine, factor, shift, context.wide)
        kernel = context.kernel(make, x=context.inputs[0].view, y=context.y)
        context.run(kernel, timing=context.timing("forward"))

        def backward() -> None:
            if self.factor == 1:  # the same array: nothing to copy
                context.pass_gradient(0)
                return
            make = partial(_affine, factor, 0.0, context.wide)
            kernel = context.kernel(make, x=context.dy, y=context.gradient(0))
            context.run(kernel, timing=context.timing("backward_data"))

        return Lowered(backward)


def _numbers(numbers: float | Sequence[float]) -> float | tuple[float, ...]:
    """Return coefficients as a float, or as a tuple of floats, one per channel."""
    array = np.asarray(numbers, np.float64)
    return tuple(array.tolist()) if array.ndim == 1 else float(array)


@reads("x")
@writes("y")
def _affine(
    factor: float | tuple[float, ...], shift: float | tuple[float, ...], wide: Any, environment: Any, x: Any, y: Any
) -> Callable[[], None]:
    """Return the kernel ``y = factor * x + shift``. `wide` is the dtype of coefficients that are given per channel."""
    # Arrays must be on the device of x; a Python float adopts the dtype of x.
    times, plus = (
        environment.kernels.device.array(np.asarray(n), wide) if isinstance(n, tuple) else n for n in (factor, shift)
    )

    def run() -> None:
        if y.size:
            np.multiply(x, times, out=y)
            if shift:
                np.add(y, plus, out=y)

    return run


class Clamp(ElementwiseLayer):
    """Clamping ``y = min(max(x, low), high)``; the gradient is 0 at the limits and beyond. ReLU6 is ``Clamp(0, 6)``.

    (Sandler et al. 2018; torch's ``hardtanh`` and ``relu6``.) Communication: none.
    """

    passes = Passes((1, 1), (2, 1))

    def __init__(self, low: float = 0.0, high: float = 6.0, name: str | None = None) -> None:
        super().__init__(name)
        if not low < high:
            raise ValueError(f"Clamp: expected low < high, got {low!r}, {high!r}")
        self.low, self.high = float(low), float(high)

    def flops(self, *shapes: Shape) -> int:
        return 2 * math.prod(shapes[0])

    def lower(self, context: Context) -> Lowered:
        limits = (self.low, self.high)
        kernel = context.kernel(partial(_clamp, limits), x=context.inputs[0].view, y=context.y)
        context.run(kernel, timing=context.timing("forward"))

        def backward() -> None:
            views = {"y": context.y_again(), "dy": context.dy, "dx": context.gradient(0)}
            inside = context.scratch(context.box.shape, "bool")
            kernel = context.kernel(partial(_clamp_gradient, limits), inside=inside, **views)
            context.run(kernel, timing=context.timing("backward_data"))

        return Lowered(backward)


@reads("x")
@writes("y")
def _clamp(limits: tuple[float, float], environment: Any, x: Any, y: Any) -> Callable[[], None]:
    def run() -> None:
        if y.size:
            np.maximum(x, limits[0], out=y)
            np.minimum(y, limits[1], out=y)

    return run


@reads("y", "dy")
@writes("dx", "inside")
def _clamp_gradient(
    limits: tuple[float, float], environment: Any, y: Any, dy: Any, dx: Any, inside: Any
) -> Callable[[], None]:
    """Return the kernel ``dx = dy where low < y < high``, else 0. It reads `y`: the input need not be kept."""
    # Compare with the limits in the dtype of y: 16 bits round a limit, and an output at the limit is not inside.
    low, high = (float(np.asarray(limit, y.dtype)) for limit in limits)

    def run() -> None:
        if not dx.size:
            return
        np.greater(y, low, out=inside)
        np.multiply(dy, inside, out=dx)
        np.less(y, high, out=inside)
        np.multiply(dx, inside, out=dx)

    return run


class _Function(ElementwiseLayer):
    """Elementwise function computed by NumPy functions; its gradient is formed from the input or from the output.

    Communication: none.
    """

    passes = Passes((1, 1), (3, 2))
    #: Whether the gradient is formed from the output, so that the input need not be kept.
    by_output = False

    def values(self, x: Any, y: Any) -> None:
        """Write the function of `x` to `y`."""
        raise TypeError(f"{self.kind} must override values()")

    def slopes(self, z: Any, out: Any) -> None:
        """Write the derivative to `out`; `z` is the input or, with `by_output`, the output."""
        raise TypeError(f"{self.kind} must override slopes()")

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

    Inputs must be positive (or, for a positive exponent, not negative) unless the exponent is an integer. For exponents
    between 0 and 1, the gradient at 0 is limited to a large number, so that the gradient of a norm ``(x ** 2).sum() **
    0.5`` is 0 at zeros.

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
        if 0 < self.exponent < 1:
            # The slope at 0 would be infinite; times the derivative 2 x = 0 of a square before it, it would be NaN.
            np.maximum(z, _SMALLEST[np.dtype(z.dtype).name], out=out)
            z = out
        _power(z, self.exponent - 1, out)
        np.multiply(out, self.exponent, out=out)


#: Smallest normal number of a dtype. bfloat16 has the exponents of float32.
_SMALLEST = {"float16": 2.0**-14, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022}


def _power(x: Any, exponent: float, out: Any) -> None:
    """Write ``x ** exponent`` to `out`; functions for frequent exponents are faster and more accurate."""
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


class _ChannelSoftmax(Layer):
    """Function of all channels at each position. Communication: none."""

    recomputation = "pointwise"
    passes = Passes((2, 1), (1, 2))
    inputs_taken = 1

    def flops(self, *shapes: Shape) -> int:
        # Per element: subtract the largest, exp, add up, divide.
        return 4 * math.prod(shapes[0])


class Softmax(_ChannelSoftmax):
    """Softmax ``y[..., c] = exp(x[..., c]) / sum_k exp(x[..., k])`` over the channels, at every position.

    (To train on classes, use a cross-entropy loss on the logits: it includes the softmax.) Communication: none.
    """

    def lower(self, context: Context) -> Lowered:
        # With 16 bits, the arithmetic is done in a float32 copy.
        low = context.wide != context.dtype
        row = (*context.box.shape[:-1], 1)
        scratch: dict[str, View | None] = {"row": context.scratch(row, context.wide)}
        scratch["copy"] = context.scratch(context.box.shape, context.wide) if low else None
        x = context.inputs[0].view
        kernel = context.kernel(_softmax, x=x, y=context.y, **scratch)
        context.run(kernel, timing=context.timing("forward"))

        def backward() -> None:
            dx = context.gradient(0)
            scratch: dict[str, View | None] = {name: context.scratch(row, context.wide) for name in ("sums", "center")}
            # Without 16 bits, dx itself holds the intermediate product.
            scratch["product"] = context.scratch(context.box.shape, context.wide) if low else dx
            scratch["top"] = context.scratch(context.box.shape, "bool")
            kernel = context.kernel(_softmax_gradient, y=context.y, dy=context.dy, dx=dx, **scratch)
            context.run(kernel, timing=context.timing("backward_data"))

        return Lowered(backward)


class LogSoftmax(_ChannelSoftmax):
    """Logarithm of the softmax, ``y[..., c] = x[..., c] - log(sum_k exp(x[..., k]))``, at every position.

    A cross-entropy loss gives the same result for log-probabilities as for logits (torch's NLLLoss after a
    log_softmax). Communication: none.
    """

    def lower(self, context: Context) -> Lowered:
        rows = (*context.box.shape[:-1], 1)
        scratch = {name: context.scratch(rows, context.wide) for name in ("largest", "sums", "ties")}
        scratch["work"] = context.scratch(context.box.shape, context.wide)
        scratch["top"] = context.scratch(context.box.shape, "bool")
        kernel = context.kernel(_log_softmax, x=context.inputs[0].view, y=context.y, **scratch)
        context.run(kernel, timing=context.timing("forward"))

        def backward() -> None:
            views = {"y": context.y, "dy": context.dy, "dx": context.gradient(0)}
            views["sums"] = context.scratch(rows, context.wide)
            views |= {name: context.scratch(context.box.shape, context.wide) for name in ("work", "other")}
            context.run(context.kernel(_log_softmax_gradient, **views), timing=context.timing("backward_data"))

        return Lowered(backward)


@reads("x")
@writes("y", "row", "copy")
def _softmax(environment: Any, x: Any, y: Any, row: Any, copy: Any) -> Callable[[], None]:
    """Return the softmax kernel. With 16-bit arrays, `copy` is a float32 array for the arithmetic."""

    def run() -> None:
        if not y.size:
            return
        source, target = x, y
        if copy is not None:
            np.copyto(copy, x)
            source = target = copy
        np.amax(source, axis=-1, keepdims=True, out=row)
        # Relative to the largest channel, so that exp does not overflow.
        np.subtract(source, row, out=target)
        np.exp(target, out=target)
        np.add.reduce(target, axis=-1, keepdims=True, out=row)
        np.divide(target, row, out=y)

    return run


@reads("y", "dy")
@writes("dx", "sums", "center", "product", "top")
def _softmax_gradient(
    environment: Any, y: Any, dy: Any, dx: Any, sums: Any, center: Any, product: Any, top: Any
) -> Callable[[], None]:
    """Return the kernel ``dx = y * (d - sum_c d * y)`` with ``d = dy - center``; the result is the same for any center.

    The center is the `dy` of the largest `y` (the mean, if there are several). If this `y` is close to 1, the sum
    contains only small `y`, and is accurate.
    """

    def run() -> None:
        if not y.size:
            return
        np.copyto(product, y)
        np.amax(product, axis=-1, keepdims=True, out=center)
        # center = mean of dy over the channels with the largest y
        np.equal(product, center, out=top)
        np.copyto(product, top)
        np.add.reduce(product, axis=-1, keepdims=True, out=sums)
        np.multiply(dy, top, out=product)
        np.add.reduce(product, axis=-1, keepdims=True, out=center)
        np.divide(center, sums, out=center)
        # sums = sum_c (dy - center) * y
        np.subtract(dy, center, out=product)
        np.multiply(product, y, out=product)
        np.add.reduce(product, axis=-1, keepdims=True, out=sums)
        # Computed again: the product above has overwritten it, and a second array would cost memory.
        np.subtract(dy, center, out=product)
        np.subtract(product, sums, out=product)
        np.multiply(product, y, out=dx)

    return run


@reads("x")
@writes("y", "largest", "sums", "ties", "work", "top")
def _log_softmax(
    environment: Any, x: Any, y: Any, largest: Any, sums: Any, ties: Any, work: Any, top: Any
) -> Callable[[], None]:
    """Return the log-softmax kernel. `work` is an array for the arithmetic, float32 if `x` has 16 bits.

    The largest exponentials are 1 and are summed separately: in one sum, close to 1, small exponentials would be lost.
    """

    def run() -> None:
        if not y.size:
            return
        np.copyto(work, x)
        np.amax(work, axis=-1, keepdims=True, out=largest)
        np.subtract(work, largest, out=work)
        np.equal(work, 0, out=top)
        np.exp(work, out=work)
        np.add.reduce(work, axis=-1, keepdims=True, out=ties)
        np.copyto(work, 0, where=top)
        np.add.reduce(work, axis=-1, keepdims=True, out=sums)
        # With n equal largest channels, `ties` is n plus the small exponentials, and `sums` has only these: the rounded
        # difference is n. The logarithm is that of 1 + (n - 1 + sums).
        np.subtract(ties, sums, out=ties)
        np.rint(ties, out=ties)
        np.subtract(ties, 1, out=ties)
        np.add(sums, ties, out=sums)
        np.log1p(sums, out=sums)
        # Not x - (largest + log): the sum would round off the logarithm where x is large.
        np.copyto(work, x)
        np.subtract(work, largest, out=work)
        np.subtract(work, sums, out=y)

    return run


@reads("y", "dy")
@writes("dx", "sums", "work", "other")
def _log_softmax_gradient(
    environment: Any, y: Any, dy: Any, dx: Any, sums: Any, work: Any, other: Any
) -> Callable[[], None]:
    """Return the kernel ``dx = dy - exp(y) * sum_c dy``, as ``dy * (1 - exp(y)) - exp(y) * (sum_c dy - dy)``."""

    def run() -> None:
        if not y.size:
            return
        np.copyto(work, dy)
        np.add.reduce(work, axis=-1, keepdims=True, out=sums)
        np.subtract(sums, work, out=other)
        np.copyto(work, y)
        np.exp(work, out=work)
        np.multiply(other, work, out=other)
        np.copyto(work, y)
        # expm1(y) is -(1 - exp(y)) without cancellation where y is close to 0; the last line changes the sign.
        np.expm1(work, out=work)
        np.multiply(work, dy, out=work)
        np.add(work, other, out=work)
        np.negative(work, out=dx)

    return run


#: Activations that the kernels of other layers can compute.
_FUSED: tuple[type[_Activation], ...] = (
    *(ReLU, LeakyReLU, ELU, GELU, SiLU, HardSwish, HardSigmoid, Sigmoid, Tanh, Softplus, Mish),
)
#: Activations by the name that other layers accept. Softmax reads all channels of a position, so it stays a layer.
_KINDS: dict[str, Callable[[], Layer]] = {**{kind.function: kind for kind in _FUSED}, "softmax": Softmax}


def activated(layer: Layer, activation: str | Layer | None, by_input: bool | None) -> str | None:
    """Return the kind of the activation if the kernels of `layer` compute it; otherwise None, and an activation becomes
    `layer.followed_by`.

    Parameters
    ----------
    layer
        Layer that gets `activation_alpha`, or `followed_by`: a layer that each call puts after it. This is a new layer,
        named after `layer`, or `activation` itself if that is a layer.
    activation
        None, a name, or a layer. A layer with a name of its own stays a separate layer.
    by_input
        Whether the kernels also compute activations whose gradient needs their input; None: they compute no activation.

    Raises
    ------
    ValueError
        If there is no activation of this name.
    """
    if activation is None:
        return None
    if not isinstance(activation, Layer):
        if activation not in _KINDS:
            raise ValueError(
                f"activation: expected None, one of {', '.join(_KINDS)}, or a layer, got {activation!r}; choose one"
            )
        layer_of, name = _KINDS[activation](), layer.name and f"{layer.name}_{activation}"
    else:
        layer_of, name = activation, activation.name
    # An activation with a name of its own stays a layer, so that the network has a layer of this name.
    if type(layer_of) in _FUSED and (layer_of is not activation or name is None) and by_input is not None:
        assert isinstance(layer_of, _Activation)
        if by_input or not reads_input(layer_of.function, layer_of.alpha):
            layer.activation_alpha = layer_of.alpha
            return layer_of.function
    layer_of.name = name
    layer.followed_by = layer_of
    return None


def fused(layer: Layer) -> FusedActivation | None:
    """Return the activation that the kernels of a layer compute, or None."""
    kind = getattr(layer, "activation", None)
    return None if kind is None else FusedActivation(kind, layer.activation_alpha)


def inside(layer: Layer) -> Layer | None:
    """Return, as a separate layer, the activation that the kernels of `layer` compute; None if they compute none."""
    f = fused(layer)
    if f is None:
        return None
    # `_KINDS` has a class by its default function, which is the exact one for GELU.
    activation: Any = GELU("tanh") if f.kind == "gelu_tanh" else _KINDS[f.kind]()
    activation.alpha = f.alpha
    return activation
