"""Cross-entropy with auxiliary classifiers: several predictions of one target, one scalar."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from halograd.layers.binding import Binding
from halograd.layers.layer import Shape
from halograd.layers.loss import LossOperator
from halograd.layers.operator import Operator
from halograd.layers.softmax_cross_entropy import SoftmaxCrossEntropy

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

    def bind(self, binding: Binding) -> Operator:
        prediction, target, *others = binding.inputs
        terms = []
        for i, value in enumerate((prediction, *others)):
            term = copy.copy(binding)
            term.inputs = (value, target)
            term.name = f"{binding.name} (auxiliary {i})" if i else binding.name
            terms.append((term, super().bind(term)))
        return _AuxiliaryOperator(terms, self.weight)


class _AuxiliaryOperator(LossOperator):
    """One loss operator per term; its gradient is scaled where it was written, in forward."""

    # The operators of the terms hold what LossOperator's own initialization would make.
    def __init__(self, terms: Sequence[tuple[Binding, Any]], weight: float) -> None:
        self.b = terms[0][0]
        self.value: Any = 0.0
        self.weight = weight
        self.terms = terms
        self._gradients: list[Any] = []

    def forward(self) -> None:
        (_, first), *others = self.terms
        first.forward()
        self.value = first.value
        if self.b.mode.training:
            for _, term in others:
                term.forward()
                self.value = self.value + self.weight * term.value
        for gradient in self._gradients:
            if self.b.mode.training:
                gradient *= self.weight
            else:
                gradient.fill(0)

    def bind_backward(self) -> None:
        for binding, term in self.terms:
            term.bind_backward()
            if binding is not self.b:
                self._gradients.append(binding.inputs[0].contributions[-1])

    def close(self) -> None:
        for _, term in self.terms:
            term.close()
