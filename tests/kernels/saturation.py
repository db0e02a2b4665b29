"""Activations and their derivatives in extended precision, and errors in units of rounding.

The closed forms avoid differences of nearly equal values and use np.longdouble: torch's own float64 loses digits near
saturation (its ``tanh'`` at 18 is 4e-16, and 0 from 20 on). They share no code with the backends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

Long = np.longdouble
#: The reference for float64 has more digits.
EXTENDED = np.finfo(Long).eps < np.finfo(np.float64).eps / 256
_PI = Long("3.14159265358979323846264338327950288")
_ROOT = np.sqrt(2 * _PI)
_LINEAR = 2 * np.sqrt(2 / _PI)
_CUBIC = _LINEAR * (Long(44715) / 1000000)

#: Largest permitted error.
ROUNDINGS = 8
#: Results below this multiple of the smallest normal number are not compared: the exponential alone is subnormal.
SMALL = 128
#: The same for kernels that take subnormal numbers for 0: the slope of a GELU is up to 2,000 times the exponential.
SMALL_FLUSHED = 4096


def _sigmoid(w: Any) -> tuple[Any, Any]:
    """Return value and derivative of the logistic function."""
    e = np.exp(-np.abs(w))
    return np.where(w >= 0, 1, e) / (1 + e), e / (1 + e) ** 2


def _normal(x: Any) -> tuple[Any, Any]:
    """Return the normal distribution function and its density: a series near 0, a continued fraction elsewhere."""
    size = np.minimum(np.abs(x), 150)
    density = np.exp(-size * size / 2) / _ROOT
    near = np.minimum(size, 2)
    term = total = near
    for n in range(1, 60):
        term = term * near * near / (2 * n + 1)
        total = total + term
    far, fraction = np.maximum(size, 2), np.zeros_like(size)
    for k in range(400, 0, -1):
        fraction = k / (far + fraction)
    tail = np.where(size < 2, Long(1) / 2 - density * total, density / (far + fraction))
    return np.where(x > 0, 1 - tail, tail), density


def _gated(x: Any, gate: tuple[Any, Any], rate: Any) -> tuple[Any, Any]:
    """Return value and derivative of ``x * g(u)``: `gate` is value and derivative of g, `rate` is du/dx."""
    return x * gate[0], gate[0] + x * rate * gate[1]


def _gelu_tanh(x: Any) -> tuple[Any, Any]:
    return _gated(x, _sigmoid(x * (_LINEAR + _CUBIC * x * x)), _LINEAR + 3 * _CUBIC * x * x)


def _mish(x: Any) -> tuple[Any, Any]:
    e = np.exp(-np.abs(x))
    a, b = np.where(x >= 0, 1, e), np.where(x >= 0, e, 1)
    n, d = a * (a + 2 * b), a * (a + 2 * b) + 2 * b * b
    return x * n / d, n / d + x * 4 * a * b * b * (a + b) / d**2


def _softplus(x: Any) -> tuple[Any, Any]:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))), _sigmoid(x)[0]


#: Value and derivative of every kind.
EXACT: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "relu": lambda x, alpha: (np.maximum(x, 0), np.where(x > 0, 1, Long(0))),
    "leaky_relu": lambda x, alpha: (np.where(x > 0, x, alpha * x), np.where(x > 0, 1, alpha)),
    "sigmoid": lambda x, alpha: _sigmoid(x),
    "tanh": lambda x, alpha: (np.tanh(x), 4 * _sigmoid(2 * x)[1]),
    "gelu": lambda x, alpha: _gated(x, _normal(x), 1),
    "silu": lambda x, alpha: _gated(x, _sigmoid(x), 1),
    "elu": lambda x, alpha: (np.where(x > 0, x, alpha * np.expm1(x)), np.where(x > 0, 1, alpha * np.exp(x))),
    "hard_sigmoid": lambda x, alpha: (np.clip(x + 3, 0, 6) / 6, np.where(np.abs(x) < 3, Long(1) / 6, 0)),
    "hard_swish": lambda x, alpha: (
        x * np.clip(x + 3, 0, 6) / 6,
        np.where(np.abs(x) < 3, (2 * x + 3) / 6, np.where(x > 0, Long(1), 0)),
    ),
    "softplus": lambda x, alpha: _softplus(x),
    "mish": lambda x, alpha: _mish(x),
    "gelu_tanh": lambda x, alpha: _gelu_tanh(x),
}
#: Parameters to test; 0.0 for the other kinds.
ALPHAS = {"leaky_relu": (0.1, 1.5, -0.3), "elu": (1.0, 0.3, 1.5)}


def points(dtype: Any) -> Any:
    """Return values from -100 to 100: dense, tiny, and next to the points where a formula changes."""
    info = ml_dtypes.finfo(dtype)
    sizes = np.concatenate([np.geomspace(float(info.tiny), 1, 300), np.linspace(0.001, 4, 1500)])
    knees = np.array([0.5, 1, 2, 3, 4, 8.5, 16, 17, 17.5, 20, 36.5, 37, 40, 87, 88, 88.5, 90])
    knees = np.concatenate([knees * (1 + i * float(info.eps)) for i in (-0.5, 0, 1)])
    positive = np.unique(np.concatenate([sizes, np.linspace(4, 100, 3000), knees]).astype(dtype))
    return np.concatenate([-positive[::-1], np.zeros(1, dtype), positive])


def bent(f: Callable[[Any], Any], x: Any) -> Any:
    """Return ``|x f'(x)|``, the change of f for a relative change of x."""
    step = Long(2) ** -20
    return np.abs(f(x * (1 + step)) - f(x * (1 - step))) / (2 * step)


