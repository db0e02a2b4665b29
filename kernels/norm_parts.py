"""Parts of norms around their kernels: activations and residuals, training, and variances for which ``E[x^2] -
E[x]^2`` cancels.

The code calls NumPy functions, which device arrays dispatch to their own library.

Group, instance and layer norm combine per-sample kernels with sums over groups of channels and over ranks::

    statistics     sums of x, x^2 per channel -> totals of groups -> summed over ranks
    cancels        means and variances; whether E[x^2] - E[x]^2 is inaccurate. If so:
        centered   squares about the mean -> totals -> summed over ranks
        variance
    normalize      mean, var -> y
    backward_sums  sums of dy, dy * xhat -> gradients of gamma, beta; totals of groups, with gamma -> summed over ranks
    backward_data  means -> dx

Gradient: with ``g = dy * gamma`` (``f' * dy * gamma`` with an activation), ``dx = (g - A - xhat * B) / std``, where A
and B are the means of ``g`` and ``g * xhat`` over the group. The kernels of a sample compute ``gamma * (dy - A' - xhat
* B') / std`` with one A' and B' per channel: all of it if groups are channels, else the first term.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..device import HOST, Device
from .access import again, reads, writes
from .base import Base
from .kernel import BatchNormArrays, BatchNormKernels, BatchNormTraining, FusedActivation, Kernel, chain
from .memory import Workspace, buffer, chunks, on_host

__all__ = [
    "GroupNormArrays",
    "GroupNormKernels",
    "cancellation_limit",
    "cancels",
    "centered_squares",
    "differentiated",
    "mean_and_variance",
    "with_activation",
    "with_training",
]


def with_activation(
    a: BatchNormArrays, batch_norm: Callable[[BatchNormArrays], BatchNormKernels], backend: Base
) -> BatchNormKernels:
    """Add ``y = f(y + residual)`` after a batch norm, and ``f' * dy`` (in `dresidual` or `dx`) before its backward
    pass.

    Without a residual, the input of `f` is recomputed and not stored. With a residual, the derivative comes from `y`.
    """
    f, dz = a.activation, a.dx if a.residual is None else a.dresidual
    plain = replace(a, activation=None, residual=None, dresidual=None)
    # The norm's backward kernels read f' * dy where the kernels below write it.
    norm = batch_norm(plain if f is None or dz is None else replace(plain, dy=dz))
    if a.residual is None:
        forward = backend.activated(norm.forward, a.y, f)
    else:
        forward = backend.added(norm.forward, a.y, a.residual, f)
    sums, data = norm.backward_sums, norm.backward_data
    if f is not None and sums is not None and a.residual is not None:
        # The derivative follows from the output (`check_residual`), so `y` stands for both.
        _, backward = backend.activation(f.kind, a.y, a.y, a.dy, dz, f.alpha)
        assert backward is not None
        sums = chain(backward, sums)
    elif f is not None and sums is not None:
        # Not local: the input of f is recomputed with the statistics of the last forward pass.
        input_of_f = batch_norm(replace(plain, y=dz, dy=None, dx=None, local=False)).forward
        masked = chain(input_of_f, differentiated(f, dz, a.dy, backend))
        # With sums of another kernel, backward_sums() is not called, so the mask moves to the kernel that is.
        if a.summed and data is not None:
            data = chain(masked, data)
        else:
            sums = chain(masked, sums)
    return BatchNormKernels(norm.statistics, forward, sums, data)


def differentiated(f: FusedActivation, z: Any, dy: Any, backend: Base) -> Kernel:
    """Return a kernel for ``z = f'(z) * dy``; `z` and `dy` must not overlap."""
    # The forward kernel is not called but needs an output array: `z` may be the memory of the norm's output.
    forward, backward = backend.activation(f.kind, z, dy if f.by_input else z, dy, z, f.alpha)
    assert backward is not None
    return backward if f.by_input else chain(forward, backward)


