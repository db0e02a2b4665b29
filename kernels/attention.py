"""Interface of attention: ``y = softmax(scale * q k^T + bias) v``, for each sample and head; the keys that a query
reads, and tiles of arrays. No arithmetic on values.

Along one axis, a rule names the keys of a query::

    Everywhere(4, 6)          all keys

    Windows(9, 4, shift=1)    0 | 1 2 3 4 | 5 6 7 8     a query reads the keys of its own window

    Neighborhood(7, 3)        0 1 2 . . . .    query 0, clamped at the end
                              . 1 2 3 . . .    query 2
                              . . . . 4 5 6    query 6

A :class:`TileGroup` covers the tiles of one shape: queries that read the same keys up to a mask, for heads of queries
that have one head of keys each. Its arrays have the axes ::

    (samples, *tiles of each axis, heads,  *positions of a tile, channels of a head)
     ---------------- lead -------------   ----- tile --------

so that one call computes many tiles.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from ..device import wide
from . import checks
from .base import Base
from .kernel import Kernel, KernelError, any_empty, filled
from .pointwise import DropoutMask

__all__ = [
    "AttentionArrays",
    "AttentionGeometry",
    "Attentions",
    "Box",
    "Everywhere",
    "HeadGroup",
    "Interval",
    "Neighborhood",
    "Reach",
    "TileGroup",
    "TileRun",
    "Windows",
    "boxes",
    "extents_of",
    "runs",
    "span_of",
    "tile_groups",
]


@dataclass(frozen=True)
class HeadGroup:
    """Heads of local arrays: query head ``first + i * step`` reads head ``key_first + i`` of keys and values, for all i
    below `count`.
    """

    first: int
    step: int
    key_first: int
    count: int


@dataclass(frozen=True)
class AttentionGeometry:
    """Which queries read which keys, and the positions of the local arrays in the global ones.

    Attributes
    ----------
    reaches
        Rule of each spatial axis: a query reads a key if all axes allow it.
    queries, keys
        For each axis the global interval of positions that the local arrays hold.
    heads
        Global interval of the heads that the local queries hold. Local keys and values hold exactly the heads that
        these read.
    groups
        Query heads per head of keys and values: query head h reads head ``h // groups``.
    scale
        Factor of the scores.
    merge
        Whether the output arrays hold results for other keys, which are updated to those for all keys.
    dropout
        Dropout of probabilities, or None. The index of a probability in the mask is its row-major position in
        ``(samples, heads, *queries, *keys)`` of the global arrays.
    """

    reaches: tuple[Reach, ...]
    queries: tuple[Interval, ...]
    keys: tuple[Interval, ...]
    heads: Interval
    groups: int
    scale: float
    merge: bool = False
    dropout: DropoutMask | None = None

    def __post_init__(self) -> None:
        what = "attention"
        if not 1 <= len(self.reaches) == len(self.queries) == len(self.keys) <= 3:
            raise KernelError(
                f"{what}: expected a rule, an interval of queries and one of keys for each of 1 to 3 axes, got "
                f"{len(self.reaches)}, {len(self.queries)} and {len(self.keys)}"
            )
        for rule, queries, keys in zip(self.reaches, self.queries, self.keys):
            for name, (start, stop), size in (("queries", queries, rule.queries), ("keys", keys, rule.keys)):
                if not 0 <= start <= stop <= size:
                    raise KernelError(f"{what}: expected {name} within [0, {size}), got [{start}, {stop})")
        if not 0 <= self.heads[0] <= self.heads[1] or self.groups < 1:
            raise KernelError(f"{what}: expected an interval of heads in groups of at least 1, got {self}")

    @property
    def key_heads(self) -> Interval:
        """Global interval of the heads that the local keys and values hold."""
        start, stop = self.heads
        # Without queries there are no keys; floor and ceiling would give one head within a group.
        return (start // self.groups, -(-stop // self.groups)) if start < stop else (0, 0)

    @property
    def bias_extents(self) -> tuple[int, ...]:
        """Extents of a table of biases of relative positions, along the spatial axes."""
        return tuple(reach.bias_extent for reach in self.reaches)

    def head_groups(self) -> list[HeadGroup]:
        """Return the local heads in groups, in each of which every query head has its own head of keys."""
        start, stop = self.heads
        groups = []
        # Query heads at a distance of `groups` read consecutive heads of keys: a view with strides covers them.
        for first in range(start, min(stop, start + self.groups)):
            count = len(range(first, stop, self.groups))
            groups.append(HeadGroup(first - start, self.groups, first // self.groups - self.key_heads[0], count))
        return groups


@dataclass(frozen=True)
class AttentionArrays:
    """The arrays of :meth:`Attentions.attention_forward` and, with gradients, of `attention_backward`."""

    q: Any
    k: Any
    v: Any
    bias: Any
    y: Any
    lse: Any
    dy: Any = None
    dq: Any = None
    dk: Any = None
    dv: Any = None
    dbias: Any = None


class Attentions(Base):
    """Factories of attention.

    Arrays are packed. Below, ``(*S)`` are the local positions of the queries, ``(*T)`` those of the keys, ``d`` and
    ``e`` the channels of a head of the keys and of the values.
    """

    def attention_forward(
        self, q: Any, k: Any, v: Any, bias: Any, y: Any, lse: Any, geometry: AttentionGeometry
    ) -> Kernel:
        """Build ``y = softmax(scale * q k^T + bias) v`` over the keys that each query reads.

        With ``geometry.merge`` `y` and `lse` hold the results for other keys before the call, and for all keys after
        it. Dropout sets probabilities to 0 and scales the others by ``1 / (1 - rate)``; it does not change `lse`.

        Parameters
        ----------
        q, k, v
            ``(N, *S, heads * d)``, ``(N, *T, key_heads * d)``, ``(N, *T, key_heads * e)``.
        bias
            Table of biases for all heads, float ``(all heads, *bias_extents)``, or None. Query i and key j of an axis
            read entry ``(i - j) // dilation + extent - 1``.
        y
            ``(N, *S, heads * e)``; 0 for a query without keys.
        lse
            ``(N, *S, heads)``, float32, float64 with arrays of float64: the logarithm of the sum of the exponentials of
            the scores; -inf for a query without keys.
        """
        arrays = AttentionArrays(q, k, v, bias, y, lse)
        self._check_attention("attention_forward", arrays, geometry)
        if any_empty(y):
            return filled(0)
        if any_empty(k, v):
            # With merge the results for other keys stay as they are.
            return filled(0) if geometry.merge else _without_keys(y, lse)
        return self._attention_forward(arrays, geometry)

    def attention_backward(
        self,
        dy: Any,
        q: Any,
        k: Any,
        v: Any,
        bias: Any,
        y: Any,
        lse: Any,
        dq: Any,
        dk: Any,
        dv: Any,
        dbias: Any,
        geometry: AttentionGeometry,
    ) -> Kernel:
        """Build the gradients of :meth:`attention_forward` from its results `y` and `lse` for all keys.

        `dk` and `dv` are overwritten. `dq` and `dbias` are overwritten, or with ``geometry.merge`` increased. `dbias`
        is None or has the shape of `bias`; for the heads of other ranks it is 0, or with merge stays as it is.
        """
        arrays = AttentionArrays(q, k, v, bias, y, lse, dy, dq, dk, dv, dbias)
        self._check_attention("attention_backward", arrays, geometry)
        self._check_dtypes("attention_backward", q=q, dy=dy, dq=dq, dk=dk, dv=dv)
        checks.check_packed("attention_backward", dy=dy, dq=dq, dk=dk, dv=dv, dbias=dbias)
        for a, b in ((y, dy), (q, dq), (k, dk), (v, dv)):
            checks.check_same_shape("attention_backward", array=a, gradient=b)
        if any_empty(q, k, v, y):
            # No query reads these keys. With merge, `dq` and `dbias` hold the gradients for other keys.
            return filled(0, dk, dv, *(() if geometry.merge else (dq, dbias)))
        return self._attention_backward(arrays, geometry)

    def _check_attention(self, what: str, arrays: AttentionArrays, geometry: AttentionGeometry) -> None:
        g, a = geometry, arrays
        q, k, v, bias, y, lse, dbias = a.q, a.k, a.v, a.bias, a.y, a.lse, a.dbias
        self._check_dtypes(what, q=q, k=k, v=v, y=y)
        checks.check_packed(what, q=q, k=k, v=v, bias=bias, y=y, lse=lse)
        if np.dtype(lse.dtype) != wide(q.dtype):
            raise KernelError(f"{what}: expected lse of dtype {wide(q.dtype)}, got {lse.dtype}; make it of that dtype")
        if dbias is not None and bias is None:
            raise KernelError(f"{what}: expected a bias with dbias, got none; pass the table of biases")
        for name, table in (("bias", bias), ("dbias", dbias)):
            if table is not None and (tuple(table.shape[1:]) != g.bias_extents or table.shape[0] < g.heads[1]):
                raise KernelError(
                    f"{what}: expected {name} of shape (all heads, {', '.join(map(str, g.bias_extents))}), got "
                    f"{tuple(table.shape)} for the heads [{g.heads[0]}, {g.heads[1]}); pass the whole table"
                )
        if g.dropout is not None and (
            not 0 <= g.dropout.rate < 1 or not len(g.dropout.shape) == len(g.dropout.start) == 2 + 2 * len(g.reaches)
        ):
            raise KernelError(
                f"{what}: expected dropout of a rate in [0, 1) with a shape (samples, heads, *queries, *keys), got "
                f"{g.dropout}"
            )
        # The channels of an empty array have no meaning; without any pair of positions nothing else can be compared.
        if any_empty(q, y) and any_empty(k, v):
            return
        queries, keys = (tuple(b - a for a, b in intervals) for intervals in (g.queries, g.keys))
        heads, key_heads = g.heads[1] - g.heads[0], g.key_heads[1] - g.key_heads[0]
        # Array, extents of its spatial axes, and number of heads.
        expected = {"q": (q, queries, heads), "y": (y, queries, heads), "lse": (lse, queries, heads)}
        expected |= {"k": (k, keys, key_heads), "v": (v, keys, key_heads)}
        for name, (array, positions, count) in expected.items():
            if 0 in array.shape:
                continue
            if tuple(array.shape[1:-1]) != positions or not count or array.shape[-1] % count:
                raise KernelError(
                    f"{what}: expected {name} of shape (N, {', '.join(map(str, positions))}, {count} heads), got "
                    f"{tuple(array.shape)}; pass the arrays of the intervals {g.queries} and {g.keys}"
                )
        if any_empty(q, k, v, y):
            return
        widths = {name: array.shape[-1] // count for name, (array, _, count) in expected.items()}
        if widths["q"] != widths["k"] or widths["v"] != widths["y"] or widths["lse"] != 1:
            raise KernelError(
                f"{what}: expected as many channels per head in q as in k, and in v as in y, and one in lse, got "
                f"{widths}; {heads} heads of queries read {key_heads} of keys"
            )
        if len({array.shape[0] for array, _, _ in expected.values()}) > 1:
            shapes = [tuple(array.shape) for array, _, _ in expected.values()]
            raise KernelError(f"{what}: expected arrays of as many samples, got {shapes}; pass those of one batch")

    # ------------------------------------------------------------------ implemented by a backend
    @abstractmethod
    def _attention_forward(self, arrays: AttentionArrays, geometry: AttentionGeometry) -> Kernel: ...

    @abstractmethod
    def _attention_backward(self, arrays: AttentionArrays, geometry: AttentionGeometry) -> Kernel: ...


def _without_keys(y: Any, lse: Any) -> Kernel:
    def run() -> None:
        y.fill(0)
        lse.fill(-math.inf)

    return Kernel(run, "empty")


Interval = tuple[int, int]


class Reach(ABC):
    """Rule of one axis: which keys each query reads. Positions are global.

    Attributes
    ----------
    queries, keys : int
        Number of positions of the queries and of the keys in the global arrays.
    extent : int
        Upper bound of the distance of a query from a key that it reads, plus 1, in units of the dilation.
    dilation : int
        Distance between adjacent keys that a query reads.
    """

    queries: int
    keys: int
    extent: int
    dilation: int = 1

    @property
    def bias_extent(self) -> int:
        """Extent of a table of biases, which is read at ``(query - key) // dilation + extent - 1``."""
        return 2 * self.extent - 1

    @abstractmethod
    def keys_of(self, start: int, stop: int) -> Interval:
        """Return the interval from the first to the last key that the queries ``[start, stop)`` read; without queries
        ``(0, 0)``.
        """

    @abstractmethod
    def allowed(self, queries: Any, keys: Any) -> np.ndarray:
        """Return which of the positions `keys` each of the positions `queries` reads, as bool ``(queries, keys)``."""

    @abstractmethod
    def tiles(self, queries: Interval, keys: Interval) -> Iterator[tuple[range, range]]:
        """Yield groups of the queries in an interval, each with the keys in another interval that the group reads.

        A query occurs in at most one group; a query that occurs in none reads none of the keys. Both ranges have the
        step `dilation`.
        """


