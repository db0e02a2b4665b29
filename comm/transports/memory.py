"""Memory that the ranks of a node share: windows, allocations in them, and flags."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import count as counting
from typing import Any

import numpy as np
from mpi4py import MPI

from .. import contexts
from ..errors import CommError
from ..progress import Stage, rest
from ..reduction import ReductionPlan
from ..sweep import SHARED_MEMORY, free_memory
from .base import ALIGNMENT, aligned

__all__ = ["FLAG_BYTES", "Arena", "Chunk", "Flags", "Planning", "SharedBlock", "Signal", "rounded"]

PAGE = 4096  # [B]
SMALLEST = 64 * 1024  # [B] per rank
FLAG_BYTES = ALIGNMENT  # a cache line each: a rank that polls does not disturb the writer of another flag

# Polls before the rank yields its core: with a core per rank, peers are rarely later than that (some 10 us).
SPINS = 200


def rounded(nbytes: int, multiple: int = ALIGNMENT) -> int:
    """Return the smallest multiple of `multiple` that is at least `nbytes`. Local."""
    return -(-nbytes // multiple) * multiple


class Chunk:
    """One window: a segment of shared memory per rank of the node. Creating and freeing it is collective over the node.

    Parameters
    ----------
    node
        Communicator of the ranks of the node.
    sizes
        Bytes that every rank allocates: one cache line more than it can use [B].

    Attributes
    ----------
    sizes
        Usable bytes in the segment of every rank; each segment begins on a cache line [B].
    used
        Bytes of this rank's segment that are allocated [B].
    """

    def __init__(self, node: MPI.Intracomm, sizes: np.ndarray) -> None:
        # Separate segments begin on pages of their own, near the rank that first touches them.
        info = MPI.Info.Create()
        info.Set("alloc_shared_noncontig", "true")
        self._window = contexts.hold(MPI.Win.Allocate_shared(int(sizes[node.rank]), 1, info, node))
        info.Free()
        self._window.Lock_all(MPI.MODE_NOCHECK)  # an epoch for Sync; there are no RMA calls
        # Open MPI keeps records of its own in front of the first segment, so that none of them begins on a cache line.
        self._rank, self.sizes = node.rank, sizes - ALIGNMENT
        self._segments: dict[int, np.ndarray] = {}
        self.used = self._live = 0

    def take(self, requests: Sequence[int]) -> None:
        """Allocate one block per entry of `requests` [B] in this rank's segment, and zero them. Local.

        Each block is freed by one call of `free_block`.
        """
        first, self.used = self.used, self.used + sum(requests)
        self._live += len(requests)
        self.segment(self._rank)[first : self.used].fill(0)  # commit the pages now, not in a step

    def free_block(self) -> None:
        """Free one block; the segment is reused as soon as all blocks are free. Local."""
        self._live -= 1
        if not self._live:
            self.used = 0

    def segment(self, rank: int) -> np.ndarray:
        """Return the segment of a rank of the node: ``(bytes,)`` uint8, aligned to a cache line, shared. Local."""
        if rank not in self._segments:
            memory, _ = self._window.Shared_query(rank)
            # All ranks get the same first byte: memory is mapped in whole pages, each of many cache lines.
            self._segments[rank] = aligned(np.asarray(memory.cast("B")))[: self.sizes[rank]]
        return self._segments[rank]

    def sync(self) -> None:
        """Insert a memory fence: reads and writes of this rank before the call precede those after it. Local."""
        self._window.Sync()

    def free(self) -> None:
        """Free the window. Collective over the node."""
        self._segments.clear()  # views of memory that the window frees
        self._window.Unlock_all()
        contexts.free(self._window)


class Arena:
    """Shared memory of the ranks of one node, for all channels and sums of a communicator.

    Parameters
    ----------
    node
        Communicator of the ranks of this node; freed by `close`.
    agree
        `Communicator.agree`: raises on all ranks of all nodes an exception that one rank passes. Collective.

    Notes
    -----
    A window per channel would cost an MPI context and some milliseconds for each channel. The number of windows of an
    arena grows with the logarithm of the memory. MPI unlinks the names of the segments as soon as all ranks have mapped
    them, so the segments cannot outlive the run.
    """

    def __init__(self, node: MPI.Intracomm, agree: Callable[[Exception | None], None]) -> None:
        self.node = node
        self._agree = agree
        self._chunks: list[Chunk] = []
        self._nbytes = 0

    def reserve(self, requests: Sequence[int]) -> tuple[Chunk, np.ndarray]:
        """Reserve memory for `requests` [B], and return the chunk and the offsets in it.

        Collective over the ranks of all nodes. All ranks pass the same number of requests; the sizes may differ.

        Returns
        -------
        chunk
            Chunk that holds the blocks, the same on all ranks of the node; its `free_block` frees one block per call.
        offsets
            ``(ranks of the node, requests)``: offset of each block in the segment of its rank [B].

        Raises
        ------
        CommError
            On all ranks of a node that has too little shared memory, or too many windows. The caller must agree on the
            error with the other nodes.
        """
        self._agree(None)  # a rank may be lost to a fault since the last collective of a set-up
        # At least as large as all windows so far: few windows, whose number MPI limits, hold any number of channels.
        size = rounded(max(sum(requests) + ALIGNMENT, SMALLEST, self._nbytes), PAGE)
        # One collective for all facts from which the ranks of the node decide, each in the same way.
        mine = [*requests, size, free_memory(), contexts.held(), *(chunk.used for chunk in self._chunks)]
        everywhere = np.empty((self.node.size, len(mine)), np.int64)
        self.node.Allgather(np.array(mine, np.int64), everywhere)
        # One row per rank of the node; `requested` and `used` have several columns.
        requested, sizes, free, held, used = np.split(everywhere, np.cumsum([len(requests), 1, 1, 1]), axis=1)
        starts = np.concatenate([np.zeros((len(everywhere), 1), np.int64), requested.cumsum(axis=1)], axis=1)
        # A chunk can be used if the segments of all ranks have enough free bytes.
        fits = (i for i, chunk in enumerate(self._chunks) if (used[:, i] + starts[:, -1] <= chunk.sizes).all())
        index = next(fits, None)
        if index is None:
            # MPI would end the process by a bus error at the first access beyond the free memory.
            if sizes.sum() > free.min():
                raise CommError(
                    f"shared transport: expected {sizes.sum() / 2**20:.1f} MiB free in {SHARED_MEMORY}, got "
                    f"{free.min() / 2**20:.1f} MiB; enlarge it (docker: --shm-size) or use transport='mpi'"
                )
            # The maximum, so that all ranks of the node raise the same error.
            contexts.check(int(held.max()))
            self._chunks.append(Chunk(self.node, sizes[:, 0]))
            self._nbytes += size
            chunk, before = self._chunks[-1], np.zeros(len(everywhere), np.int64)
        else:
            chunk, before = self._chunks[index], used[:, index]
        # Zeroed before the agreement that ends every set-up: no rank reads the flags of another rank before that.
        chunk.take(requests)
        return chunk, before[:, None] + starts[:, :-1]

    def blocks(self, sizes: Sequence[int]) -> list[SharedBlock]:
        """Reserve one block per entry of `sizes` [B] in the segment of every rank; sizes may differ between ranks.

        Collective, as `reserve`.
        """
        chunk, offsets = self.reserve([FLAG_BYTES + nbytes for nbytes in sizes])
        return [SharedBlock(chunk, at, self.node.rank) for at in offsets.T.tolist()]

    def close(self) -> None:
        """Free all windows and the communicator of the node. Idempotent. Collective over the node."""
        for chunk in reversed(self._chunks):
            chunk.free()
        self._chunks.clear()
        if self.node != MPI.COMM_NULL:
            contexts.free(self.node)


class Flags:
    """One counter per rank of the node. A rank increments its own and reads those of the others.

    A rank writes to shared memory, passes a fence (`sync`), and raises its counter. Every rank that has read the new
    count, and then passed a fence, reads what was written.

    Parameters
    ----------
    chunk
        Window that holds the counters.
    offsets
        Offset of the counter of this rank, and of every other rank whose counter is read, by rank on the node [B].
    mine
        Rank of this process on the node.

    Attributes
    ----------
    count
        Last count of this rank.
    own
        Counter of this rank.
    """

    def __init__(self, chunk: Chunk, offsets: dict[int, int], mine: int) -> None:
        self.sync, self._mine, self.count = chunk.sync, mine, 0
        # A memoryview of one integer is read and written in one instruction, without allocating an array.
        self._counters: dict[int, memoryview] = {}
        for rank, first in sorted(offsets.items()):
            counter: Any = chunk.segment(rank)[first : first + 8].view(np.int64)
            self._counters[rank] = memoryview(counter)
        self.own = self._counters[mine]

    def others(self, ranks: Iterable[int] | None = None) -> list[memoryview]:
        """Return the counters of `ranks` (by default, of all ranks), except that of this rank."""
        counters = self._counters if ranks is None else ranks
        return [self._counters[rank] for rank in counters if rank != self._mine]

    def reached(self, count: int, counters: Iterable[memoryview]) -> bool:
        """Return whether all of these counters have reached `count`. Does not wait."""
        for counter in counters:
            if counter[0] < count:
                return False
        # Reads after the fence find what the ranks wrote before they raised their counters.
        self.sync()
        return True


class Signal(Stage):
    """A stage that increments this rank's flag and waits for the flags of other ranks.

    All ranks keep the same count: a rank that does not raise its flag increments its count too.

    Parameters
    ----------
    others
        Ranks whose flags are awaited; by default all.
    raises
        Whether this rank raises its flag.

    Attributes
    ----------
    arrived
        Time at which all flags had arrived (`time.perf_counter` [s]); 0 if unknown.
    """

    arrived = 0.0

    def __init__(self, flags: Flags, others: Iterable[int] | None = None, raises: bool = True) -> None:
        self.flags, self._others, self._raises = flags, flags.others(others), raises
        self._count = 0

    def begin(self) -> None:
        flags = self.flags
        self._count = flags.count = flags.count + 1
        if self._raises:
            # What this rank has written must be visible before the count is.
            flags.sync()
            flags.own[0] = self._count

    def over(self) -> bool:
        return self.flags.reached(self._count, self._others)

    def wait(self) -> None:
        for counter in self._others:
            if counter[0] < self._count:
                _wait(counter, self._count)
        self.flags.sync()


class SharedBlock:
    """A block of memory in the segment of every rank of the node, each preceded by a flag; made by `Arena.blocks`.

    Attributes
    ----------
    mine
        Rank of this process on the node.
    ranks
        Number of ranks on the node.
    flags
        Flags of these blocks.
    """

    def __init__(self, chunk: Chunk, offsets: Sequence[int], mine: int) -> None:
        self._chunk, self.mine = chunk, mine
        self._offsets = dict(enumerate(offsets))
        self.flags = Flags(self._chunk, self._offsets, self.mine)
        self.ranks = len(self._offsets)

    def view(self, rank: int, first: int, nbytes: int, dtype: Any = np.uint8) -> np.ndarray:
        """Return a view of the bytes ``[first, first + nbytes)`` of one rank's block; `first` is a multiple of a cache
        line.
        """
        assert first % ALIGNMENT == 0, first
        start = self._offsets[rank] + FLAG_BYTES + first
        return self._chunk.segment(rank)[start : start + nbytes].view(dtype)

    def free(self) -> None:
        """Free the memory. Local, but all ranks must call it."""
        self._chunk.free_block()


#: A set-up that requests bytes [B] of shared memory, receives its `SharedBlock`, and returns the plan of a sum.
Planning = Generator[int, SharedBlock, ReductionPlan]


def _wait(flag: memoryview, count: int) -> None:
    for _ in range(SPINS):
        if flag[0] >= count:
            return
    for polls in counting():
        rest(polls)
        if flag[0] >= count:
            return
