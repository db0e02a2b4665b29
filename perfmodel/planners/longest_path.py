"""Dryden's treatment of branches: the longest path first (Dryden et al. 2019, Section V-C)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from halograd.errors import UserError

from .costs import memory_problem
from .elimination import Elimination
from .paths import best_along, inputs_of
from .planner import Planner, choice_of
from .problem import Array, Choice, Problem, Work

__all__ = ["LongestPathFirst", "follow", "path_order"]

#: Steps of the search for a price of memory: doublings, then halvings.
STEPS = 40


class LongestPathFirst(Planner):
    """Plan the longest path as if it were the network, keep its choices, go on with the next longest.

    The length of a layer is the time of its fastest candidate: what must be computed in any case. The next path, from
    a layer that reads nothing to one that nothing reads, is the one with the fewest layers already decided, then the
    longest. Unlike in the paper, edges to layers decided before and beside the path are counted too.
    Not optimal: what a path decides does not see the branches that come later. The gap it reports is to the sum of
    all smallest times.

    A memory limit is met with a price [s/B] on memory, the smallest found (by bisection) at which the result fits. A
    choice may be missed although one exists; then it says so, and `Elimination` finds it.
    """

    name = "longest_path_first"

    def _search(self, problem: Problem) -> Choice:
        paths = path_order(problem)
        indices = follow(problem, paths)
        passes = 1
        if not problem.fits(indices):
            indices, passes = _priced(problem, paths, indices)
        if not problem.fits(indices) or math.isinf(problem.seconds(indices)):
            Elimination().plan(problem)  # says why, if nothing is possible
            raise UserError(
                f"planner {self.name}: expected a candidate that is allowed and fits for every layer, but what the "
                "first paths decided leaves none; use planner elimination, which finds one"
            )
        bound = sum(float(t.min()) for t in [*problem.times, *problem.edges.values()])
        gap = max(0.0, problem.seconds(indices) - bound)
        return choice_of(problem, indices, gap == 0.0, gap, Work(states=passes * sum(problem.sizes)))


def _priced(problem: Problem, paths: list[list[int]], free: list[int]) -> tuple[list[int], int]:
    """A choice that fits at a price as low as possible; the smallest one found if none does. Also passes made."""
    assert problem.limit is not None
    small = follow(memory_problem(problem), paths)
    if not problem.fits(small):
        return small, 2
    low, high, best = 0.0, 0.0, small
    usual = sum(float(t[np.isfinite(t)].sum()) for t in problem.times)
    price = max(abs(usual), 1e-30) / max(abs(problem.bytes(free)), 1.0)
    for step in range(STEPS):
        indices = follow(problem, paths, price)
        if problem.fits(indices):
            high = price
            best = indices if problem.seconds(indices) <= problem.seconds(best) else best
        else:
            low = price
        price = 2.0 * price if not high else 0.5 * (low + high)
        if high and high - low < 1e-3 * high:
            return best, step + 3
    return best, STEPS + 2


def follow(problem: Problem, paths: Sequence[Sequence[int]], price: float = 0.0) -> list[int]:
    """Candidate per layer, path by path; costs are ``time + price * memory``."""
    neighbors: list[list[int]] = [[] for _ in problem.names]
    for u, v in problem.edges:
        neighbors[u].append(v)
        neighbors[v].append(u)
    decided: dict[int, int] = {}

    def table(u: int, v: int) -> Array:
        """Cost of an edge, ``[candidates of u, of v]``, in whichever direction it runs."""
        edge = (min(u, v), max(u, v))
        cost = problem.edges[edge]
        if price and edge in problem.edge_memory:
            cost = cost + price * problem.edge_memory[edge]
        return cost if u < v else cost.T

    def own(v: int) -> Array:
        cost = problem.times[v] + price * problem.memory[v]
        if v in decided:
            return np.where(np.arange(len(cost)) == decided[v], cost, np.inf)
        return sum((table(u, v)[decided[u]] for u in neighbors[v] if u in decided), cost)

    for path in paths:
        costs = [own(v) for v in path]
        _, chosen = best_along(costs, _open_edges(path, set(decided), table))
        decided.update({v: i for v, i in zip(path, chosen) if v not in decided})
    return [decided[v] for v in range(len(problem.names))]


def _open_edges(
    path: Sequence[int], decided: set[int], table: Callable[[int, int], Array]
) -> Callable[[int], Array | None]:
    """Costs between the layers of a path, where they are not in the layers' own: with neither end decided before."""

    def between(i: int) -> Array | None:
        u, v = path[i], path[i + 1]
        return None if u in decided or v in decided else table(u, v)

    return between


def path_order(problem: Problem) -> list[list[int]]:
    """Paths from end to end that together hold all layers: fewest decided layers first, then the longest."""
    count = len(problem.names)
    length = [float(t.min()) if np.isfinite(t.min()) else 0.0 for t in problem.times]
    inputs, outputs = inputs_of(count, list(problem.edges))
    decided: set[int] = set()
    found = []
    while len(decided) < count:
        ahead = _best_ends(range(count), inputs, length, decided)
        behind = _best_ends(range(count - 1, -1, -1), outputs, length, decided)
        # Through an undecided layer: it is counted in both halves, and adds to length only.
        through = [
            (ahead[v][0] + behind[v][0], ahead[v][1] + behind[v][1] + length[v], v)
            for v in range(count)
            if v not in decided
        ]
        v = min(through)[2]
        path = [*_trace(ahead, v)[::-1], *_trace(behind, v)[1:]]
        found.append(path)
        decided.update(path)
    return found


Reach = tuple[int, float, int]  # decided layers, minus length, next layer (-1: the end)


def _best_ends(
    layers: Sequence[int], sources: Sequence[Sequence[int]], length: Sequence[float], decided: set[int]
) -> list[Reach]:
    """Per layer, the best way from it to an end of the network."""
    best: list[Reach] = [(0, 0.0, -1)] * len(length)
    for v in layers:
        ways = [(best[u][0], best[u][1], u) for u in sources[v]]
        taken, minus, following = min(ways, default=(0, 0.0, -1))
        best[v] = (taken + (v in decided), minus - length[v], following)
    return best


def _trace(best: Sequence[Reach], v: int) -> list[int]:
    """The way from a layer to the end."""
    way = [v]
    while best[way[-1]][2] >= 0:
        way.append(best[way[-1]][2])
    return way
