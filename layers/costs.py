"""What a layer says of itself for those who price it and judge its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Judgement", "Passes"]


@dataclass(frozen=True)
class Passes:
    """How often the kernels of a layer pass over all inputs (x) and over the output (y), in memory.

    Weights are read once by every kernel, and their gradient is written once.

    Attributes
    ----------
    forward, data
        Passes ``(x, y)`` of the forward kernels, and of the gradient of the inputs (x stands for dx, y for dy too).
    others
        Passes over each further input, forward and backward; None: as many as over the first.
    """

    forward: tuple[float, float] = (1, 1)
    data: tuple[float, float] = (1, 1)
    others: tuple[float, float] | None = None

    def inputs(self, backward: bool, sizes: Sequence[int]) -> float:
        """What is read and written of inputs of these sizes, in the unit of the sizes."""
        first = (self.data if backward else self.forward)[0]
        return first * sizes[0] + (first if self.others is None else self.others[backward]) * sum(sizes[1:])


@dataclass(frozen=True)
class Judgement:
    """How predictions are compared with targets.

    Attributes
    ----------
    prediction, target
        Which inputs of the loss they are.
    classes
        Number of classes; None: predictions are numbers, of which differences are taken.
    threshold
        Of two classes: a prediction above it means yes; None: the class is the channel of the largest prediction.
    ignored
        Class index of positions that do not count.
    probabilities
        Whether predictions are probabilities already, not logits.
    weights
        Which input of the loss weighs positions: where it is 0, nothing is judged; None: none does.
    """

    classes: int | None = None
    threshold: float | None = None
    ignored: int | None = None
    prediction: int = 0
    target: int = 1
    probabilities: bool = False
    weights: int | None = None
