"""Activations and their derivatives, written into given arrays.

No function subtracts nearly equal rounded numbers, and no exponential has a large positive argument: near saturation a
result has the relative error of a few roundings, and nothing overflows. Derivatives read the input, because an output
near its limit is inaccurate. Those of ReLU, and of leaky ReLU with a slope >= 0, read the output, whose sign is enough.

`x` may be `y` or `dx`, so each function reads `x` before it writes them. Nothing is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..kernel import reads_input

__all__ = ["FAR", "KINDS", "STRETCH", "TAIL", "ElementwiseFunctions"]

# Constants of the approximation of GELU by tanh (Hendrycks and Gimpel 2016), which is x / (1 + exp(-w)) with w =
# _LINEAR * x + _CUBIC * x^3. The leading parts have 41 and 20 bits, so that their products below are exact.
_LINEAR, _CUBIC = 1.5957691216057308, 0.07135481627260025
_LEADING_LINEAR, _LEADING_CUBIC = 1.5957691216053718, 0.07135474681854248
_REST_LINEAR, _REST_CUBIC = 3.589464330756845e-13, 6.945405776830759e-08

# exp(x^2 / 2) times the normal distribution at -|x| is t * sum c[k] u^k, with t = 4 / (4 + |x|) and u = 2 t - 1:
# Chebyshev series in u, of relative error 1e-8 and 1e-16, written in powers.
STRETCH = 4.0
# fmt: off
TAIL = {
    np.dtype(np.float32): (
        0.1888212826009449, 0.15197415784155602, 0.09678435049582944, 0.04663053995998785, 0.015099138376033607,
        0.001884429289920908, -0.0008698875672323031, -0.00040551002638210704, 3.3218383382841254e-05,
        5.3893444071613026e-05, -2.594697835741231e-07, -5.295746063806165e-06, -5.77669305982438e-08,
    ),
    np.dtype(np.float64): (
        0.18882128260393788, 0.15197416049297302, 0.09678435018555362, 0.04663046448991371, 0.015099143722735808,
        0.00188504724170631, -0.000869923091901459, -0.0004077046148486465, 3.3336078946850346e-05,
        5.777373831004859e-05, -4.770724263206537e-07, -8.786198696883388e-06, 1.7921198615865306e-07,
        1.4801466298892227e-06, -1.5759743076180553e-07, -2.5564010395740095e-07, 6.839223697685725e-08,
        3.9125591154982764e-08, -2.2096119930768857e-08, -3.6576818514127938e-09, 5.708440017580174e-09,
        -3.582479600272153e-10, -1.142671616038338e-09, 2.136630474970037e-10, 1.5812988443667057e-10,
        -2.938697478701935e-11, -1.1238011803143568e-11,
    ),
}
# fmt: on
#: exp(-FAR^2 / 2) is 0 in float64.
FAR = 40.0


class ElementwiseFunctions(NamedTuple):
    """Functions of an activation, and their work buffers, which have the shape of the arrays.

    Attributes
    ----------
    forward, gradient
        ``(x, y, work, alpha)`` writes `y`; ``(x, y, dy, dx, work, alpha)`` writes `dx`.
    buffers, dtype
        Number and dtype of the work buffers; None: the dtype of the arrays.
    """

    forward: Callable[[Any, Any, list[Any], float], None]
    gradient: Callable[[Any, Any, Any, Any, list[Any], float], None]
    buffers: int
    dtype: Any = None


def _relu(x: Any, y: Any, work: list[Any], alpha: float) -> None:
    np.maximum(x, 0, out=y)


def _relu_gradient(x: Any, y: Any, dy: Any, dx: Any, work: list[Any], alpha: float) -> None:
    passes = np.greater(y, 0, out=_flags(work[0]))
    _select(passes, dy, dx)


def _flags(work: Any) -> Any:
    """Return the memory of `work` as booleans of the same shape."""
    return work.view(np.bool_)[..., : work.shape[-1]]


def _select(passes: Any, dy: Any, dx: Any) -> None:
    """Compute ``dx = dy`` where `passes`, else 0, also for infinite and NaN dy (which times 0 would be NaN).

    Overwrites `passes`. The bits of the numbers are masked, which takes no more time than a product.
    """
    bits = f"i{dy.itemsize}"
    # True becomes -1, whose bits are all set, also after its extension to the width of the numbers.
    mask = np.negative(passes.view(np.int8), out=passes.view(np.int8))
    np.bitwise_and(dy.view(bits), mask, out=dx.view(bits))


def _leaky(x: Any, y: Any, work: list[Any], alpha: float) -> None:
    # One of the terms is 0. A product with a mask would turn an infinity times 0 into NaN.
    np.minimum(x, 0, out=work[0])
    np.multiply(work[0], alpha, out=work[0])
    np.maximum(x, 0, out=y)
    np.add(y, work[0], out=y)


def _leaky_gradient(x: Any, y: Any, dy: Any, dx: Any, work: list[Any], alpha: float) -> None:
    # The slope is the mask of positive elements, plus alpha times the mask of the others.
    np.greater(x if reads_input("leaky_relu", alpha) else y, 0, out=work[0])
    np.multiply(np.subtract(1, work[0], out=work[1]), alpha, out=work[1])
    np.add(work[0], work[1], out=work[0])
    np.multiply(dy, work[0], out=dx)


def _decay(x: Any, e: Any, rate: float = 1.0) -> None:
    """Compute ``e = exp(-rate * |x|)``."""
    np.absolute(x, out=e)
    np.multiply(e, -rate, out=e)
    np.exp(e, out=e)


def _sigmoid(x: Any, y: Any, work: list[Any], alpha: float) -> None:
    e, s = work[:2]
    _decay(x, e)
    # s / (1 + e) with s = 1 where x >= 0, else e: the maximum of the mask and e, which is at most 1.
    np.greater_equal(x, 0, out=s)
    np.maximum(e, s, out=s)
    np.add(e, 1, out=e)
    np.divide(s, e, out=y)


def _bell(e: Any, work: Any) -> None:
    """Compute ``e = e / (1 + e)^2``, the derivative of the sigmoid if ``e = exp(-|x|)``; `work` becomes ``1 + e``."""
    np.add(e, 1, out=work)
    # Divided twice, not by the square: `_gated` reads 1 + e in `work`.
    np.divide(e, work, out=e)
    np.divide(e, work, out=e)


def _sigmoid_gradient(x: Any, y: Any, dy: Any, dx: Any, work: list[Any], alpha: float) -> None:
    _decay(x, work[0])
    _bell(work[0], work[1])
    np.multiply(dy, work[0], out=dx)


def _tanh(x: Any, y: Any, work: list[Any], alpha: float) -> None:
    np.tanh(x, out=y)


def _tanh_gradient(x: Any, y: Any, dy: Any, dx: Any, work: list[Any], alpha: float) -> None:
    """Compute the gradient of tanh: ``f'(x) = 4 sigmoid'(2 x)``; ``1 - tanh(x)^2`` would cancel."""
    _decay(x, work[0], 2.0)
    _bell(work[0], work[1])
    np.multiply(work[0], 4, out=work[0])
    np.multiply(dy, work[0], out=dx)


def _normal(x: Any, phi: Any, density: Any, work: list[Any]) -> None:
    """Compute `phi`, the cumulative normal distribution at `x`, and ``density = exp(-x^2 / 2)``; overwrites two
    buffers.

    With h the multiple of 1/16 nearest to x, ``exp(-x^2 / 2) = exp(-h^2 / 2) exp(-(x - h) (x + h) / 2)``. The first
    exponent is exact and the second small; the error of a large rounded exponent would be multiplied into the result.
    """
    size, other = work[:2]
    np.absolute(x, out=size)
    np.minimum(size, FAR, out=size)  # an infinity minus its nearest multiple would be NaN
    # density = exp(-h^2 / 2), and then times the rest of the exponential.
    np.multiply(size, 16, out=other)
    np.rint(other, out=other)
    np.multiply(other, 1 / 16, out=other)
    np.multiply(other, other, out=density)
    np.multiply(density, -0.5, out=density)
    np.exp(density, out=density)
    np.subtract(size, other, out=phi)
    np.add(size, other, out=other)
    np.multiply(phi, other, out=phi)
    np.multiply(phi, -0.5, out=phi)
    np.exp(phi, out=phi)
    np.multiply(density, phi, out=density)
    # The tail by Horner's rule: t in `size`, u in `other`.
    np.add(size, STRETCH, out=size)
    np.divide(STRETCH, size, out=size)
    np.multiply(size, 2, out=other)
    np.subtract(other, 1, out=other)
    *lower, highest = TAIL[x.dtype]
    phi.fill(highest)
    for c in reversed(lower):
        np.multiply(phi, other, out=phi)
        np.add(phi, c, out=phi)
    np.multiply(phi, size, out=phi)
    np.multiply(phi, density, out=phi)
    # 1 - tail where x >= 0, else the tail.
    np.greater_equal(x, 0, out=size)
    np.subtract(size, phi, out=phi)
    np.absolute(phi, out=phi)


def _gelu(x: Any, y: Any, work: list[Any], alpha: float) -> None:
    _normal(x, work[2], work[3], work)
    np.multiply(x, work[2], out=y)


def _gelu_gradient(x: Any, y: Any, dy: Any, dx: Any, work: list[Any], alpha: float) -> None:
    """Compute the gradient of GELU: ``f'(x) = Phi(x) + x * phi(x)``."""
    _normal(x, work[2], work[3], work)
    np.multiply(work[3], x, out=work[3])
    np.multiply(work[3], 1 / math.sqrt(2 * math.pi), out=work[3])
    np.add(work[2], work[3], out=work[2])
    np.multiply(dy, work[2], out=dx)