def with_training(a: BatchNormArrays, kernels: BatchNormKernels, device: Device) -> BatchNormKernels:
    """Add the work of `a.training` to `kernels`, by NumPy functions on per-channel vectors on `device`."""
    t = a.training
    if t is None:
        return kernels
    forward, sums, data = kernels.forward, kernels.backward_sums, kernels.backward_data
    if t.from_sums and not a.local:
        forward = chain(_kernel(mean_and_variance(a, t.count, device), "mean and variance"), forward)
    if t.running_mean is not None:
        forward = chain(forward, _kernel(_running(a, t, device), "running statistics"))
    if sums is not None and t.dgamma is not None:
        sums = chain(sums, _kernel(_gradients(a, t), "gradients of the parameters"))
    if data is not None and not a.local:
        # Between both backward kernels the program has summed `sums` over the ranks.
        data = chain(Kernel(lambda: np.divide(a.sums, t.count, out=a.means), "numpy:means"), data)
    return BatchNormKernels(kernels.statistics, forward, sums, data)


def _kernel(run: Callable[[], None], what: str) -> Kernel:
    return Kernel(run, f"numpy:{what}")


def mean_and_variance(a: BatchNormArrays, count: int, device: Device = HOST) -> Callable[[], None]:
    """Return a function that turns ``sums = [sum x, sum x^2]`` over `count` elements into `mean` and `var`."""
    mean, var, square = device.empty((3, a.sums.shape[1]), np.float64)

    def run() -> None:
        np.divide(a.sums[0], count, out=mean, dtype=np.float64)
        np.divide(a.sums[1], count, out=var, dtype=np.float64)
        np.copyto(a.mean, mean, casting="same_kind")
        np.multiply(mean, mean, out=square)
        np.subtract(var, square, out=var)
        np.maximum(var, 0, out=var)  # rounding may make the variance of equal elements negative
        np.copyto(a.var, var, casting="same_kind")

    return run


def _running(a: BatchNormArrays, t: BatchNormTraining, device: Device) -> Callable[[], None]:
    """Return a function that updates the running statistics with `mean` and the unbiased variance."""
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
    """Return a function that copies the sums to the gradients of the parameters."""

    def run() -> None:
        np.copyto(t.dbeta, a.sums[0], casting="same_kind")
        np.copyto(t.dgamma, a.sums[1], casting="same_kind")

    return run


def cancellation_limit(dtype: np.dtype) -> float:
    """Return the largest ``mean^2 / var`` for which ``sum x^2 / n - mean^2`` in float64 is accurate enough for `dtype`.

    The relative error of the difference is ``mean^2 / var`` times the machine epsilon of float64. The limit permits an
    error of one epsilon of float32; in float64, the loss of about four of sixteen digits.
    """
    return float(max(2.0**12, np.finfo(dtype).eps / np.finfo(np.float64).eps))


def cancels(mean: Any, var: Any, eps: float, limit: float, work: Any) -> bool:
    """Return whether ``mean^2 > limit * (var + eps)`` anywhere. `work` is two float64 arrays of that shape, modified.

    On a device the result is always True, because the host does not wait for the values. There only group norm in
    float64, the reference, calls this function. Norms in float32 and 16 bits do not, and have an inaccurate variance
    if ``mean^2 / var`` exceeds 5e8.
    """
    if not mean.size:  # the maximum of an empty array is an error
        return False
    if not on_host(mean):
        return True
    np.multiply(mean, mean, out=work[0])
    np.multiply(var, limit, out=work[1])
    work[0] -= work[1]
    return bool(work[0].max() > limit * eps)


def centered_squares(x: Any, mean: Any, out: Any, work: dict) -> None:
    """Compute ``out[c] = sum (x - mean)^2`` over all positions of x ``(positions, C)``, in float64. Local."""
    out.fill(0)
    column = buffer(work, "column", out.shape, np.float64)
    for part in chunks(x.shape[0], x.shape[1], work):
        d = buffer(work, "d", x[part].shape, np.float64)
        np.subtract(x[part], mean, out=d)
        np.multiply(d, d, out=d)
        out += np.sum(d, axis=0, out=column)


