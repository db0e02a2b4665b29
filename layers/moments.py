"""Mean and variance from sums over ranks, and what to do where the difference of sums cancels."""

from __future__ import annotations

from typing import Any

import numpy as np

from halograd.layers.chunks import buffer, chunks, on_host

__all__ = ["cancellation_limit", "cancels", "centered_squares"]


_FLOAT32_LIMIT = float(np.finfo(np.float32).eps / np.finfo(np.float64).eps)


def cancellation_limit(dtype: np.dtype) -> float:
    """Largest ``mean^2 / var`` for which ``sum x^2 / n - mean^2`` in float64 is good enough for `dtype`.

    The difference has a relative error of ``mean^2 / var`` roundings of float64. In float32 no more than one of
    its own roundings is let in; in float64 four of sixteen digits are.
    """
    return float(max(2.0**12, np.finfo(dtype).eps / np.finfo(np.float64).eps))


def cancels(mean: Any, var: Any, eps: float, limit: float, work: Any) -> bool:
    """Whether ``mean^2 > limit * (var + eps)`` anywhere. `work`: two float64 arrays of that shape, modified.

    On a device nobody looks, as the host would have to wait: there the answer depends on the limit alone. In float64,
    which is for proofs, it is yes; in float32 no, so that ``mean^2 / var`` above 5e8 costs digits of the variance.
    """
    if not mean.size:
        return False
    if not on_host(mean):
        return limit < _FLOAT32_LIMIT
    np.multiply(mean, mean, out=work[0])
    np.multiply(var, limit, out=work[1])
    work[0] -= work[1]
    return bool(work[0].max() > limit * eps)


def centered_squares(x: Any, mean: Any, out: Any, work: dict) -> None:
    """``out[c] = sum (x - mean)^2`` over all positions of x ``(positions, C)``, in float64. Local."""
    out.fill(0)
    column = buffer(work, "column", out.shape, np.float64)
    for part in chunks(x.shape[0], x.shape[1], work):
        d = buffer(work, "d", x[part].shape, np.float64)
        np.subtract(x[part], mean, out=d)
        np.multiply(d, d, out=d)
        out += np.sum(d, axis=0, out=column)
