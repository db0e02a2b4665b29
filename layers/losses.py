"""Elementwise losses: means over all elements, cross-entropy with class indices, and the score of an ensemble."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..kernels import ClassTargets, LossArrays
from ..kernels.access import reads, writes
from ..kernels.memory import buffer, chunks, rows, total
from .layer import Passes, Shape
from .loss import (
    BALANCED,
    HOW_TO_COUNT,
    LocalLoss,
    Loss,
    LossBlock,
    LossOfKernel,
    LossPosition,
    check_counts,
    check_equal_shapes,
    check_normalization,
)
from .targets import MetricSpec

__all__ = [
    "CRPS",
    "AbsoluteError",
    "BinaryCrossEntropyWithLogits",
    "Focal",
    "Huber",
    "MeanSquaredError",
    "SoftmaxCrossEntropy",
    "balanced",
]


class _ElementwiseLoss(Loss):
    """Mean of a function of prediction and target, of the same shape, over all elements including channels.

    With weights ``sum(w * l) / count`` (as torch's `weight`), or with ``normalization="weights"`` ``sum(w * l) /
    sum(w)``, both over all elements.
    """

    takes_weights = weighs_channels = True

    def __init__(self, name: str | None = None, *, normalization: str = "count") -> None:
        super().__init__(name)
        self.normalization = check_normalization(normalization)

    def check(self, *shapes: Shape) -> None:
        check_equal_shapes(self.kind, *shapes)

    def block_type(self) -> type[LossBlock]:
        return LossOfKernel


class MeanSquaredError(_ElementwiseLoss):
    """Mean squared error ``mean((x - t)^2)`` over all elements of the batch.

    Parameters
    ----------
    normalization
        Divisor of the sum, with weights as a third input: ``"count"`` or ``"weights"``.

    Notes
    -----
    Communication per process: the sum of the loss; with ``"weights"`` one sum of 8 B more.
    """

    def kernel(self, kernels: Any, arrays: LossArrays) -> Any:
        return kernels.mean_squared_error(arrays)


class BinaryCrossEntropyWithLogits(_ElementwiseLoss):
    """Binary cross-entropy with logits, ``mean(-(p * t * log(sigmoid(x)) + (1 - t) * log(1 - sigmoid(x))))``.

    The mean is over all elements of the batch. The formula used is ``(1 - t) * softplus(x) + p * t * softplus(-x)``
    with ``softplus(x) = max(x, 0) + log1p(exp(-|x|))``, which neither overflows nor cancels for any `x`.

    Parameters
    ----------
    pos_weight
        Weight p of the positive class: a number, or one per channel. ``"balanced"``: ``n[0] / n[1]``, with the
        numbers `n` of positions of the training samples whose target is 0 and 1. A run counts them before it begins
        (:meth:`Network.balance`), and predictions must have one channel.
    normalization
        Divisor of the sum, with weights as a third input: ``"count"`` or ``"weights"``.

    Notes
    -----
    Targets lie in [0, 1]. Communication per process: the sum of the loss; with ``"weights"`` one sum of 8 B more.
    """

    def __init__(
        self,
        pos_weight: float | Sequence[float] | str = 1.0,
        name: str | None = None,
        *,
        normalization: str = "count",
    ) -> None:
        super().__init__(name, normalization=normalization)
        self.pos_weight = _pos_weight(pos_weight)
        self._counts: tuple[int, ...] = ()  # no setting: checkpoints of runs on other samples fit

    def target_range(self, i: int, *shapes: Shape) -> tuple[float, float] | None:
        return super().target_range(i, *shapes) if self.weighs(i) else (0.0, 1.0)

    def metric_specs(self, prediction: Shape, target: Shape) -> Sequence[MetricSpec]:
        # A logit of 0 is a probability of 1/2.
        return (MetricSpec(2, threshold=0.0),)

    def check(self, *shapes: Shape) -> None:
        super().check(*shapes)
        channels = shapes[0][-1]
        if isinstance(self.pos_weight, str):
            if channels != 1:
                raise ValueError(f'pos_weight: expected one channel with "{BALANCED}", got {channels}; give numbers')
        elif self.pos_weight.ndim and len(self.pos_weight) != channels:
            raise ValueError(
                f"pos_weight: expected a number or one for each of {channels} channels, got {len(self.pos_weight)}"
            )

    def kernel(self, kernels: Any, arrays: LossArrays) -> Any:
        if not isinstance(self.pos_weight, str):
            return kernels.binary_cross_entropy(arrays, self.pos_weight.tolist())
        if not self._counts:
            raise ValueError(f'pos_weight: expected the counts of 2 classes for "{BALANCED}", got none; {HOW_TO_COUNT}')
        return kernels.binary_cross_entropy(arrays, self.class_factors(1)[1])

    def counted_classes(self, i: int, *shapes: Shape) -> int:
        return 2 if i == 1 and isinstance(self.pos_weight, str) else 0

    def with_counts(self, counts: Mapping[int, Sequence[int]]) -> BinaryCrossEntropyWithLogits:
        if 1 not in counts or not isinstance(self.pos_weight, str):
            return self
        return self.changed(_counts=check_counts("pos_weight", counts[1]))

    def class_factors(self, i: int) -> Sequence[float]:
        return (1.0, self._counts[0] / self._counts[1]) if i == 1 and self._counts else ()


def _pos_weight(weight: float | Sequence[float] | str) -> Any:
    """Return ``"balanced"``, or an array of one number (0-d) or of one per channel. Raises ValueError."""
    if isinstance(weight, str) and weight == BALANCED:
        return weight
    try:
        array = np.asarray(weight, np.float64)
    except ValueError:
        # Fails the check below, which names the value.
        array = np.zeros(())
    if array.ndim > 1 or not np.all(array > 0):
        raise ValueError(f'pos_weight: expected a number > 0, one per channel, or "{BALANCED}", got {weight!r}')
    return array


class _Pointwise(_ElementwiseLoss):
    """Loss computed element by element from prediction and target, in chunks that stay in the cache.

    Communication per process: the sum of the loss; with weights and ``normalization="weights"`` one sum of 8 B more.
    """

    def block_type(self) -> type[LossBlock]:
        return LocalLoss

    def terms(self, x: Any, t: Any, slope: Any, work: dict) -> None:
        """Replace the predictions `x` by the loss of every element, and write its derivative to `slope`. Local.

        The targets `t` may be overwritten.
        """
        raise TypeError(f"{self.kind} must override terms()")

    def local(
        self,
        prediction: Any,
        target: Any,
        dx: Any | None,
        scale: float,
        work: dict,
        weights: Any = None,
    ) -> Any:
        scale /= prediction.shape[-1]  # of one position; the mean is over channels too
        factors = None if weights is None else rows(weights, work, "weights")
        predictions, targets = rows(prediction, work, "prediction"), rows(target, work, "target")
        gradient = None if dx is None else dx.reshape(predictions.shape)
        loss: Any = 0.0
        for part in chunks(len(predictions), predictions.shape[1], work):
            shape, dtype = predictions[part].shape, predictions.dtype
            x, t, slope = (buffer(work, name, shape, dtype) for name in ("x", "t", "slope"))
            np.copyto(x, predictions[part])
            # Targets may be integers.
            np.copyto(t, targets[part], casting="unsafe")
            if factors is not None:
                # Missing numbers may be NaN, which times a weight of 0 would stay NaN.
                none = np.equal(factors[part], 0, out=buffer(work, "none", factors[part].shape, np.bool_))
                np.copyto(x, 0, where=none)
                np.copyto(t, 0, where=none)
            self.terms(x, t, slope, work)
            if factors is not None:
                x *= factors[part]
                slope *= factors[part]
            loss = loss + total(x)
            if gradient is not None:
                np.multiply(slope, scale, out=gradient[part])
        return loss * scale


class AbsoluteError(_Pointwise):
    """Mean absolute error ``mean(|x - t|)`` over all elements of the batch; the gradient of equal elements is 0.

    Parameters
    ----------
    normalization
        Divisor of the sum, with weights as a third input: ``"count"`` or ``"weights"``.
    """

    def terms(self, x: Any, t: Any, slope: Any, work: dict) -> None:
        x -= t
        np.sign(x, out=slope)
        np.abs(x, out=x)


class Huber(_Pointwise):
    """Huber loss ``mean(h(x - t))``: ``h(d) = d^2 / 2`` where ``|d| <= delta``, else ``delta * (|d| - delta / 2)``.

    Parameters
    ----------
    delta
        Largest difference in the quadratic part, in the unit of the prediction.
    normalization
        Divisor of the sum, with weights as a third input: ``"count"`` or ``"weights"``.
    """

    def __init__(self, delta: float = 1.0, name: str | None = None, *, normalization: str = "count") -> None:
        super().__init__(name, normalization=normalization)
        if not 0 < delta < math.inf:
            raise ValueError(f"delta: expected a number > 0, got {delta!r}")
        self.delta = float(delta)

    def terms(self, x: Any, t: Any, slope: Any, work: dict) -> None:
        # With c = clip(d): c * (d - c / 2) is both cases.
        x -= t
        np.maximum(x, -self.delta, out=slope)
        np.minimum(slope, self.delta, out=slope)
        # slope is c, the derivative; the targets are not needed any more, so t holds c / 2.
        np.multiply(slope, 0.5, out=t)
        x -= t
        x *= slope


class Focal(_Pointwise):
    """Focal loss: binary cross-entropy with logits, with small weights for elements that are predicted correctly.

    ``mean(a * (1 - q)^gamma * bce(x, t))``, with the probability of the truth ``q = p * t + (1 - p) * (1 - t)`` for
    ``p = sigmoid(x)``, and ``a = alpha * t + (1 - alpha) * (1 - t)``. The mean is over all elements of the batch.

    Parameters
    ----------
    gamma
        Exponent of the weight; with 0 only `alpha` weights the binary cross-entropy.
    alpha
        Weight of the positive class, in [0, 1]; None: no weights.
    normalization
        Divisor of the sum, with weights as a third input: ``"count"`` or ``"weights"``.

    References
    ----------
    Lin et al., "Focal loss for dense object detection", ICCV 2017, Equation 5; with soft targets as torchvision's
    ``sigmoid_focal_loss``.
    """

    def __init__(
        self,
        gamma: float = 2.0,
        alpha: float | None = 0.25,
        name: str | None = None,
        *,
        normalization: str = "count",
    ) -> None:
        super().__init__(name, normalization=normalization)
        if not 0 <= gamma < math.inf:
            raise ValueError(f"gamma: expected a number >= 0, got {gamma!r}")
        if alpha is not None and not 0 <= alpha <= 1:
            raise ValueError(f"alpha: expected a number in [0, 1] or None, got {alpha!r}")
        self.gamma, self.alpha = float(gamma), alpha

    def target_range(self, i: int, *shapes: Shape) -> tuple[float, float] | None:
        return super().target_range(i, *shapes) if self.weighs(i) else (0.0, 1.0)

    def metric_specs(self, prediction: Shape, target: Shape) -> Sequence[MetricSpec]:
        # A logit of 0 is a probability of 1/2.
        return (MetricSpec(2, threshold=0.0),)

    def terms(self, x: Any, t: Any, slope: Any, work: dict) -> None:
        p, rest, ce, more = (buffer(work, name, x.shape, x.dtype) for name in ("p", "rest", "ce", "more"))
        self._probabilities(x, p, rest, ce, work)
        # ce = (1 - t) * (log + max(x, 0)) + t * (log + max(-x, 0)): no term is negative.
        np.minimum(x, 0, out=slope)
        np.subtract(ce, slope, out=slope)
        slope *= t
        np.maximum(x, 0, out=more)
        ce += more
        np.subtract(1, t, out=more)
        ce *= more
        ce += slope
        # These forms do not cancel for targets 0 or 1: p - t = (1 - t) p - t (1 - p), 1 - q = (1 - t) p + t (1 - p).
        more *= p
        np.multiply(t, rest, out=x)
        p *= rest
        # New names of two buffers that are overwritten: 1 - q and p - t.
        wrong, difference = rest, more
        np.add(more, x, out=wrong)
        difference -= x
        # dloss/dx = (1 - q)^gamma * ((p - t) - gamma ce (2 t - 1) p (1 - p) / (1 - q)).
        np.maximum(wrong, np.finfo(x.dtype).tiny, out=slope)  # where it is 0, the numerator is 0 too
        p /= slope
        np.multiply(t, 2, out=slope)
        slope -= 1
        slope *= p
        slope *= ce
        slope *= -self.gamma
        slope += difference
        np.power(wrong, self.gamma, out=wrong)
        slope *= wrong
        np.multiply(ce, wrong, out=x)
        if self.alpha is not None:
            # a = (2 alpha - 1) t + 1 - alpha, in the memory of t.
            t *= 2 * self.alpha - 1
            t += 1 - self.alpha
            x *= t
            slope *= t

    @staticmethod
    def _probabilities(x: Any, p: Any, rest: Any, log: Any, work: dict) -> None:
        """Write sigmoid(x) to `p`, sigmoid(-x) to `rest`, ``log1p(exp(-|x|))`` to `log`, without overflow or
        cancellation.
        """
        np.abs(x, out=p)
        np.negative(p, out=p)
        np.exp(p, out=p)
        np.log1p(p, out=log)
        np.add(p, 1, out=rest)
        # With e = exp(-|x|): e / (1 + e) and 1 / (1 + e).
        p /= rest
        np.reciprocal(rest, out=rest)
        # p is the smaller of the two, rest the larger.
        positive = np.greater(x, 0, out=buffer(work, "positive", x.shape, np.bool_))
        small = buffer(work, "small", x.shape, x.dtype)
        np.copyto(small, p)
        np.copyto(p, rest, where=positive)
        np.copyto(rest, small, where=positive)


class CRPS(Loss):
    """Continuous ranked probability score of an ensemble: over all positions and channels of the target, the mean of

    ``mean_m |x[m] - t| - f * sum_(m < n) |x[m] - x[n]|`` with the members `x[m]`.

    Parameters
    ----------
    members
        Number of members M, at least 2. They are channels: channel ``m * C + c`` of the prediction is member `m` of
        channel `c` of the target, as :class:`Concat` of M predictions has them.
    fair
        1: the fair score, ``f = 1 / (M (M - 1))``, whose expectation does not depend on M; 0: the score of the M
        members as a distribution, ``f = 1 / M^2``; between 0 and 1: the mean of both with this weight of the fair
        score.
    normalization
        Divisor of the sum, with weights as a third input: ``"count"`` or ``"weights"``.

    Notes
    -----
    Prediction ``(N, *spatial, M C)``, target ``(N, *spatial, C)``, weights one per position. One network
    computes all members of a sample: it has M heads, or noise among its inputs. The gradient of ``|d|`` at 0 is 0.
    Communication per process: the sum of the loss; with ``"weights"`` one sum of 8 B more.

    References
    ----------
    Ferro, "Fair scores for ensemble forecasts", 2014; Lang et al., "AIFS-CRPS", 2024, Section 2, for the weighted mean.
    """

    takes_weights = True

    def __init__(
        self, members: int, fair: float = 1.0, name: str | None = None, *, normalization: str = "count"
    ) -> None:
        super().__init__(name)
        if not (isinstance(members, int) and members > 1):
            raise ValueError(f"members: expected a whole number of at least 2, got {members!r}")
        if not 0 <= fair <= 1:
            raise ValueError(f"fair: expected a number from 0 to 1, got {fair!r}")
        self.members, self.fair, self.normalization = members, float(fair), check_normalization(normalization)
        # M (M - 1) / 2 differences of two members each are about M further passes over the prediction.
        self.passes = Passes((3 + members, 0), (0, 0))

    def check(self, *shapes: Shape) -> None:
        (*grid, channels), (*target_grid, own) = shapes
        if grid != target_grid or channels != self.members * own:
            raise ValueError(
                f"{self.kind}: expected a prediction with {self.members} members of {own} channels and the extents of "
                f"its target, {(*target_grid, self.members * own)}, got {shapes[0]}"
            )

    def metric_specs(self, prediction: Shape, target: Shape) -> Sequence[MetricSpec]:
        return (MetricSpec(members=self.members),)

    def local(self, prediction: Any, target: Any, dx: Any | None, scale: float, work: dict, weights: Any = None) -> Any:
        members, channels = self.members, target.shape[-1]
        # The factor f of the formula.
        share = self.fair / (members * (members - 1)) + (1 - self.fair) / members**2
        channels_of = [slice(m * channels, (m + 1) * channels) for m in range(members)]
        # `scale` is that of a mean over positions; this one is over channels too.
        scale /= channels
        factors = None if weights is None else rows(weights, work, "weights")
        predictions, targets = rows(prediction, work, "prediction"), rows(target, work, "target")
        gradient = None if dx is None else dx.reshape(predictions.shape)
        loss_sum: Any = 0.0
        for part in chunks(len(predictions), predictions.shape[1], work):
            shape = (members, len(targets[part]), channels)
            x, slope = (buffer(work, name, shape, predictions.dtype) for name in ("x", "slope"))
            names = "t", "loss", "difference"
            t, loss, difference = (buffer(work, name, shape[1:], predictions.dtype) for name in names)
            for member, at in zip(x, channels_of):
                np.copyto(member, predictions[part, at])
            np.copyto(t, targets[part], casting="unsafe")
            if factors is not None:
                # As in `_Pointwise`: values of weight 0 may be NaN.
                none = np.equal(factors[part], 0, out=buffer(work, "none", factors[part].shape, np.bool_))
                np.copyto(x, 0, where=none)
                np.copyto(t, 0, where=none)
            # The mean over members of |x[m] - t|, and its gradient.
            loss.fill(0)
            for member, own in zip(x, slope):
                np.subtract(member, t, out=difference)
                np.sign(difference, out=own)
                own /= members
                loss += np.abs(difference, out=difference)
            loss /= members
            for first, second in itertools.combinations(range(members), 2):
                np.subtract(x[first], x[second], out=difference)
                sign = np.sign(difference, out=buffer(work, "sign", difference.shape, difference.dtype))
                sign *= share
                # Gradient of -f |x[m] - x[n]|; the two members get opposite signs.
                slope[first] -= sign
                slope[second] += sign
                np.abs(difference, out=difference)
                difference *= share
                loss -= difference
            if factors is not None:
                loss *= factors[part]
                slope *= factors[part]
            loss_sum = loss_sum + total(loss)
            if gradient is not None:
                slope *= scale
                for own, at in zip(slope, channels_of):
                    np.copyto(gradient[part, at], own)
        return loss_sum * scale


class SoftmaxCrossEntropy(Loss):
    """Cross-entropy of the softmax over channels with class indices, per sample or per position.

    ``ce = -sum_c q[c] * log(softmax(x))[c]``, with ``q[c] = (1 - s) * w[t] * (c == t) + s / K * w[c]`` for the class
    index `t`, class weights `w` and label smoothing `s` (torch's definition).

    Parameters
    ----------
    class_weights
        Weight per class; by default 1. ``"balanced"``: ``n / (K * n[c])``, where `n` positions of the training samples
        have a class, and ``n[c]`` of them have class c (as in scikit-learn); a run counts them before it begins
        (:meth:`Network.balance`).
    normalization
        ``"weights"``: the sum is divided by the sum of ``w[t]``, as in torch; the default with class weights or an
        `ignore_index`. ``"count"``: the mean over all positions of the valid samples, for any weights; the default
        without class weights and `ignore_index`. With weights of the positions as a third input, ``w[t]`` is
        multiplied by the weight of the position.
    label_smoothing
        Fraction of the target that is spread over all classes, in [0, 1).
    ignore_index
        Target value of the positions that have no loss and no weight.

    Notes
    -----
    Prediction ``(N, *spatial, K)``, target ``(N, *spatial, 1)`` of integers in ``[0, K)``; positions of weight 0 may
    hold any integers. (A run checks files before it reads the weights: if a number in the file marks such positions,
    pass it as `ignore_index`.) Communication per process: the sum of the loss; with ``"weights"`` one more sum of 8 B,
    in forward.

    Raises
    ------
    ValueError
        In forward, on the rank that holds the target, if a target is not a class. On a device the host does not read
        targets: the loss becomes NaN instead.
    """

    takes_weights = True

    def __init__(
        self,
        class_weights: Sequence[float] | str | None = None,
        normalization: str | None = None,
        label_smoothing: float = 0.0,
        ignore_index: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        if normalization is None:
            normalization = "count" if class_weights is None and ignore_index is None else "weights"
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing: expected a number in [0, 1), got {label_smoothing!r}")
        self.class_weights = _class_weights(class_weights)
        self._counts: tuple[int, ...] = ()
        self.normalization = check_normalization(normalization)
        self.label_smoothing, self.ignore_index = label_smoothing, ignore_index

    def check(self, *shapes: Shape) -> None:
        prediction, target = shapes
        if target != (*prediction[:-1], 1):
            raise ValueError(f"{self.kind}: expected a target of shape {(*prediction[:-1], 1)}, got {target}")
        weights = self.class_weights
        if isinstance(weights, np.ndarray) and len(weights) != prediction[-1]:
            raise ValueError(f"class_weights: expected {prediction[-1]} numbers, one per class, got {len(weights)}")

    def reads_classes(self, i: int, *shapes: Shape) -> bool:
        return not self.weighs(i)

    def target_range(self, i: int, *shapes: Shape) -> tuple[float, float] | None:
        if self.weighs(i):
            return super().target_range(i, *shapes)
        return (0.0, shapes[0][-1] - 1.0)

    def ignored_target(self, i: int) -> int | None:
        return self.ignore_index if i == 1 else None

    def metric_specs(self, prediction: Shape, target: Shape) -> Sequence[MetricSpec]:
        return (MetricSpec(prediction[-1], ignored=self.ignore_index),)

    def counted_classes(self, i: int, *shapes: Shape) -> int:
        return shapes[0][-1] if i == 1 and isinstance(self.class_weights, str) else 0

    def with_counts(self, counts: Mapping[int, Sequence[int]]) -> SoftmaxCrossEntropy:
        if 1 not in counts or not isinstance(self.class_weights, str):
            return self
        return self.changed(_counts=check_counts("class_weights", counts[1], self.ignore_index))

    def class_factors(self, i: int) -> Sequence[float]:
        return balanced(self._counts) if i == 1 else ()

    def divides(self, weighted: bool) -> bool:
        # Even without weights of positions: class weights and ignored targets give the sum of weights.
        return self.normalization == "weights"

    def block_type(self) -> type[LossBlock]:
        return _WeightedLoss if self.normalization == "weights" else LossOfKernel

    def kernel(self, kernels: Any, arrays: LossArrays) -> Any:
        return kernels.softmax_cross_entropy(arrays, self.targets(arrays.x.shape[-1]), self.label_smoothing)

    def targets(self, classes: int) -> ClassTargets:
        """Return the description of the target for the backend."""
        weights = self._weights()
        if weights is not None and len(weights) != classes:
            raise ValueError(
                f'class_weights: expected the counts of {classes} classes for "{BALANCED}", got {len(weights)}; '
                + HOW_TO_COUNT
            )
        return ClassTargets(classes, weights, self.ignore_index)

    def _weights(self) -> tuple[float, ...] | None:
        if isinstance(self.class_weights, np.ndarray):
            return tuple(self.class_weights.tolist())
        return None if self.class_weights is None else balanced(self._counts)


def _class_weights(weights: Sequence[float] | str | None) -> Any:
    """Return None, an array, or ``"balanced"``. Raises ValueError."""
    if weights is None or (isinstance(weights, str) and weights == BALANCED):
        return weights
    try:
        array = np.asarray(weights, np.float64)
    except ValueError:
        # Fails the check below, which names the value.
        array = np.zeros(())
    if array.ndim != 1 or not np.all(array >= 0):
        raise ValueError(f'class_weights: expected one number >= 0 per class or "{BALANCED}", got {weights!r}')
    return array


def balanced(counts: Sequence[int]) -> tuple[float, ...]:
    """Return weights ``n / (K * n[c])`` of the `K` classes that occur, with mean 1 over all `n`; 0 for the others.

    >>> balanced((6, 0, 2))
    (0.6666666666666666, 0.0, 2.0)
    """
    classes = sum(n > 0 for n in counts)
    return tuple(sum(counts) / (classes * n) if n else 0.0 for n in counts)


class _WeightedLoss(LossOfKernel):
    """Loss divided by `divisor`, the sum of the target's weights over all ranks; one sum of 8 B computes it."""

    def __init__(self, position: LossPosition, environment: Any, **arrays: Any) -> None:
        super().__init__(position, environment, **arrays)
        targets = self.layer.targets(position.channels)
        make = environment.kernels.target_weight
        self._weight = make(self.target, arrays["divisor"], targets, arrays.get("weights"))

    # Declared again, because weights of classes follow from the target.
    @reads("target", "weights")
    @writes("divisor")
    def weigh(self) -> None:
        super().weigh()

    def sum_weights(self) -> None:
        """Compute the weight of this block's targets."""
        self._weight.set(self.count, 1.0)
        self._weight()

    def close(self) -> None:
        self._weight.close()
        super().close()
