"""Robust plans: strategies that are good on machines that differ from the described one.

Rates of a machine file are peaks or estimates. The *regret* of a strategy on another machine is the relative difference
between its step and that of the best strategy for that machine. `plan_robust` chooses the strategy whose largest regret
over several variations of the machine is smallest, among

* the best strategies of the search for the machine, and of a brief search for each variation; candidates of layers are
  lowered once for all of these searches;
* the planner's choices by weighted sums of the costs on all variations, with more weight where the regret is large;
* the best of these under other schemes of gradient reduction;
* changes of the best of these: towards the best strategies of the variations with the largest regrets, and of single
  layers, pairs and regions;
* the best of these with wide values (`widening.py`), without the margin by which these must be faster in other plans:
  the variations include machines on which kernels are slower, so their regrets count what wide values compute twice.

It simulates a strategy on further variations only as long as it may still be chosen. All strategies have the halo
algorithms for the machine itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halograd.errors import UserError

from ..layers import Network, Strategy
from .changes import Changes
from .cost.network_costs import NetworkCosts, mean_costs
from .cost.pricing import Pricing
from .cost.simulate import Simulation
from .kernel_times import KernelTimes, LayerTime, LayerWork, RooflineTimes
from .machine import SUMS, Link, Machine
from .plan_candidates import PlanCandidate
from .planners import NoneFits
from .plans import Plan
from .predict import EXPOSED, Planning, StrategySearch, quick_pricing, uncollected, with_halos
from .widening import wide_layers, wider, with_wide

Cuts = tuple[str, str]
#: Changed choice of candidates, and the layers with wide values.
Change = tuple[tuple[int, ...], frozenset[str]]

__all__ = ["FACTOR", "RobustPlan", "VariedMachine", "VariedTimes", "plan_robust", "variations"]

#: Factor by which a quantity may differ, in both directions.
FACTOR = 3.0
#: Number of strategies of each search that may be the choice.
FEW = 3
#: Number of choices by weighted costs of all machines, and exponent by which each raises the weight of the largest
#: regret.
ROUNDS, STEEP = 3, 1.5
#: Per start of a descent, number of layers to simulate on one machine, and minimum number of changes to try; largest
#: estimated loss of a change, as a part of the step.
WORK, FEWEST, SLACK = 2500, 16, 0.03
#: Weight of the mean regret in the objective, which is otherwise the largest regret.
MEAN = 0.05
#: Number of machines towards whose best strategies the choice changes.
TARGETS = 3
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

    A kernel takes ``varied + (measured - launch) / rate``: its measured time with another launch time, and with the
    remaining time divided by the factor of the rate.
    """

    def __init__(self, times: KernelTimes, launch: float, varied: float, rate: float = 1.0) -> None:
        super().__init__()
        self._times, self._launch, self._varied, self._rate = times, launch, varied, rate

    def of_work(self, work: LayerWork) -> LayerTime:
        known = self._times.of_work(work)

        def kernel(seconds: float) -> float:
            # A time of 0 means that the layer has no such kernel.
            return self._varied + max(0.0, seconds - self._launch) / self._rate if seconds else 0.0

        return LayerTime(*map(kernel, (known.forward, known.backward_data, known.backward_filter)))


