"""Communication streams: the events that order them with the kernels' stream, their times, and sums of arrays on them.

::

    compute   ... pack |before            kernels ...            join ... unpack
                       v                                          ^
    comm. stream       wait  send, receive, sum ...  |after ------+
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ...device import Device
from ...device.cupy import arrived
from ..counters import Meter
from ..progress import Stage, Work
from ..reduction import Pairs

__all__ = [
    "CommStream",
    "Cuda",
    "Join",
    "Launched",
    "Passage",
    "StreamCodec",
    "StreamMeter",
    "StreamSpans",
    "TimedPassage",
    "add_up",
]

# A lower number is a higher priority; CUDA clamps it to its range. The thread blocks of a message run before waiting
# blocks of kernels; otherwise a halo would travel only after the kernel that should hide it.
HIGHEST = -100


class Cuda:
    """CuPy and one of its devices. Local.

    Attributes
    ----------
    cupy
        The module.
    device
        A :class:`halograd.device.cupy.CupyDevice`.
    """

    def __init__(self, device: Any) -> None:
        self.device, self.cupy = device, device.cupy

    @property
    def compute(self) -> Any:
        """Stream of the kernels."""
        return self.device.compute

    def event(self) -> Any:
        """Return an event without timing."""
        # CUDA waits for such events, and queries them, with the least overhead.
        return self.cupy.cuda.Event(disable_timing=True)

    def arrived(self, event: Any) -> bool:
        """Return whether the device has reached the event. Does not wait; raises a fault of the device."""
        return arrived(self.cupy, event)

    def comm_stream(self) -> CommStream:
        """Return a stream of the highest priority."""
        self.device.use()
        # Non-blocking: otherwise the default stream and this one would wait for each other.
        return CommStream(self, self.cupy.cuda.Stream(non_blocking=True, priority=HIGHEST))


class CommStream:
    """A stream on which messages or sums run in the order in which they were enqueued. Local."""

    def __init__(self, cuda: Cuda, stream: Any) -> None:
        self.cuda, self.stream = cuda, stream

    @property
    def ptr(self) -> int:
        """Address of the stream, for libraries."""
        return int(self.stream.ptr)


class Passage:
    """Ordering of one message or sum: from the kernels' stream to a communication stream and back. Local.

    Its two events are created once: when an event is recorded again, streams that already wait for it are not affected.
    """

    def __init__(self, comm_stream: CommStream) -> None:
        self.comm_stream = comm_stream
        self._before, self._after = comm_stream.cuda.event(), comm_stream.cuda.event()

    def enter(self) -> None:
        """Let the communication stream wait for all work enqueued on the kernels' stream so far."""
        self._before.record(self.comm_stream.cuda.compute)
        self.comm_stream.stream.wait_event(self._before)

    def leave(self) -> None:
        """Mark all work enqueued on the communication stream so far: `join` waits for it."""
        self._after.record(self.comm_stream.stream)

    def join(self) -> None:
        """Let the kernels' stream wait for the work before the last `leave`."""
        self.comm_stream.cuda.compute.wait_event(self._after)

    @property
    def done(self) -> bool:
        """Whether the communication stream has reached the last `leave`. Does not wait; any thread may read it.

        Raises a fault of the device.
        """
        return self.comm_stream.cuda.arrived(self._after)

    def wait(self) -> None:
        """Block the host until the communication stream has reached the last `leave`."""
        self._after.synchronize()


class Launched:
    """A graph that contains messages; the watchdog is notified of its launches. Local.

    The watchdog cannot query the operations in a graph, because their events were recorded in the graph.
    """

    def __init__(self, cuda: Cuda, under_way: Callable[[Any, str], None], label: str) -> None:
        self._cuda, self._under_way, self._label, self._event = cuda, under_way, label, cuda.event()

    def __call__(self) -> None:
        self._event.record(self._cuda.compute)
        self._under_way(self, self._label)

    @property
    def done(self) -> bool:
        """Whether the last launch is complete. Does not wait."""
        return self._cuda.arrived(self._event)


