"""Descriptions of sums over ranks: their halves, the order of additions, and the data format. Pure arithmetic.

A sum has three steps. Every rank *scatters* its summand: it sends each rank that rank's part. It *adds* up its own part
of all summands. It *gathers* the sums of all parts. A method of `Communicator.reduction` chooses among these steps; the
codec (`halograd.comm.codec`) is a separate choice. The communicator runs a sum by this description, and the performance
model predicts its traffic and memory from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from .codec import UNCHANGED, Codec

__all__ = ["LARGEST_AT_ONCE", "METHODS", "Method", "NodeShare", "carrying", "node_shares", "shards"]

ALIGNMENT = 64  # [B]: a shard begins on a cache line if the array does
#: Largest sum in shared memory that is deposited when it starts [B]; larger sums go through a common stage, piece by
#: piece.
LARGEST_AT_ONCE = 64 * 1024


def shards(size: int, ranks: int, itemsize: int) -> list[slice]:
    """Return each rank's part of `size` elements of `itemsize` [B]: about equal, in whole cache lines except the last.
    Local.

    >>> shards(100, 3, 8)
    [slice(0, 32, None), slice(32, 64, None), slice(64, 100, None)]
    >>> shards(5, 2, 8)
    [slice(0, 0, None), slice(0, 5, None)]
    """
    step = max(1, ALIGNMENT // itemsize)
    lines = -(-size // step)
    bounds = [min(size, lines * i // ranks * step) for i in range(ranks + 1)]
    return [slice(a, b) for a, b in pairwise(bounds)]


@dataclass(frozen=True)
class Method:
    """Method to sum a buffer over ranks.

    Attributes
    ----------
    name
        Name in `METHODS`.
    adds, gathers
        Which halves the sum has: a reduce-scatter only adds, an all-gather only gathers.
    ordered
        Whether summands are added from the first rank to the last, so that the bits depend on nothing else. Otherwise
        a link may use its own collective (`MPI_Iallreduce`, `ncclAllReduce`) and the order of that.
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
        """Whether the sum can have a codec; the collectives of libraries take elements as they are."""
        return self.adds and self.gathers and not self.by_nodes

    def sent(self, size: int, itemsize: int, ranks: int, rank: int) -> int:
        """Return the bytes that the counters count for a rank, for a sum that is not hierarchical [B]."""
        if ranks < 2:
            return 0
        if self.adds:
            return self.codec.payload(size * itemsize)
        own = shards(size, ranks, itemsize)[rank]
        return (own.stop - own.start) * itemsize

    def held(self, nbytes: int, ranks: int, share: int, feedback: bool = False) -> int:
        """Return the memory of a sum by messages on a rank in addition to its buffer, in MPI or here [B].

        The sum is not hierarchical.

        Parameters
        ----------
        share
            Bytes of the rank's shard.
        feedback
            Whether the encoding error is kept.
        """
        if not self.codec.identity:
            # The encoded buffer, the received parts, the sum of the own share, and its encoding error.
            return self.codec.payload(nbytes) + self.codec.payload((ranks - 1) * share) + share * (1 + feedback)
        if self.ordered:
            return (ranks - 1) * share
        return nbytes + share * (self.adds and not self.gathers)


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
    """Part of a rank in a hierarchical sum.

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

    def held(self, nbytes: int) -> int:
        """Return the memory in addition to the buffer [B]: the summand, the total of the node, and the buffer inside
        MPI.
        """
        return nbytes * (self.shares + self.leads + (self.leads and self.far))


def node_shares(node_of: Sequence[int]) -> list[NodeShare]:
    """Return each rank's part in a hierarchical sum; `node_of` is the node of every rank."""
    first: dict[int, int] = {}
    count: dict[int, int] = {}
    for rank, node in enumerate(node_of):
        first.setdefault(node, rank)
        count[node] = count.get(node, 0) + 1
    return [NodeShare(count[node] > 1, first[node] == rank, len(count) > 1) for rank, node in enumerate(node_of)]
