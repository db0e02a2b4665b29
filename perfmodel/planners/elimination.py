"""The optimum for any graph and any memory limit (Jia et al. 2018, Section 5, extended).

A price for memory handles the memory limit. For any price ``p >= 0`` [s/B], the minimum over x of
``time(x) + p * (memory(x) - limit)`` is a lower bound on the time of the fastest choice that fits, and one elimination
computes it. As a function of the price it is concave and piecewise linear; cutting planes of one variable find its
maximum (Handler and Zang 1980, for the constrained shortest path).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np

from halograd.errors import UserError

from .clusters import SUM_LIMIT, TABLE_LIMIT, Clusters, PassResult
from .problem import (
    Array,
    Effort,
    NoneFits,
    Planner,
    Problem,
    Selection,
    choice_of,
    no_fit,
    not_allowed,
)
from .search import Bounds, search
from .tables import Costs, memory_problem, prune

__all__ = ["Elimination", "next_best"]

#: Maximum number of price steps; a few are usual.
STEPS = 60


@dataclass
class Relaxation:
    """The best price found.

    Attributes
    ----------
    multiplier
        Price of memory [s/B].
    messages
        Messages of the elimination at this price.
    bound
        Lower bound on the time of all choices that fit [s].
    indices, seconds
        The fastest choice found that fits; None and inf without one.
    passes
        Number of eliminations.
    """

    multiplier: float
    messages: PassResult
    bound: float
    indices: list[int] | None = None
    seconds: float = math.inf
    passes: int = 0

    def offer(self, problem: Problem, indices: list[int]) -> None:
        """Store a choice if it fits and is the fastest so far."""
        if problem.fits(indices) and (seconds := problem.seconds(indices)) < self.seconds:
            self.indices, self.seconds = indices, seconds


def relax(
    problem: Problem, clusters: Clusters, costs: Costs, free: PassResult, small: list[int] | None, rounding: float
) -> Relaxation:
    """Maximize the lower bound over the price.

    Parameters
    ----------
    free
        Messages at price 0, whose choice does not fit.
    small
        A choice that fits, if one is known.
    rounding
        Difference below which bounds count as equal [s].
    """
    assert problem.limit is not None
    best = Relaxation(0.0, free, free.value)
    large = clusters.decide(free)
    if small is not None:
        best.offer(problem, small)
    best.offer(problem, large)
    if clusters.exact and small is not None:
        _cutting_planes(problem, clusters, costs, best, large, small, rounding)
    else:
        for multiplier in _geometric(problem, free.value, best.seconds):
            _step(problem, clusters, costs, best, multiplier)
    return best


def _step(problem: Problem, clusters: Clusters, costs: Costs, best: Relaxation, multiplier: float) -> list[int]:
    """Eliminate at a price, and store improvements; return the choice."""
    assert problem.limit is not None
    messages = clusters.run(costs.weighted(multiplier))
    best.passes += 1
    bound = messages.value - multiplier * problem.limit
    if bound > best.bound:
        best.multiplier, best.messages, best.bound = multiplier, messages, bound
    indices = clusters.decide(messages)
    best.offer(problem, indices)
    return indices


def _cutting_planes(
    problem: Problem,
    clusters: Clusters,
    costs: Costs,
    best: Relaxation,
    large: list[int],
    small: list[int],
    rounding: float,
) -> None:
    """Search the price by cutting planes.

    Two choices, one too large and one that fits, define two lines; their intersection is the next price.
    """
    for _ in range(STEPS):
        (t0, m0), (t1, m1) = ((problem.seconds(x), problem.bytes(x)) for x in (large, small))
        if not (math.isfinite(t1) and m0 > m1) or best.seconds - best.bound <= rounding:
            return
        multiplier = max(0.0, (t1 - t0) / (m0 - m1))
        between = _step(problem, clusters, costs, best, multiplier)
        value = problem.seconds(between) + multiplier * problem.bytes(between)
        if value >= t0 + multiplier * m0 - rounding:
            return
        if problem.fits(between):
            small = between
        else:
            large = between


def _geometric(problem: Problem, fastest: float, seconds: float) -> Iterator[float]:
    """Yield prices over twelve orders of magnitude around a typical one, for inexact bounds."""
    span = sum(float(m.max() - m.min()) for m in problem.memory)
    span += sum(float(t.max() - t.min()) for t in problem.edge_memory.values())
    scale = max(seconds - fastest, 0.01 * abs(fastest)) if math.isfinite(seconds) else abs(fastest)
    for exponent in range(-10, 11):
        yield 4.0**exponent * scale / max(span, 1.0)


#: Relative difference below which sums of times are equal.
ROUNDING = 1e-12
#: Limits of tables and sums, and of partial choices, in the first try. Two neighbors of 200 candidates still fit.
FIRST_LIMITS, FIRST_LABELS = (1 << 16, 1 << 23), 20_000


class GaveUp(UserError):
    """The limits on the work were reached: no choice was found, and none is excluded."""


class Elimination(Planner):
    """Node and edge elimination, extended to larger tables if the graph requires them; it finds the optimum.

    1. Candidates that are provably unnecessary are removed (`prune`). 2. All layers are eliminated (`Clusters`). On
    series-parallel networks these are the node and edge eliminations of Jia
       et al. 2018; on others, tables over more than two layers appear. If the result fits, it is the optimum.
    3. If a memory limit binds, prices for memory give a lower bound (`relax`), and a search among all choices near it
       (`search`) finds the optimum. The same search closes the gap if tables would be too large and clusters were
       split.

    If clusters are too large for `FIRST_LIMITS`, small tables are tried first: bounds from split clusters are often so
    tight that the search proves the optimum in a fraction of the time of the large tables.

    The search widens the distance to the lower bound until it has found a choice within it. If it would need more than
    ``labels`` partial choices at once, it stops with the best choice found and a proved gap, ``optimal=False``.

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
            return self._staged(problem, problem)
        pruned = prune(problem)
        choice = self._staged(pruned.problem, problem)
        work = choice.work + Effort(pruned=pruned.removed)
        return choice_of(problem, pruned.original(list(choice.indices)), choice.optimal, choice.gap, work)

    def _staged(self, problem: Problem, whole: Problem) -> Selection:
        """Try small tables first if they split clusters: their bounds are cheap, and often tight."""
        limits = (min(FIRST_LIMITS[0], self.limits[0]), min(FIRST_LIMITS[1], self.limits[1]))
        small = Clusters(problem.sizes, list(problem.edges), None, *limits)
        if small.exact or limits == self.limits:
            return self._solve(problem, whole, small, self.labels)
        first = None
        try:
            first = self._solve(problem, whole, small, min(FIRST_LABELS, self.labels))
            if first.optimal:
                return first
            large = Clusters(problem.sizes, list(problem.edges), None, *self.limits)
            return _better(first, self._solve(problem, whole, large, self.labels))
        except GaveUp:
            if first is not None:
                return first
        return self._solve(
            problem, whole, Clusters(problem.sizes, list(problem.edges), None, *self.limits), self.labels
        )

    def _solve(self, problem: Problem, whole: Problem, clusters: Clusters, labels: int) -> Selection:
        costs = Costs(problem)
        free = clusters.run(costs.weighted())
        if math.isinf(free.value):
            self._why_none(whole)
        if clusters.exact:
            indices = clusters.decide(free)
            if problem.fits(indices):
                return choice_of(problem, indices, optimal=True, work=clusters.work())
        if problem.limit is None:
            relaxation = Relaxation(0.0, free, free.value)
            relaxation.offer(problem, clusters.decide(free))
            return self._close(problem, whole, clusters, relaxation, None, labels)
        weight = clusters.run(costs.memory())
        if weight.value > problem.limit:
            self._why_none(whole)
        smallest = clusters.decide(weight) if clusters.exact else None
        relaxation = relax(problem, clusters, costs, free, smallest, ROUNDING * abs(free.value))
        return self._close(problem, whole, clusters, relaxation, weight, labels)

    def _close(
        self,
        problem: Problem,
        whole: Problem,
        clusters: Clusters,
        relaxation: Relaxation,
        weight: PassResult | None,
        labels: int,
    ) -> Selection:
        """Search near the lower bound, within increasing distances, until the fastest choice found is proved to be
        optimal.
        """
        best, rounding = relaxation, ROUNDING * max(abs(relaxation.messages.value), abs(relaxation.bound))
        room = math.inf if weight is None or problem.limit is None else problem.limit - weight.value
        gap = best.seconds - best.bound
        proved, states = 0.0, 0
        excess = gap / 64 if math.isfinite(gap) else 1e-3 * abs(best.bound)
        while best.seconds > best.bound + proved + rounding:
            excess = min(max(excess, 2 * rounding), best.seconds - best.bound + rounding)
            bounds = Bounds(excess, room, best.multiplier, 0.1 * rounding, labels)
            found = search(clusters, best.messages, weight, bounds)
            states += found.states
            if found.indices is not None:
                best.offer(problem, found.indices)
            proved = max(proved, found.proved)
            if found.proved < excess or excess == math.inf:
                break
            excess = excess * 4 if excess < 1e6 * abs(best.bound) else math.inf
        work = clusters.work(best.passes + 1 + (weight is not None)) + Effort(states=states)
        if best.indices is None and proved < math.inf:
            raise GaveUp(
                f"planner elimination: expected a choice within {labels} partial choices per layer, got "
                "none; increase `labels`, or give layers fewer candidates"
            )
        if best.indices is None:
            self._why_none(whole)
        gap = best.seconds - best.bound - proved
        optimal = gap <= rounding
        return choice_of(problem, best.indices, optimal, 0.0 if optimal else gap, work)

    def _why_none(self, problem: Problem) -> NoReturn:
        """Raise the error that explains why there is no choice: none is allowed, or the smallest exceeds the limit."""
        if problem.limit is None:
            raise not_allowed(problem)
        raise no_fit(problem, self._staged(memory_problem(problem), problem.with_limit(None)).seconds)


