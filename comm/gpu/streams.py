"""Streams beside that of the kernels, the events that order them, the times they tell, and sums of arrays on them.

::

    compute   ... pack |before            kernels ...            join ... unpack
                       v                                          ^
    lane               wait  send, receive, sum ...  |behind -----+
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
    "Cuda",
    "Join",
    "Lane",
    "LaneCodec",
    "LaneMeter",
    "LaneSpans",
    "Launched",
    "Passage",
    "TimedPassage",
    "add_up",
]

# Lower is higher; CUDA clamps what is out of its range. Blocks of a message are placed before those of kernels that
# wait for room, or a halo would travel when the kernel that should hide it is over.
HIGHEST = -100


class Cuda:
    """CuPy, and one device of it. Local.

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
        """Return an event without a time."""
        return self.cupy.cuda.Event(disable_timing=True)

    def arrived(self, event: Any) -> bool:
        """Return whether the device has come to it; raises what has gone wrong there. Does not wait."""
        return arrived(self.cupy, event)

    def lane(self) -> Lane:
        """Return a stream of the highest priority."""
        self.device.use()
        return Lane(self, self.cupy.cuda.Stream(non_blocking=True, priority=HIGHEST))


class Lane:
    """A stream on which messages or sums travel, in the order in which they were enqueued. Local."""

    def __init__(self, cuda: Cuda, stream: Any) -> None:
        self.cuda, self.stream = cuda, stream

    @property
    def ptr(self) -> int:
        """Address of the stream, for libraries."""
        return int(self.stream.ptr)


class Passage:
    """The way of one message or sum from the stream of the kernels to a lane and back. Local.

    Its two events are made once: an event that is recorded again leaves those alone who wait for it already.
    """

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._before, self._behind = lane.cuda.event(), lane.cuda.event()

    def enter(self) -> None:
        """Let the lane wait for what the kernels' stream has been given so far."""
        self._before.record(self.lane.cuda.compute)
        self.lane.stream.wait_event(self._before)

    def leave(self) -> None:
        """Mark what the lane has been given so far: `join` waits for it."""
        self._behind.record(self.lane.stream)

    def join(self) -> None:
        """Let the kernels' stream wait for `leave`."""
        self.lane.cuda.compute.wait_event(self._behind)

    @property
    def done(self) -> bool:
        """Whether the lane has come to the last `leave`. Does not wait; may be asked from another thread.

        Raises what has gone wrong on the device.
        """
        return self.lane.cuda.arrived(self._behind)

    def wait(self) -> None:
        """Return when the lane has come to the last `leave`: for those who have to see it on the host."""
        self._behind.synchronize()


class Launched:
    """A graph with messages in it; the watchdog is notified of its launches. Local.

    The watchdog cannot look at what is recorded in a graph: its events cannot be queried.
    """

    def __init__(self, cuda: Cuda, under_way: Callable[[Any, str], None], label: str) -> None:
        self._cuda, self._under_way, self._label, self._event = cuda, under_way, label, cuda.event()

    def __call__(self) -> None:
        self._event.record(self._cuda.compute)
        self._under_way(self, self._label)

    @property
    def done(self) -> bool:
        """Whether the last one is over. Does not wait."""
        return self._cuda.arrived(self._event)


