"""Device memory that the ranks of a node map into each other, and events that they wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from ..errors import CommError
from .streams import Cuda

__all__ = ["Exchanged", "IpcMemory", "PeerEvent"]

# CUDA shares whole blocks of 2 MiB, whatever else lies in them; so what is shared gets blocks of its own.
GRAIN = 2 << 20  # [B]
ALIGNMENT = 256  # [B]
# Containers that share a GPU can map each other's memory, and yet not open each other's events.
SHM = "events need one /dev/shm: ranks in containers of their own have to share it"


class PeerEvent:
    """An event of another process, for `Stream.wait_event`."""

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


class DeviceChunk:
    """One allocation of this rank, given out piece by piece. Local."""

    def __init__(self, cuda: Cuda, nbytes: int) -> None:
        self._cuda, self.nbytes, self._used, self._live = cuda, nbytes, 0, 0
        # Not from CuPy's pool: a handle stands for a whole allocation of cudaMalloc.
        self.ptr = int(cuda.cupy.cuda.runtime.malloc(nbytes))
        self.handle: bytes = cuda.cupy.cuda.runtime.ipcGetMemHandle(self.ptr)

    def fits(self, nbytes: int) -> bool:
        return self._used + nbytes <= self.nbytes

    def take(self, nbytes: int) -> int:
        """Offset [B] of fresh memory."""
        first = self._used
        self._used += nbytes
        self._live += 1
        return first

    def give_back(self) -> None:
        """Undo one `take`; the memory is used afresh once all are given back."""
        self._live -= 1
        if not self._live:
            self._used = 0

    def free(self) -> None:
        self._cuda.cupy.cuda.runtime.free(self.ptr)


class Exchanged:
    """What one channel or sum shares: memory and events of this rank, and those of all others. Local to use.

    Attributes
    ----------
    rank
        This rank.
    events
        Of this rank, to be recorded.
    """

    def __init__(self, memory: IpcMemory, chunk: DeviceChunk, first: int, events: list[Any]) -> None:
        self._memory, self._chunk, self.rank, self.events = memory, chunk, memory.rank, events
        self._bases: dict[int, int] = {memory.rank: chunk.ptr + first}
        self._peer_events: dict[int, list[PeerEvent]] = {}

    def open(self, exports: Sequence[tuple[bytes, int, list[bytes]]], peers: Sequence[int] | None = None) -> None:
        """Map what these ranks export (by default all others): handle of the chunk, offset, handles of the events."""
        for rank, (handle, first, events) in enumerate(exports):
            if rank != self.rank and (peers is None or rank in peers):
                self._bases[rank] = self._memory.map(rank, handle) + first
                self._peer_events[rank] = [PeerEvent(self._memory.runtime.ipcOpenEventHandle(e)) for e in events]

    def array(self, rank: int, offset: int, count: int, dtype: np.dtype) -> Any:
        """``(count,)`` in the memory of a rank, `offset` [B] behind where its part begins."""
        return self._memory.view(self._bases[rank] + offset, count, dtype)

    def peer_events(self, which: int, peers: Sequence[int] | None = None) -> list[PeerEvent]:
        """That event of these ranks, by default of all others."""
        return [self._peer_events[rank][which] for rank in (self._peer_events if peers is None else peers)]

    def close(self) -> None:
        """Give the memory back, and the others' events. Local, but all ranks do it."""
        for events in self._peer_events.values():
            for event in events:
                self._memory.runtime.eventDestroy(event.ptr)
        self._peer_events.clear()
        self._chunk.give_back()


class IpcMemory:
    """Memory of one communicator, all of whose ranks are on one node. Collective to make parts of and to close."""

    def __init__(self, cuda: Cuda, mpi: MPI.Intracomm, agree: Callable[[Exception | None], None]) -> None:
        self._cuda, self._mpi, self._agree = cuda, mpi, agree
        self.rank, self.runtime = mpi.rank, cuda.cupy.cuda.runtime
        self._chunks: list[DeviceChunk] = []
        self._mapped: dict[tuple[int, bytes], int] = {}

    @property
    def nbytes(self) -> int:
        """Device memory of this rank that is shared [B]."""
        return sum(chunk.nbytes for chunk in self._chunks)

    def share(self, nbytes: int, events: int, peers: Sequence[int] | None = None) -> Exchanged:
        """So many bytes of this rank, for the others to read, and so many events. Collective.

        Parameters
        ----------
        peers
            Whose memory and events this rank opens, by default those of all others. A driver has some ten thousand
            events for several processes, and a network some hundred exchanges.

        Raises
        ------
        CommError
            On all ranks, if memory cannot be had or mapped.
        """
        # Memory that is used afresh may still be read by what another rank has enqueued: no rank goes on before all
        # devices are done. This is when things are built, not a step.
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
            # As much again as there is: the number of mappings grows with the logarithm of the memory.
            chunk = DeviceChunk(self._cuda, -(-max(nbytes, self.nbytes) // GRAIN) * GRAIN)
            self._chunks.append(chunk)
        first = chunk.take(nbytes)
        event = self._cuda.cupy.cuda.Event
        own = [event(disable_timing=True, interprocess=True) for _ in range(events)]
        handles = [self.runtime.ipcGetEventHandle(e.ptr) for e in own]
        return Exchanged(self, chunk, first, own), (chunk.handle, first, handles)

    def map(self, rank: int, handle: bytes) -> int:
        """Address of a chunk of another rank; mapped once."""
        key = (rank, handle)
        if key not in self._mapped:
            self._mapped[key] = int(self.runtime.ipcOpenMemHandle(handle))
        return self._mapped[key]

    def view(self, address: int, count: int, dtype: np.dtype) -> Any:
        """An array at an address. It does not keep the memory alive: `close` does away with all of it."""
        cupy, nbytes = self._cuda.cupy, count * dtype.itemsize
        memory = cupy.cuda.UnownedMemory(address, max(nbytes, 1), self, self._cuda.device.ordinal)
        return cupy.ndarray((count,), dtype, cupy.cuda.MemoryPointer(memory, 0))

    def close(self) -> None:
        """Unmap what is others', then free what is this rank's."""
        self._cuda.device.synchronize()
        self._mpi.Barrier()
        for address in self._mapped.values():
            self.runtime.ipcCloseMemHandle(address)
        self._mapped.clear()
        self._mpi.Barrier()  # memory that another process has mapped must not be freed
        for chunk in self._chunks:
            chunk.free()
        self._chunks.clear()
