"""Batch normalisation, with statistics of this block, of the ranks that share samples, or of all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from halograd.dtensor import Blocks, Groups
from halograd.layers.binding import Binding
from halograd.layers.chunks import Work
from halograd.layers.layer import Layer, Shape
from halograd.layers.moments import cancellation_limit, cancels, centered_squares
from halograd.layers.operator import Operator
from halograd.layers.parameter import Parameter
from halograd.layers.sample_group import sample_groups, sum_over

__all__ = ["STATISTICS", "BatchNorm"]

STATISTICS = ("global", "sample", "local")


class BatchNorm(Layer):
    """Batch normalisation (Ioffe and Szegedy 2015) over samples and space, per channel.

    ``y = gamma * (x - mean) / sqrt(var + eps) + beta``, with the mean and the biased variance of the batch in
    training and the running ones in evaluation. Works on ``(N, C)`` too.

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
    ones average those of the blocks, weighted by their number of elements; so they are the same on all ranks. They
    are complete once `backward` (or the next `forward`) has run.

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

    def parameters(self, *shapes: Shape) -> Mapping[str, Parameter]:
        return affine_parameters(shapes[0][-1]) if self.affine else {}

    def state(self, *shapes: Shape) -> Mapping[str, Parameter]:
        shape = (shapes[0][-1],)
        return {
            "mean": Parameter(shape, "zeros", decay=False, channel_axis=0),
            "var": Parameter(shape, "ones", decay=False, channel_axis=0),
        }

    def flops(self, *shapes: Shape) -> int:
        return 7 * math.prod(shapes[0])

    def bind(self, binding: Binding) -> Operator:
        return BatchNormOperator(binding)


class BatchNormOperator(Operator):
    """Batch norm on one rank: the fused kernel where the statistics are its own, else kernels around sums."""

    def __init__(self, b: Binding) -> None:
        layer = b.layer
        assert isinstance(layer, BatchNorm)
        self.b = b
        self.layer = layer
        self.x = b.gather(0, b.clipped(0))
        channels = len(b.state["mean"])  # of this rank's block
        self.gamma, self.beta = affine_arrays(b, channels)
        self.mean, self.var = (b.memory.keep((channels,), b.wide, "statistics") for _ in range(2))
        self.sums, self.means, self.moments = (
            b.memory.keep((2, channels), np.dtype("float64"), "statistics") for _ in range(3)
        )
        statistics = b.options.get("statistics", layer.statistics)
        own, everyone = math.prod(b.box.shape[:-1]), math.prod(b.output.layout.shape[:-1])
        whole = statistics_groups("global", b.output.layout.boxes)
        groups = statistics_groups(statistics, b.output.layout.boxes)
        self.count = max(1, {"global": everyone, "sample": _of_samples(b), "local": own}[statistics])
        self.share = own / max(1, everyone)
        self.reduction = sum_over(b.comm, groups, self.sums, "statistics", b.name)
        self.running = None
        if groups != whole:
            self.running = sum_over(b.comm, whole, self.moments, "running statistics", f"{b.name} (running)")
        self.limit = cancellation_limit(b.wide)
        self.rows = self.x.array.reshape(own if b.box.size else 0, channels)
        self._work = Work(b.kernels.device)
        self._pending = self._trained = False
        # With running statistics, and around the sums; where there are no sums, training has a kernel of its own.
        # In float64, which is for proofs, that one's variance would not be accurate enough.
        self.fused = self.reduction is None and b.dtype != np.float64
        self.apply = self._kernels(None, None, local=False)
        self.train = self._kernels(None, None, local=True) if self.fused else self.apply

    def _kernels(self, dy: Any, dx: Any, local: bool) -> Any:
        b = self.b
        arrays = (*(block(a, len(self.mean)) for a in (self.x.array, b.output.array, dy, dx)), self.gamma, self.beta)
        numbers = (self.mean, self.var, self.sums, self.means)
        return b.kernels.batch_norm(*arrays, *numbers, self.layer.eps, self.layer.activation == "relu", local)

    def bind_backward(self) -> None:
        b = self.b
        dx = b.gradient(0) if b.needs_gradient(0) else b.scratch(b.box.shape)
        if self.train is not self.apply:
            self.train.close()
        # Forward and backward share a workspace, so they are made together.
        self.train = self._kernels(b.output.dy, dx, local=self.fused)
        b.end_scratch()

    def forward(self) -> None:
        self.x.start()
        self.x.finish()
        self._settle()
        self._trained = self.b.mode.training
        if self._trained:
            self._forward_training()
        else:
            np.copyto(self.mean, self.b.state["mean"])
            np.copyto(self.var, self.b.state["var"])
            self.apply.forward()

    def _forward_training(self) -> None:
        mode, batch = self.b.mode, self.b.output.layout.shape[0]
        if mode.valid < batch:
            raise ValueError(
                f"{self.b.name}: batch statistics need a full batch of {batch} samples, got {mode.valid}; drop the "
                "short last batch of an epoch, or choose a batch size that divides the number of samples"
            )
        mean, var = self.moments
        if self.fused:
            self.train.forward()
            np.copyto(mean, self.mean)
            np.copyto(var, self.var)
        else:
            self._sum_up()
            np.copyto(self.mean, mean, casting="same_kind")
            np.copyto(self.var, var, casting="same_kind")
            self.train.forward()
        var *= self.count / max(self.count - 1, 1)
        self._average()

    def _sum_up(self) -> None:
        """Mean and biased variance of the group, from the sums of its ranks."""
        mean, var = self.moments
        self.train.statistics()
        self._reduce()
        np.divide(self.sums, self.count, out=self.moments)
        var -= np.multiply(mean, mean, out=self.sums[0])
        np.maximum(var, 0, out=var)
        # All ranks of the group have the same sums, so all go the same way.
        if cancels(mean, var, self.layer.eps, self.limit, self.sums):
            self.sums[0].fill(0)
            centered_squares(self.rows, mean, self.sums[1], self._work)
            self._reduce()
            np.divide(self.sums[1], self.count, out=var)

    def _reduce(self) -> None:
        if self.reduction is not None:
            self.reduction.run()

    def _average(self) -> None:
        """Begin to take this batch's moments into the running statistics."""
        self._pending = True
        if self.running is None:
            self._settle()
            return
        self.moments *= self.share
        self.running.start()

    def _settle(self) -> None:
        """The running statistics hold all batches so far when this returns."""
        if not self._pending:
            return
        self._pending = False
        if self.running is not None:
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
        self.train.backward_sums()
        if self.layer.affine:
            np.copyto(self.b.grads["beta"], self.sums[0], casting="same_kind")
            np.copyto(self.b.grads["gamma"], self.sums[1], casting="same_kind")
        if not self.fused:
            self._reduce()
            np.divide(self.sums, self.count, out=self.means)
            self.train.backward_data()

    def close(self) -> None:
        for item in (self.apply, self.train, self.x, self.reduction, self.running):
            if item is not None:
                item.close()


def statistics_groups(statistics: str, boxes: Blocks) -> Groups:
    """The ranks whose elements make the statistics of a channel together. Pure arithmetic."""
    if statistics == "sample":
        return sample_groups(boxes)
    last = len(boxes.grid) - 1
    return Groups.agreeing(boxes.grid, (last,) if statistics == "global" else range(last + 1), boxes.size)


def _of_samples(b: Binding) -> int:
    """Elements per channel of the samples of this rank."""
    return b.box.shape[0] * math.prod(b.output.layout.shape[1:-1])


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
