"""Attention on a GPU by our own kernels, which take every rule, dtype and width."""

from __future__ import annotations

import math
from typing import Any

from ..attention import AttentionArrays, AttentionGeometry, Attentions, Everywhere, Neighborhood, Reach
from ..kernel import Kernel, chain, filled
from ..pointwise import DropoutMask
from .launch import THREADS, Launch, Launcher, accumulator, is_float, scalar_program, sequence
from .sources import dtype_name

__all__ = ["CudaAttention"]

# AXES and LANES of attention.cu. Fewer spatial axes are filled up with axes of one position.
_AXES, _LANES = 3, 64
# Python's integers have no limit: products modulo 2^64, as in the kernels.
_MASK, _GOLDEN = (1 << 64) - 1, 0x9E3779B97F4A7C15


class CudaAttention(Attentions):
    """Attention in CUDA C++."""

    launcher: Launcher

    def _attention_forward(self, arrays: AttentionArrays, geometry: AttentionGeometry) -> Kernel:
        # A row of threads per query and head: `lse` has one number for each.
        rows = arrays.lse.size
        return sequence("attention", self._launch("attention_forward", rows, arrays, geometry))

    def _attention_backward(self, arrays: AttentionArrays, geometry: AttentionGeometry) -> Kernel:
        a = arrays
        # The sum of dy * y per query and head: the gradient of a score is ``p * (dp - delta)``. The launch over queries
        # writes it, the launches after that one read it.
        delta = self.launcher.empty(a.lse.shape, accumulator(dtype_name(a.q)))
        key_rows = a.k.size // a.k.shape[-1] * (geometry.key_heads[1] - geometry.key_heads[0])
        launches = [
            self._launch("attention_queries", a.lse.size, a, geometry, delta),
            self._launch("attention_keys", key_rows, a, geometry, delta),
        ]
        if a.dbias is not None:
            entries = (geometry.heads[1] - geometry.heads[0]) * math.prod(geometry.bias_extents)
            launches.append(self._launch("attention_bias", entries, a, geometry, delta))
        kernel = sequence("attention gradient", *launches, workspace_bytes=self.launcher.own.add(delta))
        # The kernel writes the entries of its heads only.
        return kernel if a.dbias is None or geometry.merge else chain(filled(0, a.dbias), kernel)

    def _launch(
        self, name: str, rows: int, arrays: AttentionArrays, geometry: AttentionGeometry, delta: Any = None
    ) -> Launch:
        a, g = arrays, geometry
        heads, key_heads = (stop - start for start, stop in (g.heads, g.key_heads))
        members = {n: getattr(a, n) for n in ("q", "k", "v", "bias", "y", "lse", "dy", "dq", "dk", "dv", "dbias")}
        members |= {"delta": delta, "bias_float": is_float(a.bias), "samples": a.q.shape[0], "heads": heads}
        members |= {"key_heads": key_heads, "first_head": g.heads[0], "groups": g.groups, "scale": g.scale}
        # Channels of a head: d in queries and keys, e in values and outputs.
        members |= {"d": a.q.shape[-1] // heads, "e": a.y.shape[-1] // heads, "merge": g.merge}
        members |= _rules(g)
        if g.dropout is not None:
            members |= _dropout(g.dropout, len(g.reaches))
        rows_of_block = THREADS // _LANES
        # Rows beyond the grid are taken by its blocks in a loop.
        grid = (max(1, min(-(-rows // rows_of_block), self.launcher.blocks(16))),)
        program = scalar_program("attention", a.q, a.k, a.v, a.y, a.bias)
        return Launch(self.launcher, program, name, grid, (_LANES, rows_of_block), **members)


def _rules(g: AttentionGeometry) -> dict[str, Any]:
    """Return the struct members that describe the axes; absent axes have one position."""
    absent = _AXES - len(g.reaches)
    # The absent axes come first: the last one stays the fastest in memory.
    reaches = (*(Everywhere(1, 1),) * absent, *g.reaches)
    queries, keys = (((0, 1),) * absent + intervals for intervals in (g.queries, g.keys))
    members: dict[str, Any] = {
        "rule": [_number(r) for r in reaches],
        "size": [r.keys for r in reaches],
        "extent": [r.extent for r in reaches],
        "shift": [getattr(r, "shift", 0) for r in reaches],
        "dilation": [r.dilation for r in reaches],
        "table": [r.bias_extent for r in reaches],
    }
    for name, intervals in (("query", queries), ("key", keys)):
        members[f"{name}_start"] = [start for start, _ in intervals]
        members[f"{name}_count"] = [stop - start for start, stop in intervals]
    counts = zip(reaches, members["query_count"], members["key_count"])
    # All rows of a block take as many steps as the longest may need, because they wait for each other. With windows or
    # neighborhoods of e keys, at most 2 e - 1 queries read a key, more than a query has keys.
    members["most"] = math.prod(max(q, k) if isinstance(r, Everywhere) else 2 * r.extent - 1 for r, q, k in counts)
    return members


def _number(reach: Reach) -> int:
    """Return the number of a rule in the source (`enum Rule` of attention.cu)."""
    if isinstance(reach, Everywhere):
        return 0
    return 2 if isinstance(reach, Neighborhood) else 1


def _dropout(mask: DropoutMask, ndim: int) -> dict[str, Any]:
    # Elements between neighbors in the array of all probabilities, (samples, heads, *queries, *keys).
    strides = [math.prod(mask.shape[axis + 1 :]) for axis in range(len(mask.shape))]
    base = sum(a * s for a, s in zip(mask.start, strides)) * _GOLDEN & _MASK
    absent = (0,) * (_AXES - ndim)
    steps = (*strides[:2], *absent, *strides[2 : 2 + ndim], *absent, *strides[2 + ndim :])
    return {
        "state": mask.state,
        "salt": mask.salt,
        # A hash of 64 bits below it drops the probability.
        "threshold": int(mask.rate * 2**64),
        "base": base,
        "sample": strides[0] * _GOLDEN & _MASK,
        "steps": [s * _GOLDEN & _MASK for s in steps],
        "kept": 1 / (1 - mask.rate),
    }
