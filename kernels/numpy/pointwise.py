"""Activations, sums of arrays, dropout; and the error function."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..checks import same_elements
from ..kernel import Kernel, ScratchKernel
from ..memory import nbytes_of, round_up
from ..pointwise import DropoutMask, FusedActivation, reads_input
from .windows import NumpyWindows

__all__ = ["NumpyPointwise", "erf", "global_counters", "mix64", "mix64_inplace"]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
#: Elements hashed at a time: the buffers stay in the second-level cache.
_DRAWN = 1 << 14
#: Elements of an activation at a time, for the same reason.
_PIECE = 1 << 15

# Of the approximation of GELU, Hendrycks and Gimpel (2016).
_LINEAR, _CUBIC = math.sqrt(2 / math.pi), 0.044715

Step = Callable[[Any, Any, list[Any], float], None]


def _relu(x: Any, y: Any, work: list[Any], alpha: float) -> None:
    np.maximum(x, 0, out=y)


def _relu_gradient(x: Any, y: Any, dy: Any, dx: Any, work: list[Any], alpha: float) -> None:
    np.greater(y, 0, out=work[0])
    np.multiply(dy, work[0], out=dx)


def _leaky(x: Any, y: Any, work: list[Any], alpha: float) -> None:
    np.multiply(x, alpha, out=work[0])
    np.greater(x, 0, out=work[1])
    # Blended by a mask and not by np.maximum: the slope may exceed 1 or be negative.
    np.subtract(x, work[0], out=work[2])
    np.multiply(work[2], work[1], out=work[2])
    np.add(work[0], work[2], out=y)


def _leaky_gradient(x: Any, y: Any, dy: Any, dx: Any, work: list[Any], alpha: float) -> None:
    np.greater(x if reads_input("leaky_relu", alpha) else y, 0, out=work[0])
    np.multiply(work[0], 1 - alpha, out=work[0])
    np.add(work[0], alpha, out=work[0])
    np.multiply(dy, work[0], out=dx)


def _sigmoid(x: Any, y: Any, work: list[Any], alpha: float) -> None:
    # By tanh, which does not overflow: sigmoid(x) = (1 + tanh(x / 2)) / 2.
    np.multiply(x, 0.5, out=work[0])
    np.tanh(work[0], out=work[0])
    np.multiply(work[0], 0.5, out=work[0])
    np.add(work[0], 0.5, out=y)


def _sigmoid_gradient(x: Any, y: Any, dy: Any, dx: Any, work: list[Any], alpha: float) -> None:
    np.subtract(1, y, out=work[0])
    np.multiply(work[0], y, out=work[0])
    np.multiply(dy, work[0], out=dx)


def _tanh(x: Any, y: Any, work: list[Any], alpha: float) -> None:
    np.tanh(x, out=y)


def _tanh_gradient(x: Any, y: Any, dy: Any, dx: Any, work: list[Any], alpha: float) -> None:
    np.multiply(y, y, out=work[0])
    np.subtract(1, work[0], out=work[0])
    np.multiply(dy, work[0], out=dx)


def _normal_distribution(x: Any, out: Any, work: list[Any]) -> None:
    """``out = (1 + erf(x / sqrt(2))) / 2``; overwrites four more buffers."""
    np.multiply(x, math.sqrt(0.5), out=work[0])
    erf(work[0], out, work[1 : 1 + BUFFERS])
    np.add(out, 1, out=out)
    np.multiply(out, 0.5, out=out)


def _gelu(x: Any, y: Any, work: list[Any], alpha: float) -> None:
    _normal_distribution(x, work[0 + 4], work)
    np.multiply(x, work[4], out=y)


def _gelu_gradient(x: Any, y: Any, dy: Any, dx: Any, work: list[Any], alpha: float) -> None:
    """``f'(x) = Phi(x) + x * phi(x)``."""
    _normal_distribution(x, work[4], work)
    np.multiply(x, x, out=work[0])
    np.multiply(work[0], -0.5, out=work[0])
    np.exp(work[0], out=work[0])
    np.multiply(work[0], x, out=work[0])
    np.multiply(work[0], 1 / math.sqrt(2 * math.pi), out=work[0])
    np.add(work[4], work[0], out=work[4])
    np.multiply(dy, work[4], out=dx)


