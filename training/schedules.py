"""Schedules of the learning rate: pure functions of the step, so that a restart needs only the step.

>>> rate = WarmUp(Cosine(0.1, steps=100, begin=10), steps=10)
>>> [round(rate(s), 4) for s in (0, 9, 10, 55, 100)]
[0.01, 0.1, 0.1, 0.05, 0.0]
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from halograd.registry import Registry
from halograd.schema import LARGEST, Below1, NotNegative, Positive, Table, Text

__all__ = [
    "SCHEDULES",
    "Constant",
    "Cosine",
    "Schedule",
    "ScheduleSettings",
    "StepDecay",
    "TrainingSpan",
    "WarmUp",
    "make_schedule",
]

Epochs = Annotated[NotNegative, Field(le=1e6)]


class ScheduleSettings(Table):
    """``[schedule]``: keys of every schedule, and base class of the settings of your own."""

    kind: Text = "constant"
    """Change of the learning rate: none; multiplied by `factor` at each of `milestones`; half a cosine from the end of
    the warm-up to the end of training; or a schedule of your own."""
    learning_rate: Positive
    """Learning rate after the warm-up."""
    warmup_epochs: Epochs = 0.0
    """Duration of the warm-up, in which the rate rises linearly."""
    warmup_start: Below1 = 0.0
    """Fraction of the rate at the beginning of the warm-up."""
    factors: dict[Text, NotNegative] = Field(default_factory=dict)
    """Factors that multiply the rate, by layer or pattern of layers: ``{"encoder/*" = 0.1}``. If several patterns
    match, the last one applies."""


@dataclass(frozen=True)
class TrainingSpan:
    """Length of a training.

    Attributes
    ----------
    epochs
        Number of epochs.
    steps_per_epoch
        Number of updates per epoch.
    """

    epochs: int
    steps_per_epoch: int

    def steps(self, epochs: float) -> int:
        """Return the number of steps, at least 1, in a number of epochs, which may be a fraction."""
        return max(1, round(epochs * self.steps_per_epoch))

    def warm_up(self, settings: ScheduleSettings) -> int:
        """Return the number of steps of the warm-up; 0: there is none."""
        return self.steps(settings.warmup_epochs) if settings.warmup_epochs > 0 else 0


class Schedule(ABC):
    """Learning rate as a function of the step and of the group of layers. Local, the same on all ranks.

    A subclass of your own takes its settings and the span of the training, and defines ``__call__``. The warm-up and
    the factors of the table ``[schedule]`` multiply its rate.
    """

    #: Name in the configuration, for registered classes.
    name: ClassVar[str] = ""
    #: Class of the settings.
    Settings: ClassVar[type[ScheduleSettings]] = ScheduleSettings

    @classmethod
    def of(cls, settings: Any, span: TrainingSpan) -> Schedule:
        """Return the schedule of a table ``[schedule]``: ``cls(settings, span)``."""
        make: Any = cls
        return make(settings, span)

    @abstractmethod
    def __call__(self, step: int, group: str = "") -> float:
        """Return the learning rate.

        Parameters
        ----------
        step
            Number of the update, 0, 1, ...
        group
            Layer, or pattern of layers, with a factor; empty: layers without a factor. The factor multiplies the
            returned rate.
        """


#: Schedules by name, or by ``"FILE.py:CLASS"``.
SCHEDULES: Registry[Schedule] = Registry("schedule", Schedule, "schedule.kind")


class DecaySettings(ScheduleSettings):
    """``[schedule]``: the learning rate over the epochs; epochs may be fractions."""

    milestones: Annotated[list[Annotated[Epochs, Field(gt=0)]], Field(max_length=100)] = Field(default_factory=list)
    """Epochs at which the rate is multiplied by `factor`."""
    factor: Positive = 0.1
    """Factor that multiplies the rate at a milestone."""
    final: NotNegative = 0.0
    """Learning rate at the end of a cosine."""

    @model_validator(mode="after")
    def _milestones(self) -> DecaySettings:
        if self.kind == StepDecay.name and not self.milestones:
            raise ValueError("milestones: expected the epochs at which the rate drops, got none")
        if self.milestones != sorted(set(self.milestones)):
            raise ValueError(f"milestones: expected rising epochs, got {self.milestones}")
        if math.log10(self.learning_rate) + len(self.milestones) * math.log10(self.factor) > math.log10(LARGEST):
            raise ValueError(f"factor: expected rates of at most {LARGEST:g} at all milestones, got {self.factor:g}")
        return self


@SCHEDULES.register
@dataclass(frozen=True)
class Constant(Schedule):
    """Constant learning rate."""

    name: ClassVar[str] = "constant"
    Settings: ClassVar[type[ScheduleSettings]] = DecaySettings

    rate: float

    @classmethod
    def of(cls, settings: Any, span: TrainingSpan) -> Constant:
        return cls(settings.learning_rate)

    def __call__(self, step: int, group: str = "") -> float:
        return self.rate


@SCHEDULES.register
@dataclass(frozen=True)
class StepDecay(Schedule):
    """Learning rate that is multiplied by `factor` at each milestone.

    Attributes
    ----------
    milestones
        Increasing steps, from each of which one more factor applies.
    """

    name: ClassVar[str] = "step"
    Settings: ClassVar[type[ScheduleSettings]] = DecaySettings

    rate: float
    milestones: tuple[int, ...]
    factor: float = 0.1

    def __post_init__(self) -> None:
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ValueError(f"milestones: expected rising steps, got {self.milestones}")

    @classmethod
    def of(cls, settings: Any, span: TrainingSpan) -> StepDecay:
        milestones = sorted({span.steps(m) for m in settings.milestones})
        return cls(settings.learning_rate, tuple(milestones), settings.factor)

    def __call__(self, step: int, group: str = "") -> float:
        return self.rate * self.factor ** bisect_right(self.milestones, step)


@SCHEDULES.register
@dataclass(frozen=True)
class Cosine(Schedule):
    """Half a cosine from `rate` at step `begin` to `final` at step `steps`; constant before and after.

    The formula is Eq. 5 of Loshchilov and Hutter 2017, without restarts.

    Attributes
    ----------
    begin
        Number of steps of a warm-up: with a cosine that begins at step 0, a warm-up never reaches `rate`.
    """

    name: ClassVar[str] = "cosine"
    Settings: ClassVar[type[ScheduleSettings]] = DecaySettings

    rate: float
    steps: int
    final: float = 0.0
    begin: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps: expected at least 1, got {self.steps}")
        if self.begin < 0:
            raise ValueError(f"begin: expected at least 0, got {self.begin}")

    @classmethod
    def of(cls, settings: Any, span: TrainingSpan) -> Cosine:
        return cls(settings.learning_rate, span.steps(span.epochs), settings.final, span.warm_up(settings))

    def __call__(self, step: int, group: str = "") -> float:
        way = min(1.0, max(0, step - self.begin) / max(1, self.steps - self.begin))
        return self.final + (self.rate - self.final) * (1 + math.cos(math.pi * way)) / 2


@dataclass(frozen=True)
class WarmUp(Schedule):
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

    def __call__(self, step: int, group: str = "") -> float:
        factor = self.start + (1 - self.start) * min(1.0, (step + 1) / self.steps)
        return factor * (self.schedule(step, group) if group else self.schedule(step))


def make_schedule(settings: ScheduleSettings, epochs: int, steps_per_epoch: int) -> Schedule:
    """Make the schedule of ``[schedule]``, with its warm-up; epochs are converted to steps. Local."""
    span = TrainingSpan(epochs, steps_per_epoch)
    schedule = SCHEDULES[settings.kind].of(settings, span)
    steps = span.warm_up(settings)
    return WarmUp(schedule, steps, settings.warmup_start) if steps else schedule
