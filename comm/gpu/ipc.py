"""The `cuda-ipc` transport: ranks of one node read each other's send buffers on the device, ordered by events.

The device counterpart of `halograd.comm.transports.shared`: the same channels, with other moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..channel import Channel
from ..counters import Meter
from ..progress import StagedOperation, Work
from ..reduction import REDUCIBLE, Reduction, ReductionPlan, Room
from ..sums import Method, shards
from ..transports.base import Pattern, TransportContext, split_node
from ..transports.memory import Arena, Flags, Signal, rounded
from ..transports.shared import WindowChannel, Windows
from .ipc_memory import ALIGNMENT, Exchanged, IpcMemory
from .streams import Cuda, Join, Lane, LaneCodec, LaneMeter, LaneSpans

__all__ = ["EventMove", "IpcTransport"]


class EventMove(Signal):
    """A move between devices: record an event behind what a stream was given, and go on behind those of others.

    What a process records, another can wait for only once it *has been* recorded, or it waits for the time before. So a
    flag in shared host memory says that; no host waits for a device.

    Of a channel, whose exchange n uses event n mod 2: *what is read is what was packed*, as the stream has waited for
    the event that was recorded behind it. It is that one and no later one: the peer records this event again in its
    start n+2, behind its finish n+1, for which this rank has to have called start n+1, thus finish n. *Nothing is
    overwritten while it is read*: rank p packs exchange n+2 on its stream behind the events of n+1 of all peers. Rank q
    recorded that of n+1 behind what reads exchange n, on the same stream.

    Parameters
    ----------
    which
        Number of the event.
    stream
        Gives the stream.
    peers
        Whose events are waited for; by default those of all others.
    """

    def __init__(
        self,
        flags: Flags,
        shared: Exchanged,
        which: int,
        stream: Callable[[], Any],
        peers: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(flags, peers)
        self._which, self._stream, self._event = which, stream, shared.events[which]
        self._events = shared.peer_events(which, peers)

    def begin(self) -> None:
        self._event.record(self._stream())
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
        stream = self._stream()
        for event in self._events:
            stream.wait_event(event)


class IpcTransport:
    """Messages that are read where they were packed; sums of which each rank adds up its shard."""

    summable = REDUCIBLE

    def __init__(self, cuda: Cuda, lane: Lane, context: TransportContext, spans: LaneSpans) -> None:
        self._cuda, self._lane, self._context, self._spans = cuda, lane, context, spans
        self._memory = IpcMemory(cuda, context.mpi, context.agree)
        self._arena = Arena(split_node(context.mpi), context.agree)

    def channels(self, patterns: Sequence[Pattern], meters: Sequence[Meter]) -> list[Channel]:
        return [self._channel(pattern, meter) for pattern, meter in zip(patterns, meters)]

    def _channel(self, pattern: Pattern, meter: Meter) -> Channel:
        sizes = {peer: rounded(count * pattern.dtype.itemsize, ALIGNMENT) for peer, count in pattern.sends.items()}
        shared = self._memory.share(2 * sum(sizes.values()), 2, pattern.peers)
        offsets, at = {}, 0
        for peer, size in sizes.items():
            offsets[peer] = (at, at + size)
            at += 2 * size
        places = self._context.mpi.allgather(offsets)
        (notices,), mine = self._arena.places([0]), shared.rank

        def both(owner: int, reader: int, count: int) -> tuple[Any, Any]:
            first, second = (shared.array(owner, offset, count, pattern.dtype) for offset in places[owner][reader])
            return first, second

        sends = {peer: both(mine, peer, count) for peer, count in pattern.sends.items()}
        recvs = {peer: both(peer, mine, count) for peer, count in pattern.recvs.items()}
        first, second = (
            EventMove(notices.flags, shared, slot, lambda: self._cuda.compute, pattern.peers) for slot in (0, 1)
        )
        close = [shared.close, notices.give_back]
        return WindowChannel(pattern, meter, Windows(sends, recvs, (first, second), close, on_device=True))

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
        shared, (notices,) = self._memory.share(nbytes, events=2), self._arena.places([0])
        moves = [EventMove(notices.flags, shared, which, lambda: self._lane.stream) for which in (0, 1)]
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
        operation = StagedOperation(stages, first=2, last=1, prepare=self._cuda.device.use)
        held = int(flat.nbytes * (mpi.size + 1) // mpi.size)
        plan = ReductionPlan(operation, self._context.progress, nbytes=ALIGNMENT, device_nbytes=held)
        plan.close += [shared.close, notices.give_back]
        return Reduction(buffer, [timed], plan)

    def close(self) -> None:
        self._lane.stream.synchronize()
        self._memory.close()
        self._arena.close()
