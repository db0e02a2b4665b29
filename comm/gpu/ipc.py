"""The `cuda-ipc` transport: ranks of one node read each other's send buffers on the device, ordered by events.

The device counterpart of :class:`halograd.comm.transports.shared.SharedChannel`, with one difference: what a process
records, another can wait for only once it *has been* recorded, or it waits for the time before. So a flag in shared
host memory says that; nobody waits on the host for a device.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from halograd.comm.channel import Channel
from halograd.comm.counters import Meter
from halograd.comm.gpu.base import DeviceTransport, check_dtype
from halograd.comm.gpu.ipc_memory import ALIGNMENT, Exchanged, IpcMemory
from halograd.comm.gpu.spans import LaneMeter, LaneSpans
from halograd.comm.gpu.streams import Cuda, Lane
from halograd.comm.reduction import Reduction
from halograd.comm.transports.arena import Arena, rounded
from halograd.comm.transports.base import Context, Pattern, split_node
from halograd.comm.transports.flags import FLAG_BYTES, Flags

__all__ = ["IpcChannel", "IpcTransport", "Notices"]


class Notices:
    """One counter per rank in shared host memory, by which ranks tell that they have recorded an event.

    Collective over all ranks of the node to make.

    Parameters
    ----------
    peers
        Those whose counters this rank waits for.
    """

    def __init__(self, arena: Arena, peers: tuple[int, ...]) -> None:
        self._chunk, first = arena.reserve(FLAG_BYTES)
        told = arena.node.allgather(first)
        self.flags = Flags(self._chunk, first, {peer: told[peer] for peer in peers}, arena.node.rank)

    def close(self) -> None:
        """Give the memory back. Local, but all ranks do it."""
        self._chunk.give_back()


class IpcTransport(DeviceTransport):
    """Messages that are read where they were packed; sums of which each rank adds up its shard."""

    def __init__(self, cuda: Cuda, lane: Lane, context: Context, spans: LaneSpans) -> None:
        self._cuda, self._lane, self._context, self._spans = cuda, lane, context, spans
        self._memory = IpcMemory(cuda, context.mpi, context.agree)
        self._arena = Arena(split_node(context.mpi), context.agree)

    def channel(self, pattern: Pattern, meter: Meter) -> Channel:
        sizes = {peer: rounded(count * pattern.dtype.itemsize, ALIGNMENT) for peer, count in pattern.sends.items()}
        shared = self._memory.share(2 * sum(sizes.values()), events=2)
        offsets, first = {}, 0
        for peer, size in sizes.items():
            offsets[peer] = (first, first + size)
            first += 2 * size
        told = self._context.mpi.allgather(offsets)
        notices = Notices(self._arena, pattern.peers)
        return IpcChannel(self._cuda, pattern, meter, shared, told, notices)

    def reduction(self, buffer: Any, meter: Meter, method: str, tags: tuple[int, int]) -> Reduction:
        from halograd.comm.gpu.ipc_sums import IpcSum

        mpi = self._context.mpi
        shared = self._memory.share(IpcSum.bytes_for(buffer, mpi.rank, mpi.size, method), events=2)
        others = tuple(r for r in range(mpi.size) if r != mpi.rank)
        notices = Notices(self._arena, others)
        timed, place = LaneMeter(meter, self._spans), (mpi.rank, mpi.size)
        return IpcSum(self._lane, place, self._context.progress, buffer, timed, method, shared, notices)

    def check(self, dtype: np.dtype) -> None:
        check_dtype(dtype)

    def close(self) -> None:
        self._lane.stream.synchronize()
        self._memory.close()
        self._arena.close()


class IpcChannel(Channel):
    """Send buffers that the peers have mapped, receive buffers that are theirs; two slots, one event for each.

    ``start`` number n records the event of slot n mod 2 behind the packing, then raises this rank's flag to n + 1.
    ``finish`` number n waits on the host until all peers have raised theirs to n + 1, those that are sent to, too;
    then lets the stream wait for their events of this slot.

    *What is read is what was packed*: the stream has waited for the event that was recorded behind it. It is that one
    and no later one: the peer records this event again in its start n+2, behind its finish n+1, for which this rank
    has to have called start n+1, thus finish n.

    *Nothing is overwritten while it is read*: rank p packs exchange n+2 on its stream behind the events of n+1 of all
    peers. Rank q recorded that of n+1 behind what reads exchange n, on the same stream.
    """

    def __init__(
        self,
        cuda: Cuda,
        pattern: Pattern,
        meter: Meter,
        shared: Exchanged,
        offsets: list[dict[int, tuple[int, int]]],
        notices: Notices,
    ) -> None:
        super().__init__(pattern.sends, pattern.recvs, pattern.dtype, meter)
        self._cuda, self._shared, self._notices, self._count = cuda, shared, notices, 0
        mine = shared.rank
        self._out = {
            peer: [shared.array(mine, offset, count, self.dtype) for offset in offsets[mine][peer]]
            for peer, count in self.send_counts.items()
        }
        self._in = {
            peer: [shared.array(peer, offset, count, self.dtype) for offset in offsets[peer][mine]]
            for peer, count in self.recv_counts.items()
        }

    @property
    def buffer_bytes(self) -> int:
        """Memory of the host: a flag [B]."""
        return FLAG_BYTES

    @property
    def device_bytes(self) -> int:
        """Memory of the device: two slots; received where it was sent from [B]."""
        return 2 * sum(self.send_counts.values()) * self.dtype.itemsize

    def _send_buffer(self, peer: int, slot: int) -> Any:
        return self._out[peer][slot]

    def _recv_buffer(self, peer: int, slot: int) -> Any:
        return self._in[peer][slot]

    def _start(self) -> None:
        self._count += 1
        if self.peers:
            self._shared.events[self.slot].record(self._cuda.compute)
            self._notices.flags.raise_to(self._count)

    def _finish(self) -> float:
        if self.peers:
            self._notices.flags.wait_for(self._count)
            for peer in self.peers:
                self._cuda.compute.wait_event(self._shared.peer_event(peer, self.slot))
        return 0.0

    def _close(self) -> None:
        self._out.clear()
        self._in.clear()
        self._shared.close()
        self._notices.close()
