"""What a loss declares about the inputs that it compares its predictions with, and how predictions are judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from .needs import Shape

__all__ = ["Judgement", "TargetReader"]

#: A layer of some kind.
Some = TypeVar("Some", bound="TargetReader")


@dataclass(frozen=True)
class Judgement:
    """Comparison of predictions with targets.

    Attributes
    ----------
    prediction, target
        Numbers of the inputs of the loss that hold them.
    classes
        Number of classes; None: predictions are numbers, and their differences to the targets are judged.
    threshold
        With two classes: a prediction above it is the class 1; None: the class is the channel of the largest
        prediction.
    ignored
        Class index of positions that do not count.
    probabilities
        Whether predictions are probabilities already, not logits.
    weights
        Number of the input of the loss that holds weights of positions: where a weight is 0, nothing is judged; None:
        there are no weights.
    counter
        Class of a :class:`halograd.training.Counter` of one's own, or a function that makes one; None: those of the
        library count.
    """

    classes: int | None = None
    threshold: float | None = None
    ignored: int | None = None
    prediction: int = 0
    target: int = 1
    probabilities: bool = False
    weights: int | None = None
    counter: Callable[[], Any] | None = None


class TargetReader:
    """Declarations of a layer about its targets, read by data, network and metrics. The default: it reads none. Local.

    Methods take the number of an input, and the sample shapes of all inputs.
    """

    def compares(self, i: int) -> bool:
        """Return whether input `i` is a target only, so that it keeps its digits where activations have 16 bits."""
        return False

    def reads_classes(self, i: int, *shapes: Shape) -> bool:
        """Return whether the target `i` holds class indices, for inputs of these sample shapes."""
        return False

    def weighs(self, i: int) -> bool:
        """Return whether the target `i` holds weights: how much a position counts."""
        return False

    def weights_of(self, i: int, count: int) -> Sequence[int]:
        """Return the numbers of the weights of the target `i`, of `count` inputs: where all are 0, it is absent.

        Empty: every element of it counts.
        """
        return ()

    def counted_classes(self, i: int, *shapes: Shape) -> int:
        """Return the number of classes of input `i` that are counted over the training samples; 0: none are."""
        return 0

    def with_counts(self: Some, counts: Mapping[int, Sequence[int]]) -> Some:
        """Return the layer with the number of occurrences of each class, by input number; it is not modified."""
        return self

    def class_factors(self, i: int) -> Sequence[float]:
        """Return weights of the classes of input `i`, where they follow from counts (`with_counts`); else none."""
        return ()

    def target_range(self, i: int, *shapes: Shape) -> tuple[float, float] | None:
        """Return the least and the largest number that is valid in the target `i`; None: all numbers are."""
        return None

    def ignored_target(self, i: int) -> int | None:
        """Return the number in the target `i` that marks positions which do not count; None: there is none."""
        return None

    def judgements(self, *shapes: Shape) -> Sequence[Judgement]:
        """Return how the predictions that a loss reads are judged; empty: there is nothing to judge."""
        return ()
