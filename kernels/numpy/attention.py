"""Attention in NumPy, by tiles of queries and keys. The scores of a tile exist, those of all pairs never do.

Forward keeps for each query the maximum of its scores, the sum of their exponentials and the sum of the values weighted
by them, and scales both sums down where a later tile has a larger maximum (Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018). Backward computes the probabilities again, from the logarithm of the sum (Dao et al.,
"FlashAttention", 2022).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..attention import AttentionArrays, AttentionGeometry, Attentions
from ..kernel import Kernel, ScratchKernel
from ..memory import Scratch, nbytes_of, round_up
from ..tiles import Box, TileGroup, boxes, extents_of, span_of, tile_groups
from .pointwise import axis_counters, first_counter, mix64_inplace

__all__ = ["NumpyAttention"]

#: Largest number of queries and of keys of a tile, and of scores that are computed at a time.
QUERIES, KEYS, SCORES = 128, 512, 1 << 17


class _Tiles:
    """Tiles of one part in the order of computation, with the views of its arrays."""

    def __init__(self, part: TileGroup, arrays: AttentionArrays, geometry: AttentionGeometry, mask: Any) -> None:
        self.part, a = part, arrays
        heads, key_heads = (b - a for a, b in (geometry.heads, geometry.key_heads))
        self.of = {
            name: part.of_queries(array, heads)
            for name, array in {"q": a.q, "y": a.y, "lse": a.lse, "dy": a.dy, "dq": a.dq}.items()
            if array is not None
        }
        keyed = {"k": a.k, "v": a.v, "dk": a.dk, "dv": a.dv}
        self.of.update({n: part.of_keys(array, key_heads) for n, array in keyed.items() if array is not None})
        self.bias: Any = None
        self.counters = None if mask is None else (part.of_queries(mask[0], heads), part.of_keys(mask[1], key_heads))
        self.blocked = part.blocked()
        self.rows, self.columns = boxes(part.queries, QUERIES), boxes(part.keys, KEYS)
        largest = max(map(span_of, self.rows)) * max(map(span_of, self.columns))
        self.leads = boxes(part.lead, SCORES // largest)

    def sizes(self) -> tuple[int, int, int]:
        """Return the largest number of tiles, of queries and of keys that are computed at a time."""
        leads, rows, columns = (max(map(span_of, some)) for some in (self.leads, self.rows, self.columns))
        return leads, rows, columns


class _Run:
    """One pass over all tiles, forward or backward: `parts`, and buffers by name in scratch memory.

    Sizes of the buffers are those of the largest tile.
    """

    def __init__(self, arrays: AttentionArrays, geometry: AttentionGeometry, scratch: Scratch) -> None:
        self.a, self.g, self.scratch = arrays, geometry, scratch
        self.dtype = arrays.q.dtype
        self._counters = None if geometry.dropout is None else _counters(arrays, geometry)
        parts, self.covers = tile_groups(arrays.q.shape[0], geometry, arrays.bias is not None)
        self.parts = [_Tiles(part, arrays, geometry, self._counters) for part in parts]
        margins = [(0,) * len(geometry.reaches), *(t.part.margins() for t in self.parts)]
        self.margins = tuple(map(max, zip(*margins)))
        self._buffers: dict[tuple[Any, ...], Any] = {}
        self._offsets: dict[str, int] = {}
        self.nbytes = 0
        self.workspace_bytes = sum(c.nbytes for c in self._counters or ())
        d, e = (p[0].of[n].shape[-1] if (p := self.parts) else 1 for n in ("k", "v"))
        most = [tuple(t.sizes()) for t in self.parts] or [(0, 0, 0)]
        wide, long, square = (
            max(lead * f(rows, columns) for lead, rows, columns in most)
            for f in (lambda r, c: r, lambda r, c: c, lambda r, c: r * c)
        )
        self._sizes = {"row": wide, "d_row": wide * d, "e_row": wide * e, "d_column": long * d, "e_column": long * e}
        self._sizes["score"] = square
        if arrays.bias is not None:
            self.table = (arrays.bias.shape[0], *(n + 2 * m for n, m in zip(arrays.bias.shape[1:], self.margins)))
            self._sizes["table"] = math.prod(self.table)
            if any(self.margins):
                self.reserve("table", "bias", dtype=arrays.bias.dtype)

    def reserve(self, size: str, *names: str, dtype: Any = None) -> None:
        """Reserve buffers of one of the sizes."""
        for name in names:
            self._offsets[name] = self.nbytes
            self.nbytes += round_up(nbytes_of((self._sizes[size],), dtype or self.dtype))

    def buffer(self, name: str, shape: tuple[int, ...], dtype: Any = None) -> Any:
        """Return a reserved buffer as an array of this shape."""
        found = self._buffers.get((name, shape))
        if found is None:
            found = self.scratch.view(shape, dtype or self.dtype, self._offsets[name])
            self._buffers[name, shape] = found
        return found

    def bind(self) -> Callable[[], None]:
        self._buffers.clear()
        bias = self.a.bias
        if bias is None:
            return self.run
        padded = self.buffer("bias", self.table, bias.dtype) if any(self.margins) else bias
        for tiles in self.parts:
            tiles.bias = tiles.part.of_bias(padded, self.g.heads[0], self.margins)
        if padded is bias:
            return self.run

        def run() -> None:
            padded.fill(0)
            np.copyto(self._inside(padded), bias)
            self.run()

        return run

    def _inside(self, table: Any) -> Any:
        """Return a table with margins without them."""
        return table[(slice(None), *(slice(m, n - m) for m, n in zip(self.margins, table.shape[1:])))]

    def run(self) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------------ tiles
    def copied(self, tiles: _Tiles, name: str, box: Box) -> Any:
        """Return a box of a view as ``(*lead, positions, channels)``: the view itself with one axis, else a copy."""
        view = tiles.of[name][box]
        ndim = len(tiles.part.queries)
        if ndim == 1:
            return view
        buffer = self.buffer(name, view.shape)
        np.copyto(buffer, view)
        return _rows(buffer, ndim)

    def scaled(self, tiles: _Tiles, box: Box) -> Any:
        """Return a copy of the queries of a box, times the scale, as ``(*lead, positions, channels)``."""
        view = tiles.of["q"][box]
        buffer = self.buffer("q", view.shape)
        np.multiply(view, self.dtype.type(self.g.scale), out=buffer)
        return _rows(buffer, len(tiles.part.queries))

    def scores(self, tiles: _Tiles, lead: Box, rows: Box, columns: Box, q: Any, k: Any) -> Any:
        """Return the scores of a tile with bias, -inf for pairs that are not allowed: ``(*lead, queries, keys)``."""
        s = self.buffer("s", (*extents_of(lead), q.shape[-2], k.shape[-2]))
        np.matmul(q, k.swapaxes(-1, -2), out=s)
        if tiles.bias is None and not tiles.blocked:
            return s
        by_axes = s.reshape(*extents_of(lead), *extents_of(rows), *extents_of(columns))
        if tiles.bias is not None:
            np.add(by_axes, tiles.bias[(lead[-1], *rows, *columns)], out=by_axes, casting="same_kind")
        for blocked in tiles.blocked:
            np.copyto(by_axes, -np.inf, where=blocked[rows + columns])
        return s

    def dropped(self, tiles: _Tiles, lead: Box, rows: Box, columns: Box, first: np.uint64) -> Any:
        """Return which probabilities of a tile are dropped, bool ``(*lead, queries, keys)``."""
        assert tiles.counters is not None and self.g.dropout is not None
        ndim, of_rows, of_columns = len(rows), tiles.counters[0][lead + rows], tiles.counters[1][lead + columns]
        n = len(lead)
        left = of_rows[(..., *(None,) * ndim)][(*(slice(None),) * (n + ndim), 0)]
        right = of_columns[(*(slice(None),) * n, *(None,) * ndim, ..., 0)]
        shape = (*extents_of(lead), *extents_of(rows), *extents_of(columns))
        z, work = self.buffer("hash", shape, np.uint64), self.buffer("hash2", shape, np.uint64)
        out = self.buffer("dropped", shape, np.bool_)
        np.add(left, right, out=z)
        np.add(z, first, out=z)
        mix64_inplace(z, work)
        np.less(z, np.uint64(int(self.g.dropout.rate * 2**64)), out=out)
        return out.reshape(*extents_of(lead), span_of(rows), span_of(columns))

    def _reserve_dropout(self) -> None:
        if self.g.dropout is not None:
            self.reserve("score", "hash", "hash2", dtype=np.uint64)
            self.reserve("score", "dropped", dtype=np.bool_)

    def drop(self, p: Any, dropped: Any) -> None:
        """Apply dropout to an array of probabilities, or to their gradient."""
        assert self.g.dropout is not None
        np.multiply(p, self.dtype.type(1 / (1 - self.g.dropout.rate)), out=p)
        np.copyto(p, 0, where=dropped)


class _Forward(_Run):
    """Forward pass."""

    def __init__(self, arrays: AttentionArrays, geometry: AttentionGeometry, scratch: Scratch) -> None:
        super().__init__(arrays, geometry, scratch)
        self.reserve("d_row", "q")
        self.reserve("d_column", "k")
        self.reserve("e_column", "v")
        self.reserve("e_row", "sum", "weighted")
        self.reserve("row", "peak", "total", "new", "more")
        self.reserve("score", "s")
        self._reserve_dropout()

    def run(self) -> None:
        a, first = self.a, np.uint64(0) if self.g.dropout is None else first_counter(self.g.dropout)
        if not self.covers and not self.g.merge:
            a.y.fill(0)
            a.lse.fill(-np.inf)
        # -inf minus a finite number and exponentials that are 0 are no faults.
        with np.errstate(all="ignore"):
            for tiles in self.parts:
                for lead, rows in itertools.product(tiles.leads, tiles.rows):
                    self._tile(tiles, lead, rows, first)

    def _tile(self, tiles: _Tiles, lead: Box, rows: Box, first: np.uint64) -> None:
        q, shape = self.scaled(tiles, lead + rows), (*extents_of(lead), span_of(rows))
        peak, total, new, more = (self.buffer(n, (*shape, 1)) for n in ("peak", "total", "new", "more"))
        y, lse = tiles.of["y"][lead + rows], tiles.of["lse"][lead + rows]
        sums = self.buffer("sum", (*shape, y.shape[-1]))
        self._begin(y, lse, peak, total, sums)
        for columns in tiles.columns:
            k, v = self.copied(tiles, "k", lead + columns), self.copied(tiles, "v", lead + columns)
            p = self.scores(tiles, lead, rows, columns, q, k)
            np.max(p, axis=-1, keepdims=True, out=new)
            np.maximum(new, peak, out=new)
            np.subtract(p, new, out=p)
            np.exp(p, out=p)
            np.subtract(peak, new, out=peak)
            np.exp(peak, out=peak)
            np.multiply(total, peak, out=total)
            np.multiply(sums, peak, out=sums)
            np.copyto(peak, new)
            np.add(total, np.sum(p, axis=-1, keepdims=True, out=more), out=total)
            if self.g.dropout is not None:
                self.drop(p, self.dropped(tiles, lead, rows, columns, first))
            weighted = self.buffer("weighted", sums.shape)
            np.matmul(p, v, out=weighted)
            np.add(sums, weighted, out=sums)
        # A query with keys has a total of at least 1: that of the largest score.
        np.maximum(total, 1, out=more)
        np.divide(sums, more, out=sums)
        np.copyto(y, sums.reshape(y.shape))
        np.log(total, out=total)
        np.add(peak, total, out=total)
        np.copyto(lse, total.reshape(lse.shape))

    def _begin(self, y: Any, lse: Any, peak: Any, total: Any, sums: Any) -> None:
        """Start from the results for other keys, or from no keys. The maximum of no scores is the least finite number,
        so that its difference from -inf is -inf, not NaN.
        """
        least = np.finfo(self.dtype).min
        if not self.g.merge:
            peak.fill(least)
            total.fill(0)
            sums.fill(0)
            return
        np.copyto(peak.reshape(lse.shape), lse)
        np.not_equal(peak, -np.inf, out=total, casting="unsafe")
        np.maximum(peak, least, out=peak)
        np.copyto(sums.reshape(y.shape), y)


class _Backward(_Run):
    """Backward pass."""

    def __init__(self, arrays: AttentionArrays, geometry: AttentionGeometry, scratch: Scratch) -> None:
        super().__init__(arrays, geometry, scratch)
        self.reserve("d_row", "q", "dq", "dq_part")
        self.reserve("e_row", "y", "dy")
        self.reserve("d_column", "k", "dk")
        self.reserve("e_column", "v", "dv")
        self.reserve("row", "lse", "delta")
        self.reserve("score", "s", "ds")
        self._reserve_dropout()
        if arrays.dbias is not None:
            # Sums over all tiles of a part, before they are distributed over the table.
            pairs = [t.part.heads.count * max(map(span_of, t.rows)) * max(map(span_of, t.columns)) for t in self.parts]
            self._sizes["pairs"] = max(pairs, default=0)
            self.reserve("pairs", "pairs", "more_pairs", dtype=np.float64)
            self.reserve("table", "table", dtype=np.float64)

    def run(self) -> None:
        a, first = self.a, np.uint64(0) if self.g.dropout is None else first_counter(self.g.dropout)
        a.dk.fill(0)
        a.dv.fill(0)
        if not self.covers and not self.g.merge:
            a.dq.fill(0)
        table = None if a.dbias is None else self.buffer("table", self.table, np.float64)
        if table is not None:
            table.fill(0)
        with np.errstate(all="ignore"):
            for tiles in self.parts:
                for rows in tiles.rows:
                    self._rows(tiles, rows, first, table)
        if table is None:
            return
        if self.g.merge:
            np.add(a.dbias, self._inside(table), out=a.dbias, casting="same_kind")
        else:
            np.copyto(a.dbias, self._inside(table), casting="same_kind")

    def _rows(self, tiles: _Tiles, rows: Box, first: np.uint64, table: Any) -> None:
        """Compute all tiles of a box of queries."""
        # With one box of keys, the gradients of scores of all tiles are summed before they go to the table.
        whole = len(tiles.columns) == 1
        if table is not None and whole:
            self._pairs(tiles, rows, tiles.columns[0]).fill(0)
        for lead in tiles.leads:
            self._tile(tiles, lead, rows, first, table)
        if table is not None and whole:
            self._distribute(tiles, rows, tiles.columns[0], table)

    def _pairs(self, tiles: _Tiles, rows: Box, columns: Box, name: str = "pairs") -> Any:
        shape = (tiles.part.heads.count, span_of(rows), span_of(columns))
        return self.buffer(name, shape, np.float64)

    def _tile(self, tiles: _Tiles, lead: Box, rows: Box, first: np.uint64, table: Any) -> None:
        q, dy, delta, lse = self._begin(tiles, lead, rows)
        dq, part = self.buffer("dq", q.shape), self.buffer("dq_part", q.shape)
        for i, columns in enumerate(tiles.columns):
            k, v = self.copied(tiles, "k", lead + columns), self.copied(tiles, "v", lead + columns)
            p = self.scores(tiles, lead, rows, columns, q, k)
            np.subtract(p, lse, out=p)
            np.exp(p, out=p)
            ds = self.buffer("ds", p.shape)
            np.matmul(dy, v.swapaxes(-1, -2), out=ds)
            dropped = None if self.g.dropout is None else self.dropped(tiles, lead, rows, columns, first)
            if dropped is not None:
                self.drop(ds, dropped)
            np.subtract(ds, delta, out=ds)
            np.multiply(ds, p, out=ds)
            if dropped is not None:
                self.drop(p, dropped)
            self._add(tiles, "dv", lead, columns, p, dy)
            self._add(tiles, "dk", lead, columns, ds, q)
            np.matmul(ds, k, out=part if i else dq)
            if i:
                np.add(dq, part, out=dq)
            if table is not None:
                self._sum_pairs(tiles, lead, rows, columns, ds, table)
        np.multiply(dq, self.dtype.type(self.g.scale), out=dq)
        target = tiles.of["dq"][lead + rows]
        if self.g.merge:
            np.add(target, dq.reshape(target.shape), out=target)
        else:
            np.copyto(target, dq.reshape(target.shape))

    def _begin(self, tiles: _Tiles, lead: Box, rows: Box) -> tuple[Any, Any, Any, Any]:
        """Return queries times the scale, gradients of the output, their product with the output, and lse, per query.

        The lse of a query without keys becomes inf, so that its probabilities are 0.
        """
        box, ndim, shape = lead + rows, len(rows), (*extents_of(lead), span_of(rows))
        y, dy = self.buffer("y", tiles.of["y"][box].shape), self.buffer("dy", tiles.of["dy"][box].shape)
        np.copyto(dy, tiles.of["dy"][box])
        np.multiply(tiles.of["y"][box], dy, out=y)
        delta, lse = self.buffer("delta", (*shape, 1)), self.buffer("lse", (*shape, 1))
        np.sum(_rows(y, ndim), axis=-1, keepdims=True, out=delta)
        view = tiles.of["lse"][box]
        np.copyto(lse.reshape(view.shape), view)
        np.copyto(lse, np.inf, where=lse == -np.inf)
        return self.scaled(tiles, box), _rows(dy, ndim), delta, lse

    def _add(self, tiles: _Tiles, name: str, lead: Box, columns: Box, left: Any, right: Any) -> None:
        """Add ``left^T right`` to a gradient of keys or values."""
        target = tiles.of[name][lead + columns]
        found = self.buffer(name, (*extents_of(lead), left.shape[-1], right.shape[-1]))
        np.matmul(left.swapaxes(-1, -2), right, out=found)
        found = found.reshape(target.shape)
        if not tiles.part.overlaps:
            np.add(target, found, out=target)
            return
        # Tiles that share keys are added one after the other.
        for index in np.ndindex(*target.shape[1 : len(lead) - 1]):
            one = target[(slice(None), *index)]
            np.add(one, found[(slice(None), *index)], out=one)

    def _sum_pairs(self, tiles: _Tiles, lead: Box, rows: Box, columns: Box, ds: Any, table: Any) -> None:
        pairs, more = (self._pairs(tiles, rows, columns, name)[lead[-1]] for name in ("pairs", "more_pairs"))
        np.sum(ds, axis=tuple(range(len(lead) - 1)), dtype=np.float64, out=more)
        if len(tiles.columns) == 1:
            np.add(pairs, more, out=pairs)
            return
        self._pairs(tiles, rows, columns).fill(0)
        np.copyto(pairs, more)
        self._distribute(tiles, rows, columns, table)

    def _distribute(self, tiles: _Tiles, rows: Box, columns: Box, table: Any) -> None:
        """Add the sums of the pairs of a box of queries and a box of keys to the table."""
        pairs = self._pairs(tiles, rows, columns)
        pairs = pairs.reshape(len(pairs), *extents_of(rows), *extents_of(columns))
        for index in np.ndindex(*extents_of(rows)):
            query = [i + box.start for i, box in zip(index, rows)]
            window = tiles.part.windows_of(table, self.g.heads[0], self.margins, query, columns)
            np.add(window, pairs[(slice(None), *index)], out=window)


def _rows(array: Any, ndim: int) -> Any:
    """Return ``(*lead, *positions, channels)`` with the positions of `ndim` axes as one."""
    return array.reshape(*array.shape[: -ndim - 1], math.prod(array.shape[-ndim - 1 : -1]), array.shape[-1])


def _counters(arrays: AttentionArrays, geometry: AttentionGeometry) -> tuple[np.ndarray, np.ndarray]:
    """Return the shares of queries ``(N, *S, heads)`` and of keys ``(N, *T, key_heads)`` in the counters of dropout."""
    mask, ndim, samples = geometry.dropout, len(geometry.reaches), arrays.q.shape[0]
    assert mask is not None
    queries, keys = (tuple(b - a for a, b in intervals) for intervals in (geometry.queries, geometry.keys))
    heads, key_heads = (b - a for a, b in (geometry.heads, geometry.key_heads))
    extents = (samples, heads, *queries, *keys)
    rows = axis_counters(mask.shape, mask.start, extents, range(2 + ndim)).reshape(samples, heads, *queries)
    columns = axis_counters(mask.shape, mask.start, extents, range(2 + ndim, 2 + 2 * ndim)).reshape(1, *keys, 1)
    return (
        np.ascontiguousarray(np.moveaxis(rows, 1, -1)),
        np.ascontiguousarray(np.broadcast_to(columns, (samples, *keys, key_heads))),
    )


class NumpyAttention(Attentions):
    """Attention in NumPy."""

    scratch: Scratch

    def _attention_forward(self, arrays: AttentionArrays, geometry: AttentionGeometry) -> Kernel:
        return self._attention(_Forward(arrays, geometry, self.scratch))

    def _attention_backward(self, arrays: AttentionArrays, geometry: AttentionGeometry) -> Kernel:
        return self._attention(_Backward(arrays, geometry, self.scratch))

    def _attention(self, run: _Run) -> Kernel:
        return ScratchKernel(run.bind, self.scratch, run.nbytes, "numpy:attention", run.workspace_bytes)
