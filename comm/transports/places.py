"""Memory of the same use in the segments of all ranks of a node."""

from __future__ import annotations

import numpy as np

from halograd.comm.transports.arena import Arena
from halograd.comm.transports.base import ALIGNMENT
from halograd.comm.transports.flags import FLAG_BYTES, Flags

__all__ = ["Places"]


class Places:
    """`nbytes` [B] in the segment of every rank of the node, behind a flag each. Collective over all nodes to make.

    Ranks may ask for different numbers of bytes.

    Attributes
    ----------
    mine, ranks
        This rank on the node, and how many there are.
    flags
        The flags of these places.
    """

    def __init__(self, arena: Arena, nbytes: int) -> None:
        self._chunk, first = arena.reserve(FLAG_BYTES + nbytes)
        self.mine = arena.node.rank
        self._offsets = dict(enumerate(arena.node.allgather(first)))
        self.flags = Flags(self._chunk, first, self._offsets, self.mine)
        self.ranks = len(self._offsets)

    def views(self, first: int, nbytes: int) -> list[np.ndarray]:
        """Per rank its bytes ``[first, first + nbytes)``, uint8, shared; `first` is a multiple of a cache line."""
        assert first % ALIGNMENT == 0, first
        starts = {rank: offset + FLAG_BYTES + first for rank, offset in self._offsets.items()}
        return [self._chunk.segment(rank)[start : start + nbytes] for rank, start in starts.items()]

    def view(self, rank: int, first: int, nbytes: int) -> np.ndarray:
        """The bytes ``[first, first + nbytes)`` of one rank, which may have more of them than others."""
        start = self._offsets[rank] + FLAG_BYTES + first
        return self._chunk.segment(rank)[start : start + nbytes]

    def sync(self) -> None:
        """Memory fence. Local."""
        self._chunk.sync()

    def give_back(self) -> None:
        """Free the memory. Local, but all ranks do it."""
        self._chunk.give_back()
