"""Dynamic programming on networks without branches (Dryden et al. 2019, Section V-C)."""

from __future__ import annotations

import math

from halograd.errors import UserError

from .elimination import Elimination
from .paths import best_along, branching, lines
from .planner import Planner, choice_of
from .problem import Choice, Problem, Work

__all__ = ["ShortestPath"]


class ShortestPath(Planner):
    """The shortest path from the first layer to the last over all candidates; the optimum of a line.

    A vertex per candidate, an edge from each to each of the next layer, weighted with the time of the layer and of
    the redistribution. Several lines that share no edge are planned one after the other. Where a memory limit binds,
    a path is not enough; then the price for memory and the search of `Elimination` take over, which on a line is this
    dynamic program with a second quantity.
    """

    name = "shortest_path"

    def _search(self, problem: Problem) -> Choice:
        v = branching(problem)
        if v is not None:
            raise UserError(
                f"planner shortest_path: expected a network without branches, but layer {problem.names[v]} reads or "
                "feeds more than one other; use planner elimination (optimal) or longest_path_first"
            )
        indices, total = [0] * len(problem.names), 0.0
        for path in lines(problem):
            own = [problem.times[u] for u in path]
            seconds, chosen = best_along(own, lambda i, path=path: problem.edges[path[i], path[i + 1]])  # type: ignore[misc]
            total += seconds
            for u, candidate in zip(path, chosen):
                indices[u] = candidate
        work = Work(operations=sum(t.size for t in problem.edges.values()), states=sum(problem.sizes))
        if math.isfinite(total) and problem.fits(indices):
            return choice_of(problem, indices, optimal=True, work=work)
        choice = Elimination().plan(problem)
        return choice_of(problem, choice.indices, choice.optimal, choice.gap, work + choice.work)
