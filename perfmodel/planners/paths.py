"""Planners that follow paths (Dryden et al. 2019, Section V-C): the shortest path of a chain, and the longest path
first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from halograd.errors import UserError

from .elimination import Elimination
from .problem import Array, Effort, Planner, Problem, Selection, memory_problem

__all__ = ["LongestPathFirst", "ShortestPath", "path_order"]


def best_along(own: Sequence[Array], between: Sequence[Array | None]) -> list[int]:
    """Return the candidate per layer of the shortest path (Dryden et al. 2019, Section V-C).

    Parameters
    ----------
    own
        Cost per layer of the path, ``[candidates]``.
    between
        Cost per pair of consecutive layers, ``[candidates, candidates]``; None: a pair without costs.
    """
    reach = own[0]  # cost of the cheapest path to each candidate of the current layer
    came_from = []
    for costs, table in zip(own[1:], between):
        # The zeros have a column per candidate of the next layer, each of which needs a predecessor.
        steps = reach[:, None] + (np.zeros((1, len(costs))) if table is None else table)
        came_from.append(steps.argmin(axis=0))
        reach = steps.min(axis=0) + costs
    indices = [int(reach.argmin())]
    for best in reversed(came_from):
        indices.append(int(best[indices[-1]]))
    return indices[::-1]


class ShortestPath(Planner):
    """Planner by the shortest path from the first layer to the last over all candidates: the optimum of a chain.

    The graph has a vertex per candidate, and an edge to each candidate of the next layer, weighted with the time of the
    layer and of the redistribution. On chains, `Elimination` is the same dynamic program, also under a memory limit.
    This planner rejects networks that are not chains.
    """

    name = "shortest_path"

    def _search(self, problem: Problem) -> Selection:
        for v, around in enumerate(problem.neighbors):
            # Edges run forward: earlier neighbors are inputs, later ones are readers.
            inputs = sum(u < v for u in around)
            if inputs <= 1 and len(around) - inputs <= 1:
                continue
            raise UserError(
                f"planner shortest_path: expected a network without branches, but layer {problem.names[v]} reads or "
                "feeds more than one other; use planner elimination (optimal) or longest_path_first"
            )
        return Elimination().plan(problem)


#: Number of steps of the search for a price of memory: doublings, then halvings.
STEPS = 40


class LongestPathFirst(Planner):
    """Planner that plans the longest path as if it were the network, then the next longest, with earlier choices fixed.

    The length of a layer is the time of its fastest candidate: the work that is always necessary. The next path, from a
    layer without inputs to a layer without readers, is the one with the fewest decided layers, then the longest. Unlike
    in the paper, edges to layers that were decided before, outside the path, are counted too.

    The result is not optimal: a path's choices ignore the branches that come later. The reported gap is the difference
    from the sum of the minimum times of all layers and edges.

    A Lagrange multiplier (`price` [s/B]) handles a memory limit: bisection finds the smallest one at which the result
    fits. The planner may find no choice although one exists; its error then refers to `Elimination`, which finds it.
    """

    name = "longest_path_first"

    def _search(self, problem: Problem) -> Selection:
        paths = path_order(problem)
        indices = follow(problem, paths)
        passes = 1
        if not problem.fits(indices):
            indices, passes = _priced(problem, paths, indices)
        if not problem.fits(indices) or math.isinf(problem.seconds(indices)):
            Elimination().plan(problem)  # raises the reason if nothing is possible
            raise UserError(
                f"planner {self.name}: expected a candidate that is allowed and fits for every layer, but the choices "
                "of the first paths leave none; use planner elimination, which finds one"
            )
        bound = sum(float(t.min()) for t in [*problem.times, *problem.edges.values()])
        gap = max(0.0, problem.seconds(indices) - bound)
        return problem.choice(indices, gap == 0.0, gap, Effort(states=passes * sum(problem.sizes)))


def _priced(problem: Problem, paths: list[list[int]], free: list[int]) -> tuple[list[int], int]:
    """Return the fastest choice found within the memory limit, by a bisection of the Lagrange multiplier of memory.

    If no choice of the bisection is within the limit, return the one that was found for the least memory. The second
    result is the number of passes over all paths. `free` is the choice without a limit.
    """
    assert problem.limit is not None
    small = follow(memory_problem(problem), paths)
    # This planner finds no choice with less memory; the caller reports it.
    if not problem.fits(small):
        return small, 2
    low, high, best = 0.0, 0.0, small
    usual = sum(float(t[np.isfinite(t)].sum()) for t in problem.times)
    # The first price makes the memory of the fastest choice cost about as much as its time.
    price = max(abs(usual), 1e-30) / max(abs(problem.bytes(free)), 1.0)
    for step in range(STEPS):
        indices = follow(problem, paths, price)
        if problem.fits(indices):
            high = price
            best = indices if problem.seconds(indices) <= problem.seconds(best) else best
        else:
            low = price
        # Doubled until a choice fits; then the interval is halved.
        price = 2.0 * price if not high else 0.5 * (low + high)
        if high and high - low < 1e-3 * high:
            return best, step + 3
    return best, STEPS + 2


def follow(problem: Problem, paths: Sequence[Sequence[int]], price: float = 0.0) -> list[int]:
    """Return the candidate per layer, chosen path by path; costs are ``time + price * memory``."""
    decided: dict[int, int] = {}

    def table(u: int, v: int) -> Array:
        """Return the cost of an edge, ``[candidates of u, of v]``, for either direction of the edge."""
        edge = (min(u, v), max(u, v))
        cost = problem.edges[edge]
        if price and edge in problem.edge_memory:
            cost = cost + price * problem.edge_memory[edge]
        return cost if u < v else cost.T

    def own(v: int) -> Array:
        cost = problem.times[v] + price * problem.memory[v]
        if v in decided:
            return np.where(np.arange(len(cost)) == decided[v], cost, np.inf)
        return sum((table(u, v)[decided[u]] for u in problem.neighbors[v] if u in decided), cost)

    for path in paths:
        # Costs of edges with a decided end are among the other layer's own costs.
        between = [None if decided.keys() & {u, v} else table(u, v) for u, v in itertools.pairwise(path)]
        chosen = best_along([own(v) for v in path], between)
        decided.update({v: i for v, i in zip(path, chosen) if v not in decided})
    return [decided[v] for v in range(len(problem.names))]


def path_order(problem: Problem) -> list[list[int]]:
    """Return paths from end to end that together cover all layers: fewest decided layers first, then the longest."""
    count = len(problem.names)
    length = [float(t.min()) if np.isfinite(t.min()) else 0.0 for t in problem.times]
    inputs = [[u for u in problem.neighbors[v] if u < v] for v in range(count)]
    outputs = [[w for w in problem.neighbors[v] if w > v] for v in range(count)]
    decided: set[int] = set()
    paths = []
    while len(decided) < count:
        ahead = _best_ends(range(count), inputs, length, decided)
        after = _best_ends(range(count - 1, -1, -1), outputs, length, decided)
        # The path goes through an undecided layer: both halves count it, and it adds only to the length.
        through = [
            (ahead[v][0] + after[v][0], ahead[v][1] + after[v][1] + length[v], v)
            for v in range(count)
            if v not in decided
        ]
        v = min(through)[2]
        path = [*_trace(ahead, v)[::-1], *_trace(after, v)[1:]]
        paths.append(path)
        decided.update(path)
    return paths


Reach = tuple[int, float, int]  # decided layers, minus length, next layer (-1: the end)


def _best_ends(
    layers: Sequence[int], sources: Sequence[Sequence[int]], length: Sequence[float], decided: set[int]
) -> list[Reach]:
    """Return, per layer, the best path from it to an end of the network, along `sources`."""
    best: list[Reach] = [(0, 0.0, -1)] * len(length)
    # Every layer comes after its sources, so their paths are final.
    for v in layers:
        ways = [(best[u][0], best[u][1], u) for u in sources[v]]
        cost, minus, following = min(ways, default=(0, 0.0, -1))
        best[v] = (cost + (v in decided), minus - length[v], following)
    return best


def _trace(best: Sequence[Reach], v: int) -> list[int]:
    """Return the path from a layer to the end."""
    way = [v]
    while best[way[-1]][2] >= 0:
        way.append(best[way[-1]][2])
    return way
