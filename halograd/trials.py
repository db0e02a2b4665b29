"""Steps that are tried: of a plan and its rivals, which decide where predictions are too close to each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import median

from .cli.output import split_text
from .comm import Communicator
from .layers import Strategy
from .perfmodel.cuts import BASELINES, GRID
from .perfmodel.plans import Plan

__all__ = ["StepTrial", "measure_steps", "rivals", "settle"]

#: A baseline is a rival if it is predicted to take at most so much longer than the plan, as a part of its step.
NEAR = 0.25
#: What a rival has to gain to be preferred, as a part of the step.
WORTH = 0.02
#: Steps of each are measured in so many rounds, of so many seconds each; the fastest round counts.
TRIALS, SECONDS = 2, 0.5
LEAST, MOST = 3, 50

Opened = AbstractContextManager[Callable[[], object]]


@dataclass(frozen=True)
class StepTrial:
    """What a run trains by, and what was tried for it.

    Attributes
    ----------
    plan
        What was the fastest.
    name
        Of it, among those that were tried.
    seconds
        What a step took under each strategy that was tried [s]; empty where nothing was.
    alone
        What it took on one rank with the threads of all [s]; None where that was not tried.
    """

    plan: Plan
    name: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    alone: float | None = None

    def lines(self, threads: int) -> list[str]:
        """About it, in words; `threads` per rank."""
        if not self.seconds:
            return []
        tried = ", ".join(f"{name} {1e3 * taken:.2f} ms" for name, taken in self.seconds.items())
        found = [f"steps tried: {tried}; trained by {self.name}"]
        if self.alone is not None:
            together, ranks = self.seconds[self.name], self.plan.ranks
            text = f"1 rank x {ranks * threads} threads would take {1e3 * self.alone:.2f} ms"
            if self.alone < (1 - WORTH) * together:
                text += f", {together / self.alone:.2f} x as fast: start one, with --threads {ranks * threads}"
            found.append(f"cores: {split_text(ranks, threads)} take {1e3 * together:.2f} ms; {text}")
        return found


def rivals(plan: Plan) -> list[str]:
    """Names of the baselines and of the grid that may be as fast as a plan, and fit; the best first. Local."""
    slowest = (1 + NEAR) * plan.step_seconds
    near = [a for a in plan.alternatives if a.name in (*BASELINES, GRID) and a.fits and a.step_seconds <= slowest]
    # What takes as much as another, to the byte, has its cuts; one of them is enough.
    costs = [(plan.step_seconds, plan.prediction.memory_bytes), *((a.step_seconds, a.memory_bytes) for a in near)]
    different = [a for i, a in enumerate(near, 1) if costs[i] not in costs[:i]]
    return [a.name for a in sorted(different, key=lambda a: a.step_seconds)]


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
    for _ in range(TRIALS):
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
