"""Losses: a scalar, and the gradient of the prediction with it. The interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .base import Base
from .kernel import Kernel, KernelError, chain

__all__ = ["ClassTargets", "LossArrays", "LossKernel", "Losses"]


_INTEGERS = tuple(f"{sign}int{bits}" for bits in (8, 16, 32, 64) for sign in ("", "u"))
#: Dtypes of targets.
TARGETS = ("float32", "float64", "float16", "bfloat16", "bool", *_INTEGERS)


class LossKernel(Kernel, ABC):
    """A kernel that writes a loss of which not all samples may count; all of them do until :meth:`set` is called."""

    @abstractmethod
    def set(self, samples: int, scale: float) -> None:
        """`samples` leading samples count, the others get a gradient of 0; the sum is multiplied by `scale`."""


class _LossOfNothing(LossKernel):
    """The loss of a rank without elements: 0."""

    def set(self, samples: int, scale: float) -> None:
        return


class _Packed(LossKernel):
    """A loss of packed copies of what is not packed."""

    def __init__(self, copy: Kernel, loss: LossKernel, nbytes: int) -> None:
        self._loss, whole = loss, chain(copy, loss)
        super().__init__(whole, loss.impl, nbytes + whole.workspace_bytes, whole.close)

    def set(self, samples: int, scale: float) -> None:
        self._loss.set(samples, scale)


@dataclass(frozen=True)
class LossArrays:
    """What a loss reads and writes; local.

    Attributes
    ----------
    x, target
        Prediction and target, of equally many samples and positions. The target may have another dtype.
    dx
        Gradient of the prediction, packed, or None.
    loss
        float64 ``(1,)``: the sum over what counts, times the scale.
    factor
        float64 ``(1,)`` or None: multiplied into `dx` only (a loss scale).
    divisor
        float64 ``(1,)`` or None: loss and `dx` are divided by it, where it is above 0; else they are 0.
    weights
        Of the loss per position, ``(N, *spatial, 1)``, or, of losses that compare element by element, of the shape of
        `x`; numbers >= 0 of any dtype, or None. Where one is 0, loss and `dx` are, whatever `x` and target hold there.
    """

    x: Any
    target: Any
    dx: Any
    loss: Any
    factor: Any = None
    divisor: Any = None
    weights: Any = None


@dataclass(frozen=True)
class ClassTargets:
    """How class indices are read: one weight per class (None: 1 each), and an index without loss and weight."""

    classes: int
    weights: tuple[float, ...] | None = None
    ignored: int | None = None


class Losses(Base):
    """Losses that are sums over positions. A target that is no class is refused when the kernel runs; on a device,
    where the host does not look, the loss becomes NaN instead."""

    def softmax_cross_entropy(
        self, arrays: LossArrays, targets: ClassTargets, label_smoothing: float = 0.0
    ) -> LossKernel:
        """Sum over positions of the cross-entropy, see :class:`halograd.layers.SoftmaxCrossEntropy`; x
        ``(N, *spatial, K)``, target ``(N, *spatial, 1)``."""
        self._check("softmax_cross_entropy", arrays, (*arrays.x.shape[:-1], 1))
        self._check_weights("softmax_cross_entropy", arrays, elementwise=False)
        return self._of_packed(arrays, lambda a: self._softmax_cross_entropy(a, targets, label_smoothing))

    def target_weight(self, target: Any, total: Any, targets: ClassTargets, weights: Any = None) -> LossKernel:
        """``total`` float64 ``(1,)`` = the sum of the weights of all targets of the samples that count; of each class
        times `weights` at the position, as in :class:`LossArrays`."""
        self._check_target(target)
        arrays = LossArrays(target, target, None, total, weights=weights)
        self._check_weights("target_weight", arrays, elementwise=False)
        return self._of_packed(arrays, lambda a: self._target_weight(a, targets))

    def binary_cross_entropy(self, arrays: LossArrays, pos_weight: float | Sequence[float] | None = None) -> LossKernel:
        """Sum over positions of the mean over channels, of logits; `pos_weight` one number or one per channel."""
        self._check("binary_cross_entropy", arrays, arrays.x.shape)
        return self._of_packed(arrays, lambda a: self._binary_cross_entropy(a, pos_weight))

    def mean_squared_error(self, arrays: LossArrays) -> LossKernel:
        """Sum over positions of the mean over channels of ``(x - target)^2``."""
        self._check("mean_squared_error", arrays, arrays.x.shape)
        return self._of_packed(arrays, self._mean_squared_error)

    def _check(self, what: str, arrays: LossArrays, shape: tuple[int, ...]) -> None:
        self._check_dtypes(what, x=arrays.x, dx=arrays.dx)
        self._check_weights(what, arrays, elementwise=True)
        if tuple(arrays.target.shape) != tuple(shape):
            raise KernelError(f"{what}: expected a target of shape {tuple(shape)}, got {tuple(arrays.target.shape)}")
        self._check_target(arrays.target)
        if arrays.dx is not None and not arrays.dx.flags.c_contiguous:
            raise KernelError(f"{what}: expected dx packed, got strides {arrays.dx.strides}; copy it afterwards")

    def _check_weights(self, what: str, arrays: LossArrays, elementwise: bool) -> None:
        if arrays.weights is None:
            return
        self._check_target(arrays.weights)
        shape, found = tuple(arrays.x.shape), tuple(arrays.weights.shape)
        legal = [(*shape[:-1], 1), *([shape] if elementwise else [])]
        if found not in legal:
            raise KernelError(f"{what}: expected weights of shape {' or '.join(map(str, legal))}, got {found}")

    @staticmethod
    def _check_target(target: Any) -> None:
        found = np.dtype(target.dtype).name
        if found not in TARGETS:
            raise KernelError(f"loss: expected targets out of {', '.join(TARGETS)}, got {found}; convert them")

    def _of_packed(self, arrays: LossArrays, make: Any) -> LossKernel:
        """Return the kernel for packed arrays, of copies where they are not."""
        if not arrays.x.size or not arrays.target.size:
            return _LossOfNothing(lambda: arrays.loss.fill(0), "empty")
        packed, pairs = {}, []
        for name in ("x", "target", "weights"):
            array = getattr(arrays, name)
            if array is not None and not array.flags.c_contiguous:
                packed[name] = self.empty(array.shape, np.dtype(array.dtype))
                pairs.append((packed[name], array))
        made: LossKernel = make(replace(arrays, **packed))
        if not pairs:
            return made
        copy = Kernel(self.device.copies(pairs), "copy")
        return _Packed(copy, made, sum(int(target.nbytes) for target, _ in pairs))

    @abstractmethod
    def _softmax_cross_entropy(
        self, arrays: LossArrays, targets: ClassTargets, label_smoothing: float
    ) -> LossKernel: ...

    @abstractmethod
    def _target_weight(self, arrays: LossArrays, targets: ClassTargets) -> LossKernel: ...

    @abstractmethod
    def _binary_cross_entropy(self, arrays: LossArrays, pos_weight: Any) -> LossKernel: ...

    @abstractmethod
    def _mean_squared_error(self, arrays: LossArrays) -> LossKernel: ...
