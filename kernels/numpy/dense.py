"""Dense layers as matrix products."""

from __future__ import annotations

from typing import Any

import numpy as np

from halograd.kernels.kernel import Kernel
from halograd.kernels.numpy.rows import column_sums

__all__ = ["dense_backward_data", "dense_backward_filter", "dense_forward"]


def dense_forward(x: Any, w: Any, b: Any, y: Any) -> Kernel:
    """``y = x w^T + b``."""
    weights = w.T

    def run() -> None:
        np.matmul(x, weights, out=y)
        if b is not None:
            np.add(y, b, out=y)

    return Kernel(run, "numpy:gemm")


def dense_backward_data(dy: Any, w: Any, dx: Any) -> Kernel:
    """``dx = dy w``."""
    return Kernel(lambda: np.matmul(dy, w, out=dx), "numpy:gemm")


def dense_backward_filter(x: Any, dy: Any, dw: Any, db: Any) -> Kernel:
    """``dw = dy^T x``, ``db = sum of dy``."""
    gradient = dy.T
    bias = None if db is None else column_sums(dy, db)

    def run() -> None:
        np.matmul(gradient, x, out=dw)
        if bias is not None:
            bias()

    return Kernel(run, "numpy:gemm")
