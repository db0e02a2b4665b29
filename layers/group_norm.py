"""Group, instance and layer normalisation: statistics of single samples, over all ranks that share them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from halograd.layers.batch_norm import affine_parameters, lower_affine
from halograd.layers.channel_norm import lower_channel_norm
from halograd.layers.chunks import Work, buffer, chunks
from halograd.layers.costs import Passes
from halograd.layers.fused_group_norm import lower_fused
from halograd.layers.layer import Layer, Shape
from halograd.layers.moments import cancellation_limit, cancels, centered_squares
from halograd.layers.parameter import Parameter
from halograd.layers.sample_group import sample_groups

if TYPE_CHECKING:
    from halograd.program.context import Context

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

    passes = Passes((2, 1), (3, 2))
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

    def lower(self, context: Context) -> Callable[[], None]:
        groups = self.group_count(context.output.layout.shape[-1])
        if context.fused and context.dtype != np.float64:  # which is for proofs
            return lower_fused(context, groups, self.eps, self.activation == "relu")
        return _lower(self, context, groups)


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

    def lower(self, context: Context) -> Callable[[], None]:
        if self.axes == "channels":
            return lower_channel_norm(context, self.eps, self.activation == "relu")
        return super().lower(context)


def _lower(layer: GroupNorm, context: Context, groups: int) -> Callable[[], None]:
    """The backend's batch-norm kernels, one sample each, around sums over groups and ranks."""
    boxes, shape = context.output.layout.boxes, context.output.layout.shape
    samples, channels = context.box.shape[0], shape[-1]
    x = context.gather(0, context.clipped(0))
    views = {name: context.keep((samples, channels), context.wide, "statistics") for name in ("mean", "var")}
    each = (samples, 2, channels)
    forms: dict[str, tuple[int, ...]] = {"sums": each, "means": each, "totals": (samples, 2, groups)}
    forms |= {"squares": (2, samples, groups), "gradient": (channels,)}
    views |= {name: context.keep(form, "float64", "statistics") for name, form in forms.items()}
    views |= {"x": x.view, "y": context.y, **lower_affine(context, channels)}
    sizes = [16 * groups * int(n) for n in boxes.extents[0]]
    total = context.sum(sample_groups(boxes), views["totals"], "statistics", sizes)
    kernel = context.kernel(partial(_GroupNormKernel, layer, math.prod(shape[1:]) // groups), **views)
    forward = tuple(views)
    x.start()
    x.finish()
    context.run(kernel, "statistics", uses=forward)
    both = context.add_up(total)
    centered, variance = (context.operation(kernel, part, uses=forward) for part in ("centered", "variance"))
    context.run(kernel, "cancels", uses=forward, guarded=[centered, *both, variance])
    context.run(kernel, "normalize", uses=forward, timing=context.timing("forward"))

    def backward() -> None:
        dx = context.gradient(0) if context.needs_gradient(0) else context.scratch(context.box.shape)
        kernel.add(dy=context.dy, dx=dx)
        kernel.add(**{f"d{key}": view for key, view in context.grads.items()})
        context.run(kernel, "backward_sums", timing=context.timing("backward_data"))
        context.add_up(total)
        context.run(kernel, "backward_data")

    return backward


class _GroupNormKernel:
    """Kernels of every sample around sums over groups.

    Gradient: with ``g = dy * gamma`` (masked by the activation), ``dx = (g - A - xhat * B) / std``, where A and B are
    the means of ``g`` and ``g * xhat`` over the group. The kernels compute ``gamma * (dy - A' - xhat * B') / std`` with
    one A' and B' per channel: all of it if groups are channels, else the first term.
    """

    def __init__(self, layer: GroupNorm, count: int, environment: Any, **arrays: Any) -> None:
        self.layer, self.count = layer, count
        self.x, self.gamma = arrays["x"], arrays["gamma"]
        self.dx: Any = arrays.get("dx")
        self.mean, self.var, self.sums, self.means = (arrays[n] for n in ("mean", "var", "sums", "means"))
        self.totals, self.squares, self.gradient = (arrays[n] for n in ("totals", "squares", "gradient"))
        self.grads = [(i, arrays[k]) for i, k in enumerate(("dbeta", "dgamma")) if k in arrays and arrays[k].size]
        samples, channels = self.mean.shape
        groups = self.totals.shape[-1]
        self.single = groups == channels
        self.limit = cancellation_limit(self.mean.dtype)
        self._work = Work(environment.kernels.device)
        self._grouped = (samples, 2, groups, channels // groups)
        self.kernels = []
        for n in range(samples if self.x.size else 0):
            some = (arrays.get(k) for k in ("x", "y", "dy", "dx"))
            blocks = (None if a is None else a[n : n + 1] for a in some)
            numbers = (self.mean[n], self.var[n], self.sums[n], self.means[n], layer.eps)
            both, relu = (arrays["gamma"], arrays["beta"]), layer.activation == "relu"
            self.kernels.append(environment.kernels.batch_norm(*blocks, *both, *numbers, relu, False))

    def statistics(self) -> None:
        self.sums.fill(0)
        for kernel in self.kernels:
            kernel.statistics()
        self._group(self.sums)

    def _group(self, sums: Any) -> None:
        """Sums over each group of what is summed per channel."""
        np.sum(sums.reshape(self._grouped), axis=-1, out=self.totals)

    def cancels(self) -> bool:
        """Means and variances; whether these are good for nothing. All ranks of the group go the same way."""
        self.totals /= self.count
        mean, var = self.totals[:, 0], self.totals[:, 1]
        var -= np.multiply(mean, mean, out=self.squares[0])
        np.maximum(var, 0, out=var)
        return cancels(mean, var, self.layer.eps, self.limit, self.squares)

    def centered(self) -> None:
        """The variances again, about the known means."""
        n, _, groups, members = self._grouped
        mean = self.totals[:, 0]
        np.copyto(self.means[:, 0].reshape(n, groups, members), mean[:, :, None])
        np.copyto(self.squares[0], mean)
        self.sums.fill(0)
        for x, center, sums in zip(self.x if self.x.size else (), self.means[:, 0], self.sums):
            centered_squares(x.reshape(-1, len(center)), center, sums[1], self._work)
        self._group(self.sums)

    def variance(self) -> None:
        self.totals /= self.count
        np.copyto(self.totals[:, 0], self.squares[0])

    def normalize(self) -> None:
        n, _, groups, members = self._grouped
        for total, array in ((self.totals[:, 0], self.mean), (self.totals[:, 1], self.var)):
            np.copyto(array.reshape(n, groups, members), total[:, :, None], casting="same_kind")
        for kernel in self.kernels:
            kernel.forward()

    def backward_sums(self) -> None:
        self.sums.fill(0)
        for kernel in self.kernels:
            kernel.backward_sums()
        for i, array in self.grads:  # a rank that the layer does without holds none
            np.sum(self.sums[:, i], axis=0, out=self.gradient)
            np.copyto(array, self.gradient, casting="same_kind")
        if not self.single:
            self.sums *= self.gamma
        self._group(self.sums)

    def backward_data(self) -> None:
        self.totals /= self.count
        self.means.fill(0)
        if self.single:
            np.copyto(self.means, self.totals)
        for kernel in self.kernels:
            kernel.backward_data()
        if not self.single:
            self._subtract_means()

    def _subtract_means(self) -> None:
        """``dx -= (A + xhat * B) / std``, in chunks."""
        np.copyto(self.means.reshape(self._grouped), self.totals[..., None])
        for i in range(len(self.kernels)):
            channels = self.mean[i]
            inverse, shift, slope = (buffer(self._work, k, channels.shape, channels.dtype) for k in "isl")
            np.add(self.var[i], self.layer.eps, out=inverse)
            np.sqrt(inverse, out=inverse)
            np.divide(self.means[i, 0], inverse, out=shift, casting="same_kind")
            np.multiply(inverse, inverse, out=inverse)
            np.divide(self.means[i, 1], inverse, out=slope, casting="same_kind")
            x, dx = (a[i].reshape(-1, len(channels)) for a in (self.x, self.dx))
            for part in chunks(x.shape[0], x.shape[1], self._work):
                d = buffer(self._work, "part", x[part].shape, channels.dtype)
                np.subtract(x[part], channels, out=d)
                d *= slope
                d += shift
                dx[part] -= d

    def close(self) -> None:
        """Free the backend's kernels."""
        for kernel in self.kernels:
            kernel.close()
        self._work.clear()
