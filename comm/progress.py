"""Operations that go on in stages, and the thread that lets them proceed while the main thread computes.

No MPI library progresses by itself: a non-blocking all-reduce or a long message waits until the process
calls MPI. The thread polls whatever is pending and sleeps in between.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Sequence

__all__ = ["Line", "Progress", "Stage", "StagedOperation", "Work", "rest"]

# After how long without a change [s] the thread sleeps how long between two polls [s]. Short at first, so that the
# rounds of an all-reduce follow each other; what pends for long waits for a late rank, and a wake-up takes some 50 us
# of a core: 0.8 ms between them would be 4 to 7 % of it, 2 ms is half of that. A rank that waits polls by itself.
INTERVALS = ((2e-2, 2e-4), (2e-1, 8e-4), (float("inf"), 2e-3))
# After so many offers of the core (some 0.1 ms on an idle one) a waiter sleeps between two polls: the peer may want
# this very core, and other threads of this process too. Woken some 60 us later, it loses a fraction of its wait.
OFFERS = 200
NAP = 1e-5  # [s]
# After so many naps (some ms) they become longer: hardly any CPU is used then.
NAPS = 50
LONG_NAP = 2e-4  # [s]
PATIENCE = 1e-4  # [s] to wait for the other thread before looking whether it has done what is waited for


def rest(polls: int) -> None:
    """Wait a little before looking again, longer when that was in vain many times."""
    if polls < OFFERS:
        os.sched_yield()
    else:
        time.sleep(NAP if polls < OFFERS + NAPS else LONG_NAP)


class Stage:
    """One stage of an operation: it begins when the one before is over. This one is over at once."""

    works = False  # whether `over` does a piece of work when it returns False

    def begin(self) -> None:
        """Begin. Does not wait."""

    def over(self) -> bool:
        """Return whether it is over. Does not wait; called until it is."""
        return True

    def wait(self) -> None:
        """Return when it is over."""


class Work(Stage):
    """Calls, one after the other; `over` makes one of them."""

    works = True

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        self.calls, self._next = list(calls), 0

    def over(self) -> bool:
        if self._next < len(self.calls):
            self.calls[self._next]()
            self._next += 1
        if self._next < len(self.calls):
            return False
        self._next = 0
        return True

    def wait(self) -> None:
        for call in self.calls[self._next :] if self._next else self.calls:
            call()
        self._next = 0


_Calls = list[Callable[[], object]]


def _calls(stages: Sequence[Stage]) -> _Calls:
    """Return what a thread calls that waits for stages of which the first has begun: a list is quicker to run than
    stages.
    """
    found: _Calls = []
    for stage in stages:
        if stage is not stages[0] and type(stage).begin is not Stage.begin:
            found.append(stage.begin)
        found += stage.calls if type(stage) is Work else [stage.wait]
    return found


class StagedOperation:
    """Stages one after the other, driven by the progress thread or by their owner, never by both at once.

    Parameters
    ----------
    turns
        The stages of every first, second, ... run.
    first
        So many stages :meth:`start` does itself.
    last
        So many stages at the end are left to the owner.
    line
        Whose order it keeps to; None: it goes on independently of others.
    prepare
        Called before a thread goes on with it.

    Attributes
    ----------
    at
        Number of the stage that it is in.
    completed_at
        When all stages but the last ones were over (`time.perf_counter` [s]).
    """

    def __init__(
        self,
        *turns: Sequence[Stage],
        first: int = 0,
        last: int = 0,
        line: Line | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self.turns, self._first, self._last = [list(turn) for turn in turns], first, last
        self.line, self._prepare = line, prepare
        self.fault: Exception | None = None
        self.completed_at, self.worked, self.lock = 0.0, False, threading.Lock()
        self._stages: list[Stage] = []
        self._behind: _Calls = []
        self._lists: list[tuple[_Calls, _Calls] | None] = [None] * len(turns)  # made at the first run of each
        self._runs = self.at = 0

    @property
    def over(self) -> bool:
        """Whether the run that was started last is over."""
        return self.at == len(self._stages)

    @property
    def arrived(self) -> bool:
        """Whether it is over but for the stages that are left to the owner."""
        return self.at >= len(self._stages) - self._last

    @property
    def idle(self) -> bool:
        """Whether only the owner can go on with it."""
        return self.arrived or self.fault is not None

    def start(self) -> None:
        """Begin a run. Does not wait for others."""
        if not self.turns:
            return
        turn = self._runs % len(self.turns)
        lists, stages = self._lists[turn], self.turns[turn]
        if lists is None:
            lists = self._lists[turn] = _calls(stages[: self._first]), _calls(stages[self._first :])
        self._runs += 1
        self._stages, (before, self._behind) = stages, lists
        self.at, self.fault = 0, None
        for call in before:
            call()
        self.at = self._first
        if self.at < len(self._stages):
            self._stages[self.at].begin()

    def poll(self, limit: float = float("inf")) -> bool:
        """Go on, to the stage of this number and by one piece of work at most; whether only the owner can go on.

        Sets `worked` if something was done. Does not wait.
        """
        if self._prepare is not None:
            self._prepare()
        before, until = self.at, len(self._stages) - self._last
        while self.at < min(until, limit):
            stage = self._stages[self.at]
            if not stage.over():
                self.worked = stage.works or self.at > before
                return False
            self._go_on()
        self.worked = self.at > before
        return self.at >= until

    def wait(self) -> None:
        """Go on to the end in the calling thread (lowest latency, uses the core)."""
        if self._prepare is not None:
            self._prepare()
        if self.at == self._first and not self._last:  # nothing was done yet: all of it in one go
            for call in self._behind:
                call()
            self.at, self.completed_at = len(self._stages), time.perf_counter()
        while self.at < len(self._stages):
            self._stages[self.at].wait()
            self._go_on()

    def _go_on(self) -> None:
        self.at += 1
        if self.at == len(self._stages) - self._last:
            self.completed_at = time.perf_counter()
        if self.at < len(self._stages):
            self._stages[self.at].begin()


class Line:
    """Operations that all ranks start in the same order, and that begin every stage in that order.

    So a stage may be a collective. Only the first that waits in a stage is looked at: a poll costs the same however
    many wait. The progress thread drives the line, and a thread that waits for one of its operations.
    """

    def __init__(self) -> None:
        self.lock, self.worked = threading.Lock(), False
        self.operations: list[StagedOperation] = []

    @property
    def idle(self) -> bool:
        """Whether no operation is left."""
        return not self.operations

    def poll(self) -> bool:
        """Let operations go on, but do one piece of work at most; whether none is left. Called with the lock held."""
        limit, self.worked = float("inf"), False
        for operation in tuple(self.operations):
            if operation.at >= limit:
                continue
            if _poll(operation, limit):
                self.operations.remove(operation)
            limit = operation.at
            self.worked |= operation.worked
            if self.worked:
                break
        return self.idle

    def complete(self, operation: StagedOperation) -> None:
        """Return when only the owner can go on with an operation, driving the line meanwhile."""
        polls = 0
        while operation in self.operations:
            if not self.lock.acquire(timeout=PATIENCE):
                continue  # the thread does a piece, and then perhaps another
            try:
                self.poll()
                polls = 0 if self.worked else polls + 1
            finally:
                self.lock.release()
            if polls:
                rest(polls)


def _poll(operation: StagedOperation, *limit: float) -> bool:
    """`StagedOperation.poll`; a fault is kept until a thread waits for the operation."""
    operation.worked = False
    try:
        return operation.fault is not None or operation.poll(*limit)
    except Exception as fault:
        operation.fault = fault
        return True


class Progress:
    """The progress thread of a root communicator and those split from it. All methods are local.

    Started with the first operation; sleeps on a condition while there is nothing to do.
    """

    def __init__(self) -> None:
        self._last_change = 0.0
        self._pending: list[StagedOperation | Line] = []
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._closing = False

    def submit(self, operation: StagedOperation) -> None:
        """Start an operation, and see to it that it proceeds."""
        line = operation.line
        with (line or operation).lock:  # the thread may look at it once more, although it was complete
            operation.start()
            if line is not None:
                line.operations.append(operation)
        with self._lock:
            if line is None:
                self._pending.append(operation)
            elif line not in self._pending:
                self._pending.append(line)
            self._last_change = time.perf_counter()
            if self._thread is None:
                self._launch()
            self._work.notify()

    def complete(self, operation: StagedOperation) -> None:
        """Return when the operation is complete: drive it in the calling thread if it is not yet (lowest latency).

        Raises
        ------
        Exception
            What the operation failed with, on this thread or on the progress thread.
        """
        if operation.line is not None:
            operation.line.complete(operation)
        else:
            with self._lock:
                if operation in self._pending:
                    self._pending.remove(operation)
        with operation.lock:
            fault, operation.fault = operation.fault, None
            if fault is not None:
                raise fault
            operation.wait()

    def close(self) -> None:
        """End the thread; idempotent. Operations still pending are left alone."""
        with self._lock:
            self._closing = True
            self._work.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            atexit.unregister(self.close)
        self._closing = False

    def _launch(self) -> None:
        # A daemon, so that a communicator that was not closed does not keep the process alive; joined
        # at exit, before mpi4py finalizes MPI under its feet (exit handlers run last in, first out).
        self._thread = threading.Thread(target=self._run, name="halograd-progress", daemon=True)
        atexit.register(self.close)
        self._thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._pending and not self._closing:
                    self._work.wait()
                if self._closing:
                    return
                pending, waited = tuple(self._pending), time.perf_counter() - self._last_change
            if self._advance(pending):
                self._last_change = time.perf_counter()
            else:
                time.sleep(next(interval for limit, interval in INTERVALS if waited < limit))

    def _advance(self, pending: Sequence[StagedOperation | Line]) -> bool:
        """Poll once all that is pending; whether something was done."""
        changed = False
        for item in pending:
            if not item.lock.acquire(blocking=False):  # its owner drives it
                continue
            try:
                done = item.poll() if isinstance(item, Line) else _poll(item)
                changed |= item.worked or (done and not isinstance(item, Line))
            finally:
                item.lock.release()
            if done:
                self._forget(item)
        return changed

    def _forget(self, item: StagedOperation | Line) -> None:
        with self._lock:
            # Since it was polled, a line may have got another operation, and an operation have been started anew.
            if item in self._pending and item.idle:
                self._pending.remove(item)
