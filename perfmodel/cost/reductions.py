"""What the sums of gradients send, take and keep under every scheme, bucket by bucket.

The rules are those of `training/reduction/` and `comm/`: see `docs/gradient_reduction.md` for the formulas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from halograd.comm.shard import shards
from halograd.layers.reduction_scheme import Scheme
from halograd.perfmodel.cost.timeline import Bucket, Reduction
from halograd.perfmodel.cost.wires import Wires
from halograd.program.traffic import GroupSum, Traffic

__all__ = ["BY_NODES", "Booked", "booked", "kept", "price"]

#: Schemes whose sums are made in the memory of a node first.
BY_NODES = ("hierarchical", "host_accumulate")

#: Memory that rounding passes over, in copies of the float32 gradients: to bfloat16 (with error feedback, without),
#: and back.
_ROUNDING, _PLAIN_ROUNDING, _WIDENING = 14 / 8, 6 / 8, 6 / 8
#: Sums up to here are deposited when they start [B] (`comm/transports/shared_sum.py`).
LARGEST_AT_ONCE = 64 * 1024


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

    def sent(self, ranks: int) -> Traffic:
        """What every rank of ``0 .. ranks - 1`` sends."""
        messages, nbytes = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
        for rank, size in self.nbytes.items():
            messages[rank], nbytes[rank] = size > 0, size
        return Traffic(messages, nbytes)


# -- messages and bytes ---------------------------------------------------------------------------


def booked(bucket: Bucket, scheme: Scheme, per_node: int, itemsize: int) -> list[GroupSum | Booked]:
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
    if scheme.name in BY_NODES:
        return [_within(groups, per_node), _across(groups, per_node)]
    if scheme.name == "sharded":
        return [GroupSum("reduce_scatter", bucket.sum.groups), _gathered(groups, itemsize)]
    if scheme.payload == "bfloat16":
        return [GroupSum("allreduce", tuple((members, size // 2) for members, size in bucket.sum.groups))]
    return [bucket.sum]


_Groups = Iterable[tuple[range, int]]


def _nodes(members: range, per_node: int) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for rank in members:
        found.setdefault(rank // per_node, []).append(rank)
    return list(found.values())


def _within(groups: _Groups, per_node: int) -> Booked:
    """Through the memory of a node, by all who share it."""
    nodes = [(node, size) for members, size in groups for node in _nodes(members, per_node)]
    return Booked("node", {rank: size for node, size in nodes if len(node) > 1 for rank in node})


def _across(groups: _Groups, per_node: int) -> Booked:
    """By the first rank of each node, where there are several nodes."""
    found = [(_nodes(members, per_node), size) for members, size in groups]
    return Booked("allreduce", {node[0]: size for nodes, size in found if len(nodes) > 1 for node in nodes})


def _gathered(groups: _Groups, itemsize: int) -> Booked:
    nbytes: dict[int, int] = {}
    for members, size in groups:
        parts = shards(size // itemsize, len(members), itemsize)
        nbytes |= {rank: (part.stop - part.start) * itemsize for rank, part in zip(members, parts)}
    return Booked("all_gather", nbytes)


# -- time ---------------------------------------------------------------------------------------


def price(bucket: Bucket, scheme: Scheme, wires: Wires, slots: int) -> Reduction:
    """What summing and updating a bucket takes, on the ranks that take longest."""
    found = _PRICES.get(scheme.name, _price_sum)(bucket, scheme, wires, slots)
    nbytes, members = bucket.sum.largest
    if len(members) < 2 or not nbytes:
        return found
    if scheme.name != "blocking":  # which finds the device at rest
        found = replace(found, begin=found.begin + wires.machine.runtime.synchronize)
    # Small sums have their own places in shared memory; large ones share a stage, sums by nodes a thread.
    staged = nbytes > LARGEST_AT_ONCE or scheme.payload == "bfloat16" or scheme.name in BY_NODES
    return replace(found, in_order=wires.emulated and staged)


def _price_sum(bucket: Bucket, scheme: Scheme, wires: Wires, slots: int) -> Reduction:
    nbytes, members = bucket.sum.largest
    update = wires.update(max(bucket.nbytes), slots)
    if scheme.payload == "bfloat16" and len(members) > 1:
        seconds = wires.sum(nbytes / 2, members)
        back = _WIDENING * wires.copy(nbytes)
        work = min(seconds, wires.sum_work(nbytes / 2, members)) + back
        begin = (_ROUNDING if scheme.error_feedback else _PLAIN_ROUNDING) * wires.copy(nbytes)
        return Reduction(bucket, seconds + back, update, work, begin)
    seconds = wires.sum(nbytes, members)
    return Reduction(bucket, seconds, update, min(seconds, wires.sum_work(nbytes, members)))


def _price_shards(bucket: Bucket, scheme: Scheme, wires: Wires, slots: int) -> Reduction:
    nbytes, members = bucket.sum.largest
    work = wires.sum_work(nbytes, members) / 2
    scatter, gather = wires.scatter(nbytes, members), wires.gather(nbytes, members)
    update = wires.update(max(bucket.nbytes) / len(members), slots)
    works = min(scatter, work), min(gather, work)
    return Reduction(bucket, scatter, update, works[0], gather=gather, gather_work=works[1])


def _price_by_nodes(bucket: Bucket, scheme: Scheme, wires: Wires, slots: int) -> Reduction:
    """``hierarchical`` copies on the main thread, ``host_accumulate`` behind it."""
    parts = wires.sum_by_nodes(*bucket.sum.largest)
    update = wires.update(max(bucket.nbytes), slots)
    if scheme.name == "host_accumulate":
        return Reduction(bucket, parts.seconds, update)
    behind = parts.addition + parts.across
    return Reduction(bucket, behind + parts.way_back, update, parts.way_back, parts.deposit)


_PRICES = {
    "sharded": _price_shards,
    "hierarchical": _price_by_nodes,
    "host_accumulate": _price_by_nodes,
}


# -- memory -------------------------------------------------------------------------------------


def kept(bucket: Bucket, scheme: Scheme, rank: int, per_node: int, slots: int) -> dict[str, int]:
    """Memory that a rank needs beside parameters and gradients, by use [B].

    Buffers of messages are those of MPI, which takes an all-reduce's size again.
    """
    color = bucket.holders.color(rank)
    if color is None:
        return {}
    members, own = bucket.holders.members(color), bucket.nbytes[color]
    sharded = scheme.name == "sharded" and not bucket.replicated
    found = {"optimizer state": slots * (_share(own, members, rank) if sharded else own)} if slots else {}
    if scheme.payload == "bfloat16" and scheme.error_feedback:
        found["gradient error"] = own
    if not bucket.replicated and len(members) > 1:
        found["messages"] = _messages(scheme, own, members, rank, per_node)
    return found


def _share(own: int, members: range, rank: int) -> int:
    """A rank's shard of a buffer of so many bytes [B]."""
    part = shards(own, len(members), 1)[members.index(rank)]
    return part.stop - part.start


def _messages(scheme: Scheme, own: int, members: range, rank: int, per_node: int) -> int:
    size, share = len(members), _share(own, members, rank)
    if scheme.name in BY_NODES:
        nodes = _nodes(members, per_node)
        (here,) = (node for node in nodes if rank in node)
        leads, far = rank == here[0], len(nodes) > 1
        return own * ((len(here) > 1) + leads + (leads and far))
    if scheme.name == "sharded":
        return 2 * own + share
    if scheme.payload == "bfloat16":
        # What travels, what was received, the sum of the own share and what rounding took of it.
        return own // 2 + (size - 1) * share // 2 + share * (1 + scheme.error_feedback)
    return (size - 1) * share if scheme.deterministic else own
