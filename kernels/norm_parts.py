"""What norms do around kernels: residuals, training, and variances whose difference of sums cancels.

By NumPy's functions, which an array of a device answers itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from halograd.device import HOST, Device
from halograd.kernels.chunks import buffer, chunks, on_host
from halograd.kernels.kernel import BatchNormArrays, BatchNormKernels, BatchNormTraining, Kernel, chain

__all__ = [
    "cancellation_limit", "cancels", "centered_squares", "mean_and_variance", "with_residual", "with_training",
    "without_parts",
]  # fmt: skip

Add = Callable[[list[Any], Any, bool], Kernel]
#: Forward and backward kernel of ``(kind, x, y, dy, dx, alpha)``.
Activation = Callable[[str, Any, Any, Any, Any, float], tuple[Kernel, Kernel | None]]


def without_parts(a: BatchNormArrays) -> BatchNormArrays:
    """The batch norm alone: what is left of `a` for :func:`with_residual` and :func:`with_training`."""
    alone = replace(a, training=None, residual=None, dresidual=None)
    if a.residual is None:
        return alone
    return replace(alone, relu=False, dy=a.dresidual if a.relu and a.dx is not None else a.dy)


def with_residual(a: BatchNormArrays, made: BatchNormKernels, add: Add, activation: Activation) -> BatchNormKernels:
    """``y = relu?(y + residual)`` behind `made`; before its backward, with a ReLU, ``dresidual = dy where y > 0``."""
    if a.residual is None:
        return made
    forward, sums = chain(made.forward, add([a.y, a.residual], a.y, a.relu)), made.backward_sums
    if a.relu and sums is not None:
        _, mask = activation("relu", a.y, a.y, a.dy, a.dresidual, 0.0)
        assert mask is not None
        sums = chain(mask, sums)
    return BatchNormKernels(made.statistics, forward, sums, made.backward_data)


def with_training(a: BatchNormArrays, made: BatchNormKernels, device: Device) -> BatchNormKernels:
    """What `a.training` asks for, around `made`: vectors of a number per channel, on `device`, by NumPy's functions."""
    t = a.training
    if t is None:
        return made
    forward, sums, data = made.forward, made.backward_sums, made.backward_data
    if t.from_sums and not a.local:
        forward = chain(_kernel(mean_and_variance(a, t.count, device), "mean and variance"), forward)
    if t.running_mean is not None:
        forward = chain(forward, _kernel(_running(a, t, device), "running statistics"))
    if sums is not None and t.dgamma is not None:
        sums = chain(sums, _kernel(_gradients(a, t), "gradients of the parameters"))
    if data is not None and not a.local:
        data = chain(Kernel(lambda: np.divide(a.sums, t.count, out=a.means), "numpy:means"), data)
    return BatchNormKernels(made.statistics, forward, sums, data)


def _kernel(run: Callable[[], None], what: str) -> Kernel:
    return Kernel(run, f"numpy:{what}")


def mean_and_variance(a: BatchNormArrays, count: int, device: Device = HOST) -> Callable[[], None]:
    """A function that turns ``sums = [sum x, sum x^2]`` over `count` elements into `mean` and `var`."""
    mean, var, square = device.empty((3, a.sums.shape[1]), np.float64)

    def run() -> None:
        np.divide(a.sums[0], count, out=mean)
        np.divide(a.sums[1], count, out=var)
        np.copyto(a.mean, mean, casting="same_kind")
        np.multiply(mean, mean, out=square)
        np.subtract(var, square, out=var)
        np.maximum(var, 0, out=var)
        np.copyto(a.var, var, casting="same_kind")

    return run


def _running(a: BatchNormArrays, t: BatchNormTraining, device: Device) -> Callable[[], None]:
    """A function that takes `mean` and the unbiased variance into the running statistics."""
    part = device.empty(a.mean.shape, np.float64)
    both = ((t.running_mean, a.mean, t.momentum), (t.running_var, a.var, t.momentum * t.unbiased))

    def run() -> None:
        for running, batch, weight in both:
            np.copyto(part, batch)
            np.multiply(part, weight, out=part)
            np.multiply(running, 1 - t.momentum, out=running)
            np.add(running, part, out=running, casting="same_kind")

    return run


def _gradients(a: BatchNormArrays, t: BatchNormTraining) -> Callable[[], None]:
    """A function that writes the gradients of the parameters, which the sums are."""

    def run() -> None:
        np.copyto(t.dbeta, a.sums[0], casting="same_kind")
        np.copyto(t.dgamma, a.sums[1], casting="same_kind")

    return run


def cancellation_limit(dtype: np.dtype) -> float:
    """Largest ``mean^2 / var`` for which ``sum x^2 / n - mean^2`` in float64 is good enough for `dtype`.

    The difference has a relative error of ``mean^2 / var`` roundings of float64. In float32 no more than one of
    its own roundings is let in; in float64 four of sixteen digits are.
    """
    return float(max(2.0**12, np.finfo(dtype).eps / np.finfo(np.float64).eps))


def cancels(mean: Any, var: Any, eps: float, limit: float, work: Any) -> bool:
    """Whether ``mean^2 > limit * (var + eps)`` anywhere. `work`: two float64 arrays of that shape, modified.

    On a device the host does not look, as it would have to wait: the answer is yes. There only float64, which is for
    proofs, comes here; in float32 ``mean^2 / var`` above 5e8 costs digits of the variance.
    """
    if not mean.size:
        return False
    if not on_host(mean):
        return True
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
