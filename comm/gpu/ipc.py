"""The `cuda-ipc` transport: ranks of one node map each other's device memory, and order their streams by events.

It is the device counterpart of `halograd.comm.transports.shared`: the same channels, with other stages. A rank exports
memory and interprocess events (`IpcMemory`); peers read its send buffers on the device, after those events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from ..channel import Channel
from ..counters import Meter
from ..errors import CommError
from ..progress import StagedOperation, Work
from ..reduction import REDUCIBLE, Reduction, ReductionPlan, Room
from ..sums import Method, shards
from ..transports.base import Pattern, TransportContext, split_node
from ..transports.memory import Arena, Flags, Signal, rounded
from ..transports.shared import SharedWindows, WindowChannel
from .streams import Cuda, Join, Lane, LaneCodec, LaneMeter, LaneSpans

__all__ = ["EventMove", "Exchanged", "IpcMemory", "IpcTransport", "PeerEvent"]

# CUDA shares whole blocks of 2 MiB, whatever else is in them; so shared memory gets blocks of its own.
GRAIN = 2 << 20  # [B]
ALIGNMENT = 256  # [B]
# Containers that share a GPU can map each other's memory, but cannot always open each other's events.
SHM = "events need one /dev/shm: ranks in separate containers must share it"


class PeerEvent:
    """An event of another process, as an argument of `Stream.wait_event`."""

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


class DeviceChunk:
    """One allocation of this rank, from which pieces are taken. Local."""

    def __init__(self, cuda: Cuda, nbytes: int) -> None:
        self._cuda, self.nbytes, self._used, self._live = cuda, nbytes, 0, 0
        # Not from CuPy's pool: a handle refers to a whole allocation of cudaMalloc.
        self.ptr = int(cuda.cupy.cuda.runtime.malloc(nbytes))
        self.handle: bytes = cuda.cupy.cuda.runtime.ipcGetMemHandle(self.ptr)

    def fits(self, nbytes: int) -> bool:
        return self._used + nbytes <= self.nbytes

    def take(self, nbytes: int) -> int:
        """Take `nbytes` of unused memory, and return their offset [B]."""
        first = self._used
        self._used += nbytes
        self._live += 1
        return first

    def give_back(self) -> None:
        """Undo one `take`; the memory is reused once all pieces are free."""
        self._live -= 1
        if not self._live:
            self._used = 0

    def free(self) -> None:
        self._cuda.cupy.cuda.runtime.free(self.ptr)


class Exchanged:
    """Memory and events that the ranks share for one channel or sum. The methods are local.

    Attributes
    ----------
    rank
        Rank of this process.
    events
        Events of this rank, which it records.
    """

    def __init__(self, memory: IpcMemory, chunk: DeviceChunk, first: int, events: list[Any]) -> None:
        self._memory, self._chunk, self.rank, self.events = memory, chunk, memory.rank, events
        self._bases: dict[int, int] = {memory.rank: chunk.ptr + first}
        self._peer_events: dict[int, list[PeerEvent]] = {}

    def open(self, exports: Sequence[tuple[bytes, int, list[bytes]]], peers: Sequence[int] | None = None) -> None:
        """Map the exports of `peers` (None: of all other ranks).

        An export is the handle of the chunk, the offset, and the handles of the events.
        """
        for rank, (handle, first, events) in enumerate(exports):
            if rank != self.rank and (peers is None or rank in peers):
                self._bases[rank] = self._memory.map(rank, handle) + first
                self._peer_events[rank] = [PeerEvent(self._memory.runtime.ipcOpenEventHandle(e)) for e in events]

    def array(self, rank: int, offset: int, count: int, dtype: np.dtype) -> Any:
        """Return an array ``(count,)`` in the memory of a rank, `offset` [B] after the start of its part."""
        return self._memory.view(self._bases[rank] + offset, count, dtype)

    def peer_events(self, which: int, peers: Sequence[int] | None = None) -> list[PeerEvent]:
        """Return event number `which` of these ranks; by default of all other ranks."""
        return [self._peer_events[rank][which] for rank in (self._peer_events if peers is None else peers)]

    def close(self) -> None:
        """Free the memory, and the events of other ranks. Local; all ranks must call it."""
        for events in self._peer_events.values():
            for event in events:
                self._memory.runtime.eventDestroy(event.ptr)
        self._peer_events.clear()
        self._chunk.give_back()


class IpcMemory:
    """Shared device memory of one communicator on one node. `share` and `close` are collective."""

    def __init__(self, cuda: Cuda, mpi: MPI.Intracomm, agree: Callable[[Exception | None], None]) -> None:
        self._cuda, self._mpi, self._agree = cuda, mpi, agree
        self.rank, self.runtime = mpi.rank, cuda.cupy.cuda.runtime
        self._chunks: list[DeviceChunk] = []
        self._mapped: dict[tuple[int, bytes], int] = {}

    @property
    def nbytes(self) -> int:
        """Shared device memory of this rank [B]."""
        return sum(chunk.nbytes for chunk in self._chunks)

    def share(self, nbytes: int, events: int, peers: Sequence[int] | None = None) -> Exchanged:
        """Share `nbytes` of this rank's memory [B] and a number of events with other ranks. Collective.

        Parameters
        ----------
        peers
            Ranks whose memory and events this rank opens, by default all others. A driver supports about ten thousand
            interprocess events, and a network has some hundred exchanges.

        Raises
        ------
        CommError
            On all ranks, if memory cannot be allocated or mapped.
        """
        # Enqueued work of another rank may still read memory that is reused here: no rank continues before all devices
        # are done. This happens while channels are built, not in a step.
        self._cuda.device.synchronize()
        part, fault = self._attempt(lambda: self._reserve(nbytes, events), "memory that other processes can map")
        self._agree(fault)
        exchanged, mine = part
        exports = self._mpi.allgather(mine)
        what = f"to map memory and events of the other ranks ({SHM})"
        _, fault = self._attempt(lambda: exchanged.open(exports, peers), what)
        self._agree(fault)
        return exchanged

    def _attempt(self, call: Callable[[], Any], what: str) -> tuple[Any, Exception | None]:
        try:
            self._cuda.device.use()
            return call(), None
        except Exception as error:
            return None, CommError(f"cuda-ipc: expected {what}, got {error}; use the device transport 'mpi-staged'")

    def _reserve(self, nbytes: int, events: int) -> tuple[Exchanged, tuple[bytes, int, list[bytes]]]:
        nbytes = max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
        chunk = next((chunk for chunk in self._chunks if chunk.fits(nbytes)), None)
        if chunk is None:
            # Double the memory: the number of mappings grows with its logarithm.
            chunk = DeviceChunk(self._cuda, -(-max(nbytes, self.nbytes) // GRAIN) * GRAIN)
            self._chunks.append(chunk)
        first = chunk.take(nbytes)
        event = self._cuda.cupy.cuda.Event
        own = [event(disable_timing=True, interprocess=True) for _ in range(events)]
        handles = [self.runtime.ipcGetEventHandle(e.ptr) for e in own]
        return Exchanged(self, chunk, first, own), (chunk.handle, first, handles)

    def map(self, rank: int, handle: bytes) -> int:
        """Map a chunk of another rank once, and return its address."""
        key = (rank, handle)
        if key not in self._mapped:
            self._mapped[key] = int(self.runtime.ipcOpenMemHandle(handle))
        return self._mapped[key]

    def view(self, address: int, count: int, dtype: np.dtype) -> Any:
        """Return an array at an address. It does not keep the memory alive: `close` frees all memory."""
        cupy, nbytes = self._cuda.cupy, count * dtype.itemsize
        memory = cupy.cuda.UnownedMemory(address, max(nbytes, 1), self, self._cuda.device.ordinal)
        return cupy.ndarray((count,), dtype, cupy.cuda.MemoryPointer(memory, 0))

    def close(self) -> None:
        """Unmap the memory of other ranks, then free that of this rank. Collective."""
        self._cuda.device.synchronize()
        self._mpi.Barrier()
        for address in self._mapped.values():
            self.runtime.ipcCloseMemHandle(address)
        self._mapped.clear()
        self._mpi.Barrier()  # memory that another process has mapped must not be freed
        for chunk in self._chunks:
            chunk.free()
        self._chunks.clear()


class EventMove(Signal):
    """A stage between devices: record an event in a stream, and let the stream wait for the events of other ranks.

    A process can wait for an event of another process only after it *has been* recorded; otherwise it waits for the
    previous record. So a flag in shared host memory reports the record. No host waits for a device.

    In a channel, exchange n uses event n mod 2. *Data are read after they were packed*: the stream has waited for the
    event that was recorded after them. It is this event and no later one: the peer records it again in its start n + 2,
    after its finish n + 1, for which this rank must have called start n + 1, thus finish n. *Data are not overwritten
    while they are read*: rank p packs exchange n + 2 on its stream after the events n + 1 of all peers. Rank q recorded
    its event n + 1 after the reads of exchange n, on the same stream.

    Parameters
    ----------
    which
        Number of the event.
    stream
        Function that returns the stream.
    peers
        Ranks whose events are awaited; by default all others.
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
        """Let the stream wait for the events of the other ranks; all of them have been recorded."""
        stream = self._stream()
        for event in self._events:
            stream.wait_event(event)