def variations(machine: Machine, times: KernelTimes, factor: float = FACTOR) -> Iterator[VariedMachine]:
    """Yield the machine itself, then variants with more and less latency, launch time and rate of arithmetic.

    The latency is that of all links, of measured sums and of the library of collectives; bandwidths do not vary. Kernel
    times by a roofline are those of the varied machine; measured times are varied (:class:`VariedTimes`).
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
    collectives = {
        name: replace(protocol, **{key: getattr(protocol, key) * scale for key in ("start", "node", "network")})
        for name, protocol in machine.collectives.items()
    }
    links, runtime = scaled(machine.links), replace(machine.runtime, **sums)
    return replace(machine, links=links, runtime=runtime, collectives=collectives)


def _times_on(varied: Machine, times: KernelTimes, machine: Machine, rate: float = 1.0) -> KernelTimes:
    if isinstance(times, RooflineTimes):
        return RooflineTimes(varied)
    return VariedTimes(times, machine.launch, varied.launch, rate)


@dataclass(frozen=True)
class RobustPlan:
    """Plan whose largest regret is smallest among the strategies of several searches.

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

    The parameters are those of :func:`halograd.perfmodel.predict.plan_network`, and the factor of :func:`variations`.

    Raises
    ------
    UserError
        If no strategy fits, or the planner is a baseline or ``"grid"``, which do not search.
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
        # The first of them is the machine itself, which has its own search.
        varied_machines = list(variations(machine, times, factor))[1:]
        # One search lowers the candidates for all machines: lowering takes longer than pricing.
        first.also = [
            quick_pricing(varied.machine, varied.times, planning.training.dtype) for varied in varied_machines
        ]
        fastest = first.best()
        free = first.plan_candidates.fastest()
        # If the fastest strategy fits, the searches ignore the limit: memory takes as long as the rest of a simulation.
        # A more robust strategy may need more memory than the fastest, so the table checks each one that it takes.
        binds = free is None or not free.fits(first.limit)
        # The halo algorithms of a plan do not change with the machine.
        costs = [first.costs, *(replace(varied, halos=first.costs.halos) for varied in first.varied)]
        searches = [first]
        for varied, costs_there in zip(varied_machines, costs[1:]):
            search = StrategySearch(network, batch, ranks, varied.machine, varied.times, planning)
            search.vary(first, costs_there, binds)
            searches.append(search)
        table = _StepTable(searches, costs, first.limit)
        for plan_candidates in ([fastest], *(search.plan_candidates.few(first.limit, FEW) for search in searches)):
            for plan_candidate in plan_candidates:
                table.add(plan_candidate)
        table.add_between()
        table.add_variants()
        table.widen()
        table.descend()
        # Again, because the descents may have found better cuts.
        table.widen()
        chosen = table.choose()
        plan = first.result(table.plan_candidate(chosen), began)
        names = ["", *(varied.name for varied in varied_machines)]
        regrets, fastest_regrets = (dict(zip(names, table.regrets(i))) for i in (chosen, 0))
        others = {name: table.best(number) for number, name in enumerate(names)}
    return RobustPlan(plan, regrets, fastest_regrets, others, factor)


