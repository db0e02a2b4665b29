"""The `mpi` transport: one persistent message per peer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from mpi4py import MPI

from halograd.comm.channel import Channel
from halograd.comm.counters import Meter
from halograd.comm.progress import Operation
from halograd.comm.transports.base import Context, Pattern, Transport, aligned_bytes

__all__ = ["MpiChannel", "MpiTransport", "words"]

# Messages above this wait for the receiver (rendezvous): without the progress thread they would not even
# leave before finish(). Below it a message has left when start() returns, and waking the thread costs more.
EAGER_LIMIT = 16 * 1024  # [B]

_WORDS = {8: MPI.UINT64_T, 4: MPI.UINT32_T, 2: MPI.UINT16_T, 1: MPI.UINT8_T}


def words(memory: np.ndarray) -> tuple[np.ndarray, MPI.Datatype]:
    """The bytes as words as long as their number allows, for MPI to send: a count of bytes would pass
    2^31, which some MPI refuse, eight times earlier."""
    for size, datatype in _WORDS.items():
        if memory.nbytes % size == 0:
            return memory.view(f"u{size}"), datatype
    raise AssertionError("every number is a multiple of 1")


class MpiChannel(Channel):
    """One buffer per peer for both slots; ``Startall`` in `start`, ``Waitall`` in `finish`.

    One buffer is enough: `finish` waits for the sends too, and the next receive begins in the next `start`.
    """

    header = 0  # [B] before the payload, a multiple of the alignment

    def __init__(self, context: Context, pattern: Pattern, meter: Meter) -> None:
        super().__init__(pattern.sends, pattern.recvs, pattern.dtype, meter)
        self._progress = context.progress
        self._sent = self._allocate(pattern.sends)
        self._received = self._allocate(pattern.recvs)
        self._requests: list[MPI.Prequest] = [
            *(context.mpi.Recv_init(words(m), peer, pattern.tag) for peer, m in self._received.items()),
            *(context.mpi.Send_init(words(m), peer, pattern.tag) for peer, m in self._sent.items()),
        ]
        self._operation = Operation()
        self._operation.requests = self._requests
        self._send_views = self._payloads(self._sent)
        self._recv_views = self._payloads(self._received)
        for view in self._recv_views.values():
            view.flags.writeable = False
        longest = max((m.nbytes for m in (*self._sent.values(), *self._received.values())), default=0)
        self._in_background = longest > EAGER_LIMIT

    def _allocate(self, counts: Mapping[int, int]) -> dict[int, np.ndarray]:
        return {peer: aligned_bytes(self.header + count * self.dtype.itemsize) for peer, count in counts.items()}

    def _payloads(self, memory: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
        return {peer: m[self.header :].view(self.dtype) for peer, m in memory.items()}

    def _send_buffer(self, peer: int, slot: int) -> np.ndarray:
        return self._send_views[peer]

    def _recv_buffer(self, peer: int, slot: int) -> np.ndarray:
        return self._recv_views[peer]

    def _start(self) -> None:
        MPI.Prequest.Startall(self._requests)
        if self._in_background:
            self._progress.submit(self._operation)

    def _finish(self) -> float:
        if self._in_background:
            self._progress.complete(self._operation)
            return self._operation.completed_at
        self._operation.wait()
        return 0.0

    def _close(self) -> None:
        for request in self._requests:
            request.Free()
        self._requests.clear()
        for buffers in (self._sent, self._received, self._send_views, self._recv_views):
            buffers.clear()


class MpiTransport(Transport):
    """Messages of real MPI, within and between nodes."""

    def channel(self, pattern: Pattern, meter: Meter) -> Channel:
        return MpiChannel(self._context, pattern, meter)
