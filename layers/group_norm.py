"""Group, instance and layer normalisation: statistics of single samples, over all ranks that share them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from halograd.layers.batch_norm import affine_arrays, affine_parameters
from halograd.layers.binding import Binding
from halograd.layers.channel_norm import ChannelNormOperator
from halograd.layers.chunks import Work, buffer, chunks
from halograd.layers.fused_group_norm import FusedGroupNormOperator
from halograd.layers.layer import Layer, Shape
from halograd.layers.moments import cancellation_limit, cancels, centered_squares
from halograd.layers.operator import Operator
from halograd.layers.parameter import Parameter
from halograd.layers.sample_group import sample_groups, sum_over

__all__ = ["GroupNorm", "InstanceNorm", "LayerNorm"]


class GroupNorm(Layer):
    """Group normalisation (Wu and He 2018): over the space and a group of channels of each sample.

    ``y = gamma * (x - mean) / sqrt(var + eps) + beta`` with the mean and the biased variance of the sample and group.
    Evaluation computes the same as training.

    Parameters
    ----------
    groups
        Number of groups; divides the number of channels.
    eps
        Added to the variance.
    affine
        Whether to scale by `gamma` and shift by `beta`, one each per channel.
    activation
        None or ``"relu"``, fused into the kernel.

    Notes
    -----
    Parameters `gamma` and `beta` ``(C,)``, whole on every rank. Communication per process, if others share its
    samples: one sum of ``2 G`` float64 per sample forward and one backward, over those ranks only.
    """

    exact_parameters = True

    def __init__(
        self,
        groups: int,
        eps: float = 1e-5,
        affine: bool = True,
        activation: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        if groups < 1:
            raise ValueError(f"groups: expected a number >= 1, got {groups!r}")
        if not eps > 0:
            raise ValueError(f"eps: expected a number > 0, got {eps!r}")
        if activation not in (None, "relu"):
            raise ValueError(f"activation: expected None or 'relu', got {activation!r}; others are layers of their own")
        self.groups, self.eps, self.affine, self.activation = groups, eps, affine, activation

    def group_count(self, channels: int) -> int:
        """Number of groups of an input with so many channels."""
        if channels % self.groups:
            raise ValueError(f"{self.kind}: expected a number of groups that divides {channels}, got {self.groups}")
        return self.groups

    def output_shape(self, *shapes: Shape) -> Shape:
        self.group_count(shapes[0][-1])
        return shapes[0]

    def parameters(self, *shapes: Shape) -> Mapping[str, Parameter]:
        return affine_parameters(shapes[0][-1]) if self.affine else {}

    def flops(self, *shapes: Shape) -> int:
        return 7 * math.prod(shapes[0])

    def bind(self, binding: Binding) -> Operator:
        if binding.kernels.cuda is not None and binding.dtype != np.float64:  # which is for proofs
            groups = self.group_count(binding.output.layout.shape[-1])
            return FusedGroupNormOperator(binding, groups, self.eps, self.activation == "relu")
        return GroupNormOperator(binding, self)


class InstanceNorm(GroupNorm):
    """Instance normalisation (Ulyanov et al. 2016): :class:`GroupNorm` with one group per channel."""

    def __init__(
        self, eps: float = 1e-5, affine: bool = True, activation: str | None = None, name: str | None = None
    ) -> None:
        super().__init__(1, eps, affine, activation, name)

    def group_count(self, channels: int) -> int:
        return channels


class LayerNorm(GroupNorm):
    """Layer normalisation (Ba et al. 2016), scaled and shifted per channel.

    Parameters
    ----------
    axes
        ``"sample"``: over the space and channels of a sample, that is :class:`GroupNorm` with one group.
        ``"channels"``: over the channels of each position, without any communication.
    eps, affine, activation
        As for :class:`GroupNorm`.
    """

    def __init__(
        self,
        axes: str = "sample",
        eps: float = 1e-5,
        affine: bool = True,
        activation: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(1, eps, affine, activation, name)
        if axes not in ("sample", "channels"):
            raise ValueError(f"axes: expected 'sample' or 'channels', got {axes!r}")
        self.axes = axes

    def bind(self, binding: Binding) -> Operator:
        if self.axes == "channels":
            return ChannelNormOperator(binding, self.eps, self.activation == "relu")
        return super().bind(binding)


class GroupNormOperator(Operator):
    """The backend's batch-norm kernels, one sample each, around sums over groups and ranks.

    Gradient: with ``g = dy * gamma`` (masked by the activation), ``dx = (g - A - xhat * B) / std``, where A and B are
    the means of ``g`` and ``g * xhat`` over the group. The kernels compute ``gamma * (dy - A' - xhat * B') / std`` with
    one A' and B' per channel: all of it if groups are channels, else the first term.
    """

    def __init__(self, b: Binding, layer: GroupNorm) -> None:
        self.b, self.layer = b, layer
        self.x = b.gather(0, b.clipped(0))
        shape = b.output.layout.shape
        self.samples, channels = b.box.shape[0], shape[-1]
        groups = layer.group_count(channels)
        self.count = math.prod(shape[1:]) // groups
        self.single = groups == channels
        self.gamma, self.beta = affine_arrays(b, channels)
        float64 = np.dtype("float64")
        keep = b.memory.keep
        self.mean, self.var = (keep((self.samples, channels), b.wide, "statistics") for _ in range(2))
        self.sums, self.means = (keep((self.samples, 2, channels), float64, "statistics") for _ in range(2))
        self.totals = keep((self.samples, 2, groups), float64, "statistics")
        self.squares = keep((2, self.samples, groups), float64, "statistics")
        self.limit = cancellation_limit(b.wide)
        self._work = Work(b.kernels.device)
        self.gradient = keep((channels,), float64, "statistics")
        self._grouped = (self.samples, 2, groups, channels // groups)
        self.reduction = sum_over(b.comm, sample_groups(b.output.layout.boxes), self.totals, "statistics", b.name)
        self.kernels = self._kernels(None, None)

    def _kernels(self, dy: Any, dx: Any) -> list[Any]:
        """Batch-norm kernels, one per sample."""
        b = self.b
        made = []
        for n in range(self.samples):
            arrays = (None if a is None else a[n : n + 1] for a in (self.x.array, b.output.array, dy, dx))
            numbers = (self.mean[n], self.var[n], self.sums[n], self.means[n], self.layer.eps)
            relu = self.layer.activation == "relu"
            made.append(b.kernels.batch_norm(*arrays, self.gamma, self.beta, *numbers, relu, False))
        return made

    def bind_backward(self) -> None:
        b = self.b
        self.dx = b.gradient(0) if b.needs_gradient(0) else b.scratch(b.box.shape)
        for kernels in self.kernels:
            kernels.close()
        self.kernels = self._kernels(b.output.dy, self.dx)
        b.end_scratch()

    def forward(self) -> None:
        self.x.start()
        self.x.finish()
        for kernels in self.kernels:
            kernels.statistics()
        self._sum_up(self.sums)
        mean, var = self.totals[:, 0], self.totals[:, 1]
        var -= np.multiply(mean, mean, out=self.squares[0])
        np.maximum(var, 0, out=var)
        n, _, groups, members = self._grouped
        # All ranks of the group have the same sums, so all go the same way.
        if cancels(mean, var, self.layer.eps, self.limit, self.squares):
            self._sum_up_centered(mean)
        for total, array in ((mean, self.mean), (var, self.var)):
            np.copyto(array.reshape(n, groups, members), total[:, :, None], casting="same_kind")
        for kernels in self.kernels:
            kernels.forward()

    def _sum_up_centered(self, mean: Any) -> None:
        """The variances again, about the known means."""
        n, _, groups, members = self._grouped
        np.copyto(self.means[:, 0].reshape(n, groups, members), mean[:, :, None])
        np.copyto(self.squares[0], mean)
        self.sums.fill(0)
        for x, center, sums in zip(self.x.array, self.means[:, 0], self.sums):
            centered_squares(x.reshape(-1, len(center)), center, sums[1], self._work)
        self._sum_up(self.sums)
        np.copyto(mean, self.squares[0])

    def _sum_up(self, sums: Any) -> None:
        """Means over each group of what is summed per channel, over all ranks that share the samples."""
        np.sum(sums.reshape(self._grouped), axis=-1, out=self.totals)
        if self.reduction is not None:
            self.reduction.run()
        self.totals /= self.count

    def backward(self) -> None:
        b = self.b
        for kernels in self.kernels:
            kernels.backward_sums()
        if b.grads and b.grads["gamma"].size:  # a rank that the layer does without holds none
            for i, name in enumerate(("beta", "gamma")):
                np.sum(self.sums[:, i], axis=0, out=self.gradient)
                np.copyto(b.grads[name], self.gradient, casting="same_kind")
        if not self.single:
            self.sums *= self.gamma
        self._sum_up(self.sums)
        self.means.fill(0)
        if self.single:
            np.copyto(self.means, self.totals)
        for kernels in self.kernels:
            kernels.backward_data()
        if not self.single:
            self._subtract_means()

    def _subtract_means(self) -> None:
        """``dx -= (A + xhat * B) / std``, in chunks."""
        np.copyto(self.means.reshape(self._grouped), self.totals[..., None])
        for i in range(self.samples):
            channels = self.mean[i]
            inverse, shift, slope = (buffer(self._work, k, channels.shape, channels.dtype) for k in "isl")
            np.add(self.var[i], self.layer.eps, out=inverse)
            np.sqrt(inverse, out=inverse)
            np.divide(self.means[i, 0], inverse, out=shift, casting="same_kind")
            np.multiply(inverse, inverse, out=inverse)
            np.divide(self.means[i, 1], inverse, out=slope, casting="same_kind")
            x, dx = (a[i].reshape(-1, len(channels)) for a in (self.x.array, self.dx))
            for part in chunks(x.shape[0], x.shape[1], self._work):
                d = buffer(self._work, "part", x[part].shape, channels.dtype)
                np.subtract(x[part], channels, out=d)
                d *= slope
                d += shift
                dx[part] -= d

    def close(self) -> None:
        for kernels in self.kernels:
            kernels.close()
        self.x.close()
        if self.reduction is not None:
            self.reduction.close()
