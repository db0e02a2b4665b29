"""Tiles of attention: views of arrays for groups of queries that read the same keys. No arithmetic on values.

A :class:`TileGroup` covers the tiles of one shape, for heads of queries that have one head of keys each. Its arrays
have the axes ::

    (samples, *tiles of each axis, heads,  *positions of a tile, channels of a head)
     ---------------- lead -------------   ----- tile --------

so that one call computes many tiles.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .attention import AttentionGeometry, HeadGroup
from .reach import Everywhere, Interval, Reach, TileRun, runs

__all__ = ["Box", "TileGroup", "boxes", "extents_of", "span_of", "tile_groups"]

Box = tuple[slice, ...]


def boxes(shape: Sequence[int], most: int, within: Box = ()) -> list[Box]:
    """Return boxes that cover `shape`, or the box `within` it, of at most `most` elements each, but at least 1.

    The last axes are cut last. ::

        boxes((3, 4), 8)     0 0 0 0
                             0 0 0 0
                             1 1 1 1
    """
    within = within or tuple(slice(0, n) for n in shape)
    cuts: list[list[slice]] = []
    for axis in reversed(within):
        n = axis.stop - axis.start
        extent = max(1, min(n, most))
        most //= extent
        extent = -(-n // -(-n // extent)) if n else 1  # equal boxes
        cuts.append([slice(a, min(axis.stop, a + extent)) for a in range(axis.start, axis.stop, extent)])
    return list(itertools.product(*reversed(cuts)))


def extents_of(box: Box) -> tuple[int, ...]:
    """Return the extents of a box."""
    return tuple(s.stop - s.start for s in box)


def span_of(box: Box) -> int:
    """Return the number of elements of a box."""
    return math.prod(extents_of(box))


class TileGroup:
    """Tiles of one shape for one group of heads.

    Attributes
    ----------
    lead, queries, keys : tuple of int
        Extents: samples, tiles of each axis, heads; positions of a tile's queries; of its keys.
    heads : HeadGroup
    overlaps : bool
        Whether two tiles read the same key.
    """

    def __init__(
        self,
        samples: int,
        axes: Sequence[TileRun],
        starts: Sequence[tuple[int, int]],
        reaches: Sequence[Reach],
        heads: Any,
    ) -> None:
        self._axes, self._starts, self._reaches = axes, starts, reaches
        self.heads: HeadGroup = heads
        self.lead = (samples, *(a.count for a in axes), heads.count)
        self.queries = tuple(len(a.queries) for a in axes)
        self.keys = tuple(len(a.keys) for a in axes)
        self.overlaps = any(a.count > 1 and len(a.keys) * a.keys.step > a.step for a in axes)

    def within(self, samples: slice, key_heads: slice) -> Box:
        """Return the box of the leading axes that has these samples and these heads of keys."""
        first, count = self.heads.key_first, self.heads.count
        start, stop = (max(0, min(h - first, count)) for h in (key_heads.start, key_heads.stop))
        return (samples, *(slice(0, n) for n in self.lead[1:-1]), slice(start, stop))

    def of_queries(self, array: Any, heads: int, xp: Any = np) -> Any:
        """Return the view of an array ``(N, *S, heads * channels)``."""
        starts = [a.queries.start - start for a, (start, _) in zip(self._axes, self._starts)]
        return self._view(array, heads, starts, self.queries, self.heads.first, self.heads.step, xp)

    def of_keys(self, array: Any, heads: int, xp: Any = np) -> Any:
        """Return the view of an array ``(N, *T, heads * channels)``."""
        starts = [a.keys.start - start for a, (_, start) in zip(self._axes, self._starts)]
        return self._view(array, heads, starts, self.keys, self.heads.key_first, 1, xp)

    def _view(
        self, array: Any, heads: int, starts: list[int], tile: tuple[int, ...], first: int, step: int, xp: Any
    ) -> Any:
        spatial = array.shape[1:-1] if len(array.shape) == len(starts) + 2 else (math.prod(array.shape[1:-1]),)
        whole = array.reshape(array.shape[0], *spatial, heads, array.shape[-1] // heads)
        begin = whole[(slice(None), *(slice(s, None) for s in starts), slice(first, None))]
        n, *axes, head, channel = begin.strides
        tiles = [s * a.step for s, a in zip(axes, self._axes)]
        inner = [s * a.queries.step for s, a in zip(axes, self._axes)]
        return xp.lib.stride_tricks.as_strided(
            begin, (*self.lead, *tile, begin.shape[-1]), (n, *tiles, head * step, *inner, channel)
        )

    def margins(self) -> tuple[int, ...]:
        """Return for each axis by how much the distances in a tile exceed those of a table of biases, on either side.

        Such pairs are not allowed, but a tile includes them.
        """
        origins, bounds = self.origins([0] * len(self._axes)), [reach.bias_extent for reach in self._reaches]
        lows = [k - 1 - origin for origin, k in zip(origins, self.keys)]
        highs = [origin + q - bound for origin, q, bound in zip(origins, self.queries, bounds)]
        return tuple(max(0, low, high) for low, high in zip(lows, highs))

    def of_bias(self, table: Any, first_head: int, margins: Sequence[int], xp: Any = np) -> Any:
        """Return the view ``(heads, *queries, *keys)`` of a table with these margins: what each pair adds.

        Pairs of one distance share an element: the view must not be written.
        """
        origins = self.origins(margins)
        begin = table[(slice(first_head + self.heads.first, None), *(slice(o, None) for o in origins))]
        head, *axes = begin.strides
        shape = (self.heads.count, *self.queries, *self.keys)
        return xp.lib.stride_tricks.as_strided(begin, shape, (head * self.heads.step, *axes, *(-s for s in axes)))

    def windows_of(self, table: Any, first_head: int, margins: Sequence[int], query: Sequence[int], keys: Box) -> Any:
        """Return the view ``(heads, *keys)`` of a table: what one query of a tile and a box of its keys add."""
        first = first_head + self.heads.first
        heads = slice(first, first + (self.heads.count - 1) * self.heads.step + 1, self.heads.step)
        index = []
        for origin, i, box in zip(self.origins(margins), query, keys):
            low, high = origin + i - box.stop + 1, origin + i - box.start
            index.append(slice(high, low - 1 if low else None, -1))
        return table[(heads, *index)]

    def origins(self, margins: Sequence[int]) -> list[int]:
        """Return the entry of a table with these margins for the first query and the first key of a tile, by axis."""
        return [
            (a.queries.start - a.keys.start) // reach.dilation + reach.extent - 1 + margin
            for a, reach, margin in zip(self._axes, self._reaches, margins)
        ]

    def blocked(self) -> list[Any]:
        """Return for each axis that allows not all keys of a tile the pairs that it does not allow.

        Each is bool, broadcast to ``(*queries, *keys)``.
        """
        found, ndim = [], len(self._axes)
        for i, axis in enumerate(self._axes):
            if axis.allowed is not None:
                shape = [1] * (2 * ndim)
                shape[i], shape[ndim + i] = axis.allowed.shape
                found.append(np.broadcast_to(~axis.allowed.reshape(shape), (*self.queries, *self.keys)))
        return found


def tile_groups(samples: int, geometry: AttentionGeometry, biased: bool) -> tuple[list[TileGroup], bool]:
    """Return the parts of an attention, and whether they cover all local queries.

    Axes on which all queries read all keys are joined to one if there is no bias.
    """
    g = geometry
    reaches, queries, keys = g.reaches, g.queries, g.keys
    if not biased and all(isinstance(reach, Everywhere) for reach in reaches):
        positions = [math.prod(b - a for a, b in intervals) for intervals in (queries, keys)]
        reaches, queries, keys = (Everywhere(*positions),), ((0, positions[0]),), ((0, positions[1]),)
    axes = [runs(*axis) for axis in zip(reaches, queries, keys)]
    starts = [(q[0], k[0]) for q, k in zip(queries, keys)]
    parts = [
        TileGroup(samples, some, starts, reaches, heads)
        for heads in g.head_groups()
        for some in itertools.product(*axes)
    ]
    return parts, all(_covers(some, interval) for some, interval in zip(axes, queries))


def _covers(tiles: Sequence[TileRun], interval: Interval) -> bool:
    return sum(t.count * len(t.queries) for t in tiles) == interval[1] - interval[0]