def _silu(x: Any, y: Any, work: list[Any], alpha: float) -> None:
    _sigmoid(x, work[0], work, alpha)
    np.multiply(x, work[0], out=y)


def _gated(x: Any, e: Any, s: Any, work: Any, rate: Any) -> None:
    """Compute ``s = sigmoid(w) + x * rate * sigmoid'(w)``, the derivative of ``x * sigmoid(w)``, from ``e =
    exp(-|w|)``.

    `w` is a function of `x` and has the sign of `x`; `rate` is the derivative of `w`. Modifies `e`.
    """
    np.greater_equal(x, 0, out=s)
    np.maximum(e, s, out=s)
    _bell(e, work)
    # s / (1 + e) is sigmoid(w), as in `_sigmoid`: `_bell` has left 1 + e in `work`.
    np.divide(s, work, out=s)
    np.multiply(e, x, out=e)
    np.multiply(e, rate, out=e)
    np.add(s, e, out=s)


def _silu_gradient(x: Any, y: Any, dy: Any, dx: Any, work: list[Any], alpha: float) -> None:
    _decay(x, work[0])
    _gated(x, work[0], work[1], work[2], 1)
    np.multiply(dy, work[1], out=dx)


def _elu(x: Any, y: Any, work: list[Any], alpha: float) -> None:
    # One of the terms is 0. Clipped first, as expm1 of a large x overflows.
    np.minimum(x, 0, out=work[0])
    np.expm1(work[0], out=work[0])
    np.multiply(work[0], alpha, out=work[0])
    np.maximum(x, 0, out=work[1])
    np.add(work[0], work[1], out=y)


