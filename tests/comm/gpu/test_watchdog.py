"""Tests of the watchdog: faults of communicators, operations that take too long, a lost peer."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from mpi4py import MPI

from halograd.comm import CommError, Communicator
from halograd.comm.gpu import link, nccl
from halograd.comm.gpu import watchdog as module
from halograd.comm.gpu.streams import TimedPassage
from halograd.comm.gpu.watchdog import DeviceWatchdog
from tests.harness.limits import LIMIT, wait_until
from tests.support.clock import DrivenClock
from tests.support.gpu_ranks import gpu_ranks


class Watched:
    def __init__(self, error=None):
        self.error, self.aborted = error, 0

    def check(self):
        if self.error is not None:
            raise self.error

    def abort(self):
        self.aborted += 1


@pytest.fixture
def clock(monkeypatch):
    return DrivenClock(tick=0.0).drive(monkeypatch, module)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Raise the watchdog's patience, because on a busy machine the thread that aborts may be late."""
    monkeypatch.setattr(module, "PATIENCE", LIMIT)


def passage(done):
    return SimpleNamespace(done=done)


def still(**options):
    """Return a watchdog whose thread sleeps, so that the test polls it, and the list of its exit codes."""
    ended = []
    dog = DeviceWatchdog("rank 1 of 4", interval=1000, end=ended.append, **{"timeout": 60, "grace": 0, **options})
    return dog, ended


def test_a_forgotten_operation_is_not_queried():
    """An event may be recorded in a graph as soon as its operation is forgotten: a query would then be an error."""
    dog, _ = still()
    events = []

    class Lock:
        def __enter__(self):
            events.append("locked")

        def __exit__(self, *exc):
            events.append("unlocked")

    class First:
        """Operation during whose query the main thread forgets the next one."""

        @property
        def done(self):
            events.append("query")
            dog.forget(second)
            return False

    dog._querying, first, second = Lock(), First(), SimpleNamespace()  # a query of the second one is an error
    dog.under_way(first, "first")
    dog.under_way(second, "second")
    assert dog._overdue() is None
    assert events == ["locked", "query", "locked", "unlocked", "unlocked", "locked", "unlocked"]


def test_a_communicator_is_not_destroyed_while_it_is_checked():
    made, locked = nccl.NcclLink.__new__(nccl.NcclLink), []
    made._taking = threading.Lock()
    made._comm = SimpleNamespace(check_async_error=lambda: locked.append(made._taking.locked()))
    made.check()
    assert made._taken() is not None
    made.check()
    assert locked == [True]


def test_nothing_is_wrong():
    dog, ended = still()
    watched = Watched()
    dog.add(watched)
    dog.under_way(passage(False), "exchange 'halo'")
    dog.look()
    dog.raise_fault()
    dog.close()
    dog.close()
    assert not ended and not watched.aborted


def test_an_error_of_a_communicator_aborts_all_of_them():
    dog, ended = still()
    one, other = Watched(), Watched(RuntimeError("NCCL_ERROR_REMOTE_ERROR: remote process exited"))
    dog.add(one)
    dog.add(other)
    dog.look()
    assert one.aborted == other.aborted == 1
    with pytest.raises(
        CommError, match=r"^nccl: rank 1 of 4: NCCL_ERROR_REMOTE_ERROR: .*; a peer is gone, see its output"
    ):
        dog.raise_fault()
    dog.look()
    assert one.aborted == 1 and len(ended) == 1, "the fault was not raised in time, so the job was ended"
    dog.close()


def test_a_device_that_has_failed_is_a_fault():
    """An operation on a failed device, which would never end, is reported as a fault."""

    class Failed:
        @property
        def done(self):
            raise RuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")

    dog, _ = still()
    dog.under_way(Failed(), "exchange 'halo'")
    dog.look()
    with pytest.raises(CommError, match=r"rank 1 of 4: exchange 'halo': cudaErrorIllegalAddress: .*; the device has"):
        dog.raise_fault()
    dog.close()


def test_an_abort_that_never_returns_keeps_nobody(monkeypatch):
    """A hanging abort does not prevent the end of the job, nor the traceback of the main thread."""
    released = threading.Event()

    class Stuck(Watched):
        def abort(self):
            assert released.wait(LIMIT)

    monkeypatch.setattr(module, "PATIENCE", 0.01)
    dog, ended = still()
    dog.add(Stuck(RuntimeError("gone")))
    dog.look()
    assert len(ended) == 1
    dog.abort()
    dog.close()
    released.set()


