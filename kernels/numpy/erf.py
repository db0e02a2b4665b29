"""The error function, vectorised, without allocating."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["BUFFERS", "erf"]

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
