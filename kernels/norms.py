"""Norms of batches, groups and channels: the interface."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from halograd.kernels import checks
from halograd.kernels.base import Base
from halograd.kernels.kernel import (
    BatchNormArrays,
    BatchNormKernels,
    BatchNormTraining,
    Kernel,
    KernelError,
    batch_norm_of_nothing,
    filled,
    has_nothing,
)
from halograd.kernels.norm_parts import GroupNormArrays, GroupNormKernels, with_residual, with_training, without_parts

__all__ = ["ChannelNormArrays", "Norms"]


@dataclass(frozen=True)
class ChannelNormArrays:
    """The arguments of :meth:`Norms.channel_norm`.

    Attributes
    ----------
    x, y, dy, dx
        Packed ``(..., C)``; without `dy` there is no backward kernel, without `dx` only the gradients of the parameters
        are wanted.
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

    def batch_norm(
        self,
        x: Any,
        y: Any,
        dy: Any,
        dx: Any,
        gamma: Any,
        beta: Any,
        mean: Any,
        var: Any,
        sums: Any,
        means: Any,
        eps: float,
        relu: bool,
        local: bool,
        training: BatchNormTraining | None = None,
        residual: Any = None,
        dresidual: Any = None,
    ) -> BatchNormKernels:
        """``y = relu?(gamma * xhat + beta + residual?)``, ``xhat = (x - mean) / sqrt(var + eps)``, with its adjoint.

        Parameters
        ----------
        x, y, dy, dx
            ``(N, *spatial, C)``; `dy` and `dx` are None for a forward that is never differentiated.
        gamma, beta, mean, var
            ``(C,)``, of the dtype of `x` or float32; `var` is the biased variance.
        sums, means
            float64 ``(2, C)``: what this process adds up, and what all processes found.
        local
            False: ``statistics()`` writes ``sums = [sum x, sum x^2]`` (two passes over blocks, combined in
            float64, or no less accurately than the local statistics) and may use `y` as it likes; ``forward()``
            takes `mean` and `var` as they are, and with `dx` these are statistics of `x`; ``backward_sums()`` writes
            ``sums = [sum dy', sum dy' * xhat]`` with ``dy' = dy`` where ``y > 0`` (everywhere without relu), and may
            use `dx` as it likes; ``backward_data()``, to be called after it, writes
            ``dx = gamma / sqrt(var + eps) * (dy' - means[0] - xhat * means[1])``.
            True: ``forward()`` writes `mean` and `var` too, ``backward_sums()`` writes `dx` and `sums`, the
            other two do nothing.
        training
            What the kernels do besides: mean and variance from sums over all processes, running statistics, gradients
            of the parameters. Then ``backward_data()`` divides `sums` by ``training.count`` itself, and may use `means`
            as it likes.
        residual, dresidual
            Of the shape of `x`, or None. With a residual and relu ``backward_sums()`` writes ``dresidual = dy'``,
            which ``backward_data()`` reads; without relu the residual's gradient is `dy`, and `dresidual` None.

        A backward kernel belongs to the last ``forward()`` of the same call.
        """
        self._check_dtypes("batch_norm", x=x, y=y, dy=dy, dx=dx, residual=residual, dresidual=dresidual)
        arrays = BatchNormArrays(
            x, y, dy, dx, gamma, beta, mean, var, sums, means, eps, relu, local, training, residual, dresidual
        )
        if has_nothing(x):
            return with_training(arrays, batch_norm_of_nothing(arrays), self.device)
        vectors = {"gamma": gamma, "beta": beta, "mean": mean, "var": var, **(training.vectors if training else {})}
        checks.check_batch_norm(x, y, dy, dx, vectors, {"sums": sums, "means": means})
        checks.check_residual(arrays)
        if eps <= 0:
            raise KernelError(f"batch_norm: expected eps > 0, got {eps}; 1e-5 is usual")
        if self.fuses_batch_norm:
            return self._batch_norm(arrays)
        alone = self._batch_norm(without_parts(arrays))
        return with_training(arrays, with_residual(arrays, alone, self.add, self.activation), self.device)

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
            kernels.append(self.batch_norm(x, y, dy, dx, a.gamma, a.beta, *numbers, a.eps, a.relu, local=False))
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
