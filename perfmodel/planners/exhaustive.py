"""Looks at every choice: the oracle of all other planners, for small problems."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from halograd.errors import UserError

from .planner import Planner, choice_of, no_fit, not_allowed
from .problem import Array, Choice, Problem, Work

__all__ = ["Exhaustive"]

BLOCK = 1 << 16


class Exhaustive(Planner):
    """Plain enumeration in blocks; of equally fast choices the first in lexicographic order.

    Parameters
    ----------
    states
        Largest number of choices it agrees to look at.
    """

    name = "exhaustive"

    def __init__(self, states: int = 20_000_000) -> None:
        self.states = states

    def _search(self, problem: Problem) -> Choice:
        total = math.prod(problem.sizes)
        if total > self.states:
            raise UserError(
                f"planner exhaustive: expected at most {self.states} choices, got {float(total):.3g}; "
                "use planner elimination, which finds the same"
            )
        best, found, smallest = math.inf, -1, math.inf
        for first, seconds, nbytes in blocks(problem, total):
            allowed = np.isfinite(seconds)
            smallest = min(smallest, float(nbytes[allowed].min(initial=math.inf)))
            if problem.limit is not None:
                seconds[nbytes > problem.limit] = math.inf
            at = int(seconds.argmin())
            if seconds[at] < best:
                best, found = float(seconds[at]), first + at
        if found < 0:
            raise not_allowed(problem) if smallest == math.inf else no_fit(problem, smallest)
        indices = numbered(np.array([found]), problem.sizes)
        return choice_of(problem, [int(i[0]) for i in indices], optimal=True, work=Work(states=total))


def numbered(states: NDArray[np.int64], sizes: Sequence[int]) -> list[NDArray[np.int64]]:
    """Candidate of every layer in choices by their number (`numpy.unravel_index` for any number of layers)."""
    index = []
    for size in reversed(sizes):
        states, candidate = np.divmod(states, size)
        index.append(candidate)
    return index[::-1]


def blocks(problem: Problem, total: int) -> Iterator[tuple[int, Array, Array]]:
    """First number, times [s] and memory [B] of all choices, numbered in row-major order, block by block."""
    for first in range(0, total, BLOCK):
        states = np.arange(first, min(first + BLOCK, total))
        index = numbered(states, problem.sizes)
        seconds, nbytes = np.zeros(len(states)), np.zeros(len(states))
        for v, i in enumerate(index):
            seconds += problem.times[v][i]
            nbytes += problem.memory[v][i]
        for (u, v), table in problem.edges.items():
            seconds += table[index[u], index[v]]
        for (u, v), table in problem.edge_memory.items():
            nbytes += table[index[u], index[v]]
        yield first, seconds, nbytes
