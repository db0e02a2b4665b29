"""Cross-entropy with auxiliary classifiers: several predictions of one target, one scalar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from .layer import Shape
from .softmax_cross_entropy import SoftmaxCrossEntropy

if TYPE_CHECKING:
    from ..program.context import Context

__all__ = ["AuxiliaryCrossEntropy"]


class AuxiliaryCrossEntropy(SoftmaxCrossEntropy):
    """Training: cross-entropy of the prediction, and `weight` times that of each auxiliary prediction.
    Evaluation: that of the prediction alone.

    ``loss = ce(x, t) + weight * sum_i ce(x_i, t)``, called as ``AuxiliaryCrossEntropy()(x, t, x_1, x_2, ...)``.

    Parameters
    ----------
    weight
        Of each auxiliary prediction, positive.
    class_weights, normalization, label_smoothing, ignore_index
        Of all terms, as in :class:`SoftmaxCrossEntropy`.

    Notes
    -----
    Metrics judge the first prediction. Communication per process: that of :class:`SoftmaxCrossEntropy`; with
    ``normalization="weights"`` one sum of 8 B per term, in forward.

    References
    ----------
    Szegedy et al., "Going deeper with convolutions", CVPR 2015, Section 5: two classifiers with weight 0.3,
    "at inference time, these auxiliary networks are discarded".
    """

    def __init__(
        self,
        weight: float = 0.3,
        class_weights: Sequence[float] | None = None,
        normalization: str = "count",
        label_smoothing: float = 0.0,
        ignore_index: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(class_weights, normalization, label_smoothing, ignore_index, name)
        if not weight > 0:
            raise ValueError(f"weight: expected a number > 0, got {weight!r}")
        self.weight = float(weight)

    def check(self, *shapes: Shape) -> None:
        if len(shapes) < 3:
            raise ValueError(
                f"{self.kind}: expected prediction, target and at least one auxiliary prediction, got {len(shapes)} "
                "inputs; use SoftmaxCrossEntropy for a prediction alone"
            )
        prediction, target, *others = shapes
        for shape in (prediction, *others):
            super().check(shape, target)

    def lower(self, context: Context) -> Callable[[], None]:
        terms = [0, *range(2, len(context.inputs))]
        values = {f"value{i}": context.keep((1,), "float64", "loss") for i in terms}
        context.loss = context.keep((1,), "float64", "loss")
        backwards = []
        for i in terms:
            before = len(context.operations)
            backwards.append(self.lower_term(context, i, values[f"value{i}"]))
            for operation in context.operations[before:] if i else ():
                operation.when = "training"
        kernel = context.kernel(partial(_Combined, self.weight), total=context.loss, **values)
        context.run(kernel)

        def backward() -> None:
            for i, add in zip(terms, backwards):
                add()
                if i:
                    kernel.add(**{f"dx{i}": context.inputs[i].contributions[-1]})

        return backward


class _Combined:
    """The weighted sum of the terms; gradients are scaled where they were written."""

    def __init__(self, weight: float, environment: Any, total: Any, value0: Any, **more: Any) -> None:
        self.weight, self.mode, self.total, self.first = weight, environment.mode, total, value0
        self.others = [array for name, array in more.items() if name.startswith("value")]
        self.gradients = [array for name, array in more.items() if name.startswith("dx")]

    def __call__(self) -> None:
        training = self.mode.training
        np.copyto(self.total, self.first)
        for value in self.others if training else ():
            value *= self.weight
            self.total += value
        for gradient in self.gradients:
            if training:
                gradient *= self.weight
            else:
                gradient.fill(0)
