"""Strategies that were simulated, each under all schemes of gradient reduction: what a plan is chosen from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..layers import Network, Strategy
from ..layers.reduction_scheme import Scheme
from .cost.simulate import Simulation

__all__ = ["Contender", "Contenders"]

Cuts = tuple[tuple[int, ...], ...]


@dataclass
class Contender:
    """A strategy, and what a step takes under it.

    Attributes
    ----------
    name
        Of the baseline or planner it comes from.
    simulation
        Under one scheme of gradient reduction.
    optimal
        Whether a planner proved that it is the fastest by additive costs.
    indices
        The choice of candidates that it stands for; None: some of its cuts are none.
    """

    name: str
    simulation: Simulation
    optimal: bool = False
    indices: tuple[int, ...] | None = None

    @property
    def strategy(self) -> Strategy:
        """Cuts, scheme and size of buckets."""
        return self.simulation.strategy

    @cached_property
    def seconds(self) -> float:
        """What a step takes [s]."""
        return self.simulation.step_seconds

    @cached_property
    def memory_bytes(self) -> int:
        """What the fullest rank takes; asked for only where it matters, because it takes as long as all else [B]."""
        return sum(self.simulation.memory.values())

    def fits(self, limit: float) -> bool:
        """Whether it takes no more than `limit` [B]."""
        return limit == math.inf or self.memory_bytes <= limit


class Contenders:
    """All strategies of a search, each kept once.

    Which they are depends on a memory limit in one way only: under a smaller one there are more. So what a plan takes
    is always enough for it.

    Parameters
    ----------
    schemes
        Schemes of gradient reduction that a strategy may have, with the size of their buckets [B].
    """

    def __init__(self, network: Network, schemes: Callable[[Strategy], Sequence[tuple[Scheme, int]]]) -> None:
        self._network, self._schemes = network, schemes
        self._found: dict[Cuts, Contender] = {}
        self._variants: dict[Cuts, list[Contender]] = {}

    def __iter__(self) -> Iterator[Contender]:
        return iter(self._found.values())

    def cuts(self, strategy: Strategy) -> Cuts:
        """What tells strategies apart."""
        return tuple(tuple(strategy.parts_of(name).values()) for name in self._network.layers)

    def find(self, strategy: Strategy) -> Contender | None:
        """The one with these cuts."""
        return self._found.get(self.cuts(strategy))

    def add(self, found: Contender) -> Contender:
        """Keep it."""
        return self._found.setdefault(self.cuts(found.strategy), found)

    def variants(self, found: Contender) -> list[Contender]:
        """The same cuts under all schemes, the fastest first."""
        key = self.cuts(found.strategy)
        if key not in self._variants:
            some = [
                Contender(found.name, found.simulation.with_reduction(scheme, nbytes), found.optimal, found.indices)
                for scheme, nbytes in self._schemes(found.strategy)
            ]
            self._variants[key] = sorted(some, key=lambda one: one.seconds)
        return self._variants[key]

    def best_of(self, found: Contender, limit: float, faster_than: float = math.inf) -> Contender | None:
        """Its fastest variant within a limit [B], if that is faster than so much [s]."""
        if found.simulation.computing >= faster_than:
            return None
        for variant in self.variants(found):
            if variant.seconds >= faster_than:
                return None
            if variant.fits(limit):
                return variant
        return None

    def fastest(self, limit: float = math.inf) -> Contender | None:
        """The fastest within a limit [B], under any scheme; None if nothing fits."""
        best: Contender | None = None
        for found in sorted(self, key=lambda one: one.simulation.computing):
            best = self.best_of(found, limit, math.inf if best is None else best.seconds) or best
        return best

    def leanest(self) -> Contender:
        """The one that takes the least memory."""
        return min((variant for found in self for variant in self.variants(found)), key=lambda one: one.memory_bytes)
