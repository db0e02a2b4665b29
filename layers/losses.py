"""Losses that are means over elements: binary cross-entropy with logits, mean squared error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from halograd.layers.chunks import buffer, chunks, constant, rows
from halograd.layers.chunks import total as total_of
from halograd.layers.costs import Judgement
from halograd.layers.layer import Shape
from halograd.layers.loss import Loss

__all__ = ["BinaryCrossEntropyWithLogits", "MeanSquaredError"]


class _ElementwiseLoss(Loss):
    """Mean over all elements, channels included, of a function of prediction and target of the same shape."""

    def check(self, *shapes: Shape) -> None:
        prediction, target = shapes
        if prediction != target:
            raise ValueError(f"{self.kind}: expected a target of the prediction's shape {prediction}, got {target}")

    def local(self, prediction: Any, target: Any, dx: Any | None, scale: float, work: dict) -> Any:
        x, t = rows(prediction, work, "prediction"), rows(target, work, "target")
        channels = x.shape[1]
        gradient = None if dx is None else dx.reshape(x.shape)
        scale /= channels
        total: Any = 0.0
        for part in chunks(len(x), channels, work):
            wanted = None if gradient is None else gradient[part]
            targets = buffer(work, "t", x[part].shape, x.dtype)
            np.copyto(targets, t[part], casting="unsafe")
            total = total + self.chunk(x[part], targets, wanted, scale, work)
        return total * scale

    def chunk(self, x: Any, t: Any, dx: Any | None, scale: float, work: dict) -> Any:
        """Local. Sum of the loss over ``(positions, C)``; `scale` times its gradient into `dx`. May modify `t`."""
        raise NotImplementedError


class MeanSquaredError(_ElementwiseLoss):
    """``mean((x - t)^2)`` over all elements of the batch.

    Communication per process: none but the sum of the loss.
    """

    def fused(
        self, cuda: Any, prediction: Any, target: Any, dx: Any | None, loss: Any, wrong: Any, factor: Any = None
    ) -> Any:
        return cuda.mean_squared_error(prediction, target, dx, loss, factor)

    def chunk(self, x: Any, t: Any, dx: Any | None, scale: float, work: dict) -> Any:
        np.subtract(x, t, out=t)
        if dx is not None:
            np.multiply(t, 2 * scale, out=dx)
        np.multiply(t, t, out=t)
        return total_of(t)


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

    def fused(
        self, cuda: Any, prediction: Any, target: Any, dx: Any | None, loss: Any, wrong: Any, factor: Any = None
    ) -> Any:
        return cuda.binary_cross_entropy(prediction, target, dx, loss, self.pos_weight, factor)

    def chunk(self, x: Any, t: Any, dx: Any | None, scale: float, work: dict) -> Any:
        e, softplus, weight, negative = (buffer(work, k, x.shape, x.dtype) for k in ("e", "softplus", "weight", "n"))
        np.negative(np.abs(x, out=e), out=e)
        np.exp(e, out=e)
        np.log1p(e, out=softplus)
        np.maximum(np.negative(x, out=negative), 0, out=negative)
        softplus += negative
        np.multiply(t, constant(work, "extra", lambda: self.pos_weight - 1, x.dtype), out=weight)
        weight += 1
        np.subtract(1, t, out=t)
        np.multiply(t, x, out=negative)
        softplus *= weight
        softplus += negative
        if dx is not None:
            self._gradient(x, t, weight, e, dx, scale, work)
        return total_of(softplus)

    @staticmethod
    def _gradient(x: Any, rest: Any, weight: Any, e: Any, dx: Any, scale: float, work: dict) -> None:
        """``(1 - t) - weight * sigmoid(-x)``, with ``e = exp(-|x|)`` and ``rest = 1 - t``."""
        mask = buffer(work, "mask", x.shape, np.bool_)
        np.add(e, 1, out=dx)
        np.less(x, 0, out=mask)
        np.copyto(e, 1, where=mask)
        np.divide(e, dx, out=dx)
        dx *= weight
        np.subtract(rest, dx, out=dx)
        dx *= scale
