"""What a transport is, and what it is given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from halograd.comm.channel import Channel
from halograd.comm.counters import Meter
from halograd.comm.errors import CommError
from halograd.comm.ordered import MpiOrderedSum, MpiRoundedSum, Tags
from halograd.comm.progress import Progress
from halograd.comm.reduction import DirectReduction, Reduction
from halograd.comm.sharing import MpiGather, MpiScatter

__all__ = ["Context", "Pattern", "Transport", "aligned_bytes", "numbered", "split_node"]

ALIGNMENT = 64  # [B], a cache line: neighbors do not share one, and copies use full vectors


@dataclass(frozen=True)
class Context:
    """What a communicator gives its transport.

    Attributes
    ----------
    mpi
        The communicator's own clone; messages on it are the transport's alone.
    progress
        The progress thread.
    agree
        `Communicator.agree`: raise everywhere what failed somewhere. Collective.
    ranks
        Rank in the root communicator of each rank.
    """

    mpi: MPI.Intracomm
    progress: Progress
    agree: Callable[[Exception | None], None]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Pattern:
    """Who sends how much to whom: elements per peer, none of them zero.

    Attributes
    ----------
    tag
        Tag of the messages, the same on all ranks and of no other channel.
    """

    sends: Mapping[int, int]
    recvs: Mapping[int, int]
    dtype: np.dtype
    tag: int

    def among(self, peers: set[int]) -> Pattern:
        """The part of the pattern that concerns these peers."""
        sends = {peer: count for peer, count in self.sends.items() if peer in peers}
        recvs = {peer: count for peer, count in self.recvs.items() if peer in peers}
        return Pattern(sends, recvs, self.dtype, self.tag)

    @property
    def peers(self) -> tuple[int, ...]:
        """Ranks that are sent to or received from, in order."""
        return tuple(sorted(self.sends.keys() | self.recvs.keys()))


class Transport(ABC):
    """Makes channels and reductions on one communicator."""

    def __init__(self, context: Context) -> None:
        self._context = context

    @abstractmethod
    def channel(self, pattern: Pattern, meter: Meter) -> Channel:
        """A channel of this (valid and matching) pattern. Collective over the communicator."""

    def reduction(self, buffer: np.ndarray, meter: Meter) -> Reduction:
        """An in-place sum of `buffer` over the communicator. Collective over the communicator."""
        return DirectReduction(self._context.mpi, self._context.progress, buffer, meter)

    def ordered(self, buffer: np.ndarray, meter: Meter, tags: Tags) -> Reduction:
        """A sum in the order of the ranks. Collective over the communicator.

        Parameters
        ----------
        tags
            Of its messages, the same on all ranks and of no other sum or channel.
        """
        return MpiOrderedSum(self._context.mpi, self._context.progress, buffer, meter, tags)

    def rounded(self, buffer: np.ndarray, meter: Meter, tags: Tags) -> Reduction:
        """A sum of float32, in the order of the ranks, that travels as bfloat16. Collective over the communicator."""
        return MpiRoundedSum(self._context.mpi, self._context.progress, buffer, meter, tags)

    def scatter(self, buffer: np.ndarray, meter: Meter) -> Reduction:
        """A sum of which every rank keeps its shard. Collective over the communicator."""
        return MpiScatter(self._context.mpi, self._context.progress, buffer, meter)

    def gather(self, buffer: np.ndarray, meter: Meter) -> Reduction:
        """Every rank's shard on all ranks. Collective over the communicator."""
        return MpiGather(self._context.mpi, self._context.progress, buffer, meter)

    def sum_by_nodes(self, buffer: np.ndarray, across: Meter, within: Meter, in_background: bool) -> Reduction:
        """A sum within nodes in shared memory, then across by one rank per node; of several ranks, not empty.

        Collective over the communicator.

        Parameters
        ----------
        across, within
            Book what goes to other nodes, and what goes through shared memory.
        in_background
            Whether the progress thread copies the buffer to shared memory and back.

        Raises
        ------
        CommError
            Where this transport shares no memory.
        """
        raise CommError(
            f"reduction {across.name}: expected a transport by which ranks of a node share memory ('auto', 'shared' or "
            f"'emulated'), got 'mpi'; choose another transport, or a sum that needs none (allreduce, reduce_scatter)"
        )

    @property
    def buffer_bytes(self) -> int:
        """Memory of this rank that all its channels and reductions share [B]."""
        return 0

    def nodes(self) -> tuple[int, ...]:
        """Number of the node of every rank, counted from 0 as they appear. Collective."""
        mpi = self._context.mpi
        node = split_node(mpi)
        first = node.bcast(mpi.rank, root=0)
        node.Free()
        return numbered(mpi.allgather(first))

    def waits_for_network(self) -> bool:
        """Whether a message may be on its way for long: some rank is on another node. Collective at first use."""
        return max(self.nodes()) > 0

    def close(self) -> None:
        """Free what the transport holds, after its channels. Collective over the communicator."""
        return None


def split_node(mpi_comm: MPI.Intracomm) -> MPI.Intracomm:
    """The ranks that share memory with this one, in the same order. Collective; the caller frees it."""
    node = mpi_comm.Split_type(MPI.COMM_TYPE_SHARED, mpi_comm.rank)
    assert isinstance(node, MPI.Intracomm)
    return node


def numbered(keys: Sequence[int]) -> tuple[int, ...]:
    """The keys replaced by 0, 1, ... in the order in which they appear. Local."""
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(key, len(numbers)) for key in keys)


def aligned_bytes(nbytes: int) -> np.ndarray:
    """Zeros: ``(nbytes,)`` uint8, aligned to a cache line. Local."""
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    first = -raw.ctypes.data % ALIGNMENT
    aligned = raw[first : first + nbytes]
    aligned.fill(0)  # commit the pages now, not in the first exchange
    return aligned
