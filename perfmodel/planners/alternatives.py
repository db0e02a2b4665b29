"""What the next best would have cost: the best total for every candidate of one layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .buckets import Buckets, Messages
from .costs import Costs
from .elimination import Elimination
from .planner import NoneFits
from .problem import Array, Choice, Problem
from .pruning import prune

__all__ = ["Alternatives", "next_best"]


@dataclass(frozen=True)
class Alternatives:
    """The best total for every candidate of a layer, all other layers chosen anew (*min-marginals*).

    Attributes
    ----------
    layer, chosen
        Number of the layer; its candidate in the plan.
    seconds
        ``[candidates]``, total of the best choice with this candidate [s]; ``inf``: none is allowed or fits;
        ``nan``: not asked for.
    extra
        ``[candidates]``, what that is more than the plan [s].
    """

    layer: int
    chosen: int
    seconds: Array
    extra: Array

    def ranking(self) -> list[int]:
        """Other candidates that are possible, the fastest first."""
        order = np.argsort(self.seconds, kind="stable")
        return [int(c) for c in order if c != self.chosen and np.isfinite(self.seconds[c])]


def next_best(
    problem: Problem,
    choice: Choice,
    layer: int,
    candidates: Sequence[int] | None = None,
    planner: Elimination | None = None,
) -> Alternatives:
    """What the whole network would take at best if one layer had another candidate; exact.

    Without a memory limit, or where it does not bind, one elimination with this layer last gives all answers at once.
    A candidate whose best choice does not fit is planned again, under the limit.

    Parameters
    ----------
    choice
        The plan to compare with.
    layer
        Number of the layer.
    candidates
        Which ones are wanted; None: all.
    planner
        For candidates under a limit; its settings bound the work. Where it proves no optimum, its best is returned.
    """
    wanted = range(problem.sizes[layer]) if candidates is None else candidates
    pruned = prune(problem.with_limit(None), keep=layer)
    costs = Costs(pruned.problem)
    planner = planner or Elimination()
    buckets = Buckets(pruned.problem.sizes, costs.edges, layer, *planner.limits)
    messages = buckets.run(costs.weighted())
    lower = _marginal(buckets, messages, layer)
    seconds = np.full(problem.sizes[layer], math.nan)
    for c in wanted:
        seconds[c] = lower[c]
        best = pruned.original(buckets.decide(messages, {layer: c}))
        if math.isfinite(lower[c]) and not (buckets.exact and problem.fits(best)):
            seconds[c] = _planned(problem, layer, c, planner)
    return Alternatives(layer, choice.indices[layer], seconds, seconds - choice.seconds)


def _marginal(buckets: Buckets, messages: Messages, layer: int) -> Array:
    """Total per candidate of the layer that was eliminated last; where buckets were split, a lower bound."""
    total = np.full(buckets.sizes[layer], messages.value)
    if math.isinf(messages.value):
        return total
    for part in buckets.of[layer].parts:
        own = sum((t for f in part.factors if (t := messages.tables[f]) is not None), np.zeros(len(total)))
        total = total + own - own.min()
    return total


def _planned(problem: Problem, layer: int, candidate: int, planner: Elimination) -> float:
    """Best total with a candidate, planned anew; inf if nothing fits."""
    kept = [np.arange(size) for size in problem.sizes]
    kept[layer] = np.array([candidate])
    try:
        return planner.plan(problem.restricted(kept)).seconds
    except NoneFits:
        return math.inf
