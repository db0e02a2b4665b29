"""Shared-memory transport: peers on a node read each other's send buffers, and sums need no MPI messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from .. import contexts
from ..channel import Channel
from ..counters import Meter
from ..encoding import Encoding
from ..progress import Stage, StagedOperation
from ..reduction import Plain, ReductionPlan, SumBuffers
from ..sums import LARGEST_AT_ONCE, Method, shards
from ..transport import Emulated
from . import base
from .base import ALIGNMENT, Pattern, TransportContext
from .emulated import TimestampedSignal, Timestamps
from .memory import FLAG_BYTES, Arena, Chunk, Flags, Planning, SharedBlock, Signal, rounded

__all__ = ["NodeMemory", "SharedWindows", "WindowChannel", "blocks"]

STAGE_BYTES = 256 * 1024  # part of a large sum that is on the stage at once, per rank [B]: fits the cache of a core


class NodeMemory:
    """Channels and sums of the ranks of a communicator that share memory. Its use is collective over the communicator.

    Parameters
    ----------
    network
        Emulated network between the nodes; None without one.
    node_of
        Number of the emulated node of every rank; empty without a network.
    oversubscribed
        Whether there are more ranks than cores. A waiting rank must then yield its core.
    """

    def __init__(
        self,
        context: TransportContext,
        network: Emulated | None,
        node_of: Sequence[int],
        oversubscribed: bool,
    ) -> None:
        self.context, self.network, self.node_of = context, network, tuple(node_of)
        self._oversubscribed = oversubscribed
        self._arena: Arena | None = None
        self._node_ranks: list[int] = []
        self._stage: _CommonStage | None = None

    def neighbors(self) -> set[int]:
        """Return the ranks on the node of this rank. Collective at the first call."""
        self._open()
        return {rank for rank, here in enumerate(self._node_ranks) if here != MPI.UNDEFINED}

    @property
    def node(self) -> MPI.Intracomm:
        """Communicator of the ranks that share memory. Collective at the first call."""
        return self._open().node

    def blocks(self, sizes: Sequence[int]) -> list[SharedBlock]:
        """Reserve one block per entry of `sizes` [B] in the segment of every rank of this node. Collective."""
        return self._open().blocks(sizes)

    @property
    def buffer_bytes(self) -> int:
        """Memory of this rank that all its large sums share [B]."""
        return 0 if self._stage is None else self._stage.nbytes

    def close(self) -> None:
        """Free the memory. Idempotent. Collective over the node."""
        if self._arena is not None:
            self._arena.close()
            self._arena = self._stage = None

    def _open(self) -> Arena:
        """Return the arena. The first call creates it (collective): a communicator without host arrays needs none."""
        if self._arena is None:
            comm = self.context.mpi
            self.context.agree(contexts.shortage())
            node = base.split_node(comm)
            everybody, here = comm.Get_group(), node.Get_group()
            # Rank on this node of every rank of the communicator; MPI.UNDEFINED on other nodes.
            self._node_ranks = list(everybody.Translate_ranks(range(comm.size), here))
            everybody.Free()
            here.Free()
            self._arena = Arena(node, self.context.agree)
        return self._arena

    def signal(
        self,
        flags: Flags,
        timestamps: dict[int, Timestamps],
        seconds: dict[int, float],
    ) -> Signal:
        """Return a signal that all ranks with a counter in `flags` raise, and that this rank awaits.

        With an emulated network it arrives after the travel time of the data.

        Parameters
        ----------
        timestamps
            Timestamps of this rank and of the ranks that send to it, by rank on the node.
        seconds
            Travel time of the data from each rank [s].
        """
        if self.network is None:
            return Signal(flags)
        awaited = [(timestamps[rank], travel) for rank, travel in seconds.items()]
        return TimestampedSignal(flags, None, timestamps[self.node.rank], awaited, self._oversubscribed)

    # -- channels ------------------------------------------------------------------------------

    def channels(self, patterns: Sequence[Pattern], meters: Sequence[Meter]) -> list[WindowChannel]:
        """Return one channel per pattern. All peers of the patterns share memory."""
        arena, local = self._open(), self._node_ranks
        slots = [_slots({local[peer]: count * p.dtype.itemsize for peer, count in p.sends.items()}) for p in patterns]
        sizes = [nbytes for _, nbytes in slots]
        chunk, offsets = arena.reserve(sizes)
        # No statement before this collective may fail on a single rank: the others of the node would wait in it.
        slots_of = arena.node.allgather([starts for starts, _ in slots])
        return [
            self._channel(pattern, meter, chunk, offsets[:, i], [starts[i] for starts in slots_of])
            for i, (pattern, meter) in enumerate(zip(patterns, meters))
        ]

    def _channel(
        self, pattern: Pattern, meter: Meter, chunk: Chunk, offsets: np.ndarray, slots_of: Sequence[Mapping[int, int]]
    ) -> WindowChannel:
        """Build a channel with buffers at `offsets` in the segments of the ranks. Local.

        `slots_of` holds, per rank on the node, the offset in its block of the data for each reader.
        """
        mine, local = self._node_ranks[self.context.mpi.rank], self._node_ranks

        def both(owner: int, reader: int, count: int) -> tuple[np.ndarray, np.ndarray]:
            start, size = int(offsets[owner]) + slots_of[owner][reader], rounded(count * pattern.dtype.itemsize)
            return _both(chunk.segment(owner), (start, start + size), count, pattern.dtype)

        sends = {peer: both(mine, local[peer], count) for peer, count in pattern.sends.items()}
        recvs = {peer: both(local[peer], mine, count) for peer, count in pattern.recvs.items()}
        where = {rank: int(offsets[rank]) for rank in (mine, *(local[peer] for peer in pattern.peers))}
        timestamps = {
            rank: _both(chunk.segment(rank), (at + FLAG_BYTES, at + FLAG_BYTES + ALIGNMENT), 1, np.dtype(np.float64))
            for rank, at in where.items()
        }
        seconds = {local[peer]: self._seconds(peer, count * pattern.dtype.itemsize) for peer, count in
                   pattern.recvs.items()}  # fmt: skip
        # A receive buffer is the send buffer of the peer.
        for view in (view for pair in recvs.values() for view in pair):
            view.flags.writeable = False
        arrival = self.signal(Flags(chunk, where, mine), timestamps, seconds)
        return WindowChannel(pattern, meter, SharedWindows(sends, recvs, arrival, [chunk.free_block]))

    def _seconds(self, peer: int, nbytes: int) -> float:
        """Return the travel time of a message from a peer [s]."""
        if self.network is None or self.node_of[peer] == self.node_of[self.context.mpi.rank]:
            return 0.0
        return self.network.message(nbytes)

    # -- sums ----------------------------------------------------------------------------------

    def plan(self, flat: np.ndarray, method: Method) -> Planning:
        """Return the plan of the sum of a flat, non-empty buffer over several ranks that all share memory.

        The sum is not hierarchical.
        """
        # Small sums, and an all-gather, whose deposits are together no longer than one buffer.
        if method.codec.identity and (flat.nbytes <= LARGEST_AT_ONCE or not method.adds):
            return self._at_once(flat, method)
        return self._staged(flat, method)

    def _travel(self, block: SharedBlock, method: Method, nbytes: int) -> Signal:
        """Return the signal of a collective. Its timestamps are in the first two cache lines of the blocks."""
        # On one emulated node nothing crosses the network.
        far = self.network is not None and max(self.node_of) > 0
        seconds = self.network.collective(method, block.ranks, nbytes) if self.network is not None and far else 0.0
        timestamps = {rank: _timestamps(block, rank) for rank in range(block.ranks)}
        return self.signal(block.flags, timestamps, dict.fromkeys(timestamps, seconds))

    def _at_once(self, flat: np.ndarray, method: Method) -> Planning:
        """Plan a sum of deposited summands: every rank deposits its own, then adds up all of them.

        A rank adds up all elements, or the elements of its shard. For an all-gather, every rank deposits its shard,
        whatever its size: the shards of all ranks together are no longer than one buffer.

        Sum n uses slot n mod 2 and raises the flag to n + 1. *Data are read after they were deposited*: `finish` waits
        until the flags of all ranks have reached n + 1. *Data are not overwritten while they are read*: a rank deposits
        sum n + 2 after its finish n + 1, so all others have started n + 1. They did that after their finish n, so they
        have read everything of sum n.
        """
        ranks, me = self.node.size, self.node.rank
        parts = shards(flat.size, ranks, flat.itemsize)
        deposited = [slice(0, flat.size)] * ranks if method.adds else parts
        half = rounded(max(part.stop - part.start for part in deposited) * flat.itemsize)
        # Two timestamps, which only an emulated network uses, then two slots.
        block = yield 2 * ALIGNMENT + 2 * half
        travel = self._travel(block, method, flat.nbytes)
        own = slice(0, flat.size) if method.gathers else parts[me]
        runs = []
        for first in (2 * ALIGNMENT, 2 * ALIGNMENT + half):
            slot = [
                block.view(rank, first, (part.stop - part.start) * flat.itemsize, flat.dtype)
                for rank, part in enumerate(deposited)
            ]
            buffers = SumBuffers([(slot[me], flat[deposited[me]])])
            if method.adds:
                buffers.scatter, buffers.summands, buffers.total = travel, [summand[own] for summand in slot], flat[own]
            else:
                buffers.gather, buffers.returns = travel, [(flat[parts[r]], slot[r]) for r in range(ranks) if r != me]
            runs.append(buffers.stages(Plain()))
        nbytes = 2 * flat[deposited[me]].nbytes
        # Flags alone have no arrival time.
        arrival = travel if self.network is not None else None
        # `start` deposits (`first=1`); `finish` waits and adds up.
        return ReductionPlan(StagedOperation(*runs, first=1), arrival=arrival, nbytes=nbytes, close=[block.free])

    def _staged(self, flat: np.ndarray, method: Method) -> Planning:
        """Plan a large sum that `finish` makes in pieces: in each piece, every rank adds up its share.

        ``start`` only records that the buffer is ready. The ranks of a node do not wait for a network: the sum is work
        of the cores, and in `finish` it does not interrupt the kernels of the backward pass. For each piece, every rank
        copies its summand to the stage (in the cache), adds up its share of all summands, and copies the sums of all
        shares back (not in a reduce-scatter). Two barriers separate these steps.

        *Data are not overwritten while they are read*: summands are read between the first and the second barrier of a
        piece, and written before the first. Sums are written between the two barriers, and read after the second and
        before the first barrier of the next piece. So a barrier separates every write from all reads before it and
        after it.

        Sums pass the stage in the order in which they were started, which is the same on all ranks. Finishing a
        sum also finishes the sums before it, so ranks may call `finish` in different orders.
        """
        stage, stages = self._common(), list[Stage]()
        plan = ReductionPlan(queue=stage.waiting)
        if self.network is not None:
            block = yield 2 * ALIGNMENT
            plan.arrival = self._travel(block, method, flat.nbytes)
            stages.append(plan.arrival)
            plan.close.append(block.free)
        # One stage serves as all barriers, because they follow each other.
        codec, barrier = method.codec, Signal(stage.block.flags)
        dtype = flat.dtype if codec.identity else np.dtype(codec.wire)
        # In a reduce-scatter, a rank must add up its own shard; in an all-reduce, it may add up any share of a piece.
        pieces = stage.pieces(flat, dtype.itemsize) if method.gathers else stage.parts(flat)
        encoding = None if codec.identity else Encoding(codec, flat.dtype, [piece.own for piece in pieces])
        for piece in pieces:
            buffers = stage.buffers_of(piece, flat, dtype, method.gathers)
            buffers.scatter = buffers.gather = barrier
            stages += buffers.stages(encoding or Plain())
        plan.operation, plan.encoding = StagedOperation(stages), encoding
        return plan

    def _common(self) -> _CommonStage:
        """Return the stage of all large sums. The first call creates it (collective)."""
        if self._stage is None:
            ranks = self.context.mpi.size
            # The function `blocks` rounds: a share may be one element longer than an equal part.
            share = rounded(STAGE_BYTES // ranks + ALIGNMENT)
            (block,) = self.blocks([STAGE_BYTES + share])
            self._stage = _CommonStage(block, share)
        return self._stage


@dataclass(frozen=True)
class _StagePiece:
    """Part of a buffer that is on the stage at one time: the slices that ranks deposit, and the share of every rank."""

    deposited: Sequence[slice]
    shares: Sequence[slice]
    mine: int

    @property
    def own(self) -> slice:
        return self.shares[self.mine]


class _CommonStage:
    """Shared memory through which large sums pass one after the other, one piece at a time.

    Attributes
    ----------
    waiting
        Sums that were started and are not finished, in the order of their starts: the same on all ranks.
    """

    def __init__(self, block: SharedBlock, share: int) -> None:
        self.block, self.nbytes = block, STAGE_BYTES + share
        self._share, self.waiting = share, deque[StagedOperation]()
        self._views: dict[tuple[int, int, int, np.dtype], np.ndarray] = {}

    def pieces(self, flat: np.ndarray, itemsize: int) -> list[_StagePiece]:
        """Return the pieces of an all-reduce: consecutive parts of the buffer, each with one share per rank."""
        step, ranks = STAGE_BYTES // itemsize, self.block.ranks
        pieces = []
        for i in range(0, flat.size, step):
            size = min(step, flat.size - i)
            shares = [slice(i + a, i + b) for a, b in blocks(size, ranks)]
            pieces.append(_StagePiece([slice(i, i + size)], shares, self.block.mine))
        return pieces

    def parts(self, flat: np.ndarray) -> list[_StagePiece]:
        """Return the pieces of a reduce-scatter: each holds a part of every rank's shard, and fits the
        stage.
        """
        whole = shards(flat.size, self.block.ranks, flat.itemsize)
        longest = max(part.stop - part.start for part in whole)
        # The parts of a piece, one per rank, must fit the stage together.
        step = STAGE_BYTES // self.block.ranks // ALIGNMENT * ALIGNMENT // flat.itemsize
        parts = []
        for i in range(0, longest, step):
            # Shards differ in length: at the end, parts of the shorter ones are shorter or empty.
            cut = [slice(min(p.start + i, p.stop), min(p.start + i + step, p.stop)) for p in whole]
            parts.append(_StagePiece(cut, cut, self.block.mine))
        return parts

    def buffers_of(self, piece: _StagePiece, flat: np.ndarray, dtype: np.dtype, gathers: bool) -> SumBuffers:
        """Return the buffers of a piece.

        Deposits follow one another on the stage. The sums of the shares follow them, or lie in the buffer itself.
        """
        size, own, deposits, first = dtype.itemsize, piece.own, [], 0
        for part in piece.deposited:
            nbytes = (part.stop - part.start) * size
            deposits.append((self._view(piece.mine, first, nbytes, dtype), flat[part]))
            first += nbytes
        # Bytes of the deposits before this rank's share.
        begin = size * sum(min(max(own.start - part.start, 0), part.stop - part.start) for part in piece.deposited)
        ranks = range(self.block.ranks)
        summands = [self._view(rank, begin, (own.stop - own.start) * size, dtype) for rank in ranks]
        if not gathers:
            return SumBuffers(deposits, summands=summands, total=flat[own])
        totals = [
            self._view(rank, STAGE_BYTES, (share.stop - share.start) * size, dtype)
            for rank, share in enumerate(piece.shares)
        ]
        returns = [(flat[share], total) for share, total in zip(piece.shares, totals)]
        return SumBuffers(deposits, summands=summands, total=totals[piece.mine], returns=returns)

    def _view(self, rank: int, first: int, nbytes: int, dtype: np.dtype) -> np.ndarray:
        """Return a view of a rank's memory on the stage that may begin at any element. Views are cached."""
        key = rank, first, nbytes, dtype
        if key not in self._views:
            # `SharedBlock.view` begins at a cache line.
            line = first // ALIGNMENT * ALIGNMENT
            self._views[key] = self.block.view(rank, line, first - line + nbytes)[first - line :].view(dtype)
        return self._views[key]


