"""The progress thread, with operations that need no network."""

import threading
import time

import numpy as np
import pytest

from halograd.comm import progress as module
from halograd.comm.progress import Operation, Progress
from halograd.comm.transports import timing
from halograd.comm.transports.timing import ring_seconds, sleep_until
from tests.harness.limits import LIMIT, wait_until
from tests.support.clock import DrivenClock


class Countdown(Operation):
    """Complete after some polls; notes who polled and waited."""

    def __init__(self, polls, fault=None):
        super().__init__()
        self.left, self.failure = polls, fault
        self.pollers, self.waiters = set(), set()

    def poll(self):
        self.pollers.add(threading.current_thread().name)
        self.left -= 1
        if self.left <= 0 and self.failure:
            raise self.failure
        return self.left <= 0

    def wait(self):
        self.waiters.add(threading.current_thread().name)


@pytest.fixture
def progress():
    made = Progress()
    yield made
    made.close()


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "halograd-progress"]


def test_the_thread_starts_with_the_first_operation_and_ends(progress):
    assert not threads()
    first, second = Countdown(3), Countdown(1)
    progress.submit(first)
    progress.submit(second)
    assert len(threads()) == 1
    progress.sleep(first)
    progress.sleep(second)
    assert first.pollers == second.pollers == {"halograd-progress"}
    assert not first.waiters | second.waiters
    progress.close()
    progress.close()
    assert not threads()
    again = Countdown(2)
    progress.submit(again)
    progress.sleep(again)
    assert again.left == 0


def test_who_cannot_wait_takes_the_operation_over(progress):
    operation, other = Countdown(10**9), Countdown(5)
    progress.submit(operation)
    wait_until(lambda: operation.pollers, "the thread to poll")
    progress.complete(operation)
    polls = operation.left
    progress.submit(other)
    progress.sleep(other)  # the thread has polled since
    assert operation.left == polls, "two threads must not drive one request"
    assert operation.waiters == {threading.main_thread().name}


@pytest.mark.parametrize("wait", ["complete", "sleep"])
def test_a_fault_is_raised_once_where_the_operation_is_waited_for(progress, wait):
    operation, other = Countdown(1, OSError("cable pulled")), Countdown(5)
    progress.submit(operation)
    progress.submit(other)
    wait_until(lambda: not progress._pending, "both operations to end")
    with pytest.raises(OSError, match="cable pulled"):
        getattr(progress, wait)(operation)
    progress.sleep(other)
    operation.failure = None
    progress.submit(operation)
    getattr(progress, wait)(operation)


def test_an_idle_thread_waits_for_work(progress, monkeypatch):
    """It does not look now and then: it is woken."""
    idle, wait = threading.Event(), progress._work.wait
    monkeypatch.setattr(progress._work, "wait", lambda: (idle.set(), wait()))
    done = Countdown(1)
    progress.submit(done)
    progress.sleep(done)
    assert idle.wait(LIMIT)


def test_a_thread_polls_often_at_first_and_then_less_and_less(progress, monkeypatch):
    """The rounds of an all-reduce follow each other; a late rank is looked for 500 times a second at most."""
    clock = DrivenClock().drive(monkeypatch, module)
    pending = Countdown(1000)
    progress.submit(pending)
    progress.sleep(pending)
    naps = np.array(clock.naps[:999])
    assert naps.size == 999, "it sleeps between two polls"
    begins = np.cumsum(naps) - naps
    assert naps[begins < 0.01].max() <= 2e-4
    assert naps[begins > 0.25].min() >= 2e-3
    again = Countdown(2)
    progress.submit(again)
    progress.sleep(again)
    assert clock.naps[1000] <= 2e-4, "what is new is polled often"


def test_sleep_until_is_never_early():
    for seconds in (0.0, 1e-5, 3e-4, 2e-3, 2e-2):
        deadline = time.perf_counter() + seconds
        sleep_until(deadline)
        assert time.perf_counter() >= deadline


@pytest.mark.parametrize("nap", [True, False])
def test_sleep_until_is_precise_and_awake_for_the_last_moment_only(nap, monkeypatch):
    clock = DrivenClock().drive(monkeypatch, timing)
    for seconds in (0.0, 1e-5, 3e-4, 2e-3, 2e-2):
        clock.seconds, clock.naps = 1.0, []
        sleep_until(1.0 + seconds, nap)
        assert seconds <= clock.seconds - 1.0 < seconds + 2e-5
        assert seconds - sum(clock.naps) <= (0.0 if nap else timing.LATE) + 1e-5


def test_time_of_a_ring():
    assert ring_seconds(1, 1000, 1e-3, 1e-9) == 0
    assert ring_seconds(4, 1000, 1e-3, 1e-6) == pytest.approx(6e-3 + 1.5e-3)