def test_all_are_aborted_as_one():
    """All communicators are aborted in one group, because the kernels of one may wait for those of another."""
    order = []

    @contextmanager
    def together():
        order.append("begin")
        yield
        order.append("end")

    class Noted(Watched):
        def abort(self):
            order.append("abort")

    dog, _ = still(together=together, begin=lambda: order.append("device"))
    dog.add(Noted())
    dog.add(Noted())
    dog._stop.set()
    dog._thread.join(LIMIT)
    order.clear()
    dog.abort()
    assert order == ["device", "begin", "abort", "abort", "end"]
    dog.close()


def test_a_communicator_that_is_being_made_is_no_fault():
    dog, _ = still()
    dog.add(Watched(KeyError(7)))  # ncclInProgress, which CuPy has no text for
    dog.look()
    dog.raise_fault()
    dog.close()


def test_something_that_takes_too_long(clock):
    dog, ended = still()
    done, late = passage(True), passage(False)
    dog.under_way(done, "exchange 'halo: conv1'")
    dog.under_way(late, "sum 'allreduce' of 400 bytes")
    clock.seconds = 60.0
    dog.look()
    dog.raise_fault()
    clock.seconds = 61.0
    dog.look()
    message = r"rank 1 of 4: sum 'allreduce' of 400 bytes has been under way for 61 s, expected less than 60: .* stuck"
    with pytest.raises(CommError, match=message):
        dog.raise_fault()
    assert "HALOGRAD_GPU_TIMEOUT" in ended[0]
    dog.close()


def test_what_is_over_or_forgotten_is_not_late(clock):
    dog, _ = still()
    over, forgotten = passage(True), passage(False)
    dog.under_way(over, "a")
    dog.under_way(forgotten, "b")
    dog.forget(forgotten)
    dog.forget(forgotten)
    clock.seconds = 61.0
    dog.look()
    dog.raise_fault()
    dog.close()


def test_a_fault_that_is_raised_in_time_does_not_end_the_job():
    ended, watched, was_raised = [], Watched(RuntimeError("gone")), threading.Event()
    dog = DeviceWatchdog("rank 0 of 2", interval=0.01, end=ended.append, grace=1000)

    class Stop(threading.Event):
        """Event whose wait ends as soon as the fault is raised, instead of after the grace time."""

        def wait(self, timeout=None):
            return not was_raised.wait(LIMIT) if timeout == 1000 else super().wait(timeout)

    dog._stop = Stop()
    dog.add(watched)
    wait_until(lambda: fault_of(dog), "the thread to look")
    wait_until(lambda: watched.aborted, "another thread to abort")
    was_raised.set()
    dog._thread.join(LIMIT)
    assert not dog._thread.is_alive() and not ended and watched.aborted == 1
    dog.close()


def fault_of(dog):
    """Return the fault that the watchdog raises, or None."""
    try:
        dog.raise_fault()
    except CommError as fault:
        return fault


def test_a_start_that_blocks_ends_the_job(monkeypatch):
    timers = []

    class Timer:
        """Timer that expires when the test triggers it."""

        def __init__(self, interval, function):
            self.interval, self.function = interval, function
            self.start, self.cancel = lambda: timers.append(self), lambda: timers.remove(self)

    monkeypatch.setattr(module.threading, "Timer", Timer)
    dog, ended = still()
    with dog.watching("the start of NCCL"):
        (timer,) = timers
        assert timer.interval == 60
        timer.function()
    assert ended[0].startswith("nccl: rank 1 of 4: the start of NCCL has been under way for 60 s")
    assert not timers, "what has begun in time does not end the job later"


