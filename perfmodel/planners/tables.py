"""Cost tables: their sums and minima, which are the arithmetic of every elimination; and candidates that need no
search.

`prune` removes a candidate only if it is impossible (infinite, alone or with every candidate of a neighbor; or too
large even if all other layers use the least memory), or if another candidate of the same layer is never worse: for all
choices of the neighbors, the exchange costs no more time and no more memory (the *dead-end elimination* of Desmet et
al. 1992, here with a resource). So the best time and the minimum memory do not change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .problem import Array, Edge, Problem

__all__ = ["Costs", "Pruned", "aligned", "memory_problem", "minimum_of_sum", "prune"]

Table = Array | None  # None: zero everywhere

#: Number of entries of a block of output: with its scratch and operands it stays in the second-level cache.
BLOCK = 1 << 14


class Pool:
    """Set of arrays in which equal arrays become one object, so that work on them is recognized and done once.

    Networks repeat themselves (36 equal blocks in ResNet-152): their tables are equal, the tables computed from them
    are one object, and so on.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[Array, Array]] = {}
        self._by_content: dict[tuple[tuple[int, ...], bytes], Array] = {}

    def one(self, table: Array) -> Array:
        """Return the first array with the same content."""
        known = self._by_id.get(id(table))
        if known is None:
            packed = np.ascontiguousarray(table)
            digest = hashlib.blake2b(packed.data if packed.size else b"", digest_size=16).digest()
            known = (table, self._by_content.setdefault((packed.shape, digest), packed))
            self._by_id[id(table)] = known  # keeps the array alive, so that its id is not reused
        return known[1]


def aligned(table: Array, scope: Sequence[int], first: int, others: Sequence[int]) -> Array:
    """Return a table over the layers ``scope`` as a table over ``(first, *others)``; missing axes get length 1."""
    order = [layer for layer in (first, *others) if layer in scope]
    moved = table.transpose([scope.index(layer) for layer in order])
    shape = iter(moved.shape)
    return np.ascontiguousarray(moved).reshape([next(shape) if layer in scope else 1 for layer in (first, *others)])


def scope_shape(arrays: Sequence[Array]) -> tuple[int, ...]:
    """Return the shape of the sum of aligned tables."""
    return np.broadcast_shapes(*(a.shape for a in arrays))


def minimum_of_sum(arrays: Sequence[Array]) -> Array:
    """Return the minimum over axis 0 of the sum of aligned tables: the cost of an eliminated layer (Jia et al. 2018,
    Eq. 2).

    Two tables ``A[c, u]`` and ``B[c, w]`` give the min-plus matrix product of node elimination. The sum itself,
    ``candidates`` times as large as the result, is never stored: results are computed in blocks that stay in cache.

    Parameters
    ----------
    arrays
        At least one array; all with the same number of axes, and equal lengths or 1. Not modified.

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
    """Return the same sum with every table added to one that has all its axes, if there is one."""
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


class Costs:
    """Tables of layers, then of edges, for `Clusters.run`; equal tables are one object.

    Attributes
    ----------
    edges
        Pairs of layers, in the order of their tables.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.edges = list(problem.edges)
        self._pool = Pool()
        self._pairs: list[tuple[Array, Array | None]] = []
        for edge, table in problem.edges.items():
            extra = problem.edge_memory.get(edge)
            self._pairs.append((self._pool.one(table), None if extra is None else self._pool.one(extra)))

    def weighted(self, multiplier: float = 0.0) -> list[Table]:
        """Return the tables of ``time + multiplier * memory``; ``multiplier`` in [s/B]."""
        layers = zip(self.problem.times, self.problem.memory)
        tables: list[Table] = [self._pool.one(t + multiplier * m if multiplier else t) for t, m in layers]
        made: dict[tuple[int, int], Array] = {}
        for seconds, nbytes in self._pairs:
            if nbytes is None or not multiplier:
                tables.append(seconds if seconds.any() else None)
                continue
            key = (id(seconds), id(nbytes))
            if key not in made:
                made[key] = seconds + multiplier * nbytes
            tables.append(made[key])
        return tables

    def memory(self) -> list[Table]:
        """Return the tables of memory [B]; infinite if the time is."""
        layers = zip(self.problem.times, self.problem.memory)
        tables: list[Table] = [self._pool.one(np.where(np.isinf(t), np.inf, m)) for t, m in layers]
        made: dict[tuple[int, int], Table] = {}
        for seconds, nbytes in self._pairs:
            key = (id(seconds), id(nbytes))
            if key not in made:
                made[key] = _memory_of(seconds, nbytes)
            tables.append(made[key])
        return tables


