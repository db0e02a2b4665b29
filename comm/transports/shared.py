"""The `shared` transport: ranks of a node read each other's send buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from halograd.comm.channel import Channel
from halograd.comm.counters import Meter
from halograd.comm.errors import CommError
from halograd.comm.ordered import Tags
from halograd.comm.reduction import Reduction
from halograd.comm.transports import base
from halograd.comm.transports.accumulator import TALLIES, Accumulator, Team
from halograd.comm.transports.arena import Arena, Chunk, rounded
from halograd.comm.transports.base import ALIGNMENT, Context, Pattern, Transport
from halograd.comm.transports.flags import FLAG_BYTES, Flags
from halograd.comm.transports.node_sum import Across, MpiAcross, NodeSum, Room
from halograd.comm.transports.places import Places
from halograd.comm.transports.shared_rounded import StagedRoundedSum
from halograd.comm.transports.shared_shards import SharedGather, SharedScatter, StagedScatter
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
        self._accumulator: Accumulator | None = None
        self._leaders: MPI.Comm = MPI.COMM_NULL

    def neighbors(self) -> set[int]:
        """Ranks on the node of this one. Collective at the first call."""
        self._open()
        return {rank for rank, here in enumerate(self._node_ranks) if here != MPI.UNDEFINED}

    def channel(self, pattern: Pattern, meter: Meter) -> Channel:
        self._refuse_far(pattern)
        return SharedChannel(pattern, meter, self.slots(pattern))

    def _refuse_far(self, pattern: Pattern) -> None:
        far = sorted(set(pattern.peers) - self.neighbors())
        fault = None
        if far:
            fault = CommError(
                f"shared transport: expected peers on the same node, got rank {far[0]} on another; use transport='auto'"
            )
        self._context.agree(fault)

    def slots(self, pattern: Pattern) -> Slots:
        """Shared memory for the messages of a pattern, all of whose peers are on this node. Collective."""
        arena = self._open()
        nbytes = {peer: rounded(count * pattern.dtype.itemsize) for peer, count in pattern.sends.items()}
        chunk, first = arena.reserve(FLAG_BYTES + 2 * ALIGNMENT + 2 * sum(nbytes.values()))
        mine = self._node_ranks[self._context.mpi.rank]
        # The flag and two stamps, then two slots per peer.
        start = first + FLAG_BYTES + 2 * ALIGNMENT
        offsets: dict[int, tuple[int, int]] = {}
        for peer, size in nbytes.items():
            offsets[self._node_ranks[peer]] = (start, start + size)
            start += 2 * size
        told = arena.node.allgather((first, offsets))
        sends = {
            peer: _both(chunk.segment(mine), offsets[self._node_ranks[peer]], count, pattern.dtype)
            for peer, count in pattern.sends.items()
        }
        recvs = {}
        for peer, count in pattern.recvs.items():
            owner = self._node_ranks[peer]
            recvs[peer] = _both(chunk.segment(owner), told[owner][1][mine], count, pattern.dtype)
            for view in recvs[peer]:
                view.flags.writeable = False
        places = {peer: (self._node_ranks[peer], told[self._node_ranks[peer]][0]) for peer in pattern.peers}
        flags = Flags(chunk, first, dict(places.values()), mine)
        stamps = {peer: _stamps(chunk, rank, offset) for peer, (rank, offset) in places.items()}
        return Slots(sends, recvs, flags, _stamps(chunk, mine, first), stamps, chunk.give_back)

    def reduction(self, buffer: np.ndarray, meter: Meter) -> Reduction:
        """Through shared memory if all ranks are on this node; over MPI otherwise."""
        if not self._near(buffer):
            return super().reduction(buffer, meter)
        return self._sum(buffer, meter, SharedSum, StagedSum)

    def ordered(self, buffer: np.ndarray, meter: Meter, tags: Tags) -> Reduction:
        """In shared memory summands are added up in order anyway."""
        return self.reduction(buffer, meter) if self._near(buffer) else super().ordered(buffer, meter, tags)

    def rounded(self, buffer: np.ndarray, meter: Meter, tags: Tags) -> Reduction:
        if not self._near(buffer):
            return super().rounded(buffer, meter, tags)
        return StagedRoundedSum(buffer, meter, self.stage())

    def scatter(self, buffer: np.ndarray, meter: Meter) -> Reduction:
        if not self._near(buffer):
            return super().scatter(buffer, meter)
        return self._sum(buffer, meter, SharedScatter, StagedScatter)

    def gather(self, buffer: np.ndarray, meter: Meter) -> Reduction:
        if not self._near(buffer):
            return super().gather(buffer, meter)
        return SharedGather(buffer, meter, self.places(SharedGather.bytes_for(buffer, self._context.mpi.size)))

    def _near(self, buffer: np.ndarray) -> bool:
        """Whether there is something to do, and all ranks are on this node. Collective at the first call."""
        size = self._context.mpi.size
        return size > 1 and buffer.size > 0 and len(self.neighbors()) == size

    def _sum(self, buffer: np.ndarray, meter: Meter, small: type[SharedSum], large: type[StagedSum]) -> Reduction:
        if buffer.nbytes > LARGEST_AT_ONCE:
            return large(buffer, meter, self.stage())
        return small(buffer, meter, self.places(small.bytes_for(buffer, self._context.mpi.size)))

    def sum_by_nodes(self, buffer: np.ndarray, across: Meter, within: Meter, in_background: bool) -> Reduction:
        if self._accumulator is None:
            self._accumulator = self._make_accumulator()
        team = self._accumulator.team
        room = Room(self.places, team, buffer, Across.totals_needed)
        alone = len(self.neighbors()) == self._context.mpi.size
        way = Across(team, room) if alone else MpiAcross(team, room, self._leaders)
        return NodeSum(buffer, across, within, self._accumulator, room, way, in_background)

    def _make_accumulator(self) -> Accumulator:
        places = self.places(TALLIES * ALIGNMENT)
        team = Team(places, range(self._open().node.size), (0,))
        self._leaders = self._context.mpi.Split(0 if team.leads else MPI.UNDEFINED, self._context.mpi.rank)
        return Accumulator(team, self._context.progress)

    def places(self, nbytes: int) -> Places:
        """So many bytes [B] in the segment of every rank of this node. Collective over the communicator."""
        return Places(self._open(), nbytes)

    def stage(self) -> Stage:
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

    def close(self) -> None:
        if self._leaders != MPI.COMM_NULL:
            self._leaders.Free()
        if self._arena is not None:
            self._arena.close()
            self._arena = self._stage = self._accumulator = None

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


@dataclass
class Slots:
    """Shared memory of one channel.

    Attributes
    ----------
    sends, recvs
        Per peer the two buffers that this rank packs into, and those that the peer does.
    flags
        Raised to n + 1 in ``start`` number n.
    stamp, stamps
        Per slot a float64 that this rank may leave for its peers, and theirs.
    give_back
        Frees the memory.
    """

    sends: _Views
    recvs: _Views
    flags: Flags
    stamp: tuple[np.ndarray, np.ndarray]
    stamps: dict[int, tuple[np.ndarray, np.ndarray]]
    give_back: Callable[[], None]


def _stamps(chunk: Chunk, rank: int, first: int) -> tuple[np.ndarray, np.ndarray]:
    """The two stamps of a rank of the node, behind its flag."""
    return _both(chunk.segment(rank), (first + FLAG_BYTES, first + FLAG_BYTES + ALIGNMENT), 1, np.dtype(np.float64))


def _both(segment: np.ndarray, offsets: tuple[int, int], count: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    nbytes = count * dtype.itemsize
    first, second = (segment[offset : offset + nbytes].view(dtype) for offset in offsets)
    return first, second


class SharedChannel(Channel):
    """Send buffers in shared memory, receive buffers that are those of the peers, one flag per rank.

    ``start`` number n raises this rank's flag to n + 1, behind what was packed (fence); ``finish`` number n waits until
    the flags of all peers, of those that are sent to and of those received from, have come to n + 1 (fence).
    Exchange n uses slot n mod 2.

    *What is read is what was packed.* Rank q reads slot n mod 2 of p between its finish n and its release n.
    Then p has raised its flag to n + 1, which it did after it had packed exchange n. So p has packed at least n; it
    must not have begun to pack n+2, the next in the same slot:

    *Nothing is overwritten while it is read.* Rank p packs exchange n+2 after its finish n+1, so the flag of every peer
    q, also of those that only receive, has come to n + 2. Rank q raised it in its start n+1, thus after its release n:
    it has read everything of exchange n.  With one slot p would have to wait once more for that. ::

        p:  pack 0a | start 0 --flag 1-->  ...                 finish 1 | pack 0b
                               \\                              ^
        q:                      finish 0 | read 0a | start 1 --flag 2
    """

    def __init__(self, pattern: Pattern, meter: Meter, slots: Slots) -> None:
        super().__init__(pattern.sends, pattern.recvs, pattern.dtype, meter)
        self._slots = slots
        self._count = 0

    @property
    def buffer_bytes(self) -> int:
        return 2 * sum(self.send_counts.values()) * self.dtype.itemsize  # two slots; received where it was sent from

    def _send_buffer(self, peer: int, slot: int) -> np.ndarray:
        return self._slots.sends[peer][slot]

    def _recv_buffer(self, peer: int, slot: int) -> np.ndarray:
        return self._slots.recvs[peer][slot]

    def _start(self) -> None:
        self._count += 1
        self._slots.flags.raise_to(self._count)

    def _finish(self) -> float:
        self._slots.flags.wait_for(self._count)
        return 0.0

    def _close(self) -> None:
        self._slots.sends.clear()
        self._slots.recvs.clear()
        self._slots.give_back()
