"""When messages and sums travelled on a lane, and how long kernels waited for them: by events, told later."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from halograd.comm.counters import Meter
from halograd.comm.gpu.streams import Cuda, Lane, Passage

__all__ = ["LaneMeter", "LaneSpans", "TimedPassage"]


class LaneSpans:
    """Events whose times a recorder is told of when the device has come there. Local; nobody waits.

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
        """An event with a time, behind what the stream was given so far."""
        event = self._cuda.cupy.cuda.Event()
        event.record(stream)
        return event

    def put(self, meter: LaneMeter, stamps: list[Any]) -> None:
        """Tell of these later: begin and end on the lane, begin and end of waiting. And of what is done by now."""
        self._waiting.append((meter, stamps))
        while self._waiting and self._waiting[0][1][-1].done:
            whose, events = self._waiting.popleft()
            elapsed = self._cuda.cupy.cuda.get_elapsed_time
            whose.tell([self._began + 1e-3 * float(elapsed(self._origin, event)) for event in events])


class LaneMeter(Meter):
    """Books the traffic of something on a lane; its times are told by the device, not by the host."""

    def __init__(self, meter: Meter, spans: LaneSpans) -> None:
        super().__init__(meter._instruments, meter.kind, meter.name, meter.messages, meter.nbytes)
        self._spans = spans
        if self._instruments.recorder is not None:
            spans.prepare()

    def passage(self, lane: Lane) -> Passage:
        """A way to the lane and back that is timed while there is a recorder."""
        return TimedPassage(lane, self, self._spans)

    @property
    def timed(self) -> bool:
        """Whether somebody wants to know."""
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
    """A passage with stamps on both streams. No stamps while nobody wants to know."""

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
