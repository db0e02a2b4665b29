"""Messages and bytes that every rank sends: in one exchange or sum, and in one training step, by kind.

An exchange sends one message per pair of ranks whose boxes intersect (`halograd.dtensor.plan`). Boxes are products of
intervals (:class:`Blocks`), so the overlap of two ranks is the product of overlaps per axis. The number of elements
that a rank sends is thus a product of sums over one axis each, minus the elements that stay on the rank.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from ..comm.sums import node_shares, shards
from ..dtensor import Groups
from ..dtensor.layout import Blocks, Intervals, outer, padded
from ..lowering.operations import ExchangeSpec, Operation, Sum, Total, Transfer
from .program import Program

__all__ = [
    "ExchangeTraffic",
    "GroupSum",
    "Ledger",
    "MessagePattern",
    "Move",
    "Sender",
    "Sent",
    "messages_of",
    "senders",
    "sums_of",
]


@dataclass(frozen=True)
class ExchangeTraffic:
    """Traffic counters of the ranks ``0 .. P-1`` in one exchange.

    Attributes
    ----------
    messages, bytes
        Arrays of `P` integers: number of messages sent, and their total size [B].
    """

    messages: np.ndarray
    bytes: np.ndarray


@dataclass(frozen=True)
class Move:
    """Exchange from owned boxes to needed boxes.

    Attributes
    ----------
    source, target
        Boxes before and after. Source boxes are disjoint, or are summands, which are all sent.
    itemsize
        Size of one element [B].
    kind
        Kind in `comm.counters`: ``"halo"``, ``"channel"`` or ``"redistribute"``.
    """

    source: Blocks
    target: Blocks
    itemsize: int
    kind: str = "halo"

    @classmethod
    def of(cls, exchange: ExchangeSpec) -> Move:
        """Create the description of an exchange of a program."""
        return cls(exchange.sources, exchange.targets, exchange.itemsize, exchange.kind)

    def __hash__(self) -> int:
        return hash((hash(self.source), hash(self.target), self.itemsize))

    @cached_property
    def adjoint(self) -> Move:
        """The exchange in the opposite direction."""
        return Move(self.target, self.source, self.itemsize, self.kind)

    @cached_property
    def _overlaps(self) -> tuple[np.ndarray, ...]:
        """Per axis, the number of common elements of every source part and every target part."""
        return tuple(overlap(a, b) for a, b in zip(self.source.axes, self.target.axes))

    def sent(self, ranks: int) -> ExchangeTraffic:
        """Return the traffic of every rank of ``0 .. ranks - 1``."""
        # Per rank, the number of target boxes that intersect its box is a product over the axes, as are the elements.
        messages = outer([(o > 0).sum(axis=1) for o in self._overlaps])
        elements = outer([o.sum(axis=1) for o in self._overlaps])
        # What stays on a rank is no message.
        own = self._kept()
        messages[: len(own)] -= own > 0
        elements[: len(own)] -= own
        return ExchangeTraffic(padded(messages, ranks), padded(elements * self.itemsize, ranks))

    def _kept(self) -> np.ndarray:
        """Return, per rank, the number of elements that stay on it."""
        # Ranks beyond one of the grids hold nothing there.
        ranks = min(self.source.placed, self.target.placed)
        own = np.ones(ranks, np.int64)
        for o, a, b in zip(self._overlaps, grid_coordinates(self.source.grid), grid_coordinates(self.target.grid)):
            own *= o[a[:ranks], b[:ranks]]
        return own

    @cached_property
    def _crossings(self) -> tuple[int, tuple[tuple[int, int, Crossing], ...]]:
        """Size of a message along the axes that are not cut [B], and the cut axes: number, target parts, overlaps."""
        nbytes, cut = self.itemsize, list[tuple[int, int, Crossing]]()
        for axis, (own, others) in enumerate(zip(self.source.axes, self.target.axes)):
            if len(own) > 1 or len(others) > 1:
                cut.append((axis, len(others), crossing(own, others)))
            else:
                # One part before and after: the axis multiplies the size of all messages.
                nbytes *= sum(elements for _, elements in crossing(own, others)[0])
        return nbytes, tuple(cut)

    def pattern(self, ranks: tuple[int, ...]) -> tuple[int, MessagePattern]:
        """Return the size of one of the :attr:`MessagePattern.units` [B], and the pattern of some ranks' messages.

        Exchanges that differ only in axes that are not cut, such as channels, have the same pattern.
        """
        nbytes, cut = self._crossings
        # If an axis that is not cut has nothing in common, no rank sends.
        return nbytes, patterns(self.source.grid, cut, ranks if nbytes else ())

    def messages(self, ranks: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the messages of some ranks, as arrays: position of the sender in `ranks`, receiver, and size [B]."""
        nbytes, pattern = self.pattern(tuple(ranks))
        return pattern.senders, pattern.peers, pattern.units * nbytes

    def peers(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the other ranks to which `rank` sends, and the bytes per rank [B]."""
        return self.messages([rank])[1:]


@dataclass(frozen=True)
class GroupSum:
    """All-reduces that run at the same time, one in each of several disjoint groups of ranks.

    Attributes
    ----------
    kind
        Kind in `comm.counters`.
    groups
        Ranks of every group, and the size of the array that they sum [B].
    """

    kind: str
    groups: tuple[tuple[range | tuple[int, ...], int], ...]

    @classmethod
    def of(cls, kind: str, groups: Groups, sizes: Sequence[int]) -> GroupSum:
        """Create the sum over `groups`; ``sizes[k]`` is that of group `k` [B]."""
        return cls(kind, tuple((groups.members(color), int(sizes[color])) for color in range(groups.count)))

    def sent(self, ranks: int) -> ExchangeTraffic:
        """Return the traffic of every rank: a reduction counts as one message of its buffer."""
        messages, nbytes = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
        for members, size in self.groups:
            if len(members) > 1 and size:
                index = (
                    slice(members.start, members.stop, members.step) if isinstance(members, range) else list(members)
                )
                messages[index], nbytes[index] = 1, size
        return ExchangeTraffic(messages, nbytes)

    @cached_property
    def largest(self) -> tuple[int, range | tuple[int, ...]]:
        """Slowest group, as (size [B], ranks): the one with most bytes to sum over several ranks, then most ranks, then
        the longest distance from the first to the last rank.
        """
        members, size = max(self.groups, key=lambda g: (g[1] * (len(g[0]) > 1), len(g[0]), g[0][-1] - g[0][0]))
        return size, members


@dataclass(frozen=True)
class Sent:
    """One message per rank; sizes may differ.

    Attributes
    ----------
    kind
        Kind in `comm.counters`.
    nbytes
        Bytes that a rank sends, by rank [B].
    """

    kind: str
    nbytes: Mapping[int, int]

    def sent(self, ranks: int) -> ExchangeTraffic:
        """Return the messages and bytes that every rank of ``0 .. ranks - 1`` sends."""
        messages, nbytes = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
        for rank, size in self.nbytes.items():
            messages[rank], nbytes[rank] = size > 0, size
        return ExchangeTraffic(messages, nbytes)


@lru_cache(maxsize=16384)
def overlap(source: tuple[tuple[int, int], ...], target: tuple[tuple[int, int], ...]) -> np.ndarray:
    """Return the number of common elements of every interval of `source` and every interval of `target`."""
    a, b = np.array(source, np.int64), np.array(target, np.int64)
    low = np.maximum(a[:, None, 0], b[None, :, 0])  # [source part, target part]
    high = np.minimum(a[:, None, 1], b[None, :, 1])
    return np.maximum(0, high - low)


class Crossing(dict[int, list[tuple[int, int]]]):
    """Per interval of `source`, the intervals of `target` that it intersects, with the numbers of common elements."""

    def __init__(self, source: Intervals, target: Intervals) -> None:
        self._source, self._target = source, target
        starts, stops = zip(*target)
        #: Bounds of the target's intervals, if these are in order, so that those that intersect one are adjacent.
        self._bounds = (starts, stops) if list(starts) == sorted(starts) and list(stops) == sorted(stops) else None

    def __missing__(self, i: int) -> list[tuple[int, int]]:
        start, stop = self._source[i]
        near = range(len(self._target))
        if self._bounds is not None:
            starts, stops = self._bounds
            # From the first interval that ends after `start` to the last that begins before `stop`.
            near = range(bisect_right(stops, start), bisect_left(starts, stop))
        common = ((k, min(self._target[k][1], stop) - max(self._target[k][0], start)) for k in near)
        self[i] = [(k, n) for k, n in common if n > 0]
        return self[i]

    # Two crossings are equal if they are one object: patterns are looked up by them.
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


@dataclass(frozen=True, eq=False)
class MessagePattern:
    """Messages of some ranks in exchanges along the same cut axes.

    Attributes
    ----------
    senders, peers
        Position of the sender in the list of ranks, and receiver, per message.
    units
        Number of elements per message along the cut axes.
    """

    senders: np.ndarray
    peers: np.ndarray
    units: np.ndarray


@lru_cache(maxsize=16384)
def patterns(
    grid: tuple[int, ...], cut: tuple[tuple[int, int, Crossing], ...], ranks: tuple[int, ...]
) -> MessagePattern:
    """Return the pattern of the messages of some ranks.

    Parameters
    ----------
    grid
        Parts of the source per axis.
    cut
        Cut axes: number, parts of the target, overlaps.
    """
    strides, placed = [math.prod(grid[axis + 1 :]) for axis, _, _ in cut], math.prod(grid)
    messages: list[tuple[int, int, int]] = []
    for i, rank in enumerate(ranks):
        if rank < placed:
            # Pairs (peer, units) over the axes so far; an axis that is not cut has one part.
            others = [(0, 1)]
            for (axis, parts, overlaps), stride in zip(cut, strides):
                # Coordinate of the rank along the axis: ranks are row-major.
                row = overlaps[rank // stride % grid[axis]]
                others = [(peer * parts + part, units * n) for peer, units in others for part, n in row]
            messages += [(i, peer, units) for peer, units in others if peer != rank]
    return MessagePattern(*np.array(messages, np.int64).reshape(-1, 3).T.copy())


#: Overlaps of two cuts of an axis: layers that differ in other axes share them.
crossing = lru_cache(maxsize=16384)(Crossing)


@lru_cache(maxsize=4096)
def grid_coordinates(grid: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """Return, per axis, the coordinate of every rank of a grid."""
    total = 1
    for parts in grid:
        total *= parts
    return np.unravel_index(np.arange(total), grid)


#: Messages of one kind.
Sender = Move | GroupSum | Sent


class Ledger:
    """Total traffic of all ranks, by kind and by layer.

    Attributes
    ----------
    layers
        Traffic of all kinds by the layer, or redistribution, whose operations send it.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._kinds: dict[str, ExchangeTraffic] = {}
        self.layers: dict[str, ExchangeTraffic] = {}

    def add(self, item: Sender, layer: str | None = None) -> None:
        """Add the traffic of one exchange or sum; `layer` is None if no layer's operations send it."""
        sent = item.sent(self.ranks)
        for totals, key in ((self._kinds, item.kind), (self.layers, layer)):
            if key is None:
                continue
            if key not in totals:
                zero = np.zeros(self.ranks, np.int64)
                totals[key] = ExchangeTraffic(zero, zero.copy())
            totals[key].messages[:] += sent.messages
            totals[key].bytes[:] += sent.bytes

    @property
    def kinds(self) -> dict[str, ExchangeTraffic]:
        """Traffic by kind, without kinds that send nothing."""
        return {kind: total for kind, total in self._kinds.items() if total.messages.any()}


def messages_of(program: Program, per_node: int | None = None) -> Iterator[tuple[str | None, Sender]]:
    """Yield the messages of a training step on all ranks, each with the name of its layer, or None.

    The counts are those of `comm.counters`: an exchange is one message per peer, a reduction one message of its buffer,
    an all-gather one message of the rank's part. Guarded operations are left out, because it is not known beforehand
    whether they run (such as the second sum of statistics whose variance would cancel).

    Parameters
    ----------
    per_node
        Number of consecutive ranks that share memory; all ranks if None.
    """
    per_node, started = per_node or program.target.size, set[Sum]()
    for operation in program:
        if operation.when == "evaluation":
            continue
        layer = operation.layer or None
        if isinstance(operation, Transfer) and operation.end == "start":
            yield layer, Move.of(operation.exchange)
        elif isinstance(operation, Total) and operation.end == "start":
            started.add(operation.sum)
            yield from ((layer, sender) for sender in senders(operation.sum, per_node))
    # Sums that kernels start by themselves.
    within = {
        total: operation.layer or None for operation in program for total in operation.sums() if total not in started
    }
    yield from ((layer, sender) for total, layer in within.items() for sender in senders(total, per_node))


def sums_of(operations: Iterable[Operation]) -> list[Sum]:
    """Return the sums that operations contain, each once, in order of their first use."""
    return list(dict.fromkeys(total for operation in operations for total in operation.sums()))


def senders(total: Sum, per_node: int) -> list[Sender]:
    """Return the messages of one sum on all ranks; `per_node` consecutive ranks share memory."""
    method, whole = total.algorithm, GroupSum.of(total.kind, total.groups, total.sizes)
    several = [(members, size) for members, size in whole.groups if len(members) > 1]
    if method.by_nodes:
        within, across = dict[int, int](), dict[int, int]()
        for members, size in several:
            for rank, share in zip(members, node_shares([rank // per_node for rank in members])):
                within[rank], across[rank] = share.within(size), share.across(size)
        return [Sent("node", within), Sent("allreduce", across)]
    if method.adds:
        return [GroupSum(total.kind, tuple((members, method.codec.payload(size)) for members, size in whole.groups))]
    # An all-gather: every rank sends its part.
    itemsize, parts = total.view.dtype.itemsize, dict[int, int]()
    for members, size in several:
        own = shards(size // itemsize, len(members), itemsize)
        parts |= {rank: (part.stop - part.start) * itemsize for rank, part in zip(members, own)}
    return [Sent(total.kind, parts)]