def _silu(x: Any, y: Any, work: list[Any], alpha: float) -> None:
    _sigmoid(x, work[0], work, alpha)
    np.multiply(x, work[0], out=y)


def _silu_gradient(x: Any, y: Any, dy: Any, dx: Any, work: list[Any], alpha: float) -> None:
    """``f'(x) = s * (1 + x * (1 - s))`` with ``s = sigmoid(x)``."""
    _sigmoid(x, work[0], work, alpha)
    np.subtract(1, work[0], out=work[1])
    np.multiply(work[1], x, out=work[1])
    np.add(work[1], 1, out=work[1])
    np.multiply(work[1], work[0], out=work[1])
    np.multiply(dy, work[1], out=dx)


def _elu(x: Any, y: Any, work: list[Any], alpha: float) -> None:
    np.minimum(x, 0, out=work[0])
    np.expm1(work[0], out=work[0])
    np.multiply(work[0], alpha, out=work[0])
    np.maximum(x, 0, out=work[1])
    np.add(work[0], work[1], out=y)


def _elu_gradient(x: Any, y: Any, dy: Any, dx: Any, work: list[Any], alpha: float) -> None:
    """By the output: 1 where it is positive, else ``y + alpha``."""
    np.minimum(y, 0, out=work[0])
    np.add(work[0], alpha, out=work[0])
    np.greater(y, 0, out=work[1])
    np.multiply(work[1], 1 - alpha, out=work[1])
    np.add(work[0], work[1], out=work[0])
    np.multiply(dy, work[0], out=dx)


def _hard_sigmoid(x: Any, y: Any, work: list[Any], alpha: float) -> None:
    np.multiply(x, 1 / 6, out=work[0])
    np.add(work[0], 0.5, out=work[0])
    np.clip(work[0], 0, 1, out=y)


def _hard_sigmoid_gradient(x: Any, y: Any, dy: Any, dx: Any, work: list[Any], alpha: float) -> None:
    np.greater(y, 0, out=work[0])
    np.less(y, 1, out=work[1])
    np.multiply(work[0], work[1], out=work[0])
    np.multiply(work[0], 1 / 6, out=work[0])
    np.multiply(dy, work[0], out=dx)


def _hard_swish(x: Any, y: Any, work: list[Any], alpha: float) -> None:
    _hard_sigmoid(x, work[0], work, alpha)
    np.multiply(x, work[0], out=y)


def _hard_swish_gradient(x: Any, y: Any, dy: Any, dx: Any, work: list[Any], alpha: float) -> None:
    """``f'(x) = h + x / 6`` where ``0 < h < 1``, else h; h the hard sigmoid."""
    _hard_sigmoid(x, work[0], work, alpha)
    np.greater(work[0], 0, out=work[1])
    np.less(work[0], 1, out=work[2])
    np.multiply(work[1], work[2], out=work[1])
    np.multiply(work[1], x, out=work[1])
    np.multiply(work[1], 1 / 6, out=work[1])
    np.add(work[0], work[1], out=work[0])
    np.multiply(dy, work[0], out=dx)


def _softplus(x: Any, y: Any, work: list[Any], alpha: float) -> None:
    """``max(x, 0) + log(1 + exp(-|x|))``, which does not overflow."""
    np.absolute(x, out=work[0])
    np.negative(work[0], out=work[0])
    np.exp(work[0], out=work[0])
    np.log1p(work[0], out=work[0])
    np.maximum(x, 0, out=work[1])
    np.add(work[0], work[1], out=y)


def _softplus_gradient(x: Any, y: Any, dy: Any, dx: Any, work: list[Any], alpha: float) -> None:
    _sigmoid(x, work[0], work, alpha)
    np.multiply(dy, work[0], out=dx)


def _mish(x: Any, y: Any, work: list[Any], alpha: float) -> None:
    _softplus(x, work[0], work, alpha)
    np.tanh(work[0], out=work[0])
    np.multiply(x, work[0], out=y)


