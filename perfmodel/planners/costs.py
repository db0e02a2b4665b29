"""The tables of a problem: times, memory, and weighted sums of both."""

from __future__ import annotations

import numpy as np

from .buckets import Table
from .problem import Array, Problem
from .tables import Pool

__all__ = ["Costs", "memory_problem"]


class Costs:
    """Tables of layers, then of edges, for `Buckets.run`; equal ones are one object.

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
        """Tables of ``time + multiplier * memory``; ``multiplier`` in [s/B]."""
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
        """Tables of memory [B], infinite where the time is."""
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
    """The problem whose fastest choice is the smallest one of this problem, "times" in [B]."""
    tables = Costs(problem).memory()
    count = len(problem.names)
    times = tuple(np.asarray(t) for t in tables[:count])
    edges = {
        edge: np.zeros(between.shape) if t is None else t
        for (edge, between), t in zip(problem.edges.items(), tables[count:])
    }
    return Problem(problem.names, times, problem.memory, edges)