def test_a_timeout_must_be_positive():
    with pytest.raises(CommError, match="timeout: expected seconds > 0, got 0"):
        DeviceWatchdog("rank 0 of 1", timeout=0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("begun", ["exchange", "sum"])
def test_a_message_whose_peer_is_gone_raises_at_the_next_call(begun, clock, monkeypatch):
    """A message or sum whose peer never starts it raises an error at the next call after the timeout."""
    ended = []
    monkeypatch.setattr(link, "end", lambda mpi, code: ended.append(code))
    with pytest.raises(CommError, match=f"^nccl: rank 0 of 2: {begun} '.*' .*has been under way"):  # noqa: SIM117
        with gpu_ranks(monkeypatch, "nccl", timeout=1000) as r:
            other = 1 - r.comm.rank
            channel = r.comm.channel({other: 4}, {other: 4}, "float32", device=r.device, name="conv1")
            total = r.comm.reduction(r.device.zeros((4,), "float32"), name="loss")
            mine = {"exchange": channel, "sum": total}[begun]
            fault = None
            if r.comm.rank == 0:
                monkeypatch.setattr(TimedPassage, "done", False)  # the stream never comes to the end
                monkeypatch.setattr(TimedPassage, "join", lambda self: pytest.fail("what was lost must not be joined"))
                dog = watchdog_of(r)
                dog._interval, dog._grace = 0.01, LIMIT
                mine.start()
                clock.seconds += 1001
                fault = str(wait_until(lambda: fault_of(dog), "the thread to notice"))
            raise CommError(r.comm.bcast(fault))  # the other rank would find out by itself, later
    assert not ended


@pytest.mark.ranks(2)
@pytest.mark.parametrize("begun", ["exchange", "sum"])
def test_what_a_graph_records_is_not_watched_any_more(begun, monkeypatch):
    """Operations in a recorded graph are not watched, because events in a graph must not be queried."""
    with gpu_ranks(monkeypatch, "nccl") as r:
        other = 1 - r.comm.rank
        if begun == "exchange":
            mine = r.comm.channel({other: 4}, {other: 4}, "float32", device=r.device)
        else:
            mine = r.comm.reduction(r.device.zeros((4,), "float32"))

        def watched_after_a_run():
            mine.start()
            mine.finish()
            if begun == "exchange":
                mine.release()
            return bool(watchdog_of(r)._under_way)

        assert watched_after_a_run()
        monkeypatch.setattr(type(r.device.compute), "is_capturing", lambda stream: True)
        assert not watched_after_a_run()


@pytest.mark.ranks(2)
def test_the_thread_is_on_the_device_of_its_rank(monkeypatch):
    """The watchdog's thread selects its rank's device; otherwise all ranks would open a context on the first device."""
    looks = []
    with gpu_ranks(monkeypatch, "nccl") as r:
        total = r.comm.reduction(r.device.zeros((4,), "float32"))
        (first, *_), check = r.nccl.communicators, r.nccl.communicators[0].check_async_error
        monkeypatch.setattr(first, "check_async_error", lambda: (check(), looks.append(threading.current_thread())))
        total.start()
        wait_until(lambda: looks, "the thread to look")
        total.finish()
        assert looks[0] is not threading.main_thread() and not r.device.strangers


def watchdog_of(r):
    return r.comm.devices._opened.watchdog


@pytest.mark.ranks(2)
@pytest.mark.parametrize("where", ["get_unique_id", "NcclCommunicator", "allReduce"])
def test_what_nccl_refuses_is_raised_everywhere(where, monkeypatch):
    def refuse(*args):
        raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR: unhandled system error")

    with gpu_ranks(monkeypatch, "nccl") as r:
        if where == "allReduce":
            total = r.comm.reduction(r.device.zeros((4,), "float32"))
            r.nccl.communicators[0].allReduce = refuse
            with (
                r.comm.agreement(),
                pytest.raises(CommError, match="to enqueue messages or sums, got NCCL_ERROR_SYSTEM"),
            ):
                total.start()
            total.under_way = False
            assert r.nccl._depth == 0, "the group was ended"
            return
        monkeypatch.setattr(r.nccl, where, refuse)
        with pytest.raises(CommError, match=r"nccl: expected to (begin|join) a communicator, got NCCL_ERROR_SYS"):
            r.comm.reduction(r.device.zeros((4,), "float32"))


@pytest.mark.ranks(2)
def test_a_fault_of_one_rank_leaves_nothing_that_could_hang(monkeypatch):
    """A communicator that is left by an error aborts the active NCCL operations of this rank, so nothing hangs."""
    made = []
    with pytest.raises(ZeroDivisionError), gpu_ranks(monkeypatch, "nccl") as r:
        r.comm.reduction(r.device.zeros((4,), "float32"))
        made += r.nccl.communicators
        raise ZeroDivisionError
    assert [c.dead for c in made] == ["aborted"]
    assert isinstance(Communicator, type) and MPI.COMM_WORLD.size == 2