def _mish_gradient(x: Any, y: Any, dy: Any, dx: Any, work: list[Any], alpha: float) -> None:
    """``f'(x) = t + x * (1 - t * t) * sigmoid(x)`` with ``t = tanh(softplus(x))``."""
    _softplus(x, work[1], work, alpha)
    np.tanh(work[1], out=work[1])
    _sigmoid(x, work[0], work, alpha)
    np.multiply(work[0], x, out=work[0])
    np.multiply(work[1], work[1], out=work[2])
    np.subtract(1, work[2], out=work[2])
    np.multiply(work[0], work[2], out=work[0])
    np.add(work[0], work[1], out=work[0])
    np.multiply(dy, work[0], out=dx)


def _tanh_of_cubic(x: Any, t: Any, work: Any) -> None:
    """``t = tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))``; overwrites `work`."""
    np.multiply(x, x, out=work)
    np.multiply(work, _CUBIC, out=work)
    np.add(work, 1, out=work)
    np.multiply(work, _LINEAR, out=work)
    np.multiply(work, x, out=work)
    np.tanh(work, out=t)


def _gelu_tanh(x: Any, y: Any, work: list[Any], alpha: float) -> None:
    _tanh_of_cubic(x, work[0], work[1])
    np.add(work[0], 1, out=work[0])
    np.multiply(work[0], 0.5, out=work[0])
    np.multiply(x, work[0], out=y)


def _gelu_tanh_gradient(x: Any, y: Any, dy: Any, dx: Any, work: list[Any], alpha: float) -> None:
    """``f'(x) = (1 + t) * (1 + x * (1 - t) * u') / 2`` with u the argument of the hyperbolic tangent t."""
    _tanh_of_cubic(x, work[0], work[1])
    np.multiply(x, x, out=work[1])
    np.multiply(work[1], 3 * _CUBIC, out=work[1])
    np.add(work[1], 1, out=work[1])
    np.multiply(work[1], _LINEAR, out=work[1])
    np.multiply(work[1], x, out=work[1])
    np.subtract(1, work[0], out=work[2])
    np.multiply(work[1], work[2], out=work[1])
    np.add(work[1], 1, out=work[1])
    np.add(work[0], 1, out=work[0])
    np.multiply(work[0], work[1], out=work[0])
    np.multiply(work[0], 0.5, out=work[0])
    np.multiply(dy, work[0], out=dx)


# Name: forward, gradient, and the number of buffers of the array's shape that they overwrite.
_KINDS: dict[str, tuple[Step, Callable[..., None], int]] = {
    "relu": (_relu, _relu_gradient, 1),
    "leaky_relu": (_leaky, _leaky_gradient, 3),
    "sigmoid": (_sigmoid, _sigmoid_gradient, 1),
    "tanh": (_tanh, _tanh_gradient, 1),
    "gelu": (_gelu, _gelu_gradient, 5),
    "silu": (_silu, _silu_gradient, 2),
    "elu": (_elu, _elu_gradient, 2),
    "hard_sigmoid": (_hard_sigmoid, _hard_sigmoid_gradient, 2),
    "hard_swish": (_hard_swish, _hard_swish_gradient, 3),
    "softplus": (_softplus, _softplus_gradient, 2),
    "mish": (_mish, _mish_gradient, 3),
    "gelu_tanh": (_gelu_tanh, _gelu_tanh_gradient, 3),
}