def _elu_gradient(x: Any, y: Any, dy: Any, dx: Any, work: list[Any], alpha: float) -> None:
    """Compute the gradient of ELU: ``f'(x) = 1`` where x is positive, else ``alpha * exp(x)``."""
    np.minimum(x, 0, out=work[1])
    np.exp(work[1], out=work[1])
    np.multiply(work[1], alpha, out=work[1])
    # The slope is 1 where x > 0, and work[1] elsewhere: (x <= 0) * work[1] + 1 - (x <= 0).
    np.less_equal(x, 0, out=work[0])
    np.multiply(work[0], work[1], out=work[1])
    np.subtract(1, work[0], out=work[0])
    np.add(work[0], work[1], out=work[0])
    np.multiply(dy, work[0], out=dx)


def _hard_sigmoid(x: Any, y: Any, work: list[Any], alpha: float) -> None:
    # x + 3 is exact where it is small; x / 6 + 1/2 is not.
    np.add(x, 3, out=work[0])
    np.clip(work[0], 0, 6, out=work[0])
    np.divide(work[0], 6, out=y)


def _masked(slope: Any, dy: Any, dx: Any, work: Any) -> None:
    """Compute ``dx = slope * dy``, and 0 where the slope is 0, also for infinite and NaN dy."""
    passes = np.not_equal(slope, 0, out=_flags(work))
    np.multiply(dy, slope, out=dx)
    _select(passes, dx, dx)


def _hard_sigmoid_gradient(x: Any, y: Any, dy: Any, dx: Any, work: list[Any], alpha: float) -> None:
    # The slope is 1/6 where -3 < x < 3, else 0.
    np.absolute(x, out=work[0])
    np.less(work[0], 3, out=work[0])
    np.divide(work[0], 6, out=work[0])
    _masked(work[0], dy, dx, work[1])


