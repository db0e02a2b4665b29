"""Context that a transport receives, and helpers that all transports use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from .. import contexts
from ..progress import Progress

__all__ = ["ALIGNMENT", "Pattern", "TransportContext", "aligned", "aligned_bytes", "numbered", "split_node"]

ALIGNMENT = 64  # [B], a cache line: neighbors do not share one, and copies use full vectors


# Compared and hashed by identity: device transports are found by their context.
@dataclass(eq=False)
class TransportContext:
    """Communicator resources that a transport uses.

    Attributes
    ----------
    mpi
        A clone of the communicator. Only transports send point-to-point messages on it.
    progress
        The progress thread.
    agree
        `Communicator.agree`: raises on all ranks an exception that one rank passes. Collective.
    ranks
        Rank in the root communicator of each rank.
    tags_taken
        Number of tags that `tag` has returned.
    """

    mpi: MPI.Intracomm
    progress: Progress
    agree: Callable[[Exception | None], None]
    ranks: tuple[int, ...]
    tags_taken: int = 0

    def tag(self) -> int:
        """Return a tag that no other message in flight has. Local; ranks that call it equally often get equal tags."""
        # When the tags wrap, the first channels are long closed. (MPI keeps its limits as attributes of COMM_WORLD.)
        self.tags_taken += 1
        # 32767 is the least bound that the standard permits.
        return self.tags_taken % (MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767)


@dataclass(frozen=True)
class Pattern:
    """Messages of one channel: the number of elements for each peer, never zero.

    Attributes
    ----------
    sends, recvs
        Number of elements that this rank sends to each peer, and receives from each peer.
    dtype
        NumPy dtype of the elements.
    tag
        Tag of the messages: the same on all ranks, and different from that of every other channel.
    """

    sends: Mapping[int, int]
    recvs: Mapping[int, int]
    dtype: np.dtype
    tag: int

    def among(self, peers: set[int]) -> Pattern:
        """Return the part of the pattern that concerns the ranks in `peers`."""
        sends = {peer: count for peer, count in self.sends.items() if peer in peers}
        recvs = {peer: count for peer, count in self.recvs.items() if peer in peers}
        return Pattern(sends, recvs, self.dtype, self.tag)

    @property
    def peers(self) -> tuple[int, ...]:
        """Ranks that this rank sends to or receives from, in ascending order."""
        return tuple(sorted(self.sends.keys() | self.recvs.keys()))


def split_node(mpi_comm: MPI.Intracomm) -> MPI.Intracomm:
    """Return a communicator of the ranks that share memory with this one, in the same order.

    Collective over `mpi_comm`. The caller frees it with `contexts.free`.
    """
    node = mpi_comm.Split_type(MPI.COMM_TYPE_SHARED, mpi_comm.rank)
    assert isinstance(node, MPI.Intracomm)
    return contexts.hold(node)


def numbered(keys: Sequence[int]) -> tuple[int, ...]:
    """Replace the keys by 0, 1, ... in the order in which they first appear. Local."""
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(key, len(numbers)) for key in keys)


def aligned(memory: np.ndarray) -> np.ndarray:
    """Return a view of the bytes ``(n,)`` (uint8) from the first cache line boundary on. Local."""
    # Minus the address, modulo a cache line: the bytes up to the next boundary.
    return memory[-memory.ctypes.data % ALIGNMENT :]


def aligned_bytes(nbytes: int) -> np.ndarray:
    """Allocate zeros: ``(nbytes,)`` uint8, aligned to a cache line. Local."""
    zeros = aligned(np.empty(nbytes + ALIGNMENT, np.uint8))[:nbytes]
    zeros.fill(0)  # commit the pages now, not in the first exchange
    return zeros
