"""Planner that finds the optimum for any graph and memory limit (Jia et al. 2018, Section 5, extended).

A Lagrange multiplier handles the memory limit. For any multiplier ``p >= 0`` [s/B], the minimum over x of ``time(x) + p
* (memory(x) - limit)`` is a lower bound on the time of the fastest choice that fits, and one elimination computes it.
The bound is a concave, piecewise linear function of the multiplier; cutting planes of one variable find its maximum
(Handler and Zang 1980, for the constrained shortest path).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from halograd.errors import UserError

from .clusters import SUM_LIMIT, TABLE_LIMIT, Clusters, Costs, PassResult
from .problem import Array, Effort, NoneFits, Planner, Problem, Selection, memory_problem, prune
from .search import Bounds, search

__all__ = ["Elimination", "next_best"]

#: Maximum number of price steps; a few are usual.
STEPS = 60
#: Relative difference below which sums of times are equal.
ROUNDING = 1e-12
#: Limits of tables and sums, and of partial choices, in the first try. Two neighbors of 200 candidates still fit.
FIRST_LIMITS, FIRST_LABELS = (1 << 16, 1 << 23), 20_000


class GaveUp(UserError):
    """Error: the limits on the work were reached, so no choice was found, but one may exist."""


class Elimination(Planner):
    """Planner by node and edge elimination, extended to larger tables if the graph requires them; it finds the optimum.

    1. Candidates that are provably unnecessary are removed (`prune`).
    2. All layers are eliminated (`Clusters`). On series-parallel networks these are the node and edge eliminations of
       Jia et al. 2018; on others, tables over more than two layers appear. If the result fits, it is the optimum.
    3. If a memory limit binds, Lagrange multipliers give a lower bound, and a search among all choices near it
       (`search`) finds the optimum. The same search closes the gap if clusters with too large tables were split.

    If clusters are too large for `FIRST_LIMITS`, small tables are tried first: bounds from split clusters are often so
    tight that the search proves the optimum in a fraction of the time of the large tables.

    The search widens the distance to the lower bound until it has found a choice within it. If it would need more than
    ``labels`` partial choices at once, it stops with the best choice found and a proved gap, ``optimal=False``, or with
    an error if it has found none.

    Parameters
    ----------
    labels
        Maximum number of stored partial choices per layer.
    table_limit, sum_limit
        Entries of the largest stored table, and of the largest sum that is minimized.
    pruning
        Whether to remove unnecessary candidates first.
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

    def _search(self, problem: Problem) -> Selection:
        if not self.pruning:
            choice = self._staged(problem)
        else:
            pruned = prune(problem)
            choice = self._staged(pruned.problem)
            if choice is not None:
                work = choice.work + Effort(pruned=pruned.removed)
                choice = problem.choice(pruned.original(choice.indices), choice.optimal, choice.gap, work)
        if choice is None:
            # The error states the least memory of any choice.
            smallest = None if problem.limit is None else self._staged(memory_problem(problem))
            raise problem.no_choice(math.inf if smallest is None else smallest.seconds)
        return choice

    def _staged(self, problem: Problem) -> Selection | None:
        """Solve a problem, first with small tables: even if these split clusters, bounds are cheap and often tight.

        The result is None if no choice is allowed and fits.
        """
        limits = (min(FIRST_LIMITS[0], self.limits[0]), min(FIRST_LIMITS[1], self.limits[1]))
        small = Clusters(problem, *limits)
        if small.exact or limits == self.limits:
            return _Solver(problem, small, self.labels).solve()
        first = None
        try:
            first = _Solver(problem, small, min(FIRST_LABELS, self.labels)).solve()
            if first is None or first.optimal:
                return first
        except GaveUp:
            pass
        try:
            # Larger tables split fewer clusters, so the bounds are tighter.
            second = _Solver(problem, Clusters(problem, *self.limits), self.labels).solve()
        except GaveUp:
            if first is None:
                raise
            return first
        return second if first is None or second is None else _better(first, second)


