"""Losses that are means over elements: binary cross-entropy with logits, mean squared error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..kernels import LossArrays
from .costs import Judgement
from .layer import Shape
from .loss import Loss, LossBlock, LossOfKernel

__all__ = ["BinaryCrossEntropyWithLogits", "MeanSquaredError"]


class _ElementwiseLoss(Loss):
    """Mean over all elements, channels included, of a function of prediction and target of the same shape."""

    def check(self, *shapes: Shape) -> None:
        prediction, target = shapes
        if prediction != target:
            raise ValueError(f"{self.kind}: expected a target of the prediction's shape {prediction}, got {target}")

    def block_type(self) -> type[LossBlock]:
        return LossOfKernel


class MeanSquaredError(_ElementwiseLoss):
    """``mean((x - t)^2)`` over all elements of the batch.

    Communication per process: none but the sum of the loss.
    """

    def kernel(self, kernels: Any, arrays: LossArrays) -> Any:
        return kernels.mean_squared_error(arrays)


class BinaryCrossEntropyWithLogits(_ElementwiseLoss):
    """``mean(-(p * t * log(sigmoid(x)) + (1 - t) * log(1 - sigmoid(x))))`` over all elements of the batch.

    Computed as ``(1 - t) * x + (1 + (p - 1) * t) * (log1p(exp(-|x|)) + max(-x, 0))``, which neither overflows nor
    cancels for any `x` (torch's form, with the same mean).

    Parameters
    ----------
    pos_weight
        Weight p of the positive class: a number, or one per channel.

    Notes
    -----
    Targets lie in [0, 1]. Communication per process: none but the sum of the loss.
    """

    def __init__(self, pos_weight: float | Sequence[float] = 1.0, name: str | None = None) -> None:
        super().__init__(name)
        self.pos_weight = np.asarray(pos_weight, np.float64)
        if self.pos_weight.ndim > 1 or not np.all(self.pos_weight > 0):
            raise ValueError(f"pos_weight: expected a number > 0 or one per channel, got {pos_weight!r}")

    def target_range(self, prediction: Shape) -> tuple[float, float]:
        return (0.0, 1.0)

    def judgement(self, prediction: Shape, target: Shape) -> Judgement:
        return Judgement(2, threshold=0.0)

    def check(self, *shapes: Shape) -> None:
        super().check(*shapes)
        if self.pos_weight.ndim and len(self.pos_weight) != shapes[0][-1]:
            raise ValueError(
                f"pos_weight: expected a number or one for each of {shapes[0][-1]} channels, got {len(self.pos_weight)}"
            )

    def kernel(self, kernels: Any, arrays: LossArrays) -> Any:
        return kernels.binary_cross_entropy(arrays, self.pos_weight.tolist())
