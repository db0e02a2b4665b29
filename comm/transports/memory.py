"""Memory that the ranks of a node share: windows that grow together, places in them, and flags."""

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

__all__ = ["FLAG_BYTES", "Arena", "Chunk", "Flags", "Places", "Planning", "Signal", "rounded"]

PAGE = 4096  # [B]
SMALLEST = 64 * 1024  # [B] per rank
FLAG_BYTES = ALIGNMENT  # a cache line each: a rank that polls does not disturb the writer of another flag

# Polls before the core is offered to others: with a core per rank a peer is seldom later than that (some 10 us).
SPINS = 200


def rounded(nbytes: int, multiple: int = ALIGNMENT) -> int:
    """Return the smallest multiple that is not below `nbytes`. Local."""
    return -(-nbytes // multiple) * multiple


class Chunk:
    """One window: a segment of shared memory per rank of the node. Collective over the node to make and free.

    Parameters
    ----------
    node
        Ranks of the node.
    sizes
        What every rank allocates [B], a cache line more than it can use.

    Attributes
    ----------
    sizes
        Bytes of the segment of every rank, which begins on a cache line [B].
    used
        Of this rank's, how many are given out [B].
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
        """Take so many bytes each [B], to be given back one by one; zeroed. Local."""
        first, self.used = self.used, self.used + sum(requests)
        self._live += len(requests)
        self.segment(self._rank)[first : self.used].fill(0)  # commit the pages now, not in a step

    def give_back(self) -> None:
        """Give one request back; the segment is used afresh once all are given back. Local."""
        self._live -= 1
        if not self._live:
            self.used = 0

    def segment(self, rank: int) -> np.ndarray:
        """Return the memory of a rank of the node: ``(bytes,)`` uint8, aligned to a cache line, shared. Local."""
        if rank not in self._segments:
            memory, _ = self._window.Shared_query(rank)
            # All ranks find the same first byte: memory is mapped by whole pages, of many cache lines.
            self._segments[rank] = aligned(np.asarray(memory.cast("B")))[: self.sizes[rank]]
        return self._segments[rank]

    def sync(self) -> None:
        """Memory fence between what this rank wrote or read and its next message. Local."""
        self._window.Sync()

    def free(self) -> None:
        """Collective over the node."""
        self._segments.clear()
        self._window.Unlock_all()
        contexts.free(self._window)


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

    def reserve(self, requests: Sequence[int]) -> tuple[Chunk, np.ndarray]:
        """Return a chunk, the same on all ranks of the node, and where in it the requests [B] of every rank lie.

        Collective over the ranks of all nodes, with as many requests each, of any size.

        Returns
        -------
        chunk
            Which each request is given back to.
        offsets
            ``(ranks of the node, requests)``, in the segment of each rank [B].

        Raises
        ------
        CommError
            On all ranks of a node that has not enough shared memory, or too many windows; to be agreed on with other
            nodes.
        """
        self._agree(None)  # a rank may be lost to a fault since the last collective of a set-up
        size = rounded(max(sum(requests) + ALIGNMENT, SMALLEST, self._nbytes), PAGE)
        mine = [*requests, size, free_memory(), contexts.held(), *(chunk.used for chunk in self._chunks)]
        everywhere = np.empty((self.node.size, len(mine)), np.int64)
        self.node.Allgather(np.array(mine, np.int64), everywhere)
        wanted, sizes, free, held, used = np.split(everywhere, np.cumsum([len(requests), 1, 1, 1]), axis=1)
        starts = np.concatenate([np.zeros((len(everywhere), 1), np.int64), wanted.cumsum(axis=1)], axis=1)
        fits = (i for i, chunk in enumerate(self._chunks) if (used[:, i] + starts[:, -1] <= chunk.sizes).all())
        index = next(fits, None)
        if index is None:
            _check_room(int(sizes.sum()), int(free.min()))
            contexts.check(int(held.max()))
            self._chunks.append(Chunk(self.node, sizes[:, 0]))
            self._nbytes += size
            chunk, before = self._chunks[-1], np.zeros(len(everywhere), np.int64)
        else:
            chunk, before = self._chunks[index], used[:, index]
        # Zeroed before the agreement that ends every set-up: no rank looks at the flags of another one before that.
        chunk.take(requests)
        return chunk, before[:, None] + starts[:, :-1]

    def places(self, wanted: Sequence[int]) -> list[Places]:
        """Return so many bytes each [B], ranks may differ, in the segment of every rank. Collective, as `reserve`."""
        chunk, offsets = self.reserve([FLAG_BYTES + nbytes for nbytes in wanted])
        return [Places(chunk, at, self.node.rank) for at in offsets.T.tolist()]

    def close(self) -> None:
        """Free all windows; idempotent. Collective over the node."""
        for chunk in reversed(self._chunks):
            chunk.free()
        self._chunks.clear()
        if self.node != MPI.COMM_NULL:
            contexts.free(self.node)


def _check_room(nbytes: int, free: int) -> None:
    """Raise CommError if the node cannot hold `nbytes` more of shared memory. Local."""
    if nbytes > free:
        raise CommError(
            f"shared transport: expected {nbytes / 2**20:.1f} MiB free in {SHARED_MEMORY}, got {free / 2**20:.1f} MiB; "
            f"enlarge it (docker: --shm-size) or use transport='mpi'"
        )


class Flags:
    """One counter per rank of the node; a rank raises its own and looks at those of others.

    What a rank wrote to shared memory before a fence (`sync`) and its count is seen by every rank that has seen the
    count and passed a fence.

    Parameters
    ----------
    chunk
        Window that the counters lie in.
    offsets
        Offset [B] of the counter of this rank and of every other one that is looked at, by rank on the node.
    mine
        This rank on the node.

    Attributes
    ----------
    count
        To which this rank has counted.
    own
        Its counter.
    """

    def __init__(self, chunk: Chunk, offsets: dict[int, int], mine: int) -> None:
        self.sync, self._mine, self.count = chunk.sync, mine, 0
        self._counters = {rank: _counter(chunk, rank, first) for rank, first in sorted(offsets.items())}
        self.own = self._counters[mine]

    def others(self, ranks: Iterable[int] | None = None) -> list[memoryview]:
        """Return the counters of these ranks, this one left out; by default of all."""
        wanted = self._counters if ranks is None else ranks
        return [self._counters[rank] for rank in wanted if rank != self._mine]

    def reached(self, count: int, counters: Iterable[memoryview]) -> bool:
        """Return whether these have come to `count`. Does not wait."""
        for counter in counters:
            if counter[0] < count:
                return False
        self.sync()
        return True


class Signal(Stage):
    """A move through memory that ranks share: raise the own flag by one, and wait for those of others.

    All ranks count alike: one that raises no flag counts on all the same.

    Parameters
    ----------
    others
        Ranks whose flags are waited for; by default all.
    raises
        Whether this rank has something to say.

    Attributes
    ----------
    arrived
        Since when all were there (`time.perf_counter` [s]); 0 if not known.
    """

    arrived = 0.0

    def __init__(self, flags: Flags, others: Iterable[int] | None = None, raises: bool = True) -> None:
        self.flags, self._others, self._raises = flags, flags.others(others), raises
        self._count = 0

    def begin(self) -> None:
        flags = self.flags
        self._count = flags.count = flags.count + 1
        if self._raises:
            flags.sync()
            flags.own[0] = self._count

    def over(self) -> bool:
        return self.flags.reached(self._count, self._others)

    def wait(self) -> None:
        for counter in self._others:
            if counter[0] < self._count:
                _wait(counter, self._count)
        self.flags.sync()


class Places:
    """Memory in the segment of every rank of the node, behind a flag each; made by `Arena.places`.

    Attributes
    ----------
    mine, ranks
        This rank on the node, and how many there are.
    flags
        The flags of these places.
    """

    def __init__(self, chunk: Chunk, offsets: Sequence[int], mine: int) -> None:
        self._chunk, self.mine = chunk, mine
        self._offsets = dict(enumerate(offsets))
        self.flags = Flags(self._chunk, self._offsets, self.mine)
        self.ranks = len(self._offsets)

    def view(self, rank: int, first: int, nbytes: int, dtype: Any = np.uint8) -> np.ndarray:
        """Return the bytes ``[first, first + nbytes)`` of one rank, shared; `first` is a multiple of a cache line."""
        assert first % ALIGNMENT == 0, first
        start = self._offsets[rank] + FLAG_BYTES + first
        return self._chunk.segment(rank)[start : start + nbytes].view(dtype)

    def views(self, first: int, nbytes: int, dtype: Any = np.uint8) -> list[np.ndarray]:
        """Return the same of every rank."""
        return [self.view(rank, first, nbytes, dtype) for rank in range(self.ranks)]

    def give_back(self) -> None:
        """Free the memory. Local, but all ranks do it."""
        self._chunk.give_back()


#: A set-up that asks for bytes [B] in memory that ranks share, gets places, and returns the plan of a sum.
Planning = Generator[int, Places, ReductionPlan]


def _counter(chunk: Chunk, rank: int, offset: int) -> memoryview:
    """Return the counter as a memoryview of one integer: read and written in one instruction, without making an array.
    """
    counter: Any = chunk.segment(rank)[offset : offset + 8].view(np.int64)
    return memoryview(counter)


def _wait(flag: memoryview, count: int) -> None:
    for _ in range(SPINS):
        if flag[0] >= count:
            return
    for polls in counting():
        rest(polls)
        if flag[0] >= count:
            return