class _StepTable:
    """Step times of strategies on several machines, simulated on demand; strategy 0 is the fastest on machine 0."""

    def __init__(self, searches: Sequence[StrategySearch], costs: Sequence[NetworkCosts], limit: float) -> None:
        self._searches, self._costs, self._limit = searches, costs, limit
        self._machines = range(len(searches))
        self._candidates: list[PlanCandidate] = []
        self._keys: list[tuple[Cuts, object]] = []
        self._numbers: dict[tuple[Cuts, object], int] = {}
        self._seconds: dict[tuple[int, int], float] = {}
        self._simulations: dict[Cuts, dict[int, Simulation]] = {}
        #: Strategies that were tried with wide values, each with the machine.
        self._widened = set[tuple[int, int]]()
        #: Number of changes to try per start of a descent.
        self._budget = max(FEWEST, WORK // len(costs[0].names))
        #: Shortest known step on each machine [s], and its strategy.
        self._best = [(math.inf, 0)] * len(searches)

    def add(self, candidate: PlanCandidate) -> int:
        """Add a strategy if it is new; return its index."""
        key = _key(candidate.strategy)
        number = self._numbers.setdefault(key, len(self._candidates))
        if number == len(self._candidates):
            self._candidates.append(candidate)
            self._keys.append(key)
        known = self._simulations.setdefault(key[0], {})
        for machine, search in enumerate(self._searches):
            # The step on this machine is known already, so it may shorten the best one there at no cost.
            if candidate.simulation.pricing is search.pricing:
                known.setdefault(machine, candidate.simulation)
                self.seconds(number, machine)
        return number

    def add_between(self) -> None:
        """Add choices of the planner by mean costs over the machines, with more weight where regrets are large."""
        first, weights = self._searches[0], np.ones(len(self._costs))
        for _ in range(ROUNDS):
            regrets = np.array(self.regrets(self.choose()))
            # The weight of the largest regret grows by the factor exp(STEEP) in each round.
            weights = weights * np.exp(STEEP * regrets / max(regrets.max(), ROUNDING))
            # Costs are additive, so the planner solves their weighted sum exactly.
            between = self._between(weights)
            limit = None if self._limit == math.inf else self._limit
            for exposed in EXPOSED:
                with suppress(NoneFits):
                    choice = first.planner.plan(between.problem(exposed, limit))
                    best = first.plan_candidates.best_of(first.choose(choice.indices), self._limit)
                    if best is not None:
                        self.add(best)

    def add_variants(self) -> None:
        """Add the best strategies under their other schemes of gradient reduction, if they fit."""
        first = self._searches[0]
        for i in self._few():
            candidate = self._candidates[i]
            # A strategy of another search may not be stored in the first one.
            stored = first.plan_candidates.find(candidate.strategy) or candidate
            for variant in first.plan_candidates.variants(stored):
                # Variants also include those that compute outputs again.
                if variant.strategy.layers == candidate.strategy.layers and variant.fits(self._limit):
                    self.add(variant)

    def descend(self) -> None:
        """Add changes of the best strategies, as long as their regrets become smaller."""
        for i in self._few():
            left, tried = self._budget, set[Change]()
            better: int | None = i
            while better is not None:
                left, better = self._changed(better, left, tried)

    def widen(self) -> None:
        """Add strategies with wide values, which may be faster on a machine than the same cuts without wide values.

        The cuts are those of the best strategy on each machine, and those of the strategies with the smallest regrets,
        each on the machine where its regret is largest.
        """
        fastest = [(i, machine) for machine, (_, i) in enumerate(self._best)]
        for i, machine in dict.fromkeys((*fastest, *((i, int(np.argmax(self.regrets(i)))) for i in self._few()))):
            if (i, machine) not in self._widened and not self._candidates[i].strategy.widens:
                self._widened.add((i, machine))
                chosen, plain = (self._simulated(i, at).prediction(account=False) for at in (0, machine))
                base = with_halos(self._candidates[i].strategy, chosen)
                # The result is not needed: `_simulate` adds every strategy that `wider` tries.
                wider(base, plain, partial(self._simulate, machine), plain.step_seconds)

    def _simulate(self, machine: int, strategy: Strategy) -> Simulation:
        """Return the simulation of a strategy on a machine; add the strategy if it is new."""
        number, search = self._numbers.get(_key(strategy)), self._searches[machine]
        if number is None:
            arguments = (search.network, strategy, search.batch, search.pricing, search.training, search.ranks)
            number = self.add(PlanCandidate(search.chooser.name, Simulation(*arguments)))
        return self._simulated(number, machine)

    def _few(self) -> list[int]:
        """Return at most `FEW` strategies, those with the smallest regrets."""
        # With an infinite limit, `_below` simulates a strategy on all machines.
        known = [i for i in range(len(self._candidates)) if self._below(i, math.inf)]
        return sorted(known, key=self.objective)[:FEW]

    def _changed(self, i: int, left: int, tried: set[Change]) -> tuple[int, int | None]:
        """Return how many changes are left to try, and the first changed strategy that is better; None: none is better.
        """
        first, strategy, regrets = self._searches[0], self._candidates[i].strategy, self.regrets(i)
        indices = first.costs.indices(strategy)
        least = self.objective(i) - ROUNDING
        if indices is None:
            return left, None
        order = sorted(self._machines, key=lambda machine: -regrets[machine])
        for changed_indices, wide in self._changes(i, indices, regrets, order):
            if (changed_indices, wide) in tried or changed_indices == tuple(indices):
                continue
            if not left:
                break
            tried.add((changed_indices, wide))
            left -= 1
            changed = with_wide(first.costs.strategy(changed_indices, strategy.bucket_bytes), wide)
            if not first.plan_candidates.allows(changed, strategy.reduction):
                continue
            # The machine with the largest regret comes first: most changes are rejected there.
            search = self._searches[order[0]]
            arguments = (search.network, changed, search.batch, search.pricing, search.training, search.ranks)
            simulation = Simulation(*arguments).with_reduction(strategy.reduction, strategy.bucket_bytes)
            number = self.add(PlanCandidate(first.chooser.name, simulation, indices=changed_indices))
            if self._below(number, least, order) and self.objective(number) < least and self._fits(number):
                return left, number
        return left, None

    def _changes(
        self, i: int, indices: Sequence[int], regrets: Sequence[float], order: Sequence[int]
    ) -> Iterator[Change]:
        """Yield changes of a choice: towards the best ones of the machines with large regrets, and single changes.

        Each comes with the layers that have wide values, in the choice itself or in the one that it approaches.
        """
        own = wide_layers(self._candidates[i].strategy)
        for machine in order[:TARGETS]:
            target = self.best(machine)
            for changed in _toward(indices, self._searches[0].costs.indices(target) or indices):
                yield changed, own | wide_layers(target)
        # The weights after two rounds of `add_between` with these regrets.
        weights = np.exp(2 * STEEP * np.array(regrets) / max(*regrets, ROUNDING))
        for change in Changes(self._between(weights)).of(indices, -SLACK):
            yield change.indices, own

    def _between(self, weights: NDArray[np.float64]) -> NetworkCosts:
        """Return weighted means of the costs on the machines, each as a multiple of the shortest step there."""
        return mean_costs(self._costs, [w / self._best[m][0] for m, w in enumerate(weights / weights.sum())])

    def plan_candidate(self, i: int) -> PlanCandidate:
        """Return a strategy, simulated on the first machine."""
        candidate = self._candidates[i]
        return PlanCandidate(candidate.name, self._simulated(i, 0), candidate.optimal)

    def _fits(self, i: int) -> bool:
        return self.plan_candidate(i).fits(self._limit)

    def best(self, machine: int) -> Strategy:
        """Return the strategy with the shortest known step on a machine."""
        return self._candidates[self._best[machine][1]].strategy

    def _simulated(self, i: int, machine: int) -> Simulation:
        known, strategy = self._simulations[self._keys[i][0]], self._candidates[i].strategy
        # The simulation on any machine serves, because programs do not depend on the machine.
        if machine not in known:
            known[machine] = next(iter(known.values())).on(self._searches[machine].pricing)
        return known[machine].with_reduction(strategy.reduction, strategy.bucket_bytes)

    def seconds(self, i: int, machine: int) -> float:
        """Return the step time of a strategy on a machine [s]."""
        if (i, machine) not in self._seconds:
            seconds = self._simulated(i, machine).step_seconds
            self._seconds[i, machine] = seconds
            self._best[machine] = min(self._best[machine], (seconds, i))
        return self._seconds[i, machine]

    def regrets(self, i: int) -> list[float]:
        """Return the regrets of a strategy on all machines."""
        seconds = [self.seconds(i, machine) for machine in self._machines]
        return [step / best - 1 for step, (best, _) in zip(seconds, self._best)]

    def objective(self, i: int) -> float:
        """Return the largest regret of a strategy, plus a small share of its mean regret."""
        regrets = self.regrets(i)
        return max(regrets) + MEAN * sum(regrets) / len(regrets)

    def choose(self) -> int:
        """Return the index of the strategy that fits with the smallest objective; of equal ones, the fastest on the
        first machine.
        """
        # Strategy 0 comes first: a strategy with equal regrets does not replace it.
        order = sorted(range(len(self._candidates)), key=lambda i: (i > 0, self.seconds(i, 0)))
        chosen, before = -1, -2
        while chosen != before:  # a strategy of another machine may turn out to be the best of this one
            before, least = chosen, math.inf
            for i in order:
                if self._below(i, least - ROUNDING) and self.objective(i) < least - ROUNDING and self._fits(i):
                    chosen, least = i, self.objective(i)
        return chosen

    def _below(self, i: int, least: float, order: Iterable[int] | None = None) -> bool:
        """Return whether all regrets of a strategy are below `least`; the first that is not ends the simulations.

        `order` is the order of the machines, by default that of the table.
        """
        machines = self._machines if order is None else order
        return all(self.seconds(i, machine) < (1 + least) * self._best[machine][0] for machine in machines)


def _toward(indices: Sequence[int], target: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield choices that adopt a part of `target`: a run of adjacent layers that differ, or the first or the last one,
    two or three quarters of all layers that differ.
    """
    differ = [v for v, (a, b) in enumerate(zip(indices, target)) if a != b]
    runs: list[list[int]] = []
    for v in differ:
        if runs and runs[-1][-1] == v - 1:
            runs[-1].append(v)
        else:
            runs.append([v])
    ends = {len(differ) * i // PARTS for i in range(1, PARTS)}
    for layers in (*runs, *(differ[:end] for end in sorted(ends)), *(differ[end:] for end in sorted(ends))):
        yield tuple(target[v] if v in set(layers) else a for v, a in enumerate(indices))


def _key(strategy: Strategy) -> tuple[Cuts, object]:
    cuts = repr(sorted((name, sorted(options.items())) for name, options in strategy.layers.items()))
    return (cuts, repr(sorted(strategy.options.items()))), (strategy.reduction, strategy.bucket_bytes)
