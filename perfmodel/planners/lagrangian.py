"""A price for memory: the best lower bound on the time of whatever fits.

For any price ``p >= 0`` [s/B], ``min_x time(x) + p * (memory(x) - limit)`` is at most the time of the fastest choice
that fits, and one elimination finds it. As a function of the price it is concave and piecewise linear; its maximum is
found by the cutting planes of one variable (Handler and Zang 1980, for the constrained shortest path).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from .buckets import Buckets, Messages
from .costs import Costs
from .problem import Problem

__all__ = ["Relaxation", "relax"]

#: Price steps at most; a handful is usual.
STEPS = 60


@dataclass
class Relaxation:
    """The best price found.

    Attributes
    ----------
    multiplier
        Price of memory [s/B].
    messages
        Of the elimination at this price.
    bound
        No choice that fits is faster [s].
    indices, seconds
        The fastest choice that fits seen on the way; None and inf if none was.
    passes
        Eliminations made.
    """

    multiplier: float
    messages: Messages
    bound: float
    indices: list[int] | None = None
    seconds: float = math.inf
    passes: int = 0

    def offer(self, problem: Problem, indices: list[int]) -> None:
        """Keep a choice if it fits and is the fastest so far."""
        if problem.fits(indices) and (seconds := problem.seconds(indices)) < self.seconds:
            self.indices, self.seconds = indices, seconds


def relax(
    problem: Problem, buckets: Buckets, costs: Costs, free: Messages, small: list[int] | None, rounding: float
) -> Relaxation:
    """Maximize the lower bound over the price.

    Parameters
    ----------
    free
        Messages at price 0, whose choice does not fit.
    small
        A choice that fits, if one is known.
    rounding
        Bounds closer than this count as equal [s].
    """
    assert problem.limit is not None
    best = Relaxation(0.0, free, free.value)
    large = buckets.decide(free)
    if small is not None:
        best.offer(problem, small)
    best.offer(problem, large)
    if buckets.exact and small is not None:
        _cutting_planes(problem, buckets, costs, best, large, small, rounding)
    else:
        for multiplier in _geometric(problem, free.value, best.seconds):
            _step(problem, buckets, costs, best, multiplier)
    return best


def _step(problem: Problem, buckets: Buckets, costs: Costs, best: Relaxation, multiplier: float) -> list[int]:
    """Eliminate at a price, keep what is better; returns the choice."""
    assert problem.limit is not None
    messages = buckets.run(costs.weighted(multiplier))
    best.passes += 1
    bound = messages.value - multiplier * problem.limit
    if bound > best.bound:
        best.multiplier, best.messages, best.bound = multiplier, messages, bound
    indices = buckets.decide(messages)
    best.offer(problem, indices)
    return indices


def _cutting_planes(
    problem: Problem,
    buckets: Buckets,
    costs: Costs,
    best: Relaxation,
    large: list[int],
    small: list[int],
    rounding: float,
) -> None:
    """Two choices, one too large, one that fits, are two lines; where they meet is the next price."""
    for _ in range(STEPS):
        (t0, m0), (t1, m1) = ((problem.seconds(x), problem.bytes(x)) for x in (large, small))
        if not (math.isfinite(t1) and m0 > m1) or best.seconds - best.bound <= rounding:
            return
        multiplier = max(0.0, (t1 - t0) / (m0 - m1))
        between = _step(problem, buckets, costs, best, multiplier)
        value = problem.seconds(between) + multiplier * problem.bytes(between)
        if value >= t0 + multiplier * m0 - rounding:
            return
        if problem.fits(between):
            small = between
        else:
            large = between


def _geometric(problem: Problem, fastest: float, seconds: float) -> Iterator[float]:
    """Prices over twelve orders of magnitude around one that would matter, for bounds that are not exact."""
    span = sum(float(m.max() - m.min()) for m in problem.memory)
    span += sum(float(t.max() - t.min()) for t in problem.edge_memory.values())
    scale = max(seconds - fastest, 0.01 * abs(fastest)) if math.isfinite(seconds) else abs(fastest)
    for exponent in range(-10, 11):
        yield 4.0**exponent * scale / max(span, 1.0)
