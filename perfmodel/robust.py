"""Robust plans: strategies that are good on machines that differ from the described one.

Rates of a machine file are peaks or estimates. The *regret* of a strategy on another machine is the relative difference
between its step and that of the best strategy for that machine. `plan_robust` chooses the strategy whose largest regret
over several variations of the machine is smallest, among

* the best strategies of the search for the machine, and of a brief search for each variation, for which candidates of
  layers are lowered once;
* the planner's choices by weighted sums of the costs on all of them, with more weight where the regret is large;
* their schemes of gradient reduction;
* changes of the best of these, towards the best strategy of the variation with the largest regret, and others.

It simulates a strategy on further variations only as long as it may still be the choice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halograd.errors import UserError

from ..layers import Network, Strategy
from .changes import Changes
from .contenders import Contender
from .cost.network_costs import NetworkCosts, mean_costs, varied_costs
from .cost.pricing import Pricing
from .cost.simulate import Simulation
from .kernel_times import KernelTimes, LayerTime, LayerWork, RooflineTimes
from .machine import SUMS, Link, Machine
from .planners import NoneFits
from .plans import Plan
from .predict import EXPOSED, Planning, StrategySearch, quick_pricing, uncollected

__all__ = ["FACTOR", "RobustPlan", "VariedMachine", "VariedTimes", "plan_robust", "variations"]

#: Factor by which a quantity may differ, in both directions.
FACTOR = 3.0
#: Number of strategies of each search that may be the choice.
FEW = 3
#: Number of choices by costs between those of the machines, and growth of the weight of the largest regret.
ROUNDS, STEEP = 3, 1.5
#: Number of changes of the choice to try, and largest estimated loss of one, as a part of the step.
CHANGED, SLACK = 24, 0.03
#: Number of parts of the way from a choice to the best one of the machine with the largest regret.
PARTS = 4
#: Relative difference below which times are equal.
ROUNDING = 1e-9


@dataclass(frozen=True)
class VariedMachine:
    """Machine that differs from another one in one quantity.

    Attributes
    ----------
    name
        What differs, such as ``"3 x the latency"``; "" for the machine itself.
    machine, times
        The machine, and the times of kernels on it.
    """

    name: str
    machine: Machine
    times: KernelTimes


class VariedTimes(KernelTimes):
    """Measured times of kernels for a device with another launch time, or another rate of arithmetic.

    A kernel takes its launch time, and the rest of its measured time divided by the factor of the rate, but not less
    than the launch time.
    """

    def __init__(self, times: KernelTimes, launch: float, varied: float, rate: float = 1.0) -> None:
        super().__init__()
        self._times, self._launch, self._varied, self._rate = times, launch, varied, rate

    def of_work(self, work: LayerWork) -> LayerTime:
        known = self._times.of_work(work)

        def kernel(seconds: float) -> float:
            return self._varied + max(0.0, seconds - self._launch) / self._rate if seconds else 0.0

        return LayerTime(*map(kernel, (known.forward, known.backward_data, known.backward_filter)))


def variations(machine: Machine, times: KernelTimes, factor: float = FACTOR) -> Iterator[VariedMachine]:
    """Yield the machine itself, and with more and less latency, launch time and rate of arithmetic.

    The latency is that of all links, also of measured sums; bandwidths do not vary. Kernel times by a roofline are
    those of the varied machine; measured times are varied (:class:`VariedTimes`).
    """
    yield VariedMachine("", machine, times)
    for scale, text in ((factor, f"{factor:g} x the"), (1 / factor, f"1/{factor:g} of the")):
        yield VariedMachine(f"{text} latency", _with_latency(machine, scale), times)
        slower = replace(machine, launch=machine.launch * scale)
        yield VariedMachine(f"{text} launch time", slower, _times_on(slower, times, machine))
        peaks = {dtype: peak * scale for dtype, peak in machine.peak_flops.items()}
        other = replace(machine, peak_flops=peaks)
        yield VariedMachine(f"{text} compute rate", other, _times_on(other, times, machine, scale))


def _with_latency(machine: Machine, scale: float) -> Machine:
    def scaled(links: Mapping[Any, Link]) -> dict[Any, Link]:
        return {key: replace(link, alpha=link.alpha * scale) for key, link in links.items()}

    sums: Any = {key: scaled(getattr(machine.runtime, key)) for key in SUMS}
    return replace(machine, links=scaled(machine.links), runtime=replace(machine.runtime, **sums))


def _times_on(varied: Machine, times: KernelTimes, machine: Machine, rate: float = 1.0) -> KernelTimes:
    if isinstance(times, RooflineTimes):
        return RooflineTimes(varied)
    return VariedTimes(times, machine.launch, varied.launch, rate)


@dataclass(frozen=True)
class RobustPlan:
    """Plan with the smallest largest regret among the strategies of several searches.

    Attributes
    ----------
    plan
        The plan for the machine as it is described.
    regrets
        Regret of the plan by variation of the machine; ``""`` is the machine itself.
    fastest
        Regrets of the plan that is fastest on the machine itself.
    others
        The best strategy that was found, by variation.
    factor
        Factor of the variations.
    """

    plan: Plan
    regrets: Mapping[str, float]
    fastest: Mapping[str, float]
    others: Mapping[str, Strategy]
    factor: float

    @property
    def worst(self) -> str:
        """Name of the varied machine with the largest regret of the plan."""
        return max(self.regrets, key=self.regrets.__getitem__)


def plan_robust(
    network: Network,
    batch: int,
    ranks: int,
    machine: Machine,
    times: KernelTimes,
    planning: Planning | None = None,
    quick: Pricing | None = None,
    factor: float = FACTOR,
) -> RobustPlan:
    """Return the plan whose largest regret over the variations of the machine is smallest. Local.

    The parameters are those of :func:`halograd.perfmodel.predict.plan_network`.

    Raises
    ------
    UserError
        If no strategy fits, or the planner is a baseline, which does not choose.
    """
    began = time.perf_counter()
    planning = planning or Planning()
    with uncollected():
        first = StrategySearch(network, batch, ranks, machine, times, planning, quick)
        if not first.chooser.searches:
            raise UserError(
                f"robust: expected a planner that chooses among strategies, such as elimination, got "
                f"{planning.planner!r}; leave one of both out"
            )
        fastest = first.best()
        free = first.contenders.fastest()
        others = list(variations(machine, times, factor))[1:]
        searches = [first]
        shared = [quick_pricing(one.machine, one.times, planning.training.dtype) for one in others]
        costs = varied_costs(
            network, batch, ranks, shared, planning.training, planning.full, first.middle, first.best_grids()
        )
        found = [fastest]
        for one, own in zip(others, costs):
            search = StrategySearch(network, batch, ranks, one.machine, one.times, planning, quick)
            best = search.vary(first, own, binds=free is not None and not free.fits(first.limit))
            searches.append(search)
            found += [] if best is None else [best]
        for search in searches:
            found += search.contenders.few(first.limit, FEW)
        table = _StepTable(searches, found)
        table.add_between([first.costs, *costs])
        table.add_variants()
        table.descend([first.costs, *costs])
        chosen = table.choose()
        plan = first.result(table.contender(chosen), began)
        names = ["", *(one.name for one in others)]
        regrets, before = (dict(zip(names, table.regrets(i))) for i in (chosen, 0))
        rivals = {name: table.best(machine) for machine, name in enumerate(names)}
    return RobustPlan(plan, regrets, before, rivals, factor)


class _StepTable:
    """Steps of strategies on several machines, simulated on demand; the first strategy is the fastest on the first."""

    def __init__(self, searches: Sequence[StrategySearch], found: Sequence[Contender]) -> None:
        self._searches = searches
        self._found: list[Contender] = []
        self._keys: set[object] = set()
        self._add(found)
        self._seconds: dict[tuple[int, int], float] = {}
        self._simulations: dict[tuple[int, object], Simulation] = {}

    def _add(self, found: Iterable[Contender]) -> int:
        """Add strategies that are new; return their number."""
        new = {_key(one.strategy): one for one in found if _key(one.strategy) not in self._keys}
        self._keys.update(new)
        self._found += new.values()
        return len(new)

    def add_between(self, costs: Sequence[NetworkCosts]) -> None:
        """Add choices of the planner by costs between those of the machines, with more weight on large regrets."""
        first, weights = self._searches[0], np.ones(len(costs))
        for _ in range(ROUNDS):
            regrets = np.array(self.regrets(self.choose()))
            weights = weights * np.exp(STEEP * regrets / max(regrets.max(), ROUNDING))
            between = self._between(costs, weights)
            for exposed in EXPOSED:
                with suppress(NoneFits):
                    choice = first.planner.plan(between.problem(exposed, self._room))
                    made = first.contenders.best_of(first.choose(choice.indices), first.limit)
                    self._add([] if made is None else [made])

    def descend(self, costs: Sequence[NetworkCosts]) -> None:
        """Add changes of the cuts of the best strategies, as long as their largest regrets become smaller."""
        known = [i for i in range(len(self._found)) if self._below(i, math.inf)]
        for i in sorted(known, key=lambda i: max(self.regrets(i)))[:FEW]:
            left, tried = CHANGED, set[tuple[int, ...]]()
            better: Contender | None = self._found[i]
            while left and better is not None:
                left, better = self._changed(better, costs, left, tried)

    def _changed(
        self, one: Contender, costs: Sequence[NetworkCosts], left: int, tried: set[tuple[int, ...]]
    ) -> tuple[int, Contender | None]:
        """Return how many changes of a strategy are left to try, and the changed strategy; None: nothing is better."""
        first, strategy, regrets = self._searches[0], one.strategy, self.regrets(self._found.index(one))
        indices = first.costs.indices(strategy)
        if indices is None:
            return left, None
        worst = int(np.argmax(regrets))
        target = first.costs.indices(self.best(worst))
        changes = Changes(self._between(costs, np.exp(2 * STEEP * np.array(regrets) / max(*regrets, ROUNDING))))
        changed = (change.indices for change in changes.of(indices, -SLACK))
        for new in (*_toward(indices, target or indices), *changed):
            if new in tried:
                continue
            if not left:
                break
            tried.add(new)
            left -= 1
            made = first.choose(new)
            if not first.contenders.allows(made.strategy, strategy.reduction):
                continue
            simulation = made.simulation.with_reduction(strategy.reduction, strategy.bucket_bytes)
            other = Contender(made.name, simulation, indices=new)
            if not self._add([other]):
                continue
            if self._below(len(self._found) - 1, max(regrets) - ROUNDING, regrets) and other.fits(first.limit):
                return left, other
            self._drop()
        return left, None

    def _drop(self) -> None:
        """Remove the strategy that was added last."""
        self._keys.discard(_key(self._found.pop().strategy))
        self._seconds = {key: s for key, s in self._seconds.items() if key[0] < len(self._found)}

    def _between(self, costs: Sequence[NetworkCosts], weights: NDArray[np.float64]) -> NetworkCosts:
        """Return costs between those of the machines, in parts of the shortest steps."""
        return mean_costs(costs, [w / self._best(machine) for machine, w in enumerate(weights / weights.sum())])

    @property
    def _room(self) -> float | None:
        """Memory limit of the planner [B]; None if the fastest strategy fits without one."""
        first = self._searches[0]
        free = first.contenders.fastest()
        return None if free is not None and free.fits(first.limit) else first.limit

    def add_variants(self) -> None:
        """Add the schemes of gradient reduction for the cuts of the strategies with the smallest largest regrets."""
        known = [i for i in range(len(self._found)) if self._below(i, math.inf)]
        first, limit = self._searches[0].contenders, self._searches[0].limit
        for i in sorted(known, key=lambda i: max(self.regrets(i)))[:FEW]:
            one = self._found[i]
            own = first.find(one.strategy) or one
            for variant in first.variants(own):
                layers = one.strategy.layers
                if variant.strategy.layers == layers and variant.fits(limit):
                    self._add([variant])

    def contender(self, i: int) -> Contender:
        """Return a strategy, simulated on the first machine."""
        one = self._found[i]
        return Contender(one.name, self._simulated(0, one.strategy), one.optimal)

    def best(self, machine: int) -> Strategy:
        """Return the strategy with the shortest known step on a machine."""
        return self._found[self._fastest(machine)[1]].strategy

    def _fastest(self, machine: int) -> tuple[float, int]:
        """Return the shortest known step on a machine [s], and its strategy."""
        return min((seconds, i) for (i, other), seconds in self._seconds.items() if other == machine)

    def _simulated(self, machine: int, strategy: Strategy) -> Simulation:
        search, key = self._searches[machine], (machine, _key(strategy)[0])
        if key not in self._simulations:
            some = (search.network, strategy, search.batch, search.pricing, search.training, search.ranks)
            self._simulations[key] = Simulation(*some)
        return self._simulations[key].with_reduction(strategy.reduction, strategy.bucket_bytes)

    def seconds(self, i: int, machine: int) -> float:
        """Return the step of a strategy on a machine [s]."""
        key = i, machine
        if key not in self._seconds:
            self._seconds[key] = self._simulated(machine, self._found[i].strategy).step_seconds
        return self._seconds[key]

    def _best(self, machine: int) -> float:
        """Return the shortest known step on a machine [s]."""
        return self._fastest(machine)[0]

    def regrets(self, i: int) -> list[float]:
        """Return the regrets of a strategy on all machines."""
        machines = range(len(self._searches))
        for machine in machines:
            self.seconds(i, machine)
        return [self.seconds(i, machine) / self._best(machine) - 1 for machine in machines]

    def choose(self) -> int:
        """Return the strategy with the smallest largest regret; among equal ones, the fastest on the first machine."""
        for i, one in enumerate(self._found):  # what a search found for its machine
            for machine, search in enumerate(self._searches):
                if one.simulation.pricing is search.pricing:
                    self.seconds(i, machine)
        self.regrets(0)
        order = sorted(range(len(self._found)), key=lambda i: (i > 0, self.seconds(i, 0)))
        chosen, before = -1, -2
        while chosen != before:  # a strategy of another machine may turn out to be the best of this one
            before, least = chosen, math.inf
            for i in order:
                if self._below(i, least - ROUNDING):
                    chosen, least = i, max(self.regrets(i))
        return chosen

    def _below(self, i: int, least: float, regrets: Sequence[float] | None = None) -> bool:
        """Return whether all regrets of a strategy are below a limit; simulate it no longer than they are.

        The machines with the largest of some other `regrets` come first.
        """
        machines: Iterable[int] = range(len(self._searches))
        if regrets is not None:
            machines = sorted(machines, key=lambda machine: -regrets[machine])
        return all(self.seconds(i, machine) < (1 + least) * self._best(machine) for machine in machines)


def _toward(indices: Sequence[int], target: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield choices with parts of another one: with each run of layers that differ, and with ever more such layers."""
    differ = [v for v, (a, b) in enumerate(zip(indices, target)) if a != b]
    runs: list[list[int]] = []
    for v in differ:
        if runs and runs[-1][-1] == v - 1:
            runs[-1].append(v)
        else:
            runs.append([v])
    ends = {len(differ) * i // PARTS for i in range(1, PARTS)}
    for some in (*runs, *(differ[:end] for end in sorted(ends)), *(differ[end:] for end in sorted(ends))):
        yield tuple(target[v] if v in set(some) else a for v, a in enumerate(indices))


def _key(strategy: Strategy) -> tuple[object, object, int]:
    cuts = repr(sorted((name, sorted(options.items())) for name, options in strategy.layers.items()))
    return (cuts, repr(sorted(strategy.options.items()))), strategy.reduction, strategy.bucket_bytes
