"""Tests of the progress thread, stages, and waiting ranks, with operations that need no network."""

import threading
import time
from functools import partial

import numpy as np
import pytest

from halograd.comm import progress as module
from halograd.comm.progress import OperationQueue, Progress, Stage, StagedOperation, Work
from halograd.comm.transport import doubling_seconds, ring_seconds
from halograd.comm.transports import emulated as timing
from halograd.comm.transports import memory
from halograd.comm.transports.emulated import sleep_until
from tests.harness.limits import LIMIT, wait_until
from tests.support.clock import DrivenClock


class Countdown(StagedOperation):
    """Operation that is complete after some polls; it records the threads that polled and waited."""

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


def left_to_the_thread(progress, *operations):
    """Wait until the thread has completed these operations."""
    wait_until(lambda: not set(operations) & set(progress._pending), "the thread to complete them")
    for operation in operations:
        progress.complete(operation)


def test_the_thread_starts_with_the_first_operation_and_ends(progress):
    assert not threads()
    first, second = Countdown(3), Countdown(1)
    progress.submit(first)
    progress.submit(second)
    assert len(threads()) == 1
    wait_until(lambda: not progress._pending, "the thread to complete both")
    assert first.pollers == second.pollers == {"halograd-progress"}
    assert not first.waiters | second.waiters
    progress.close()
    progress.close()
    assert not threads()
    again = Countdown(2)
    progress.submit(again)
    left_to_the_thread(progress, again)
    assert again.left == 0


def test_who_cannot_wait_takes_the_operation_over(progress):
    operation, other = Countdown(10**9), Countdown(5)
    progress.submit(operation)
    wait_until(lambda: operation.pollers, "the thread to poll")
    progress.complete(operation)
    polls = operation.left
    progress.submit(other)
    left_to_the_thread(progress, other)  # it has polled since
    assert operation.left == polls, "two threads must not drive one request"
    assert operation.waiters == {threading.main_thread().name}


def test_a_fault_is_raised_once_where_the_operation_is_waited_for(progress):
    operation, other = Countdown(1, OSError("cable pulled")), Countdown(5)
    progress.submit(operation)
    progress.submit(other)
    wait_until(lambda: not progress._pending, "both operations to end")
    with pytest.raises(OSError, match="cable pulled"):
        progress.complete(operation)
    progress.complete(other)
    operation.failure = None
    progress.submit(operation)
    progress.complete(operation)


def test_an_operation_that_is_started_anew_just_after_its_last_poll_is_driven_on(progress):
    """An operation that is submitted again before the thread removes its finished run is polled again."""

    class Lock:
        """Lock that lets the owner continue between the thread's last poll and its next action."""

        def __init__(self):
            self.inner, self.polled, self.submitted = threading.Lock(), threading.Event(), threading.Event()

        def acquire(self, *arguments, **options):
            return self.inner.acquire(*arguments, **options)

        def release(self):
            self.inner.release()
            if gate.open and threading.current_thread() is not threading.main_thread() and not self.polled.is_set():
                self.polled.set()
                self.submitted.wait(LIMIT)

        __enter__ = acquire

        def __exit__(self, *_):
            self.release()

    gate = Gate([], "gate")
    operation, other = StagedOperation([gate]), Countdown(5)
    lock = operation.lock = Lock()
    progress.submit(operation)
    gate.open = True
    assert lock.polled.wait(LIMIT)
    progress.complete(operation)
    gate.open = False
    looks = gate.looks
    progress.submit(operation)
    progress.submit(other)
    lock.submitted.set()
    left_to_the_thread(progress, other)
    assert gate.looks > looks
    gate.open = True
    left_to_the_thread(progress, operation)
    assert "wait gate" not in gate.log


def test_an_idle_thread_waits_for_work(progress, monkeypatch):
    """An idle thread does not poll; it is woken."""
    idle, wait = threading.Event(), progress._work.wait
    monkeypatch.setattr(progress._work, "wait", lambda: (idle.set(), wait()))
    progress.submit(Countdown(1))
    assert idle.wait(LIMIT)


def test_a_thread_polls_often_at_first_and_then_less_and_less(progress, monkeypatch):
    """A thread first polls often, as rounds of an all-reduce follow each other; later at most 500 times a second."""
    clock = DrivenClock().drive(monkeypatch, module)
    pending = Countdown(1000)
    progress.submit(pending)
    left_to_the_thread(progress, pending)
    naps = np.array(clock.naps[:999])
    assert naps.size == 999, "it sleeps between two polls"
    begins = np.cumsum(naps) - naps
    assert naps[begins < 0.01].max() <= 2e-4
    assert naps[begins > 0.25].min() >= 2e-3
    again = Countdown(2)
    progress.submit(again)
    left_to_the_thread(progress, again)
    assert clock.naps[999] <= 2e-4, "what is new is polled often"


# -- stages ---------------------------------------------------------------------------------------


class Gate(Stage):
    """Stage that ends after the test opens it; it records its calls."""

    def __init__(self, log, name):
        self.log, self.name, self.open, self.looks = log, name, False, 0

    def begin(self):
        self.log.append(f"begin {self.name}")

    def over(self):
        self.looks += 1
        return self.open

    def wait(self):
        self.log.append(f"wait {self.name}")