class _Solver:
    """Search for the optimum of one problem: the best multiplier and the fastest choice found so far.

    Attributes
    ----------
    multiplier, messages
        Multiplier of the memory [s/B], and the messages of its elimination.
    bound
        Lower bound on the time of all choices that fit [s].
    indices, seconds
        The fastest choice found that fits; None and inf without one.
    passes
        Number of eliminations.
    """

    def __init__(self, problem: Problem, clusters: Clusters, labels: int) -> None:
        self.problem, self.clusters, self.labels = problem, clusters, labels
        self.costs = Costs(problem)
        self.multiplier, self.messages = 0.0, clusters.run(self.costs.weighted())
        self.bound = self.messages.value
        self.indices: list[int] | None = None
        self.seconds, self.passes = math.inf, 1

    def solve(self) -> Selection | None:
        """Return the fastest choice found that fits; None if none is allowed and fits."""
        problem, clusters = self.problem, self.clusters
        # Every choice has an infinite time.
        if math.isinf(self.bound):
            return None
        fastest = self._keep(clusters.decide(self.messages))
        # The optimum without a limit fits.
        if clusters.exact and self.indices is not None:
            return problem.choice(fastest, optimal=True, work=clusters.work())
        weight = None
        if problem.limit is not None:
            weight = clusters.run(Costs(memory_problem(problem)).weighted())
            self.passes += 1
            # Even the lower bound of the memory is too much.
            if weight.value > problem.limit:
                return None
            if clusters.exact:
                self._cutting_planes(fastest, self._keep(clusters.decide(weight)))
            else:
                for multiplier in self._geometric():
                    self._step(multiplier)
        return self._close(weight)

    def _keep(self, indices: list[int]) -> list[int]:
        """Store a choice if it fits and is the fastest so far; return it."""
        if self.problem.fits(indices) and (seconds := self.problem.seconds(indices)) < self.seconds:
            self.indices, self.seconds = indices, seconds
        return indices

    def _step(self, multiplier: float) -> list[int]:
        """Eliminate all layers with a multiplier [s/B], and store improvements; return the choice."""
        assert self.problem.limit is not None
        messages = self.clusters.run(self.costs.weighted(multiplier))
        self.passes += 1
        bound = messages.value - multiplier * self.problem.limit
        if bound > self.bound:
            self.multiplier, self.messages, self.bound = multiplier, messages, bound
        return self._keep(self.clusters.decide(messages))

    def _cutting_planes(self, large: list[int], small: list[int]) -> None:
        """Maximize the lower bound over the multiplier.

        Two choices, one too large and one that fits, define two lines; their intersection is the next multiplier.
        """
        problem, rounding = self.problem, ROUNDING * abs(self.bound)
        for _ in range(STEPS):
            (t0, m0), (t1, m1) = ((problem.seconds(x), problem.bytes(x)) for x in (large, small))
            if not (math.isfinite(t1) and m0 > m1) or self.seconds - self.bound <= rounding:
                return
            multiplier = max(0.0, (t1 - t0) / (m0 - m1))
            between = self._step(multiplier)
            value = problem.seconds(between) + multiplier * problem.bytes(between)
            # No choice is below the intersection of the two lines, so it is the maximum of the bound.
            if value >= t0 + multiplier * m0 - rounding:
                return
            if problem.fits(between):
                small = between
            else:
                large = between

    def _geometric(self) -> Iterator[float]:
        """Yield multipliers over twelve orders of magnitude around a typical one; used if bounds are inexact."""
        tables = (*self.problem.memory, *self.problem.edge_memory.values())
        span = sum(float(table.max() - table.min()) for table in tables)
        least = abs(self.bound)
        scale = max(self.seconds - self.bound, 0.01 * least) if math.isfinite(self.seconds) else least
        # At the multiplier `scale / span`, the largest saving of memory is worth a time of `scale`.
        for exponent in range(-10, 11):
            yield 4.0**exponent * scale / max(span, 1.0)

    def _close(self, weight: PassResult | None) -> Selection | None:
        """Search at increasing distances from the lower bound, until a choice is proved to be optimal.

        The search also ends if it would need too many labels. The result is None if no choice fits.
        """
        rounding = ROUNDING * max(abs(self.messages.value), abs(self.bound))
        capacity = math.inf if weight is None or self.problem.limit is None else self.problem.limit - weight.value
        gap = self.seconds - self.bound
        proved, states = 0.0, 0
        # The number of labels grows quickly with the distance, and the optimum is usually near the bound.
        excess = gap / 64 if math.isfinite(gap) else 1e-3 * abs(self.bound)
        while self.seconds > self.bound + proved + rounding:
            excess = min(max(excess, 2 * rounding), self.seconds - self.bound + rounding)
            bounds = Bounds(excess, capacity, self.multiplier, 0.1 * rounding, self.labels)
            selection = search(self.clusters, self.messages, weight, bounds)
            states += selection.states
            if selection.indices is not None:
                self._keep(selection.indices)
            proved = max(proved, selection.proved)
            # Labels were dropped for their number, so a larger distance proves no more; or no larger one is left.
            if selection.proved < excess or excess == math.inf:
                break
            excess = excess * 4 if excess < 1e6 * abs(self.bound) else math.inf
        if self.indices is None:
            if proved == math.inf:
                return None
            raise GaveUp(
                f"planner elimination: expected a choice within {self.labels} partial choices per layer, got "
                "none; increase `labels`, or give layers fewer candidates"
            )
        gap = self.seconds - self.bound - proved
        optimal = gap <= rounding
        work = self.clusters.work(self.passes) + Effort(states=states)
        return self.problem.choice(self.indices, optimal, 0.0 if optimal else gap, work)


