"""Which steps of a run are measured, and how spans become times of layers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from halograd.training.step_times import STEPS, StepTimes
from halograd.training.timeline import Timeline

NAMES = ("conv", "conv->sample=2", "dense")  # the second is a redistribution


def executor():
    """All that is looked at of an executor: its steps, and which of them are layers of the network."""
    steps = [SimpleNamespace(name=name) for name in NAMES]
    return SimpleNamespace(
        finish_spans=lambda: None, steps=steps, network=SimpleNamespace(layers={"conv": None, "dense": None})
    )


def run(first: int, last: int, paused: bool = True):
    """A run in which step number n takes n + 1 s in the layers; the steps that were measured, and the result."""
    timeline = Timeline()
    timeline.paused = paused
    times = StepTimes(executor(), timeline, first, last)
    measured = []
    for step in range(first, last):
        times.begin(step)
        measured += [] if timeline.paused else [step]
        for name, share in zip(NAMES, (0.5, 0.25, 0.125)):
            timeline.span(name, "forward", 0.0, share * (step + 1))
        timeline.span("conv (sum)", "backward", 0.0, 0.125 * (step + 1))
        timeline.span("allreduce", "wait", 0.0, 1.0)
        timeline.span("statistics: bn", "wait", 0.0, 2.0)
        timeline.span("update", "update", 0.0, 3.0)
        times.end(step, step + 5.0, 7.0)
        assert timeline.paused is paused
    return measured, times.result()


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [(0, 1, [0]), (0, 2, [1]), (5, 8, [6]), (0, 6, [1, 2, 3, 4]), (10, 40, list(range(19, 19 + STEPS)))],
)
def test_steps_in_the_middle_are_measured(first, last, expected):
    measured, result = run(first, last)
    assert measured == expected and result.steps == len(expected)


def test_a_resumed_run_that_is_over_measures_nothing():
    assert run(4, 4) == ([], None)


def test_spans_become_times_of_layers():
    _, result = run(0, 6)  # of steps 1 to 4 the middle half: 2 and 3, whose layers take 3 s and 4 s
    assert result.layers == {"conv": (0.5 * 3.5, 0.125 * 3.5), "dense": ((0.25 + 0.125) * 3.5, 0.0)}
    assert sum(map(sum, result.layers.values())) == 3.5
    assert result.step_seconds == 7.5 and result.data == 7.0
    assert result.waits == {"allreduce": 1.0, "statistics": 2.0} and result.update == 3.0


def test_a_timeline_that_is_on_stays_on():
    measured, result = run(0, 6, paused=False)
    assert measured == list(range(6)), "somebody else wants all steps"
    assert result.steps == 4 and sum(map(sum, result.layers.values())) == 3.5
