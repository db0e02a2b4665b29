"""What a loss says of the inputs that it compares its predictions with, and of how these are judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from .costs import Judgement

__all__ = ["Shape", "TargetReader"]

#: Of one sample: ``(*spatial, C)``.
Shape = tuple[int, ...]
#: A layer of some kind.
Some = TypeVar("Some", bound="TargetReader")


class TargetReader:
    """Of any layer: what it says of targets, for data, network and metrics to ask. Here: it reads none. Local.

    Inputs are asked for by their number, with the sample shapes of all.
    """

    def compares(self, i: int) -> bool:
        """Whether input `i` is only compared with, so that it keeps its digits where activations have 16 bits."""
        return False

    def reads_classes(self, i: int, *shapes: Shape) -> bool:
        """Whether input `i`, which is compared with, holds numbers of classes; of inputs of these sample shapes."""
        return False

    def weighs(self, i: int) -> bool:
        """Whether input `i`, which is compared with, holds weights of what is compared: how much a position counts."""
        return False

    def counted_classes(self, i: int, *shapes: Shape) -> int:
        """Number of classes of input `i` that are counted over the training samples before it computes; 0: none are."""
        return 0

    def with_counts(self: Some, counts: Mapping[int, Sequence[int]]) -> Some:
        """The layer with how often each class occurs in its inputs, by their number; it is not modified."""
        return self

    def class_factors(self, i: int) -> Sequence[float]:
        """Weights of the classes of input `i`, where they follow from counts (`with_counts`); else none."""
        return ()

    def target_range(self, i: int, *shapes: Shape) -> tuple[float, float] | None:
        """Least and largest number that makes sense in input `i`, which is compared with; None: all do."""
        return None

    def ignored_target(self, i: int) -> int | None:
        """Number in input `i`, which is compared with, that marks positions which do not count; None: none does."""
        return None

    def judgements(self, *shapes: Shape) -> Sequence[Judgement]:
        """How the predictions that a loss reads are judged; empty: there is nothing to judge."""
        return ()
