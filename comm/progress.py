"""One thread that lets communication proceed while the main thread computes.

No MPI library progresses by itself: a non-blocking all-reduce or a long message waits until somebody
calls MPI. This thread calls ``Testall`` on whatever is pending and sleeps in between.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from mpi4py import MPI

__all__ = ["Operation", "Progress", "Worker"]

# After how long without a change [s] the thread sleeps how long between two polls [s]. Short at first, so that the
# rounds of an all-reduce follow each other; what pends for long waits for a late rank, and a wake-up takes some 50 us
# of a core: 0.8 ms between them would be 4 to 7 % of it, 2 ms is half of that. A rank that waits polls by itself.
INTERVALS = ((2e-2, 2e-4), (2e-1, 8e-4), (float("inf"), 2e-3))


class Operation:
    """Requests that complete together, driven by the progress thread or by their owner, never by both.

    MPI forbids two threads to complete the same request; :class:`Progress` sees to it.
    """

    def __init__(self) -> None:
        self.requests: Sequence[MPI.Request] = ()
        self.fault: Exception | None = None
        self.completed_at = 0.0

    def poll(self) -> bool:
        """Let MPI progress; whether all requests are complete. Does not wait."""
        if not MPI.Request.Testall(self.requests):
            return False
        self.completed_at = time.perf_counter()
        return True

    def wait(self) -> None:
        """Wait for the requests in the calling thread (lowest latency, uses the core)."""
        MPI.Request.Waitall(self.requests)
        self.completed_at = time.perf_counter()


class Worker(Protocol):
    """Work that goes on in small pieces; may be driven by several threads."""

    @property
    def idle(self) -> bool:
        """Whether nothing is left that could be done, now or later."""

    def advance(self) -> bool:
        """Do one piece, if one can be done now. Does not wait. Whether something was done."""


class Progress:
    """The progress thread of a root communicator and those split from it. All methods are local.

    Started with the first operation or worker; sleeps on a condition while there is nothing to do.
    """

    def __init__(self) -> None:
        self._last_change = 0.0
        self._pending: list[Operation] = []
        self._workers: list[Worker] = []
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._completed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._closing = False

    def submit(self, operation: Operation) -> None:
        """Hand over an operation whose requests were just started."""
        operation.fault = None
        with self._lock:
            self._pending.append(operation)
            self._last_change = time.perf_counter()
            if self._thread is None:
                self._launch()
            self._work.notify()

    def employ(self, worker: Worker) -> None:
        """See to it that the worker advances until it is idle; to be called again whenever it has got new work."""
        with self._lock:
            if worker not in self._workers:
                self._workers.append(worker)
            self._last_change = time.perf_counter()
            if self._thread is None:
                self._launch()
            self._work.notify()

    def complete(self, operation: Operation) -> None:
        """Return when the operation is complete, waiting in MPI if it is not yet (lowest latency).

        Raises
        ------
        Exception
            What the operation failed with, on this thread or on the progress thread.
        """
        with self._lock:
            unfinished = operation in self._pending
            if unfinished:
                self._pending.remove(operation)
        if unfinished:
            operation.wait()
        self._raise(operation)

    def sleep(self, operation: Operation) -> None:
        """Like :meth:`complete`, but sleep meanwhile and leave the operation to the thread."""
        with self._lock:
            while operation in self._pending:
                self._completed.wait()
        self._raise(operation)

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

    def _raise(self, operation: Operation) -> None:
        fault, operation.fault = operation.fault, None
        if fault is not None:
            raise fault

    def _launch(self) -> None:
        # A daemon, so that a communicator somebody forgot to close does not keep the process alive; joined
        # at exit, before mpi4py finalizes MPI under its feet (exit handlers run last in, first out).
        self._thread = threading.Thread(target=self._run, name="halograd-progress", daemon=True)
        atexit.register(self.close)
        self._thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._pending and not self._workers and not self._closing:
                    self._work.wait()
                if self._closing:
                    return
                self._advance()
                workers = self._workers
                waited = time.perf_counter() - self._last_change
            # Not under the lock: a piece of work takes some 0.1 ms, and `complete` must not wait for it.
            if self._drive(workers):
                self._last_change = time.perf_counter()
            else:
                time.sleep(next(interval for limit, interval in INTERVALS if waited < limit))

    def _drive(self, workers: list[Worker]) -> bool:
        """Let every worker do one piece, and leave out those that are idle; whether something was done."""
        done = False
        for worker in workers:
            done |= worker.advance()
        if any(worker.idle for worker in workers):
            with self._lock:
                self._workers = [worker for worker in self._workers if not worker.idle]
        return done

    def _advance(self) -> None:
        """Poll every pending operation once; called with the lock held."""
        for operation in tuple(self._pending):
            try:
                done = operation.poll()
            except Exception as fault:  # it belongs to whoever waits for the operation
                operation.fault = fault
                done = True
            if done:
                self._pending.remove(operation)
                self._last_change = time.perf_counter()
                self._completed.notify_all()
