"""Planning of a network for a machine: the strategies that are simulated, and the choice among them.

A planner minimizes sums over layers and edges. Overlap is not such a sum, so simulations decide, of:

* the baselines, and grids that are the same for all layers (if there are many, those that a neighborhood search finds);
* the choices of the planner, for several assumed overlaps of the sums of gradients (`EXPOSED`);
* a descent from the best of them: changes of a layer, of two adjacent layers, of regions with the same cut, the most
  promising by additive costs first, as long as a step becomes faster; and a shorter one from the best grid;
* the same under decreasing memory limits, from the memory of the fastest strategy to the given limit;
* each of them under every scheme of gradient reduction and size of buckets;
* strategies that do not fit, but are faster than all that do, with outputs computed again in the backward pass
  (`halograd.program.keeping`);
* the fastest of them with wide values (`widening.py`).

The fastest strategy that fits is the plan: it is never slower than a baseline, or a simulated grid, that fits. The
strategies simulated under the larger limits do not depend on the smallest limit, so a plan is found again if its own
memory is the limit.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, NoReturn

from halograd.documents import bytes_text
from halograd.errors import UserError
from halograd.schema import build

from ..device import as_dtype, wide
from ..layers import Network, Strategy
from ..layers.reduction_scheme import Scheme
from ..program.keeping import Keeping
from .changes import Changes
from .cost.network_costs import NetworkCosts, varied_costs
from .cost.network_model import NetworkModel
from .cost.pricing import Pricing
from .cost.simulate import Simulation, Training
from .cuts import BASELINES, GRID, Parts, grids, is_step, strategy_of
from .kernel_times import KernelTimes
from .machine import Machine
from .plan_candidates import PlanCandidate, PlanCandidates, planned_schemes
from .planners import PLANNERS, Elimination, NoneFits, Planner
from .planners.problem import memory_problem
from .plans import Alternative, Plan, Prediction, Ranks
from .widening import MARGIN, wider

__all__ = ["Planning", "StrategySearch", "plan_frontier", "plan_network", "quick_pricing", "uncollected", "with_halos"]

Rule = Literal["none", "auto", "pointwise", "block"]

#: Fractions of the sums of gradients that are charged to layers, one plan each; `simulate` decides between them.
EXPOSED = (1.0, 0.3, 0.0)
#: Sizes of buckets to try for the best plan [B].
BUCKETS = (1 << 20, 4 << 20, 16 << 20)
#: Maximum number of repetitions, under a smaller limit, of a plan that turns out not to fit.
ATTEMPTS = 6
#: Ratio of consecutive memory limits of the search, which start at the memory of the fastest plan.
LEVEL = 0.8
#: Ratio of consecutive memory limits of a frontier.
FINE = 0.9
#: Number of grids whose cuts are candidates of every layer.
GRIDS = 3
#: Largest estimated loss of a change that is still simulated, as a fraction of the step.
SLACK = 0.05
#: Maximum ratio of a change's estimated memory to its actual memory.
NEAR = 1.05
#: Relative difference below which times are equal.
ROUNDING = 1e-9
#: Kinds of layers that may be computed again (`Layer.recomputation`), by the rule of a plan.
KINDS: dict[str, tuple[str, ...]] = {
    "none": (),
    "pointwise": ("pointwise",),
    "block": ("pointwise", "block"),
    "auto": ("pointwise", "block"),
}
#: The search ends if the leanest choice needs more than this multiple of the limit: others need still more.
HOPELESS = 2.0
#: Number of cuts for which outputs to compute again are chosen.
CUTS = 6
#: Dtypes, and multiples of the ranks, that are tried if nothing fits.
LOW, MORE = ("bfloat16", "float16"), (2, 4, 8, 16, 32, 64)
#: Number of simulated layers in one descent, and minimum number of strategies; number of strategies from the best grid.
WORK, FEWEST, NEAR_GRID = 2000, 8, 8
#: Number of the fastest strategies, of all and of those that fit, that are tried with wide values; one more for
#: networks of up to `FEW_LAYERS` layers, whose steps are simulated in little time.
WIDENED, FEW_LAYERS = 2, 32


@dataclass(frozen=True)
class Planning:
    """Settings of `plan_network`.

    Attributes
    ----------
    planner
        Name of a planner, or of a baseline to use unchanged; ``"grid"``: the best cut that is the same for all layers.
    limit
        Memory limit of one rank [B]; None: the memory of the machine's device.
    full
        Whether to examine every legal cut.
    training
        Dtype and optimizer.
    bucket_bytes
        Size of the buckets of gradients [B]; None: the best of several.
    without
        Names of schemes of gradient reduction that the run cannot use.
    recompute
        What may be computed again if the memory does not suffice: nothing (``"none"``), ``"pointwise"`` layers, or all
        (``"block"``, ``"auto"``).
    """

    planner: str = "elimination"
    limit: float | None = None
    full: bool = False
    training: Training = field(default_factory=Training)
    bucket_bytes: int | None = None
    without: frozenset[str] = frozenset()
    recompute: Rule = "auto"


def plan_network(
    network: Network,
    batch: int,
    ranks: int,
    machine: Machine,
    times: KernelTimes,
    planning: Planning | None = None,
    quick: Pricing | None = None,
) -> Plan:
    """Return the plan: the fastest of the simulated strategies that fit (see this module). Local.

    Parameters
    ----------
    quick
        Cost model of the candidates of all layers (:func:`quick_pricing`), which several searches may share, such as
        those for other numbers of ranks; None: a new one.

    Raises
    ------
    UserError
        For an unknown planner, or if no strategy fits into the memory (the message states the excess).
    """
    with uncollected():
        return StrategySearch(network, batch, ranks, machine, times, planning or Planning(), quick).run()


def quick_pricing(machine: Machine, times: KernelTimes, dtype: str) -> Pricing:
    """Return the cost model for candidates: it prices the messages of a few ranks; simulations price those of more."""
    return Pricing(NetworkModel(machine, quick=True), times, dtype, best_halo=True)


def plan_frontier(
    network: Network,
    batch: int,
    ranks: int,
    machine: Machine,
    times: KernelTimes,
    planning: Planning | None = None,
) -> Iterator[Plan]:
    """Yield plans under smaller and smaller memory limits, from the fastest to the leanest that is found. Local.

    The parameters are those of :func:`plan_network`.
    """
    search = StrategySearch(network, batch, ranks, machine, times, planning or Planning())
    with uncollected():
        yield from search.frontier()


class StrategySearch:
    """Search for a plan: the strategies that were simulated, and the costs of all candidates."""

    def __init__(
        self,
        network: Network,
        batch: int,
        ranks: int,
        machine: Machine,
        times: KernelTimes,
        planning: Planning,
        quick: Pricing | None = None,
    ) -> None:
        # Raises UserError for more ranks than a plan can examine.
        build(Ranks, ranks, at="ranks")
        self.chooser = PLANNERS.find(planning.planner, "planner")()
        self.network, self.batch, self.ranks, self.machine = network, batch, ranks, machine
        self.times, self.planning, self.training = times, planning, planning.training
        self.limit: float = machine.memory if planning.limit is None else planning.limit
        self.buckets = (planning.bucket_bytes,) if planning.bucket_bytes else BUCKETS
        # Every strategy is simulated with buckets of this size first; its variants have all sizes.
        self.middle = self.buckets[len(self.buckets) // 2]
        self.pricing = Pricing(NetworkModel(machine), times, self.training.dtype, best_halo=True)
        self.quick = quick or quick_pricing(machine, times, self.training.dtype)
        self.plan_candidates = PlanCandidates(
            network, partial(_schemes, network, batch, machine, planning, self.buckets)
        )
        #: Baselines and the best grid, with which plans are compared, by name; several names may have the same cuts.
        self.compared: dict[str, PlanCandidate] = {}
        #: Costs of all candidates, computed for planners only.
        self.costs: NetworkCosts
        self.has_costs = False
        #: Whether the leanest choice needs so much memory that a search under the limit is pointless (`HOPELESS`).
        self._hopeless = False
        #: Strategies that a descent, or the search for a grid, may simulate.
        self.budget = max(FEWEST, WORK // len(network.layers))
        self.planner: Planner
        #: Cost models on other machines, for which candidates are not lowered again, and the costs of candidates there.
        self.also: Sequence[Pricing] = ()
        self.varied: list[NetworkCosts] = []
        #: Search for another machine whose programs, and their memory, are the same.
        self.origin: StrategySearch | None = None

    def run(self) -> Plan:
        began = time.perf_counter()
        return self.result(self.best(widens=True), began)

    def best(self, widens: bool = False) -> PlanCandidate:
        """Search; return the fastest strategy that fits, which may have wide values if `widens`.

        Raises UserError if there is none.
        """
        failure = self.chooser.look(self)
        best = None
        # Else the limit is out of reach, and only the leanest strategy is looked for.
        if self.limit >= self._lower_bound and not self._hopeless:
            best = self._recomputed(self.plan_candidates.fastest(self.limit))
            if widens:
                best = self._widened(best)
        if best is None:
            best = self._leanest()
            if not best.fits(self.limit):
                self._refuse(best, failure)
        return best

    def vary(self, origin: StrategySearch, costs: NetworkCosts, binds: bool) -> PlanCandidate | None:
        """Search with half the budget, and the candidates of another machine; return the fastest strategy that fits.

        The result is None if none fits.

        Parameters
        ----------
        origin
            Finished search on the other machine.
        costs
            Costs of its candidates on this machine.
        binds
            Whether the fastest strategy of the other search does not fit.
        """
        self.origin, self.costs, self.has_costs = origin, costs, True
        self.changes, self.planner = Changes(costs), origin.planner
        self.budget = max(FEWEST, origin.budget // 2)
        for (
            name,
            plan_candidate,
        ) in origin.compared.items():  # a descent begins with the best of these and the planner's choices
            self.compared[name] = self._try(name, plan_candidate.strategy)
        with suppress(NoneFits):
            self._explore(self.limit if binds else math.inf)
        if GRID in self.compared:
            limit = self.limit if binds else math.inf
            self._descend(self.plan_candidates.best_of(self.compared[GRID], limit), limit, NEAR_GRID)
        return (
            self._recomputed(self.plan_candidates.fastest(self.limit))
            if binds
            else self.plan_candidates.fastest(self.limit)
        )

    def frontier(self) -> Iterator[Plan]:
        """Yield plans for smaller and smaller limits, from the fastest strategy that fits to the leanest one found.

        Plans that need more memory than a later one and are not faster are left out.
        """
        plans = list(self._levels())
        for i, plan in enumerate(plans):
            if all(plan.step_seconds < other.step_seconds for other in plans[i + 1 :]):
                yield plan

    def _levels(self) -> Iterator[Plan]:
        """Yield the plan of each limit, and the leanest one."""
        began, level, last = time.perf_counter(), self.limit, self.limit
        self.limit = math.inf
        # The search under this limit only finds the fastest strategies; each level below explores its own limit.
        self.chooser.look(self)
        while True:
            self.limit = level
            if self.has_costs:
                with suppress(NoneFits):
                    self._explore(level)
            best = self._recomputed(self.plan_candidates.fastest(level))
            if best is None:
                break
            last = best.memory_bytes
            yield self.result(best, began)
            # A plan may need much less than its limit: the next limit is below both.
            began, level = time.perf_counter(), min(level, last) * FINE
        self.limit = last
        least = self._leanest()
        if least.memory_bytes < last:
            yield self.result(least, began)

    def compare(self, name: str, cut: Callable[..., Strategy]) -> None:
        """Simulate the strategy of the baseline `name`, ``cut(network, batch, ranks, bucket_bytes)``."""
        self.compared[name] = self._try(name, cut(self.network, self.batch, self.ranks, self.middle))

    def compare_grids(self) -> None:
        """Simulate strategies with one grid for all layers. Raises UserError if no grid has a part for every rank."""
        if not self.best_grids():
            raise UserError(
                f"planner grid: expected inputs with samples, rows and columns for {self.ranks} parts, got a batch "
                f"of {self.batch} with too few; use fewer ranks, or another planner"
            )

    def explore(self, planner: Planner) -> NoneFits | None:
        """Simulate baselines, grids, and the results of a planner and of descents, without and with memory limits.

        Return the error of a planner that finds nothing; else None.
        """
        for name in BASELINES:
            PLANNERS[name]().look(self)
        if self.limit < self._lower_bound:  # the candidates of many ranks take long, and none of them can fit
            return None
        arguments = (self.network, self.batch, self.ranks, [self.quick, *self.also], self.training, self.planning.full)
        self.costs, *self.varied = varied_costs(*arguments, self.middle, self.best_grids())
        self.has_costs = True
        self.changes, self.planner = Changes(self.costs), planner
        self._explore(math.inf)
        if GRID in self.compared:
            # Additive costs misjudge sums of gradients, which overlap: a few changes of a grid may lead further than
            # many changes of the planner's choices.
            grid = self.plan_candidates.best_of(self.compared[GRID], math.inf)
            self._descend(grid, math.inf, min(NEAR_GRID, self.budget // 2))
        best = self.plan_candidates.fastest()
        # Without a limit, every strategy fits.
        assert best is not None
        level = float(best.memory_bytes)
        # The fastest strategy does not fit: does it, or the planner's choice of the fewest permanent arrays, come near
        # the limit? That choice may need much memory for messages, as each layer has a cut of its own.
        if level > self.limit:
            leanest = self.choose(Elimination().plan(memory_problem(self.costs.problem())).indices)
            kinds, most = KINDS[self.planning.recompute], HOPELESS * self.limit
            self._hopeless = all(self.plan_candidates.least_memory(c, kinds, most) > most for c in (best, leanest))
            if self._hopeless:
                return None
        while level > self.limit:
            level *= LEVEL
            try:
                self._explore(level)
            except NoneFits as fault:
                return fault
        return None

    def _try(
        self, name: str, strategy: Strategy, optimal: bool = False, indices: tuple[int, ...] | None = None
    ) -> PlanCandidate:
        known = self.plan_candidates.find(strategy)
        if known is not None:
            return known
        # A search on another machine has the same programs: only their prices are computed again.
        same = None if self.origin is None else self.origin.plan_candidates.find(strategy)
        arguments = (self.network, strategy, self.batch, self.pricing, self.training, self.ranks)
        simulation = Simulation(*arguments) if same is None else same.simulation.on(self.pricing)
        return self.plan_candidates.add(PlanCandidate(name, simulation, optimal, indices))

    # -- what is simulated ---------------------------------------------------------------------

    def choose(self, indices: tuple[int, ...], optimal: bool = False) -> PlanCandidate:
        """Simulate a choice of candidates, unless these cuts were simulated before; return the result.

        `optimal`: whether the planner has proved that the choice is the fastest.
        """
        return self._try(self.chooser.name, self.costs.strategy(indices, self.middle), optimal, indices)

    def best_grids(self) -> list[Parts]:
        """Return at most `GRIDS` grids, the fastest if all layers have the same.

        Of many grids, those are taken that a neighborhood search finds.
        """
        by_grid: dict[Parts, PlanCandidate] = {}

        def seconds(parts: Parts) -> float:
            if parts not in by_grid:
                uniform = strategy_of(self.network, dict.fromkeys(self.network.layers, parts), self.middle)
                by_grid[parts] = self._try(GRID, uniform)
            return by_grid[parts].seconds

        choices = grids(self.network, self.batch, self.ranks)
        # Inputs may have too few positions for so many parts.
        if not choices:
            return []
        if len(choices) > self.budget:
            # Steps to the fastest neighbor, until none is faster.
            best = choices[0]
            while len(by_grid) < self.budget:
                nearest = min((p for p in choices if is_step(best, p)), key=seconds, default=best)
                if seconds(nearest) >= seconds(best):
                    break
                best = nearest
            choices = list(by_grid)
        choices.sort(key=seconds)
        self.compared[GRID] = by_grid[choices[0]]
        return choices[:GRIDS]

    def _explore(self, limit: float) -> None:
        """Plan under a memory limit [B], once per assumed overlap (`EXPOSED`); improve the best plan by descent."""
        for exposed in EXPOSED:
            self._plan(exposed, limit)
        self._descend(self.plan_candidates.fastest(limit), limit, self.budget)

    def _plan(self, exposed: float, limit: float) -> None:
        capacity: float | None = None if limit == math.inf else limit
        for attempt in range(ATTEMPTS):
            try:
                choice = self.planner.plan(self.costs.problem(exposed, capacity))
            except NoneFits:
                # That nothing fits a reduced capacity does not prove that nothing fits the limit.
                if attempt:
                    return
                raise
            plan_candidate = self.choose(choice.indices, choice.optimal)
            if capacity is None or plan_candidate.fits(limit):
                return
            # The problem does not include temporary memory of the backward pass: leave capacity for it.
            capacity = min(capacity, choice.memory) - (plan_candidate.memory_bytes - limit)

    def _descend(self, best: PlanCandidate | None, limit: float, left: int) -> None:
        """Change layers as long as a step becomes faster and stays within the limit [B]; try at most `left` changes."""
        tried = set[tuple[int, ...]]()
        while best is not None and left > 0:
            indices = best.indices or self.costs.indices(best.strategy)
            faster = None
            for change in [] if indices is None else self.changes.of(indices, -SLACK * best.seconds):
                # Estimates of memory are too large by up to `NEAR`: what may fit is simulated.
                if change.indices in tried or not best.fits(limit - change.memory / NEAR):
                    continue
                tried.add(change.indices)
                left -= 1
                faster = self.plan_candidates.best_of(self.choose(change.indices), limit, best.seconds * (1 - ROUNDING))
                if faster is not None or not left:
                    break
            best = faster

    # -- what is computed again ----------------------------------------------------------------

    def _recomputed(self, best: PlanCandidate | None) -> PlanCandidate | None:
        """Return the fastest strategy that fits, with or without recomputed outputs.

        `best` is the fastest one without; None if none fits.
        """
        trials: list[tuple[float, int, PlanCandidate, Keeping, float]] = []
        by_time = sorted(self.plan_candidates, key=lambda candidate: candidate.simulation.computing)
        for plan_candidate in by_time if KINDS[self.planning.recompute] else []:
            limit = math.inf if best is None else best.seconds
            variants = self.plan_candidates.variants(plan_candidate)
            if plan_candidate.simulation.computing >= limit or len(trials) >= CUTS:
                break
            if variants[0].seconds >= limit:
                continue
            # It is faster than `best`, so it does not fit. Sharded gradients leave the most memory for outputs.
            keeping = plan_candidate.simulation.keeping(KINDS[self.planning.recompute])
            sharded = next((variant for variant in variants if variant.strategy.reduction.kind.shards), variants[0])
            for variant in dict.fromkeys((variants[0], sharded)):
                # What remains for outputs: the memory of everything else does not depend on which of them are kept.
                capacity = self.limit - (variant.memory_bytes - keeping.most)
                seconds = variant.seconds + keeping.estimate(max(capacity, keeping.least))
                if keeping.may_fit(capacity):
                    trials.append((seconds, len(trials), variant, keeping, capacity))
        for seconds, _, variant, keeping, capacity in sorted(trials):
            if best is not None and seconds >= best.seconds:
                break
            chosen = keeping.within(capacity)
            if chosen is not None:
                recomputed = self._add_recomputed(variant, chosen)
                if recomputed.fits(self.limit) and (best is None or recomputed.seconds < best.seconds):
                    best = recomputed
        return best

    def _add_recomputed(self, variant: PlanCandidate, chosen: Strategy) -> PlanCandidate:
        """Store and return the cuts and recomputed outputs of `chosen` with the scheme of `variant`."""
        strategy = chosen.with_reduction(variant.strategy.reduction, variant.strategy.bucket_bytes)
        arguments = self.batch, self.pricing, self.training, self.ranks
        return self.plan_candidates.add_recomputed(variant, Simulation(self.network, strategy, *arguments))

    # -- what is computed with margins ---------------------------------------------------------

    def _widened(self, best: PlanCandidate | None) -> PlanCandidate | None:
        """Return `best`, or the fastest strategy found with wide values that fits and is faster by a margin.

        Several of the fastest strategies are tried, including those that only fit with wide values: one with many
        exposed halos may become faster than the fastest plain one.
        """

        def simulate(strategy: Strategy) -> Simulation:
            return Simulation(self.network, strategy, self.batch, self.pricing, self.training, self.ranks)

        chosen, below = best, math.inf if best is None else (1 - MARGIN) * best.seconds
        number = WIDENED + (len(self.network.layers) <= FEW_LAYERS)
        bases = self.plan_candidates.few(math.inf, number)
        if best is not bases[0]:  # the limit binds
            bases = [*([] if best is None else [best]), *self.plan_candidates.few(self.limit, number), *bases]
        tried = set[tuple[tuple[float, ...], ...]]()
        for base in dict.fromkeys(bases) if self.chooser.widens else ():
            plain = base.simulation.prediction(account=False)
            times = tuple((record.seconds, record.halo, record.packing) for record in plain.layers)
            if times in tried:  # a mirror image: the same cuts of another axis
                continue
            tried.add(times)
            for simulation in wider(with_halos(base.strategy, plain), plain, simulate, below):
                wide = PlanCandidate(base.name, simulation, indices=base.indices)
                if wide.fits(self.limit):
                    chosen, below = wide, wide.seconds
                    break
        return chosen

    # -- the result ----------------------------------------------------------------------------

    @cached_property
    def _lower_bound(self) -> float:
        """Lower bound on the memory of the fullest rank under any strategy [B].

        The inputs, the parameters, and the gradients of the trained ones exist at once, each on at least one rank.
        """
        compute = as_dtype(self.training.dtype)
        nodes = self.network.inputs.values()
        inputs = sum(math.prod(node.shape) * node.array_dtype(compute).itemsize for node in nodes)
        return (self.batch * inputs + self._parameter_bytes()) / self.ranks

    def _parameter_bytes(self, spatial: bool = True) -> int:
        """Return the size of all parameters, or of those without spatial axes, with gradients of the trained ones [B].
        """
        return wide(self.training.dtype).itemsize * sum(
            spec.size * (2 if layer in self.network.trained else 1)
            for layer in self.network.layers
            for spec in self.network.own_parameters(layer).values()
            if spatial or not spec.spatial_axes
        )

    def _refuse(self, least: PlanCandidate, failure: NoneFits | None) -> NoReturn:
        needs = least.memory_bytes
        remedies = [f"{text}, {1e3 * seconds:.4g} ms a step" for text, seconds in self._remedies()]
        fits = f"; with which it fits: {'; '.join(remedies)}" if remedies else ""
        raise UserError(
            f"plan: expected a strategy within {bytes_text(self.limit)} per rank, the smallest found ({least.name}) "
            f"needs {bytes_text(needs)}, {bytes_text(needs - self.limit)} too much; use more ranks, a smaller batch "
            f"than {self.batch}, or allow more memory{fits}"
        ) from failure

    def _leanest(self) -> PlanCandidate:
        """Return the strategy that needs the least memory, with or without outputs computed again."""
        trials: list[tuple[float, int, PlanCandidate, Keeping]] = []
        leanest = sorted(self.plan_candidates, key=lambda variant: variant.memory_bytes)[:CUTS]
        for plan_candidate in leanest if KINDS[self.planning.recompute] else []:
            keeping = plan_candidate.simulation.keeping(KINDS[self.planning.recompute])
            variants = self.plan_candidates.variants(plan_candidate)
            # The estimate below replaces the memory of all outputs, so the variant must keep them.
            kept = [variant for variant in variants if variant.strategy == variant.strategy.keeping_all] or variants
            variant = min(kept, key=lambda variant: variant.memory_bytes)
            trials.append((variant.memory_bytes - keeping.most + keeping.least, len(trials), variant, keeping))
        if trials:
            _, _, variant, keeping = min(trials)
            self._add_recomputed(variant, keeping.fewest())
        return self.plan_candidates.leanest()

    def _remedies(self) -> Iterator[tuple[str, float]]:
        """Yield settings under which one cut for all layers fits, each with the time of a step [s]."""
        if self.limit < self._parameter_bytes(spatial=False):  # these cuts leave such parameters whole on every rank
            return
        if self.planning.recompute == "none":
            for plan in self._other(recompute="auto"):
                yield 'recompute = "auto"', plan.step_seconds
        # Only the smallest number of parts that fits; it must divide the batch.
        for parts in (k for k in range(2, self.batch + 1) if self.batch % k == 0):
            for plan in self._other(batch=self.batch // parts, training=replace(self.training, accumulates=True)):
                # The other parts only run both passes; the plan's step contains the sums of gradients and the update.
                passes = plan.prediction.forward_seconds + plan.prediction.backward_seconds
                yield f"accumulate = {parts}", plan.step_seconds + (parts - 1) * passes
                break
            else:
                continue
            break
        # Where 16 bits are no faster, they are only emulated, which a run refuses.
        peaks = self.machine.peak_flops if self.training.dtype == "float32" else {}
        for dtype in (d for d in LOW if peaks.get(d, 0.0) > peaks.get("float32", math.inf)):
            for plan in self._other(training=replace(self.training, dtype=dtype)):
                yield f'dtype = "{dtype}"', plan.step_seconds
        for ranks in (self.ranks * k for k in MORE):
            for plan in self._other(ranks=ranks):
                yield f"{ranks} ranks", plan.step_seconds
                return

    def _other(self, batch: int | None = None, ranks: int | None = None, **changes: Any) -> Iterator[Plan]:
        """Yield the plan of the best grid under changed settings, if there is one that fits."""
        arguments = batch or self.batch, ranks or self.ranks, self.machine, self.times
        other = StrategySearch(
            self.network, *arguments, replace(self.planning, planner=GRID, limit=self.limit, **changes)
        )
        with suppress(UserError):
            other.chooser.look(other)
            best = other._recomputed(other.plan_candidates.fastest(self.limit))
            if best is not None:
                yield other.result(best, time.perf_counter())

    def result(self, best: PlanCandidate, began: float) -> Plan:
        """Return the plan of a simulated strategy; `began` is the time at which the search began [s]."""
        # Each alternative has its best scheme, as the plan has.
        suited = [(name, self.plan_candidates.best_of(f, self.limit) or f) for name, f in self.compared.items()]
        others = [Alternative(name, f.seconds, f.memory_bytes, f.fits(self.limit)) for name, f in suited]
        prediction = best.simulation.prediction()
        return Plan(
            self.network.name,
            tuple(self.network.layers),
            self.batch,
            self.ranks,
            self.training.dtype,
            self.machine.name,
            best.name,
            with_halos(best.strategy, prediction),
            prediction,
            tuple(others),
            self.limit,
            best.optimal,
            time.perf_counter() - began,
        )


def _schemes(
    network: Network, batch: int, machine: Machine, planning: Planning, buckets: tuple[int, ...], strategy: Strategy
) -> list[tuple[Scheme, int]]:
    """Return the schemes to try for a strategy, each with every size of buckets [B], or with one if it has no buckets.
    """
    planned = planned_schemes(network, strategy, batch, machine, planning.without)
    return [
        (scheme, nbytes)
        for scheme in dict.fromkeys([strategy.reduction, *planned])
        for nbytes in (buckets if scheme.has_buckets else buckets[:1])
    ]


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection in the body: simulations live until the end of a search, and scanning them is slow."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def with_halos(strategy: Strategy, prediction: Prediction) -> Strategy:
    """Return the strategy with the halo algorithm that the prediction chose for every layer."""
    layers: dict[str, Mapping[str, Any]] = dict(strategy.layers)
    for record in prediction.layers:
        if record.halo_algorithm:
            layers[record.name] = {**layers.get(record.name, {}), "halo": record.halo_algorithm}
    return replace(strategy, layers=layers)