@dataclass(frozen=True)
class Everywhere(Reach):
    """Rule by which every query reads all keys."""

    queries: int
    keys: int

    def __post_init__(self) -> None:
        _expect(min(self.queries, self.keys) >= 0, self)

    @property
    def extent(self) -> int:  # type: ignore[override]
        return max(1, self.queries, self.keys)

    def keys_of(self, start: int, stop: int) -> Interval:
        return (0, self.keys) if start < stop else (0, 0)

    def allowed(self, queries: Any, keys: Any) -> np.ndarray:
        return np.ones((len(queries), len(keys)), bool)

    def tiles(self, queries: Interval, keys: Interval) -> Iterator[tuple[range, range]]:
        if queries[0] < queries[1] and keys[0] < keys[1]:
            yield range(*queries), range(*keys)


class _OfOneAxis(Reach):
    """Rule for queries and keys at the same positions."""

    size: int

    @property
    def queries(self) -> int:  # type: ignore[override]
        return self.size

    @property
    def keys(self) -> int:  # type: ignore[override]
        return self.size


@dataclass(frozen=True)
class Windows(_OfOneAxis):
    """Positions in windows that begin at ``shift + k * extent`` for all integers k. A query reads its own window.

    The first and the last window may be smaller: windows do not continue at the other end. Shifted windows are those of
    Liu et al., "Swin Transformer", 2021, including the mask.
    """

    size: int
    extent: int
    shift: int = 0

    def __post_init__(self) -> None:
        _expect(self.size >= 0 and self.extent >= 1, self)

    def _begin(self, position: int) -> int:
        """Return where the window of a position begins, or would begin if there were positions below 0."""
        return position - (position - self.shift) % self.extent

    def keys_of(self, start: int, stop: int) -> Interval:
        if start >= stop:
            return 0, 0
        return max(0, self._begin(start)), min(self.size, self._begin(stop - 1) + self.extent)

    def allowed(self, queries: Any, keys: Any) -> np.ndarray:
        rows, columns = ((np.asarray(p, np.int64) - self.shift) // self.extent for p in (queries, keys))
        return rows[:, None] == columns[None, :]

    def tiles(self, queries: Interval, keys: Interval) -> Iterator[tuple[range, range]]:
        # Windows at the ends of the intervals are cut there: their other positions are on other ranks.
        for begin in range(self._begin(queries[0]), queries[1], self.extent):
            end = begin + self.extent
            tile_queries, tile_keys = (range(max(a, begin), min(b, end)) for a, b in (queries, keys))
            if tile_queries and tile_keys:
                yield tile_queries, tile_keys


@dataclass(frozen=True)
class Neighborhood(_OfOneAxis):
    """Rule by which a query reads the `extent` keys around it at distances that are multiples of the dilation.

    At both ends the neighborhood is moved inwards, so that it keeps its extent; if fewer positions have the same
    remainder modulo the dilation, it is all of them. With an even extent there is one more key below than above. The
    rule is that of Hassani et al., "Neighborhood Attention Transformer", 2023, and Hassani and Shi, "Dilated
    Neighborhood Attention Transformer", 2022.
    """

    size: int
    extent: int
    dilation: int = 1

    def __post_init__(self) -> None:
        _expect(self.size >= 0 and min(self.extent, self.dilation) >= 1, self)

    def _first(self, queries: Any) -> Any:
        """Return the first key that each query reads, as an index among the keys of the same remainder."""
        index, remainder = np.divmod(queries, self.dilation)
        # Number of positions with this remainder: a dilated neighborhood is a dense one among them.
        length = (self.size - remainder + self.dilation - 1) // self.dilation
        # Half of the extent is below the query, unless an end of the axis is closer.
        return np.clip(index - self.extent // 2, 0, np.maximum(length - self.extent, 0))

    def _keys(self, query: int) -> range:
        first, remainder = int(self._first(query)), query % self.dilation
        start = first * self.dilation + remainder
        return range(start, min(self.size, start + self.extent * self.dilation), self.dilation)

    def keys_of(self, start: int, stop: int) -> Interval:
        if start >= stop:
            return 0, 0
        # The bounds grow with the query among queries of one remainder.
        firsts = [self._keys(q) for q in range(start, min(stop, start + self.dilation))]
        lasts = [self._keys(q) for q in range(max(start, stop - self.dilation), stop)]
        return min(k[0] for k in firsts), max(k[-1] for k in lasts) + 1

    def allowed(self, queries: Any, keys: Any) -> np.ndarray:
        queries, keys = np.asarray(queries, np.int64)[:, None], np.asarray(keys, np.int64)[None, :]
        first, index = self._first(queries), keys // self.dilation
        near: np.ndarray = (index >= first) & (index < first + self.extent)
        return near & (queries % self.dilation == keys % self.dilation)

    def tiles(self, queries: Interval, keys: Interval) -> Iterator[tuple[range, range]]:
        for remainder in range(self.dilation):
            tile_queries, tile_keys = (_congruent(*i, remainder, self.dilation) for i in (queries, keys))
            # Groups begin at fixed positions, so that those away from the ends are equal but for their position.
            skip = (tile_queries.start // self.dilation) % self.extent
            for first in range(-skip, len(tile_queries), self.extent):
                group = tile_queries[max(0, first) : first + self.extent]
                if group and tile_keys:
                    # The keys of the first and of the last query bound those of the group; `allowed` masks the rest.
                    start, stop = self._keys(group[0])[0], self._keys(group[-1])[-1] + 1
                    read = _congruent(max(start, keys[0]), min(stop, keys[1]), remainder, self.dilation)
                    if read:
                        yield group, read


def _expect(fits: bool, reach: Reach) -> None:
    if not fits:
        raise ValueError(f"expected sizes >= 0, extents and dilations >= 1, got {reach}; change the attention")


def _congruent(start: int, stop: int, remainder: int, modulus: int) -> range:
    """Return the positions in ``[start, stop)`` that are congruent to `remainder` modulo `modulus`."""
    return range(start + (remainder - start) % modulus, stop, modulus)


@dataclass(frozen=True)
class TileRun:
    """Tiles of one axis that differ in their position only.

    Attributes
    ----------
    queries, keys
        Positions of the first tile.
    count, step
        Number of tiles, and the distance of each from the one before it.
    allowed
        Which keys of a tile each of its queries reads, bool ``(queries, keys)``; None: all keys of the tile.
    """

    queries: range
    keys: range
    count: int = 1
    step: int = 0
    allowed: np.ndarray | None = None


def runs(reach: Reach, queries: Interval, keys: Interval) -> list[TileRun]:
    """Return the tiles of :meth:`Reach.tiles` as runs."""
    runs_of_tiles: list[TileRun] = []
    tiles = [(q, k, reach.allowed(q, k)) for q, k in reach.tiles(queries, keys)]
    # Tiles at the ends may have the extents of the others but another mask, so the mask is part of the key.
    for _, group in groupby(tiles, key=lambda t: (len(t[0]), len(t[1]), t[0].start - t[1].start, t[2].tobytes())):
        pending = list(group)
        while pending:
            q, k, allowed = pending[0]
            # A run ends where the distance to the next tile changes, as one view has one stride per axis.
            step = pending[1][0].start - q.start if len(pending) > 1 else 0
            count = 1
            while count < len(pending) and pending[count][0].start == q.start + count * step:
                count += 1
            runs_of_tiles.append(TileRun(q, k, count, step, None if allowed.all() else allowed))
            pending = pending[count:]
    return runs_of_tiles


Box = tuple[slice, ...]


def boxes(shape: Sequence[int], most: int, within: Box = (), multiple: int = 1) -> list[Box]:
    """Return boxes that cover `shape`, or the box `within` it, of at most `most` elements each, but at least 1.

    The last axes are cut last. The boxes of an axis have equal extents, where possible a multiple of `multiple`; the
    last one may be smaller. ::

        boxes((3, 4), 8)     0 0 0 0
                             0 0 0 0
                             1 1 1 1
    """
    within = within or tuple(slice(0, n) for n in shape)
    cuts: list[list[slice]] = []
    for axis in reversed(within):
        n = axis.stop - axis.start
        largest = max(1, min(n, most))
        # What is left of the limit for the axes before.
        most //= largest
        extent = -(-n // -(-n // largest)) if n else 1  # equal boxes
        rounded = -(-extent // multiple) * multiple
        extent = rounded if extent < n and rounded <= largest else extent
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
    lead : tuple of int
        Extents of the leading axes: samples, tiles of each axis, heads.
    queries, keys : tuple of int
        Extents of a tile's queries, and of its keys.
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
        # The keys of a tile span this many positions, and the next tile begins a.step after it.
        self.overlaps = any(a.count > 1 and len(a.keys) * a.keys.step > a.step for a in axes)

    def within(self, samples: slice, key_heads: slice) -> Box:
        """Return the box of the leading axes that has these samples and these local heads of keys."""
        first, count = self.heads.key_first, self.heads.count
        start, stop = (max(0, min(h - first, count)) for h in (key_heads.start, key_heads.stop))
        # The heads of keys that both have, counted from the first of this group.
        return (samples, *(slice(0, n) for n in self.lead[1:-1]), slice(start, stop))

    def of_queries(self, array: Any, heads: int, xp: Any = np) -> Any:
        """Return the view of the queries of this tile group in an array ``(N, *S, heads * channels)``."""
        starts = [a.queries.start - start for a, (start, _) in zip(self._axes, self._starts)]
        return self._view(array, heads, starts, self.queries, self.heads.first, self.heads.step, xp)

    def of_keys(self, array: Any, heads: int, xp: Any = np) -> Any:
        """Return the view of the keys of this tile group in an array ``(N, *T, heads * channels)``."""
        starts = [a.keys.start - start for a, (_, start) in zip(self._axes, self._starts)]
        return self._view(array, heads, starts, self.keys, self.heads.key_first, 1, xp)

    def _view(
        self, array: Any, heads: int, starts: list[int], tile: tuple[int, ...], first: int, step: int, xp: Any
    ) -> Any:
        # `tile_groups` may have joined the axes to one.
        spatial = array.shape[1:-1] if len(array.shape) == len(starts) + 2 else (math.prod(array.shape[1:-1]),)
        whole = array.reshape(array.shape[0], *spatial, heads, array.shape[-1] // heads)
        begin = whole[(slice(None), *(slice(s, None) for s in starts), slice(first, None))]
        n, *axes, head, channel = begin.strides
        tiles = [s * a.step for s, a in zip(axes, self._axes)]
        # Queries and keys of a rule have one dilation, so the step of the queries serves both.
        inner = [s * a.queries.step for s, a in zip(axes, self._axes)]
        # Axes: samples, tiles of each axis, heads, positions of a tile, channels of a head.
        return xp.lib.stride_tricks.as_strided(
            begin, (*self.lead, *tile, begin.shape[-1]), (n, *tiles, head * step, *inner, channel)
        )

    def margins(self) -> tuple[int, ...]:
        """Return for each axis by how much the distances in a tile exceed those of a table of biases, on either side.

        Such pairs are not allowed, but a tile includes them.
        """
        origins, bounds = self.origins([0] * len(self._axes)), [reach.bias_extent for reach in self._reaches]
        # A tile reads the entries from origin - (keys - 1) to origin + queries - 1; the table has [0, bound).
        lows = [k - 1 - origin for origin, k in zip(origins, self.keys)]
        highs = [origin + q - bound for origin, q, bound in zip(origins, self.queries, bounds)]
        return tuple(max(0, low, high) for low, high in zip(lows, highs))

    def of_bias(self, table: Any, first_head: int, margins: Sequence[int], xp: Any = np) -> Any:
        """Return the view ``(heads, *queries, *keys)`` of a table with these margins: the bias of each pair.

        `first_head` is the row of the table for the first local head. Pairs of one distance share an element: the view
        must not be written.
        """
        origins = self.origins(margins)
        begin = table[(slice(first_head + self.heads.first, None), *(slice(o, None) for o in origins))]
        head, *axes = begin.strides
        shape = (self.heads.count, *self.queries, *self.keys)
        # An entry is read at query - key: one step along the keys is one entry back.
        return xp.lib.stride_tricks.as_strided(begin, shape, (head * self.heads.step, *axes, *(-s for s in axes)))

    def windows_of(self, table: Any, first_head: int, margins: Sequence[int], query: Sequence[int], keys: Box) -> Any:
        """Return the view ``(heads, *keys)`` of a table: the biases of one query of a tile and a box of its keys."""
        first = first_head + self.heads.first
        heads = slice(first, first + (self.heads.count - 1) * self.heads.step + 1, self.heads.step)
        index = []
        for origin, i, box in zip(self.origins(margins), query, keys):
            # From high down to low, as keys rise. A stop of -1 would be the last entry, so at 0 there is none.
            low, high = origin + i - box.stop + 1, origin + i - box.start
            index.append(slice(high, low - 1 if low else None, -1))
        return table[(heads, *index)]

    def origins(self, margins: Sequence[int]) -> list[int]:
        """Return the entry of a table with these margins for the first query and the first key of a tile, by axis."""
        # `Reach.bias_extent` has the rule. A margin is before the first entry too, and so moves all entries.
        return [
            (a.queries.start - a.keys.start) // reach.dilation + reach.extent - 1 + margin
            for a, reach, margin in zip(self._axes, self._reaches, margins)
        ]

    def blocked(self) -> list[Any]:
        """Return masks of the query-key pairs of a tile that may not attend, for each axis that has such pairs.

        Each is bool, broadcast to ``(*queries, *keys)``.
        """
        blocked, ndim = [], len(self._axes)
        for i, axis in enumerate(self._axes):
            if axis.allowed is not None:
                shape = [1] * (2 * ndim)
                shape[i], shape[ndim + i] = axis.allowed.shape
                blocked.append(np.broadcast_to(~axis.allowed.reshape(shape), (*self.queries, *self.keys)))
        return blocked


def tile_groups(samples: int, geometry: AttentionGeometry, biased: bool) -> tuple[list[TileGroup], bool]:
    """Return the tile groups of an attention, and whether they cover all local queries.

    If all queries read all keys, and there is no bias, all axes are joined to one.
    """
    g = geometry
    reaches, queries, keys = g.reaches, g.queries, g.keys
    if not biased and all(isinstance(reach, Everywhere) for reach in reaches):
        # NumPy reads tiles of one axis in place. A table of biases has an index per axis, so these stay separate.
        positions = [math.prod(b - a for a, b in intervals) for intervals in (queries, keys)]
        reaches, queries, keys = (Everywhere(*positions),), ((0, positions[0]),), ((0, positions[1]),)
    axes = [runs(*axis) for axis in zip(reaches, queries, keys)]
    starts = [(q[0], k[0]) for q, k in zip(queries, keys)]
    parts = [
        TileGroup(samples, parts_of_axis, starts, reaches, heads)
        for heads in g.head_groups()
        for parts_of_axis in itertools.product(*axes)
    ]
    return parts, all(_covers(parts_of_axis, interval) for parts_of_axis, interval in zip(axes, queries))


def _covers(tiles: Sequence[TileRun], interval: Interval) -> bool:
    # No query is in two tiles, so equal numbers mean that none is missing.
    return sum(t.count * len(t.queries) for t in tiles) == interval[1] - interval[0]
