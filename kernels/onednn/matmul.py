"""Matrix products of dense layers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...device import is_low
from ..numpy.norms import column_sums
from . import abi as c
from .program import OnednnEngine, OnednnMemory, PrimitiveList

__all__ = ["bias", "bias_gradient", "dense_backward_data", "dense_backward_filter", "dense_forward"]


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


def bias(engine: OnednnEngine, y: Any, b: Any) -> PrimitiveList:
    """Return ``y = y + b`` in place as a list of primitives; y ``(..., C)``."""
    p = PrimitiveList(engine)
    rows = _matrix(p, y.reshape(-1, y.shape[-1]))
    p.binary(c.BINARY_ADD, rows, _matrix(p, b.reshape(1, -1)), rows)
    return p


def bias_gradient(engine: OnednnEngine, dy: Any, db: Any) -> PrimitiveList:
    """Return ``db = sum of dy`` over all rows, dy ``(..., C)`` in 16 bits, as a list of primitives: a product."""
    p = PrimitiveList(engine)
    _add_column_sums(p, dy.reshape(-1, dy.shape[-1]), db)
    return p


def _add_column_sums(p: PrimitiveList, dy: Any, db: Any) -> None:
    ones = np.ones((1, dy.shape[0]), dy.dtype)
    _product(p, _matrix(p, ones), _matrix(p, dy), _matrix(p, db.reshape(1, -1)))


def dense_backward_filter(engine: OnednnEngine, x: Any, dy: Any, dw: Any, db: Any) -> PrimitiveList:
    """Return ``dw = dy^T x``, ``db = sum of dy`` as a list of primitives."""
    p = PrimitiveList(engine)
    _product(p, _matrix(p, dy, transposed=True), _matrix(p, x), _matrix(p, dw))
    if db is not None and is_low(dy.dtype):
        _add_column_sums(p, dy, db)
    elif db is not None:
        p.call(column_sums(dy, db))
    return p
