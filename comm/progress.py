"""Operations in stages, and the thread that drives them while the main thread computes.

Most MPI libraries make no progress by themselves: a non-blocking all-reduce or a long message waits until the process
calls MPI. The thread polls all pending operations and sleeps between polls.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Sequence

__all__ = ["OperationQueue", "Progress", "Stage", "StagedOperation", "Work", "rest"]

# Pairs of (time since the last change, sleep between two polls) [s]. Sleeps are short at first, so that the rounds of
# an all-reduce follow each other. An operation that pends for long waits for a late rank, and a wake-up takes some
# 50 us of a core: a sleep of 0.8 ms would cost 4 to 7 % of it, 2 ms half of that. A waiting rank polls by itself.
INTERVALS = ((2e-2, 2e-4), (2e-1, 8e-4), (float("inf"), 2e-3))
# After this many yields of the core (some 0.1 ms on an idle core) a waiting thread sleeps between two polls: the peer,
# or another thread of this process, may need this core. It wakes some 60 us late, a fraction of its wait.
OFFERS = 200
NAP = 1e-5  # [s]
# After this many naps (some ms) naps become longer, and hardly use any CPU.
NAPS = 50
LONG_NAP = 2e-4  # [s]
PATIENCE = 1e-4  # [s] to wait for the lock that the other thread holds, before checking the operation again


def rest(polls: int) -> None:
    """Wait a little before the next poll; longer after many polls."""
    if polls < OFFERS:
        os.sched_yield()
    else:
        time.sleep(NAP if polls < OFFERS + NAPS else LONG_NAP)


class Stage:
    """Stage of an operation; it begins when the previous stage is over. A stage of this base class is over at once."""

    works = False  # whether `over` does a piece of work when it returns False
    done = 0  # number of pieces that `over` has done, which `wait` must not repeat

    def begin(self) -> None:
        """Begin the stage. Does not wait."""

    def over(self) -> bool:
        """Return whether the stage is over. Does not wait; it is called until it returns True."""
        return True

    def wait(self) -> None:
        """Wait until the stage is over."""


class Work(Stage):
    """Calls that run one after the other; each call of `over` runs one of them."""

    works = True

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        self.calls, self.done = list(calls), 0

    def over(self) -> bool:
        if self.done < len(self.calls):
            self.calls[self.done]()
            self.done += 1
        if self.done < len(self.calls):
            return False
        self.done = 0
        return True

    def wait(self) -> None:
        for call in self.calls[self.done :] if self.done else self.calls:
            call()
        self.done = 0


_Calls = list[Callable[[], object]]


def _calls(stages: Sequence[Stage]) -> _Calls:
    """Return the calls that a waiting thread makes for stages of which the first has begun.

    A list of calls runs faster than a list of stages.
    """
    calls: _Calls = []
    for stage in stages:
        if stage is not stages[0] and type(stage).begin is not Stage.begin:
            calls.append(stage.begin)
        calls += stage.calls if type(stage) is Work else [stage.wait]
    return calls


class StagedOperation:
    """Stages that run one after the other, driven by the progress thread or by their owner, never by both at once.

    Parameters
    ----------
    runs
        Stages of the first run, of the second run, and so on; later runs begin again with the first list.
    first
        Number of stages that :meth:`start` runs itself.
    last
        Number of stages at the end that only the owner runs.
    queue
        Queue whose order the operation keeps; None: it is independent of other operations.
    prepare
        Function that a thread calls before it drives the operation.

    Attributes
    ----------
    at
        Index of the current stage.
    completed_at
        Time at which all stages but the last ones were over (`time.perf_counter` [s]).
    """

    def __init__(
        self,
        *runs: Sequence[Stage],
        first: int = 0,
        last: int = 0,
        queue: OperationQueue | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self.runs, self._first, self._last = [list(stages) for stages in runs], first, last
        self.queue, self._prepare = queue, prepare
        self.fault: Exception | None = None
        self.completed_at, self.worked, self.lock = 0.0, False, threading.Lock()
        self._stages: list[Stage] = []
        self._after: _Calls = []
        self._lists: list[tuple[_Calls, _Calls] | None] = [None] * len(runs)  # made at the first run of each
        self._started = self.at = 0

    @property
    def over(self) -> bool:
        """Whether the last started run is over."""
        return self.at == len(self._stages)

    @property
    def arrived(self) -> bool:
        """Whether all stages are over, except those left to the owner."""
        return self.at >= len(self._stages) - self._last

    @property
    def idle(self) -> bool:
        """Whether only the owner can continue the operation."""
        return self.arrived or self.fault is not None

    def start(self) -> None:
        """Begin a run. Does not wait for others."""
        if not self.runs:
            return
        number = self._started % len(self.runs)
        lists, stages = self._lists[number], self.runs[number]
        if lists is None:
            lists = self._lists[number] = _calls(stages[: self._first]), _calls(stages[self._first :])
        self._started += 1
        self._stages, (before, self._after) = stages, lists
        self.at, self.fault = 0, None
        # Without the `begin` of the first stage, which is a `Work` and has none.
        for call in before:
            call()
        self.at = self._first
        if self.at < len(self._stages):
            self._stages[self.at].begin()

    def poll(self, limit: float = float("inf")) -> bool:
        """Advance the operation, up to stage `limit`, by one piece of work per stage at most. Does not wait.

        Returns whether only the owner can continue. Sets `worked` to whether something was done.
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
        """Run the operation to its end in the calling thread (lowest latency, uses the core)."""
        if self._prepare is not None:
            self._prepare()
        # The progress thread may have done some pieces of the first stage: they are not repeated (sums would be wrong).
        in_pieces = self.at < len(self._stages) and self._stages[self.at].done > 0
        if self.at == self._first and not self._last and not in_pieces:  # nothing was done yet: run all of it at once
            for call in self._after:
                call()
            self.at, self.completed_at = len(self._stages), time.perf_counter()
        while self.at < len(self._stages):
            self._stages[self.at].wait()
            self._go_on()

    def end(self) -> None:
        """End a run that has failed."""
        self.at = len(self._stages)

    def _go_on(self) -> None:
        self.at += 1
        if self.at == len(self._stages) - self._last:
            self.completed_at = time.perf_counter()
        if self.at < len(self._stages):
            self._stages[self.at].begin()


