"""Messages and sums of arrays on a device, by way of pinned host memory and a transport of the host.

The one place that knows how device memory gets into a message; transports that reach device memory themselves
(NCCL, CUDA-aware MPI, IPC) make channels and reductions of their own behind the same two calls of `Communicator`. ::

    start    pack -> [device buffer] --download--> [pinned]  (enqueued, nobody waits)
             ... kernels that do not need it are enqueued ...
    finish   wait for the download; host channel, start and finish;
             [pinned] --upload--> [device buffer] -> unpack (enqueued, nobody waits)

The host is ahead of the device: it comes to `finish` while the kernels in between have hardly begun, and the message
travels meanwhile. Were it sent in `start`, the device would have nothing to do until the host has seen the copy. The
host waits for copies in two places: in `finish` until what is to be sent has come, and before pinned memory is written
again, which the copies of the exchange before the last one have left long ago. A sum waits in `start`, because the
ranks may finish sums in any order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from halograd.comm.channel import Channel
from halograd.comm.counters import Meter
from halograd.comm.device_channel import DeviceChannel
from halograd.comm.errors import CommError
from halograd.comm.reduction import Reduction
from halograd.device import Device, Ticket

__all__ = ["StagedChannel", "StagedReduction", "check_device_buffer"]


class StagedChannel(DeviceChannel):
    """A channel whose buffers are on a device, around a channel of the host.

    Both slots use one device buffer (what is enqueued runs in order) and two pinned ones.
    """

    def __init__(self, inner: Channel, device: Device, meter: Meter) -> None:
        super().__init__(inner.send_counts, inner.recv_counts, inner.dtype, meter, device)
        self._inner, self._device = inner, device
        self._out_pinned = device.pinned(self._out.shape, self.dtype)
        self._in_pinned = [device.pinned(self._in.shape, self.dtype) for _ in range(2)]
        self._uploaded: list[Ticket | None] = [None, None]
        self._downloaded: Ticket | None = None

    @property
    def buffer_bytes(self) -> int:
        """Memory of the host: pinned, and of the inner channel [B]."""
        return self._out_pinned.nbytes + sum(a.nbytes for a in self._in_pinned) + self._inner.buffer_bytes

    # The hooks of the inner channel, not its public calls: the meter and the state are kept here, once.
    def _start(self) -> None:
        if self._sends:
            self._device.download(self._out, self._out_pinned)
            self._downloaded = self._device.mark()

    def _send(self) -> None:
        """Start the host's channel, with what has been downloaded."""
        if self._downloaded is not None:
            self._downloaded.wait()
            self._downloaded = None
            for peer, where in self._sends.items():
                np.copyto(self._inner._send_buffer(peer, self.slot), self._out_pinned[where])
        self._inner._start()

    def _finish(self) -> float:
        # All ranks finish their channels in the same order, so no two wait here for what the other sends later.
        self._send()
        arrived = self._inner._finish()
        if self._recvs:
            pinned, before = self._in_pinned[self.slot], self._uploaded[self.slot]
            if before is not None:
                before.wait()
            for peer, where in self._recvs.items():
                np.copyto(pinned[where], self._inner._recv_buffer(peer, self.slot))
            self._device.upload(pinned, self._in)
            self._uploaded[self.slot] = self._device.mark()
        return arrived

    def _close(self) -> None:
        for ticket in self._uploaded:
            if ticket is not None:
                ticket.wait()
        self._inner._close()


class StagedReduction(Reduction):
    """A sum of an array on a device, around a sum of pinned memory of the host.

    Of one rank, or of nothing, it does nothing: the buffer holds the sum already.

    Parameters
    ----------
    inner
        Sums `pinned`.
    pinned
        Of the shape and dtype of `buffer`.
    idle
        Whether there is nothing to be summed.
    """

    def __init__(self, inner: Reduction, device: Device, buffer: Any, pinned: np.ndarray, idle: bool) -> None:
        super().__init__(buffer, inner._meter)
        self._inner, self._device, self._pinned, self._idle = inner, device, pinned, idle

    @property
    def buffer_bytes(self) -> int:
        """Memory of the host: pinned, and of the inner sum [B]. On the device there is nothing beside the buffer."""
        return self._pinned.nbytes + self._inner.buffer_bytes

    @property
    def on_host(self) -> Reduction:
        return self._inner

    # Counted and timed by the inner sum.
    def start(self) -> None:
        if self._under_way:
            raise CommError(f"start(): expected finish() of {self._meter.name} before, got another start()")
        self._under_way = True
        self._start()

    def finish(self) -> None:
        if not self._under_way:
            raise CommError(f"finish(): expected start() of {self._meter.name} before")
        self._under_way = False
        self._finish()

    def run(self) -> None:
        if self._under_way:
            raise CommError(f"run(): expected finish() of {self._meter.name} before")
        if not self._idle:
            self._fetch()
            self._inner.run()
            self._device.upload(self._pinned, self.buffer)

    def _fetch(self) -> None:
        """Bring the buffer to the host; the upload of the sum before, enqueued first, has run when this returns."""
        self._device.download(self.buffer, self._pinned)
        self._device.mark().wait()

    def _start(self) -> None:
        if not self._idle:
            self._fetch()
            self._inner.start()

    def _finish(self) -> float:
        if not self._idle:
            self._inner.finish()
            self._device.upload(self._pinned, self.buffer)
        return 0.0

    def _close(self) -> None:
        self._device.mark().wait()  # the last upload has left the pinned memory
        self._inner.close()


def check_device_buffer(buffer: Any) -> None:
    """Raise CommError unless the array can be copied whole. Local."""
    if not buffer.flags.c_contiguous:
        raise CommError(
            f"buffer: expected a C-contiguous array, got strides {buffer.strides} for shape {buffer.shape}; "
            "reduce a packed copy"
        )