def _better(first: Selection, second: Selection) -> Selection:
    """Return the faster of two choices, with its gap to the larger of both lower bounds, and the work of both."""
    # Both are lower bounds, so the larger one holds.
    bound = max(first.seconds - first.gap, second.seconds - second.gap)
    best = min(first, second, key=lambda choice: choice.seconds)
    optimal = second.optimal
    gap = 0.0 if optimal else max(0.0, best.seconds - bound)
    return replace(second if optimal else best, optimal=optimal, gap=gap, work=first.work + second.work)


def next_best(problem: Problem, layer: int, planner: Elimination | None = None) -> Array:
    """Return the exact minimum time for every candidate of one layer over all other choices (*min-marginals*).

    Without a memory limit, or if it does not bind, one elimination with this layer last gives all results at once. A
    candidate whose best choice does not fit is planned again, under the limit; so are all if clusters were split.

    Parameters
    ----------
    layer
        Index of the layer.
    planner
        Planner for candidates under a limit; its settings bound the work. If it proves no optimum, its best result is
        returned.

    Returns
    -------
    Array
        ``[candidates]`` [s]; ``inf``: none is allowed or fits.
    """
    # Pruned by time only: if the fastest choice with a candidate fits, no other choice with it is better.
    pruned = prune(replace(problem, limit=None), keep=layer)
    planner = planner or Elimination()
    clusters = Clusters(pruned.problem, *planner.limits, last=layer)
    messages = clusters.run(Costs(pruned.problem).weighted())
    # Totals per candidate of the layer that was eliminated last; lower bounds if clusters were split.
    seconds = np.full(clusters.sizes[layer], messages.value)
    if math.isfinite(messages.value):
        for part in clusters.of[layer].parts:
            own = sum((t for f in part.factors if (t := messages.tables[f]) is not None), np.zeros(len(seconds)))
            # The value contains the minimum over these candidates; each gets its own total instead.
            seconds = seconds + own - own.min()
    for c in np.flatnonzero(np.isfinite(seconds)):
        best = pruned.original(clusters.decide(messages, {layer: int(c)}))
        if clusters.exact and problem.fits(best):
            continue
        kept = [np.arange(size) for size in problem.sizes]
        kept[layer] = np.array([c])
        try:
            seconds[c] = planner.plan(problem.restricted(kept)).seconds
        except NoneFits:
            seconds[c] = math.inf
    return seconds
