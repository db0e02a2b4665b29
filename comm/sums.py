"""What a sum over ranks is, as data: which halves it has, in which order it adds, as what it travels. Pure arithmetic.

A sum is made in three steps: every rank *scatters* its summand, the part of each rank to that rank; *adds* up its part
of all summands; and *gathers* the sums of all parts. What `Communicator.reduction` calls a method chooses among these.
The communicator runs a sum, and the performance model predicts what it sends and holds, by the same description.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["LARGEST_AT_ONCE", "METHODS", "Method", "NodeShare", "node_shares", "shards"]

ALIGNMENT = 64  # [B]: a shard begins on a cache line if the array does
#: Up to here [B] a sum in shared memory is deposited when it starts; larger ones go through a common stage, piece by
#: piece.
LARGEST_AT_ONCE = 64 * 1024


def shards(size: int, ranks: int, itemsize: int) -> list[slice]:
    """Per rank its part of `size` elements of `itemsize` [B]: about equal, whole cache lines but for the last. Local.

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
    """One way to sum a buffer over ranks.

    Attributes
    ----------
    adds, gathers
        Which halves there are: a reduce-scatter adds only, an all-gather gathers only.
    ordered
        Summands are added from the first rank to the last, so that the bits depend on nothing else. Otherwise a link
        that has a collective of its own (`MPI_Iallreduce`, `ncclAllReduce`) may add in the order of that.
    codec
        ``"plain"``: elements travel as they are. ``"bfloat16"``: float32 travels rounded, with half the bytes.
    by_nodes
        The ranks of each node sum in shared memory first; then the first ranks of the nodes sum among themselves.
    in_background
        The progress thread copies the buffer to shared memory and back, too.
    """

    adds: bool = True
    gathers: bool = True
    ordered: bool = False
    codec: str = "plain"
    by_nodes: bool = False
    in_background: bool = False

    @property
    def on_devices(self) -> bool:
        """Whether transports of devices make it; the host makes the others, by way of pinned memory."""
        return self.codec == "plain" and not self.by_nodes

    def payload(self, nbytes: int) -> int:
        """Return bytes that a contribution of `nbytes` takes on its way [B]."""
        return nbytes // 2 if self.codec == "bfloat16" else nbytes

    def sent(self, size: int, itemsize: int, ranks: int, rank: int) -> int:
        """Return the bytes of the one message that a rank is booked with, of a sum that is not by nodes [B]."""
        if ranks < 2:
            return 0
        if self.adds:
            return self.payload(size * itemsize)
        own = shards(size, ranks, itemsize)[rank]
        return (own.stop - own.start) * itemsize

    def held(self, nbytes: int, ranks: int, share: int, feedback: bool = False) -> int:
        """Return the memory that a sum by messages, not by nodes, takes on a rank beside its buffer, in MPI or here
        [B].

        Parameters
        ----------
        share
            Bytes of the rank's shard.
        feedback
            Whether what rounding takes away is kept.
        """
        if self.codec == "bfloat16":
            # What travels, what was received, the sum of the own share and what rounding took of it.
            return nbytes // 2 + (ranks - 1) * share // 2 + share * (1 + feedback)
        if self.ordered:
            return (ranks - 1) * share
        return nbytes + share * (self.adds and not self.gathers)


#: By name, for `Communicator.reduction`.
METHODS = {
    "allreduce": Method(),
    "ordered": Method(ordered=True),
    "rounded": Method(ordered=True, codec="bfloat16"),
    "reduce_scatter": Method(gathers=False),
    "all_gather": Method(adds=False),
    "hierarchical": Method(by_nodes=True),
    "accumulate": Method(by_nodes=True, in_background=True),
}


@dataclass(frozen=True)
class NodeShare:
    """What a rank has to do with a sum by nodes.

    Attributes
    ----------
    shares
        Whether others of its node are in it.
    leads
        Whether it is the first of its node.
    far
        Whether there are several nodes.
    """

    shares: bool
    leads: bool
    far: bool

    def within(self, nbytes: int) -> int:
        """Return bytes through the memory of the node [B]."""
        return nbytes if self.shares else 0

    def across(self, nbytes: int) -> int:
        """Return bytes to other nodes [B]."""
        return nbytes if self.leads and self.far else 0

    def held(self, nbytes: int) -> int:
        """Return the memory beside the buffer [B]: the summand, the total of the node, and what MPI takes for that."""
        return nbytes * (self.shares + self.leads + (self.leads and self.far))


def node_shares(node_of: Sequence[int]) -> list[NodeShare]:
    """Per rank its share of a sum by nodes, of the node of every rank."""
    first: dict[int, int] = {}
    count: dict[int, int] = {}
    for rank, node in enumerate(node_of):
        first.setdefault(node, rank)
        count[node] = count.get(node, 0) + 1
    return [NodeShare(count[node] > 1, first[node] == rank, len(count) > 1) for rank, node in enumerate(node_of)]
