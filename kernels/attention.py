"""Interface of attention: ``y = softmax(scale * q k^T + bias) v``, for each sample and head."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..device import wide
from . import checks
from .base import Base
from .kernel import Kernel, KernelError, filled, has_nothing
from .pointwise import DropoutMask
from .reach import Interval, Reach

__all__ = ["AttentionArrays", "AttentionGeometry", "Attentions", "HeadGroup"]


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
        Whether results for other keys are in the output arrays, which are updated to the results for all keys.
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
        return (start // self.groups, -(-stop // self.groups)) if start < stop else (0, 0)

    @property
    def bias_extents(self) -> tuple[int, ...]:
        """Extents of a table of biases on the spatial axes."""
        return tuple(reach.bias_extent for reach in self.reaches)

    def head_groups(self) -> list[HeadGroup]:
        """Return the local heads in groups, in each of which every query head has its own head of keys."""
        start, stop = self.heads
        groups = []
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
        """Build ``y = softmax(scale * q k^T + bias) v`` over the keys that each query reads. No dropped probability
        counts.

        With ``geometry.merge`` `y` and `lse` hold the results for other keys before the call, and for all keys after
        it.

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
        if has_nothing(y):
            return filled(0)
        if has_nothing(k, v):
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
        is None or has the shape of `bias`; it is 0 for the heads of other ranks.
        """
        arrays = AttentionArrays(q, k, v, bias, y, lse, dy, dq, dk, dv, dbias)
        self._check_attention("attention_backward", arrays, geometry)
        self._check_dtypes("attention_backward", q=q, dy=dy, dq=dq, dk=dk, dv=dv)
        checks.check_packed("attention_backward", dy=dy, dq=dq, dk=dk, dv=dv, dbias=dbias)
        for a, b in ((y, dy), (q, dq), (k, dk), (v, dv)):
            checks.check_same_shape("attention_backward", array=a, gradient=b)
        if has_nothing(q, k, v, y):
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
        if has_nothing(q, y) and has_nothing(k, v):
            return
        queries, keys = (tuple(b - a for a, b in intervals) for intervals in (g.queries, g.keys))
        heads, key_heads = g.heads[1] - g.heads[0], g.key_heads[1] - g.key_heads[0]
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
        if has_nothing(q, k, v, y):
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