class NumpyPointwise(NumpyWindows):
    """By NumPy; arrays of activations and sums may have any strides."""

    def _activation(self, kind: str, x: Any, y: Any, dy: Any, dx: Any, alpha: float) -> tuple[Kernel, Kernel | None]:
        """Elementwise function and its gradient."""
        forward, gradient, buffers = _KINDS[kind]
        run = self._elementwise(forward, (x, y), buffers, alpha, f"numpy:{kind}")
        return run, None if dx is None else self._elementwise(gradient, (x, y, dy, dx), buffers, alpha, run.impl)

    def _elementwise(
        self, function: Callable[..., None], arrays: Sequence[Any], buffers: int, alpha: float, impl: str
    ) -> Kernel:
        """Return a function of arrays and buffers: of packed arrays in pieces that stay in the cache, else of all at
        once.
        """
        pieces, dtype, scratch = [tuple(arrays)], arrays[0].dtype, self.scratch
        if all(a.flags.c_contiguous for a in arrays):
            flat = [a.reshape(-1) for a in arrays]
            starts = range(0, flat[0].size, _PIECE)
            pieces = [tuple(a[i : i + _PIECE] for a in flat) for i in starts]
        size = round_up(nbytes_of(pieces[0][0].shape, dtype))

        def bind() -> Callable[[], None]:
            steps = [
                (*some, [scratch.view(some[0].shape, dtype, i * size) for i in range(buffers)], alpha)
                for some in pieces
            ]

            def run() -> None:
                for step in steps:
                    function(*step)

            return run

        return ScratchKernel(bind, scratch, buffers * size, impl)

    def _add(self, xs: list[Any], y: Any, activation: FusedActivation | None) -> Kernel:
        """Sum of arrays; `y` may be one of them, or several."""
        into = [x for x in xs if same_elements(x, y)]
        terms = [x for x in xs if not same_elements(x, y)]

        def run() -> None:
            _start(into, terms, y)
            for term in terms[0 if into else 2 :]:
                np.add(y, term, out=y)

        return self.activated(Kernel(run, "numpy:add"), y, activation)

    def _dropout(self, x: Any, y: Any, dy: Any, dx: Any, mask: DropoutMask) -> tuple[Kernel, Kernel | None]:
        """Backward draws the mask again."""
        return self._dropped(x, y, mask), None if dx is None else self._dropped(dy, dx, mask)

    def _dropped(self, x: Any, y: Any, mask: DropoutMask) -> Kernel:
        outer, inner = global_counters(mask.shape, mask.start, x.shape)
        step, threshold = max(1, _DRAWN // max(1, inner.size)), np.uint64(int(mask.rate * 2**64))
        shape, factor, scratch = (min(step, outer.size), inner.size), 1.0 / (1.0 - mask.rate), self.scratch
        size, per_sample = round_up(nbytes_of(shape, np.uint64)), math.prod(mask.shape[1:])
        source, target = (a.reshape(outer.size, inner.size) for a in (x, y))

        def bind() -> Callable[[], None]:
            hashes, shifted = scratch.view(shape, np.uint64), scratch.view(shape, np.uint64, size)
            dropped, steps = scratch.view(shape, np.bool_, 2 * size), []
            for part in (slice(i, min(i + step, outer.size)) for i in range(0, outer.size, step)):
                count = part.stop - part.start
                work = (hashes[:count], shifted[:count], dropped[:count])
                steps.append((outer[part, None], source[part], target[part], *work))

            def run() -> None:
                seed, number, first = mask.state.tolist()
                key = mix64(mix64(mix64(seed) + number) + mask.salt)
                offset = np.uint64((key + first * per_sample * _GOLDEN) & _MASK)
                for counters, given, found, z, work, out in steps:
                    np.add(counters, inner, out=z)
                    np.add(z, offset, out=z)
                    mix64_inplace(z, work)
                    np.less(z, threshold, out=out)
                    np.multiply(given, factor, out=found)
                    # Set, not multiplied by zero: an infinite element that is dropped must not become NaN.
                    np.copyto(found, 0, where=out)

            return run

        kept = outer.nbytes + inner.nbytes
        return ScratchKernel(bind, scratch, 2 * size + nbytes_of(shape, np.bool_), "numpy:dropout", kept)


def _start(into: list[Any], terms: list[Any], y: Any) -> None:
    """Make `y` the sum of what it stands for already, or of the first one or two terms."""
    if into:
        if len(into) > 1:
            np.multiply(y, len(into), out=y)
    elif len(terms) > 1:
        np.add(terms[0], terms[1], out=y)
    else:
        np.copyto(y, terms[0])


def mix64(value: int) -> int:
    """Return the finaliser of SplitMix64: a bijection of 64-bit numbers in which every bit depends on all bits."""
    z = (value + _GOLDEN) & _MASK
    z = ((z ^ (z >> _SHIFTS[0])) * _FACTORS[0]) & _MASK
    z = ((z ^ (z >> _SHIFTS[1])) * _FACTORS[1]) & _MASK
    return z ^ (z >> _SHIFTS[2])


def mix64_inplace(z: Any, work: Any) -> None:
    """`mix64` of every element of `z` (uint64) without its first addition, in place; `work` has the same shape."""
    for shift, factor in zip(_SHIFTS, (*_FACTORS, None)):
        np.right_shift(z, np.uint64(shift), out=work)
        np.bitwise_xor(z, work, out=z)
        if factor is not None:
            np.multiply(z, np.uint64(factor), out=z)


def global_counters(
    shape: Sequence[int], start: Sequence[int], extents: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays, of the outer axes and of the last two, whose sums are ``GOLDEN * index`` modulo 2**64.

    `index` is the row-major position in an array of `shape` of each element of the block of `extents` that begins
    at `start`, in the order of the block.
    """
    split = max(1, len(shape) - 2)
    parts = []
    for axes in (range(split), range(split, len(shape))):
        total = np.zeros((1,), np.uint64)
        for axis in axes:
            step = (math.prod(shape[axis + 1 :]) * _GOLDEN) & _MASK
            index = np.arange(start[axis], start[axis] + extents[axis], dtype=np.uint64)
            total = (total[:, None] + index * np.uint64(step)).reshape(-1)
        parts.append(total)
    return parts[0], parts[1]


# Coefficients of W. J. Cody, "Rational Chebyshev approximations for the error function", Math. Comp. 23
# (1969), highest power first: erf(x) = x P(x^2) / Q(x^2) for small |x|, erfc(x) = exp(-x^2) P(x) / Q(x) beyond.
_SMALL_P = (1.85777706184603153e-1, 3.16112374387056560e0, 1.13864154151050156e2, 3.77485237685302021e2,
            3.20937758913846947e3)  # fmt: skip
_SMALL_Q = (1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3, 2.84423683343917062e3)
_LARGE_P = (2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594e0, 6.61191906371416295e1,
            2.98635138197400131e2, 8.81952221241769090e2, 1.71204761263407058e3, 2.05107837782607147e3,
            1.23033935479799725e3)  # fmt: skip
_LARGE_Q = (1.0, 1.57449261107098347e1, 1.17693950891312499e2, 5.37181101862009858e2, 1.62138957456669019e3,
            3.29079923573345963e3, 4.36261909014324716e3, 3.43936767414372164e3, 1.23033935480374942e3)  # fmt: skip
_SWITCH = 0.46875
# Beyond this erfc is below half of float64's eps.
_END = 5.9
BUFFERS = 3


def _ratio(x: Any, p: tuple[float, ...], q: tuple[float, ...], out: Any, below: Any) -> None:
    for target, coefficients in ((out, p), (below, q)):
        target.fill(coefficients[0])
        for c in coefficients[1:]:
            np.multiply(target, x, out=target)
            np.add(target, c, out=target)
    np.divide(out, below, out=out)


def erf(x: Any, out: Any, work: Any) -> None:
    """``out = erf(x)``, to an absolute error of a few eps; `x` and `out` must not overlap.

    Parameters
    ----------
    x, out
        Arrays of one shape.
    work
        :data:`BUFFERS` arrays of that shape, overwritten.
    """
    size, p, q = work
    np.absolute(x, out=size)
    np.minimum(size, _END, out=size)
    _ratio(size, _LARGE_P, _LARGE_Q, p, q)
    np.multiply(size, size, out=q)
    np.negative(q, out=q)
    np.exp(q, out=q)
    np.multiply(p, q, out=p)
    np.subtract(1, p, out=p)
    np.copysign(p, x, out=out)
    np.minimum(size, _SWITCH, out=size)
    np.multiply(size, size, out=size)
    _ratio(size, _SMALL_P, _SMALL_Q, p, q)
    np.absolute(x, out=size)
    np.minimum(size, _SWITCH, out=q)
    np.multiply(p, q, out=p)
    np.copysign(p, x, out=p)
    # Blended by a mask of the arrays' own dtype: a boolean one would have to be allocated.
    np.less_equal(size, _SWITCH, out=q)
    np.subtract(p, out, out=p)
    np.multiply(p, q, out=p)
    np.add(out, p, out=out)