class StreamSpans:
    """Events whose times go to a recorder when the device has reached them. Local; the host does not wait.

    Times are device times, relative to an instant that is known on host and device.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._waiting: deque[tuple[StreamMeter, list[Any]]] = deque()
        self._origin: Any = None
        self._began = 0.0

    def prepare(self) -> None:
        """Set the origin of times. Waits for the device once; call it while channels are built, not in a step."""
        if self._origin is None:
            self._cuda.device.synchronize()
            self._origin, self._began = self.timestamp(self._cuda.compute), time.perf_counter()

    @property
    def ready(self) -> bool:
        """Whether `prepare` was called."""
        return self._origin is not None

    def timestamp(self, stream: Any) -> Any:
        """Return a timing event after all work enqueued on the stream so far."""
        event = self._cuda.cupy.cuda.Event()
        event.record(stream)
        return event

    def put(self, meter: StreamMeter, events: list[Any]) -> None:
        """Queue four events for the recorder: begin and end on the stream, begin and end of waiting.

        The recorder gets the times of all queued events that the device has reached.
        """
        # The device reaches the last of the four after the other three.
        self._waiting.append((meter, events))
        while self._waiting and self._cuda.arrived(self._waiting[0][1][-1]):
            oldest, reached = self._waiting.popleft()
            elapsed = self._cuda.cupy.cuda.get_elapsed_time
            # CUDA returns milliseconds.
            oldest.record([self._began + 1e-3 * float(elapsed(self._origin, event)) for event in reached])


class StreamMeter(Meter):
    """Meter of an operation on a communication stream; its times come from the device, not from the host."""

    def __init__(self, meter: Meter, spans: StreamSpans) -> None:
        super().__init__(meter._instruments, meter.kind, meter.name, meter.messages, meter.nbytes, meter.ranks)
        self._spans = spans
        if self._instruments.recorder is not None:
            spans.prepare()

    def passage(self, comm_stream: CommStream) -> Passage:
        """Return a passage that is timed while there is a recorder."""
        return TimedPassage(comm_stream, self, self._spans)

    @property
    def timed(self) -> bool:
        """Whether times are recorded now: there is a recorder, it is not paused, and times have an origin."""
        recorder = self._instruments.recorder
        return recorder is not None and self._spans.ready and not getattr(recorder, "paused", False)

    def took(self, started: float, waited_from: float, arrived: float, waited_to: float) -> None:
        """Do nothing: the time that the host takes to enqueue work is not recorded."""

    def record(self, times: list[float]) -> None:
        """Report times to the recorder: begin and end on the stream, begin and end of waiting [s]."""
        recorder = self._instruments.recorder
        if recorder is not None:
            recorder.span(self.label, "communication", times[0], times[1])
            recorder.span(self.label, "wait", times[2], times[3])


class TimedPassage(Passage):
    """A passage with timing events on both streams. Without a recorder it has none."""

    def __init__(self, comm_stream: CommStream, meter: StreamMeter, spans: StreamSpans) -> None:
        super().__init__(comm_stream)
        self._meter, self._spans = meter, spans
        self._events: list[Any] = []

    def enter(self) -> None:
        super().enter()
        # After `enter`: the wait for the kernels' stream is no communication.
        self._events = [self._spans.timestamp(self.comm_stream.stream)] if self._meter.timed else []

    def leave(self) -> None:
        if self._events:
            self._events.append(self._spans.timestamp(self.comm_stream.stream))
        super().leave()

    def join(self) -> None:
        if len(self._events) < 2:  # not timed: there was no recorder at `enter`, or it was paused
            super().join()
            return
        compute = self.comm_stream.cuda.compute
        # Both on the kernels' stream: the time between them is its wait.
        before = self._spans.timestamp(compute)
        super().join()
        self._spans.put(self._meter, [*self._events, before, self._spans.timestamp(compute)])
        self._events = []


class Join(Stage):
    """Stage that lets the kernels' stream wait for the communication stream, after a check for faults."""

    def __init__(self, passage: Passage, check: Callable[[], None] = lambda: None) -> None:
        self._passage, self._check = passage, check

    def wait(self) -> None:
        self._check()
        self._passage.join()


class StreamCodec:
    """Codec that leaves elements unchanged; its arithmetic is enqueued on a communication stream, after the work
    enqueued before.
    """

    def __init__(self, comm_stream: CommStream) -> None:
        self.comm_stream = comm_stream

    def deposit(self, pairs: Pairs) -> Stage:
        return self._enqueued(self.comm_stream.cuda.device.copies(list(pairs)) if len(pairs) else None)

    copy_back = deposit

    def add(self, summands: Sequence[Any], total: Any) -> Stage:
        return self._enqueued(add_up(self.comm_stream.cuda.device, summands, total) if total.size else None)

    def _enqueued(self, call: Callable[[], object] | None) -> Stage:
        return Work([] if call is None else [partial(self._on_comm_stream, call)])

    def _on_comm_stream(self, call: Callable[[], object]) -> None:
        # Copies and sums are enqueued on the stream that is current.
        with self.comm_stream.stream:
            call()


def add_up(device: Device, summands: Sequence[Any], total: Any) -> Callable[[], None]:
    """Return a function that enqueues ``total = summands[0] + summands[1] + ...``, in this order, on the current
    stream.

    Local. `total` may be one of the summands; if it is one after the first, the first is overwritten, too.
    """
    first, *others = summands
    at = next((i for i, summand in enumerate(summands) if summand is total), None)
    if at == 0:
        return device.sums([(total, other) for other in others])
    if at is None:  # `total` begins as a copy of the first
        copy, sums = device.copies([(total, first)]), device.sums([(total, other) for other in others])
        return both(copy, sums)
    # Added up in the first, to keep the order; `total` is read, as a summand, before it is overwritten.
    return both(device.sums([(first, other) for other in others]), device.copies([(total, first)]))


def both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls `first`, then `second`."""

    def run() -> None:
        first()
        second()

    return run
