"""Softmax cross-entropy with class indices, per sample or per position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..kernels import ClassTargets, LossArrays
from ..kernels.access import reads, writes
from .layer import Shape
from .loss import BALANCED, HOW_TO_COUNT, Loss, LossBlock, LossOfKernel, LossPlace, check_counts, check_normalization
from .targets import MetricSpec

__all__ = ["SoftmaxCrossEntropy", "balanced"]


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
        without weights, when both are equal. With weights of the positions as a third input, ``w[t]`` is multiplied
        by the weight of the position.
    label_smoothing
        Share of the target that is spread over all classes, in [0, 1).
    ignore_index
        Target of positions without loss and weight.

    Notes
    -----
    Prediction ``(N, *spatial, K)``, target ``(N, *spatial, 1)`` of integers in ``[0, K)``; positions of weight 0 may
    hold any integers. (A run checks files before it reads the weights: if a number in the file marks such positions,
    pass it as `ignore_index`.) Communication per process: the sum of the loss; with ``"weights"`` one more sum of 8 B,
    in forward.

    Raises
    ------
    ValueError
        In forward, on the rank that holds the target, if a target is no class. On a device the host does not read
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


def _class_weights(given: Sequence[float] | str | None) -> Any:
    """Return None, an array, or ``"balanced"``. Raises ValueError."""
    if given is None or (isinstance(given, str) and given == BALANCED):
        return given
    try:
        found = np.asarray(given, np.float64)
    except ValueError:
        found = np.zeros(())
    if found.ndim != 1 or not np.all(found >= 0):
        raise ValueError(f'class_weights: expected one number >= 0 per class or "{BALANCED}", got {given!r}')
    return found


def balanced(counts: Sequence[int]) -> tuple[float, ...]:
    """Return weights ``n / (K * n[c])`` of the `K` classes that occur, with mean 1 over all `n`; 0 for the others.

    >>> balanced((6, 0, 2))
    (0.6666666666666666, 0.0, 2.0)
    """
    classes = sum(n > 0 for n in counts)
    return tuple(sum(counts) / (classes * n) if n else 0.0 for n in counts)


class _WeightedLoss(LossOfKernel):
    """Loss divided by `divisor`, the sum of the target's weights over all ranks; one sum of 8 B computes it."""

    def __init__(self, place: LossPlace, environment: Any, **arrays: Any) -> None:
        super().__init__(place, environment, **arrays)
        targets = self.layer.targets(place.channels)
        make = environment.kernels.target_weight
        self._weight = make(self.target, arrays["divisor"], targets, arrays.get("weights"))

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
