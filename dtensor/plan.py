"""Exchange plans: the boxes that travel between ranks. Pure arithmetic, no communication.

Every rank computes its plan from the same blocks, so the ranks negotiate nothing. Blocks are products of intervals, so
the ranks whose boxes intersect a given box are a product of the intersecting parts of each axis: a rank finds its peers
without a loop over all ranks. A halo wider than the neighbor's block needs no special code: its box intersects the
boxes of several owners.

Unless sources are summands, every element of a target comes from one source. A rank that owns its whole target copies
it. Otherwise, if several ranks own an element, the rank in the first part of each axis that holds the element sends it.
Elements that no rank owns (padding) are in no message.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from .box import Box
from .layout import Blocks, Interval, Intervals

__all__ = ["Piece", "has_peers", "owners", "plan_exchange"]


@dataclass(frozen=True, order=True)
class Piece:
    """Box that travels from rank `source` to rank `target`; a local copy if they are the same rank."""

    source: int
    target: int
    box: Box


def plan_exchange(sources: Blocks, targets: Blocks, rank: int, *, summed: bool = False) -> list[Piece]:
    """Return the pieces that `rank` sends, receives or copies, in an order that sender and receiver share.

    Parameters
    ----------
    sources, targets
        Box per rank, in the same global indices. Sources may overlap (replicas), and so may targets.
    rank
        Rank whose pieces are returned; the pieces of all ranks form the whole exchange.
    summed
        Whether sources are summands. If so, every overlap travels, and the target is their sum.

    Raises
    ------
    ValueError
        If the blocks have different numbers of ranks or axes, or if replicas overlap partially along an axis and are
        not consecutive.
    """
    if sources.size != targets.size or len(sources.axes) != len(targets.axes):
        raise ValueError(
            f"expected sources and targets of one number of ranks and axes, got {sources.size} and {targets.size} "
            f"ranks, {len(sources.axes)} and {len(targets.axes)} axes"
        )
    if summed or not sources.overlapping:
        received = [Piece(peer, rank, box) for peer, box in intersecting(sources, targets[rank])]
        # The piece that stays on this rank is among the received ones.
        sent = [Piece(rank, peer, box) for peer, box in intersecting(targets, sources[rank]) if peer != rank]
        # By source, target and box, so that both ranks of a message have its pieces in one order.
        return sorted(received + sent)
    first = owners(sources)
    sent = [
        Piece(rank, peer, box)
        for peer, box in intersecting(targets, first[rank])
        # A peer that owns its whole target copies it.
        if peer != rank and not sources[peer].contains(targets[peer])
    ]
    if sources[rank].contains(targets[rank]):
        own = [Piece(rank, rank, targets[rank])] if targets[rank].size else []
        return sorted(own + sent)
    return sorted([Piece(peer, rank, box) for peer, box in intersecting(first, targets[rank])] + sent)


def has_peers(sources: Blocks, targets: Blocks, rank: int) -> bool:
    """Return whether a piece of :func:`plan_exchange` travels between `rank` and another rank."""
    # With replicas, not every intersection is a message.
    if sources.overlapping:
        return any(piece.source != piece.target for piece in plan_exchange(sources, targets, rank))
    return _intersects_others(sources, targets[rank], rank) or _intersects_others(targets, sources[rank], rank)


def _intersects_others(blocks: Blocks, box: Box, rank: int) -> bool:
    """Return whether the box of another rank than `rank` intersects this box."""
    if not box.size:
        return False
    parts_of = [_common_parts(axis, interval) for axis, interval in zip(blocks.axes, box.ranges)]
    # With several ranks, at least one is another; with none, some axis has no common part.
    if math.prod(map(len, parts_of)) != 1:
        return all(parts_of)
    only = 0
    for axis, ((part, _),) in zip(blocks.axes, parts_of):
        only = only * len(axis) + part
    return only != rank


def intersecting(blocks: Blocks, box: Box) -> Iterable[tuple[int, Box]]:
    """Yield the ranks whose boxes intersect this box, each with the common box."""
    if not box.size:
        return
    parts_of = [_common_parts(axis, interval) for axis, interval in zip(blocks.axes, box.ranges)]
    for parts in itertools.product(*parts_of):
        # Ranks are numbered row-major over the parts.
        rank = 0
        for axis, (part, _) in zip(blocks.axes, parts):
            rank = rank * len(axis) + part
        yield rank, Box.of_ranges([common for _, common in parts])


@lru_cache(maxsize=65536)
def _common_parts(axis: Intervals, interval: Interval) -> tuple[tuple[int, Interval], ...]:
    """Return the parts of an axis that intersect an interval, each with the common interval."""
    start, stop = interval
    overlaps = ((k, (max(a, start), min(b, stop))) for k, (a, b) in enumerate(axis))
    return tuple((k, (a, b)) for k, (a, b) in overlaps if b > a)


def owners(blocks: Blocks) -> Blocks:
    """Return the blocks without the elements that an earlier part of an axis holds already, so that one rank owns each
    element.

    >>> owners(Blocks((((0, 4), (0, 4), (3, 6)),)))[2]
    Box((4,), (6,))
    """
    return Blocks([_first(axis) for axis in blocks.axes], blocks.size)


@lru_cache(maxsize=16384)
def _first(axis: Intervals) -> Intervals:
    covered: list[Interval] = []  # union of the intervals so far, in order; intervals that touch are joined
    firsts = []
    for a, b in axis:
        # The first covered interval that ends at `a` or after it: earlier ones neither overlap nor touch this one.
        first = last = bisect.bisect_left(covered, a, key=lambda interval: interval[1])
        rest, at = list[Interval](), a
        while last < len(covered) and covered[last][0] <= b:
            c, d = covered[last]
            if c > at:
                rest.append((at, c))
            at, last = max(at, d), last + 1
        if at < b:
            rest.append((at, b))
        if len(rest) > 1:
            raise ValueError(f"replicas: expected intervals that follow one another or are equal, got {axis[:8]}")
        firsts.append(rest[0] if rest else (a, a))
        if rest:
            joined = [(a, b), *covered[first:last]]
            covered[first:last] = [(min(c for c, _ in joined), max(d for _, d in joined))]
    return tuple(firsts)
