"""Softmax cross-entropy with class indices, per sample or per position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..dtensor import Groups
from ..kernels import ClassTargets, LossArrays
from .costs import Judgement
from .layer import Shape
from .loss import Loss, LossBlock, LossOfKernel, LossPlace, LossTerm

if TYPE_CHECKING:
    from ..program.context import Context
    from ..program.operations import KernelSpec

__all__ = ["SoftmaxCrossEntropy"]

NORMALIZATIONS = ("count", "weights")


class SoftmaxCrossEntropy(Loss):
    """Cross-entropy of the softmax over channels with class indices, per sample or per position.

    ``ce = -sum_c q[c] * log(softmax(x))[c]``, with ``q[c] = (1 - s) * w[t] * (c == t) + s / K * w[c]`` for the class
    index `t`, class weights `w` and label smoothing `s` (torch's definition).

    Parameters
    ----------
    class_weights
        Weight per class; by default 1.
    normalization
        ``"weights"``: the sum is divided by the sum of ``w[t]``, as torch does; the default where there are weights or
        an `ignore_index`. ``"count"``: the mean over all positions of the samples that count, whatever their weight;
        without weights the same, and the default.
    label_smoothing
        Share of the target that is spread over all classes, in [0, 1).
    ignore_index
        Positions with this target have neither loss nor weight.

    Notes
    -----
    Prediction ``(N, *spatial, K)``, target ``(N, *spatial, 1)`` of integers in ``[0, K)``. Communication per process:
    the sum of the loss; with ``"weights"`` one sum of 8 B more, in forward.

    Raises
    ------
    ValueError
        In forward, on the rank that has it, for a target that is no class. On a device, where the host does not look,
        the loss becomes NaN instead.
    """

    def __init__(
        self,
        class_weights: Sequence[float] | None = None,
        normalization: str | None = None,
        label_smoothing: float = 0.0,
        ignore_index: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        if normalization is None:
            normalization = "count" if class_weights is None and ignore_index is None else "weights"
        if normalization not in NORMALIZATIONS:
            raise ValueError(f"normalization: expected one of {NORMALIZATIONS}, got {normalization!r}")
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing: expected a number in [0, 1), got {label_smoothing!r}")
        self.class_weights = None if class_weights is None else np.asarray(class_weights, np.float64)
        if self.class_weights is not None and (self.class_weights.ndim != 1 or np.any(self.class_weights < 0)):
            raise ValueError(f"class_weights: expected one number >= 0 per class, got {class_weights!r}")
        self.normalization, self.label_smoothing, self.ignore_index = normalization, label_smoothing, ignore_index

    @property
    def of_batch(self) -> str:
        return "its sum of weights" if self.normalization == "weights" else ""

    def check(self, *shapes: Shape) -> None:
        prediction, target = shapes
        if target != (*prediction[:-1], 1):
            raise ValueError(f"{self.kind}: expected a target of shape {(*prediction[:-1], 1)}, got {target}")
        weights = self.class_weights
        if weights is not None and len(weights) != prediction[-1]:
            raise ValueError(f"class_weights: expected {prediction[-1]} numbers, one per class, got {len(weights)}")

    def reads_classes(self, i: int, *shapes: Shape) -> bool:
        return True

    def target_range(self, i: int, *shapes: Shape) -> tuple[float, float] | None:
        return (0.0, shapes[0][-1] - 1.0) if self.ignore_index is None else None

    def judgements(self, *shapes: Shape) -> Sequence[Judgement]:
        return (Judgement(shapes[0][-1], ignored=self.ignore_index),)

    def block_type(self) -> type[LossBlock]:
        return _WeightedLoss if self.normalization == "weights" else LossOfKernel

    def lower_passes(self, context: Context, kernel: KernelSpec, term: LossTerm) -> None:
        if self.normalization == "weights":
            weight = context.keep((1,), "float64", "loss")
            kernel.add(divisor=weight)
            context.run(kernel, "weigh")
            context.add_up(context.sum(Groups.whole(context.size), weight, "loss", [8], f"{context.name} (weights)"))
        super().lower_passes(context, kernel, term)

    def kernel(self, kernels: Any, arrays: LossArrays) -> Any:
        return kernels.softmax_cross_entropy(arrays, self.targets(arrays.x.shape[-1]), self.label_smoothing)

    def targets(self, classes: int) -> ClassTargets:
        """How the target is read."""
        weights = None if self.class_weights is None else tuple(self.class_weights.tolist())
        return ClassTargets(classes, weights, self.ignore_index)


class _WeightedLoss(LossOfKernel):
    """Divides by the sum of the target's weights over all ranks, `divisor`, which one small sum finds out."""

    def __init__(self, place: LossPlace, environment: Any, **arrays: Any) -> None:
        super().__init__(place, environment, **arrays)
        targets = self.layer.targets(place.channels)
        self._weight = environment.kernels.target_weight(self.target, arrays["divisor"], targets)

    def weigh(self) -> None:
        """Write the weight of this block's targets, to be summed."""
        self._weight.set(self.count, 1.0)
        self._weight()

    def scale(self) -> float:
        return self.place.weight

    def close(self) -> None:
        self._weight.close()
        super().close()
