"""Schedules of the learning rate: pure functions of the step, so that a restart needs only the step.

>>> rate = WarmUp(Cosine(0.1, steps=100, begin=10), steps=10)
>>> [round(rate(s), 4) for s in (0, 9, 10, 55, 100)]
[0.01, 0.1, 0.1, 0.05, 0.0]
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Constant", "Cosine", "Schedule", "StepDecay", "WarmUp"]

#: Learning rate of update number ``step`` (0, 1, ...).
Schedule = Callable[[int], float]


@dataclass(frozen=True)
class Constant:
    """Constant learning rate."""

    rate: float

    def __call__(self, step: int) -> float:
        return self.rate


@dataclass(frozen=True)
class StepDecay:
    """Learning rate that is multiplied by `factor` at each milestone.

    Attributes
    ----------
    milestones
        Increasing steps, from each of which one more factor applies.
    """

    rate: float
    milestones: tuple[int, ...]
    factor: float = 0.1

    def __post_init__(self) -> None:
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ValueError(f"milestones: expected rising steps, got {self.milestones}")

    def __call__(self, step: int) -> float:
        return self.rate * self.factor ** bisect_right(self.milestones, step)


@dataclass(frozen=True)
class Cosine:
    """Half a cosine from `rate` at step `begin` to `final` at step `steps`; constant before and after.

    (Loshchilov and Hutter 2017, Eq. 5, without restarts.)

    Attributes
    ----------
    begin
        Number of steps of a warm-up: with a cosine that begins at step 0, a warm-up never reaches `rate`.
    """

    rate: float
    steps: int
    final: float = 0.0
    begin: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps: expected at least 1, got {self.steps}")
        if self.begin < 0:
            raise ValueError(f"begin: expected at least 0, got {self.begin}")

    def __call__(self, step: int) -> float:
        way = min(1.0, max(0, step - self.begin) / max(1, self.steps - self.begin))
        return self.final + (self.rate - self.final) * (1 + math.cos(math.pi * way)) / 2


@dataclass(frozen=True)
class WarmUp:
    """Another schedule, multiplied by a factor that rises linearly to 1 over the first `steps` steps.

    The inner schedule counts from step 0 too, so its milestones do not move (Goyal et al. 2017, Section 2.2); a cosine
    needs the same number as its `begin`. Step 0 has the factor ``start + (1 - start) / steps``, so that every step has
    an effect.
    """

    schedule: Schedule
    steps: int
    start: float = 0.0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps: expected at least 1, got {self.steps}")

    def __call__(self, step: int) -> float:
        factor = self.start + (1 - self.start) * min(1.0, (step + 1) / self.steps)
        return factor * self.schedule(step)
