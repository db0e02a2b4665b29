"""The `cuda-ipc` transport: ranks of one node read each other's send buffers on the device, ordered by events.

The device counterpart of :class:`halograd.comm.transports.shared.SharedChannel`, with one difference: what a process
records, another can wait for only once it *has been* recorded, or it waits for the time before. So a flag in shared
host memory says that; nobody waits on the host for a device.
"""

from __future__ import annotations

from typing import Any

from halograd.comm.channel import Channel
from halograd.comm.counters import Meter
from halograd.comm.gpu.base import DeviceTransport
from halograd.comm.gpu.ipc_memory import ALIGNMENT, Exchanged, IpcMemory
from halograd.comm.gpu.streams import Cuda, Join, Lane, LaneCodec, LaneMeter, LaneSpans
from halograd.comm.progress import Operation, Work
from halograd.comm.reduction import Plan, Reduction, Room
from halograd.comm.sums import Method, shards
from halograd.comm.transports.base import Context, Pattern, split_node
from halograd.comm.transports.memory import FLAG_BYTES, Arena, Flags, Signal, rounded

__all__ = ["EventMove", "IpcChannel", "IpcTransport", "Notices"]


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
        mine = arena.node.rank
        self.flags = Flags(self._chunk, {rank: told[rank] for rank in (*peers, mine)}, mine)

    def close(self) -> None:
        """Give the memory back. Local, but all ranks do it."""
        self._chunk.give_back()


class EventMove(Signal):
    """A move between devices: record an event behind what the stream was given, and go on behind those of others.

    Parameters
    ----------
    which
        Number of the event.
    """

    def __init__(self, flags: Flags, shared: Exchanged, which: int, stream: Any) -> None:
        super().__init__(flags)
        self._shared, self._which, self._stream = shared, which, stream

    def begin(self) -> None:
        self._shared.events[self._which].record(self._stream)
        super().begin()

    def over(self) -> bool:
        if not super().over():
            return False
        self.follow()
        return True

    def wait(self) -> None:
        super().wait()
        self.follow()

    def follow(self) -> None:
        """Let the stream wait for the events of the others; all of them have been recorded."""
        for event in self._shared.peer_events(self._which):
            self._stream.wait_event(event)


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

    def reduction(self, buffer: Any, meter: Meter, method: Method) -> Reduction:
        """A sum in the order of the ranks, or half of it, on the lane. ::

            start    copy the summands to shared memory                         event 0, flag 2 n - 1
            then     behind all events 0: add up the own shard of all           event 1, flag 2 n
            then     behind all events 1: copy the shards of all

        A step can be enqueued when all flags are up; the progress thread sees to that, or `finish`. A reduce-scatter
        adds up straight into the buffer, an all-gather begins with the second copy; both end behind all events 1.

        *Nothing is overwritten while it is read*: the summands of run n + 1 are copied on a lane behind events 1 of run
        n of all others, which are behind what reads the summands. A shard of run n + 1 is written behind events 0 of
        run n + 1 of all others, which are behind what copies the shards of run n. An event is recorded again only when
        all others wait for it already: run n + 1 starts when flags 2 n are up, raised behind their waiting for event 0;
        and event 1 is recorded again when flags 2 n + 1 are up, raised behind their waiting for event 1.
        """
        mpi, flat = self._context.mpi, buffer.reshape(-1)
        parts = shards(flat.size, mpi.size, flat.itemsize)
        lengths = [part.stop - part.start for part in parts]
        behind = rounded(flat.nbytes, ALIGNMENT) if method.adds else 0
        own = parts[mpi.rank]
        nbytes = behind + rounded(lengths[mpi.rank] * flat.itemsize, ALIGNMENT)
        shared, notices = self._memory.share(nbytes, events=2), Notices(self._arena, tuple(range(mpi.size)))
        moves = [EventMove(notices.flags, shared, which, self._lane.stream) for which in (0, 1)]
        totals = [shared.array(r, behind, n, flat.dtype) for r, n in enumerate(lengths)]
        room = Room(gather=moves[method.adds])
        if method.adds:
            room.deposits = [(shared.array(mpi.rank, 0, flat.size, flat.dtype), flat)]
            at, length = own.start * flat.itemsize, lengths[mpi.rank]
            room.summands = [shared.array(r, at, length, flat.dtype) for r in range(mpi.size)]
            room.scatter, room.total = moves[0], totals[mpi.rank] if method.gathers else flat[own]
        elif own.stop > own.start:
            room.deposits = [(totals[mpi.rank], flat[own])]
        if method.gathers:
            others = [r for r, n in enumerate(lengths) if n and (method.adds or r != mpi.rank)]
            room.returns = [(flat[parts[r]], totals[r]) for r in others]
        timed = LaneMeter(meter, self._spans)
        passage = timed.passage(self._lane)
        stages = [Work([passage.enter]), *room.stages(LaneCodec(self._lane)), *([] if method.adds else [moves[1]])]
        stages += [Work([passage.leave]), Join(passage)]
        operation = Operation(stages, first=2, last=1, prepare=self._cuda.device.use)
        held = int(flat.nbytes * (mpi.size + 1) // mpi.size)
        plan = Plan(operation, self._context.progress, nbytes=ALIGNMENT, device_nbytes=held)
        plan.close += [shared.close, notices.close]
        return Reduction(buffer, [timed], plan)

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
        self._cuda, self._shared, self._notices = cuda, shared, notices
        self._flags, self._count = notices.flags, 0
        self._counters = self._flags.others()
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
            self._flags.raise_to(self._count)

    def _finish(self) -> float:
        if self.peers:
            self._flags.wait_for(self._count, self._counters)
            for peer in self.peers:
                self._cuda.compute.wait_event(self._shared.peer_event(peer, self.slot))
        return 0.0

    def _close(self) -> None:
        self._out.clear()
        self._in.clear()
        self._shared.close()
        self._notices.close()
