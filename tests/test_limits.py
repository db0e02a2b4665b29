"""Limits against deadlock grow with the load, and a waiting test reports what it waits for."""

from itertools import pairwise
from types import SimpleNamespace

import pytest

from tests.harness import limits
from tests.support.clock import DrivenClock


@pytest.mark.parametrize(("cores", "seconds", "factor"), [(2, 0.5, 1.0), (2, 3.0, 3.0), (64, 3.0, 3.0)])
def test_slowness_is_measured_on_all_cores_at_once(monkeypatch, cores, seconds, factor):
    """Slowness is the measured multiple of the nominal time, with one process per core at the same time."""
    clock = DrivenClock(tick=0.0).drive(monkeypatch, limits)
    begins, ends = [], []

    def popen(command):
        begins.append(clock.seconds)

        def wait():
            clock.seconds = begins[len(ends)] + seconds * limits.NOMINAL
            ends.append(clock.seconds)

        return SimpleNamespace(wait=wait)

    monkeypatch.setattr(limits.subprocess, "Popen", popen)
    monkeypatch.setattr(limits, "_cores", lambda: cores)
    assert limits.measure() == pytest.approx(factor)
    assert len(ends) == min(cores, limits.MOST_RANKS)


def test_slowness_is_that_of_the_first_process(monkeypatch):
    monkeypatch.setenv(limits.SLOWNESS_VARIABLE, "2.5")
    monkeypatch.setattr(limits, "measure", lambda: pytest.fail("measured again"))
    limits.slowness.cache_clear()
    try:
        assert limits.scaled(4.0) == 10.0
        monkeypatch.delenv(limits.GRACE_VARIABLE, raising=False)
        assert limits.grace() == 50.0
        monkeypatch.setenv(limits.GRACE_VARIABLE, "0.5")
        assert limits.grace() == 0.5
    finally:
        limits.slowness.cache_clear()


def test_what_is_waited_for_is_given_back_or_named(monkeypatch):
    clock = DrivenClock(tick=0.0).drive(monkeypatch, limits)
    assert limits.wait_until(lambda: clock.seconds > 1.0 and "there", "a moon") == "there"
    assert 1.0 < clock.seconds < 1.1
    with pytest.raises(AssertionError, match=rf"^expected a moon within {limits.LIMIT:g} s$"):
        limits.wait_until(lambda: None, lambda: "a moon")
    assert clock.seconds == pytest.approx(limits.LIMIT + 1, abs=0.1)
    with pytest.raises(AssertionError, match="within 3 s"):
        limits.wait_until(lambda: 0, "nothing", 3.0)


@pytest.mark.parametrize(("seconds", "pause"), [(0.0, 5e-3), (0.02, 0.08), (3.0, 0.5)])
def test_a_question_that_takes_long_is_asked_less_often(monkeypatch, seconds, pause):
    clock = DrivenClock(tick=0.0).drive(monkeypatch, limits)
    asked = []

    def condition():
        asked.append(clock.seconds)
        clock.seconds += seconds
        return len(asked) == 3

    limits.wait_until(condition, "a moon")
    assert [later - earlier for earlier, later in pairwise(asked)] == pytest.approx(2 * [seconds + pause])
