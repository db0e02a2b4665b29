"""Interface of batch norm, group norm and channel norm."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any

from . import checks
from .base import Base
from .kernel import (
    BatchNormArrays,
    BatchNormKernels,
    FusedActivation,
    Kernel,
    KernelError,
    any_empty,
    batch_norm_without_elements,
    chain,
    filled,
)
from .norm_parts import GroupNormArrays, GroupNormKernels, differentiated, with_activation, with_training

__all__ = ["ChannelNormArrays", "Norms"]


@dataclass(frozen=True)
class ChannelNormArrays:
    """The arguments of :meth:`Norms.channel_norm`.

    Attributes
    ----------
    x, y, dy, dx
        Packed ``(..., C)``. Without `dy` there is no backward kernel. Without `dx` the backward kernel computes the
        gradients of the parameters only; with an activation that the backend does not fuse, it needs `dx`. Backward
        does not read `y`.
    gamma, beta, dgamma, dbeta
        ``(C,)``, of the dtype of `x` or float32, or None. Without `centered`, `beta` and `dbeta` are None.
    centered
        Whether the mean is subtracted. If not, `y` is ``f(gamma * x / sqrt(mean of x^2 + eps))``.
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
    activation: FusedActivation | None = None
    centered: bool = True


class Norms(Base):
    """Factories of batch, group and channel norm."""

    #: Whether the backend's kernels include `activation`, `residual` and `training`.
    fuses_norms: bool = False

    def batch_norm(self, arrays: BatchNormArrays) -> BatchNormKernels:
        """Build ``y = f(gamma * xhat + beta + residual?)``, ``xhat = (x - mean) / sqrt(var + eps)``, and its adjoint.

        A backward kernel is for the last ``forward()`` of the object that the same call returned.
        """
        a = arrays
        self._check_dtypes("batch_norm", x=a.x, y=a.y, dy=a.dy, dx=a.dx, residual=a.residual, dresidual=a.dresidual)
        if any_empty(a.x):
            # Running statistics follow from the sums of the other ranks.
            return with_training(a, batch_norm_without_elements(a), self.device)
        vectors = {"gamma": a.gamma, "beta": a.beta, "mean": a.mean, "var": a.var}
        vectors.update(a.training.vectors if a.training else {})
        checks.check_batch_norm(a.x, a.y, a.dy, a.dx, vectors, {"sums": a.sums, "means": a.means})
        checks.check_residual(a)
        if a.eps <= 0:
            raise KernelError(f"batch_norm: expected eps > 0, got {a.eps}; 1e-5 is usual")
        if self.fuses_norms:
            return self._batch_norm(a)
        return with_training(a, self._with_activation(replace(a, training=None)), self.device)

    def group_norm(self, arrays: GroupNormArrays) -> GroupNormKernels:
        """Build a group norm: local kernels before and after the sums over the ranks that share a sample."""
        a = arrays
        self._check_dtypes("group_norm", x=a.x, y=a.y, dy=a.dy, dx=a.dx)
        if any_empty(a.x):
            return GroupNormKernels(a, self.device, [])
        checks.check_packed("group_norm", x=a.x, y=a.y, dy=a.dy, dx=a.dx, mean=a.mean, sums=a.sums, totals=a.totals)
        checks.check_same_shape("group_norm", x=a.x, y=a.y, dy=a.dy, dx=a.dx)
        samples, channels, groups = a.x.shape[0], a.x.shape[-1], a.totals.shape[-1]
        shapes = {"gamma": (channels,), "beta": (channels,), "mean": (samples, channels), "var": (samples, channels)}
        shapes |= dict.fromkeys(("sums", "means"), (samples, 2, channels)) | {"totals": (samples, 2, groups)}
        for name, shape in shapes.items():
            sums_shape = tuple(getattr(a, name).shape)
            if sums_shape != shape:
                raise KernelError(
                    f"group_norm: expected {name} of shape {shape}, got {sums_shape}; each sample has its "
                    "own statistics"
                )
        return self._group_norm(arrays)

    def channel_norm(self, arrays: ChannelNormArrays) -> tuple[Kernel, Kernel | None]:
        """Build ``y = f(gamma * (x - mean) / sqrt(var + eps) + beta)`` and its adjoint.

        Mean and variance are over the channels of each position; see `centered` for the norm without mean.
        """
        a = arrays
        self._check_dtypes("channel_norm", x=a.x, y=a.y, dy=a.dy, dx=a.dx)
        for gamma, beta in ((a.gamma, a.beta), (a.dgamma, a.dbeta)):
            if a.centered and (gamma is None) != (beta is None):
                raise KernelError(
                    "channel_norm: expected gamma and beta (and their gradients) both or neither, got one"
                )
            if not a.centered and beta is not None:
                raise KernelError("channel_norm: expected no beta in a norm without mean, got one; leave it out")
        if any_empty(a.x):
            return filled(0), None if a.dy is None else filled(0, a.dgamma, a.dbeta)
        vectors = {name: getattr(a, name) for name in ("gamma", "beta", "dgamma", "dbeta")}
        checks.check_packed("channel_norm", x=a.x, y=a.y, dy=a.dy, dx=a.dx, **vectors)
        checks.check_same_shape("channel_norm", x=a.x, y=a.y, dy=a.dy, dx=a.dx)
        f = a.activation
        if f is None or self.fuses_norms:
            return self._channel_norm(a)
        if a.dy is not None and a.dx is None:
            raise KernelError("channel_norm: expected dx with an activation and dy, got none; pass a work array")
        # `differentiated` writes f' * dy to `dx`, from where the backward kernel reads it.
        forward, backward = self._channel_norm(replace(a, activation=None, dy=a.dx))
        forward = self.activated(forward, a.y, f)
        if a.dy is None or backward is None:
            return forward, None
        # Backward does not read `y`, whose memory may be reused: the input of f is recomputed in `dx`.
        input_of_f, _ = self._channel_norm(replace(a, activation=None, y=a.dx, dy=None, dx=None))
        return forward, chain(input_of_f, differentiated(f, a.dx, a.dy, self), backward)

    # ------------------------------------------------------------------ implemented by a backend
    def _with_activation(self, arrays: BatchNormArrays) -> BatchNormKernels:
        """Build a batch norm with residual and activation from the batch norm without them."""
        return with_activation(arrays, self._batch_norm, self)

    @abstractmethod
    def _batch_norm(self, arrays: BatchNormArrays) -> BatchNormKernels: ...

    def _group_norm(self, arrays: GroupNormArrays) -> GroupNormKernels:
        """Build a group norm from the batch-norm kernels of each sample."""
        a, samples = arrays, len(arrays.mean)
        kernels = []
        for n in range(samples):
            # One sample of a packed array is packed, as kernels require.
            x, y, dy, dx = (None if b is None else b[n : n + 1] for b in (a.x, a.y, a.dy, a.dx))
            numbers = (a.mean[n], a.var[n], a.sums[n], a.means[n])
            kernels.append(
                self.batch_norm(BatchNormArrays(x, y, dy, dx, a.gamma, a.beta, *numbers, a.eps, a.activation))
            )
        return GroupNormKernels(arrays, self.device, kernels)

    @abstractmethod
    def _channel_norm(self, arrays: ChannelNormArrays) -> tuple[Kernel, Kernel | None]: ...
