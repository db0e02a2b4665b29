"""Kernels of a rank that owns nothing: no input, or no output. The same on every device.

Sums over nothing are zero. An output without any input reads padding only: a convolution gives its bias,
a maximum -inf. Shapes are not checked: an empty block has no channels worth the name.
"""

from __future__ import annotations

from typing import Any

from halograd.kernels.kernel import BatchNormArrays, BatchNormKernels, Kernel, idle

__all__ = ["batch_norm_of_nothing", "bias_only", "filled", "filter_of_nothing", "has_nothing", "pool_of_nothing"]

IMPL = "empty"


def has_nothing(*arrays: Any) -> bool:
    """Whether one of the arrays has no elements."""
    return any(0 in a.shape for a in arrays)


def filled(value: float, *arrays: Any) -> Kernel:
    """Writes `value` into every array that is not None."""
    targets = [a for a in arrays if a is not None and 0 not in a.shape]

    def run() -> None:
        for a in targets:
            a.fill(value)

    return Kernel(run, IMPL)


def bias_only(xp: Any, b: Any, y: Any, relu: bool) -> Kernel:
    """Output of a convolution or dense layer that has no input."""
    if b is None or has_nothing(y):
        return filled(0, y)

    def run() -> None:
        y[...] = b
        if relu:
            xp.maximum(y, 0, out=y)

    return Kernel(run, IMPL)


def filter_of_nothing(xp: Any, dy: Any, dw: Any, db: Any) -> Kernel:
    """Weight gradients without input; the bias gradient still sums the output's, should there be any."""
    if db is None or has_nothing(dy):
        return filled(0, dw, db)
    axes = tuple(range(len(dy.shape) - 1))

    def run() -> None:
        dw.fill(0)
        xp.sum(dy, axis=axes, out=db)

    return Kernel(run, IMPL)


def pool_of_nothing(value: float, y: Any, dx: Any) -> tuple[Kernel, Kernel | None]:
    """Pooling of padding alone."""
    return filled(value, y), None if dx is None else filled(0, dx)


def batch_norm_of_nothing(a: BatchNormArrays) -> BatchNormKernels:
    """Batch norm of a rank without elements: its sums are zero."""
    forward = filled(0, a.mean, a.var) if a.local else idle()
    statistics = idle() if a.local else filled(0, a.sums)
    if a.dx is None:
        return BatchNormKernels(statistics, forward, None, None)
    return BatchNormKernels(statistics, forward, filled(0, a.sums), idle())
