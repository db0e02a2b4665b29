"""The optimum for any graph and any memory limit (Jia et al. 2018, Section 5, and what goes beyond it)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NoReturn

from halograd.errors import UserError

from .buckets import SUM_LIMIT, TABLE_LIMIT, Buckets, Messages
from .costs import Costs, memory_problem
from .labels import Bounds, search
from .lagrangian import Relaxation, relax
from .planner import Planner, choice_of, no_fit, not_allowed
from .problem import Choice, Problem, Work
from .pruning import prune

__all__ = ["Elimination"]

#: Sums of times closer than this, relative to the total, are equal.
ROUNDING = 1e-12
#: Limits of tables and sums, and of partial choices, of the first try. Two neighbors of 200 candidates still fit.
FIRST_LIMITS, FIRST_LABELS = (1 << 16, 1 << 23), 20_000


class GaveUp(UserError):
    """The limits on the work leave no choice found and none excluded."""


class Elimination(Planner):
    """Node and edge elimination, continued to larger tables where the graph asks for it; the optimum.

    1. Candidates that are provably needless are removed (`prune`).
    2. All layers are eliminated (`Buckets`): on series-parallel networks these are the node and edge eliminations
       of Jia et al. 2018; on others tables over more than two layers appear. If the result fits, it is the optimum.
    3. Under a memory limit that binds, prices for memory give a lower bound (`relax`), and a search among all
       choices near it (`search`) the optimum. The same search closes the gap where tables would be too large and
       buckets were split.

    Where buckets are too large for `FIRST_LIMITS`, all this is tried with small tables first: bounds from split
    buckets are often so tight that the search proves the optimum in a fraction of the time of the large tables.

    The search widens the distance to the lower bound until it has found a choice within. If it would need more than
    ``labels`` partial choices at once, it stops with the best choice found and a proved gap, ``optimal=False``.

    Parameters
    ----------
    labels
        Partial choices kept per layer at most.
    table_limit, sum_limit
        Entries of the largest table kept, and of the largest sum minimized over.
    pruning
        Whether to remove needless candidates first.
    """

    name = "elimination"

    def __init__(
        self,
        labels: int = 100_000,
        table_limit: int = TABLE_LIMIT,
        sum_limit: int = SUM_LIMIT,
        pruning: bool = True,
    ) -> None:
        self.labels = labels
        self.limits = (table_limit, sum_limit)
        self.pruning = pruning

    def _search(self, problem: Problem) -> Choice:
        if not self.pruning:
            return self._staged(problem, problem)
        pruned = prune(problem)
        choice = self._staged(pruned.problem, problem)
        work = choice.work + Work(pruned=pruned.removed)
        return choice_of(problem, pruned.original(list(choice.indices)), choice.optimal, choice.gap, work)

    def _staged(self, problem: Problem, whole: Problem) -> Choice:
        """With small tables first, where that splits buckets: their bounds are often tight, and cheap."""
        limits = (min(FIRST_LIMITS[0], self.limits[0]), min(FIRST_LIMITS[1], self.limits[1]))
        small = Buckets(problem.sizes, list(problem.edges), None, *limits)
        if small.exact or limits == self.limits:
            return self._solve(problem, whole, small, self.labels)
        first = None
        try:
            first = self._solve(problem, whole, small, min(FIRST_LABELS, self.labels))
            if first.optimal:
                return first
            large = Buckets(problem.sizes, list(problem.edges), None, *self.limits)
            return _better(first, self._solve(problem, whole, large, self.labels))
        except GaveUp:
            if first is not None:
                return first
        return self._solve(problem, whole, Buckets(problem.sizes, list(problem.edges), None, *self.limits), self.labels)

    def _solve(self, problem: Problem, whole: Problem, buckets: Buckets, labels: int) -> Choice:
        costs = Costs(problem)
        free = buckets.run(costs.weighted())
        if math.isinf(free.value):
            self._why_none(whole)
        if buckets.exact:
            indices = buckets.decide(free)
            if problem.fits(indices):
                return choice_of(problem, indices, optimal=True, work=buckets.work())
        if problem.limit is None:
            relaxation = Relaxation(0.0, free, free.value)
            relaxation.offer(problem, buckets.decide(free))
            return self._close(problem, whole, buckets, relaxation, None, labels)
        weight = buckets.run(costs.memory())
        if weight.value > problem.limit:
            self._why_none(whole)
        smallest = buckets.decide(weight) if buckets.exact else None
        relaxation = relax(problem, buckets, costs, free, smallest, ROUNDING * abs(free.value))
        return self._close(problem, whole, buckets, relaxation, weight, labels)

    def _close(
        self,
        problem: Problem,
        whole: Problem,
        buckets: Buckets,
        relaxation: Relaxation,
        weight: Messages | None,
        labels: int,
    ) -> Choice:
        """Search near the lower bound, wider and wider, until the fastest choice found is proved to be the best."""
        best, rounding = relaxation, ROUNDING * max(abs(relaxation.messages.value), abs(relaxation.bound))
        room = math.inf if weight is None or problem.limit is None else problem.limit - weight.value
        gap = best.seconds - best.bound
        proved, states = 0.0, 0
        excess = gap / 64 if math.isfinite(gap) else 1e-3 * abs(best.bound)
        while best.seconds > best.bound + proved + rounding:
            excess = min(max(excess, 2 * rounding), best.seconds - best.bound + rounding)
            bounds = Bounds(excess, room, best.multiplier, 0.1 * rounding, labels)
            found = search(buckets, best.messages, weight, bounds)
            states += found.states
            if found.indices is not None:
                best.offer(problem, found.indices)
            proved = max(proved, found.proved)
            if found.proved < excess or excess == math.inf:
                break
            excess = excess * 4 if excess < 1e6 * abs(best.bound) else math.inf
        work = buckets.work(best.passes + 1 + (weight is not None)) + Work(states=states)
        if best.indices is None and proved < math.inf:
            raise GaveUp(
                f"planner elimination: expected to find a choice within {labels} partial choices per layer, found "
                "none; raise `labels`, or give layers fewer candidates"
            )
        if best.indices is None:
            self._why_none(whole)
        gap = best.seconds - best.bound - proved
        optimal = gap <= rounding
        return choice_of(problem, best.indices, optimal, 0.0 if optimal else gap, work)

    def _why_none(self, problem: Problem) -> NoReturn:
        """Raise what explains best why there is no choice: nothing is allowed, or by how much nothing fits."""
        if problem.limit is None:
            raise not_allowed(problem)
        raise no_fit(problem, self._staged(memory_problem(problem), problem.with_limit(None)).seconds)


def _better(first: Choice, second: Choice) -> Choice:
    """The faster of two choices, with the smaller of what both leave open, and the work of both."""
    bound = max(first.seconds - first.gap, second.seconds - second.gap)
    best = min(first, second, key=lambda choice: choice.seconds)
    optimal = second.optimal
    gap = 0.0 if optimal else max(0.0, best.seconds - bound)
    return replace(second if optimal else best, optimal=optimal, gap=gap, work=first.work + second.work)
