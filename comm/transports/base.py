"""What a transport is given, and what links between ranks have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from .. import contexts
from ..progress import Progress

__all__ = ["ALIGNMENT", "Pattern", "TransportContext", "aligned", "aligned_bytes", "numbered", "split_node"]

ALIGNMENT = 64  # [B], a cache line: neighbors do not share one, and copies use full vectors


@dataclass(eq=False)
class TransportContext:
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
    tags_taken
        How many tags.
    """

    mpi: MPI.Intracomm
    progress: Progress
    agree: Callable[[Exception | None], None]
    ranks: tuple[int, ...]
    tags_taken: int = 0

    def tag(self) -> int:
        """Return a tag of no other message under way. Local; ranks that ask equally often get equal tags."""
        # Wraps only where the first channels are long gone. (MPI keeps its limits as attributes of COMM_WORLD.)
        self.tags_taken += 1
        return self.tags_taken % (MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767)


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
        """Return the part of the pattern that concerns these peers."""
        sends = {peer: count for peer, count in self.sends.items() if peer in peers}
        recvs = {peer: count for peer, count in self.recvs.items() if peer in peers}
        return Pattern(sends, recvs, self.dtype, self.tag)

    @property
    def peers(self) -> tuple[int, ...]:
        """Ranks that are sent to or received from, in order."""
        return tuple(sorted(self.sends.keys() | self.recvs.keys()))


def split_node(mpi_comm: MPI.Intracomm) -> MPI.Intracomm:
    """Return the ranks that share memory with this one, in the same order. Collective; `contexts.free` frees it."""
    node = mpi_comm.Split_type(MPI.COMM_TYPE_SHARED, mpi_comm.rank)
    assert isinstance(node, MPI.Intracomm)
    return contexts.hold(node)


def numbered(keys: Sequence[int]) -> tuple[int, ...]:
    """Return the keys replaced by 0, 1, ... in the order in which they appear. Local."""
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(key, len(numbers)) for key in keys)


def aligned(memory: np.ndarray) -> np.ndarray:
    """Return bytes (1-D, uint8) from their first cache line on, as a view. Local."""
    return memory[-memory.ctypes.data % ALIGNMENT :]


def aligned_bytes(nbytes: int) -> np.ndarray:
    """Return zeros: ``(nbytes,)`` uint8, aligned to a cache line. Local."""
    zeros = aligned(np.empty(nbytes + ALIGNMENT, np.uint8))[:nbytes]
    zeros.fill(0)  # commit the pages now, not in the first exchange
    return zeros
