"""The progress thread, with operations that need no network."""

import threading
import time

import pytest

from halograd.comm.progress import Operation, Progress
from halograd.comm.transports.emulated import ring_seconds, sleep_until


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
    operation = Countdown(10**9)
    progress.submit(operation)
    time.sleep(5e-3)
    progress.complete(operation)
    polls = operation.left
    time.sleep(5e-3)
    assert operation.left == polls, "two threads must not drive one request"
    assert operation.waiters == {threading.main_thread().name}


@pytest.mark.parametrize("wait", ["complete", "sleep"])
def test_a_fault_is_raised_once_where_the_operation_is_waited_for(progress, wait):
    operation, other = Countdown(1, OSError("cable pulled")), Countdown(5)
    progress.submit(operation)
    progress.submit(other)
    while progress._pending:
        time.sleep(1e-3)
    with pytest.raises(OSError, match="cable pulled"):
        getattr(progress, wait)(operation)
    progress.sleep(other)
    operation.failure = None
    progress.submit(operation)
    getattr(progress, wait)(operation)


def cpu_share(seconds=0.5):
    best = 1.0
    for _ in range(3):
        begin, cpu = time.perf_counter(), time.process_time()
        time.sleep(seconds)
        best = min(best, (time.process_time() - cpu) / (time.perf_counter() - begin))
    return best


def test_an_idle_thread_uses_no_cpu_and_a_waiting_one_little(progress):
    done, pending = Countdown(1), Countdown(10**9)
    progress.submit(done)
    progress.sleep(done)
    assert cpu_share() < 0.005
    progress.submit(pending)
    assert cpu_share() < 0.05
    progress.complete(pending)


def test_sleep_until_is_never_early_and_mostly_precise():
    late = []
    for seconds in (0.0, 1e-5, 3e-4, 2e-3, 2e-2) * 3:
        deadline = time.perf_counter() + seconds
        sleep_until(deadline)
        late.append(time.perf_counter() - deadline)
    assert min(late) >= 0
    assert sorted(late)[len(late) // 3] < 5e-4  # others may have the core meanwhile


def test_time_of_a_ring():
    assert ring_seconds(1, 1000, 1e-3, 1e-9) == 0
    assert ring_seconds(4, 1000, 1e-3, 1e-6) == pytest.approx(6e-3 + 1.5e-3)
