"""The one interface of all planners, and the errors they share."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from halograd.errors import UserError

from .problem import Choice, Problem, Work, bytes_text

__all__ = ["NoneFits", "Planner", "choice_of", "no_fit", "not_allowed"]


class NoneFits(UserError):
    """No choice is within the memory limit, or none is allowed at all."""


class Planner(ABC):
    """Finds a choice for a `Problem`; made once, used for any number of problems."""

    name: ClassVar[str]

    def plan(self, problem: Problem) -> Choice:
        """The best choice this planner finds, within the memory limit.

        Raises
        ------
        NoneFits
            Nothing is within the memory limit (says by how much) or nothing is allowed.
        UserError
            A problem that this planner refuses.
        """
        start = time.perf_counter()
        if not problem.names:
            return Choice((), 0.0, 0.0, optimal=True)
        choice = self._search(problem)
        return replace(choice, work=replace(choice.work, seconds=time.perf_counter() - start))

    @abstractmethod
    def _search(self, problem: Problem) -> Choice:
        """The choice, without wall time."""


def choice_of(
    problem: Problem, indices: Sequence[int], optimal: bool, gap: float = 0.0, work: Work | None = None
) -> Choice:
    """The choice of these candidates, its sums taken from the problem itself."""
    whole = tuple(int(i) for i in indices)
    return Choice(whole, problem.seconds(whole), problem.bytes(whole), optimal, gap, work or Work())


def no_fit(problem: Problem, smallest: float) -> NoneFits:
    """Error: even ``smallest`` [B], the least that any choice takes, exceeds the limit."""
    assert problem.limit is not None
    over = smallest - problem.limit
    return NoneFits(
        f"planner: expected a choice within the memory limit of {bytes_text(problem.limit)} per rank, but the "
        f"smallest takes {bytes_text(smallest)}, {bytes_text(over)} too much; use fewer samples per step, more ranks, "
        f"or a limit of at least {_rounded_up(smallest)}"
    )


def not_allowed(problem: Problem) -> NoneFits:
    """Error: every choice has an infinite time."""
    for v, times in enumerate(problem.times):
        if not np.isfinite(times).any():
            return NoneFits(f"planner: layer {problem.names[v]}: expected a candidate of finite time, got none")
    return NoneFits(
        "planner: expected a choice of finite time, but each one has an infinite layer or edge; "
        "add candidates that adjacent layers can both take"
    )


def _rounded_up(nbytes: float) -> str:
    """Like `bytes_text`, never less than the number."""
    mebibytes = int(-(-nbytes // 2**20))
    return f"{mebibytes} MiB" if mebibytes > 1 else f"{int(np.ceil(nbytes))} B"
