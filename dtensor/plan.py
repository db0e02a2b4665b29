"""Exchange plans: which box travels from which rank to which. Pure arithmetic, no communication.

A plan is computed by every rank from the same boxes, so nothing has to be negotiated. Every
element of a target box comes from one source: the rank itself if it has it, else the nearest
rank behind it in the ring of ranks. Elements that no rank owns (padding) are left alone. A halo
wider than the neighbor's block is nothing special: its boxes meet more than one owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from halograd.dtensor.box import Box

__all__ = ["Piece", "plan_exchange", "subtract"]


@dataclass(frozen=True, order=True)
class Piece:
    """One box that travels from rank `source` to rank `target` (the same rank: a local copy)."""

    source: int
    target: int
    box: Box


def subtract(box: Box, other: Box) -> list[Box]:
    """`box` without `other`, as disjoint boxes.

    >>> subtract(Box((0, 0), (2, 3)), Box((1, 1), (2, 9)))
    [Box((0, 0), (1, 3)), Box((1, 0), (2, 1))]
    """
    common = box & other
    if not common.size:
        return [box] if box.size else []
    pieces = []
    rest = box
    for axis, ((a, b), (c, d)) in enumerate(zip(box.ranges, common.ranges)):
        if a < c:
            pieces.append(rest.replace(axis, a, c))
        if d < b:
            pieces.append(rest.replace(axis, d, b))
        rest = rest.replace(axis, c, d)
    return pieces


def plan_exchange(sources: Sequence[Box], targets: Sequence[Box], rank: int, *, summed: bool = False) -> list[Piece]:
    """Pieces that `rank` sends, receives or copies, in an order that sender and receiver share.

    Parameters
    ----------
    sources, targets
        Box per rank, in the same global indices. Sources may overlap (replicas), targets may too.
    rank
        The rank whose pieces are wanted; all ranks' pieces together are the whole exchange.
    summed
        The sources are summands: every overlap travels, the target is their sum.
    """
    if len(sources) != len(targets):
        raise ValueError(f"expected one source and one target box per rank, got {len(sources)} and {len(targets)}")
    replicas = not summed and _overlap(sources)
    pieces: set[Piece] = set()
    if not replicas:
        for other in range(len(sources)):
            pieces.update(_meet(other, rank, sources, targets))
            pieces.update(_meet(rank, other, sources, targets))
        return sorted(pieces)
    for target in range(len(targets)):
        chosen = _choose(target, sources, targets[target])
        pieces.update(p for p in chosen if rank in (p.source, p.target))
    return sorted(pieces)


def _meet(source: int, target: int, sources: Sequence[Box], targets: Sequence[Box]) -> Iterable[Piece]:
    common = sources[source] & targets[target]
    if common.size:
        yield Piece(source, target, common)


def _overlap(boxes: Sequence[Box]) -> bool:
    full = [b for b in boxes if b.size]
    return any((a & b).size for i, a in enumerate(full) for b in full[i + 1 :])


def _choose(target: int, sources: Sequence[Box], wanted: Box) -> list[Piece]:
    """Cover `wanted` from replicas: the target itself first, then the ranks behind it in the ring."""
    missing = [wanted] if wanted.size else []
    pieces = []
    for step in range(len(sources)):
        if not missing:
            break
        source = (target - step) % len(sources)
        left = []
        for box in missing:
            common = box & sources[source]
            if common.size:
                pieces.append(Piece(source, target, common))
            left.extend(subtract(box, sources[source]))
        missing = left
    return pieces