@dataclass(frozen=True)
class GroupNormArrays:
    """The arguments of :meth:`Norms.group_norm`; local, packed.

    Attributes
    ----------
    x, y, dy, dx
        ``(N, *spatial, C)``; `dy` and `dx` are None without a backward pass. Backward does not read `y`.
    gamma, beta, dgamma, dbeta
        ``(C,)``, of the dtype of `x` or float32; gradients may be None.
    mean, var
        ``(N, C)``, of the dtype of `x` or float32.
    sums, means
        float64 ``(N, 2, C)``: those of :class:`BatchNormArrays`, per sample.
    totals
        float64 ``(N, 2, G)``: sums over this process, to be reduced over the ranks that share samples; forward may
        replace the reduced sums by mean and variance of each group.
    count
        Number of elements in a group of one sample, over all ranks.
    """

    x: Any
    y: Any
    dy: Any
    dx: Any
    gamma: Any
    beta: Any
    dgamma: Any
    dbeta: Any
    mean: Any
    var: Any
    sums: Any
    means: Any
    totals: Any
    count: int
    eps: float
    activation: FusedActivation | None = None


class GroupNormKernels:
    """The parts of a group norm, from the batch-norm kernels of each sample and NumPy functions.

    A rank without elements has no kernels.
    """

    def __init__(self, arrays: GroupNormArrays, device: Device, kernels: Sequence[BatchNormKernels]) -> None:
        self.a, self._kernels, self._work = arrays, kernels, Workspace(device)
        self._samples, self._channels = arrays.mean.shape
        self._groups = arrays.totals.shape[-1]
        # Whether groups are single channels, and whether `totals` hold means and variances instead of sums.
        self._single, self._has_moments = self._groups == self._channels, False
        self._limit = cancellation_limit(arrays.mean.dtype)
        self._squares = device.empty((2, self._samples, self._groups), np.float64)
        self._gradient = device.empty((self._channels,), np.float64)
        self._grouped = (self._samples, 2, self._groups, self._channels // self._groups)
        # A rank outside of the layer's ranks holds no parameters, so its gradients have no elements.
        gradients = ((0, arrays.dbeta), (1, arrays.dgamma))
        self._grads = [(i, array) for i, array in gradients if array is not None and array.size]

    @reads("x")
    @writes("sums", "totals", work=("y",))
    def statistics(self) -> None:
        self._has_moments = False
        # Also without kernels: a rank without elements takes part in the sum over ranks.
        self.a.sums.fill(0)
        for kernel in self._kernels:
            kernel.statistics()
        self._group(self.a.sums)

    def _group(self, sums: Any) -> None:
        """Write the sums of the per-channel `sums` over each group to the totals."""
        np.sum(sums.reshape(self._grouped), axis=-1, out=self.a.totals)

    @reads("totals")
    @writes("totals")
    def cancels(self) -> bool:
        """Compute means and variances of groups. Return whether the variances are inaccurate; all ranks that share
        samples get the same result.

        A step may leave out this method, `centered` and `variance`.
        """
        mean, var = self._moments()
        return cancels(mean, var, self.a.eps, self._limit, self._squares)

    def _moments(self) -> tuple[Any, Any]:
        """Compute mean and variance of each group in place of the totals, and return both."""
        self._has_moments, totals = True, self.a.totals
        totals /= self.a.count
        mean, var = totals[:, 0], totals[:, 1]
        var -= np.multiply(mean, mean, out=self._squares[0])
        np.maximum(var, 0, out=var)
        return mean, var

    @reads("x", "totals")
    @writes("means", "sums", "totals")
    def centered(self) -> None:
        """Compute the totals again, with squares of the deviations from the known means."""
        n, _, groups, members = self._grouped
        x, mean = self.a.x, self.a.totals[:, 0]
        # `_group` overwrites the totals with the new sums, so the means are kept in other arrays.
        np.copyto(self.a.means[:, 0].reshape(n, groups, members), mean[:, :, None])
        np.copyto(self._squares[0], mean)
        self.a.sums.fill(0)
        # A rank without elements adds zeros.
        for block, center, sums in zip(x if x.size else (), self.a.means[:, 0], self.a.sums):
            centered_squares(block.reshape(-1, len(center)), center, sums[1], self._work)
        self._group(self.a.sums)

    @reads("totals")
    @writes("totals")
    def variance(self) -> None:
        np.divide(self.a.totals, self.a.count, out=self.a.totals)
        # `centered` has kept the means there.
        np.copyto(self.a.totals[:, 0], self._squares[0])

    @reads("x", "gamma", "beta", "totals")
    @writes("y", "mean", "var", "totals")
    @again("normalize_again")
    def normalize(self) -> None:
        if not self._has_moments:
            self._moments()
        self._spread_moments()
        self.normalize_again()

    @reads("x", "gamma", "beta", "mean", "var")
    @writes("y")
    def normalize_again(self) -> None:
        """Compute the output from the current mean and variance."""
        for kernel in self._kernels:
            kernel.forward()

    def _spread_moments(self) -> None:
        """Copy mean and variance of the groups to their channels."""
        n, _, groups, members = self._grouped
        for total, array in ((self.a.totals[:, 0], self.a.mean), (self.a.totals[:, 1], self.a.var)):
            np.copyto(array.reshape(n, groups, members), total[:, :, None], casting="same_kind")

    @reads("x", "dy", "gamma", "beta", "mean", "var")
    @writes("dx", "dgamma", "dbeta", "sums", "totals")
    def backward_sums(self) -> None:
        sums = self.a.sums
        sums.fill(0)
        for kernel in self._kernels:
            assert kernel.backward_sums is not None
            kernel.backward_sums()
        for i, array in self._grads:
            np.sum(sums[:, i], axis=0, out=self._gradient)
            np.copyto(array, self._gradient, casting="same_kind")
        if not self._single:
            # A group with several channels needs the sums of g = dy * gamma; gamma differs from channel to channel.
            sums *= self.a.gamma
        self._group(sums)

    @reads("x", "dy", "dx", "gamma", "beta", "mean", "var", "totals")
    @writes("dx", "means", "totals")
    def backward_data(self) -> None:
        np.divide(self.a.totals, self.a.count, out=self.a.totals)
        # The kernels of samples subtract means of single channels: all of the correction if groups are channels. With
        # larger groups they subtract 0, and `_subtract_means` does the rest.
        self.a.means.fill(0)
        if self._single:
            np.copyto(self.a.means, self.a.totals)
        for kernel in self._kernels:
            assert kernel.backward_data is not None
            kernel.backward_data()
        if not self._single:
            self._subtract_means()

    def _subtract_means(self) -> None:
        """Compute ``dx -= (A + xhat * B) / std``, in chunks."""
        a = self.a
        np.copyto(a.means.reshape(self._grouped), a.totals[..., None])
        for i in range(len(self._kernels)):
            channels = a.mean[i]
            names = ("std", "shift", "slope")
            std, shift, slope = (buffer(self._work, name, channels.shape, channels.dtype) for name in names)
            np.add(a.var[i], a.eps, out=std)
            np.sqrt(std, out=std)
            np.divide(a.means[i, 0], std, out=shift, casting="same_kind")
            # xhat / std = (x - mean) / std^2.
            np.multiply(std, std, out=std)
            np.divide(a.means[i, 1], std, out=slope, casting="same_kind")
            x, dx = (b[i].reshape(-1, len(channels)) for b in (a.x, a.dx))
            for part in chunks(x.shape[0], x.shape[1], self._work):
                d = buffer(self._work, "part", x[part].shape, channels.dtype)
                np.subtract(x[part], channels, out=d)
                d *= slope
                d += shift
                dx[part] -= d

    def close(self) -> None:
        """Close the kernels and free the work arrays."""
        for kernel in self._kernels:
            kernel.close()
        self._work.clear()
