"""A thread that detects lost peers: NCCL messages and sums would wait for them forever on the device.

It polls every communicator for errors (``ncclCommGetAsyncError``), and every active message and sum for its duration.
On a fault it aborts all communicators. This ends the kernels that wait, so that the host returns from whatever it waits
for; the next communication call raises the fault. If there is no such call, the thread ends the job.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Protocol

from ..errors import CommError

__all__ = ["TIMEOUT", "DeviceWatchdog", "Monitored"]

TIMEOUT = 600.0  # [s]: allows for a very slow rank, not only for a message
GRACE = 30.0  # [s]: time for the main thread to raise a fault
PATIENCE = 10.0  # [s]: time to abort communicators; an NCCL call that never returns must not block
IN_PROGRESS = 7  # ncclInProgress; CuPy has no text for it, and raises KeyError(7)


class Monitored(Protocol):
    """Object that may fail while the host does something else."""

    def check(self) -> None:
        """Raise the fault of the object, if any. Does not wait."""

    def abort(self) -> None:
        """End all active operations of the object. Any thread may call it, also twice."""


class DeviceWatchdog:
    """Monitor of communicators and their active operations. Local; any thread may call its methods.

    Parameters
    ----------
    who
        ``"rank 1 of 4"``, for messages.
    timeout
        Time after which an active operation counts as lost [s].
    interval
        Time between two polls [s].
    end
        Function that is called with a message if no call on this rank raises a fault in time, or if the body of
        `watching` takes too long; by default it prints the message. A caller that can end the job does so here.
    begin
        Function that each of its threads calls first: it selects the device of this rank.
    together
        Context in which all communicators are aborted in one group, because the kernels of one may wait for those of
        another.
    grace
        Time for a call on this rank to raise a fault [s].
    """

    def __init__(
        self,
        who: str,
        timeout: float = TIMEOUT,
        end: Callable[[str], None] | None = None,
        begin: Callable[[], None] = lambda: None,
        together: Callable[[], AbstractContextManager[None]] = nullcontext,
        interval: float = 1.0,
        grace: float = GRACE,
    ) -> None:
        if not timeout > 0:
            raise CommError(f"timeout: expected seconds > 0, got {timeout}")
        self.timeout, self._who, self._interval, self._grace = timeout, who, min(interval, timeout), grace
        self._end, self._begin, self._together = end or _print, begin, together
        self._monitored: list[Monitored] = []
        self._under_way: dict[int, tuple[Any, str, float]] = {}
        self._fault: str | None = None
        self._raised = False
        self._lock = threading.Lock()
        #: Held while an operation is queried: one that was forgotten is not queried any more.
        self._querying = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, monitored: Monitored) -> None:
        """Monitor a communicator from now on."""
        with self._lock:
            self._monitored.append(monitored)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="halograd-nccl-watchdog", daemon=True)
                self._thread.start()

    def remove(self, monitored: Monitored) -> None:
        """Stop monitoring a communicator; an unknown one is ignored."""
        with self._lock:
            self._monitored = [other for other in self._monitored if other is not monitored]

    def under_way(self, passage: Any, label: str) -> None:
        """Record that `passage` was just started again; its attribute ``done`` reports its end."""
        # One assignment, to a key that exists from the second time on: no lock in a step.
        # The item keeps the passage alive, so no other object gets its id.
        self._under_way[id(passage)] = (passage, label, time.monotonic())

    def forget(self, passage: Any) -> None:
        """Remove a passage from the active operations; an unknown one is ignored.

        Afterwards the watchdog does not query it, so that its event may be recorded in a graph.
        """
        with self._querying:
            self._under_way.pop(id(passage), None)

    @contextmanager
    def watching(self, label: str) -> Iterator[None]:
        """Call `end` if the body takes longer than the timeout; the body blocks, and cannot be aborted."""
        timer = threading.Timer(self.timeout, lambda: self._end(self._lost(label, self.timeout)))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def raise_fault(self) -> None:
        """Raise the fault that was found, if any.

        Raises
        ------
        CommError
            The ranks have not agreed on it: the other ranks may be gone.
        """
        if self._fault is not None:
            self._raised = True
            raise CommError(self._fault)

    def look(self) -> None:
        """Poll all communicators and operations once. On a fault abort them, and end the job if no call raises the
        fault in time.
        """
        fault = self._failed() or self._overdue()
        if fault is None or self._fault is not None:
            return
        # Before `abort`: the calls that it ends must find the fault.
        self._fault = fault
        self.abort()
        if not self._stop.wait(self._grace) and not self._raised:
            self._end(fault)

    def abort(self) -> None:
        """End all active operations on this rank; returns when that is done, or takes too long."""
        with self._lock:
            monitored = tuple(self._monitored)
        if monitored:
            # In a thread of its own, because an abort may never return.
            thread = threading.Thread(target=self._abort, args=(monitored,), name="halograd-nccl-abort", daemon=True)
            thread.start()
            thread.join(PATIENCE)

    def _abort(self, monitored: Sequence[Monitored]) -> None:
        self._begin()
        with self._together():
            for each in monitored:
                with suppress(Exception):  # the other communicators must be aborted too
                    each.abort()

    def close(self) -> None:
        """End the thread; idempotent."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(2 * PATIENCE)  # it may be in `abort`, which takes up to PATIENCE

    def _run(self) -> None:
        self._begin()
        while not self._stop.wait(self._interval):
            self.look()
            if self._fault is not None:  # all communicators are aborted: nothing is left to poll
                return

    def _failed(self) -> str | None:
        with self._lock:
            monitored = tuple(self._monitored)
        for each in monitored:
            try:
                each.check()
            except Exception as error:
                if isinstance(error, KeyError) and error.args == (IN_PROGRESS,):
                    continue
                return f"nccl: {self._who}: {error}; a peer is gone, see its output; the job cannot go on"
        return None

    def _overdue(self) -> str | None:
        now = time.monotonic()
        # A copy, made in one instruction, because the main thread may add items now.
        for key, item in list(self._under_way.items()):
            passage, label, since = item
            with self._querying:
                if self._under_way.get(key) is not item:
                    continue  # forgotten, or started again, since the copy was made
                try:
                    done = passage.done
                except Exception as error:
                    return f"{self._who}: {label}: {error}; the device has failed, and the job cannot go on"
            if done:
                # Unless the operation was started again since the query.
                if self._under_way.get(key) is item:
                    self._under_way.pop(key, None)
            elif now - since > self.timeout:
                return self._lost(label, now - since)
        return None

    def _lost(self, label: str, seconds: float) -> str:
        return (
            f"nccl: {self._who}: {label} has been under way for {seconds:.0f} s, expected less than {self.timeout:g}: "
            "a peer is gone or stuck, see the output of the other ranks (or allow more with HALOGRAD_GPU_TIMEOUT, [s])"
        )


def _print(text: str) -> None:
    sys.stderr.write(f"halograd: {text}\n")
    sys.stderr.flush()
