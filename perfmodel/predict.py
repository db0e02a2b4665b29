"""Planning a network for a machine: planners, baselines and schemes of gradient reduction, compared by simulation."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from halograd.documents import bytes_text
from halograd.errors import UserError
from halograd.schema import build

from ..layers import Network, Strategy
from ..layers.reduction_scheme import Scheme
from .cost.layer_cost import Pricing
from .cost.network_costs import NetworkCosts, network_costs
from .cost.simulate import Simulation, Training
from .cost.wires import Wires
from .cuts import BASELINES, baseline
from .kernel_times import KernelTimes
from .machine import Machine
from .planners import PLANNERS, NoneFits, Selection
from .plans import Alternative, Plan, Prediction, Ranks
from .reduction_choice import planned_schemes

__all__ = ["Planning", "plan_network"]

#: Parts of the sums of gradients that are charged to layers, one plan each; `simulate` decides between them.
EXPOSED = (1.0, 0.3, 0.0)
#: Sizes of buckets that are tried for the best plan [B].
BUCKETS = (1 << 20, 4 << 20, 16 << 20)
#: What another scheme of gradient reduction than buckets has to gain to be chosen, as a part of the step.
WORTH = 0.01
#: Where what stays in memory is less than this part of the limit, what backward borrows fits too.
ROOMY = 0.4
#: How often a plan that does not fit after all is made again under a smaller limit.
ATTEMPTS = 6


@dataclass(frozen=True)
class Planning:
    """What is asked of `plan_network`.

    Attributes
    ----------
    planner
        Name of a planner, or of a baseline to be taken as it is.
    limit
        Memory of one rank [B]; that of the machine's device if None.
    full
        Look at every legal cut.
    training
        Dtype and optimizer.
    bucket_bytes
        Size of the buckets of gradients [B]; None: the best of some.
    without
        Names of schemes of gradient reduction that the run cannot have.
    """

    planner: str = "elimination"
    limit: float | None = None
    full: bool = False
    training: Training = field(default_factory=Training)
    bucket_bytes: int | None = None
    without: frozenset[str] = frozenset()


def plan_network(
    network: Network,
    batch: int,
    ranks: int,
    machine: Machine,
    times: KernelTimes,
    planning: Planning | None = None,
) -> Plan:
    """The fastest strategy that fits, by simulation, among planners' choices and the baselines. Local.

    A planner minimizes sums over layers and edges; what overlaps is not such a sum. So it is asked for several charges
    of the sums of gradients (`EXPOSED`), and `simulate` compares its answers, the baselines, and for the best of them
    schemes of gradient reduction and sizes of buckets.

    Raises
    ------
    UserError
        Unknown planner; memory too small for anything (says by how much).
    """
    return _Search(network, batch, ranks, machine, times, planning or Planning()).run()


@dataclass
class _Found:
    name: str
    simulation: Simulation
    optimal: bool = False

    @property
    def strategy(self) -> Strategy:
        return self.simulation.strategy

    @cached_property
    def seconds(self) -> float:
        return self.simulation.step_seconds

    @cached_property
    def memory_bytes(self) -> int:
        """What the fullest rank takes; asked for only where it matters, because it takes as long as all else [B]."""
        return sum(self.simulation.memory.values())


@dataclass
class _Search:
    network: Network
    batch: int
    ranks: int
    machine: Machine
    times: KernelTimes
    planning: Planning
    found: list[_Found] = field(default_factory=list)

    def __post_init__(self) -> None:
        build(Ranks, self.ranks, at="ranks")
        known = (*PLANNERS, *BASELINES)
        if self.planning.planner not in known:
            raise UserError(f"planner: expected one of {', '.join(known)}, got {self.planning.planner!r}")
        self.limit = self.machine.memory if self.planning.limit is None else self.planning.limit
        self.buckets = (self.planning.bucket_bytes,) if self.planning.bucket_bytes else BUCKETS
        dtype = self.planning.training.dtype
        self.pricing = Pricing(Wires(self.machine), self.times, dtype, best_halo=True)
        self.middle = self.buckets[len(self.buckets) // 2]

    def run(self) -> Plan:
        with _uncollected():
            return self._run()

    def _run(self) -> Plan:
        began = time.perf_counter()
        fixed = self.planning.planner in BASELINES
        for name in [self.planning.planner] if fixed else BASELINES:
            self._try(name, baseline(name, self.network, self.batch, self.ranks, self.middle))
        failure: NoneFits | None = None
        if not fixed:
            try:
                self._plan()
            except NoneFits as fault:
                failure = fault
        best = self._best(failure)
        best = self._best_reduction(best)
        return self._result(best, time.perf_counter() - began)

    def _try(self, name: str, strategy: Strategy, optimal: bool = False) -> _Found:
        training = self.planning.training
        simulation = Simulation(self.network, strategy, self.batch, self.pricing, training, self.ranks)
        self.found.append(_Found(name, simulation, optimal))
        return self.found[-1]

    def _plan(self) -> None:
        """Ask the planner, once per charge."""
        training, full = self.planning.training, self.planning.full
        pricing = Pricing(Wires(self.machine, quick=True), self.times, training.dtype, best_halo=True)
        costs = network_costs(self.network, self.batch, self.ranks, pricing, training, full, self.middle)
        planner = PLANNERS[self.planning.planner]()
        seen: set[tuple[int, ...]] = set()
        for exposed in EXPOSED:
            limit: float = self.limit
            for _ in range(ATTEMPTS):
                choice = planner.plan(costs.problem(exposed, limit))
                if choice.indices in seen:
                    break
                seen.add(choice.indices)
                found = self._candidate(costs, choice, exposed)
                if choice.memory < ROOMY * self.limit:
                    break
                over = found.memory_bytes - self.limit
                if over <= 0:
                    break
                # What the backward pass borrows is not in the problem: leave room for it.
                limit = min(limit, choice.memory) - over

    def _candidate(self, costs: NetworkCosts, choice: Selection, exposed: float) -> _Found:
        name = f"{self.planning.planner}, {exposed:.0%} of gradient sums charged"
        return self._try(name, costs.strategy(choice.indices, self.middle), choice.optimal)

    def _fits(self, found: _Found) -> bool:
        return found.memory_bytes <= self.limit

    def _best(self, failure: NoneFits | None) -> _Found:
        for found in sorted(self.found, key=lambda f: f.seconds):
            if self._fits(found):
                return found
        least = min(self.found, key=lambda f: f.memory_bytes)
        needs = least.memory_bytes
        raise UserError(
            f"plan: expected a strategy within {bytes_text(self.limit)} per rank, the leanest found ({least.name}) "
            f"takes {bytes_text(needs)}, {bytes_text(needs - self.limit)} too much; use more ranks, a smaller batch "
            f"than {self.batch}, or allow more memory"
        ) from failure

    def _best_reduction(self, best: _Found) -> _Found:
        """The same strategy with the best scheme of gradient reduction, and the best size of its buckets.

        Another scheme than buckets has to be worth it: predictions are not that exact.
        """
        plain = self._fastest(best, [best.strategy.reduction])
        schemes = planned_schemes(self.network, best.strategy, self.batch, self.machine, self.planning.without)
        other = self._fastest(plain, schemes)
        return other if other.seconds < (1 - WORTH) * plain.seconds else plain

    def _fastest(self, best: _Found, schemes: Sequence[Scheme]) -> _Found:
        tries = [
            _Found(best.name, best.simulation.with_reduction(scheme, nbytes), best.optimal)
            for scheme in schemes
            for nbytes in (self.buckets if scheme.has_buckets else self.buckets[:1])
        ]
        for found in sorted(tries, key=lambda f: f.seconds):
            if found.seconds >= best.seconds:
                break
            if self._fits(found):
                return found
        return best

    def _result(self, best: _Found, seconds: float) -> Plan:
        others = [f for f in self.found if f.strategy.layers != best.strategy.layers]
        prediction = best.simulation.prediction()
        return Plan(
            self.network.name,
            tuple(self.network.layers),
            self.batch,
            self.ranks,
            self.planning.training.dtype,
            self.machine.name,
            best.name.split(",")[0],
            _with_halos(best.strategy, prediction),
            prediction,
            tuple(Alternative(f.name, f.seconds, f.memory_bytes, self._fits(f)) for f in others),
            self.limit,
            best.optimal,
            seconds,
        )


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection: programs live to the end of a search, and to look through them takes an eighth of it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _with_halos(strategy: Strategy, prediction: Prediction) -> Strategy:
    """With the halo algorithm that the prediction chose for every layer."""
    layers: dict[str, Mapping[str, Any]] = dict(strategy.layers)
    for record in prediction.layers:
        if record.halo_algorithm:
            layers[record.name] = {**layers.get(record.name, {}), "halo": record.halo_algorithm}
    return replace(strategy, layers=layers)
