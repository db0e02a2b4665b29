"""Streams beside that of the kernels, and the events that order them.

::

    compute   ... pack |before            kernels ...            join ... unpack
                       v                                          ^
    lane               wait  send, receive, sum ...  |behind -----+
"""

from __future__ import annotations

from typing import Any

__all__ = ["Cuda", "Lane", "Passage"]

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
        """An event without a time."""
        return self.cupy.cuda.Event(disable_timing=True)

    def lane(self) -> Lane:
        """A stream of the highest priority."""
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
        """The lane goes on behind what the kernels' stream has been given so far."""
        self._before.record(self.lane.cuda.compute)
        self.lane.stream.wait_event(self._before)

    def leave(self) -> None:
        """What the lane has been given so far is what `join` waits for."""
        self._behind.record(self.lane.stream)

    def join(self) -> None:
        """The kernels' stream goes on behind `leave`."""
        self.lane.cuda.compute.wait_event(self._behind)

    @property
    def done(self) -> bool:
        """Whether the lane has come to the last `leave`. Does not wait; may be asked from another thread."""
        return bool(self._behind.done)

    def wait(self) -> None:
        """Return when the lane has come to the last `leave`: for those who have to see it on the host."""
        self._behind.synchronize()
