"""Times of layers, measured over a few steps in the middle of a run, and their comparison with a plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Protocol

from ..layers.strategy import Strategy
from .executor import Executor
from .timeline import Timeline, kind_of

__all__ = ["Measured", "RunPlan", "StepTimes"]

#: Number of measured steps.
STEPS = 12


@dataclass(frozen=True)
class Measured:
    """Mean times on rank 0, which takes part in every layer, over the middle half of the measured steps.

    All means are over the same steps, so that times of parts can be added. With four or more measured steps, the
    fastest and the slowest quarter are left out.

    Attributes
    ----------
    steps
        Number of measured steps, those that are left out included.
    step_seconds
        Time of a whole step without its data [s].
    layers
        Times of each layer: forward, backward, and operations of the forward pass that the backward pass repeats [s],
        including waits in the layer and the redistribution of its inputs.
    waits
        Time of waits for each kind of communication, inside and outside of layers [s].
    update
        Time of the optimizer [s].
    data
        Wait for the batch [s].
    """

    steps: int
    step_seconds: float
    layers: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    waits: Mapping[str, float] = field(default_factory=dict)
    update: float = 0.0
    data: float = 0.0


class RunPlan(Protocol):
    """Protocol of the plan that a run follows, with which the run is compared at the end."""

    @property
    def strategy(self) -> Strategy:
        """Strategy that the plan chose."""
        ...

    def compare(self, measured: Measured) -> str:
        """Return a string of several lines that compares predicted and measured times."""
        ...

    def record(self, measured: Measured) -> dict[str, object]:
        """Return the comparison as plain data, for the log."""
        ...


class StepTimes:
    """Recorder of a few steps in the middle of a run. Local.

    Parameters
    ----------
    executor
        Executor that was built with `timeline` as its recorder.
    timeline
        Timeline. If it is on, it stays on (all steps are recorded); else it is paused outside the measured steps.
    first, last
        Number of the first step of the run, and of the step after its last step.
    """

    def __init__(self, executor: Executor, timeline: Timeline, first: int, last: int) -> None:
        count = last - first
        measured = max(0, min(STEPS, count - 2)) or min(1, count)  # the first and the last step are atypical
        # If there are only two steps, the second one is measured: the first one is slower.
        self.begin_at = first + (count - measured) // 2 + (count == 2)
        self.end_at = self.begin_at + measured
        self._executor, self._timeline, self._owned = executor, timeline, timeline.paused
        self._layers_of_spans = _layers_of_spans(executor)
        self._before: dict[tuple[str, str], float] = {}
        self._steps: list[dict[tuple[str, str], float]] = []
        self._seconds: list[tuple[float, float]] = []

    def begin(self, step: int) -> None:
        """Start recording, before a measured step; no-op before others."""
        if self.begin_at <= step < self.end_at:
            self._timeline.paused = False
            self._before = self._sums()

    def end(self, step: int, seconds: float, data: float) -> None:
        """Record a measured step: its time [s], and the wait for its data [s]; no-op after others."""
        if self.begin_at <= step < self.end_at:
            # Waits for a device, so that no time of this step is missing.
            self._executor.spans.finish()
            self._timeline.paused = self._owned
            now = self._sums()
            self._steps.append({key: value - self._before.get(key, 0.0) for key, value in now.items()})
            self._seconds.append((seconds, data))

    def result(self) -> Measured | None:
        """Compute the means; None if no step was measured."""
        if not self._steps:
            return None
        kept = _middle([seconds for seconds, _ in self._seconds])
        steps = [self._steps[i] for i in kept]

        def mean(name: str, category: str) -> float:
            return fmean(step.get((name, category), 0.0) for step in steps)

        layers, waits = defaultdict[tuple[str, str], float](float), defaultdict[str, float](float)
        for (name, category), layer in self._layers_of_spans.items():
            # A layer has several spans: its own, and those of the redistributions of its inputs.
            layers[layer, category] += mean(name, category)
        for name, category in {key for step in steps for key in step}:
            if category == "wait":
                waits[kind_of(name)] += mean(name, category)
        return Measured(
            len(self._steps),
            fmean(self._seconds[i][0] for i in kept),
            # A list of the keys, because a missing key is added when it is read.
            {name: (layers[name, "forward"], layers[name, "backward"], layers[name, "again"]) for name, _ in [*layers]},
            dict(sorted(waits.items())),
            mean("update", "update"),
            fmean(self._seconds[i][1] for i in kept),
        )

    def _sums(self) -> dict[tuple[str, str], float]:
        # A list, because the prefetch thread may add phases meanwhile.
        return {key: phase.seconds for key, phase in list(self._timeline.phases.items())}


def _middle(values: Sequence[float]) -> list[int]:
    """Return the indices of the values, in increasing order of the values, without the lowest and highest quarter.

    >>> _middle([5.0, 1.0, 2.0, 9.0])
    [2, 0]
    """
    order = sorted(range(len(values)), key=values.__getitem__)
    cut = len(order) // 4
    return order[cut : len(order) - cut]


def _layers_of_spans(executor: Executor) -> dict[tuple[str, str], str]:
    """Map name and category of a span to its layer; a redistribution belongs to the layer that reads its result."""
    layers_of_spans: dict[tuple[str, str], str] = {}
    waiting: list[str] = []
    for step in executor.program.steps:
        # Steps before a layer redistribute its inputs.
        waiting.append(step.name)
        if step.name not in executor.network.layers:
            continue
        for name in waiting:
            for label in (name, f"{name} (sum)", f"{name} (moved)"):
                layers_of_spans[label, "forward"] = layers_of_spans[label, "backward"] = step.name
            layers_of_spans[f"{name} (again)", "again"] = step.name
        waiting.clear()
    return layers_of_spans
