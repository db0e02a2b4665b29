"""Matrix products: dense layers, and filter gradients as one transposed product per tap of the kernel.

::

    y, dy   o0 o1 o2             dw[tap 0] = dy^T x[rows from 0 on]
    x       i0 i1 i2 i3 i4       dw[tap 1] = dy^T x[rows from 1 on]   ...

With more than one axis, the rows of `dy` are extended to the row length of `x`, with zeros where there is no output, so
that every tap is again a shift. (oneDNN has no fast filter gradient in packed channels-last layout for all shapes;
products of long matrices are faster for some.)
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from ...device import is_low
from ..geometry import Geometry
from ..numpy.convolution import Margins
from ..numpy.norms import column_sums
from . import abi as c
from .program import OnednnEngine, OnednnMemory, PrimitiveList, ReferenceOnly, packed_strides

__all__ = ["backward_filter_by_taps", "dense_backward_data", "dense_backward_filter", "dense_forward"]


def _matrix(p: PrimitiveList, array: Any, transposed: bool = False) -> OnednnMemory:
    rows, columns = array.shape
    shape, strides = ((columns, rows), (1, columns)) if transposed else ((rows, columns), (columns, 1))
    return p.array(array, p.desc(shape, array.dtype, strides))


def _product(
    p: PrimitiveList, a: OnednnMemory, b: OnednnMemory, out: OnednnMemory, bias: OnednnMemory | None = None
) -> None:
    pd = p.descriptor("matmul", a.desc, b.desc, None if bias is None else bias.desc, out.desc)
    arguments = {c.SRC: a, c.WEIGHTS: b, c.DST: out}
    if bias is not None:
        arguments[c.BIAS] = bias
    p.step(pd, arguments)


def dense_forward(engine: OnednnEngine, x: Any, w: Any, b: Any, y: Any) -> PrimitiveList:
    """Return ``y = x w^T + b`` as a list of primitives."""
    p = PrimitiveList(engine)
    bias = None if b is None else p.array(b, p.desc((1, b.shape[0]), b.dtype, (b.shape[0], 1)))
    _product(p, _matrix(p, x), _matrix(p, w, transposed=True), _matrix(p, y), bias)
    return p


def dense_backward_data(engine: OnednnEngine, dy: Any, w: Any, dx: Any) -> PrimitiveList:
    """Return ``dx = dy w`` as a list of primitives."""
    p = PrimitiveList(engine)
    _product(p, _matrix(p, dy), _matrix(p, w), _matrix(p, dx))
    return p


def dense_backward_filter(engine: OnednnEngine, x: Any, dy: Any, dw: Any, db: Any) -> PrimitiveList:
    """Return ``dw = dy^T x``, ``db = sum of dy`` as a list of primitives."""
    p = PrimitiveList(engine)
    _product(p, _matrix(p, dy, transposed=True), _matrix(p, x), _matrix(p, dw))
    if db is not None and is_low(dy.dtype):
        ones = np.ones((1, dy.shape[0]), dy.dtype)
        _product(p, _matrix(p, ones), _matrix(p, dy), _matrix(p, db.reshape(1, -1)))
    elif db is not None:
        p.call(column_sums(dy, db))
    return p


def backward_filter_by_taps(
    engine: OnednnEngine, x: Any, dy: Any, dw: Any, db: Any, geometry: Geometry
) -> PrimitiveList:
    """Return ``dw`` and ``db`` of a convolution of stride 1 without groups as a list of primitives.

    Raises
    ------
    ReferenceOnly
        For other convolutions.
    """
    if geometry.groups > 1 or set(geometry.stride) != {1}:
        raise ReferenceOnly("filter gradients by taps: expected stride 1 and one group; use another algorithm")
    p = PrimitiveList(engine)
    margins = Margins(x.shape, geometry.padding)
    padded = margins.shape
    steps = packed_strides(padded[:-1])  # [rows] per sample and spatial axis
    channels, filters, outputs = x.shape[-1], dy.shape[-1], dy.shape[1:-1]
    # Rows from the first to the last output, both included: the last tap of the last output is inside.
    rows = (x.shape[0] - 1) * steps[0] + sum((o - 1) * s for o, s in zip(outputs, steps[1:])) + 1
    shifts = [
        sum(t * d * s for t, d, s in zip(tap, geometry.dilation, steps[1:]))
        for tap in itertools.product(*(range(k) for k in geometry.kernel))
    ]
    source = _rows(p, x, padded, margins)
    gradient = _rows(
        p, dy, (*padded[:-1], filters), Margins(dy.shape, [(0, n - o) for n, o in zip(padded[1:-1], outputs)])
    )
    products = p.temporary(p.desc((len(shifts), filters, channels), dw.dtype, (filters * channels, channels, 1)))
    item = x.dtype.itemsize
    left = p.part(gradient, p.desc((filters, rows), x.dtype, (1, filters)), 0)
    right_desc = p.desc((rows, channels), x.dtype, (channels, 1))
    out_desc = p.desc((filters, channels), dw.dtype, (channels, 1))
    pd = p.descriptor("matmul", left.desc, right_desc, None, out_desc)
    for i, shift in enumerate(shifts):
        right = p.part(source, right_desc, shift * channels * item)
        out = p.part(products, out_desc, i * filters * channels * item)
        p.step(pd, {c.SRC: left, c.WEIGHTS: right, c.DST: out})
    taps = len(shifts)
    packed = p.desc((taps, filters, channels), dw.dtype, (channels, taps * channels, 1))
    p.reorder(products, p.array(dw, packed))
    if db is not None:
        p.call(column_sums(dy, db))
    return p


def _rows(p: PrimitiveList, array: Any, shape: tuple[int, ...], margins: Margins) -> OnednnMemory:
    """Return the array with zero margins as a packed matrix: the array itself if it has no margins, else a copy."""
    desc = p.desc((math.prod(shape[:-1]), shape[-1]), array.dtype, (shape[-1], 1))
    if margins.none:
        return p.array(array, desc)
    memory = p.temporary(desc)

    def bind(view: Any) -> Any:
        padded = view.reshape(shape)
        edges, interior = margins.edges(padded), margins.interior(padded)

        def run() -> None:
            for edge in edges:
                edge.fill(0)
            interior[...] = array

        return run

    p.call_on(memory, array.dtype, bind)
    return memory
