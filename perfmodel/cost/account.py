"""What a step sends, takes and keeps: its program, and its sums of gradients bucket by bucket under every scheme.

The rules of the sums are those of `training/reduction.py` and `comm/`; `docs/gradient_reduction.md` has the formulas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...comm.sums import LARGEST_AT_ONCE, node_shares, shards
from ...device import as_dtype
from ...dtensor import Groups
from ...layers import Network
from ...layers.parameter import ParameterBlocks
from ...layers.reduction_chunks import dense_layers
from ...layers.reduction_scheme import Scheme
from ...layers.strategy import Strategy, parameter_blocks
from ...program.compiler import compile_program
from ...program.program import Program, Target
from ...program.traffic import ExchangeTraffic, GroupSum, Ledger, Move, messages_of, sums_of
from .timeline import PricedBucket, PricedReduction, aligned, buckets_of
from .wires import Wires

__all__ = [
    "Booked",
    "Keeping",
    "add_sums",
    "booked",
    "count_program",
    "count_step",
    "kept",
    "layers_memory",
    "memory_of",
    "price",
    "program_of",
]


@dataclass(frozen=True)
class Booked:
    """Messages that `comm.counters` books, one per rank: an item of a ledger of traffic.

    Attributes
    ----------
    kind
        Kind in `comm.counters`.
    nbytes
        Rank -> bytes that it sends [B].
    """

    kind: str
    nbytes: Mapping[int, int]

    def sent(self, ranks: int) -> ExchangeTraffic:
        """Return the messages and bytes that every rank of ``0 .. ranks - 1`` sends."""
        messages, nbytes = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
        for rank, size in self.nbytes.items():
            messages[rank], nbytes[rank] = size > 0, size
        return ExchangeTraffic(messages, nbytes)


# -- messages and bytes ---------------------------------------------------------------------------


def booked(bucket: PricedBucket, scheme: Scheme, per_node: int, itemsize: int) -> list[GroupSum | Booked]:
    """Return the messages of a bucket in one step.

    Parameters
    ----------
    per_node
        So many consecutive ranks share memory.
    itemsize
        Of one element [B].
    """
    if bucket.replicated:
        return []
    groups = [(members, size) for members, size in bucket.sum.groups if len(members) > 1]
    found: list[GroupSum | Booked] = []
    for method in scheme.sums:
        kind = method.name if scheme.kind.shards else "allreduce"
        if method.by_nodes:
            found += _by_nodes(groups, per_node)
        elif method.adds:
            sent = ((members, method.codec.payload(size)) for members, size in bucket.sum.groups)
            found.append(GroupSum(kind, tuple(sent)))
        else:
            found.append(_gathered(kind, groups, itemsize))
    return found


_Groups = Iterable[tuple[range, int]]


def _by_nodes(groups: _Groups, per_node: int) -> list[Booked]:
    """Return the messages through the memory of each node, and those to other nodes."""
    within, across = dict[int, int](), dict[int, int]()
    for members, size in groups:
        for rank, share in zip(members, node_shares([rank // per_node for rank in members])):
            within[rank], across[rank] = share.within(size), share.across(size)
    return [Booked("node", within), Booked("allreduce", across)]


def _gathered(kind: str, groups: _Groups, itemsize: int) -> Booked:
    nbytes: dict[int, int] = {}
    for members, size in groups:
        parts = shards(size // itemsize, len(members), itemsize)
        nbytes |= {rank: (part.stop - part.start) * itemsize for rank, part in zip(members, parts)}
    return Booked(kind, nbytes)


# -- time ---------------------------------------------------------------------------------------


def price(bucket: PricedBucket, scheme: Scheme, wires: Wires, slots: int) -> PricedReduction:
    """Return the times to sum and to update a bucket, on the ranks that take longest."""
    of_kind = _price_by_nodes if scheme.sum.by_nodes else _price_shards if scheme.kind.shards else _price_sum
    found = of_kind(bucket, scheme, wires, slots)
    nbytes, members = bucket.sum.largest
    if len(members) < 2 or not nbytes:
        return found
    if not scheme.kind.waits:  # a sum that is waited for finds the device at rest
        found = replace(found, begin=found.begin + wires.machine.runtime.synchronize)
    # Small sums have their own places in shared memory; large ones share a stage, sums by nodes a thread.
    staged = nbytes > LARGEST_AT_ONCE or not scheme.sum.on_devices
    return replace(found, in_order=wires.emulated and staged)


def _price_sum(bucket: PricedBucket, scheme: Scheme, wires: Wires, slots: int) -> PricedReduction:
    nbytes, members = bucket.sum.largest
    update = wires.update(max(bucket.nbytes), slots)
    codec = scheme.codec
    if codec.identity or len(members) < 2:
        seconds = wires.sum(nbytes, members)
        return PricedReduction(bucket, seconds, update, min(seconds, wires.sum_work(nbytes, members)))
    payload, copy = codec.payload(nbytes), wires.copy(nbytes)  # which reads and writes: two passes over memory
    seconds, back = wires.sum(payload, members), codec.decoding / 2 * copy
    work = min(seconds, wires.sum_work(payload, members)) + back
    return PricedReduction(bucket, seconds + back, update, work, codec.encoding(scheme.keeps_errors) / 2 * copy)


def _price_shards(bucket: PricedBucket, scheme: Scheme, wires: Wires, slots: int) -> PricedReduction:
    nbytes, members = bucket.sum.largest
    work = wires.sum_work(nbytes, members) / 2
    scatter, gather = wires.scatter(nbytes, members), wires.gather(nbytes, members)
    update = wires.update(max(bucket.nbytes) / len(members), slots)
    works = min(scatter, work), min(gather, work)
    return PricedReduction(bucket, scatter, update, works[0], gather=gather, gather_work=works[1])


def _price_by_nodes(bucket: PricedBucket, scheme: Scheme, wires: Wires, slots: int) -> PricedReduction:
    """Price a sum by nodes: ``hierarchical`` copies on the main thread, ``host_accumulate`` in the background."""
    parts = wires.sum_by_nodes(*bucket.sum.largest)
    update = wires.update(max(bucket.nbytes), slots)
    if scheme.sum.in_background:
        return PricedReduction(bucket, parts.seconds, update)
    behind = parts.addition + parts.across
    return PricedReduction(bucket, behind + parts.way_back, update, parts.way_back, parts.deposit)


# -- memory -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Keeping:
    """What the memory of a rank beside parameters and gradients depends on.

    Attributes
    ----------
    scheme
        How gradients are summed.
    rank
        Rank that holds the memory.
    per_node
        So many consecutive ranks share memory.
    slots
        Arrays of the parameters' size that the optimizer keeps.
    accumulates
        Whether gradients of parts of a batch are added up.
    """

    scheme: Scheme
    rank: int
    per_node: int
    slots: int
    accumulates: bool = False


def kept(bucket: PricedBucket, keeping: Keeping) -> dict[str, int]:
    """Return the memory that a rank needs beside parameters and gradients, by use [B].

    MPI takes as much memory for messages as an all-reduce sums.
    """
    scheme, rank, slots = keeping.scheme, keeping.rank, keeping.slots
    color = bucket.holders.color(rank)
    if color is None:
        return {}
    members, own = bucket.holders.members(color), bucket.nbytes[color]
    sharded = scheme.kind.shards and not bucket.replicated
    found = {"optimizer state": slots * (_share(own, members, rank) if sharded else own)} if slots else {}
    if scheme.keeps_errors:
        found["gradient error"] = own
    if keeping.accumulates:
        found["gradient sum"] = own
    if not bucket.replicated and len(members) > 1:
        found["messages"] = _sum_buffers(scheme, own, members, rank, keeping.per_node)
    return found


def _share(own: int, members: range, rank: int) -> int:
    """Return the bytes of the shard that a rank has of a buffer of `own` bytes [B]."""
    part = shards(own, len(members), 1)[members.index(rank)]
    return part.stop - part.start


def _sum_buffers(scheme: Scheme, own: int, members: range, rank: int, per_node: int) -> int:
    if scheme.sum.by_nodes:
        return node_shares([other // per_node for other in members])[members.index(rank)].held(own)
    share, feedback = _share(own, members, rank), scheme.keeps_errors
    return sum(method.held(own, len(members), share, feedback) for method in scheme.sums)


#: What is summed with every loss [B]: it, and two numbers by which the ranks agree on checkpoints
#: (`halograd.training.pass_loss.VOTES`).
LOSS_BYTES = 24


def program_of(
    network: Network, strategy: Strategy, target: Target, blocks: Mapping[str, ParameterBlocks] | None = None
) -> Program:
    """Compile the program of one rank as the runtime does, with the dense layers that the strategy's scheme replicates.

    Parameters
    ----------
    target
        Batch, ranks, dtype, and for which of the ranks.
    blocks
        Of parameters and states, if they are known already.
    """
    replicated = list(dense_layers(network))[: strategy.reduction.replicated_dense] if target.trainable else []
    return compile_program(network, strategy, target, blocks, replicated)


def count_step(
    network: Network,
    strategy: Strategy,
    batch: int,
    ranks: int | None = None,
    dtype: str = "float32",
    per_node: int | None = None,
) -> dict[str, ExchangeTraffic]:
    """Count what every rank sends in one training step, by kind (``"halo"``, ``"redistribute"``, ``"allreduce"``, ...).

    Parameters
    ----------
    ranks
        How many there are; those of the strategy if None.
    per_node
        So many consecutive ranks share memory; all of them if None.

    Notes
    -----
    See :func:`halograd.program.traffic.messages_of`. Shards are gathered where there is an optimizer.
    """
    size = ranks or strategy.ranks
    blocks = parameter_blocks(network, strategy, size)
    program = program_of(network, strategy, Target(batch, size, dtype=as_dtype(dtype)), blocks)
    itemsize = as_dtype(dtype).itemsize
    buckets = buckets_of(network, blocks, itemsize, strategy)
    return count_program(program, buckets, strategy, per_node or size).kinds


def count_program(
    program: Program, buckets: Sequence[PricedBucket], strategy: Strategy, per_node: int
) -> Ledger:
    """Count what every rank sends in one step of a compiled program with these buckets."""
    ranks, itemsize = program.target.size, program.target.dtype.itemsize
    ledger = Ledger(ranks)
    for layer, item in messages_of(program):
        ledger.book([item], layer)
    for bucket in buckets:
        ledger.book(booked(bucket, strategy.reduction, per_node, itemsize))
    if program.loss is not None:
        ledger.book([GroupSum.of("loss", Groups.whole(ranks), [LOSS_BYTES])])
    return ledger


def memory_of(
    program: Program,
    blocks: Mapping[str, ParameterBlocks],
    buckets: Sequence[PricedBucket],
    strategy: Strategy,
    slots: int = 0,
    per_node: int | None = None,
    accumulates: bool = False,
) -> dict[str, int]:
    """Return the bytes of the program's rank by use, as `Executor.predicted_bytes`, without workspaces of kernels [B].

    Parameters
    ----------
    slots
        Arrays of the parameters' size that the optimizer keeps.
    per_node
        So many consecutive ranks share memory; all of them if None.
    accumulates
        Whether batches are computed in parts, whose gradients are added up.
    """
    found, per_node = layers_memory(program, blocks), per_node or program.target.size
    add_sums(found, buckets, Keeping(strategy.reduction, program.target.rank, per_node, slots, accumulates))
    return found


def layers_memory(program: Program, blocks: Mapping[str, ParameterBlocks]) -> dict[str, int]:
    """Return the bytes of the program's rank by use, without sums of gradients and the optimizer [B]."""
    rank = program.target.rank
    found = dict(program.placement.uses)
    found["parameter"] = found["parameter gradient"] = 0
    for step in program.steps:
        itemsize = program.wide.itemsize
        for key in () if step.owner else step.parameters:
            own = aligned(blocks[f"{step.name}/{key}"].boxes[rank].size * itemsize)
            found["parameter"] += own
            found["parameter gradient"] += own
        for key in step.states:
            found["parameter"] += blocks[f"{step.name}/{key}"].boxes[rank].size * itemsize
    found["messages"] = _message_buffers(program)
    return found


def add_sums(found: dict[str, int], buckets: Sequence[PricedBucket], keeping: Keeping) -> None:
    """Add the bytes that sums of gradients and the optimizer keep on a rank [B]."""
    for bucket in buckets:
        for use, nbytes in kept(bucket, keeping).items():
            found[use] = found.get(use, 0) + nbytes


def _message_buffers(program: Program) -> int:
    """Return the bytes of message buffers of all exchanges, of the sums within layers and of the loss [B]."""
    rank = program.target.rank
    total = LOSS_BYTES if program.target.size > 1 else 0
    for move in (item for _, item in messages_of(program) if isinstance(item, Move)):
        total += int(move.peers(rank)[1].sum()) + int(move.adjoint.peers(rank)[1].sum())
    for one in sums_of(program):
        color, together = one.groups.color(rank), one.groups.members_each
        if color is not None and together > 1:
            total += one.sizes[color] * (together if one.method == "all_gather" else 1)
    return total