def _memory_of(seconds: Array, nbytes: Array | None) -> Table:
    forbidden = np.isinf(seconds)
    if forbidden.any():
        return np.where(forbidden, np.inf, 0.0 if nbytes is None else nbytes)
    return nbytes if nbytes is not None and nbytes.any() else None


def memory_problem(problem: Problem) -> Problem:
    """Return the problem whose fastest choice is the smallest choice of this problem; its "times" are in [B]."""
    tables = Costs(problem).memory()
    count = len(problem.names)
    times = tuple(np.asarray(t) for t in tables[:count])
    edges = {
        edge: np.zeros(between.shape) if t is None else t
        for (edge, between), t in zip(problem.edges.items(), tables[count:])
    }
    return Problem(problem.names, times, problem.memory, edges)


Kept = NDArray[np.intp]


@dataclass(frozen=True)
class Pruned:
    """A problem with ``removed`` fewer candidates; ``kept`` holds, per layer, the original numbers of the remaining
    ones.
    """

    problem: Problem
    kept: tuple[Kept, ...]
    removed: int

    def original(self, indices: list[int]) -> list[int]:
        """Return the candidate numbers in the original problem."""
        return [int(k[i]) for k, i in zip(self.kept, indices)]


def prune(problem: Problem, keep: int | None = None, rounds: int = 3) -> Pruned:
    """Remove candidates without losing the optimum.

    Parameters
    ----------
    keep
        Layer whose candidates are all kept, however bad (to compute the best choice with each of them).
    rounds
        Maximum number of repetitions; removed candidates may make others removable.
    """
    kept: tuple[Kept, ...] = tuple(np.arange(size) for size in problem.sizes)
    smaller = problem
    for _ in range(rounds):
        alive = _alive(smaller, keep)
        if alive is None or all(a.all() for a in alive):
            break
        chosen = [np.flatnonzero(a) for a in alive]
        kept = tuple(k[c] for k, c in zip(kept, chosen))
        smaller = smaller.restricted(chosen)
    return Pruned(smaller, kept, sum(problem.sizes) - sum(smaller.sizes))


class _Extremes:
    """Minimum and maximum of each row (or column) of tables, computed once per table."""

    def __init__(self, problem: Problem) -> None:
        self._found: dict[tuple[int, int], tuple[Array, Array]] = {}
        self._ends: list[list[tuple[Edge, int]]] = [[] for _ in problem.names]
        for u, v in problem.edges:
            self._ends[u].append(((u, v), 1))
            self._ends[v].append(((u, v), 0))

    def sums(self, layer: int, own: Array, tables: Mapping[Edge, Array]) -> tuple[Array, Array]:
        """Return, per candidate, the minimum and the maximum of its cost with all its edges."""
        least, most = own.copy(), own.copy()
        for edge, axis in self._ends[layer]:
            table = tables.get(edge)
            if table is None:
                continue
            key = (id(table), axis)
            if key not in self._found:
                self._found[key] = (table.min(axis=axis), table.max(axis=axis))
            least += self._found[key][0]
            most += self._found[key][1]
        return least, most


def _alive(problem: Problem, keep: int | None) -> list[NDArray[np.bool_]] | None:
    """Return, per layer and candidate, whether it may be needed; None if nothing is possible at all."""
    extremes = _Extremes(problem)
    limited = problem.limit is not None
    room = _room(problem) if limited else np.inf
    alive = []
    for v, (times, memory) in enumerate(zip(problem.times, problem.memory)):
        least, most = extremes.sums(v, times, problem.edges)
        good = np.isfinite(least)
        if limited:
            small, large = extremes.sums(v, memory, problem.edge_memory)
            good &= memory - memory.min() <= room
        if not good.any():
            return None
        if v == keep:
            alive.append(np.ones_like(good))
            continue
        # never_worse[a, b]: b never costs more than a; of equal candidates the first stays.
        never_worse = most[None, :] <= least[:, None]
        if limited:
            never_worse &= large[None, :] <= small[:, None]
        first = np.tri(len(times), k=-1, dtype=bool)
        never_worse &= ~never_worse.T | first
        np.fill_diagonal(never_worse, False)
        alive.append(good & ~(never_worse & good[None, :]).any(axis=1))
    return alive


def _room(problem: Problem) -> float:
    """Return the memory that is left if every layer and edge uses its minimum [B]."""
    assert problem.limit is not None
    least = sum(float(m.min()) for m in problem.memory) + sum(float(t.min()) for t in problem.edge_memory.values())
    return problem.limit - least