def test_stages_follow_each_other_in_pieces():
    log = []
    gate, work = Gate(log, "gate"), Work([lambda: log.append("a"), lambda: log.append("b")])
    last = Work([lambda: log.append("owner's")])
    operation = StagedOperation([Work([lambda: log.append("first")]), gate, work, last], first=1, last=1)
    for _ in range(2):
        log.clear()
        gate.open = False
        operation.start()
        assert log == ["first", "begin gate"] and not operation.poll() and not operation.worked
        gate.open = True
        assert not operation.poll() and operation.worked and log[2:] == ["a"] and not operation.arrived
        assert operation.poll() and log[3:] == ["b"] and operation.arrived and not operation.over
        operation.wait()
        assert log[4:] == ["owner's"] and operation.over


@pytest.mark.parametrize("pieces", range(4))
def test_an_owner_does_not_repeat_pieces_of_the_thread(pieces):
    log = []
    operation = StagedOperation([Work([partial(log.append, number) for number in range(3)])])
    for _ in range(2):
        operation.start()
        for _ in range(pieces):
            operation.poll()
        operation.wait()
    assert log == [0, 1, 2] * 2 and operation.over


def test_turns_alternate_and_a_waiter_does_everything():
    log = []
    turns = [[Work([lambda n=n: log.append(n)]), Gate(log, n)] for n in "ab"]
    operation = StagedOperation(*turns)
    for _ in range(3):
        operation.start()
        operation.wait()
    assert [entry for entry in log if len(entry) == 1] == ["a", "b", "a"]
    assert log[:3] == ["a", "begin a", "wait a"]


def test_of_a_line_only_the_first_in_every_stage_is_looked_at(progress):
    """In each stage only the first operation of a queue is polled, so none passes another and many cost no more."""
    queue, log = OperationQueue(), []
    gates = [(Gate(log, f"{i} 1"), Gate(log, f"{i} 2")) for i in range(20)]
    operations = [StagedOperation(both, queue=queue) for both in gates]
    for operation in operations:
        operation.start()
        queue.operations.append(operation)
    assert not queue.poll() and not queue.worked
    assert [one.looks for one, _ in gates] == [1] + [0] * 19
    for one, _ in gates[1:]:
        one.open = True
    assert not queue.poll() and [one.at for one in operations] == [0] * 20
    gates[0][0].open = True
    while queue.poll() or queue.worked:
        pass
    assert [one.at for one in operations] == [1] * 20 and [other.looks for _, other in gates[1:]] == [0] * 19
    assert [entry for entry in log if entry.endswith("2")] == [f"begin {i} 2" for i in range(20)]
    for _, other in gates:
        other.open = True
    operations[7].wait = lambda: log.append("the owner's")
    progress._pending.append(queue)
    progress.complete(operations[7])
    assert log[-1] == "the owner's" and operations[7].arrived and operations[0] not in queue.operations


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


def test_times_of_a_ring_and_of_recursive_doubling():
    assert ring_seconds(1, 1000, 1e-3, 1e-9) == doubling_seconds(1, 1000, 1e-3, 1e-9) == 0
    assert ring_seconds(4, 1000, 1e-3, 1e-6) == pytest.approx(6e-3 + 1.5e-3)
    assert doubling_seconds(4, 1000, 1e-3, 1e-6) == pytest.approx(2 * 2e-3)
    assert doubling_seconds(6, 1000, 1e-3, 1e-6) == pytest.approx((2 + 2) * 2e-3), "surplus ranks send and receive"


# -- flags in shared memory: quick where the peer is near, hardly awake where it is late --------------


class Peer:
    """Flag of a peer that is set after a number of polls, and not before a time of the clock."""

    def __init__(self, clock, looks=0, seconds=0.0):
        self.clock, self.looks, self.seconds, self.looked = clock, looks, seconds, 0

    def __getitem__(self, index):
        self.looked += 1
        return int(self.looked > self.looks and self.clock.seconds >= self.seconds)


@pytest.fixture
def clock(monkeypatch):
    """Return a clock that advances only in naps; `offers` counts the yields of the core."""
    made = DrivenClock(tick=0.0).drive(monkeypatch, module)
    made.offers = []
    monkeypatch.setattr(module.os, "sched_yield", lambda: made.offers.append(1))
    return made


def test_a_peer_that_is_near_is_awaited_without_a_nap(clock):
    memory._wait(Peer(clock, memory.SPINS - 1), 1)
    assert not clock.offers and not clock.naps
    memory._wait(Peer(clock, memory.SPINS + module.OFFERS - 1), 1)
    assert len(clock.offers) == module.OFFERS and not clock.naps


def test_a_peer_that_is_late_is_looked_for_now_and_then(clock):
    peer = Peer(clock, seconds=0.2)
    memory._wait(peer, 1)
    assert 0.2 <= clock.seconds <= 0.2 + module.LONG_NAP
    assert len(clock.naps) <= module.NAPS + 0.2 / module.LONG_NAP
    assert peer.looked <= memory.SPINS + module.OFFERS + len(clock.naps) + 1