def _hard_swish(x: Any, y: Any, work: list[Any], alpha: float) -> None:
    _hard_sigmoid(x, work[0], work, alpha)
    np.multiply(x, work[0], out=y)


def _hard_swish_gradient(x: Any, y: Any, dy: Any, dx: Any, work: list[Any], alpha: float) -> None:
    """Compute the gradient of hard swish: ``f'(x) = (2 x + 3) / 6`` where ``-3 < x < 3``, 0 below and 1 above."""
    # Clipped first: an infinity times the mask of 0 below would be NaN.
    np.clip(x, -3, 3, out=work[0])
    np.add(work[0], work[0], out=work[0])
    np.add(work[0], 3, out=work[0])
    np.divide(work[0], 6, out=work[0])
    np.absolute(x, out=work[1])
    np.less(work[1], 3, out=work[1])
    np.multiply(work[0], work[1], out=work[0])
    np.greater_equal(x, 3, out=work[1])
    np.add(work[0], work[1], out=work[0])
    _masked(work[0], dy, dx, work[1])


def _softplus(x: Any, y: Any, work: list[Any], alpha: float) -> None:
    """Compute softplus as ``max(x, 0) + log(1 + exp(-|x|))``."""
    _decay(x, work[0])
    np.log1p(work[0], out=work[0])
    np.maximum(x, 0, out=work[1])
    np.add(work[0], work[1], out=y)


def _softplus_gradient(x: Any, y: Any, dy: Any, dx: Any, work: list[Any], alpha: float) -> None:
    _sigmoid(x, work[0], work, alpha)
    np.multiply(dy, work[0], out=dx)


def _both_decays(x: Any, a: Any, b: Any, work: Any) -> None:
    """Compute ``a = exp(min(x, 0))`` and ``b = exp(min(-x, 0))``."""
    _decay(x, b)
    # Masks are 1 where the exponent is cut to 0. The other exponentials are at most 1, so a maximum selects.
    np.greater_equal(x, 0, out=a)
    np.maximum(b, a, out=a)
    np.less(x, 0, out=work)
    np.maximum(b, work, out=b)


def _mish_terms(a: Any, b: Any, n: Any) -> None:
    """Compute ``n = a (a + 2 b)`` and ``b = 2 b^2``."""
    np.add(b, b, out=n)
    np.add(n, a, out=n)
    np.multiply(n, a, out=n)
    np.multiply(b, b, out=b)
    np.add(b, b, out=b)


def _mish(x: Any, y: Any, work: list[Any], alpha: float) -> None:
    """Compute mish with ``tanh(softplus(x)) = n / d``, ``n = a (a + 2 b)``, ``d = n + 2 b^2``, a and b from
    `_both_decays`.
    """
    # With e = exp(x), tanh(softplus(x)) = ((1 + e)^2 - 1) / ((1 + e)^2 + 1) = e (e + 2) / (e (e + 2) + 2).
    # Where x > 0, both parts are divided by e^2, so that they do not overflow.
    a, b, n = work[:3]
    _both_decays(x, a, b, n)
    _mish_terms(a, b, n)
    np.add(b, n, out=b)
    np.divide(n, b, out=n)
    np.multiply(x, n, out=y)


def _mish_gradient(x: Any, y: Any, dy: Any, dx: Any, work: list[Any], alpha: float) -> None:
    """Compute the gradient of mish: ``f'(x) = (n + 4 x a b^2 (a + b) / d) / d``, with the terms of `_mish`."""
    a, b, n, inner = work[:4]
    _both_decays(x, a, b, n)
    np.add(a, b, out=inner)
    np.multiply(inner, a, out=inner)
    np.multiply(inner, x, out=inner)
    _mish_terms(a, b, n)
    np.multiply(inner, b, out=inner)
    np.add(inner, inner, out=inner)
    np.add(b, n, out=b)
    np.divide(inner, b, out=inner)
    np.add(inner, n, out=inner)
    np.divide(inner, b, out=inner)
    np.multiply(dy, inner, out=dx)


