"""Schedules of the learning rate: functions of the step, so that a restart needs only the step and a small state.

>>> rate = WarmUp(Cosine(0.1, steps=100, begin=10), steps=10)
>>> [round(rate(s), 4) for s in (0, 9, 10, 55, 100)]
[0.01, 0.1, 0.1, 0.05, 0.0]
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from halograd.errors import UserError
from halograd.registry import Registry
from halograd.schema import LARGEST, Below1, Count, NotNegative, Positive, Table, Text

__all__ = [
    "SCHEDULES",
    "Constant",
    "Cosine",
    "Linear",
    "OneCycle",
    "Plateau",
    "Polynomial",
    "Schedule",
    "ScheduleSettings",
    "StepDecay",
    "TrainingSpan",
    "WarmUp",
    "make_schedule",
    "schedule_of",
]

Epochs = Annotated[NotNegative, Field(le=1e6)]


class ScheduleSettings(Table):
    """``[schedule]``: keys of every schedule, and base class of the settings of your own."""

    kind: Text = "constant"
    """Change of the learning rate after the warm-up: none; multiplied by `factor` at each of `milestones`; half a
    cosine, a power or a straight line down to `final` at the end of training; up and down (``"one_cycle"``); multiplied
    by `factor` whenever validations do not improve (``"plateau"``); or a schedule of your own,
    ``"FILE.py:CLASS"``."""
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
        # For the type checker: this base class takes no arguments.
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

    def follow(self, names: Mapping[str, str | None]) -> None:  # noqa: B027  (optional)
        """Check the names of the scores of validations, each with its better direction; empty: there are none. Local.

        Raises
        ------
        UserError
            If the schedule needs another score.
        """

    def validated(self, scores: Mapping[str, float | None]) -> None:  # noqa: B027  (optional)
        """Take the scores of a validation, which are the same on all ranks. Local. By default the rate ignores them."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain data for checkpoints: what the rate depends on in addition to the step; by default nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027  (optional)
        """Continue from a state of :meth:`state_dict`."""


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
        # In logarithms, because the power itself may overflow.
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
        # Milestones that round to one step count once: `milestones` must increase.
        milestones = sorted({span.steps(m) for m in settings.milestones})
        return cls(settings.learning_rate, tuple(milestones), settings.factor)

    def __call__(self, step: int, group: str = "") -> float:
        return self.rate * self.factor ** bisect_right(self.milestones, step)


class _Decay(Schedule):
    """Schedule from `rate` at step `begin` to `final` at step `steps`; constant before and after."""

    rate: float
    steps: int
    final: float
    begin: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps: expected at least 1, got {self.steps}")
        if self.begin < 0:
            raise ValueError(f"begin: expected at least 0, got {self.begin}")

    @abstractmethod
    def share(self, way: float) -> float:
        """Return the fraction of ``rate - final`` that is left after the fraction `way` of the steps: 1 at 0, 0 at 1.
        """

    def __call__(self, step: int, group: str = "") -> float:
        # `max`: a warm-up of all steps leaves none for the decay.
        way = min(1.0, max(0, step - self.begin) / max(1, self.steps - self.begin))
        return self.final + (self.rate - self.final) * self.share(way)


@SCHEDULES.register
@dataclass(frozen=True)
class Cosine(_Decay):
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

    @classmethod
    def of(cls, settings: Any, span: TrainingSpan) -> Cosine:
        return cls(settings.learning_rate, span.steps(span.epochs), settings.final, span.warm_up(settings))

    def share(self, way: float) -> float:
        return (1 + math.cos(math.pi * way)) / 2


class LinearSettings(ScheduleSettings):
    """``[schedule]`` with ``kind = "linear"``."""

    final: NotNegative = 0.0
    """Learning rate at the end of training."""


class PolynomialSettings(LinearSettings):
    """``[schedule]`` with ``kind = "polynomial"``."""

    power: Positive = 0.9
    """Exponent of the remaining share of the training."""


@SCHEDULES.register
@dataclass(frozen=True)
class Polynomial(_Decay):
    """``final + (rate - final) * (1 - t)^power``: `t` rises from 0 at step `begin` to 1 at step `steps`.

    Attributes
    ----------
    begin
        Number of steps of a warm-up.
    """

    name: ClassVar[str] = "polynomial"
    Settings: ClassVar[type[ScheduleSettings]] = PolynomialSettings

    rate: float
    steps: int
    power: float = 0.9
    final: float = 0.0
    begin: int = 0

    @classmethod
    def of(cls, settings: Any, span: TrainingSpan) -> Polynomial:
        steps = span.steps(span.epochs)
        return cls(settings.learning_rate, steps, settings.power, settings.final, span.warm_up(settings))

    def share(self, way: float) -> float:
        return (1 - way) ** self.power


@SCHEDULES.register
@dataclass(frozen=True)
class Linear(_Decay):
    """Straight line from `rate` at step `begin`, after the warm-up, to `final` at step `steps`."""

    name: ClassVar[str] = "linear"
    Settings: ClassVar[type[ScheduleSettings]] = LinearSettings

    rate: float
    steps: int
    final: float = 0.0
    begin: int = 0

    @classmethod
    def of(cls, settings: Any, span: TrainingSpan) -> Linear:
        return cls(settings.learning_rate, span.steps(span.epochs), settings.final, span.warm_up(settings))

    def share(self, way: float) -> float:
        return 1 - way


class OneCycleSettings(LinearSettings):
    """``[schedule]`` with ``kind = "one_cycle"``; `learning_rate` is its largest rate. It has no warm-up."""

    rise: Below1 = 0.3
    """Share of the training in which the rate rises."""
    start: Below1 = 0.04
    """Fraction of the largest rate at the first step."""

    @model_validator(mode="after")
    def _no_warmup(self) -> OneCycleSettings:
        if self.warmup_epochs:
            raise ValueError(
                f"warmup_epochs: expected 0 with one_cycle, which rises itself, got {self.warmup_epochs:g}"
            )
        return self


