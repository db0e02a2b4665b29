"""Double of ``cupy.cuda.nccl`` over MPI, which rejects wrong calls and executes when its stream does.

The double compares the ranks' arguments when a call executes: all ranks make the same call, in the same order, with
matching sizes. Addresses must be of device memory, streams must be streams, counts and constants those of NCCL.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import ml_dtypes
import numpy as np
from mpi4py import MPI

from tests.support.stream_device import StreamDevice

__all__ = ["FakeNccl"]

DTYPES = {
    "NCCL_UINT8": (1, np.uint8),
    "NCCL_INT32": (2, np.int32),
    "NCCL_INT64": (4, np.int64),
    "NCCL_FLOAT16": (6, np.float16),
    "NCCL_FLOAT32": (7, np.float32),
    "NCCL_FLOAT64": (8, np.float64),
    "NCCL_BFLOAT16": (9, ml_dtypes.bfloat16),
}
_BY_NUMBER = dict(DTYPES.values())


class FakeNccl:
    """Double of the module for the device of one rank.

    Parameters
    ----------
    mpi
        Communicator of the processes.
    folder
        Folder in which the members of a communicator find each other, the same for all ranks.
    """

    NCCL_SUM = 0
    available = True

    def __init__(self, device: StreamDevice, mpi: MPI.Intracomm, folder: Path, version: int = 23203) -> None:
        self.device, self.mpi, self.folder, self.version = device, mpi, folder, version
        self._local = threading.local()  # of groups, as in NCCL
        for name, (number, _) in DTYPES.items():
            setattr(self, name, number)
        self.communicators: list[FakeCommunicator] = []

    @property
    def _depth(self) -> int:
        return getattr(self._local, "depth", 0)

    @_depth.setter
    def _depth(self, depth: int) -> None:
        self._local.depth = depth

    @property
    def _calls(self) -> list[tuple[Any, ...]]:
        return self._local.__dict__.setdefault("calls", [])

    def get_version(self) -> int:
        return self.version

    def get_unique_id(self) -> bytes:
        return os.urandom(128)

    NcclConfig = SimpleNamespace

    def NcclCommunicator(self, size: int, unique: bytes, rank: int, config: Any = None) -> FakeCommunicator:
        made = FakeCommunicator(self, size, unique, rank)
        made.shares = config is not None and config.split_share == 1
        self.communicators.append(made)
        return made

    def groupStart(self) -> None:
        self._depth += 1

    def groupEnd(self) -> None:
        assert self._depth > 0, "groupEnd without groupStart"
        self._depth -= 1
        if not self._depth:
            calls = list(self._calls)
            self._calls.clear()
            if calls:
                self._enqueue(calls)

    def call(
        self, comm: FakeCommunicator, what: tuple[Any, ...], stream: int, reads: list, writes: list, held: Any
    ) -> None:
        assert stream in self.device.cuda.streams and stream != self.device.compute.ptr, "no stream of its own"
        assert not comm.dead, "a communicator that was destroyed or aborted"
        comm.family.add(stream)
        assert len(comm.family) == 1, "calls that share buffers, and may run at once"
        if self.device.recording is not None:
            comm.graphs.add(self.device.recording)
        if what[0] in ("send", "recv"):
            assert self._depth, "sends and receives outside of a group wait for each other"
        self._calls.append((comm, what, stream, reads, writes, held))
        if not self._depth:
            self.groupStart()
            self.groupEnd()

    def _enqueue(self, calls: list[Any]) -> None:
        comm, stream = calls[0][0], calls[0][2]
        assert all(c[0] is comm and c[2] == stream for c in calls), "a group of several communicators or streams"
        comm.count += 1
        names = "+".join(sorted({c[1][0] for c in calls}))
        self.device.trace.op(
            f"{names} number {comm.count}",
            stream,
            [r for c in calls for r in c[3]],
            [w for c in calls for w in c[4]],
            nccl=(comm.name, comm.count, tuple((comm.rank, *c[1]) for c in calls)),
        )
        self.device.cuda.streams[stream].enqueue(lambda: comm.run([(c[1], c[3], c[4]) for c in calls]))


class FakeCommunicator:
    """Double of ``cupy.cuda.nccl.NcclCommunicator``, whose constructor blocks until all members have called it."""

    def __init__(self, nccl: FakeNccl, size: int, unique: bytes, rank: int) -> None:
        assert isinstance(unique, bytes) and len(unique) == 128 and 0 <= rank < size
        self.nccl, self.size, self.rank, self.count, self.dead = nccl, size, rank, 0, ""
        self.error: Exception | None = None
        self.graphs: WeakSet[Any] = WeakSet()
        self.name = hashlib.sha1(unique).hexdigest()[:12]
        self.shares, self.parent, self.color = False, None, -1
        self.parts: list[FakeCommunicator] = []
        #: Streams of the calls of this communicator and of all that share its resources.
        self.family: set[int] = set()
        self.splits = 0
        members = self._meet()
        world = nccl.mpi.Get_group()
        group = world.Incl(members)
        # The number of the communicator is in the tag: two may be made at once by ranks that share none.
        self._mpi = nccl.mpi.Create_group(group, int(self.name[:4], 16) % 30000)
        group.Free()
        world.Free()
        assert self._mpi.rank == rank

    def _meet(self) -> list[int]:
        (self.nccl.folder / f"{self.name}-{self.rank}").write_text(str(self.nccl.mpi.rank))
        paths = [self.nccl.folder / f"{self.name}-{rank}" for rank in range(self.size)]
        while not all(path.exists() and path.read_text() for path in paths):
            time.sleep(1e-3)
        return [int(path.read_text()) for path in paths]

    def commSplit(self, color: int, key: int, config: Any = None) -> FakeCommunicator | None:
        """Split the communicator; blocks until all its members have called it equally often."""
        assert not self.dead and not self.nccl._depth and self.nccl.device.recording is None
        streams = [self.nccl.device.compute, *(self.nccl.device.cuda.streams[ptr] for ptr in self.family)]
        assert not any(stream._todo for stream in streams), "calls are outstanding"
        self.splits += 1
        told = self._mpi.allgather((self.splits, color, key))
        assert {number for number, *_ in told} == {self.splits}, "ranks split in another order"
        keys = sorted(k for _, c, k in told if c == color)
        assert color == -1 or keys == list(range(len(keys))), "ranks of a group by other numbers than its own"
        part_mpi = self._mpi.Split(MPI.UNDEFINED if color < 0 else color, key)
        if color < 0:
            return None
        part = FakeCommunicator.__new__(FakeCommunicator)
        part.__dict__.update(nccl=self.nccl, size=part_mpi.size, rank=part_mpi.rank, count=0, dead="", error=None)
        part.__dict__.update(graphs=WeakSet(), _mpi=part_mpi, parent=self, color=color, parts=[], splits=0)
        part.family = self.family if self.shares else set()
        part.shares = self.shares if config is None else config.split_share == 1
        part.name = hashlib.sha1(f"{self.name} {self.splits} {color}".encode()).hexdigest()[:12]
        self.parts.append(part)
        self.nccl.communicators.append(part)
        return part

    # -- calls ----------------------------------------------------------------------------------
    def send(self, ptr: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._peer(peer)
        self._call(("send", peer, self._bytes(count, dtype)), stream, [(ptr, self._bytes(count, dtype))], [])

    def recv(self, ptr: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._peer(peer)
        self._call(("recv", peer, self._bytes(count, dtype)), stream, [], [(ptr, self._bytes(count, dtype))])

    def allReduce(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:
        self._sum("allReduce", source, target, count, count, dtype, op, -1, stream)

    def reduceScatter(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:
        nbytes = self._bytes(count, dtype)
        self._placed(target, source, nbytes, source + self.rank * nbytes)
        self._sum("reduceScatter", source, target, count * self.size, count, dtype, op, -1, stream)

    def reduce(self, source: int, target: int, count: int, dtype: int, op: int, root: int, stream: int) -> None:
        assert 0 <= root < self.size
        self._sum("reduce", source, target, count, count if root == self.rank else 0, dtype, op, root, stream)

    def allGather(self, source: int, target: int, count: int, dtype: int, stream: int) -> None:
        nbytes = self._bytes(count, dtype)
        self._placed(source, target, nbytes, target + self.rank * nbytes)
        what = ("allGather", count, dtype, 0, -1, self.size)
        self._call(what, stream, [(source, nbytes)], [(target, nbytes * self.size)])

    def broadcast(self, source: int, target: int, count: int, dtype: int, root: int, stream: int) -> None:
        nbytes = self._bytes(count, dtype)
        assert 0 <= root < self.size
        reads = [(source, nbytes)] if root == self.rank else []
        writes = [(target, nbytes)] if root != self.rank or source != target else []
        self._call(("broadcast", count, dtype, 0, root, self.size), stream, reads, writes)

    def _sum(self, name: str, source: int, target: int, count: int, out: int, dtype: int, op: int, *rest: Any) -> None:
        root, stream = rest
        assert op == 0, "not a sum"
        reads, writes = [(source, self._bytes(count, dtype))], [(target, self._bytes(out, dtype))]
        self._call((name, count, dtype, op, root, self.size), stream, reads, writes)

    def _call(self, what: tuple[Any, ...], stream: int, reads: list, writes: list) -> None:
        parts = [part for part in (*reads, *writes) if part[1]]
        held = [self.nccl.device.holder(*part) for part in parts]
        assert all(memory is not None for memory in held), f"{what[0]}: not memory of the device"
        self.nccl.call(self, what, stream, reads, writes, held)

    def _peer(self, peer: int) -> None:
        # A rank may send to itself; one of several has no reason to.
        assert 0 <= peer < self.size and (peer != self.rank or self.size == 1)

    def _placed(self, part: int, whole: int, nbytes: int, own: int) -> None:
        apart = part + nbytes <= whole or whole + nbytes * self.size <= part
        assert apart or part == own, "in place means at one's own part"

    @staticmethod
    def _bytes(count: int, dtype: int) -> int:
        assert isinstance(count, int) and count >= 0
        return count * np.dtype(_BY_NUMBER[dtype]).itemsize

    # -- running --------------------------------------------------------------------------------
    def run(self, calls: list[Any]) -> None:
        """Execute the calls of a group; it completes when all partners execute theirs."""
        if self.dead:
            return
        requests, received = [], []
        for what, reads, writes in calls:
            if what[0] == "send":
                requests.append(self._mpi.Isend(_memory(*reads[0]).copy(), what[1], 1))
            elif what[0] == "recv":
                room = np.empty(what[2] + 1, np.uint8)  # one more: what is too long is seen
                requests.append(self._mpi.Irecv(room, what[1], 1))
                received.append((requests[-1], room, _memory(*writes[0])))
            else:
                self._collective(what, reads, writes)
        for request, room, target in received:
            status = MPI.Status()
            request.Wait(status)
            assert status.Get_count(MPI.BYTE) == target.size, "a message of another length"
            target[...] = room[:-1]
        MPI.Request.Waitall(requests)

    def _collective(self, what: tuple[Any, ...], reads: list, writes: list) -> None:
        told = self._mpi.allgather((what, [bytes(_memory(*part)) for part in reads]))
        assert all(other == what for other, _ in told), f"ranks make different calls: {[w for w, _ in told]}"
        name, count, dtype = what[0], what[1], _BY_NUMBER[what[2]]
        values = [np.frombuffer(data[0], dtype) if data else None for _, data in told]
        if name in ("allGather", "broadcast"):
            found = [v for v in values if v is not None]
            result: Any = np.concatenate(found)
        else:
            # In no order that anybody may rely on: the last rank first. Sums of few bits in float32, as NCCL does.
            wide = np.float32 if np.dtype(dtype).itemsize == 2 else dtype
            result = sum((v.astype(wide) for v in reversed(values)), np.zeros(count, wide)).astype(dtype)
        if not writes or not writes[0][1]:
            return
        if name == "reduceScatter":
            result = np.split(result, self.size)[self.rank]
        _memory(*writes[0])[...] = result.view(np.uint8)

    # -- the end --------------------------------------------------------------------------------
    def check_async_error(self) -> None:
        self.nccl.device.seen()
        if self.error is not None:
            raise self.error

    def abort(self) -> None:
        assert not self.graphs, "NCCL waits for the end of graphs with calls of a communicator, for ever"
        self.dead = "aborted"

    def destroy(self) -> None:
        assert not self.dead and not self.graphs, "NCCL waits for the end of graphs with calls of it, for ever"
        assert all(part.dead for part in self.parts), "the parent before its parts"
        self.dead = "destroyed"
        self._mpi.Free()


def _memory(address: int, nbytes: int) -> np.ndarray:
    import ctypes

    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)
