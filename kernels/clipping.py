"""The norm of gradients and the factor that brings it down, by NumPy's functions on the arrays of any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from halograd.kernels.kernel import Kernel

__all__ = ["clip", "sum_of_squares"]


def sum_of_squares(terms: Sequence[tuple[Any, float]], out: Any) -> Kernel:
    """``out`` = sum of ``weight * sum(array^2)``; see :meth:`Backend.sum_of_squares`."""
    full = [(array.reshape(-1), weight) for array, weight in terms if array.size]

    def run() -> None:
        out.fill(0)
        for array, weight in full:
            np.add(out, np.dot(array, array) * weight, out=out)

    return Kernel(run, "numpy:squares")


def clip(squares: Any, inverse: Any, max_norm: float, norm: Any, factor: Any) -> Kernel:
    """Norm and factor of clipping; see :meth:`Backend.clip`."""

    def run() -> None:
        np.sqrt(squares, out=norm)
        if inverse is not None:
            np.multiply(norm, inverse, out=norm)
        np.add(norm, 1e-6, out=factor)
        np.divide(max_norm, factor, out=factor)
        np.minimum(factor, 1.0, out=factor)

    return Kernel(run, "numpy:clip")
