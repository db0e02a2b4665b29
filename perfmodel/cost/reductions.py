"""What the sums of gradients send, take and keep under every scheme, bucket by bucket.

The rules are those of `training/reduction.py` and `comm/`: see `docs/gradient_reduction.md` for the formulas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ...comm.sums import LARGEST_AT_ONCE, METHODS, node_shares, shards
from ...layers.reduction_scheme import Scheme
from ...program.traffic import ExchangeTraffic, GroupSum
from .timeline import PricedBucket, PricedReduction
from .wires import Wires

__all__ = ["Booked", "Keeping", "booked", "kept", "price"]

#: Memory that rounding passes over, in copies of the float32 gradients: to bfloat16 (with error feedback, without),
#: and back.
_ROUNDING, _PLAIN_ROUNDING, _WIDENING = 14 / 8, 6 / 8, 6 / 8


@dataclass(frozen=True)
class Booked:
    """Messages that `comm.counters` books, one per rank: who sends what. An item of a ledger of traffic.

    Attributes
    ----------
    kind
        Under which they are booked.
    nbytes
        Rank -> what it sends [B].
    """

    kind: str
    nbytes: Mapping[int, int]

    def sent(self, ranks: int) -> ExchangeTraffic:
        """What every rank of ``0 .. ranks - 1`` sends."""
        messages, nbytes = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
        for rank, size in self.nbytes.items():
            messages[rank], nbytes[rank] = size > 0, size
        return ExchangeTraffic(messages, nbytes)


# -- messages and bytes ---------------------------------------------------------------------------


def booked(bucket: PricedBucket, scheme: Scheme, per_node: int, itemsize: int) -> list[GroupSum | Booked]:
    """The messages of a bucket in one step.

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
    for name in scheme.methods:
        method, kind = METHODS[name], name if scheme.kind.shards else "allreduce"
        if method.by_nodes:
            found += _by_nodes(groups, per_node)
        elif method.adds:
            found.append(GroupSum(kind, tuple((members, method.payload(size)) for members, size in bucket.sum.groups)))
        else:
            found.append(_gathered(kind, groups, itemsize))
    return found


_Groups = Iterable[tuple[range, int]]


def _by_nodes(groups: _Groups, per_node: int) -> list[Booked]:
    """Through the memory of a node, and to others."""
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
    """What summing and updating a bucket takes, on the ranks that take longest."""
    of_kind = _price_by_nodes if scheme.sum.by_nodes else _price_shards if scheme.kind.shards else _price_sum
    found = of_kind(bucket, scheme, wires, slots)
    nbytes, members = bucket.sum.largest
    if len(members) < 2 or not nbytes:
        return found
    if not scheme.kind.waits:  # which finds the device at rest
        found = replace(found, begin=found.begin + wires.machine.runtime.synchronize)
    # Small sums have their own places in shared memory; large ones share a stage, sums by nodes a thread.
    staged = nbytes > LARGEST_AT_ONCE or not scheme.sum.on_devices
    return replace(found, in_order=wires.emulated and staged)


def _price_sum(bucket: PricedBucket, scheme: Scheme, wires: Wires, slots: int) -> PricedReduction:
    nbytes, members = bucket.sum.largest
    update = wires.update(max(bucket.nbytes), slots)
    if scheme.sum.codec == "bfloat16" and len(members) > 1:
        seconds = wires.sum(nbytes / 2, members)
        back = _WIDENING * wires.copy(nbytes)
        work = min(seconds, wires.sum_work(nbytes / 2, members)) + back
        begin = (_ROUNDING if scheme.error_feedback else _PLAIN_ROUNDING) * wires.copy(nbytes)
        return PricedReduction(bucket, seconds + back, update, work, begin)
    seconds = wires.sum(nbytes, members)
    return PricedReduction(bucket, seconds, update, min(seconds, wires.sum_work(nbytes, members)))


def _price_shards(bucket: PricedBucket, scheme: Scheme, wires: Wires, slots: int) -> PricedReduction:
    nbytes, members = bucket.sum.largest
    work = wires.sum_work(nbytes, members) / 2
    scatter, gather = wires.scatter(nbytes, members), wires.gather(nbytes, members)
    update = wires.update(max(bucket.nbytes) / len(members), slots)
    works = min(scatter, work), min(gather, work)
    return PricedReduction(bucket, scatter, update, works[0], gather=gather, gather_work=works[1])


def _price_by_nodes(bucket: PricedBucket, scheme: Scheme, wires: Wires, slots: int) -> PricedReduction:
    """``hierarchical`` copies on the main thread, ``host_accumulate`` behind it."""
    parts = wires.sum_by_nodes(*bucket.sum.largest)
    update = wires.update(max(bucket.nbytes), slots)
    if scheme.sum.in_background:
        return PricedReduction(bucket, parts.seconds, update)
    behind = parts.addition + parts.across
    return PricedReduction(bucket, behind + parts.way_back, update, parts.way_back, parts.deposit)


# -- memory -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Keeping:
    """What memory beside parameters and gradients is for.

    Attributes
    ----------
    scheme
        How gradients are summed.
    rank
        Whose memory.
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
    """Memory that a rank needs beside parameters and gradients, by use [B].

    Buffers of messages are those of MPI, which takes an all-reduce's size again.
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
        found["messages"] = _messages(scheme, own, members, rank, keeping.per_node)
    return found


def _share(own: int, members: range, rank: int) -> int:
    """A rank's shard of a buffer of so many bytes [B]."""
    part = shards(own, len(members), 1)[members.index(rank)]
    return part.stop - part.start


def _messages(scheme: Scheme, own: int, members: range, rank: int, per_node: int) -> int:
    if scheme.sum.by_nodes:
        return node_shares([other // per_node for other in members])[members.index(rank)].held(own)
    share, feedback = _share(own, members, rank), scheme.keeps_errors
    return sum(METHODS[name].held(own, len(members), share, feedback) for name in scheme.methods)
