"""Resampling of one axis: which inputs an output reads, and with which weights. Pure arithmetic, exact.

Positions are rational numbers, so nothing depends on rounding or on how an axis is cut. With a ratio of
p inputs per q outputs, outputs that are q apart read inputs that are p apart with the same weights: a block
of outputs is a few strided *runs*, each one multiply-add of strided views::

    scale 2, linear        outputs   0    1  2   3  4   5  6   7
                           inputs    0   0 1 0 1 1 2 1 2 2 3 ...
                           weights   1   3:1 1:3 3:1 1:3 ...     runs: {0}, {1, 3, 5}, {2, 4, 6}, {7}
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

__all__ = ["MODES", "Resampled", "Resampling", "Run"]

MODES = ("nearest", "nearest-exact", "linear")


@dataclass(frozen=True)
class Run:
    """`count` outputs ``start + k * step``; each is the sum over `taps` of ``weight * x[first + k * input_step]``.

    Attributes
    ----------
    taps
        ``(first, weight)``: one or two.
    """

    start: int
    step: int
    count: int
    input_step: int
    taps: tuple[tuple[int, float], ...]

    def outputs(self, origin: int = 0) -> slice:
        """The outputs in an array that begins at global `origin`."""
        first = self.start - origin
        return slice(first, first + (self.count - 1) * self.step + 1, self.step)

    def inputs(self, tap: int, origin: int = 0) -> slice:
        """The inputs of one tap in an array that begins at global `origin`."""
        first = self.taps[tap][0] - origin
        return slice(first, first + (self.count - 1) * self.input_step + 1, self.input_step)


@dataclass(frozen=True)
class Resampling:
    """One axis of `size` inputs and `outputs` outputs, `ratio` inputs per output.

    Attributes
    ----------
    mode
        ``"linear"``: position ``(o + 1/2) * ratio - 1/2`` between two inputs (half-pixel centres, corners not
        aligned), clamped at the ends. ``"nearest-exact"``: the input under the centre, ``floor((o + 1/2) * ratio)``.
        ``"nearest"``: ``floor(o * ratio)``. All as in torch.
    """

    size: int
    outputs: int
    ratio: Fraction
    mode: str

    def taps(self, o: int) -> tuple[tuple[int, float], ...]:
        """``(input, weight)`` of one output, one or two, in rising order."""
        last = self.size - 1
        if self.mode == "nearest":
            return ((min(int(o * self.ratio), last), 1.0),)
        centre = (o + Fraction(1, 2)) * self.ratio
        if self.mode == "nearest-exact":
            return ((min(int(centre), last), 1.0),)
        position = max(Fraction(0), centre - Fraction(1, 2))
        first = min(int(position), last)
        weight = position - first
        if first == last or not weight:
            return ((first, 1.0),)
        return ((first, float(1 - weight)), (first + 1, float(weight)))

    def input_range(self, start: int, stop: int) -> tuple[int, int]:
        """Inputs that the outputs ``[start, stop)`` read, as a half-open range; always inside the array."""
        if stop <= start:
            return 0, 0
        return self.taps(start)[0][0], self.taps(stop - 1)[-1][0] + 1

    def runs(self, start: int, stop: int) -> list[Run]:
        """The outputs ``[start, stop)`` as runs, each output in exactly one."""
        step, input_step = self.ratio.denominator, self.ratio.numerator
        found = []
        for phase in range(start, min(stop, start + step)):
            run: Run | None = None
            for o in range(phase, stop, step):
                taps = self.taps(o)
                if run is not None and taps == _next(run):
                    run = Run(run.start, step, run.count + 1, input_step, run.taps)
                    continue
                if run is not None:
                    found.append(run)
                run = Run(o, step, 1, input_step, taps)
            if run is not None:
                found.append(run)
        return found


def _next(run: Run) -> tuple[tuple[int, float], ...]:
    """The taps that would continue the run."""
    return tuple((first + run.count * run.input_step, weight) for first, weight in run.taps)


@dataclass(frozen=True)
class Resampled:
    """One axis of a block: the outputs ``[start, stop)``, of inputs in an array that begins at `origin`."""

    resampling: Resampling
    start: int
    stop: int
    origin: int = 0

    @property
    def runs(self) -> list[Run]:
        """The outputs as runs."""
        return self.resampling.runs(self.start, self.stop)

    @property
    def longest(self) -> int:
        """Outputs of the longest run that has two taps."""
        return max((run.count for run in self.runs if len(run.taps) > 1), default=0)

    def input_range(self) -> tuple[int, int]:
        """Inputs that are read, as positions in the array."""
        first, last = self.resampling.input_range(self.start, self.stop)
        return first - self.origin, last - self.origin

    def table(self) -> tuple[Any, Any]:
        """Per output the first of two neighboring inputs, as a position in the array, and their weights
        ``(outputs, 2)``; host arrays."""
        taps = [self.resampling.taps(o) for o in range(self.start, self.stop)]
        weights = [[w for _, w in some] + [0.0] * (2 - len(some)) for some in taps]
        return np.array([some[0][0] - self.origin for some in taps], np.int32), np.array(weights).reshape(-1, 2)
