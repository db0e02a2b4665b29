"""Attention in NumPy, by tiles of queries and keys. Memory holds the scores of a tile, never those of all pairs.

Forward keeps for each query the maximum of its scores, the sum of their exponentials and the sum of the values weighted
by them, and scales both sums down where a later tile has a larger maximum (Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018). Backward computes the probabilities again, from the logarithm of the sum (Dao et al.,
"FlashAttention", 2022).

A pass is computed in shares of samples or heads, which threads may compute at the same time.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..attention import (
    AttentionArrays,
    AttentionGeometry,
    Attentions,
    Box,
    TileGroup,
    boxes,
    extents_of,
    span_of,
    tile_groups,
)
from ..kernel import Kernel, ScratchKernel
from ..memory import Scratch, nbytes_of, round_up
from .pointwise import axis_counters, first_counter, mix64_inplace

__all__ = ["NumpyAttention", "TileOperations"]

#: Largest number of queries and of keys of a tile, and of scores that are computed at a time where tiles are smaller.
QUERIES, KEYS, SCORES = 512, 512, 1 << 18
#: Products of matrices are faster if rows begin at whole vectors.
ALIGNED = 16
#: Products of a pass (multiplications) below which threads are not worth their start.
FEW = 1 << 22


class TileOperations:
    """Operations on tiles in NumPy. A backend replaces those that its library computes faster.

    Attributes
    ----------
    scratch_bytes : int
        Scratch memory that the operations need [B].
    """

    scratch_bytes = 0

    def bind(self, scratch: Any) -> None:
        """Take `scratch`, a view of scratch memory of `scratch_bytes`. This method is called before operations, and
        again after the memory has grown.
        """

    def begin(self) -> None:
        """Prepare for operations by the calling thread."""

    def end(self) -> None:
        """Finish the operations of the calling thread."""

    def close(self) -> None:
        """Free what the operations hold."""

    def copy(self, source: Any, target: Any) -> None:
        """Compute ``target = source``, for views of any strides."""
        np.copyto(target, source)

    def add(self, source: Any, target: Any) -> None:
        """Compute ``target += source``, for views of any strides; no two elements of the target are the same."""
        np.add(target, source, out=target)

    def product(self, left: Any, right: Any, out: Any) -> None:
        """Compute ``out = left right``, for matrices on the last two axes."""
        np.matmul(left, right, out=out)

    def add_product(self, left: Any, right: Any, out: Any, spare: Any) -> None:
        """Compute ``out += left right``; `spare` is packed, and may be overwritten."""
        self.product(left, right, spare)
        np.add(out, spare, out=out)

    def exponentials(self, scores: Any, subtracted: Any) -> None:
        """Compute ``scores = exp(scores - subtracted)``. `subtracted` has one number per row, or per column of a single
        matrix.
        """
        np.subtract(scores, subtracted, out=scores)
        np.exp(scores, out=scores)

    def softmax_gradient(self, gradient: Any, subtracted: Any, p: Any) -> None:
        """Compute ``gradient = (gradient - subtracted) * p``; `subtracted` as in :meth:`exponentials`."""
        np.subtract(gradient, subtracted, out=gradient)
        np.multiply(gradient, p, out=gradient)


class _Tiles:
    """Tiles of one group for a share of samples and heads, in the order of computation, with their views of the arrays.
    """

    def __init__(
        self, part: TileGroup, arrays: AttentionArrays, geometry: AttentionGeometry, mask: Any, share: Box
    ) -> None:
        self.part, a = part, arrays
        heads, key_heads = (b - a for a, b in (geometry.heads, geometry.key_heads))
        self.of = {
            name: part.of_queries(array, heads)
            for name, array in {"q": a.q, "y": a.y, "lse": a.lse, "dy": a.dy, "dq": a.dq}.items()
            if array is not None
        }
        keyed = {"k": a.k, "v": a.v, "dk": a.dk, "dv": a.dv}
        self.of.update({n: part.of_keys(array, key_heads) for n, array in keyed.items() if array is not None})
        #: Biases of the pairs of a tile, as a view of the table, and as a packed array for the current queries.
        self.bias: Any = None
        self.packed_bias: Any = None
        self.counters = None if mask is None else (part.of_queries(mask[0], heads), part.of_keys(mask[1], key_heads))
        self.blocked = part.blocked()
        self.rows = boxes(part.queries, QUERIES, multiple=ALIGNED)
        self.columns = boxes(part.keys, KEYS, multiple=ALIGNED)
        #: Whether backward computes scores with a row per key, as the gradients of keys and values need them. Single
        #: products are faster then; many small ones are not.
        self.by_key = False
        # Where one tile has more scores than that, the limit is 0, and `boxes` takes one tile at a time.
        self.leads = boxes(part.lead, SCORES // (_largest(self.rows) * _largest(self.columns)), part.within(*share))

    def sizes(self) -> tuple[int, int, int]:
        """Return the largest numbers of tiles (of all samples and heads), of queries and of keys that are computed at a
        time.
        """
        return _largest(self.leads), _largest(self.rows), _largest(self.columns)


class _Share(ABC):
    """Forward or backward pass over all tiles of some samples and heads, with named buffers in scratch memory.

    Buffers are as large as the largest tiles that are computed at a time need.
    """

    def __init__(self, whole: _Pass, share: Box, operations: TileOperations, begin: int) -> None:
        self.a, self.g, self.scratch, self.operations = whole.a, whole.g, whole.scratch, operations
        self.dtype, self.margins, self.table_shape = whole.dtype, whole.margins, whole.table_shape
        self.parts = [_Tiles(part, whole.a, whole.g, whole.counters, share) for part in whole.groups]
        # Offsets are fixed here, so that a share allocates nothing later; views are taken when it runs.
        self._buffers: dict[tuple[Any, ...], Any] = {}
        self._offsets: dict[str, int] = {}
        self._begin_operations = begin
        self.end = begin + round_up(operations.scratch_bytes)
        # Channels of a head of keys and of values. Without parts no query reads a key, and the sizes are 0.
        d, e = (self.parts[0].of[n].shape[-1] if self.parts else 1 for n in ("k", "v"))
        most = [tiles.sizes() for tiles in self.parts] or [(0, 0, 0)]
        # Largest numbers of rows, columns and scores of the tiles that are computed at a time.
        row, column, score = (
            max(lead * f(rows, columns) for lead, rows, columns in most)
            for f in (lambda r, c: r, lambda r, c: c, lambda r, c: r * c)
        )
        pairs = max((t.part.heads.count * _largest(t.rows) * _largest(t.columns) for t in self.parts), default=0)
        self._sizes = {"row": row, "d_row": row * d, "e_row": row * e, "d_column": column * d, "e_column": column * e}
        self._sizes |= {"score": score, "pairs": pairs, "table": math.prod(self.table_shape)}
        if self.a.bias is not None:
            self.reserve("pairs", "bias")
        if self.g.dropout is not None:
            self.reserve("score", "hash", "hash2", dtype=np.uint64)
            self.reserve("score", "dropped", dtype=np.bool_)

    def reserve(self, size: str, *names: str, dtype: Any = None) -> None:
        """Reserve the buffers `names`, each of the size [elements] that has the name `size`."""
        for name in names:
            self._offsets[name] = self.end
            self.end += round_up(nbytes_of((self._sizes[size],), dtype or self.dtype))

    def buffer(self, name: str, shape: tuple[int, ...], dtype: Any = None) -> Any:
        """Return the leading elements of a reserved buffer as an array of this shape."""
        array = self._buffers.get((name, shape))
        if array is None:
            array = self.scratch.view(shape, dtype or self.dtype, self._offsets[name])
            self._buffers[name, shape] = array
        return array

    def bind(self, bias: Any) -> None:
        """Take new views of the scratch memory; `bias` is the table with margins, or None."""
        self._buffers.clear()
        self.operations.bind(self.scratch.view((self.operations.scratch_bytes,), np.uint8, self._begin_operations))
        for tiles in self.parts:
            tiles.bias = None if bias is None else tiles.part.of_bias(bias, self.g.heads[0], self.margins)

    def run(self, first: np.uint64) -> None:
        """Compute the share; `first` is the term that all dropout counters share (`first_counter`), 0 without dropout.
        """
        self.operations.begin()
        try:
            # -inf minus a finite number and exponentials that are 0 are not faults.
            with np.errstate(all="ignore"):
                self.start()
                for tiles in self.parts:
                    # A share may have none of the heads of a group.
                    for rows in tiles.rows if tiles.leads else ():
                        self._pack_bias(tiles, rows)
                        self.compute(tiles, rows, first)
        finally:
            self.operations.end()

    @property
    def table(self) -> Any:
        """Gradient of the table of biases with margins, or None."""
        return None if self.a.dbias is None else self.buffer("table", self.table_shape, np.float64)

    def start(self) -> None:
        """Prepare the run; nothing by default."""
        return

    @abstractmethod
    def compute(self, tiles: _Tiles, rows: Box, first: np.uint64) -> None:
        """Compute all tiles of a box of queries."""

    def _pack_bias(self, tiles: _Tiles, rows: Box) -> None:
        """Copy the biases of a box of queries, if one box has all keys of a tile."""
        # With several boxes of keys, `scores` reads the biases of each from the view.
        if tiles.bias is None or len(tiles.columns) > 1:
            return
        view = tiles.bias[(slice(None), *rows, *tiles.columns[0])]
        if tiles.by_key:
            view = _exchanged(view, len(rows))
        tiles.packed_bias = self.buffer("bias", view.shape)
        np.copyto(tiles.packed_bias, view, casting="same_kind")

    # ------------------------------------------------------------------ tiles
    def copied(self, tiles: _Tiles, name: str, box: Box) -> Any:
        """Return a box of the view `name` as ``(*lead, positions, channels)``: a copy, or the view itself for one tile
        of one axis.
        """
        view = tiles.of[name][box]
        ndim = len(tiles.part.queries)
        if ndim == 1 and math.prod(view.shape[:-2]) == 1:
            return view
        buffer = self.buffer(name, view.shape)
        self.operations.copy(view, buffer)
        return _rows(buffer, ndim)

    def scaled(self, tiles: _Tiles, box: Box) -> Any:
        """Return a copy of the queries of a box, times the scale, as ``(*lead, positions, channels)``."""
        view = tiles.of["q"][box]
        buffer = self.buffer("q", view.shape)
        self.operations.copy(view, buffer)
        np.multiply(buffer, self.dtype.type(self.g.scale), out=buffer)
        return _rows(buffer, len(tiles.part.queries))

    def scores(self, tiles: _Tiles, lead: Box, rows: Box, columns: Box, q: Any, k: Any) -> Any:
        """Return the scores of a tile with bias, -inf for pairs that are not allowed: ``(*lead, queries, keys)``.

        With `tiles.by_key` they are ``(*lead, keys, queries)``.
        """
        left, right = (k, q) if tiles.by_key else (q, k)
        s = self.buffer("s", (*extents_of(lead), left.shape[-2], right.shape[-2]))
        self.operations.product(left, right.swapaxes(-1, -2), s)
        if tiles.bias is None and not tiles.blocked:
            return s
        if len(tiles.columns) == 1 and tiles.bias is not None:
            # Of these heads, the same for all samples and tiles.
            bias = tiles.packed_bias[lead[-1]]
            np.add(s, bias.reshape(len(bias), *s.shape[-2:]), out=s)
        first, second = (columns, rows) if tiles.by_key else (rows, columns)
        by_axes = s.reshape(*extents_of(lead), *extents_of(first), *extents_of(second))
        if tiles.by_key:
            by_axes = _exchanged(by_axes, len(rows))
        if len(tiles.columns) > 1 and tiles.bias is not None:
            np.add(by_axes, tiles.bias[(lead[-1], *rows, *columns)], out=by_axes, casting="same_kind")
        for blocked in tiles.blocked:
            np.copyto(by_axes, -np.inf, where=blocked[rows + columns])
        return s

    def dropped(self, tiles: _Tiles, lead: Box, rows: Box, columns: Box, first: np.uint64) -> Any:
        """Return which probabilities of a tile are dropped, bool ``(*lead, queries, keys)``."""
        assert tiles.counters is not None and self.g.dropout is not None
        ndim, of_rows, of_columns = len(rows), tiles.counters[0][lead + rows], tiles.counters[1][lead + columns]
        n = len(lead)
        # Counters (*lead, *rows, 1) and (*lead, *columns, 1), as views that broadcast to all pairs.
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

    def sum_rows(self, array: Any, out: Any) -> None:
        """Write the sum of each row of a packed array ``(*lead, rows, count)`` to `out` ``(*lead, rows, 1)``."""
        count = array.shape[-1]
        ones = self._buffers.get(("ones", count))
        if ones is None:
            # Made once per length of a row, in the first run with these views.
            ones = self._buffers["ones", count] = np.ones((count, 1), self.dtype)
        # A product with ones is several times faster than np.sum along short rows. Tiles stay separate: a library may
        # sum a row in another order where the matrix has more rows, so bits would depend on the number of threads.
        np.matmul(array.reshape(*out.shape[:-1], count), ones, out=out)

    def drop(self, p: Any, dropped: Any) -> None:
        """Apply dropout to an array of probabilities, or to their gradient."""
        assert self.g.dropout is not None
        np.multiply(p, self.dtype.type(1 / (1 - self.g.dropout.rate)), out=p)
        np.copyto(p, 0, where=dropped)


class _Forward(_Share):
    """Forward pass."""

    def __init__(self, whole: _Pass, share: Box, operations: TileOperations, begin: int) -> None:
        super().__init__(whole, share, operations, begin)
        self.reserve("d_row", "q")
        self.reserve("d_column", "k")
        self.reserve("e_column", "v")
        self.reserve("e_row", "sum", "weighted")
        self.reserve("row", "peak", "total", "new", "more")
        self.reserve("score", "s")

    def compute(self, tiles: _Tiles, rows: Box, first: np.uint64) -> None:
        for lead in tiles.leads:
            self._tile(tiles, lead, rows, first)

    def _tile(self, tiles: _Tiles, lead: Box, rows: Box, first: np.uint64) -> None:
        q, shape = self.scaled(tiles, lead + rows), (*extents_of(lead), span_of(rows))
        peak, total, new, more = (self.buffer(n, (*shape, 1)) for n in ("peak", "total", "new", "more"))
        y, lse = tiles.of["y"][lead + rows], tiles.of["lse"][lead + rows]
        sums = self.buffer("sum", (*shape, y.shape[-1]))
        self._begin(y, lse, peak, total, sums)
        for i, columns in enumerate(tiles.columns):
            k, v = self.copied(tiles, "k", lead + columns), self.copied(tiles, "v", lead + columns)
            p = self.scores(tiles, lead, rows, columns, q, k)
            np.max(p, axis=-1, keepdims=True, out=new)
            np.maximum(new, peak, out=new)
            self.operations.exponentials(p, new)
            later = self.g.merge or i > 0
            if later:
                # Scale the sums of earlier tiles down to the new maximum.
                np.subtract(peak, new, out=peak)
                np.exp(peak, out=peak)
                np.multiply(total, peak, out=total)
                np.multiply(sums, peak, out=sums)
            np.copyto(peak, new)
            self.sum_rows(p, more)
            np.add(total, more, out=total)
            # After the total: dropout applies to probabilities, whose divisor is the sum over all keys.
            if self.g.dropout is not None:
                self.drop(p, self.dropped(tiles, lead, rows, columns, first))
            # The first product overwrites the sums, which are undefined before it.
            if later:
                self.operations.add_product(p, v, sums, self.buffer("weighted", sums.shape))
            else:
                self.operations.product(p, v, sums)
        # A NaN may be lost in an exponential, not in the maximum.
        np.multiply(peak, 0, out=more)
        np.add(total, more, out=total)
        # A query with keys has a total of at least 1: that of the largest score.
        # So the maximum with 1 only changes the total of a query without keys, whose output is 0 and not 0 / 0.
        np.maximum(total, 1, out=more)
        np.divide(sums, more, out=sums)
        self.operations.copy(sums.reshape(y.shape), y)
        np.log(total, out=total)
        np.add(peak, total, out=total)
        np.copyto(lse, total.reshape(lse.shape))

    def _begin(self, y: Any, lse: Any, peak: Any, total: Any, sums: Any) -> None:
        """Set `peak`, `total` and `sums` to the results for other keys; without merge, `peak` and `total` to those of
        no keys. The maximum of no scores is the least finite number, so that -inf minus this maximum is -inf, not NaN.
        """
        least = np.finfo(self.dtype).min
        if not self.g.merge:
            peak.fill(least)
            total.fill(0)
            return
        # The earlier results are those of one key with the score lse, whose exponential relative to itself is 1, and
        # with the value y. Without earlier keys (-inf) the total is 0.
        # A query's dropped probabilities count in lse as well, so merged results have the right divisor.
        np.copyto(peak.reshape(lse.shape), lse)
        np.not_equal(peak, -np.inf, out=total, casting="unsafe")
        np.maximum(peak, least, out=peak)
        self.operations.copy(y, sums.reshape(y.shape))


class _Backward(_Share):
    """Backward pass."""

    def __init__(self, whole: _Pass, share: Box, operations: TileOperations, begin: int) -> None:
        super().__init__(whole, share, operations, begin)
        for tiles in self.parts:
            tiles.by_key = _largest(tiles.leads) == 1  # a single product at a time
        self.reserve("d_row", "q", "dq", "dq_part")
        self.reserve("e_row", "y", "dy")
        self.reserve("d_column", "k", "dk")
        self.reserve("e_column", "v", "dv")
        self.reserve("row", "lse", "delta")
        self.reserve("score", "s", "ds")
        if self.a.dbias is not None:
            # Sums over all tiles of a group, before they are distributed over the table.
            self.reserve("pairs", "pairs", "more_pairs", dtype=np.float64)
            self.reserve("table", "table", dtype=np.float64)

    def start(self) -> None:
        if self.table is not None:
            self.table.fill(0)

    def compute(self, tiles: _Tiles, rows: Box, first: np.uint64) -> None:
        # With one box of keys, the gradients of scores of all tiles are summed before they go to the table.
        whole = self.table is not None and len(tiles.columns) == 1
        if whole:
            self._pairs(tiles, rows, tiles.columns[0]).fill(0)
        for lead in tiles.leads:
            self._tile(tiles, lead, rows, first)
        if whole:
            self._distribute(tiles, rows, tiles.columns[0])

    def _pairs(self, tiles: _Tiles, rows: Box, columns: Box, name: str = "pairs") -> Any:
        shape = (tiles.part.heads.count, span_of(rows), span_of(columns))
        return self.buffer(name, shape, np.float64)

    def _tile(self, tiles: _Tiles, lead: Box, rows: Box, first: np.uint64) -> None:
        q, dy, delta, lse = self._begin(tiles, lead, rows)
        dq, part = self.buffer("dq", q.shape), self.buffer("dq_part", q.shape)
        for i, columns in enumerate(tiles.columns):
            k, v = self.copied(tiles, "k", lead + columns), self.copied(tiles, "v", lead + columns)
            p = self.scores(tiles, lead, rows, columns, q, k)
            self.operations.exponentials(p, lse)
            # First the gradient of the probabilities, dy v^T, from which that of the scores follows in place.
            ds = self.buffer("ds", p.shape)
            left, right = (v, dy) if tiles.by_key else (dy, v)
            self.operations.product(left, right.swapaxes(-1, -2), ds)
            by_key, by_query = (1, -1) if tiles.by_key else (-1, 1)
            dropped = None
            if self.g.dropout is not None:
                dropped = _turned(self.dropped(tiles, lead, rows, columns, first), by_query)
                self.drop(ds, dropped)
            # delta = y dy is the sum of p times this gradient over all keys, also those of other tiles. Here p is that
            # before dropout; the gradient of the values needs the dropped one.
            self.operations.softmax_gradient(ds, delta, p)
            if dropped is not None:
                self.drop(p, dropped)
            self._add(tiles, "dv", lead, columns, _turned(p, by_key), dy)
            # `q` includes the scale, so this gradient does too; that of the queries is scaled after its last tile.
            self._add(tiles, "dk", lead, columns, _turned(ds, by_key), q)
            # The first product overwrites dq, which is undefined before it.
            if i:
                self.operations.add_product(_turned(ds, by_query), k, dq, part)
            else:
                self.operations.product(_turned(ds, by_query), k, dq)
            if self.table is not None:
                self._sum_pairs(tiles, lead, rows, columns, _turned(ds, by_query))
        np.multiply(dq, self.dtype.type(self.g.scale), out=dq)
        target = tiles.of["dq"][lead + rows]
        write = self.operations.add if self.g.merge else self.operations.copy
        write(dq.reshape(target.shape), target)

    def _begin(self, tiles: _Tiles, lead: Box, rows: Box) -> tuple[Any, Any, Any, Any]:
        """Return ``scale * q``, `dy`, the sum of ``dy * y`` over the channels of each query, and `lse`.

        The last two have one number per row of the scores, or with `tiles.by_key` per column. The lse of a query
        without keys becomes inf, so that its probabilities are 0.
        """
        box, ndim, shape = lead + rows, len(rows), (*extents_of(lead), span_of(rows))
        y, dy = self.buffer("y", tiles.of["y"][box].shape), self.buffer("dy", tiles.of["dy"][box].shape)
        self.operations.copy(tiles.of["dy"][box], dy)
        self.operations.copy(tiles.of["y"][box], y)
        np.multiply(y, dy, out=y)
        delta, lse = self.buffer("delta", (*shape, 1)), self.buffer("lse", (*shape, 1))
        self.sum_rows(y, delta)
        view = tiles.of["lse"][box]
        np.copyto(lse.reshape(view.shape), view)
        np.copyto(lse, np.inf, where=lse == -np.inf)
        if tiles.by_key:
            delta, lse = delta.swapaxes(-1, -2), lse.swapaxes(-1, -2)
        return self.scaled(tiles, box), _rows(dy, ndim), delta, lse

    def _add(self, tiles: _Tiles, name: str, lead: Box, columns: Box, left: Any, right: Any) -> None:
        """Add ``left right`` to the gradient `name` of keys or values."""
        target = tiles.of[name][lead + columns]
        product = self.buffer(name, (*extents_of(lead), left.shape[-2], right.shape[-1]))
        # With one axis the view has the shape of the product, which is then added to the array without a copy.
        if target.shape == product.shape and not tiles.part.overlaps:
            self.operations.add_product(left, right, target, product)
            return
        self.operations.product(left, right, product)
        product = product.reshape(target.shape)
        if not tiles.part.overlaps:
            self.operations.add(product, target)
            return
        # The view has elements twice where tiles share keys; one np.add would keep one of the terms. So the tiles are
        # added one after the other.
        for index in np.ndindex(*target.shape[1 : len(lead) - 1]):
            tile = target[(slice(None), *index)]
            np.add(tile, product[(slice(None), *index)], out=tile)

    def _sum_pairs(self, tiles: _Tiles, lead: Box, rows: Box, columns: Box, ds: Any) -> None:
        pairs, more = (self._pairs(tiles, rows, columns, name)[lead[-1]] for name in ("pairs", "more_pairs"))
        # Samples and tiles share the biases; heads, the last of the leading axes, do not.
        np.sum(ds, axis=tuple(range(len(lead) - 1)), dtype=np.float64, out=more)
        if len(tiles.columns) == 1:
            np.add(pairs, more, out=pairs)
            return
        self._pairs(tiles, rows, columns).fill(0)
        np.copyto(pairs, more)
        self._distribute(tiles, rows, columns)

    def _distribute(self, tiles: _Tiles, rows: Box, columns: Box) -> None:
        """Add the gradients of the pairs of a box of queries and a box of keys to that of the table."""
        pairs = self._pairs(tiles, rows, columns)
        pairs = pairs.reshape(len(pairs), *extents_of(rows), *extents_of(columns))
        # Query by query: the keys of one query are different entries of the table, those of several are not.
        for index in np.ndindex(*extents_of(rows)):
            query = [i + box.start for i, box in zip(index, rows)]
            window = tiles.part.windows_of(self.table, self.g.heads[0], self.margins, query, columns)
            np.add(window, pairs[(slice(None), *index)], out=window)


class _Pass:
    """Forward or backward pass in shares of samples or heads, which may run at the same time; :meth:`kernel` returns
    the kernel that runs them.

    Parameters
    ----------
    kind
        Class of the shares.
    operations
        Operations on tiles: one object per share, because shares may run at the same time. Their number is the largest
        number of shares.
    """

    def __init__(
        self,
        kind: type[_Share],
        arrays: AttentionArrays,
        geometry: AttentionGeometry,
        scratch: Scratch,
        operations: Sequence[TileOperations],
    ) -> None:
        self.a, self.g, self.scratch, self.dtype = arrays, geometry, scratch, arrays.q.dtype
        self.counters = None if geometry.dropout is None else _counters(arrays, geometry)
        self.groups, self._covers = tile_groups(arrays.q.shape[0], geometry, arrays.bias is not None)
        margins = [(0,) * len(geometry.reaches), *(part.margins() for part in self.groups)]
        # The largest of all groups, so that they share one table with margins.
        self.margins = tuple(map(max, zip(*margins)))
        bias = arrays.bias
        extents = zip(() if bias is None else bias.shape[1:], self.margins)
        self.table_shape = () if bias is None else (bias.shape[0], *(n + 2 * m for n, m in extents))
        self._padded = bias is not None and any(self.margins)
        # The table with margins is at the beginning of the scratch memory, the buffers of the shares follow.
        self._bias_bytes = round_up(nbytes_of(self.table_shape, bias.dtype)) if self._padded else 0
        self._shares: list[_Share] = []
        self.nbytes = self._bias_bytes
        self._operations = operations
        for share, own in zip(self._cut(len(operations)), operations):
            self._shares.append(kind(self, share, own, self.nbytes))
            self.nbytes = self._shares[-1].end

    def _cut(self, count: int) -> list[Box]:
        """Return at most `count` shares of samples and heads of keys, as equal as possible."""
        samples, heads = self.a.q.shape[0], self.g.key_heads[1] - self.g.key_heads[0]
        products = sum(math.prod((*part.lead, *part.queries, *part.keys)) for part in self.groups)
        if count > 1 and products * self.a.q.shape[-1] // (self.g.heads[1] - self.g.heads[0]) < FEW:
            count = 1
        # Cut the axis whose largest share is smaller. Heads of keys are cut, so that shares write separate dk and dv.
        axis = 0 if -(-samples // count) * heads <= -(-heads // count) * samples else 1
        n = (samples, heads)[axis]
        edges = [n * i // count for i in range(count + 1)]
        pieces = [slice(a, b) for a, b in itertools.pairwise(edges) if a < b]
        return [(piece, slice(0, heads)) if axis == 0 else (slice(0, samples), piece) for piece in pieces]

    def kernel(self, impl: str, together: Callable[[Sequence[Callable[[], None]]], None]) -> Kernel:
        """Return the kernel; `together` is a function that calls several functions, and returns after all of them have
        returned.
        """

        def bind() -> Callable[[], None]:
            bias = self.a.bias
            if self._padded:
                bias = self.scratch.view(self.table_shape, bias.dtype)
            for share in self._shares:
                share.bind(bias)
            return lambda: self._run(bias, together)

        def close() -> None:
            for operation in self._operations:
                operation.close()

        kept = sum(c.nbytes for c in self.counters or ())
        return ScratchKernel(bind, self.scratch, self.nbytes, impl, kept, close)

    def _run(self, bias: Any, together: Callable[[Sequence[Callable[[], None]]], None]) -> None:
        a, merge = self.a, self.g.merge
        first = np.uint64(0) if self.g.dropout is None else first_counter(self.g.dropout)
        if self._padded:
            bias.fill(0)
            np.copyto(self._inside(bias), a.bias)
        if a.dk is not None:  # several tiles and heads of queries add to one key
            a.dk.fill(0)
            a.dv.fill(0)
        if not self._covers and not merge:
            # No tile writes the results of queries without keys.
            (a.y if a.dq is None else a.dq).fill(0)
            if a.dq is None:
                a.lse.fill(-np.inf)
        together([partial(share.run, first) for share in self._shares])
        if a.dbias is not None:
            tables = [share.table for share in self._shares]
            if not merge:
                a.dbias.fill(0)
            # In the order of the shares: which thread ends first does not change the bits.
            for table in tables[1:]:
                np.add(tables[0], table, out=tables[0])
            for table in tables[:1]:
                np.add(a.dbias, self._inside(table), out=a.dbias, casting="same_kind")

    def _inside(self, table: Any) -> Any:
        """Return the part of a table inside its margins."""
        return table[(slice(None), *(slice(m, n - m) for m, n in zip(self.margins, table.shape[1:])))]


def _largest(boxes: Sequence[Box]) -> int:
    return max(map(span_of, boxes), default=0)


def _turned(array: Any, order: int) -> Any:
    """Return matrices as they are (1), or transposed (-1)."""
    return array if order == 1 else array.swapaxes(-1, -2)


def _exchanged(array: Any, ndim: int) -> Any:
    """Return an array with the last `ndim` axes and the `ndim` axes before them exchanged."""
    before = array.ndim - 2 * ndim
    return array.transpose(*range(before), *range(before + ndim, array.ndim), *range(before, before + ndim))


def _rows(array: Any, ndim: int) -> Any:
    """Return ``(*lead, *positions, channels)`` with the `ndim` axes of positions merged into one."""
    return array.reshape(*array.shape[: -ndim - 1], math.prod(array.shape[-ndim - 1 : -1]), array.shape[-1])


def _counters(arrays: AttentionArrays, geometry: AttentionGeometry) -> tuple[np.ndarray, np.ndarray]:
    """Return the terms of the dropout counters that depend on queries, ``(N, *S, heads)``, and on keys, ``(N, *T,
    key_heads)``.
    """
    mask, ndim, samples = geometry.dropout, len(geometry.reaches), arrays.q.shape[0]
    assert mask is not None
    queries, keys = (tuple(b - a for a, b in intervals) for intervals in (geometry.queries, geometry.keys))
    heads, key_heads = (b - a for a, b in (geometry.heads, geometry.key_heads))
    extents = (samples, heads, *queries, *keys)
    rows = axis_counters(mask.shape, mask.start, extents, range(2 + ndim)).reshape(samples, heads, *queries)
    columns = axis_counters(mask.shape, mask.start, extents, range(2 + ndim, 2 + 2 * ndim)).reshape(1, *keys, 1)
    # The axes of queries and keys in `q` and `k`, so that the views of tiles apply to them.
    return (
        np.ascontiguousarray(np.moveaxis(rows, 1, -1)),
        np.ascontiguousarray(np.broadcast_to(columns, (samples, *keys, key_heads))),
    )


class NumpyAttention(Attentions):
    """Attention in NumPy."""

    scratch: Scratch

    def _attention_forward(self, arrays: AttentionArrays, geometry: AttentionGeometry) -> Kernel:
        return self._attention(_Forward, arrays, geometry)

    def _attention_backward(self, arrays: AttentionArrays, geometry: AttentionGeometry) -> Kernel:
        return self._attention(_Backward, arrays, geometry)

    def _attention(self, kind: type[_Share], arrays: AttentionArrays, geometry: AttentionGeometry) -> Kernel:
        whole = _Pass(kind, arrays, geometry, self.scratch, self._tile_operations())
        self.own.add(*(whole.counters or ()))
        return whole.kernel(f"{self.name}:attention", self._together)

    def _tile_operations(self) -> Sequence[TileOperations]:
        """Return the operations of each share of a pass."""
        return [TileOperations()]

    def _together(self, calls: Sequence[Callable[[], None]]) -> None:
        """Make several calls, at the same time if the backend has threads of its own."""
        for call in calls:
            call()