_Views = dict[int, tuple[Any, Any]]


@dataclass
class SharedWindows:
    """Shared memory of one channel.

    Attributes
    ----------
    sends, recvs
        Per peer, the two buffers that this rank packs into, and the two that the peer packs into.
    arrival
        Signal that this rank and all its peers have packed an exchange.
    free
        Functions that free the memory.
    """

    sends: _Views
    recvs: _Views
    arrival: Signal
    free: Sequence[Callable[[], object]]


class WindowChannel(Channel):
    """Channel with send buffers in shared memory and one flag per rank. A receive buffer is the send buffer of the
    peer.

    ``start`` number n raises this rank's flag to n + 1, after the data were packed (fence). ``finish`` number n waits
    until the flags of all peers, senders and receivers, have reached n + 1 (fence). Exchange n uses slot n mod 2.

    *Data are read after they were packed.* Rank q reads slot n mod 2 of p between its finish n and its release n. At
    that time p has raised its flag to n + 1, which it did after it had packed exchange n. So p has packed at least n.
    It must not have begun to pack n + 2, the next exchange in the same slot:

    *Data are not overwritten while they are read.* Rank p packs exchange n + 2 after its finish n + 1, so the flag of
    every peer q, also of a peer that only receives, has reached n + 2. Rank q raised it in its start n + 1, thus after
    its release n: it has read everything of exchange n. With one slot, p would have to wait once more for that. ::

        p:  pack 0a | start 0 --flag 1-->  ...                 finish 1 | pack 0b
                               \\                              ^
        q:                      finish 0 | read 0a | start 1 --flag 2
    """

    def __init__(self, pattern: Pattern, meter: Meter, windows: SharedWindows) -> None:
        super().__init__(pattern.sends, pattern.recvs, pattern.dtype, meter)
        self._windows = windows

    @property
    def buffer_bytes(self) -> int:
        return 2 * sum(self.send_counts.values()) * self.dtype.itemsize  # two slots; receivers read them

    def _send_buffer(self, peer: int, slot: int) -> Any:
        return self._windows.sends[peer][slot]

    def _recv_buffer(self, peer: int, slot: int) -> Any:
        return self._windows.recvs[peer][slot]

    def _start(self) -> None:
        if self.send_counts or self.recv_counts:
            self._windows.arrival.begin()

    def _finish(self) -> float:
        if not (self.send_counts or self.recv_counts):
            return 0.0
        self._windows.arrival.wait()
        return self._windows.arrival.arrived

    def _close(self) -> None:
        # These views are of memory that the arena may give to another channel.
        self._windows.sends.clear()
        self._windows.recvs.clear()
        for call in self._windows.free:
            call()


def _timestamps(block: SharedBlock, rank: int) -> Timestamps:
    """Return the timestamps in the first two cache lines of a rank's block."""
    first, second = (block.view(rank, i * ALIGNMENT, 8, np.float64) for i in range(2))
    return first, second


def _slots(sizes: Mapping[int, int]) -> tuple[dict[int, int], int]:
    """Return the offset of the two slots of every reader, and the end of all slots [B].

    `sizes` holds the bytes of one slot per reader. A flag and two timestamps come first.
    """
    starts, end = dict[int, int](), FLAG_BYTES + 2 * ALIGNMENT
    for reader, nbytes in sizes.items():
        starts[reader], end = end, end + 2 * rounded(nbytes)
    return starts, end


def _both(segment: np.ndarray, offsets: tuple[int, int], count: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    nbytes = count * dtype.itemsize
    first, second = (segment[offset : offset + nbytes].view(dtype) for offset in offsets)
    return first, second


def blocks(size: int, parts: int) -> list[tuple[int, int]]:
    """Return the ``(start, stop)`` pairs of `parts` blocks of about equal size.

    >>> blocks(5, 2)
    [(0, 2), (2, 5)]
    """
    return [(size * i // parts, size * (i + 1) // parts) for i in range(parts)]
