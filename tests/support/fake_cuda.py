"""Doubles of CuPy's streams and events, which record every call and execute it late.

The kernels' stream executes its operations at once. All other streams execute an operation only when something waits
for it: a read that comes too early and a write that comes too soon give wrong values, and the trace contains operations
that were not ordered at all.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.support.trace import COMPUTE, Trace

__all__ = ["FakeCupy", "FakeEvent", "FakeStream"]


class FakeEvent:
    """Double of ``cupy.cuda.Event``. A wait is for the last record before it; without a record it is an error."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda, self._polls, self.time = cuda, 0, 0.0
        self.ptr = cuda.address(self)
        self.stream: FakeStream | None = None
        self.position = 0
        self.version = 0  # records that were enqueued
        self.key: Any = (cuda.trace.rank, self.ptr)

    def record(self, stream: FakeStream) -> None:
        assert stream is not None, "recorded on the null stream"
        self._cuda.seen()
        self.stream, self._polls = stream, 0
        self.version += 1
        self._cuda.trace.add("record", "record", stream=stream.ptr, event=(self.key, self.version))
        self.position = stream.enqueue(self._come)

    def _come(self) -> None:
        self.time = time.perf_counter()

    @property
    def done(self) -> bool:
        """Return whether the event is complete: from the third call on, or at once if it was not recorded."""
        self._cuda.seen()
        self._polls += 1
        if self.stream is None or self._polls < 3:
            return self.stream is None
        self.stream.run_to(self.position)
        if self._polls == 3:  # from here on the host knows
            self._cuda.trace.add("host wait", "poll", event=(self.key, self.version))
        return True

    def synchronize(self) -> None:
        self._cuda.host_waits(self)

    def come_to(self) -> None:
        """Wait until the stream has reached the last record."""
        if self.stream is not None:
            self.stream.run_to(self.position)


class FakeStream:
    """Double of ``cupy.cuda.Stream``: the kernels' stream executes immediately, another one when it is waited for."""

    def __init__(self, cuda: FakeCuda, non_blocking: bool = False, priority: int = 0, kernels: bool = False) -> None:
        assert non_blocking, "a stream that the null stream would hold up"
        self._cuda, self.priority, self._at_once = cuda, priority, kernels
        self.ptr = COMPUTE if kernels else cuda.address(self)
        self._todo: list[Callable[[], None]] = []
        self.ran = 0
        cuda.streams[self.ptr] = self

    def enqueue(self, run: Callable[[], None]) -> int:
        """Enqueue an operation; return the position in the stream after it."""
        with self._cuda.lock:
            if not self._at_once:
                self._todo.append(run)
                return self.ran + len(self._todo)
            run()
            self.ran += 1
            return self.ran

    def run_to(self, position: int) -> None:
        """Execute the operations up to a position."""
        with self._cuda.lock:
            while self.ran < position:
                self._todo.pop(0)()
                self.ran += 1

    def wait_event(self, event: Any) -> None:
        self._cuda.seen()
        found = self._cuda.events[event.ptr]
        position, stream = found.position, found.stream
        assert stream is not None, "waits for an event that was never recorded: CUDA would not wait at all"
        self._cuda.trace.add("wait", "wait", stream=self.ptr, event=(found.key, found.version))
        if stream is not self:
            self.enqueue(lambda: stream.run_to(position))

    def synchronize(self) -> None:
        self._cuda.trace.add(
            "record", "record", stream=self.ptr, event=((self._cuda.trace.rank, "all", self.ptr), self.ran)
        )
        self._cuda.trace.add("host wait", "stream", event=((self._cuda.trace.rank, "all", self.ptr), self.ran))
        self._cuda.synchronized.append("stream.synchronize()")
        self.run_to(self.ran + len(self._todo))

    def is_capturing(self) -> bool:
        return False

    def use(self) -> FakeStream:
        self._cuda.local.stream = self
        return self

    def __enter__(self) -> FakeStream:
        stack = self._cuda.local.__dict__.setdefault("stack", [])
        stack.append(self)
        return self.use()

    def __exit__(self, *exception: object) -> None:
        """Restore the stream of the enclosing ``with``, as CuPy does; without one, the device's stream."""
        stack = self._cuda.local.stack
        stack.pop()
        (stack[-1] if stack else self._cuda.compute).use()


class FakeCuda:
    """Double of ``cupy.cuda`` without NCCL: streams and events of one device."""

    def __init__(self, trace: Trace, waited: Callable[[FakeEvent], None], seen: Callable[[], None]) -> None:
        self.trace, self._waited, self.seen = trace, waited, seen
        self.lock = threading.RLock()
        self.local = threading.local()
        self.streams: dict[int, FakeStream] = {}
        self.events: dict[int, FakeEvent] = {}
        self.synchronized: list[str] = []
        self._next = 1000
        self.compute = FakeStream(self, True, kernels=True)

    def address(self, thing: Any) -> int:
        self._next += 1
        if isinstance(thing, FakeEvent):
            self.events[self._next] = thing
        return self._next

    @property
    def current(self) -> FakeStream:
        """Return the current stream of this thread."""
        return getattr(self.local, "stream", self.compute)

    def host_waits(self, event: FakeEvent) -> None:
        self.seen()
        self.trace.add("host wait", "event", event=(event.key, event.version))
        self._waited(event)
        event.come_to()


class FakeCupy:
    """Double of the part of the module ``cupy`` that transports use."""

    def __init__(self, cuda: FakeCuda, address: str = "0000:00:00.0") -> None:
        runtime = SimpleNamespace(
            eventQuery=lambda ptr: 0 if cuda.events[ptr].done else 600,
            deviceGetPCIBusId=lambda ordinal: address,
            # CuPy reads on to the next byte that is 0.
            getDeviceProperties=lambda ordinal: {"uuid": b"identifier of it" + os.urandom(4)},
        )
        self.cuda = SimpleNamespace(
            runtime=runtime,
            Stream=lambda **options: FakeStream(cuda, **options),
            Event=lambda disable_timing=False: FakeEvent(cuda),
            get_elapsed_time=lambda first, second: 1e3 * (second.time - first.time),
        )
