"""The `shared` transport: ranks of a node read each other's send buffers."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from halograd.comm.channel import Channel
from halograd.comm.counters import Meter
from halograd.comm.errors import CommError
from halograd.comm.reduction import Reduction
from halograd.comm.transports import base
from halograd.comm.transports.arena import Arena, Chunk, rounded
from halograd.comm.transports.base import ALIGNMENT, Context, Pattern, Transport
from halograd.comm.transports.places import Places
from halograd.comm.transports.shared_sum import LARGEST_AT_ONCE, SharedSum, Stage, StagedSum

__all__ = ["SharedTransport"]

PIECE_BYTES = 256 * 1024  # of a large sum that is on the stage at once, per rank [B]: fits the cache of a core


class SharedTransport(Transport):
    """Each rank packs into its own segment of a shared window; peers on its node read straight from there."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._arena: Arena | None = None
        self._node_ranks: list[int] = []
        self._stage: Stage | None = None

    def neighbors(self) -> set[int]:
        """Ranks on the node of this one. Collective at the first call."""
        self._open()
        return {rank for rank, here in enumerate(self._node_ranks) if here != MPI.UNDEFINED}

    def channel(self, pattern: Pattern, meter: Meter) -> Channel:
        far = sorted(set(pattern.peers) - self.neighbors())
        fault = None
        if far:
            fault = CommError(
                f"shared transport: expected peers on the same node, got rank {far[0]} on another; "
                f"use transport='auto'"
            )
        self._context.agree(fault)
        arena = self._open()
        nbytes = {peer: rounded(count * pattern.dtype.itemsize) for peer, count in pattern.sends.items()}
        chunk, first = arena.reserve(2 * sum(nbytes.values()))
        offsets: dict[int, tuple[int, int]] = {}
        for peer, size in nbytes.items():
            offsets[peer] = (first, first + size)
            first += 2 * size
        return SharedChannel(self._context, pattern, meter, chunk, self._views(pattern, chunk, offsets))

    def reduction(self, buffer: np.ndarray, meter: Meter) -> Reduction:
        """Through shared memory if all ranks are on this node; over MPI otherwise."""
        size = self._context.mpi.size
        if size == 1 or not buffer.size or len(self.neighbors()) < size:
            return super().reduction(buffer, meter)
        if buffer.nbytes > LARGEST_AT_ONCE:
            return StagedSum(buffer, meter, self._open_stage())
        nbytes = rounded(buffer.nbytes)
        places = Places(self._open(), 2 * nbytes)
        slots = [
            [view.view(buffer.dtype).reshape(buffer.shape) for view in places.views(first, buffer.nbytes)]
            for first in (0, nbytes)
        ]
        return SharedSum(buffer, meter, slots, places.mine, places.flags, places.give_back)

    def _open_stage(self) -> Stage:
        """The stage of all large sums, made at the first (collective)."""
        if self._stage is None:
            share = rounded(PIECE_BYTES // self._context.mpi.size + ALIGNMENT)
            places = Places(self._open(), PIECE_BYTES + share)
            summands, totals = places.views(0, PIECE_BYTES), places.views(PIECE_BYTES, share)
            self._stage = Stage(summands, totals, places.mine, places.flags)
        return self._stage

    @property
    def buffer_bytes(self) -> int:
        return self._stage.nbytes if self._stage is not None else 0

    def _views(
        self, pattern: Pattern, chunk: Chunk, offsets: dict[int, tuple[int, int]]
    ) -> tuple[_Views, _Views]:
        """Send and receive views per peer and slot. Collective over the node: ranks tell their offsets."""
        arena = self._open()
        mine = self._node_ranks[self._context.mpi.rank]
        told = arena.node.allgather({self._node_ranks[peer]: both for peer, both in offsets.items()})
        sends = {
            peer: _both(chunk.segment(mine), offsets[peer], count, pattern.dtype)
            for peer, count in pattern.sends.items()
        }
        recvs = {}
        for peer, count in pattern.recvs.items():
            owner = self._node_ranks[peer]
            recvs[peer] = _both(chunk.segment(owner), told[owner][mine], count, pattern.dtype)
            for view in recvs[peer]:
                view.flags.writeable = False
        return sends, recvs

    def close(self) -> None:
        if self._arena is not None:
            self._arena.close()
            self._arena = self._stage = None

    def _open(self) -> Arena:
        """The arena, made at the first call (collective): many communicators only reduce."""
        if self._arena is None:
            comm = self._context.mpi
            node = base.split_node(comm)
            everybody, here = comm.Get_group(), node.Get_group()
            self._node_ranks = list(everybody.Translate_ranks(range(comm.size), here))
            everybody.Free()
            here.Free()
            self._arena = Arena(node, self._context.agree)
        return self._arena


_Views = dict[int, tuple[np.ndarray, np.ndarray]]


def _both(
    segment: np.ndarray, offsets: tuple[int, int], count: int, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    nbytes = count * dtype.itemsize
    first, second = (segment[offset : offset + nbytes].view(dtype) for offset in offsets)
    return first, second


class SharedChannel(Channel):
    """Send buffers in shared memory, receive buffers that are those of the peers, one token each way.

    ``start`` number n makes what was packed visible (fence) and sends an empty message, token n, to every peer,
    be it one that is sent to or received from; ``finish`` number n waits for token n of every peer (fence).
    Tokens of a pair of ranks do not overtake each other. Exchange n uses slot n mod 2.

    *What is read is what was packed.* Rank q reads slot n mod 2 of p between its finish n and its release n.
    Then it has token n of p, which p sent after it had packed exchange n. So p has packed at least n; it
    must not have begun to pack n+2, the next in the same slot:

    *Nothing is overwritten while it is read.* Rank p packs exchange n+2 after its finish n+1, so it has token n+1
    of every peer q, also of those that only receive. Rank q sent it in its start n+1, thus after its release n:
    it has read everything of exchange n.  With one slot p would need a second token for that. ::

        p:  pack 0a | start 0 --token 0--> ...                 finish 1 | pack 0b
                               \\                              ^
        q:                      finish 0 | read 0a | start 1 --token 1
    """

    def __init__(
        self, context: Context, pattern: Pattern, meter: Meter, chunk: Chunk, views: tuple[_Views, _Views]
    ) -> None:
        super().__init__(pattern.sends, pattern.recvs, pattern.dtype, meter)
        self._chunk = chunk
        self._sends, self._recvs = views
        nothing = [None, 0, MPI.BYTE]
        self._tokens = [
            *(context.mpi.Recv_init(nothing, peer, pattern.tag) for peer in pattern.peers),
            *(context.mpi.Send_init(nothing, peer, pattern.tag) for peer in pattern.peers),
        ]

    @property
    def buffer_bytes(self) -> int:
        return 2 * sum(self.send_counts.values()) * self.dtype.itemsize  # two slots; received where it was sent from

    def _send_buffer(self, peer: int, slot: int) -> np.ndarray:
        return self._sends[peer][slot]

    def _recv_buffer(self, peer: int, slot: int) -> np.ndarray:
        return self._recvs[peer][slot]

    def _start(self) -> None:
        self._chunk.sync()
        MPI.Prequest.Startall(self._tokens)

    def _finish(self) -> float:
        MPI.Request.Waitall(self._tokens)
        self._chunk.sync()
        return 0.0

    def _close(self) -> None:
        for token in self._tokens:
            token.Free()
        self._tokens.clear()
        self._sends.clear()
        self._recvs.clear()
        self._chunk.give_back()
