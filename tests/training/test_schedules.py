"""Tests of schedules: values by hand, independent of earlier steps."""

import math

import pytest

from halograd.training.schedules import Constant, Cosine, DecaySettings, StepDecay, WarmUp, make_schedule


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
    with pytest.raises(ValueError, match=r"milestones: expected rising steps, got \(5, 3\)"):
        StepDecay(1.0, (5, 3))
