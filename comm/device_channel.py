"""Channels and sums of device arrays; they go by way of pinned host memory if the host transport carries them.

Only this module copies device memory to host messages. Transports that reach device memory themselves (NCCL, CUDA-aware
MPI) make their own channels and reductions, which `Communicator.channel` and `Communicator.reduction` return, too. ::

    start    pack -> [device buffer] --download--> [pinned]  (enqueued, the host does not wait)
             ... kernels that do not need it are enqueued ...
    finish   wait for the download; host channel, start and finish;
             [pinned] --upload--> [device buffer] -> unpack (enqueued, the host does not wait)

The host runs ahead of the device: it reaches `finish` when the kernels enqueued after `start` have hardly begun, and
the message travels while they run. If `start` sent the message, the device would be idle until the host had detected
the end of the copy. The host waits for copies twice: in `finish`, until the data to send have arrived, and before it
writes pinned memory again; the copies of the exchange before the last one have long left that memory. A sum waits in
`start`, because the ranks may finish sums in any order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..device import Device, Event, on_device
from .channel import Channel
from .counters import Meter
from .reduction import ReductionPlan

__all__ = ["DeviceChannel", "StagedChannel", "staged", "staging"]

_ALIGNMENT = 64  # [B]: alignment of messages for the copies and kernels of a device


class DeviceChannel(Channel):
    """A channel with one device buffer per direction for both slots. Subclasses define the transport."""

    def __init__(
        self,
        send_counts: Mapping[int, int],
        recv_counts: Mapping[int, int],
        dtype: np.dtype,
        meter: Meter,
        device: Device,
    ) -> None:
        super().__init__(send_counts, recv_counts, dtype, meter)
        self._sends = message_slices(self.send_counts, self.dtype)
        self._recvs = message_slices(self.recv_counts, self.dtype)
        self._out = device.zeros((end_of(self._sends),), self.dtype)
        self._in = device.zeros((end_of(self._recvs),), self.dtype)

    @property
    def buffer_bytes(self) -> int:
        """Host memory of the channel [B]: 0."""
        return 0

    @property
    def device_bytes(self) -> int:
        """Device memory of the channel's buffers [B]; internal memory of a library is not counted."""
        return int(self._out.nbytes + self._in.nbytes)

    def _send_buffer(self, peer: int, slot: int) -> Any:
        return self._out[self._sends[peer]]

    def _recv_buffer(self, peer: int, slot: int) -> Any:
        return self._in[self._recvs[peer]]


class StagedChannel(DeviceChannel):
    """Channel with buffers on a device, whose messages a host channel sends and receives.

    Both slots use the same device buffers (enqueued work runs in order) and the same pinned send buffer; each slot has
    a pinned receive buffer of its own.
    """

    def __init__(self, inner: Channel, device: Device, meter: Meter) -> None:
        super().__init__(inner.send_counts, inner.recv_counts, inner.dtype, meter, device)
        self._inner, self._device = inner, device
        self._out_pinned = device.pinned(self._out.shape, self.dtype)
        # Two, because the upload of an exchange may still run when the next one arrives. One is enough for sending: the
        # host waits for the download, and copies the data on.
        self._in_pinned = [device.pinned(self._in.shape, self.dtype) for _ in range(2)]
        self._uploaded: list[Event | None] = [None, None]
        self._downloaded: Event | None = None
        self._sent = False

    @property
    def buffer_bytes(self) -> int:
        """Host memory: pinned buffers, and those of the inner channel [B]."""
        return self._out_pinned.nbytes + sum(a.nbytes for a in self._in_pinned) + self._inner.buffer_bytes

    # Call the hooks of the inner channel, not its public methods: this channel alone keeps the meter and the state.
    def _start(self) -> None:
        self._sent = False
        if self._sends:
            self._device.download(self._out, self._out_pinned)
            self._downloaded = self._device.mark()

    def _send(self) -> None:
        """Start the host channel with the downloaded data."""
        if self._downloaded is not None:
            self._downloaded.wait()
            self._downloaded = None
            for peer, where in self._sends.items():
                np.copyto(self._inner._send_buffer(peer, self.slot), self._out_pinned[where])
        self._inner._start()
        self._sent = True

    def _finish(self) -> float:
        # All ranks finish their channels in the same order, so no two ranks wait here for messages sent later.
        if not self._sent:  # else an earlier call has failed while it waited for the messages
            self._send()
        arrived = self._inner._finish()
        if self._recvs:
            pinned, before = self._in_pinned[self.slot], self._uploaded[self.slot]
            if before is not None:
                before.wait()  # the upload of the exchange before the last one, from the same pinned buffer
            for peer, where in self._recvs.items():
                np.copyto(pinned[where], self._inner._recv_buffer(peer, self.slot))
            self._device.upload(pinned, self._in)
            self._uploaded[self.slot] = self._device.mark()
        return arrived

    def _close(self) -> None:
        # Pinned memory must not be freed while the device reads it.
        for event in self._uploaded:
            if event is not None:
                event.wait()
        self._inner._close()


def staging(buffer: Any) -> np.ndarray:
    """Return the host array that is summed instead of `buffer`: pinned memory of its shape, or `buffer` if it is on the
    host.
    """
    device = on_device(buffer)
    return buffer if device is None else device.pinned(buffer.shape, buffer.dtype)


def staged(buffer: Any, pinned: np.ndarray, plan: ReductionPlan) -> ReductionPlan:
    """Add to the plan of a sum of `pinned` (from `staging`) the copies from and to the device array `buffer`.

    Returns the plan; it is unchanged if `buffer` is on the host.
    """
    device = on_device(buffer)
    if device is None:
        return plan

    def fetch() -> None:
        # The upload of the previous sum was enqueued before, so it is complete when this returns.
        device.download(buffer, pinned)
        device.mark().wait()

    plan.fetch, plan.put = fetch, lambda: device.upload(pinned, buffer)
    plan.nbytes += pinned.nbytes
    plan.close.insert(0, lambda: device.mark().wait())  # the last upload has left the pinned memory
    return plan


def message_slices(counts: Mapping[int, int], dtype: np.dtype) -> dict[int, slice]:
    """Return the slice of each peer's message in one buffer for all messages, each aligned to 64 B. Local.

    >>> message_slices({1: 3, 4: 20}, np.dtype("float64"))
    {1: slice(0, 3, None), 4: slice(8, 28, None)}
    """
    step = max(1, _ALIGNMENT // dtype.itemsize)
    slices, first = {}, 0
    for peer, count in sorted(counts.items()):
        slices[peer] = slice(first, first + count)
        first += -(-count // step) * step
    return slices


def end_of(where: Mapping[int, slice]) -> int:
    """Return the number of elements of a buffer that holds these slices. Local."""
    return max((part.stop for part in where.values()), default=0)
