"""Declarations of a loss about its targets, and the comparison of predictions with targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from .needs import Shape

__all__ = ["MetricSpec", "TargetReader"]

#: Type variable of a layer class.
Reader = TypeVar("Reader", bound="TargetReader")


@dataclass(frozen=True)
class MetricSpec:
    """Comparison of predictions with targets, for metrics.

    Attributes
    ----------
    prediction, target
        Indices of the loss's inputs that hold prediction and target.
    classes
        Number of classes; None: predictions are numbers, and metrics use their differences from the targets.
    threshold
        Threshold with two classes: a prediction above it is class 1. None: the class is the channel with the largest
        prediction.
    ignored
        Class index of positions that are ignored; None: there is none.
    probabilities
        Whether predictions are probabilities already, not logits.
    weights
        Index of the loss's input that holds weights of positions: positions of weight 0 are ignored. None: there are
        no weights.
    members
        Number of members of an ensemble, which the channels of the prediction hold one after the other; most metrics
        compare their mean.
    metric
        A subclass of :class:`halograd.training.Metric`, or a function that returns an instance; None: the library's
        metrics.
    """

    classes: int | None = None
    threshold: float | None = None
    ignored: int | None = None
    prediction: int = 0
    target: int = 1
    probabilities: bool = False
    weights: int | None = None
    members: int = 1
    metric: Callable[[], Any] | None = None


class TargetReader:
    """Declarations of a layer about its targets, for data, network and metrics. By default the layer has no targets.
    Local.

    `i` is the index of an input, `shapes` the sample shapes of all inputs.
    """

    def compares(self, i: int) -> bool:
        """Return whether input `i` is only a target, which stays in float32 if activations have 16 bits."""
        return False

    def reads_classes(self, i: int, *shapes: Shape) -> bool:
        """Return whether the target `i` holds class indices, for inputs of these sample shapes."""
        return False

    def weighs(self, i: int) -> bool:
        """Return whether the target `i` holds weights of positions."""
        return False

    def weights_of(self, i: int, count: int) -> Sequence[int]:
        """Return the indices of the inputs that are weights of the target `i`; there are `count` inputs.

        Where all these weights are 0, the target is absent. Empty: every element of the target counts.
        """
        return ()

    def counted_classes(self, i: int, *shapes: Shape) -> int:
        """Return the number of classes to count in input `i` over the training samples; 0: nothing is counted."""
        return 0

    def with_counts(self: Reader, counts: Mapping[int, Sequence[int]]) -> Reader:
        """Return the layer with the number of occurrences of each class, by input index; a copy if it uses them."""
        return self

    def class_factors(self, i: int) -> Sequence[float]:
        """Return the class weights of input `i` if they are computed from counts (`with_counts`); otherwise ``()``."""
        return ()

    def target_range(self, i: int, *shapes: Shape) -> tuple[float, float] | None:
        """Return the smallest and the largest valid number of the target `i`; None: all numbers are valid."""
        return None

    def ignored_target(self, i: int) -> int | None:
        """Return the number in the target `i` that marks ignored positions; None: there is none."""
        return None

    def comparisons(self, *shapes: Shape) -> Sequence[MetricSpec]:
        """Return the comparisons of a loss's predictions with its targets; empty if there are none."""
        return ()
