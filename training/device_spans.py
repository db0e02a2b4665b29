"""Spans of time on a device, by events: what a recorder is told when the device has come there, without waiting."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from halograd.comm import Recorder
from halograd.device import Device, Stamp

__all__ = ["DeviceSpans"]


class DeviceSpans:
    """Measures what is enqueued and tells a recorder of it later. Local.

    Times are those of the device, counted from a moment that host and device shared when this was made, so that they
    stand beside the spans of the host in one timeline.

    Parameters
    ----------
    device
        Where the work is enqueued.
    recorder
        Is told; one that is paused when work is enqueued is not told of it.
    """

    def __init__(self, device: Device, recorder: Recorder) -> None:
        self._device, self._recorder = device, recorder
        self._waiting: deque[tuple[str, str, Stamp, Stamp]] = deque()
        device.synchronize()
        self._origin, self._began = device.stamp(), time.perf_counter()

    def run(self, name: str, category: str, run: Callable[[], object]) -> None:
        """Call `run`, which enqueues, between two stamps."""
        if getattr(self._recorder, "paused", False):
            run()
            return
        first = self._device.stamp()
        run()
        self._waiting.append((name, category, first, self._device.stamp()))
        self.tell()

    def tell(self) -> None:
        """Tell of what is done. Does not wait."""
        while self._waiting and self._waiting[0][3].done():
            name, category, first, second = self._waiting.popleft()
            times = (self._began + self._device.seconds(self._origin, stamp) for stamp in (first, second))
            self._recorder.span(name, category, *times)

    def finish(self) -> None:
        """Tell of everything. Waits for the device."""
        if self._waiting:
            self._device.synchronize()
            self.tell()
