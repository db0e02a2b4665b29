"""Memory that the ranks of a node share, in few windows that grow together."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from mpi4py import MPI

from halograd.comm.errors import CommError
from halograd.comm.transports.base import ALIGNMENT

__all__ = ["Arena", "Chunk", "rounded"]

PAGE = 4096  # [B]
SMALLEST = 64 * 1024  # [B] per rank
SHARED_MEMORY = Path("/dev/shm")


def rounded(nbytes: int, multiple: int = ALIGNMENT) -> int:
    """The smallest multiple that is not below `nbytes`. Local."""
    return -(-nbytes // multiple) * multiple


class Chunk:
    """One window: a segment of shared memory per rank of the node. Collective over the node to make and free."""

    def __init__(self, node: MPI.Intracomm, nbytes: int) -> None:
        # Separate segments begin on pages of their own, near the rank that first touches them.
        info = MPI.Info.Create()
        info.Set("alloc_shared_noncontig", "true")
        self._window = MPI.Win.Allocate_shared(nbytes, 1, info, node)
        info.Free()
        self._window.Lock_all(MPI.MODE_NOCHECK)  # an epoch for Sync; nobody uses RMA calls
        self._rank = node.rank
        self._nbytes = nbytes
        self._used = 0
        self._live = 0

    def fits(self, nbytes: int) -> bool:
        """Whether this rank's segment has room. Local."""
        return self._used + nbytes <= self._nbytes

    def take(self, nbytes: int) -> int:
        """Offset [B] in this rank's segment of fresh memory, zeroed. Local."""
        first = self._used
        self._used += nbytes
        self._live += 1
        self.segment(self._rank)[first : first + nbytes].fill(0)  # commit the pages now, not in a step
        return first

    def give_back(self) -> None:
        """Undo one `take`; the segment is used afresh once all are given back. Local."""
        self._live -= 1
        if not self._live:
            self._used = 0

    def segment(self, rank: int) -> np.ndarray:
        """The memory of a rank of the node: ``(bytes,)`` uint8, shared. Local."""
        memory, _ = self._window.Shared_query(rank)
        return np.asarray(memory.cast("B"))

    def sync(self) -> None:
        """Memory fence between what this rank wrote or read and its next message. Local."""
        self._window.Sync()

    def free(self) -> None:
        """Collective over the node."""
        self._window.Unlock_all()
        self._window.Free()


class Arena:
    """Shared memory of the ranks of one node, for all channels of a communicator.

    Parameters
    ----------
    node
        Communicator of the ranks of this node; freed by `close`.
    agree
        Raises on all ranks of all nodes what failed on one of them. Collective.

    Notes
    -----
    A window per channel would cost an MPI context and some milliseconds each; this makes a number of windows that
    grows with the logarithm of the memory. MPI takes the names of the segments away as soon as all ranks
    have mapped them, so they cannot outlive the run.
    """

    def __init__(self, node: MPI.Intracomm, agree: Callable[[Exception | None], None]) -> None:
        self.node = node
        self._agree = agree
        self._chunks: list[Chunk] = []
        self._nbytes = 0

    def reserve(self, nbytes: int) -> tuple[Chunk, int]:
        """A chunk, the same on all ranks of the node, and the offset [B] of `nbytes` in this rank's segment.

        Collective over the ranks of all nodes.

        Raises
        ------
        CommError
            On all ranks, if a node has not enough shared memory.
        """
        self._agree(None)  # a rank may be lost to a fault since the last collective of a set-up
        room = np.array([chunk.fits(nbytes) for chunk in self._chunks] + [True], np.int32)
        self.node.Allreduce(MPI.IN_PLACE, room, MPI.MIN)
        index = int(np.argmax(room))
        grows = index == len(self._chunks)
        size = rounded(max(nbytes, SMALLEST, self._nbytes), PAGE) if grows else 0
        total = self.node.allreduce(size)
        self._agree(_shortage(total))
        if grows:
            self._chunks.append(Chunk(self.node, size))
            self._nbytes += size
        chunk = self._chunks[index]
        return chunk, chunk.take(nbytes)

    def close(self) -> None:
        """Free all windows; idempotent. Collective over the node."""
        for chunk in reversed(self._chunks):
            chunk.free()
        self._chunks.clear()
        if self.node != MPI.COMM_NULL:
            self.node.Free()


def _shortage(nbytes: int) -> CommError | None:
    """The error to raise if the node cannot hold `nbytes` more of shared memory: to find out by touching
    the memory would be a bus error."""
    if not SHARED_MEMORY.is_dir():
        return None
    status = os.statvfs(SHARED_MEMORY)
    free = status.f_bavail * status.f_frsize
    if nbytes <= free:
        return None
    return CommError(
        f"shared transport: expected {nbytes / 2**20:.1f} MiB free in {SHARED_MEMORY}, got {free / 2**20:.1f} MiB; "
        f"enlarge it (docker: --shm-size) or use transport='mpi'"
    )