@SCHEDULES.register
@dataclass(frozen=True)
class OneCycle(Schedule):
    """Half a cosine up from ``start * rate`` to `rate`, then one down to `final` at the last step, `steps` - 1.

    As torch.optim.lr_scheduler.OneCycleLR, whose `final` is ``rate / 25e4`` (Smith and Topin 2019). Steps after the
    last keep `final`, where torch raises an error.
    """

    name: ClassVar[str] = "one_cycle"
    Settings: ClassVar[type[ScheduleSettings]] = OneCycleSettings

    rate: float
    steps: int
    rise: float = 0.3
    start: float = 0.04
    final: float = 0.0

    @classmethod
    def of(cls, settings: Any, span: TrainingSpan) -> OneCycle:
        steps = span.steps(span.epochs)
        return cls(settings.learning_rate, steps, settings.rise, settings.start, settings.final)

    def __call__(self, step: int, group: str = "") -> float:
        # As in PyTorch, the rise ends one step early: steps count from 0.
        top, last = self.rise * self.steps - 1, self.steps - 1
        # If `rise` is less than a step, the rate falls from the first step on.
        if step < top:
            low, way = self.start * self.rate, 1 - step / top
        else:
            low, way = self.final, min(1.0, (step - max(0.0, top)) / max(1.0, last - max(0.0, top)))
        return low + (self.rate - low) * (1 + math.cos(math.pi * way)) / 2


class PlateauSettings(ScheduleSettings):
    """``[schedule]`` with ``kind = "plateau"``."""

    factor: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Factor that multiplies the rate."""
    patience: Count = 10
    """Number of consecutive validations without improvement after which the rate is multiplied."""
    score: Text = "loss"
    """Score of the validations that has to improve."""
    least: NotNegative = 0.0
    """Smallest learning rate."""


@SCHEDULES.register
@dataclass
class Plateau(Schedule):
    """Learning rate that is multiplied by `factor` after `patience` validations in a row that are no better.

    Validations with an undefined score do not count. A checkpoint contains the state.
    """

    name: ClassVar[str] = "plateau"
    Settings: ClassVar[type[ScheduleSettings]] = PlateauSettings

    rate: float
    factor: float = 0.1
    patience: int = 10
    score: str = "loss"
    least: float = 0.0
    lower: bool = True
    drops: int = 0
    waited: int = 0
    best: float | None = None

    @classmethod
    def of(cls, settings: Any, span: TrainingSpan) -> Plateau:
        return cls(settings.learning_rate, settings.factor, settings.patience, settings.score, settings.least)

    def __call__(self, step: int, group: str = "") -> float:
        # `min`: a `least` above the rate does not raise it.
        return max(min(self.rate, self.least), self.rate * self.factor**self.drops)

    def follow(self, names: Mapping[str, str | None]) -> None:
        known = [name for name, better in names.items() if better is not None]
        if self.score not in known:
            described = f"{self.score!r}" if known else "data.validation = 0"
            expected = f"one of {', '.join(known)}" if known else "held-out samples, whose scores it follows"
            raise UserError(f"schedule.score: expected {expected}, got {described}")
        self.lower = names[self.score] == "lower"

    def validated(self, scores: Mapping[str, float | None]) -> None:
        value = scores.get(self.score)
        if value is None or math.isnan(value):
            return
        if self.best is None or (value < self.best if self.lower else value > self.best):
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            self.drops, self.waited = self.drops + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"score": self.score, "best": self.best, "waited": self.waited, "drops": self.drops}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; if it is for another score, only the rate continues."""
        self.drops = int(state.get("drops", 0))
        if state.get("score") == self.score:
            self.best, self.waited = state["best"], int(state["waited"])


class FunctionSettings(ScheduleSettings):
    """``[schedule]`` of a function or a schedule that a script made."""

    learning_rate: Positive = 1.0
    """Not read: the function returns the rate."""


def schedule_of(function: Callable[[int], float] | Schedule) -> type[Schedule]:
    """Return the class of a schedule that a function of the step, or an object, defines. Local."""

    class Function(Schedule):
        """Schedule of a script."""

        Settings: ClassVar[type[ScheduleSettings]] = FunctionSettings

        @classmethod
        def of(cls, settings: Any, span: TrainingSpan) -> Schedule:
            # A copy, because its state belongs to one run.
            return copy.deepcopy(function) if isinstance(function, Schedule) else cls()

        def __call__(self, step: int, group: str = "") -> float:
            # Checked in every step, because a function may return any number; NaN fails the comparison, too.
            rate = float(function(step))
            if not 0 <= rate <= LARGEST:
                raise UserError(f"schedule: expected a learning rate >= 0 for step {step}, got {rate}")
            return rate

    return Function


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

    def follow(self, names: Mapping[str, str | None]) -> None:
        self.schedule.follow(names)

    def validated(self, scores: Mapping[str, float | None]) -> None:
        self.schedule.validated(scores)

    def state_dict(self) -> dict[str, Any]:
        return self.schedule.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.schedule.load_state_dict(state)


def make_schedule(settings: ScheduleSettings, epochs: int, steps_per_epoch: int) -> Schedule:
    """Make the schedule of ``[schedule]``, with its warm-up; epochs are converted to steps. Local."""
    span = TrainingSpan(epochs, steps_per_epoch)
    schedule = SCHEDULES[settings.kind].of(settings, span)
    steps = span.warm_up(settings)
    return WarmUp(schedule, steps, settings.warmup_start) if steps else schedule
