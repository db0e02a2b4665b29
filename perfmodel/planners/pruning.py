"""Candidates that no best choice needs, found cheaply before the search.

A candidate is removed only if it is impossible (infinite, alone or with every candidate of a neighbor; or too large
even if all other layers take the least memory), or if another candidate of the same layer is never worse: whatever
the neighbors choose, exchanging one for the other costs no more time and no more memory (the *dead-end elimination*
of Desmet et al. 1992, here with a resource). So the best time, and the least memory, are what they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .problem import Array, Edge, Problem

__all__ = ["Pruned", "prune"]

Kept = NDArray[np.intp]


@dataclass(frozen=True)
class Pruned:
    """A problem with ``removed`` candidates less; ``kept``: which stayed, per layer, as numbered before."""

    problem: Problem
    kept: tuple[Kept, ...]
    removed: int

    def original(self, indices: list[int]) -> list[int]:
        """Numbers in the problem it came from."""
        return [int(k[i]) for k, i in zip(self.kept, indices)]


def prune(problem: Problem, keep: int | None = None, rounds: int = 3) -> Pruned:
    """Remove candidates without loss of the optimum.

    Parameters
    ----------
    keep
        A layer whose candidates are all kept, however bad (for what the best choice with each of them costs).
    rounds
        What is removed makes more removable: how often to try again at most.
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
    """Smallest and largest entry of each row (or column) of tables, once per table."""

    def __init__(self, problem: Problem) -> None:
        self._found: dict[tuple[int, int], tuple[Array, Array]] = {}
        self._ends: list[list[tuple[Edge, int]]] = [[] for _ in problem.names]
        for u, v in problem.edges:
            self._ends[u].append(((u, v), 1))
            self._ends[v].append(((u, v), 0))

    def sums(self, layer: int, own: Array, tables: Mapping[Edge, Array]) -> tuple[Array, Array]:
        """Per candidate, the least and the most it costs with all its edges."""
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
    """Per layer and candidate whether it may be needed; None if nothing is possible at all."""
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
        # never_worse[a, b]: b instead of a costs no more; equal ones: the first stays.
        never_worse = most[None, :] <= least[:, None]
        if limited:
            never_worse &= large[None, :] <= small[:, None]
        first = np.tri(len(times), k=-1, dtype=bool)
        never_worse &= ~never_worse.T | first
        np.fill_diagonal(never_worse, False)
        alive.append(good & ~(never_worse & good[None, :]).any(axis=1))
    return alive


def _room(problem: Problem) -> float:
    """Memory that is left if every layer and edge takes its least [B]."""
    assert problem.limit is not None
    least = sum(float(m.min()) for m in problem.memory) + sum(float(t.min()) for t in problem.edge_memory.values())
    return problem.limit - least
