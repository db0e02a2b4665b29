"""Steps of a plan and of its rivals, measured before a run settles on one of them.

What a model leaves out, such as ranks that wait for each other more often the more often they communicate, is of one
sign for some strategies: among those that are predicted to be near each other a few steps decide.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from statistics import median

from halograd.comm import Communicator
from halograd.layers import Strategy
from halograd.perfmodel.cost.baselines import BASELINES
from halograd.perfmodel.predict import Plan

__all__ = ["measure_steps", "rivals", "settle"]

#: A baseline is a rival if it is predicted to take at most so much longer than the plan, as a part of its step.
NEAR = 0.25
#: What a rival has to gain to be preferred, as a part of the step.
WORTH = 0.02
#: Steps of each are measured in so many rounds, of so many seconds each; the fastest round counts.
ROUNDS, SECONDS = 2, 0.5
LEAST, MOST = 3, 50

Opened = AbstractContextManager[Callable[[], object]]


def rivals(plan: Plan) -> list[str]:
    """Names of the baselines that may be as fast as a plan, and fit; the best predicted first. Local."""
    slowest = (1 + NEAR) * plan.step_seconds
    near = [a for a in plan.alternatives if a.name in BASELINES and a.fits and a.step_seconds <= slowest]
    return [a.name for a in sorted(near, key=lambda a: a.step_seconds)]


def measure_steps(
    comm: Communicator, strategies: Mapping[str, Strategy], opened: Callable[[Strategy], Opened]
) -> dict[str, float]:
    """What a step takes under each strategy, by the slowest rank [s]. Collective over `comm`.

    Parameters
    ----------
    strategies
        By name, in the same order on all ranks.
    opened
        Builds what is needed under a strategy, and gives a function that runs one step; one is open at a time.
    """
    found = dict.fromkeys(strategies, float("inf"))
    for _ in range(ROUNDS):
        for name, strategy in strategies.items():
            with opened(strategy) as step:
                found[name] = min(found[name], _median_step(comm, step))
    return found


def _median_step(comm: Communicator, step: Callable[[], object]) -> float:
    def timed() -> float:
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin

    timed()  # pages are touched, primitives made
    slowest = float(comm.allreduce_scalar(timed(), "max"))
    count = max(LEAST, min(MOST, int(SECONDS / max(slowest, 1e-6))))
    return float(comm.allreduce_scalar(median([timed() for _ in range(count)]), "max"))


def settle(seconds: Mapping[str, float]) -> str:
    """The name of the fastest, unless the first of them is about as fast. Local."""
    favorite = next(iter(seconds))
    best = min(seconds, key=lambda name: seconds[name])
    return best if seconds[best] < (1 - WORTH) * seconds[favorite] else favorite
