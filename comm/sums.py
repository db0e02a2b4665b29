"""Descriptions of sums over ranks: their steps, the order of additions, and the data format. Pure arithmetic.

A sum has three steps. Every rank *scatters* its summand: it sends each rank that rank's part. It *adds* up its own part
of all summands. It *gathers* the sums of all parts. A method of `Communicator.reduction` chooses among these steps; the
codec (`halograd.comm.codec`) is a separate choice. The communicator runs a sum by this description, and the performance
model predicts its traffic and memory from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from .codec import UNCHANGED, Codec

__all__ = [
    "LARGEST_AT_ONCE",
    "METHODS",
    "Held",
    "Method",
    "NodeShare",
    "carrying",
    "held_together",
    "is_large",
    "largest_shard",
    "node_shares",
    "ring_slots",
    "shard",
    "shards",
]

ALIGNMENT = 64  # [B]: a shard begins on a cache line if the array does
#: Largest sum with memory of its own [B]. Larger sums share memory: on a node, a stage through which they pass piece
#: by piece; by messages, a ring of slots.
LARGEST_AT_ONCE = 64 * 1024
#: Memory of all large sums by messages of a communicator that are planned together [B], if the largest needs no more:
#: four buckets of the default size, so that some travel while others are added up. On one node, rings of 4 to 32 MiB
#: took no more time than memory for all sums at once.
RING_BYTES = 16 << 20


def shards(size: int, ranks: int, itemsize: int) -> list[slice]:
    """Return each rank's part of `size` elements of `itemsize` [B]: about equal, in whole cache lines except the last.
    Local.

    >>> shards(100, 3, 8)
    [slice(0, 32, None), slice(32, 64, None), slice(64, 100, None)]
    >>> shards(5, 2, 8)
    [slice(0, 0, None), slice(0, 5, None)]
    """
    return [shard(size, ranks, itemsize, rank) for rank in range(ranks)]


def shard(size: int, ranks: int, itemsize: int, rank: int) -> slice:
    """Return the part of `rank`: element `rank` of the list that :func:`shards` returns. Local."""
    # Whole cache lines, so that two ranks do not write to the same one.
    step = max(1, ALIGNMENT // itemsize)
    lines = -(-size // step)
    return slice(min(size, lines * rank // ranks * step), min(size, lines * (rank + 1) // ranks * step))


def largest_shard(size: int, ranks: int, itemsize: int) -> int:
    """Return the number of elements of the largest part that :func:`shards` returns. Local.

    >>> largest_shard(100, 3, 8), largest_shard(9, 8, 8)
    (36, 8)
    """
    last = shard(size, ranks, itemsize, ranks - 1)
    if ranks == 1:
        return last.stop
    step = max(1, ALIGNMENT // itemsize)
    lines = -(-size // step)
    # The last part has one more line than others if they cannot be equal; it is the only one if one line is left over.
    whole = lines // ranks if lines % ranks == 1 else -(-lines // ranks)
    return max(last.stop - last.start, whole * step)


@dataclass(frozen=True)
class Method:
    """Method to sum a buffer over ranks.

    Attributes
    ----------
    name
        Name in `METHODS`.
    adds, gathers
        Whether the sum has the step of this name: a reduce-scatter only adds, an all-gather only gathers.
    ordered
        Whether summands are added from the first rank to the last, so that the bits depend on nothing else. Otherwise
        a link may use its own collective (`MPI_Iallreduce`, `ncclAllReduce`), which has an order of its own.
    codec
        Format of the data in messages (see `carrying`).
    by_nodes
        Whether the sum is hierarchical: the ranks of each node sum in shared memory, then the first ranks of the nodes
        sum among themselves.
    in_background
        Whether the progress thread also copies the buffer to shared memory and back.
    """

    name: str = "allreduce"
    adds: bool = True
    gathers: bool = True
    ordered: bool = False
    codec: Codec = UNCHANGED
    by_nodes: bool = False
    in_background: bool = False

    @property
    def on_devices(self) -> bool:
        """Whether device transports make the sum; the host makes the others, by way of pinned memory."""
        return self.codec.identity and not self.by_nodes

    @property
    def encodes(self) -> bool:
        """Whether messages of the sum can be encoded: only those of an all-reduce that is not hierarchical."""
        return self.adds and self.gathers and not self.by_nodes

    def sent(self, size: int, itemsize: int, ranks: int, rank: int) -> int:
        """Return the bytes that the counters count for a rank, for a sum that is not hierarchical [B]."""
        if ranks < 2:
            return 0
        if self.adds:
            return self.codec.payload(size * itemsize)
        own = shard(size, ranks, itemsize, rank)
        return (own.stop - own.start) * itemsize

    def held(self, size: int, itemsize: int, ranks: int, rank: int, feedback: bool = False) -> Held:
        """Return the memory of a sum by messages on a rank in addition to its buffer. The sum is not hierarchical.

        Parameters
        ----------
        feedback
            Whether the encoding error is kept.
        """
        codec, encoded = self.codec, itemsize if self.codec.identity else np.dtype(self.codec.wire).itemsize
        largest = largest_shard(size, ranks, encoded)
        if not self.ordered:
            # MPI may hold a copy of the buffer. Only a reduce-scatter writes its result to another array first.
            return Held(0, largest * itemsize if self.adds and not self.gathers else 0, size * itemsize)
        # Encoded data are in the buffer, if they fit; the error is that of the sum of this rank's share.
        own = shard(size, ranks, encoded, rank)
        always = 0 if codec.identity else codec.held(itemsize) + (own.stop - own.start) * itemsize * feedback
        if encoded > itemsize:
            always += size * encoded
        # Received summands of one shard; `largest`, because slots have the same size on all ranks.
        return Held(always, (ranks - 1) * largest * encoded)


@dataclass(frozen=True)
class Held:
    """Memory of a sum on a rank in addition to its buffer [B].

    Attributes
    ----------
    always
        Memory from the set-up of the sum on.
    here, inside
        Memory while the sum is under way, of this library and inside MPI: the same on all ranks.
    """

    always: int = 0
    here: int = 0
    inside: int = 0


def is_large(nbytes: int) -> bool:
    """Return whether a sum by messages of a buffer of `nbytes` [B] shares its memory with other sums."""
    return nbytes > LARGEST_AT_ONCE


def held_together(sums: Sequence[tuple[int, Held]]) -> int:
    """Return the memory of sums by messages that one communicator plans together [B]. Local.

    `sums` holds the buffer size [B] and the memory of each sum. Small sums have memory of their own.
    """
    small = sum(held.here + held.inside for nbytes, held in sums if not is_large(nbytes))
    large = [held for nbytes, held in sums if is_large(nbytes)]
    rings = (ring_slots([held.here for held in large]), ring_slots([held.inside for held in large]))
    return sum(held.always for _, held in sums) + small + sum(nbytes for _, nbytes in rings)


def ring_slots(sizes: Sequence[int]) -> tuple[list[tuple[int, int]], int]:
    """Return slots ``(start, stop)`` of these sizes in a ring, and its size [B]. Local.

    Slots follow each other in whole cache lines; after the end of the ring they begin again at its start.

    >>> ring_slots([6 << 20] * 3)[0] == [(0, 6 << 20), (6 << 20, 12 << 20), (0, 6 << 20)]
    True
    """
    whole = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    # At least the largest slot, at most all slots one after the other.
    nbytes = min(sum(whole), max([RING_BYTES, *whole]))
    slots, end = list[tuple[int, int]](), 0
    for size, requested in zip(whole, sizes):
        start = end if end + size <= nbytes else 0
        slots.append((start, start + requested))
        end = start + size
    return slots, nbytes


#: Methods by name, for `Communicator.reduction`.
METHODS = {
    method.name: method
    for method in (
        Method(),
        Method("ordered", ordered=True),
        Method("reduce_scatter", gathers=False),
        Method("all_gather", adds=False),
        Method("hierarchical", by_nodes=True),
        Method("accumulate", by_nodes=True, in_background=True),
    )
}


@lru_cache
def carrying(method: str, codec: Codec) -> Method:
    """Return the method of this name with a codec; encoded contributions are added in the order of the ranks. Local."""
    plain = METHODS[method]
    return plain if codec.identity else replace(plain, ordered=True, codec=codec)


@dataclass(frozen=True)
class NodeShare:
    """Role of a rank in a hierarchical sum.

    Attributes
    ----------
    shares
        Whether other ranks of its node take part.
    leads
        Whether the rank is the first of its node.
    far
        Whether there are several nodes.
    """

    shares: bool
    leads: bool
    far: bool

    def within(self, nbytes: int) -> int:
        """Return the bytes through the memory of the node [B]."""
        return nbytes if self.shares else 0

    def across(self, nbytes: int) -> int:
        """Return the bytes to other nodes [B]."""
        return nbytes if self.leads and self.far else 0

    def held(self, nbytes: int) -> Held:
        """Return the memory in addition to the buffer: the summand, the total of the node, and the buffer inside MPI.
        """
        return Held(nbytes * (self.shares + self.leads) + self.across(nbytes))


def node_shares(node_of: Sequence[int]) -> list[NodeShare]:
    """Return each rank's role in a hierarchical sum; `node_of` is the node of every rank."""
    first: dict[int, int] = {}
    count: dict[int, int] = {}
    for rank, node in enumerate(node_of):
        first.setdefault(node, rank)
        count[node] = count.get(node, 0) + 1
    return [NodeShare(count[node] > 1, first[node] == rank, len(count) > 1) for rank, node in enumerate(node_of)]