def _cubic_decay(x: Any, e: Any, work: list[Any]) -> None:
    """Compute ``e = exp(-|w|)`` with ``w = _LINEAR * x + _CUBIC * x^3``, float64; overwrites up to four more buffers.

    The exponential multiplies the error of its exponent by the exponent's size. For float32 input, float64 is accurate
    enough. For float64 input the exponent is split: h, the multiple of 1/64 nearest to ``|x|``, and its cube have so
    few bits that two parts are exact.
    """
    size, h, cube, rest = work[:4]
    np.copyto(size, x)
    np.absolute(size, out=size)
    if x.dtype == np.float32:
        np.multiply(size, size, out=e)
        np.multiply(e, _CUBIC, out=e)
        np.add(e, _LINEAR, out=e)
        np.multiply(e, size, out=e)
        np.negative(e, out=e)
        np.exp(e, out=e)
        return
    # The result is 0 long before FAR; an infinity minus its nearest multiple would be NaN.
    np.minimum(size, FAR, out=size)
    np.multiply(size, 64, out=h)
    np.rint(h, out=h)
    np.multiply(h, 1 / 64, out=h)
    np.multiply(h, h, out=cube)
    # rest = (size - h) * (linear + cubic * (size^2 + size h + h^2)), plus the remainder of the leading parts.
    np.add(size, h, out=rest)
    np.multiply(rest, size, out=rest)
    np.add(rest, cube, out=rest)
    np.multiply(rest, _CUBIC, out=rest)
    np.add(rest, _LINEAR, out=rest)
    np.subtract(size, h, out=size)
    np.multiply(rest, size, out=rest)
    np.multiply(cube, h, out=cube)
    np.multiply(cube, _REST_CUBIC, out=size)
    np.add(rest, size, out=rest)
    np.multiply(h, _REST_LINEAR, out=size)
    np.add(rest, size, out=rest)
    # The product of three exponentials: of the two exact parts, and of the small rest.
    np.multiply(h, -_LEADING_LINEAR, out=e)
    np.exp(e, out=e)
    np.multiply(cube, -_LEADING_CUBIC, out=cube)
    for part in (cube, np.negative(rest, out=rest)):
        np.exp(part, out=part)
        np.multiply(e, part, out=e)


def _gelu_tanh(x: Any, y: Any, work: list[Any], alpha: float) -> None:
    e, s = work[4:6]  # the work buffers are float64, the arrays may be float32
    _cubic_decay(x, e, work)
    np.greater_equal(x, 0, out=s)
    np.maximum(e, s, out=s)
    np.add(e, 1, out=e)
    np.divide(s, e, out=s)
    np.copyto(e, x)
    np.multiply(s, e, out=s)
    np.copyto(y, s, casting="same_kind")


def _gelu_tanh_gradient(x: Any, y: Any, dy: Any, dx: Any, work: list[Any], alpha: float) -> None:
    wide, rate, e, s = work[2:6]
    _cubic_decay(x, e, work)
    np.copyto(wide, x)
    # w' = _LINEAR + 3 _CUBIC x^2.
    np.multiply(wide, wide, out=rate)
    np.multiply(rate, 3 * _CUBIC, out=rate)
    np.add(rate, _LINEAR, out=rate)
    _gated(wide, e, s, work[0], rate)
    np.copyto(wide, dy)
    np.multiply(s, wide, out=s)
    np.copyto(dx, s, casting="same_kind")


#: Functions of each activation, by the name of the activation.
KINDS: dict[str, ElementwiseFunctions] = {
    "relu": ElementwiseFunctions(_relu, _relu_gradient, 1),
    "leaky_relu": ElementwiseFunctions(_leaky, _leaky_gradient, 2),
    "sigmoid": ElementwiseFunctions(_sigmoid, _sigmoid_gradient, 2),
    "tanh": ElementwiseFunctions(_tanh, _tanh_gradient, 2),
    "gelu": ElementwiseFunctions(_gelu, _gelu_gradient, 4),
    "silu": ElementwiseFunctions(_silu, _silu_gradient, 3),
    "elu": ElementwiseFunctions(_elu, _elu_gradient, 2),
    "hard_sigmoid": ElementwiseFunctions(_hard_sigmoid, _hard_sigmoid_gradient, 2),
    "hard_swish": ElementwiseFunctions(_hard_swish, _hard_swish_gradient, 2),
    "softplus": ElementwiseFunctions(_softplus, _softplus_gradient, 2),
    "mish": ElementwiseFunctions(_mish, _mish_gradient, 4),
    "gelu_tanh": ElementwiseFunctions(_gelu_tanh, _gelu_tanh_gradient, 6, np.dtype(np.float64)),
}