def exact(kind: str, x: Any, alpha: float = 0.0) -> tuple[tuple[Any, Any], Any]:
    """Return value and derivative at `x`, and the scale of the derivative's error.

    The scale is the derivative's size; close to a zero of a derivative at an irrational argument (-1.28 for silu), it
    is the change caused by a rounding of the argument.
    """
    x, alpha = x.astype(Long), Long(alpha)
    with np.errstate(all="ignore"):
        value, slope = EXACT[kind](x, alpha)
        size = np.abs(slope)
        if kind in ("silu", "mish", "gelu", "gelu_tanh"):
            near = (x > -2) & (x < -0.4)
            size = np.where(near, np.maximum(size, bent(lambda v: EXACT[kind](v, alpha)[1], x)), size)
    return (value, slope), size


def roundings(got: Any, expected: Any, size: Any = None, small: float = SMALL) -> Any:
    """Return the error of every element in units of the last place of `got`'s dtype, relative to the expected size."""
    info = ml_dtypes.finfo(got.dtype)
    least = small * Long(info.tiny)
    size = np.abs(expected) if size is None else size
    error = np.abs(got.astype(Long) - expected) / (np.maximum(size, least) * Long(info.eps))
    # If both are small, the error counts as 0.
    return np.where((np.abs(expected) < least) & (np.abs(got.astype(Long)) <= 2 * least), 0, error)


def softplus(x: Any) -> Any:
    return EXACT["softplus"](x, 0)[0]


def sigmoid(x: Any) -> Any:
    return EXACT["sigmoid"](x, 0)[0]


def needs_more_digits(dtype: Any) -> None:
    """Skip a test of float64 where the reference has no more digits."""
    if np.dtype(dtype) == np.float64 and not EXTENDED:
        pytest.skip("needs a long double of more digits than float64")


def assert_few(got: Any, want: Any, what: str, size: Any = None) -> None:
    """Check that the errors of all elements are at most `ROUNDINGS`."""
    error = roundings(got, want, size)
    worst = np.unravel_index(int(np.argmax(np.where(np.isnan(error), np.inf, error))), error.shape)
    assert error[worst] <= ROUNDINGS, f"{what}: {got[worst]} for {want[worst]}: {error[worst]} roundings"