class IpcTransport:
    """Transport that reads messages in the sender's buffer, and sums in which each rank adds up its shard."""

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
        return WindowChannel(pattern, meter, SharedWindows(sends, recvs, (first, second), close, on_device=True))

    def reduction(self, buffer: Any, meter: Meter, method: Method) -> Reduction:
        """Make a sum in the order of the ranks, or half of it, on the communication stream. ::

            start    copy the summands to shared memory                         event 0, flag 2 n - 1
            then     after all events 0: add up the own shard of all ranks      event 1, flag 2 n
            then     after all events 1: copy the shards of all ranks

        A step can be enqueued when all flags are up; the progress thread does that, or `finish`. A reduce-scatter adds
        up straight into the buffer, an all-gather begins with the second copy; both end after all events 1.

        *Data are not overwritten while they are read*: the summands of run n + 1 are copied on a stream after events 1
        of run n of all other ranks, which follow the reads of the summands. A shard of run n + 1 is written after
        events 0 of run n + 1 of all other ranks, which follow the copies of the shards of run n. An event is recorded
        again only when all other ranks' streams wait for it already: run n + 1 starts when flags 2 n are up, which are
        raised after the wait for event 0; and event 1 is recorded again when flags 2 n + 1 are up, which are raised
        after the wait for event 1.
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
