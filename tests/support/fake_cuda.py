"""Doubles of CuPy's streams, events and memory of other processes, which record every call and execute it late.

The kernels' stream executes its operations at once. All other streams execute an operation only when something waits
for it: a read that comes too early and a write that comes too soon give wrong values, and the trace contains operations
that were not ordered at all.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.support.trace import COMPUTE, Trace

__all__ = ["FakeCupy", "FakeEvent", "FakeStream", "Shared"]

HANDLE_BYTES = 64


class Shared:
    """Bytes in a file that several processes map, known by a handle of 64 bytes."""

    def __init__(self, nbytes: int, path: Path | None = None) -> None:
        self.owner, self.nbytes = path is None, nbytes
        self.path = path or Path(tempfile.gettempdir(), f"hg-{uuid.uuid4().hex[:20]}")
        if self.owner:
            self.path.write_bytes(bytes(nbytes))
        with self.path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.memory = np.frombuffer(self._map, np.uint8)
        self.nbytes = self.memory.nbytes
        self.address = int(self.memory.__array_interface__["data"][0])

    @property
    def handle(self) -> bytes:
        return str(self.path).encode().ljust(HANDLE_BYTES, b"\0")

    @classmethod
    def opened(cls, handle: bytes) -> Shared:
        assert isinstance(handle, bytes) and len(handle) == HANDLE_BYTES
        return cls(0, Path(handle.rstrip(b"\0").decode()))

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


class FakeEvent:
    """Double of ``cupy.cuda.Event``. A wait is for the last record before it; without a record it is an error."""

    def __init__(self, cuda: FakeCuda, timed: bool, interprocess: bool) -> None:
        assert not (timed and interprocess), "Timing must be disabled for interprocess events"
        self._cuda, self._polls, self.time = cuda, 0, 0.0
        self.ptr = cuda.address(self)
        self.stream: FakeStream | None = None
        self.position = 0
        # Records that were enqueued, and those that were come to: other processes look at them.
        self.shared = Shared(16) if interprocess else None
        self.counts: Any = np.zeros(2, np.int64) if self.shared is None else self.shared.memory.view(np.int64)
        self.key: Any = (cuda.trace.rank, self.ptr) if self.shared is None else self.shared.handle

    def record(self, stream: FakeStream) -> None:
        assert stream is not None, "recorded on the null stream"
        self._cuda.seen()
        self.stream, self._polls = stream, 0
        version = int(self.counts[0]) + 1
        self._cuda.trace.add("record", "record", stream=stream.ptr, event=(self.key, version))
        self.counts[0] = version
        self.position = stream.enqueue(lambda: self._come(version))

    def _come(self, version: int) -> None:
        self.counts[1], self.time = version, time.perf_counter()

    @property
    def done(self) -> bool:
        """Return whether the event is complete: from the third call on, or at once if it was not recorded."""
        self._cuda.seen()
        self._polls += 1
        if self.stream is None or self._polls < 3:
            return self.stream is None
        self.stream.run_to(self.position)
        if self._polls == 3:  # from here on the host knows
            self._cuda.trace.add("host wait", "poll", event=(self.key, int(self.counts[0])))
        return True

    def synchronize(self) -> None:
        self._cuda.host_waits(self)

    def come_to(self) -> None:
        """Wait until the stream has reached the last record."""
        version = int(self.counts[0])
        if self.stream is not None:
            self.stream.run_to(self.position)
            return
        while self.counts[1] < version:  # of another process
            time.sleep(1e-4)

    def __del__(self) -> None:
        if self.shared is not None and self.shared.owner:
            self.shared.remove()


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
        version = int(found.counts[0])
        assert version > 0, "waits for an event that was never recorded: CUDA would not wait at all"
        self._cuda.trace.add("wait", "wait", stream=self.ptr, event=(found.key, version))
        position, stream = found.position, found.stream
        if stream is None:
            self.enqueue(lambda: _come_to(found, version))
        elif stream is not self:
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


def _come_to(event: FakeEvent, version: int) -> None:
    while event.counts[1] < version:
        time.sleep(1e-4)


class FakeCuda:
    """Double of ``cupy.cuda`` without NCCL: streams and events of one device, and memory that processes share."""

    def __init__(self, trace: Trace, waited: Callable[[FakeEvent], None], seen: Callable[[], None]) -> None:
        self.trace, self._waited, self.seen = trace, waited, seen
        self.lock = threading.RLock()
        self.local = threading.local()
        self.streams: dict[int, FakeStream] = {}
        self.events: dict[int, FakeEvent] = {}
        self.synchronized: list[str] = []
        self._next = 1000
        self._memory: dict[int, Shared] = {}
        self._mapped: dict[int, Shared] = {}
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
        self.trace.add("host wait", "event", event=(event.key, int(event.counts[0])))
        self._waited(event)
        event.come_to()

    # -- cupy.cuda.runtime ----------------------------------------------------------------------
    def malloc(self, nbytes: int) -> int:
        shared = Shared(nbytes)
        shared.memory.fill(0xA5)
        self._memory[shared.address] = shared
        self.trace.shared[shared.address] = (nbytes, str(shared.path))
        return shared.address

    def free(self, ptr: int) -> None:
        shared = self._memory.pop(ptr)
        del self.trace.shared[ptr]
        assert not list(shared.path.parent.glob(f"{shared.path.name}.*")), "freed while another process has it mapped"
        shared.remove()

    def ipcGetMemHandle(self, ptr: int) -> bytes:
        return self._memory[ptr].handle  # the base of an allocation, not any place within

    def ipcOpenMemHandle(self, handle: bytes) -> int:
        shared = Shared.opened(handle)
        assert str(shared.path) not in {str(own.path) for own in self._memory.values()}, "one's own handle"
        Path(f"{shared.path}.{os.getpid()}").touch()
        self._mapped[shared.address] = shared
        self.trace.shared[shared.address] = (shared.nbytes, str(shared.path))
        return shared.address

    def ipcCloseMemHandle(self, ptr: int) -> None:
        shared = self._mapped.pop(ptr)
        del self.trace.shared[ptr]
        Path(f"{shared.path}.{os.getpid()}").unlink()

    def ipcGetEventHandle(self, ptr: int) -> bytes:
        shared = self.events[ptr].shared
        assert shared is not None, "an event that was not made for other processes"
        # Whoever opens it comes after what this host has done: it was told of the handle.
        self.trace.add("host record", "handle", event=(shared.handle, "handle"))
        return shared.handle

    def ipcOpenEventHandle(self, handle: bytes) -> int:
        self.trace.add("host wait", "handle", event=(handle, "handle"))
        event = FakeEvent.__new__(FakeEvent)
        event._cuda, event._polls, event.stream, event.position = self, 0, None, 0
        event.ptr, event.shared = self.address(event), Shared.opened(handle)
        event.counts, event.key = event.shared.memory.view(np.int64), handle
        return event.ptr

    def eventDestroy(self, ptr: int) -> None:
        del self.events[ptr]


class FakeCupy:
    """Double of the part of the module ``cupy`` that transports use."""

    def __init__(self, cuda: FakeCuda, make: Callable[[np.ndarray], Any], address: str = "0000:00:00.0") -> None:
        self._make = make
        runtime = SimpleNamespace(
            **{name: getattr(cuda, name) for name in dir(FakeCuda) if name.startswith("ipc")},
            malloc=cuda.malloc,
            free=cuda.free,
            eventDestroy=cuda.eventDestroy,
            eventQuery=lambda ptr: 0 if cuda.events[ptr].done else 600,
            deviceGetPCIBusId=lambda ordinal: address,
            deviceGetByPCIBusId=lambda text: 0,
            deviceCanAccessPeer=lambda one, other: 1,
        )
        self.cuda = SimpleNamespace(
            runtime=runtime,
            Stream=lambda **options: FakeStream(cuda, **options),
            Event=lambda disable_timing=False, interprocess=False: FakeEvent(cuda, not disable_timing, interprocess),
            get_elapsed_time=lambda first, second: 1e3 * (second.time - first.time),
            UnownedMemory=lambda ptr, size, owner, device_id: SimpleNamespace(ptr=ptr, size=size),
            MemoryPointer=lambda memory, offset: SimpleNamespace(memory=memory, ptr=memory.ptr + offset),
        )

    def ndarray(self, shape: Any, dtype: Any, memptr: Any) -> Any:
        nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        assert nbytes <= memptr.memory.size
        raw = (ctypes.c_uint8 * nbytes).from_address(memptr.ptr) if nbytes else bytearray()
        return self._make(np.frombuffer(raw, np.uint8).view(dtype).reshape(shape))
