"""Sums and minima of cost tables: the arithmetic of every elimination."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from .problem import Array

__all__ = ["Pool", "aligned", "minimum_of_sum", "scope_shape"]

#: Entries of a block of output: with its scratch and operands it stays in a second-level cache.
BLOCK = 1 << 14


class Pool:
    """Equal arrays become one object, so that work on them is recognized and done once.

    Networks repeat themselves (36 equal blocks in ResNet-152): their tables are equal, then the tables computed from
    these are one object, and so on up.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[Array, Array]] = {}
        self._by_content: dict[tuple[tuple[int, ...], bytes], Array] = {}

    def one(self, table: Array) -> Array:
        """The first array of this content that was seen."""
        known = self._by_id.get(id(table))
        if known is None:
            packed = np.ascontiguousarray(table)
            digest = hashlib.blake2b(packed.data if packed.size else b"", digest_size=16).digest()
            known = (table, self._by_content.setdefault((packed.shape, digest), packed))
            self._by_id[id(table)] = known  # holds the array, whose id is therefore not used again
        return known[1]


def aligned(table: Array, scope: Sequence[int], first: int, others: Sequence[int]) -> Array:
    """A table over the layers ``scope`` as one over ``(first, *others)``; axes it does not have get length 1."""
    order = [layer for layer in (first, *others) if layer in scope]
    moved = table.transpose([scope.index(layer) for layer in order])
    shape = iter(moved.shape)
    return np.ascontiguousarray(moved).reshape([next(shape) if layer in scope else 1 for layer in (first, *others)])


def scope_shape(arrays: Sequence[Array]) -> tuple[int, ...]:
    """Shape of the sum of aligned tables."""
    return np.broadcast_shapes(*(a.shape for a in arrays))


def minimum_of_sum(arrays: Sequence[Array]) -> Array:
    """``min over axis 0 of the sum`` of aligned tables: the cost of an eliminated layer (Jia et al. 2018, Eq. 2).

    Two tables ``A[c, u]`` and ``B[c, w]`` give the min-plus matrix product of node elimination. The sum itself,
    ``candidates`` times as large as the result, is never stored: results are built in blocks that stay in cache.

    Parameters
    ----------
    arrays
        At least one; equally many axes, lengths equal or 1. Not modified.

    Returns
    -------
    Array
        Shape of the sum without its first axis.
    """
    arrays = absorbed(arrays)
    if len(arrays) == 1:
        return np.asarray(arrays[0].min(axis=0))
    shape = scope_shape(arrays)
    if np.prod(shape) <= BLOCK:
        return np.asarray(sum(arrays[1:], arrays[0]).min(axis=0))
    out = np.empty(shape[1:])
    rows = max(1, BLOCK * shape[1] // out.size)
    for start in range(0, shape[1], rows):
        piece = slice(start, start + rows)
        _minimize_into(out[piece], [a if a.shape[1] == 1 else a[:, piece] for a in arrays], shape[0])
    return out


def _minimize_into(out: Array, arrays: Sequence[Array], count: int) -> None:
    scratch = np.empty_like(out)
    for c in range(count):
        into = scratch if c else out
        terms = [a[c if len(a) > 1 else 0] for a in arrays]
        np.add(terms[0], terms[1], out=into)
        for term in terms[2:]:
            np.add(into, term, out=into)
        if c:
            np.minimum(out, scratch, out=out)


def absorbed(arrays: Sequence[Array]) -> list[Array]:
    """The same sum with every table added to one that has all its axes, if there is one."""
    left = sorted(arrays, key=lambda a: a.size)
    kept: list[Array] = []
    for i, small in enumerate(left):
        for j in range(i + 1, len(left)):
            if np.broadcast_shapes(small.shape, left[j].shape) == left[j].shape:
                left[j] = left[j] + small
                break
        else:
            kept.append(small)
    return kept
