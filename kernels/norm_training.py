"""Batch norm in training around kernels that know nothing of it: vectors of one number per channel, by NumPy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from halograd.device import HOST, Device
from halograd.kernels.kernel import BatchNormArrays, BatchNormKernels, BatchNormTraining, Kernel, chain

__all__ = ["mean_and_variance", "with_training"]


def with_training(a: BatchNormArrays, made: BatchNormKernels, device: Device) -> BatchNormKernels:
    """What `a.training` asks for, around the kernels made without it. Local; arrays on `device`."""
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