def _better(first: Selection, second: Selection) -> Selection:
    """Return the faster of two choices, with the smaller of both gaps, and the work of both."""
    bound = max(first.seconds - first.gap, second.seconds - second.gap)
    best = min(first, second, key=lambda choice: choice.seconds)
    optimal = second.optimal
    gap = 0.0 if optimal else max(0.0, best.seconds - bound)
    return replace(second if optimal else best, optimal=optimal, gap=gap, work=first.work + second.work)


def next_best(problem: Problem, layer: int, planner: Elimination | None = None) -> Array:
    """Return the best total for every candidate of one layer, with all other layers chosen anew (*min-marginals*);
    exact.

    Without a memory limit, or if it does not bind, one elimination with this layer last gives all results at once. A
    candidate whose best choice does not fit is planned again, under the limit.

    Parameters
    ----------
    layer
        Number of the layer.
    planner
        Planner for candidates under a limit; its settings bound the work. If it proves no optimum, its best is
        returned.

    Returns
    -------
    Array
        ``[candidates]`` [s]; ``inf``: none is allowed or fits.
    """
    pruned = prune(problem.with_limit(None), keep=layer)
    costs = Costs(pruned.problem)
    planner = planner or Elimination()
    clusters = Clusters(pruned.problem.sizes, costs.edges, layer, *planner.limits)
    messages = clusters.run(costs.weighted())
    seconds = _marginal(clusters, messages, layer)
    for c in np.flatnonzero(np.isfinite(seconds)):
        best = pruned.original(clusters.decide(messages, {layer: int(c)}))
        if not (clusters.exact and problem.fits(best)):
            seconds[c] = _planned(problem, layer, int(c), planner)
    return seconds


def _marginal(clusters: Clusters, messages: PassResult, layer: int) -> Array:
    """Return the total per candidate of the layer that was eliminated last; if clusters were split, a lower bound."""
    total = np.full(clusters.sizes[layer], messages.value)
    if math.isinf(messages.value):
        return total
    for part in clusters.of[layer].parts:
        own = sum((t for f in part.factors if (t := messages.tables[f]) is not None), np.zeros(len(total)))
        total = total + own - own.min()
    return total


def _planned(problem: Problem, layer: int, candidate: int, planner: Elimination) -> float:
    """Return the best total with a candidate, from a new plan; inf if nothing fits."""
    kept = [np.arange(size) for size in problem.sizes]
    kept[layer] = np.array([candidate])
    try:
        return planner.plan(problem.restricted(kept)).seconds
    except NoneFits:
        return math.inf
