"""Batch normalisation, with statistics of this block, of the ranks that share samples, or of all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from halograd.comm import Reduction
from halograd.kernels.kernel import BatchNormKernels, BatchNormTraining
from halograd.layers.binding import Binding
from halograd.layers.chunks import Work, on_host
from halograd.layers.groups import in_group
from halograd.layers.layer import Layer, Shape
from halograd.layers.moments import cancellation_limit, cancels, centered_squares
from halograd.layers.operator import Operator
from halograd.layers.parameter import Parameter
from halograd.layers.sample_group import sample_colors, shares

__all__ = ["STATISTICS", "BatchNorm"]

STATISTICS = ("global", "sample", "local")


class BatchNorm(Layer):
    """Batch normalisation (Ioffe and Szegedy 2015) over samples and space, per channel.

    ``y = gamma * (x - mean) / sqrt(var + eps) + beta``, with the mean and the biased variance of the batch in
    training and the running ones in evaluation. Works on ``(N, C)`` too. A second input, of the shape of the first, is
    added before the activation: the shortcut of a residual block (He et al. 2016, Figure 2), in the same kernels.

    Parameters
    ----------
    statistics
        Over which elements mean and variance of training are taken: ``"global"`` (the whole batch: the
        result is that of one process), ``"sample"`` (the ranks that share this rank's samples: the spatial
        aggregate of Dryden et al. 2019, Section III-B) or ``"local"`` (this rank's block). The strategy's
        option ``statistics`` overrides it.
    momentum
        Weight of the batch in the running statistics, ``running = (1 - momentum) * running + momentum * batch``
        (torch's convention).
    eps
        Added to the variance.
    affine
        Whether to scale by `gamma` and shift by `beta`.
    activation
        None or ``"relu"``, fused into the kernel.

    Notes
    -----
    Parameters `gamma`, `beta` and state `mean`, `var`, all ``(C,)``; a rank holds those of its channels. The
    running variance averages the unbiased variance, as torch does. Where statistics are not global, the running
    ones average those of the blocks, weighted by their number of elements; so they are the same on all ranks, and
    complete once `backward` (or the next `forward`) has run.

    Communication per process: with more than one rank in the group, one sum of ``2 C`` float64 forward (``sum x``,
    ``sum x^2``) and one backward (``sum dy``, ``sum dy * xhat``); evaluation none. If the group is not the whole
    communicator, one more sum of that size over all ranks for the running statistics, which nobody waits for
    before `backward`. Where ``E[x^2] - E[x]^2`` would cancel more than the dtype allows (``mean^2 / var`` above
    4096 in float64, above 5e8 in float32), one more sum forward, of squares about the mean.

    In training a batch must be full (`mode.valid`): a short one is refused.
    """

    cuts_channels = "channelwise"
    exact_parameters = True

    def __init__(
        self,
        statistics: str = "global",
        momentum: float = 0.1,
        eps: float = 1e-5,
        affine: bool = True,
        activation: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        if statistics not in STATISTICS:
            raise ValueError(f"statistics: expected one of {STATISTICS}, got {statistics!r}")
        if not 0 <= momentum <= 1:
            raise ValueError(f"momentum: expected a number from 0 to 1, got {momentum!r}")
        if not eps > 0:
            raise ValueError(f"eps: expected a number > 0, got {eps!r}")
        if activation not in (None, "relu"):
            raise ValueError(f"activation: expected None or 'relu', got {activation!r}; others are layers of their own")
        self.statistics, self.momentum, self.eps = statistics, momentum, eps
        self.affine, self.activation = affine, activation

    def output_shape(self, *shapes: Shape) -> Shape:
        if len(shapes) > 2 or len(set(shapes)) > 1:
            found = ", ".join(map(str, shapes))
            raise ValueError(f"BatchNorm: expected one input, or a second of the same shape to add, got {found}")
        return shapes[0]

    def parameters(self, *shapes: Shape) -> Mapping[str, Parameter]:
        return affine_parameters(shapes[0][-1]) if self.affine else {}

    def state(self, *shapes: Shape) -> Mapping[str, Parameter]:
        shape = (shapes[0][-1],)
        return {
            "mean": Parameter(shape, "zeros", decay=False, channel_axis=0),
            "var": Parameter(shape, "ones", decay=False, channel_axis=0),
        }

    def flops(self, *shapes: Shape) -> int:
        return (6 + len(shapes)) * math.prod(shapes[0])

    def bind(self, binding: Binding) -> Operator:
        return BatchNormOperator(binding)


class BatchNormOperator(Operator):
    """Batch norm on one rank: kernels around sums over the ranks that share statistics; with none, kernels alone.

    Where the host can look whether ``E[x^2] - E[x]^2`` cancels, and in float64, mean and variance are made here; else
    by the kernels.
    """

    def __init__(self, b: Binding) -> None:
        layer = b.layer
        assert isinstance(layer, BatchNorm)
        self.b = b
        self.layer = layer
        self.x = b.gather(0, b.clipped_boxes(0))
        self.residual = b.gather(1, b.clipped_boxes(1)) if len(b.inputs) > 1 else None
        channels = len(b.state["mean"])  # of this rank's block
        self.gamma, self.beta = affine_arrays(b, channels)
        self.mean, self.var = (b.memory.keep((channels,), b.wide, "statistics") for _ in range(2))
        self.sums, self.means, self.moments = (
            b.memory.keep((2, channels), np.dtype("float64"), "statistics") for _ in range(3)
        )
        statistics = b.options.get("statistics", layer.statistics)
        counts, colors = _elements(b), _channel_colors(b)
        grouped = _statistics_colors(b, statistics, colors)
        self.count = max(1, _elements_of(b.rank, grouped, counts))
        self.share = counts[b.rank] / max(1, _elements_of(b.rank, colors, counts))
        self.reduction = _sum(b, grouped, self.sums, "statistics", b.name)
        self.running = None
        if grouped != colors:
            self.running = _sum(b, colors, self.moments, "running statistics", f"{b.name} (running)")
        self.limit = cancellation_limit(b.wide)
        self.rows = self.x.array.reshape(counts[b.rank], channels)
        self._work = Work(b.kernels.device)
        self._pending = self._trained = False
        # Where there are no sums, the kernels need no help. In float64, which is for proofs, their variance would not
        # be accurate enough.
        self.fused = self.reduction is None and b.dtype != np.float64
        self.looks = not self.fused and (on_host(self.sums) or b.dtype == np.float64)
        self.relu = layer.activation == "relu"
        self.train = self._kernels(None, None)
        state = (b.state["mean"], b.state["var"])
        self.apply = self._make((None, None, None), state, None)

    def _make(self, gradients: Any, moments: tuple[Any, Any], training: BatchNormTraining | None) -> BatchNormKernels:
        """`gradients`: dy, dx and that of the residual."""
        b, (dy, dx, dresidual) = self.b, gradients
        second = None if self.residual is None else self.residual.array
        images = (self.x.array, b.output.array, dy, dx, second, dresidual)
        *arrays, second, dresidual = (block(a, len(self.mean)) for a in images)
        vectors = (self.gamma, self.beta, *moments, self.sums, self.means)
        local = training is not None and self.fused
        made: BatchNormKernels = b.kernels.batch_norm(
            *arrays, *vectors, self.layer.eps, self.relu, local, training, second, dresidual
        )
        return made

    def _kernels(self, dy: Any, dx: Any, dresidual: Any = None) -> BatchNormKernels:
        """Those of training; with `dy` and `dx` the backward ones too."""
        b, layer, given = self.b, self.layer, dict[str, Any]()
        if self.running is None:
            given.update(running_mean=b.state["mean"], running_var=b.state["var"])
        if layer.affine and dx is not None:
            given.update(dgamma=b.grads["gamma"], dbeta=b.grads["beta"])
        training = BatchNormTraining(self.count, not self.looks, layer.momentum, **given)
        return self._make((dy, dx, dresidual), (self.mean, self.var), training)

    def bind_backward(self) -> None:
        b = self.b
        dx = b.gradient(0) if b.needs_gradient(0) else b.scratch(b.box.shape)
        dresidual = None
        if self.residual is not None and self.relu:
            dresidual = b.gradient(1) if b.needs_gradient(1) else b.scratch(b.box.shape)
        elif self.residual is not None and b.needs_gradient(1):
            b.pass_gradient(1)
        # Forward and backward share a workspace, so they are made together.
        self.train.close()
        self.train = self._kernels(b.output.dy, dx, dresidual)
        b.end_scratch()

    def forward(self) -> None:
        self.x.start()
        if self.residual is not None:
            self.residual.start()
            self.residual.finish()
        self.x.finish()
        self._settle()
        self._trained = self.b.mode.training
        if self._trained:
            self._forward_training()
        else:
            self.apply.forward()

    def _forward_training(self) -> None:
        mode, batch = self.b.mode, self.b.output.layout.shape[0]
        if mode.valid < batch:
            raise ValueError(
                f"{self.b.name}: batch statistics need a full batch of {batch} samples, got {mode.valid}; drop the "
                "short last batch of an epoch, or choose a batch size that divides the number of samples"
            )
        if not self.fused:
            self.train.statistics()
            self._reduce()
            if self.looks:
                self._look()
        self.train.forward()
        if self.running is not None:
            self._average()

    def _look(self) -> None:
        """Mean and biased variance of the group, from the sums of its ranks; by a second sum where they cancel."""
        mean, var = np.divide(self.sums, self.count, out=self.moments)
        var -= np.multiply(mean, mean, out=self.sums[0])
        np.maximum(var, 0, out=var)
        # All ranks of the group have the same sums, so all go the same way.
        if cancels(mean, var, self.layer.eps, self.limit, self.sums):
            self.sums[0].fill(0)
            centered_squares(self.rows, mean, self.sums[1], self._work)
            self._reduce()
            np.divide(self.sums[1], self.count, out=var)
        np.copyto(self.mean, mean, casting="same_kind")
        np.copyto(self.var, var, casting="same_kind")

    def _reduce(self) -> None:
        if self.reduction is not None:
            self.reduction.run()

    def _average(self) -> None:
        """Begin to average this batch's moments over the groups, for the running statistics."""
        mean, var = self.moments
        np.copyto(mean, self.mean)
        np.copyto(var, self.var)
        var *= self.count / max(self.count - 1, 1)
        self.moments *= self.share
        self._pending = True
        assert self.running is not None
        self.running.start()

    def _settle(self) -> None:
        """The running statistics hold all batches so far when this returns."""
        if not self._pending:
            return
        self._pending = False
        assert self.running is not None
        self.running.finish()
        momentum = self.layer.momentum
        self.moments *= momentum
        for array, batch in zip((self.b.state["mean"], self.b.state["var"]), self.moments):
            array *= 1 - momentum
            np.add(array, batch, out=array, casting="same_kind")

    def backward(self) -> None:
        if not self._trained:
            raise RuntimeError(f"{self.b.name}: backward() needs a forward() in training mode before")
        self._settle()
        assert self.train.backward_sums is not None and self.train.backward_data is not None
        self.train.backward_sums()
        if not self.fused:
            self._reduce()
            self.train.backward_data()

    def close(self) -> None:
        for item in (self.apply, self.train, self.x, self.residual, self.reduction, self.running):
            if item is not None:
                item.close()


def _elements(b: Binding) -> list[int]:
    """Elements per channel of every rank's block."""
    return [box.size // box.shape[-1] if box.size else 0 for box in b.output.layout.boxes]


def _channel_colors(b: Binding) -> tuple[int | None, ...]:
    """Per rank the number of its block of channels; None for ranks that the layer does without."""
    used, channel = math.prod(b.parts.values()), b.parts["channel"]
    return tuple(rank % channel if rank < used else None for rank in range(b.comm.size))


def _statistics_colors(b: Binding, statistics: str, channels: Sequence[int | None]) -> tuple[int | None, ...]:
    """Color per rank: the elements of ranks of one color make the statistics. `channels`: what "global" means."""
    if statistics == "global":
        return tuple(channels)
    return sample_colors(b.output.layout.boxes) if statistics == "sample" else tuple(range(b.comm.size))


def _elements_of(rank: int, colors: Sequence[int | None], counts: Sequence[int]) -> int:
    """Elements per channel of all ranks with the color of this one."""
    return sum(n for n, color in zip(counts, colors) if color == colors[rank])


def _sum(b: Binding, colors: Sequence[int | None], buffer: Any, kind: str, name: str) -> Reduction | None:
    """The sum over the ranks of one color; None where every rank is alone, and on ranks with nothing."""
    if not shares(colors):
        return None
    return in_group(b.comm, colors, lambda group: group.reduction(buffer, kind=kind, name=name))


def block(array: Any, channels: int) -> Any:
    """The array of a block, with its channels even where it is empty; None stays None."""
    if array is None or array.size:
        return array
    return array.reshape(*[0] * (array.ndim - 1), channels)


def affine_parameters(channels: int) -> dict[str, Parameter]:
    """Scale and shift per channel, ones and zeros in the beginning, without weight decay."""
    shape = (channels,)
    return {
        "gamma": Parameter(shape, "ones", decay=False, channel_axis=0),
        "beta": Parameter(shape, decay=False, channel_axis=0),
    }


def affine_arrays(b: Binding, channels: int) -> tuple[Any, Any]:
    """The parameters `gamma` and `beta`, or arrays of ones and zeros in their stead, where there are none."""
    if "gamma" in b.params and len(b.params["gamma"]) == channels:
        return b.params["gamma"], b.params["beta"]
    gamma, beta = (b.memory.keep((channels,), b.wide, "statistics") for _ in range(2))
    gamma.fill(1)
    return gamma, beta
