"""Group, instance and layer norm: kernels of single samples around sums over groups of channels, and over ranks. ::

    statistics     sums of x, x^2 per channel -> totals of groups -> summed over ranks
    cancels        means and variances; whether E[x^2] - E[x]^2 has lost its digits. If so:
        centered   squares about the mean -> totals -> summed over ranks
        variance
    normalize      mean, var -> y
    backward_sums  sums of dy, dy * xhat -> gradients of gamma, beta; totals of groups, with gamma -> over ranks
    backward_data  means -> dx

Gradient: with ``g = dy * gamma`` (masked by the ReLU), ``dx = (g - A - xhat * B) / std``, where A and B are the means
of ``g`` and ``g * xhat`` over the group. The kernels of a sample compute ``gamma * (dy - A' - xhat * B') / std`` with
one A' and B' per channel: all of it if groups are channels, else the first term.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from halograd.device import Device
from halograd.kernels.chunks import Work, buffer, chunks
from halograd.kernels.kernel import BatchNormKernels
from halograd.kernels.norm_parts import cancellation_limit, cancels, centered_squares

__all__ = ["GroupNormArrays", "GroupNormKernels"]


@dataclass(frozen=True)
class GroupNormArrays:
    """The arguments of :meth:`Norms.group_norm`; local, packed.

    Attributes
    ----------
    x, y, dy, dx
        ``(N, *spatial, C)``; `dy` and `dx` None for a forward that is never differentiated.
    gamma, beta, dgamma, dbeta
        ``(C,)``, of the dtype of `x` or float32; gradients may be None.
    mean, var
        ``(N, C)``, of the dtype of `x` or float32.
    sums, means
        float64 ``(N, 2, C)``, for the kernels.
    totals
        float64 ``(N, 2, G)``: what this process adds up, to be summed over the ranks that share samples.
    count
        Elements of a group of one sample, on all ranks.
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
    relu: bool


class GroupNormKernels:
    """The parts, by the batch-norm kernels of every sample (of a rank without elements: none) and NumPy's functions."""

    def __init__(self, arrays: GroupNormArrays, device: Device, kernels: Sequence[BatchNormKernels]) -> None:
        self.a, self._kernels, self._work = arrays, kernels, Work(device)
        self._samples, self._channels = arrays.mean.shape
        self._groups = arrays.totals.shape[-1]
        self._single, self._settled = self._groups == self._channels, False
        self._limit = cancellation_limit(arrays.mean.dtype)
        self._squares = device.empty((2, self._samples, self._groups), np.float64)
        self._gradient = device.empty((self._channels,), np.float64)
        self._grouped = (self._samples, 2, self._groups, self._channels // self._groups)
        # A rank that the layer does without holds none of the parameters.
        given = ((0, arrays.dbeta), (1, arrays.dgamma))
        self._grads = [(i, array) for i, array in given if array is not None and array.size]

    def statistics(self) -> None:
        self._settled = False
        self.a.sums.fill(0)
        for kernel in self._kernels:
            kernel.statistics()
        self._group(self.a.sums)

    def _group(self, sums: Any) -> None:
        """Sums over each group of what is summed per channel."""
        np.sum(sums.reshape(self._grouped), axis=-1, out=self.a.totals)

    def cancels(self) -> bool:
        """Means and variances; whether these are good for nothing. All ranks of the group go the same way. A step may
        leave it out, with the two parts that follow from it."""
        mean, var = self._moments()
        return cancels(mean, var, self.a.eps, self._limit, self._squares)

    def _moments(self) -> tuple[Any, Any]:
        """Mean and variance of each group, in place of the totals."""
        self._settled, totals = True, self.a.totals
        totals /= self.a.count
        mean, var = totals[:, 0], totals[:, 1]
        var -= np.multiply(mean, mean, out=self._squares[0])
        np.maximum(var, 0, out=var)
        return mean, var

    def centered(self) -> None:
        """The squares again, about the known means."""
        n, _, groups, members = self._grouped
        x, mean = self.a.x, self.a.totals[:, 0]
        np.copyto(self.a.means[:, 0].reshape(n, groups, members), mean[:, :, None])
        np.copyto(self._squares[0], mean)
        self.a.sums.fill(0)
        for block, center, sums in zip(x if x.size else (), self.a.means[:, 0], self.a.sums):
            centered_squares(block.reshape(-1, len(center)), center, sums[1], self._work)
        self._group(self.a.sums)

    def variance(self) -> None:
        np.divide(self.a.totals, self.a.count, out=self.a.totals)
        np.copyto(self.a.totals[:, 0], self._squares[0])

    def normalize(self) -> None:
        if not self._settled:
            self._moments()
        self._spread_moments()
        for kernel in self._kernels:
            kernel.forward()

    def _spread_moments(self) -> None:
        """Mean and variance per channel, from those of the groups."""
        n, _, groups, members = self._grouped
        for total, array in ((self.a.totals[:, 0], self.a.mean), (self.a.totals[:, 1], self.a.var)):
            np.copyto(array.reshape(n, groups, members), total[:, :, None], casting="same_kind")

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
            sums *= self.a.gamma
        self._group(sums)

    def backward_data(self) -> None:
        np.divide(self.a.totals, self.a.count, out=self.a.totals)
        self.a.means.fill(0)
        if self._single:
            np.copyto(self.a.means, self.a.totals)
        for kernel in self._kernels:
            assert kernel.backward_data is not None
            kernel.backward_data()
        if not self._single:
            self._subtract_means()

    def _subtract_means(self) -> None:
        """``dx -= (A + xhat * B) / std``, in chunks."""
        a = self.a
        np.copyto(a.means.reshape(self._grouped), a.totals[..., None])
        for i in range(len(self._kernels)):
            channels = a.mean[i]
            inverse, shift, slope = (buffer(self._work, k, channels.shape, channels.dtype) for k in "isl")
            np.add(a.var[i], a.eps, out=inverse)
            np.sqrt(inverse, out=inverse)
            np.divide(a.means[i, 0], inverse, out=shift, casting="same_kind")
            np.multiply(inverse, inverse, out=inverse)
            np.divide(a.means[i, 1], inverse, out=slope, casting="same_kind")
            x, dx = (b[i].reshape(-1, len(channels)) for b in (a.x, a.dx))
            for part in chunks(x.shape[0], x.shape[1], self._work):
                d = buffer(self._work, "part", x[part].shape, channels.dtype)
                np.subtract(x[part], channels, out=d)
                d *= slope
                d += shift
                dx[part] -= d

    def close(self) -> None:
        """Free the kernels."""
        for kernel in self._kernels:
            kernel.close()
        self._work.clear()
