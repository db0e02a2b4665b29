"""Softmax over the channels, and its logarithm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..kernels.access import reads, writes
from ..lowering.context import Context, Lowered
from ..lowering.views import View
from .layer import Layer, Passes, Shape

__all__ = ["LogSoftmax", "Softmax"]


class Softmax(Layer):
    """Softmax ``y[..., c] = exp(x[..., c]) / sum_k exp(x[..., k])`` over the channels, at every position.

    (To train on classes, use a cross-entropy loss on the logits: it includes the softmax.) Communication: none.
    """

    recomputation = "pointwise"

    passes = Passes((2, 1), (1, 2))
    inputs_taken = 1

    def flops(self, *shapes: Shape) -> int:
        return 4 * math.prod(shapes[0])

    def lower(self, context: Context) -> Lowered:
        low = context.wide != context.dtype
        row = (*context.box.shape[:-1], 1)
        beside: dict[str, View | None] = {"row": context.scratch(row, context.wide)}
        beside["copy"] = context.scratch(context.box.shape, context.wide) if low else None
        x = context.inputs[0].view
        kernel = context.kernel(_softmax, x=x, y=context.y, **beside)
        context.run(kernel, timing=context.timing("forward"))

        def backward() -> None:
            dx = context.gradient(0)
            beside: dict[str, View | None] = {name: context.scratch(row, context.wide) for name in ("sums", "center")}
            beside["product"] = context.scratch(context.box.shape, context.wide) if low else dx
            beside["top"] = context.scratch(context.box.shape, "bool")
            kernel = context.kernel(_softmax_gradient, y=context.y, dy=context.dy, dx=dx, **beside)
            context.run(kernel, timing=context.timing("backward_data"))

        return Lowered(backward)


class LogSoftmax(Layer):
    """Logarithm of the softmax, ``y[..., c] = x[..., c] - log(sum_k exp(x[..., k]))``, at every position.

    A cross-entropy loss gives the same result for log-probabilities as for logits (torch's NLLLoss after a
    log_softmax). Communication: none.
    """

    recomputation = "pointwise"

    passes = Passes((2, 1), (1, 2))
    inputs_taken = 1

    def flops(self, *shapes: Shape) -> int:
        return 4 * math.prod(shapes[0])

    def lower(self, context: Context) -> Lowered:
        rows = (*context.box.shape[:-1], 1)
        beside = {name: context.scratch(rows, context.wide) for name in ("largest", "sums", "ties")}
        beside["work"] = context.scratch(context.box.shape, context.wide)
        beside["top"] = context.scratch(context.box.shape, "bool")
        kernel = context.kernel(_log_softmax, x=context.inputs[0].view, y=context.y, **beside)
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

    The center is the `dy` of the largest y (the mean, if there are several). If this y is close to 1, the sum contains
    only small y, and is accurate.
    """

    def run() -> None:
        if not y.size:
            return
        np.copyto(product, y)
        np.amax(product, axis=-1, keepdims=True, out=center)
        np.equal(product, center, out=top)
        np.copyto(product, top)
        np.add.reduce(product, axis=-1, keepdims=True, out=sums)
        np.multiply(dy, top, out=product)
        np.add.reduce(product, axis=-1, keepdims=True, out=center)
        np.divide(center, sums, out=center)
        np.subtract(dy, center, out=product)
        np.multiply(product, y, out=product)
        np.add.reduce(product, axis=-1, keepdims=True, out=sums)
        np.subtract(dy, center, out=product)
        np.subtract(product, sums, out=product)
        np.multiply(product, y, out=dx)

    return run


@reads("x")
@writes("y", "largest", "sums", "ties", "work", "top")
def _log_softmax(
    environment: Any, x: Any, y: Any, largest: Any, sums: Any, ties: Any, work: Any, top: Any
) -> Callable[[], None]:
    """Return the log-softmax kernel. `work` is a float32 array for the arithmetic.

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
        np.expm1(work, out=work)
        np.multiply(work, dy, out=work)
        np.add(work, other, out=work)
        np.negative(work, out=dx)

    return run
