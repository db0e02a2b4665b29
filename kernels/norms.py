"""Norms of batches, groups and channels: the interface."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from . import checks
from .base import Base
from .kernel import (
    BatchNormArrays,
    BatchNormKernels,
    Kernel,
    KernelError,
    batch_norm_of_nothing,
    filled,
    has_nothing,
)
from .norm_parts import GroupNormArrays, GroupNormKernels, with_residual, with_training, without_parts

__all__ = ["ChannelNormArrays", "Norms"]


@dataclass(frozen=True)
class ChannelNormArrays:
    """The arguments of :meth:`Norms.channel_norm`.

    Attributes
    ----------
    x, y, dy, dx
        Packed ``(..., C)``; without `dy` there is no backward kernel, without `dx` only the gradients of the parameters
        are wanted. Backward reads `y` only with relu.
    gamma, beta, dgamma, dbeta
        ``(C,)``, of the dtype of `x` or float32, or None.
    """

    x: Any
    y: Any
    dy: Any
    dx: Any
    gamma: Any
    beta: Any
    dgamma: Any
    dbeta: Any
    eps: float
    relu: bool


class Norms(Base):
    """Batch, group and channel norm."""

    #: Whether `_batch_norm` does itself what `training` and `residual` ask for.
    fuses_batch_norm: bool = False

    def batch_norm(self, arrays: BatchNormArrays) -> BatchNormKernels:
        """``y = relu?(gamma * xhat + beta + residual?)``, ``xhat = (x - mean) / sqrt(var + eps)``, with its adjoint.

        A backward kernel belongs to the last ``forward()`` of the same call.
        """
        a = arrays
        self._check_dtypes("batch_norm", x=a.x, y=a.y, dy=a.dy, dx=a.dx, residual=a.residual, dresidual=a.dresidual)
        if has_nothing(a.x):
            return with_training(a, batch_norm_of_nothing(a), self.device)
        vectors = {"gamma": a.gamma, "beta": a.beta, "mean": a.mean, "var": a.var}
        vectors.update(a.training.vectors if a.training else {})
        checks.check_batch_norm(a.x, a.y, a.dy, a.dx, vectors, {"sums": a.sums, "means": a.means})
        checks.check_residual(a)
        if a.eps <= 0:
            raise KernelError(f"batch_norm: expected eps > 0, got {a.eps}; 1e-5 is usual")
        if self.fuses_batch_norm:
            return self._batch_norm(a)
        alone = self._batch_norm(without_parts(a))
        return with_training(a, with_residual(a, alone, self.add, self.activation), self.device)

    def group_norm(self, arrays: GroupNormArrays) -> GroupNormKernels:
        """Norm over groups of channels of each sample, in parts around sums over the ranks that share the sample."""
        a = arrays
        self._check_dtypes("group_norm", x=a.x, y=a.y, dy=a.dy, dx=a.dx)
        if has_nothing(a.x):
            return GroupNormKernels(a, self.device, [])
        checks.check_packed("group_norm", x=a.x, y=a.y, dy=a.dy, dx=a.dx, mean=a.mean, sums=a.sums, totals=a.totals)
        checks.check_same_shape("group_norm", x=a.x, y=a.y, dy=a.dy, dx=a.dx)
        samples, channels, groups = a.x.shape[0], a.x.shape[-1], a.totals.shape[-1]
        shapes = {"gamma": (channels,), "beta": (channels,), "mean": (samples, channels), "var": (samples, channels)}
        shapes |= dict.fromkeys(("sums", "means"), (samples, 2, channels)) | {"totals": (samples, 2, groups)}
        for name, shape in shapes.items():
            found = tuple(getattr(a, name).shape)
            if found != shape:
                raise KernelError(
                    f"group_norm: expected {name} of shape {shape}, got {found}; statistics are of every sample"
                )
        return self._group_norm(arrays)

    def channel_norm(self, arrays: ChannelNormArrays) -> tuple[Kernel, Kernel | None]:
        """``y = relu?(gamma * (x - mean) / sqrt(var + eps) + beta)`` with mean and variance over the channels of each
        position, and its adjoint."""
        a = arrays
        self._check_dtypes("channel_norm", x=a.x, y=a.y, dy=a.dy, dx=a.dx)
        if (a.gamma is None) != (a.beta is None) or (a.dgamma is None) != (a.dbeta is None):
            raise KernelError("channel_norm: expected gamma and beta (and their gradients) both or neither, got one")
        if has_nothing(a.x):
            return filled(0), None if a.dy is None else filled(0, a.dgamma, a.dbeta)
        vectors = {name: getattr(a, name) for name in ("gamma", "beta", "dgamma", "dbeta")}
        checks.check_packed("channel_norm", x=a.x, y=a.y, dy=a.dy, dx=a.dx, **vectors)
        checks.check_same_shape("channel_norm", x=a.x, y=a.y, dy=a.dy, dx=a.dx)
        return self._channel_norm(arrays)

    # ------------------------------------------------------------------ what a backend implements
    @abstractmethod
    def _batch_norm(self, arrays: BatchNormArrays) -> BatchNormKernels: ...

    def _group_norm(self, arrays: GroupNormArrays) -> GroupNormKernels:
        """By the batch-norm kernels of each sample."""
        a, samples = arrays, len(arrays.mean)
        kernels = []
        for n in range(samples):
            x, y, dy, dx = (None if b is None else b[n : n + 1] for b in (a.x, a.y, a.dy, a.dx))
            numbers = (a.mean[n], a.var[n], a.sums[n], a.means[n])
            kernels.append(
                self.batch_norm(BatchNormArrays(x, y, dy, dx, a.gamma, a.beta, *numbers, a.eps, a.relu, local=False))
            )
        return GroupNormKernels(arrays, self.device, kernels)

    @abstractmethod
    def _channel_norm(self, arrays: ChannelNormArrays) -> tuple[Kernel, Kernel | None]: ...

    # ------------------------------------------------------------------ needed from the other parts
    @abstractmethod
    def add(self, xs: Any, y: Any, relu: bool = False) -> Kernel: ...

    @abstractmethod
    def activation(
        self, kind: str, x: Any, y: Any, dy: Any, dx: Any, alpha: float = 0.0
    ) -> tuple[Kernel, Kernel | None]: ...
