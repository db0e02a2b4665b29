"""Soft Dice and Tversky losses: sums over all ranks, then the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..dtensor import Groups
from ..kernels.access import reads, writes
from ..kernels.memory import buffer, chunks, masked, on_host, rows
from ..kernels.memory import total as total_of
from ..lowering.context import Context
from ..lowering.operations import KernelSpec
from ..lowering.views import View
from .layer import Shape
from .loss import LocalLoss, Loss, LossBlock, LossTerm
from .targets import MetricSpec

__all__ = ["Dice", "Tversky"]

ACTIVATIONS = ("sigmoid", "softmax", "none")
REDUCTIONS = ("batch", "sample")


class Dice(Loss):
    """Soft Dice loss (Milletari et al. 2016, with sums instead of sums of squares).

    ``loss = mean_c (1 - (2 * I[c] + smooth) / (P[c] + T[c] + smooth))``, with ``I = sum p * t``, ``P = sum p`` and
    ``T = sum t`` over positions, of probabilities `p` and targets `t`.

    Parameters
    ----------
    activation
        Function from predictions to probabilities: ``"sigmoid"`` (per channel), ``"softmax"`` (over the channels) or
        ``"none"``.
    reduction
        ``"batch"``: the sums run over all samples. ``"sample"``: they run over each sample, and the loss is the mean
        over samples.
    smooth
        Constant in numerator and denominator: the loss of a class that neither targets nor predictions contain is 0.
    ignore_index
        Target value of the positions that are left out of all sums; for targets with one channel.

    Notes
    -----
    Prediction ``(N, *spatial, C)``. Target of the same shape with values in [0, 1]; with ``"softmax"`` also
    ``(N, *spatial, 1)``: the class index. Weights as a third input multiply every term of the three sums: ``I = sum w p
    t``, ``P = sum w p``, ``T = sum w t``; with ``"softmax"`` all channels of a position have one weight. Communication
    per process: one sum of ``24 C`` B (times the batch size with ``"sample"``) in forward.
    """

    takes_weights = True

    def __init__(
        self,
        activation: str = "sigmoid",
        reduction: str = "batch",
        smooth: float = 1.0,
        name: str | None = None,
        *,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__(name)
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation: expected one of {ACTIVATIONS}, got {activation!r}")
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction: expected one of {REDUCTIONS}, got {reduction!r}")
        if not smooth > 0:
            raise ValueError(f"smooth: expected a number > 0, got {smooth!r}")
        self.activation, self.reduction, self.smooth, self.ignore_index = activation, reduction, smooth, ignore_index
        self.weighs_channels = activation != "softmax"

    @property
    def of_batch(self) -> str:
        return "its sums over samples" if self.reduction == "batch" else ""

    def check(self, *shapes: Shape) -> None:
        prediction, target = shapes
        indices = (*prediction[:-1], 1)
        if self.ignore_index is not None and target[-1] != 1:
            raise ValueError(f"{self.kind}: expected a target of one channel with ignore_index, got {target}")
        if target == prediction or (target == indices and self.activation == "softmax"):
            return
        legal = f"{prediction} or {indices}" if self.activation == "softmax" else f"{prediction}"
        raise ValueError(f"{self.kind}: expected a target of shape {legal}, got {target}")

    def reads_classes(self, i: int, *shapes: Shape) -> bool:
        return not self.weighs(i) and shapes[1] != shapes[0]

    def target_range(self, i: int, *shapes: Shape) -> tuple[float, float] | None:
        if self.weighs(i):
            return super().target_range(i, *shapes)
        return (0.0, shapes[0][-1] - 1.0 if self.reads_classes(i, *shapes) else 1.0)

    def metric_specs(self, prediction: Shape, target: Shape) -> Sequence[MetricSpec]:
        if self.activation == "softmax" or prediction[-1] != target[-1]:
            return (MetricSpec(prediction[-1], ignored=self.ignore_index),)
        # Predictions are logits, of which 0 is a probability of 1/2, or probabilities.
        if self.activation == "sigmoid":
            return (MetricSpec(2, threshold=0.0, ignored=self.ignore_index),)
        return (MetricSpec(2, threshold=0.5, probabilities=True, ignored=self.ignore_index),)

    def ignored_target(self, i: int) -> int | None:
        return self.ignore_index if i == 1 else None

    @property
    def ratio(self) -> tuple[float, float, float, float]:
        """Factors ``(n, i, p, t)`` of the loss ``1 - (n * I + smooth) / (i * I + p * P + t * T + smooth)``."""
        return 2.0, 0.0, 1.0, 1.0

    def block_type(self) -> type[LossBlock]:
        return _DiceKernel

    def lower_passes(self, context: Context, kernel: KernelSpec, term: LossTerm) -> View | None:
        prediction = term.prediction.layout.shape
        groups = prediction[0] if self.reduction == "sample" else 1
        sums = context.keep((groups, 3, prediction[-1]), "float64", "loss")
        kernel.add(sums=sums)
        context.run(kernel, "sum_up")
        context.add_up(context.sum(Groups.whole(context.size), sums, "loss", [sums.nbytes]))
        context.run(kernel, "forward", timing=term.timing)
        return None


class Tversky(Dice):
    """Tversky loss ``mean_c (1 - (I[c] + smooth) / (I[c] + alpha * (P[c] - I[c]) + beta * (T[c] - I[c]) + smooth))``.

    ``P - I`` counts false positives, ``T - I`` false negatives. Sums, other parameters and targets are as in
    :class:`Dice`. With ``alpha = beta = 1/2`` and half the `smooth`, the loss is equal to :class:`Dice`.

    Parameters
    ----------
    alpha, beta
        Weights of false positives and of false negatives; at least one is above 0.

    References
    ----------
    Salehi et al., "Tversky loss function for image segmentation", MLMI 2017.
    """

    def __init__(
        self,
        alpha: float = 0.5,
        beta: float = 0.5,
        activation: str = "sigmoid",
        reduction: str = "batch",
        smooth: float = 1.0,
        name: str | None = None,
        *,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__(activation, reduction, smooth, name, ignore_index=ignore_index)
        if not (alpha >= 0 and beta >= 0 and alpha + beta > 0):
            raise ValueError(f"alpha, beta: expected numbers >= 0, not both 0, got {alpha!r}, {beta!r}")
        self.alpha, self.beta = float(alpha), float(beta)

    @property
    def ratio(self) -> tuple[float, float, float, float]:
        return 1.0, 1.0 - self.alpha - self.beta, self.alpha, self.beta


class _DiceKernel(LocalLoss):
    """Kernel of the Dice loss: probabilities and their sums, one reduction, then the gradient in a second sweep.

    `sums` holds I, P, T per group and channel; then, in place of I and T, the two coefficients of the gradient.
    """

    def __init__(self, *arguments: Any, sums: Any, **arrays: Any) -> None:
        super().__init__(*arguments, **arrays)
        self.sums, self.groups = sums, len(sums)

    @reads("prediction", "target", "weights")
    @writes("copy", "sums")
    def sum_up(self) -> None:
        """Compute the sums of this block."""
        if self.copied is not None:
            np.copyto(self.prediction, self.copied)
        self.sums.fill(0)  # they hold coefficients of the step before
        for n in range(self.count):
            # With reduction "batch" there is one group: the index is 0 for all samples.
            self._sweep(n, self.sums[(self.position.first + n) % self.groups], gradient=False)

    @reads("prediction", "target", "weights", "sums")
    @writes("value", "dx", "copy", "dx_copy", "sums")
    def forward(self) -> None:
        super().forward()

    def compute(self) -> None:
        count = self.count
        if self.dx is not None:
            # Samples beyond the valid ones have no gradient.
            self.dx[count:] = 0
        loss = self._coefficients(max(1, self.mode.valid if self.groups > 1 else 1))
        # All ranks know the loss; the executor adds up their values.
        np.copyto(self.value, loss if self.position.rank == 0 else 0.0)
        for n in range(count if self.dx is not None else 0):
            self._sweep(n, self.sums[(self.position.first + n) % self.groups], gradient=True)

    def _coefficients(self, samples: int) -> Any:
        """Return the loss, and write a, b such that ``dloss/dp = a * t + b`` over I and T in `sums`. Local, the same on
        all ranks.
        """
        loss: Any = 0.0
        share = self.position.weight / (samples * self.sums.shape[2])
        n, i, p, t = self.layer.ratio
        # Views, modified in place: `total` becomes the denominator D, `both` the quotient q; `target` is work space.
        for both, total, target in self.sums[:samples]:
            total *= p
            target *= t
            total += target
            total += np.multiply(both, i, out=target)
            total += self.layer.smooth
            both *= n
            both += self.layer.smooth
            both /= total
            loss = loss + share * total_of(np.subtract(1, both, out=target))
            # With the quotient q and the denominator D: dloss/dI = (i * q - n) / D, dloss/dP = p * q / D.
            np.multiply(both, p * share, out=target)
            target /= total
            both *= i * share
            both -= n * share
            both /= total
        return loss

    def _sweep(self, n: int, sums: Any, gradient: bool) -> None:
        """Process one sample: add to its sums, or write its gradient."""
        work = self.work
        x, t = rows(self.prediction[n], work, "prediction"), rows(self.target[n], work, "target")
        weights = None if self.weights is None else rows(self.weights[n], work, "weights")
        for part in chunks(len(x), x.shape[1], work):
            # Channel by channel, (C, positions).
            p = buffer(work, "p", x[part].shape[::-1], x.dtype)
            targets = buffer(work, "t", p.shape, x.dtype)
            np.copyto(p, x[part].T)
            compared, w = t[part], None if weights is None else weights[part]
            if self.layer.ignore_index is not None:
                w = self._counted(compared, w)
            if w is not None:
                compared, w = self._without(w, p, compared), w.T
            self._probabilities(p)
            self._targets(compared, targets)
            if gradient:
                assert self.dx is not None
                self._gradient(p, targets, sums, w)
                np.copyto(self.dx[n].reshape(x.shape)[part], p.T)
            else:
                self._add(p, targets, sums, w)

    def _counted(self, t: Any, weights: Any | None) -> Any:
        """Return the weights, or ones ``(positions, 1)``, with 0 at ignored positions."""
        counts = np.not_equal(t, self.layer.ignore_index, out=buffer(self.work, "counts", t.shape, np.bool_))
        counted = buffer(self.work, "counted", t.shape if weights is None else weights.shape, self.prediction.dtype)
        np.copyto(counted, 1 if weights is None else weights)
        return np.multiply(counted, counts, out=counted)

    def _without(self, weights: Any, p: Any, t: Any) -> Any:
        """Write zeros to `p` where the weight is 0, and return a copy of `t` with the same zeros."""
        # Not a product with the weight: values without weight may be NaN, which a factor of 0 would not remove.
        none = np.equal(weights, 0, out=buffer(self.work, "none", weights.shape, np.bool_))
        np.copyto(p, 0, where=none.T)
        return masked(t, none, self.work, "masked t")

    def _probabilities(self, p: Any) -> None:
        """Apply the activation in place."""
        if self.layer.activation == "sigmoid":
            # Compute with exp(-|x|), so that small probabilities and their derivatives keep their digits.
            e, sums = (buffer(self.work, name, p.shape, p.dtype) for name in ("e", "1 + e"))
            negative = np.less(p, 0, out=buffer(self.work, "negative", p.shape, np.bool_))
            np.abs(p, out=e)
            np.negative(e, out=e)
            np.exp(e, out=e)
            np.add(e, 1, out=sums)
            np.copyto(p, 1)
            np.copyto(p, e, where=negative)
            p /= sums
        elif self.layer.activation == "softmax":
            column = buffer(self.work, "column", p.shape[1:], p.dtype)
            p -= np.amax(p, axis=0, out=column)
            np.exp(p, out=p)
            p /= np.sum(p, axis=0, out=column)

    def _targets(self, t: Any, out: Any) -> None:
        if t.shape[1] == out.shape[0]:
            np.copyto(out, t.T, casting="unsafe")
            return
        # On a device the host would have to wait for the result of the check.
        if on_host(t) and not (t.min() >= 0 and t.max() < len(out)):
            wrong = t.max() if t.max() >= len(out) else t.min()
            raise ValueError(
                f"{self.name}: expected targets in [0, {len(out)}), got {wrong}; check the dataset's classes"
            )
        mask = buffer(self.work, "mask", out.shape[1:], np.bool_)
        for channel, row in enumerate(out):
            np.copyto(row, np.equal(t[:, 0], channel, out=mask))

    def _add(self, p: Any, t: Any, sums: Any, weights: Any | None) -> None:
        column = buffer(self.work, "sum", p.shape[:1], np.float64)
        if weights is not None:
            # I = sum (w p) t: the second factor must not contain the weight too.
            p *= weights
            both = np.multiply(p, t, out=buffer(self.work, "both", p.shape, p.dtype))
            sums[0] += np.sum(both, axis=1, dtype=np.float64, out=column)
            t *= weights
        sums[1] += np.sum(p, axis=1, dtype=np.float64, out=column)
        sums[2] += np.sum(t, axis=1, dtype=np.float64, out=column)
        if weights is None:
            p *= t
            sums[0] += np.sum(p, axis=1, dtype=np.float64, out=column)

    def _gradient(self, p: Any, t: Any, sums: Any, weights: Any | None) -> None:
        """Write ``dloss/dx`` to `p`; modifies `t`."""
        # The coefficients a and b as columns, in the dtype of p: products with float64 would be computed in float64.
        typed = buffer(self.work, "typed", (2, len(p), 1), p.dtype)
        np.copyto(typed[0, :, 0], sums[0], casting="same_kind")
        np.copyto(typed[1, :, 0], sums[2], casting="same_kind")
        t *= typed[0]
        t += typed[1]
        if weights is not None:
            t *= weights
        other = buffer(self.work, "other", p.shape, p.dtype)
        if self.layer.activation == "sigmoid":
            # p (1 - p) = e / (1 + e)^2, as `_probabilities` left them.
            e, sums = (buffer(self.work, name, p.shape, p.dtype) for name in ("e", "1 + e"))
            np.divide(e, sums, out=p)
            p /= sums
            p *= t
        elif self.layer.activation == "softmax":
            # A constant added to all t does not change the sum over k of p[k] (t[c] - t[k]). Subtract the t of the
            # largest p, which is close to 1; then only small p contribute.
            column, largest = (buffer(self.work, name, p.shape[1:], p.dtype) for name in ("column", "largest"))
            larger = buffer(self.work, "mask", p.shape[1:], np.bool_)
            np.copyto(column, t[0])
            np.copyto(largest, p[0])
            for row, probability in zip(t[1:], p[1:]):
                np.copyto(column, row, where=np.greater(probability, largest, out=larger))
                np.maximum(probability, largest, out=largest)
            t -= column
            np.multiply(p, t, out=other)
            t -= np.sum(other, axis=0, out=column)
            p *= t
        else:
            np.copyto(p, t)
