"""Tests of schedules: values by hand, independent of earlier steps."""

import math

import pytest

from halograd.errors import UserError
from halograd.training.schedules import (
    SCHEDULES,
    Constant,
    Cosine,
    DecaySettings,
    Linear,
    OneCycle,
    Plateau,
    Polynomial,
    StepDecay,
    WarmUp,
    make_schedule,
)


def test_constant():
    assert [Constant(0.3)(s) for s in (0, 7, 10**9)] == [0.3] * 3


def test_step():
    rate = StepDecay(1.0, (3, 5), 0.1)
    assert [rate(s) for s in (0, 2, 3, 4, 5, 99)] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


def test_cosine():
    rate = Cosine(1.0, 8, final=0.2)
    assert rate(0) == 1.0
    assert rate(2) == pytest.approx(0.2 + 0.4 * (1 + math.cos(math.pi / 4)))
    assert rate(4) == pytest.approx(0.6)
    assert rate(8) == rate(800) == pytest.approx(0.2)


def test_warm_up_multiplies():
    rate = WarmUp(StepDecay(2.0, (3,), 0.5), steps=4, start=0.2)
    assert [rate(s) for s in range(6)] == pytest.approx([0.8, 1.2, 1.6, 1.0, 1.0, 1.0])


def test_warm_up_of_warm_up():
    rate = WarmUp(WarmUp(Constant(1.0), 2), 4)
    assert [rate(s) for s in range(5)] == pytest.approx([0.5 * 0.25, 0.5, 0.75, 1.0, 1.0])


def test_cosine_after_a_warm_up():
    config = DecaySettings(kind="cosine", learning_rate=0.4, warmup_epochs=2, warmup_start=0.1, final=0.1)
    rate = make_schedule(config, epochs=10, steps_per_epoch=2)
    assert [rate(s) for s in range(5)] == pytest.approx([0.13, 0.22, 0.31, 0.4, 0.4])
    assert rate(5) < rate(4) == max(map(rate, range(30)))
    assert [rate(s) for s in (12, 20, 99)] == pytest.approx([0.25, 0.1, 0.1])


@pytest.mark.parametrize("steps", [3, 4, 9])
def test_warm_up_to_the_end_of_a_cosine(steps):
    rate = WarmUp(Cosine(1.0, 4, 0.5, begin=steps), steps)
    assert [rate(s) for s in range(steps)] == pytest.approx([(s + 1) / steps for s in range(steps)])
    assert rate(steps + 1) == pytest.approx(0.5)


def test_no_memory():
    rate = WarmUp(Cosine(0.1, 50, begin=5), 5)
    forward = [rate(s) for s in range(60)]
    assert [rate(s) for s in reversed(range(60))] == forward[::-1]


@pytest.mark.parametrize("make", [lambda: Cosine(1.0, 0), lambda: WarmUp(Constant(1.0), 0)])
def test_no_steps(make):
    with pytest.raises(ValueError, match="steps: expected at least 1, got 0"):
        make()


def test_negative_begin():
    with pytest.raises(ValueError, match="begin: expected at least 0, got -1"):
        Cosine(1.0, 4, begin=-1)


def test_falling_milestones():
    with pytest.raises(ValueError, match=r"milestones: .*rising.*, got \(5, 3\)"):
        StepDecay(1.0, (5, 3))


def of(epochs=4, **table):
    """Return the schedule of a table, for epochs of five steps."""
    return make_schedule(SCHEDULES.settings(table["kind"], {"learning_rate": 2.0, **table}), epochs, 5)


def test_polynomial_and_line_after_a_warm_up():
    rate = of(kind="polynomial", power=3, final=0.5, warmup_epochs=1)
    assert [rate(s) for s in (0, 4, 5)] == pytest.approx([0.4, 2.0, 2.0])
    assert rate(14) == pytest.approx(0.5 + 1.5 * 0.4**3) and rate(20) == rate(99) == 0.5
    assert [of(kind="linear")(s) for s in (0, 5, 10, 20, 21)] == pytest.approx([2, 1.5, 1, 0, 0])
    assert of(kind="linear", final=1.0) == Linear(2.0, 20, 1.0, 1.0)
    assert of(kind="polynomial") == Polynomial(2.0, 20, 0.9)


@pytest.mark.torch
def test_one_cycle_is_that_of_torch():
    import torch

    for steps, rise in ((20, 0.3), (7, 0.5), (100, 0.25)):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0)
        theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2.0, total_steps=steps, pct_start=rise)
        mine = OneCycle(2.0, steps, rise, final=2.0 / 25 / 1e4)
        for step in range(steps):
            assert mine(step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-12, abs=1e-15), step
            optimizer.step()
            if step + 1 < steps:
                theirs.step()
    assert [OneCycle(2.0, 1)(s) for s in (0, 1)] == [2.0, 0.0]
    with pytest.raises(UserError, match=r"warmup_epochs: .*0 with one_cycle.*, got 1"):
        of(kind="one_cycle", warmup_epochs=1)


@pytest.mark.parametrize(
    ("better", "values"), [("lower", [5, 4, 4, 4.5, None, 4.1, 4.2]), ("higher", [1, 2, 2, 1, math.nan, 1, 1])]
)
def test_plateau(better, values):
    """Two validations without improvement, undefined ones left out, multiply the rate; state continues elsewhere."""
    table = {"kind": "plateau", "score": "iou", "factor": 0.5, "patience": 2, "least": 0.6, "warmup_epochs": 0.2}
    rates, schedule = [], of(**table)
    schedule.follow({"loss": "lower", "iou": better})
    for value in values:
        schedule.validated({"loss": 1.0, "iou": value})
        rates.append(schedule(9))
        again = of(**table)
        again.follow({"iou": better})
        again.load_state_dict(schedule.state_dict())
        schedule = again
    assert rates == [2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 0.6]
    other = Plateau(2.0, 0.5, 2)
    other.load_state_dict(schedule.state_dict())
    assert (other.drops, other.best, other.waited) == (2, None, 0)


def test_plateau_without_its_score():
    with pytest.raises(UserError, match=r"schedule\.score: .*loss, iou, got 'dice'"):
        of(kind="plateau", score="dice").follow({"loss": "lower", "iou": "higher", "own": None})
    with pytest.raises(UserError, match=r"held-out samples.*, got data.validation = 0"):
        of(kind="plateau").follow({})
