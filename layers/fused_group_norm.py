"""Group, instance and layer normalisation by kernels that take all samples at once, on a device."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from halograd.layers.batch_norm import affine_arrays
from halograd.layers.binding import Binding
from halograd.layers.operator import Operator
from halograd.layers.sample_group import sample_groups, sum_over

__all__ = ["FusedGroupNormOperator"]


class FusedGroupNormOperator(Operator):
    """The backend's norms of samples around sums over the ranks that share them. ::

        forward    sums of x, x^2 -> totals of groups -> all-reduce -> mean, var -> y
        backward   sums of dy, dy * xhat -> gradients of gamma, beta
                   totals of groups, with gamma -> all-reduce -> means -> dx

    Every arrow is one launch or two, whatever the number of samples, and the host waits for none of them.

    Variances come of sums in float64 without looking whether they cancel: for float32 and 16 bits, where that costs
    digits if ``mean^2 / var`` exceeds 5e8.

    Parameters
    ----------
    b
        Of a backend with `cuda`; not in float64.
    groups
        Number of groups of channels.
    eps, relu
        As in the layer.
    """

    def __init__(self, b: Binding, groups: int, eps: float, relu: bool) -> None:
        self.b, self.eps, self.relu = b, eps, relu
        self.x = b.gather(0, b.clipped(0))
        shape = b.output.layout.shape
        samples, channels = b.box.shape[0], shape[-1]
        self.samples = samples
        self.scale = groups / math.prod(shape[1:])
        self.gamma, self.beta = affine_arrays(b, channels)
        keep, float64 = b.memory.keep, np.dtype("float64")
        self.mean, self.var = (keep((samples, channels), b.wide, "statistics") for _ in range(2))
        self.sums, self.means = (keep((samples, 2, channels), float64, "statistics") for _ in range(2))
        self.totals = keep((samples, 2, groups), float64, "statistics")
        self.reduction = sum_over(b.comm, sample_groups(b.output.layout.boxes), self.totals, "statistics", b.name)
        self.norm: Any = None
        self.before: list[Any] = []
        self.between: list[Any] = []
        if samples:
            cuda = b.kernels.cuda
            self.norm = self._norm(None, None)
            self.before.append(cuda.group_totals(self.sums, self.totals, None, self.scale))
            self.between.append(cuda.group_moments(self.totals, self.mean, self.var))
        self.gradient: list[Any] = []
        self.spread: Any = None

    def _norm(self, dy: Any, dx: Any) -> Any:
        arrays = (self.x.array, self.b.output.array, dy, dx, self.gamma, self.beta)
        numbers = (self.mean, self.var, self.sums, self.means, self.eps, self.relu)
        return self.b.kernels.cuda.sample_norm(*arrays, *numbers, premultiplied=True)

    def forward(self) -> None:
        self.x.start()
        self.x.finish()
        if self.norm is not None:
            self.norm.statistics()
            self.before[0]()
        self._reduce()
        if self.norm is not None:
            self.between[0]()
            self.norm.forward()

    def bind_backward(self) -> None:
        b = self.b
        dx = b.gradient(0) if b.needs_gradient(0) else b.scratch(b.box.shape)
        if self.norm is not None:
            cuda = b.kernels.cuda
            self.norm.close()
            self.norm = self._norm(b.output.dy, dx)
            if b.grads:
                self.gradient.append(cuda.sum_samples(self.sums, b.grads["beta"], b.grads["gamma"]))
            self.before.append(cuda.group_totals(self.sums, self.totals, self.gamma, self.scale))
            self.spread = cuda.group_spread(self.totals, self.means)
        b.end_scratch()

    def backward(self) -> None:
        if self.norm is None:
            for array in self.b.grads.values():
                array.fill(0)
            self._reduce()
            return
        self.norm.backward_sums()
        for kernel in self.gradient:
            kernel()
        self.before[1]()
        self._reduce()
        self.spread()
        self.norm.backward_data()

    def _reduce(self) -> None:
        """The totals of all ranks that share samples with this one."""
        if self.reduction is not None:
            self.reduction.run()

    def close(self) -> None:
        for item in (self.norm, *self.before, *self.between, *self.gradient, self.spread, self.x, self.reduction):
            if item is not None:
                item.close()