class LaneSpans:
    """Events whose times go to a recorder when the device has come there. Local; the host does not wait.

    Times are those of the device, counted from a moment that host and device shared.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._waiting: deque[tuple[LaneMeter, list[Any]]] = deque()
        self._origin: Any = None
        self._began = 0.0

    def prepare(self) -> None:
        """Begin to count. Waits for the device once; for when things are built, not for a step."""
        if self._origin is None:
            self._cuda.device.synchronize()
            self._origin, self._began = self.stamp(self._cuda.compute), time.perf_counter()

    @property
    def ready(self) -> bool:
        """Whether `prepare` was called."""
        return self._origin is not None

    def stamp(self, stream: Any) -> Any:
        """Return an event with a time, behind what the stream was given so far."""
        event = self._cuda.cupy.cuda.Event()
        event.record(stream)
        return event

    def put(self, meter: LaneMeter, stamps: list[Any]) -> None:
        """Tell of these later: begin and end on the lane, begin and end of waiting. And of what is done by now."""
        self._waiting.append((meter, stamps))
        while self._waiting and self._cuda.arrived(self._waiting[0][1][-1]):
            whose, events = self._waiting.popleft()
            elapsed = self._cuda.cupy.cuda.get_elapsed_time
            whose.tell([self._began + 1e-3 * float(elapsed(self._origin, event)) for event in events])


class LaneMeter(Meter):
    """Books the traffic of something on a lane; the device gives its times, not the host."""

    def __init__(self, meter: Meter, spans: LaneSpans) -> None:
        super().__init__(meter._instruments, meter.kind, meter.name, meter.messages, meter.nbytes)
        self._spans = spans
        if self._instruments.recorder is not None:
            spans.prepare()

    def passage(self, lane: Lane) -> Passage:
        """Return a way to the lane and back that is timed while there is a recorder."""
        return TimedPassage(lane, self, self._spans)

    @property
    def timed(self) -> bool:
        """Whether there is a recorder of times."""
        recorder = self._instruments.recorder
        return recorder is not None and self._spans.ready and not getattr(recorder, "paused", False)

    def took(self, started: float, waited_from: float, arrived: float, waited_to: float) -> None:
        # What the host took to enqueue is of no interest.
        self._instruments.waiting = None

    def tell(self, times: list[float]) -> None:
        """Tell the recorder: begin and end on the lane, begin and end of waiting [s]."""
        recorder = self._instruments.recorder
        if recorder is not None:
            recorder.span(self.label, "communication", times[0], times[1])
            recorder.span(self.label, "wait", times[2], times[3])


class TimedPassage(Passage):
    """A passage with stamps on both streams. No stamps without a recorder."""

    def __init__(self, lane: Lane, meter: LaneMeter, spans: LaneSpans) -> None:
        super().__init__(lane)
        self._meter, self._spans = meter, spans
        self._stamps: list[Any] = []

    def enter(self) -> None:
        super().enter()
        self._stamps = [self._spans.stamp(self.lane.stream)] if self._meter.timed else []

    def leave(self) -> None:
        if self._stamps:
            self._stamps.append(self._spans.stamp(self.lane.stream))
        super().leave()

    def join(self) -> None:
        if len(self._stamps) < 2:
            super().join()
            return
        compute = self.lane.cuda.compute
        before = self._spans.stamp(compute)
        super().join()
        self._spans.put(self._meter, [*self._stamps, before, self._spans.stamp(compute)])
        self._stamps = []


class Join(Stage):
    """The kernels' stream goes on behind what the lane was given; checked for faults before."""

    def __init__(self, passage: Passage, check: Callable[[], None] = lambda: None) -> None:
        self._passage, self._check = passage, check

    def wait(self) -> None:
        self._check()
        self._passage.join()


class LaneCodec:
    """Elements as they are, on a lane: arithmetic is enqueued there, and runs behind what the lane was given."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane

    def deposit(self, pairs: Pairs) -> Stage:
        return self._enqueued(self.lane.cuda.device.copies(list(pairs)) if len(pairs) else None)

    give_back = deposit

    def add(self, summands: Sequence[Any], total: Any) -> Stage:
        return self._enqueued(add_up(self.lane.cuda.device, summands, total) if total.size else None)

    def _enqueued(self, call: Callable[[], object] | None) -> Stage:
        return Work([] if call is None else [partial(self._on_lane, call)])

    def _on_lane(self, call: Callable[[], object]) -> None:
        with self.lane.stream:
            call()


def add_up(device: Device, summands: Sequence[Any], total: Any) -> Callable[[], None]:
    """Return what enqueues, on the current stream, ``total = summands[0] + summands[1] + ...`` in this order. Local.

    `total` may be one of the summands; if it is not the first, the first is overwritten.
    """
    first, *others = summands
    at = next((i for i, summand in enumerate(summands) if summand is total), None)
    if at == 0:
        return device.sums([(total, other) for other in others])
    if at is None:
        copy, sums = device.copies([(total, first)]), device.sums([(total, other) for other in others])
        return both(copy, sums)
    return both(device.sums([(first, other) for other in others]), device.copies([(total, first)]))


def both(one: Callable[[], None], two: Callable[[], None]) -> Callable[[], None]:
    """Return one, then the other."""

    def run() -> None:
        one()
        two()

    return run