class OperationQueue:
    """Queue of operations that all ranks start in the same order, and that begin every stage in that order.

    So a stage may be a collective. Only the first operation in each stage is polled: a poll costs the same for any
    number of waiting operations. The progress thread drives the queue, and so does a thread that waits for one of its
    operations.
    """

    def __init__(self) -> None:
        self.lock, self.worked = threading.Lock(), False
        self.operations: list[StagedOperation] = []

    @property
    def idle(self) -> bool:
        """Whether no operation is left."""
        return not self.operations

    def poll(self) -> bool:
        """Advance the operations until one of them has changed; return whether none is left. The caller holds the lock.
        """
        limit, self.worked = float("inf"), False
        # A copy, because complete operations are removed.
        for operation in tuple(self.operations):
            # An earlier operation is in the same stage: only that one is polled.
            if operation.at >= limit:
                continue
            if _poll(operation, limit):
                self.operations.remove(operation)
            limit = operation.at  # later operations must not overtake this one
            self.worked |= operation.worked
            # The next poll begins with the first operation again: earlier ones have priority.
            if self.worked:
                break
        return self.idle

    def complete(self, operation: StagedOperation) -> None:
        """Drive the queue until only the owner can continue `operation`."""
        polls = 0
        while operation in self.operations:
            if not self.lock.acquire(timeout=PATIENCE):
                continue  # the thread does a piece of work, and perhaps another one
            try:
                self.poll()
                polls = 0 if self.worked else polls + 1
            finally:
                self.lock.release()
            if polls:
                rest(polls)


def _poll(operation: StagedOperation, *limit: float) -> bool:
    """Call `StagedOperation.poll`; an exception is kept until a thread waits for the operation."""
    operation.worked = False
    try:
        return operation.fault is not None or operation.poll(*limit)
    except Exception as fault:
        operation.fault = fault
        return True


class Progress:
    """The progress thread of a root communicator and of all communicators split from it. All methods are local.

    The thread starts with the first operation, and sleeps on a condition while nothing is pending.
    """

    def __init__(self) -> None:
        self._last_change = 0.0
        self._pending: list[StagedOperation | OperationQueue] = []
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._closing = False

    def submit(self, operation: StagedOperation) -> None:
        """Start an operation, and let the thread drive it."""
        queue = operation.queue
        if queue is None:
            with operation.lock:  # the thread may poll it once more although it was complete
                operation.start()
        else:
            operation.start()  # others of the queue go on during the owner's first stages
            with queue.lock:
                queue.operations.append(operation)
        with self._lock:
            if queue is None:
                self._pending.append(operation)
            elif queue not in self._pending:
                self._pending.append(queue)
            self._last_change = time.perf_counter()
            if self._thread is None:
                self._launch()
            self._work.notify()

    def complete(self, operation: StagedOperation) -> None:
        """Wait until the operation is complete; drive it in the calling thread if it is not (lowest latency).

        Raises
        ------
        Exception
            The exception of the operation, from this thread or from the progress thread.
        """
        if operation.queue is not None:
            operation.queue.complete(operation)
        else:
            with self._lock:
                if operation in self._pending:
                    self._pending.remove(operation)  # from now on, only the calling thread drives it
        with operation.lock:
            # Under the lock: the progress thread has left its last poll of this operation.
            fault, operation.fault = operation.fault, None
            if fault is not None:
                operation.end()
                raise fault
            operation.wait()

    def close(self) -> None:
        """End the thread; idempotent. Pending operations are not continued."""
        with self._lock:
            self._closing = True
            self._work.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            atexit.unregister(self.close)
        self._closing = False  # an operation that is submitted later starts a new thread

    def _launch(self) -> None:
        # A daemon, so that a communicator that was not closed does not keep the process alive. It is joined at exit,
        # before mpi4py finalizes MPI (exit handlers run last in, first out).
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

    def _advance(self, pending: Sequence[StagedOperation | OperationQueue]) -> bool:
        """Poll all pending operations once; return whether one of them changed."""
        changed = False
        for item in pending:
            if not item.lock.acquire(blocking=False):  # its owner drives it
                continue
            try:
                done = item.poll() if isinstance(item, OperationQueue) else _poll(item)
                changed |= item.worked or (done and not isinstance(item, OperationQueue))
            finally:
                item.lock.release()
            if done:
                self._forget(item)
        return changed

    def _forget(self, item: StagedOperation | OperationQueue) -> None:
        with self._lock:
            # After the poll, a queue may have received another operation, or an operation may have been started again.
            if item in self._pending and item.idle:
                self._pending.remove(item)
