"""Sums, shards and gathers by NCCL, in place, on a lane."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from halograd.comm.gpu.adding import add_up
from halograd.comm.gpu.nccl import SUMMABLE, Link
from halograd.comm.gpu.spans import LaneMeter
from halograd.comm.reduction import Reduction
from halograd.comm.shard import shards

__all__ = ["SUMS", "NcclGather", "NcclOrderedSum", "NcclScatter", "NcclSum"]


class NcclReduction(Reduction):
    """What all have in common: into the lane, some calls of NCCL, and back. Nobody waits on the host."""

    def __init__(self, link: Link, buffer: Any, meter: LaneMeter) -> None:
        super().__init__(buffer, meter)
        self._link, self._passage = link, meter.passage(link.lane)
        flat = buffer.reshape(-1)
        self._parts = shards(flat.size, link.size, buffer.itemsize)
        self._shards = [flat[part] for part in self._parts]
        self._own = self._shards[link.rank]
        self._address = link.lane.cuda.device.address(buffer)
        self._at = [self._address + part.start * buffer.itemsize for part in self._parts]
        self._lengths = [part.stop - part.start for part in self._parts]
        #: Whether all shards are as long as each other: then NCCL has one call for all of them.
        self._even = len(set(self._lengths)) == 1

    @property
    def buffer_bytes(self) -> int:
        """Memory of the host: none [B]."""
        return 0

    @property
    def _dtype(self) -> int:
        return int(getattr(self._link.nccl, SUMMABLE[self.buffer.dtype.name]))

    def _start(self) -> None:
        self._passage.enter()
        self._enqueue()
        self._link.leave(self._passage, f"sum {self._meter.label!r} of {self.buffer.nbytes} bytes")

    @abstractmethod
    def _enqueue(self) -> None:
        """Enqueue what there is to do on the lane."""

    def _finish(self) -> float:
        self._link.raise_fault()
        self._passage.join()
        return 0.0

    def _gather(self) -> None:
        """All shards to all ranks, by bytes."""
        nccl, stream, size = self._link.nccl, self._link.lane.ptr, self.buffer.itemsize
        with self._link.group() as comm:
            if self._even:
                nbytes = self._lengths[0] * size
                comm.allGather(self._at[self._link.rank], self._address, nbytes, nccl.NCCL_UINT8, stream)
                return
            for root, length in enumerate(self._lengths):
                if length:
                    comm.broadcast(self._at[root], self._at[root], length * size, nccl.NCCL_UINT8, root, stream)

    def _close(self) -> None:
        self._link.forget(self._passage)


class NcclSum(NcclReduction):
    """``ncclAllReduce``, in place. The bits are the same on all ranks, and depend on how many there are."""

    def _enqueue(self) -> None:
        nccl = self._link.nccl
        with self._link.group() as comm:
            comm.allReduce(
                self._address, self._address, self.buffer.size, self._dtype, nccl.NCCL_SUM, self._link.lane.ptr
            )


class NcclScatter(NcclReduction):
    """``ncclReduceScatter``, in place; one ``ncclReduce`` per shard if they are not as long as each other."""

    def _enqueue(self) -> None:
        nccl, stream, rank = self._link.nccl, self._link.lane.ptr, self._link.rank
        with self._link.group() as comm:
            if self._even:
                own = self._at[rank]
                comm.reduceScatter(self._address, own, self._lengths[0], self._dtype, nccl.NCCL_SUM, stream)
                return
            for root, length in enumerate(self._lengths):
                if length:
                    at = self._at[root]
                    comm.reduce(at, at, length, self._dtype, nccl.NCCL_SUM, root, stream)


class NcclGather(NcclReduction):
    """``ncclAllGather``, in place; one ``ncclBroadcast`` per shard if they are not as long as each other."""

    def _enqueue(self) -> None:
        self._gather()


class NcclOrderedSum(NcclReduction):
    """A sum in the order of the ranks: shards to those who add them up, and the sums back. All on the lane.

    The bits are those of :class:`halograd.comm.ordered.MpiOrderedSum`, which does the same on the host.
    """

    def __init__(self, link: Link, buffer: Any, meter: LaneMeter) -> None:
        super().__init__(link, buffer, meter)
        device = link.lane.cuda.device
        self._received = device.zeros((link.size, self._own.size), buffer.dtype)
        summands = [self._own if r == link.rank else self._received[r] for r in range(link.size)]
        self._add_up = add_up(device, summands, self._own)

    @property
    def device_bytes(self) -> int:
        """Memory of the device beside the buffer [B]."""
        return int(self._received.nbytes)

    def _enqueue(self) -> None:
        self._scatter()
        if self._own.size:
            with self._link.lane.stream:
                self._add_up()
        self._gather()

    def _scatter(self) -> None:
        link, size = self._link, self.buffer.itemsize
        nccl, stream, address = link.nccl, link.lane.ptr, link.lane.cuda.device.address
        with link.group() as comm:
            for peer in (r for r in range(link.size) if r != link.rank):
                if self._lengths[peer]:
                    comm.send(self._at[peer], self._lengths[peer] * size, nccl.NCCL_UINT8, peer, stream)
                if self._own.size:
                    comm.recv(address(self._received[peer]), self._own.nbytes, nccl.NCCL_UINT8, peer, stream)


#: By method of `Communicator.reduction`.
SUMS: dict[str, type[NcclReduction]] = {
    "allreduce": NcclSum,
    "ordered": NcclOrderedSum,
    "reduce_scatter": NcclScatter,
    "all_gather": NcclGather,
}
