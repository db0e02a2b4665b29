"""What steps took, layer by layer: measured over a few steps in the middle of a run, to be held against a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Protocol

from ..layers.strategy import Strategy
from .executor import Executor
from .timeline import Timeline, kind_of, write_trace

if TYPE_CHECKING:
    from .epochs import TrainingRun
    from .log import RunLog
    from .session import Session

__all__ = ["Measured", "RunPlan", "StepTimes", "report_plan", "report_times"]

#: Steps that are measured.
STEPS = 12


@dataclass(frozen=True)
class Measured:
    """Means over the middle half of the measured steps, as rank 0 saw them: it takes part in every layer.

    The same steps for all, so that the parts add up to the step; those that were fastest or slowest are left out.

    Attributes
    ----------
    steps
        How many were measured.
    step_seconds
        Of a whole step, data apart [s].
    layers
        Layer -> forward and backward [s], with what was waited for inside and with the redistribution of its inputs.
    waits
        Kind of communication -> what was waited for, inside layers and outside [s].
    update
        The optimizer [s].
    data
        Until the batch was there [s].
    """

    steps: int
    step_seconds: float
    layers: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    waits: Mapping[str, float] = field(default_factory=dict)
    update: float = 0.0
    data: float = 0.0


class RunPlan(Protocol):
    """What a run follows, and is held against at its end."""

    @property
    def strategy(self) -> Strategy:
        """How layers are cut."""
        ...

    def compare(self, measured: Measured) -> str:
        """Predicted against measured, in lines."""
        ...

    def record(self, measured: Measured) -> dict[str, object]:
        """The same as plain data, for the log."""
        ...


class StepTimes:
    """Turns a recorder on for a few steps in the middle of a run. Local.

    Parameters
    ----------
    executor
        Built with `timeline` as its recorder.
    timeline
        Left on if it was (somebody else wants all steps), else paused but for the measured steps.
    first, last
        Numbers of the first step of the run, and of the one after its last.
    """

    def __init__(self, executor: Executor, timeline: Timeline, first: int, last: int) -> None:
        count = last - first
        measured = max(0, min(STEPS, count - 2)) or min(1, count)  # the first step and the last are not like others
        self.begin_at = first + (count - measured) // 2 + (count == 2)
        self.end_at = self.begin_at + measured
        self._executor, self._timeline, self._owned = executor, timeline, timeline.paused
        self._places = _places(executor)
        self._before: dict[tuple[str, str], float] = {}
        self._steps: list[dict[tuple[str, str], float]] = []
        self._seconds: list[tuple[float, float]] = []

    def begin(self, step: int) -> None:
        """Before a step."""
        if self.begin_at <= step < self.end_at:
            self._timeline.paused = False
            self._before = self._sums()

    def end(self, step: int, seconds: float, data: float) -> None:
        """After a step, with the time that it [s] and the wait for its data took [s]."""
        if self.begin_at <= step < self.end_at:
            self._executor.finish_spans()
            self._timeline.paused = self._owned
            now = self._sums()
            self._steps.append({key: value - self._before.get(key, 0.0) for key, value in now.items()})
            self._seconds.append((seconds, data))

    def result(self) -> Measured | None:
        """What was measured; None if no step was."""
        if not self._steps:
            return None
        kept = _middle([seconds for seconds, _ in self._seconds])
        steps = [self._steps[i] for i in kept]

        def mean(name: str, category: str) -> float:
            return fmean(step.get((name, category), 0.0) for step in steps)

        layers: dict[str, tuple[float, float]] = {}
        for (name, category), place in self._places.items():
            forward, backward = layers.get(place, (0.0, 0.0))
            seconds = mean(name, category)
            forward, backward = (
                forward + seconds * (category == "forward"),
                backward + seconds * (category == "backward"),
            )
            layers[place] = (forward, backward)
        waits: dict[str, float] = {}
        for name, category in {key for step in steps for key in step}:
            if category == "wait":
                waits[kind_of(name)] = waits.get(kind_of(name), 0.0) + mean(name, category)
        return Measured(
            len(self._steps),
            fmean(self._seconds[i][0] for i in kept),
            layers,
            dict(sorted(waits.items())),
            mean("update", "update"),
            fmean(self._seconds[i][1] for i in kept),
        )

    def _sums(self) -> dict[tuple[str, str], float]:
        return {key: phase.seconds for key, phase in list(self._timeline.phases.items())}


def _middle(values: Sequence[float]) -> list[int]:
    """Places of the middle half of some values.

    >>> _middle([5.0, 1.0, 2.0, 9.0])
    [2, 0]
    """
    order = sorted(range(len(values)), key=values.__getitem__)
    cut = len(order) // 4
    return order[cut : len(order) - cut]


def _places(executor: Executor) -> dict[tuple[str, str], str]:
    """Name and category of a span -> the layer it counts for: of a redistribution, the layer behind it."""
    found: dict[tuple[str, str], str] = {}
    waiting: list[str] = []
    for step in executor.steps:
        waiting.append(step.name)
        if step.name not in executor.network.layers:
            continue
        for name in waiting:
            for label in (name, f"{name} (sum)", f"{name} (moved)"):
                found[label, "forward"] = found[label, "backward"] = step.name
        waiting.clear()
    return found


def report_times(session: Session, log: RunLog, steps: int, directory: Path) -> None:
    """Timeline and table of phases of this run, if they were asked for. Collective."""
    timeline = session.timeline
    if timeline is None or not steps or not session.config.output.timeline:
        return
    session.executor.finish_spans()
    write_trace(timeline, session.comm, directory / "timeline.json")
    log.say(timeline.table(steps))


def report_plan(plan: RunPlan | None, run: TrainingRun, log: RunLog) -> None:
    """What the plan predicted, beside what was measured. Local."""
    measured = None if plan is None or run.step_times is None else run.step_times.result()
    if plan is not None and measured is not None:
        log.say(plan.compare(measured))
        log.write("prediction", step=run.optimizer.step, **plan.record(measured))
