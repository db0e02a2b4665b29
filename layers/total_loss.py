"""Weighted sum of several losses, written as ``ce + 0.5 * dice``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any

import numpy as np

from ..dtensor import Blocks, Layout
from ..kernels.access import reads, writes
from ..lowering.context import Context, Lowered
from .layer import Node, Shape
from .loss import Loss, LossNode, LoweredTerm, loss_timing
from .targets import MetricSpec

__all__ = ["TotalLoss", "total_of", "training_only", "weighted"]


@dataclass(frozen=True)
class Term:
    """Loss within a sum of losses.

    Attributes
    ----------
    layer
        The loss.
    inputs
        Indices of its inputs among the inputs of the sum, in the term's order.
    weight
        Factor of the loss.
    training_only
        Whether evaluation leaves the term out.
    """

    layer: Loss
    inputs: tuple[int, ...]
    weight: float = 1.0
    training_only: bool = False


class TotalLoss(Loss):
    """Weighted sum of losses, ``sum_k weight[k] * loss[k]``; ``+`` and ``*`` create it, see :class:`LossNode`.

    All terms are computed with one cut. Predictions may have different extents: outputs at several scales (deep
    supervision), several tasks. Metrics compare every pair of prediction and target that counts in evaluation.

    Notes
    -----
    Communication per process: that of the terms; the loss itself is one sum.
    """

    def __init__(self, terms: Sequence[Term], name: str | None = None) -> None:
        super().__init__(name)
        self.terms = tuple(terms)

    def output_shape(self, *shapes: Shape) -> Shape:
        for term in self.terms:
            term.layer.output_shape(*self._of(term, shapes))
        both = [i for i in range(len(shapes)) if self.compares(i) and not all(k for k, _ in self._readers(i))]
        if both:
            raise ValueError(
                f"{self.kind}: expected every input to be a prediction or a target, got one (number {both[0]}) that is "
                "both; a loss has no gradient with respect to its target"
            )
        return (1,)

    def needed_blocks(self, i: int, inputs: Sequence[Layout], output: Layout) -> Blocks:
        """Return the smallest boxes that hold those of all terms that read the input; only boxes on the grid of the
        first term's boxes count.
        """
        # Boxes on other grids cannot be joined: their terms gather them separately.
        first, *others = [term.layer.needed_blocks(k, self._of(term, inputs), output) for k, term in self._readers(i)]
        return first.joined([blocks for blocks in others if blocks.grid == first.grid])

    @property
    def of_batch(self) -> str:
        return ", ".join(dict.fromkeys(filter(None, (term.layer.of_batch for term in self.terms))))

    @staticmethod
    def _of(term: Term, values: Sequence[Any]) -> list[Any]:
        return [values[i] for i in term.inputs]

    def _readers(self, i: int) -> Iterator[tuple[int, Term]]:
        """Yield the index of input `i` in a term, and the term, for all terms that read it; a term may read it twice.
        """
        for term in self.terms:
            yield from ((k, term) for k, number in enumerate(term.inputs) if number == i)

    def compares(self, i: int) -> bool:
        return any(term.layer.compares(k) for k, term in self._readers(i))

    def weighs(self, i: int) -> bool:
        # An input that is also the target of a term is no array of weights.
        return all(term.layer.weighs(k) for k, term in self._readers(i))

    def weights_of(self, i: int, count: int) -> Sequence[int]:
        inputs = [[term.inputs[w] for w in term.layer.weights_of(k, len(term.inputs))] for k, term in self._readers(i)]
        # A term without weights counts every element: the target is never absent for it.
        return list(dict.fromkeys(w for numbers in inputs for w in numbers)) if all(inputs) else ()

    def counted_classes(self, i: int, *shapes: Shape) -> int:
        counts = (term.layer.counted_classes(k, *self._of(term, shapes)) for k, term in self._readers(i))
        return max(counts, default=0)

    def with_counts(self, counts: Mapping[int, Sequence[int]]) -> TotalLoss:
        terms = []
        for term in self.terms:
            own = {k: counts[i] for k, i in enumerate(term.inputs) if i in counts}
            terms.append(replace(term, layer=term.layer.with_counts(own)))
        return self.changed(terms=tuple(terms))

    def class_factors(self, i: int) -> Sequence[float]:
        return next(filter(None, (term.layer.class_factors(k) for k, term in self._readers(i))), ())

    def reads_classes(self, i: int, *shapes: Shape) -> bool:
        return any(term.layer.reads_classes(k, *self._of(term, shapes)) for k, term in self._readers(i))

    def target_range(self, i: int, *shapes: Shape) -> tuple[float, float] | None:
        ranges = [term.layer.target_range(k, *self._of(term, shapes)) for k, term in self._readers(i)]
        # A number must be valid for all terms.
        limits = [limit for limit in ranges if limit is not None]
        return (max(low for low, _ in limits), min(high for _, high in limits)) if limits else None

    def ignored_target(self, i: int) -> int | None:
        ignored = {term.layer.ignored_target(k) for k, term in self._readers(i)}
        # A position that one term ignores and another counts is not ignored.
        return ignored.pop() if len(ignored) == 1 else None

    def comparisons(self, *shapes: Shape) -> Sequence[MetricSpec]:
        comparisons = [
            _renumbered(spec, term.inputs)
            for term in self.terms
            if not term.training_only
            for spec in term.layer.comparisons(*self._of(term, shapes))
        ]
        # Metrics compare each pair once, by the rule of the first term that has it.
        pairs = [(spec.prediction, spec.target) for spec in comparisons]
        return [spec for k, spec in enumerate(comparisons) if pairs[k] not in pairs[:k]]

    def lower(self, context: Context) -> Lowered:
        loss = context.keep((1,), "float64", "loss")
        values = {f"value{k}": context.keep((1,), "float64", "loss") for k in range(len(self.terms))}
        lowered: list[LoweredTerm] = []
        for term, value in zip(self.terms, values.values()):
            # Evaluation gathers the inputs of all terms: another term may read the same boxes.
            own = term.layer.gathered(context, term.inputs, value, weight=term.weight)
            with context.only("training" if term.training_only else None):
                lowered.append(term.layer.lower_term(context, own))
        left_out = tuple(term.training_only for term in self.terms)
        kernel = context.kernel(partial(_Total, left_out), total=loss, **values)
        context.run(kernel, timing=loss_timing(context))

        def backward() -> None:
            for k, (term, lowered_term) in enumerate(zip(self.terms, lowered)):
                gradient = lowered_term.backward()
                if term.training_only:
                    kernel.add(**{f"dx{k}": gradient})

        counted = zip(self.terms, values.values(), lowered)
        terms = tuple((value, lowered_term.divisor) for term, value, lowered_term in counted if not term.training_only)
        return Lowered(backward, loss=loss, terms=terms)


def _renumbered(spec: MetricSpec, inputs: Sequence[int]) -> MetricSpec:
    """Return the comparison of a term with the input indices of the sum."""
    weights = None if spec.weights is None else inputs[spec.weights]
    return replace(spec, prediction=inputs[spec.prediction], target=inputs[spec.target], weights=weights)


class _Total:
    """Kernel that sums the weighted terms; in evaluation, without those for training only."""

    def __init__(self, left_out: Sequence[bool], environment: Any, total: Any, **arrays: Any) -> None:
        self.mode, self.total = environment.mode, total
        values = [arrays[f"value{k}"] for k in range(len(left_out))]
        self.always = [value for value, only in zip(values, left_out) if not only]
        self.in_training = [value for value, only in zip(values, left_out) if only]
        self.gradients = [array for name, array in arrays.items() if name.startswith("dx")]

    @reads("value*", "dx*")
    @writes("total", "dx*")
    def __call__(self) -> None:
        # `always` is not empty: a network rejects a loss without a term in evaluation.
        first, *others = self.always + (self.in_training if self.mode.training else [])
        np.copyto(self.total, first)
        for value in others:
            self.total += value
        # Evaluation skips the kernels of training-only terms, so their gradients hold those of the last step.
        for gradient in () if self.mode.training else self.gradients:
            gradient.fill(0)


def total_of(*losses: Node) -> LossNode:
    """Return the sum of losses, as one loss.

    Raises
    ------
    TypeError
        If an argument is not a loss.
    """
    inputs: list[Node] = []
    terms: list[Term] = []
    for loss in losses:
        for term in _terms(loss):
            own = [loss.inputs[i] for i in term.inputs]
            # By identity: two terms of one prediction share an input, and its gradients are added up.
            inputs += [node for node in own if not any(node is known for known in inputs)]
            numbers = tuple(next(i for i, known in enumerate(inputs) if known is node) for node in own)
            terms.append(replace(term, inputs=numbers))
    return _total(terms, inputs)


def weighted(loss: Node, factor: Any) -> LossNode:
    """Return `factor` times a loss.

    Raises
    ------
    ValueError
        If the factor is not a finite number above 0.
    """
    if isinstance(factor, bool) or not isinstance(factor, Real) or not 0 < float(factor) < math.inf:
        raise ValueError(f"loss: expected a finite number > 0 as its weight, got {factor!r}")
    return _changed(loss, lambda term: replace(term, weight=term.weight * float(factor)))


def training_only(loss: Node) -> LossNode:
    """Return the loss as one that only training includes; for auxiliary predictions, "discarded" at inference time.

    A network rejects a loss without a term in evaluation.

    References
    ----------
    Szegedy et al., "Going deeper with convolutions", CVPR 2015, Section 5.
    """
    return _changed(loss, lambda term: replace(term, training_only=True))


def _terms(loss: Node) -> tuple[Term, ...]:
    if not isinstance(loss, LossNode):
        raise TypeError(f"loss: expected losses to be added, got {getattr(loss, 'layer', loss)!r}")
    if isinstance(loss.layer, TotalLoss):
        return loss.layer.terms
    assert isinstance(loss.layer, Loss)
    return (Term(loss.layer, tuple(range(len(loss.inputs)))),)


def _changed(loss: Node, change: Callable[[Term], Term]) -> LossNode:
    return _total([change(term) for term in _terms(loss)], loss.inputs)


def _total(terms: Sequence[Term], inputs: Sequence[Node]) -> LossNode:
    """Return the sum as a loss with the name of its first named term."""
    return TotalLoss(terms, next((term.layer.name for term in terms if term.layer.name), None))(*inputs)
