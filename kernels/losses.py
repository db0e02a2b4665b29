"""Interface of losses: a kernel that computes a scalar, and its gradient with respect to the prediction."""

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
#: Supported dtypes of targets and weights.
TARGETS = ("float32", "float64", "float16", "bfloat16", "bool", *_INTEGERS)


class LossKernel(Kernel, ABC):
    """A loss kernel that can leave out samples. All samples count until :meth:`set` is called."""

    @abstractmethod
    def set(self, samples: int, scale: float) -> None:
        """Count the `samples` leading samples only; the gradient of the others is 0. Multiply loss and gradient by
        `scale`.
        """


class _EmptyLoss(LossKernel):
    """Loss of a rank without elements: 0."""

    def set(self, samples: int, scale: float) -> None:
        return


class _Packed(LossKernel):
    """A loss kernel on packed copies of strided arrays."""

    def __init__(self, copy: Kernel, loss: LossKernel, nbytes: int) -> None:
        self._loss, whole = loss, chain(copy, loss)
        super().__init__(whole, loss.impl, nbytes + whole.workspace_bytes, whole.close)
        self.scratch_bytes = whole.scratch_bytes

    def set(self, samples: int, scale: float) -> None:
        self._loss.set(samples, scale)


@dataclass(frozen=True)
class LossArrays:
    """Arrays that a loss reads and writes; local.

    Attributes
    ----------
    x, target
        Prediction and target, with the same samples and positions. The target may have another dtype.
    dx
        Gradient with respect to the prediction, packed, or None.
    loss
        float64 ``(1,)``: the sum over all counted samples, times the scale of :meth:`LossKernel.set`.
    factor
        float64 ``(1,)`` or None: multiplied into `dx` only (a loss scale).
    divisor
        float64 ``(1,)`` or None: loss and `dx` are divided by it if it is above 0; else they are 0.
    weights
        Weights of the loss, numbers >= 0 of any dtype, or None. Per position: ``(N, *spatial, 1)``; for elementwise
        losses also of the shape of `x`. Where a weight is 0, loss and `dx` are 0 for any values of `x` and target.
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
    """Interpretation of class indices: the number of classes, one weight per class (None: 1 each), and an index that is
    ignored (None: no index).
    """

    classes: int
    weights: tuple[float, ...] | None = None
    ignored: int | None = None


class Losses(Base):
    """Losses that are sums over positions.

    On a CPU, a target outside of the classes raises an error when the kernel runs. On a device, which the host does not
    wait for, the loss becomes NaN instead.
    """

    def softmax_cross_entropy(
        self, arrays: LossArrays, targets: ClassTargets, label_smoothing: float = 0.0
    ) -> LossKernel:
        """Build the sum over positions of the cross-entropy, see :class:`halograd.layers.SoftmaxCrossEntropy`.

        `x` is ``(N, *spatial, K)``, the target ``(N, *spatial, 1)``.
        """
        self._check("softmax_cross_entropy", arrays, (*arrays.x.shape[:-1], 1))
        # Stricter than `_check`: the loss of a position is one number, so it has one weight.
        self._check_weights("softmax_cross_entropy", arrays, elementwise=False)
        return self._of_packed(arrays, lambda a: self._softmax_cross_entropy(a, targets, label_smoothing))

    def target_weight(self, target: Any, total: Any, targets: ClassTargets, weights: Any = None) -> LossKernel:
        """Build ``total``, float64 ``(1,)``: the sum of the class weights of all targets of the counted samples.

        Each weight is multiplied by `weights` at its position, as in :class:`LossArrays`.
        """
        self._check_target(target)
        # The target stands for the prediction, of which this sum reads only the shape.
        arrays = LossArrays(target, target, None, total, weights=weights)
        self._check_weights("target_weight", arrays, elementwise=False)
        return self._of_packed(arrays, lambda a: self._target_weight(a, targets))

    def binary_cross_entropy(self, arrays: LossArrays, pos_weight: float | Sequence[float] | None = None) -> LossKernel:
        """Build the sum over positions of the mean cross-entropy over channels, from logits.

        `pos_weight` is one number, or one per channel.
        """
        self._check("binary_cross_entropy", arrays, arrays.x.shape)
        return self._of_packed(arrays, lambda a: self._binary_cross_entropy(a, pos_weight))

    def mean_squared_error(self, arrays: LossArrays) -> LossKernel:
        """Build the sum over positions of the mean over channels of ``(x - target)^2``."""
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
        shape, weights_shape = tuple(arrays.x.shape), tuple(arrays.weights.shape)
        legal = [(*shape[:-1], 1), *([shape] if elementwise else [])]
        if weights_shape not in legal:
            raise KernelError(f"{what}: expected weights of shape {' or '.join(map(str, legal))}, got {weights_shape}")

    @staticmethod
    def _check_target(target: Any) -> None:
        dtype = np.dtype(target.dtype).name
        if dtype not in TARGETS:
            raise KernelError(f"loss: expected targets out of {', '.join(TARGETS)}, got {dtype}; convert them")

    def _of_packed(self, arrays: LossArrays, make: Any) -> LossKernel:
        """Return the kernel that `make` builds on packed arrays; strided arrays are copied at each call. Without
        elements, the loss is 0.
        """
        if not arrays.x.size or not arrays.target.size:
            # A rank without elements takes part in the sum over ranks, so it has a loss: 0.
            return _EmptyLoss(lambda: arrays.loss.fill(0), "empty")
        packed, pairs = dict[str, Any](), []
        # Kernels read arrays as (positions, C), a shape that only packed arrays take without a copy.
        for name in ("x", "target", "weights"):
            array = getattr(arrays, name)
            if name == "target" and array is arrays.x:  # of `target_weight`
                packed[name] = packed.get("x", array)
            elif array is not None and not array.flags.c_contiguous:
                packed[name] = self.empty(array.shape, np.dtype(array.dtype))
                pairs.append((packed[name], array))
        kernel: LossKernel = make(replace(arrays, **packed))
        if not pairs:
            return kernel
        copy = Kernel(self.device.copies(pairs), "copy")
        return _Packed(copy, kernel, self.own.add(*(target for target, _ in pairs)))

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
