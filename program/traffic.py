"""Messages and bytes of an exchange from owned boxes to needed boxes, without making it.

An exchange sends one message per pair of ranks whose boxes meet (`halograd.dtensor.plan`). With boxes that are
products of intervals (:class:`Blocks`), the overlap of two ranks is the product of overlaps by axes: what a rank sends
is a product of sums over one axis each, less what it keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from ..dtensor import Groups
from ..dtensor.blocks import Blocks, outer, padded

__all__ = ["ExchangeTraffic", "GroupSum", "Move"]

_FIRST, _ONE, _NONE = np.zeros(1, np.int64), np.ones(1, np.int64), np.zeros(0, np.int64)


@dataclass(frozen=True)
class ExchangeTraffic:
    """What the ranks ``0 .. P-1`` send in one exchange.

    Attributes
    ----------
    messages, bytes
        Arrays of `P` integers; bytes in [B].
    """

    messages: np.ndarray
    bytes: np.ndarray


@dataclass(frozen=True)
class Move:
    """An exchange: what every rank owns goes to all who need it.

    Attributes
    ----------
    source, target
        Boxes before and after. Sources are disjoint, or summands that all travel.
    itemsize
        Of one element [B].
    kind
        Under which `comm.counters` books it: ``"halo"``, ``"channel"`` or ``"redistribute"``.
    """

    source: Blocks
    target: Blocks
    itemsize: int
    kind: str = "halo"

    def __hash__(self) -> int:
        return hash((hash(self.source), hash(self.target), self.itemsize))

    @cached_property
    def adjoint(self) -> Move:
        """The same exchange, backward."""
        return Move(self.target, self.source, self.itemsize, self.kind)

    @cached_property
    def _overlaps(self) -> tuple[np.ndarray, ...]:
        """Per axis, elements in common of every source and every target part."""
        return tuple(overlap(a, b) for a, b in zip(self.source.axes, self.target.axes))

    @property
    def idle(self) -> bool:
        """Whether every rank has what it needs."""
        return self.source == self.target or not self.sent(max(self.source.placed, self.target.placed)).messages.any()

    def sent(self, ranks: int) -> ExchangeTraffic:
        """What every rank of ``0 .. ranks - 1`` sends."""
        return self._sent(ranks)

    def received(self, ranks: int) -> ExchangeTraffic:
        """What every rank of ``0 .. ranks - 1`` receives."""
        return self.adjoint._sent(ranks)

    def _sent(self, ranks: int) -> ExchangeTraffic:
        messages = outer([(o > 0).sum(axis=1) for o in self._overlaps])
        elements = outer([o.sum(axis=1) for o in self._overlaps])
        own = self._kept()
        messages[: len(own)] -= own > 0
        elements[: len(own)] -= own
        return ExchangeTraffic(padded(messages, ranks), padded(elements * self.itemsize, ranks))

    def _kept(self) -> np.ndarray:
        """Elements per rank that stay where they are."""
        ranks = min(self.source.placed, self.target.placed)
        own = np.ones(ranks, np.int64)
        for o, a, b in zip(self._overlaps, places(self.source.grid), places(self.target.grid)):
            own *= o[a[:ranks], b[:ranks]]
        return own

    def peers(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Ranks to which `rank` sends, and how much [B]; itself is not among them."""
        at = self.source.coordinates(rank)
        if at is None:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        ranks, elements = _FIRST, _ONE
        for i, a, b, parts in zip(at, self.source.axes, self.target.axes, self.target.grid):
            met, common = row(a[i], b)
            if parts == 1:
                elements = elements * common if len(met) else _NONE
                ranks = ranks if len(met) else _NONE
            else:
                ranks = (ranks[:, None] * parts + met).reshape(-1)
                elements = (elements[:, None] * common).reshape(-1)
        others = ranks != rank
        return ranks[others], elements[others] * self.itemsize


@dataclass(frozen=True)
class GroupSum:
    """All-reduces that run at the same time, one in each of some disjoint groups of ranks.

    Attributes
    ----------
    kind
        Under which `comm.counters` books it.
    groups
        The ranks of every group, and what they sum [B].
    """

    kind: str
    groups: tuple[tuple[range, int], ...]

    @classmethod
    def of(cls, kind: str, groups: Groups, sizes: Sequence[int]) -> GroupSum:
        """The sum over `groups`, of so many bytes by their numbers [B]."""
        return cls(kind, tuple((groups.members(color), int(sizes[color])) for color in range(groups.count)))

    def sent(self, ranks: int) -> ExchangeTraffic:
        """What every rank sends: a reduction is booked as one message of its buffer."""
        messages, nbytes = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
        for members, size in self.groups:
            if len(members) > 1 and size:
                messages[members.start : members.stop : members.step] = 1
                nbytes[members.start : members.stop : members.step] = size
        return ExchangeTraffic(messages, nbytes)

    @property
    def largest(self) -> tuple[int, range]:
        """The group that takes longest: most bytes, of those the farthest apart."""
        members, size = max(self.groups, key=lambda g: (g[1] * (len(g[0]) > 1), len(g[0]), g[0][-1] - g[0][0]))
        return size, members


@lru_cache(maxsize=16384)
def overlap(source: tuple[tuple[int, int], ...], target: tuple[tuple[int, int], ...]) -> np.ndarray:
    """Elements in common of every interval of one axis with every interval of another."""
    a, b = np.array(source, np.int64), np.array(target, np.int64)
    low = np.maximum(a[:, None, 0], b[None, :, 0])
    high = np.minimum(a[:, None, 1], b[None, :, 1])
    return np.maximum(0, high - low)


@lru_cache(maxsize=65536)
def row(own: tuple[int, int], others: tuple[tuple[int, int], ...]) -> tuple[np.ndarray, np.ndarray]:
    """Which intervals one interval meets, and in how many elements."""
    common = overlap((own,), others)[0]
    (met,) = np.nonzero(common)
    return met, common[met]


@lru_cache(maxsize=4096)
def places(grid: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """Per axis, the coordinate of every rank of a grid."""
    total = 1
    for parts in grid:
        total *= parts
    return np.unravel_index(np.arange(total), grid)
