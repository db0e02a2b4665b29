"""Group, instance, layer and RMS normalization: statistics of single samples, over all ranks that share them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from ..dtensor import sample_groups
from ..kernels import ChannelNormArrays, GroupNormArrays
from ..kernels.access import Access, makes
from ..kernels.norm_parts import GroupNormKernels
from ..lowering.context import Context, Lowered
from .activation import activated, fused
from .batch_norm import affine_parameters, lower_affine
from .layer import Layer, Passes, Shape
from .lowering import Pair
from .parameter import Parameter

__all__ = ["GroupNorm", "InstanceNorm", "LayerNorm", "RMSNorm"]


class GroupNorm(Layer):
    """Group normalization (Wu and He 2018): over the space and a group of channels of each sample.

    ``y = gamma * (x - mean) / sqrt(var + eps) + beta`` with the mean and the biased variance of the sample and group.
    Training and evaluation compute the same.

    Parameters
    ----------
    groups
        Number of groups; divides the number of channels.
    eps
        Number added to the variance.
    affine
        Whether to scale by `gamma` and shift by `beta`, one each per channel.
    activation
        As in :class:`BatchNorm`.

    Notes
    -----
    Parameters `gamma` and `beta` ``(C,)``, whole on every rank. Communication per process, if other ranks share its
    samples: one sum of ``2 G`` float64 per sample forward and one backward, over these ranks only; one more forward if
    the variance would suffer from cancellation (:class:`BatchNorm`).
    """

    recomputation = "pointwise"
    passes = Passes((2, 1), (3, 2))
    exact_parameters = True
    inputs_taken = 1

    def __init__(
        self,
        groups: int,
        eps: float = 1e-5,
        affine: bool = True,
        activation: str | Layer | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        if groups < 1:
            raise ValueError(f"groups: expected a number >= 1, got {groups!r}")
        if not eps > 0:
            raise ValueError(f"eps: expected a number > 0, got {eps!r}")
        self.groups, self.eps, self.affine = groups, eps, affine
        self.activation = activated(self, activation, by_input=True)

    def group_count(self, channels: int) -> int:
        """Return the number of groups of an input. Raises ValueError unless it divides the number of channels."""
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

    def lower(self, context: Context) -> Lowered:
        return _lower(self, context, self.group_count(context.output.layout.shape[-1]))


class InstanceNorm(GroupNorm):
    """Instance normalization (Ulyanov et al. 2016): :class:`GroupNorm` with one group per channel."""

    def __init__(
        self, eps: float = 1e-5, affine: bool = True, activation: str | Layer | None = None, name: str | None = None
    ) -> None:
        # The number 1 is not used: `group_count` depends on the channels.
        super().__init__(1, eps, affine, activation, name)

    def group_count(self, channels: int) -> int:
        return channels


class LayerNorm(GroupNorm):
    """Layer normalization (Ba et al. 2016), scaled and shifted per channel.

    Parameters
    ----------
    axes
        ``"sample"``: over the space and channels of a sample, that is :class:`GroupNorm` with one group.
        ``"channels"``: over the channels of each position, without any communication.
    eps, affine, activation
        As in :class:`GroupNorm`.
    """

    def __init__(
        self,
        axes: str = "sample",
        eps: float = 1e-5,
        affine: bool = True,
        activation: str | Layer | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(1, eps, affine, activation, name)
        if axes not in ("sample", "channels"):
            raise ValueError(f"axes: expected 'sample' or 'channels', got {axes!r}")
        self.axes = axes

    def lower(self, context: Context) -> Lowered:
        if self.axes == "channels":
            return _lower_channel_norm(self, context, self.eps)
        return super().lower(context)


class RMSNorm(GroupNorm):
    """Normalization by the root of the mean square (Zhang and Sennrich 2019), over the channels of each position.

    ``y = gamma * x / sqrt(mean of x^2 + eps)``, without any communication.

    Parameters
    ----------
    eps
        Number added to the mean square. None: the machine epsilon of the dtype of the statistics, as in torch.
    affine
        Whether to scale by `gamma`, one per channel.
    activation
        As in :class:`BatchNorm`.
    """

    def __init__(
        self,
        eps: float | None = None,
        affine: bool = True,
        activation: str | Layer | None = None,
        name: str | None = None,
    ) -> None:
        # The number that None stands for is known with the dtype, when the layer is lowered.
        super().__init__(1, 1.0 if eps is None else eps, affine, activation, name)
        self.epsilon = eps

    def parameters(self, *shapes: Shape) -> Mapping[str, Parameter]:
        return {key: spec for key, spec in super().parameters(*shapes).items() if key == "gamma"}

    def flops(self, *shapes: Shape) -> int:
        return 4 * math.prod(shapes[0])

    def eps_of(self, dtype: Any) -> float:
        """Return the number added to the mean square in statistics of this dtype."""
        return float(np.finfo(dtype).eps) if self.epsilon is None else self.epsilon

    def lower(self, context: Context) -> Lowered:
        return _lower_channel_norm(self, context, self.eps_of(context.wide), centered=False)


def _lower(layer: GroupNorm, context: Context, groups: int) -> Lowered:
    """Lower to the backend's kernels around sums over groups of channels and over the ranks that share samples."""
    boxes, shape = context.output.layout.boxes, context.output.layout.shape
    samples, channels = context.box.shape[0], shape[-1]
    # Without a halo, this only copies an input that is not packed.
    x = context.gather(0, context.clipped(0))
    views = {name: context.keep((samples, channels), context.wide, "statistics") for name in ("mean", "var")}
    # Sums per channel are added up to totals per group, which the ranks then sum.
    forms = {"sums": (samples, 2, channels), "means": (samples, 2, channels), "totals": (samples, 2, groups)}
    views |= {name: context.keep(form, "float64", "statistics") for name, form in forms.items()}
    views |= {"x": x.view, "y": context.y, **lower_affine(context, channels)}
    # One group of ranks per part of the batch, in the order of the samples.
    # Two float64 per sample and group: 16 B.
    sizes = [16 * groups * int(n) for n in boxes.extents[0]]
    total = context.sum(sample_groups(boxes), views["totals"], "statistics", sizes)
    kernel = context.kernel(partial(_group_norm, layer, math.prod(shape[1:]) // groups), **views)
    x.start()
    x.finish()
    context.run(kernel, "statistics")
    # Sums and sums of squares of all ranks; if their difference cancels, a second sum of squares about the mean.
    both = context.add_up(total)
    if context.looks or context.dtype == np.float64:
        centered, variance = (context.operation(kernel, part) for part in ("centered", "variance"))
        context.run(kernel, "cancels", guarded=[centered, *both, variance])
    context.run(kernel, "normalize", timing=context.timing("forward"))

    def backward() -> None:
        # The kernels write this gradient even if no layer needs it.
        dx = context.gradient(0) if context.needs_gradient(0) else context.scratch(context.box.shape)
        kernel.add(dy=context.dy, dx=dx)
        kernel.add(**{f"d{key}": view for key, view in context.grads.items()})
        context.run(kernel, "backward_sums", timing=context.timing("backward_data"))
        context.add_up(total)
        context.run(kernel, "backward_data")

    return Lowered(backward)


@makes(GroupNormKernels)
def _group_norm(layer: GroupNorm, count: int, environment: Any, **arrays: Any) -> Any:
    fields = {name: arrays.get(name) for name in ("dy", "dx", "dgamma", "dbeta")} | arrays
    norm_arrays = GroupNormArrays(**fields, count=count, eps=layer.eps, activation=fused(layer))
    return environment.kernels.group_norm(norm_arrays)


def _lower_channel_norm(layer: GroupNorm, context: Context, eps: float, centered: bool = True) -> Lowered:
    """Lower to kernels with statistics over the channels of each position: no communication."""
    x = context.gather(0, context.clipped(0))
    views = {"x": x.view, "y": context.y, **context.params}
    kernel = context.kernel(partial(_channel_norm, layer, eps, centered), **views)
    x.start()
    x.finish()
    context.run(kernel, "forward", timing=context.timing("forward"))

    def backward() -> None:
        dx = context.gradient(0) if context.needs_gradient(0) else None
        # With an activation, the kernel uses dx as work space.
        if dx is None and layer.activation is not None:
            dx = context.scratch(context.box.shape)
        kernel.add(dy=context.dy, dx=dx)
        kernel.add(**{f"d{key}": view for key, view in context.grads.items()})
        context.run(kernel, "backward", timing=context.timing("backward_data"))

    return Lowered(backward)


@makes(
    forward=Access(("x", "gamma", "beta"), ("y",)),
    backward=Access(("x", "dy", "gamma", "beta"), ("dx", "dgamma", "dbeta")),
)
def _channel_norm(layer: GroupNorm, eps: float, centered: bool, environment: Any, **arrays: Any) -> Pair:
    names = ("x", "y", "dy", "dx", "gamma", "beta", "dgamma", "dbeta")
    # A rank that the layer does not use holds none of its parameters.
    fields = {name: arrays[name] if arrays.get(name) is not None and arrays[name].size else None for name in names[4:]}
    fields |= {name: arrays.get(name) for name in names[:4]}
    norm_arrays = ChannelNormArrays(**fields, eps=eps, activation=fused(layer), centered=centered)
    return Pair(*environment.kernels.channel_norm(norm_arrays))
