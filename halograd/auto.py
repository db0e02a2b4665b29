"""Planning of a run at its start: measurement of this machine if needed, plan, trial steps, comparison of plan and run.

This implements ``strategy = "auto"``. The command line or a script passes :func:`plan_run` to
`halograd.training.train`. This module is above `training`, which does not import planners.

1. Plan with the known times, measure the layers whose times are missing, and plan again, until no time is missing.
2. Measure a second time the layers on which the plan and the baselines depend: among hundreds of candidates with
   measurement errors, the minimum prefers those whose times are too short. If this changes the plan, go back to 1.
3. Time steps of the plan, and of the baselines with a similar prediction. The fastest is chosen. Effects that the model
   leaves out (such as ranks that wait for each other at each message) favor some strategies systematically.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .comm import Communicator
from .comm.transport import TRANSPORTS
from .errors import UserError
from .kernels import BackendOptions, KernelError
from .layers import Network, Strategy
from .layers.reduction_scheme import BY_NODES, KINDS, Scheme
from .limits import usable_cores
from .measuring import Measuring, StepTrial, fastest_or_first, measure_steps, near_baselines
from .output import split_text
from .perfmodel.cost import NetworkModel, Pricing, Training, simulate
from .perfmodel.cuts import BASELINES, GRID, baseline
from .perfmodel.kernel_times import (
    KernelTimes,
    LayerWork,
    MeasuredTimes,
    Recorded,
    RooflineTimes,
)
from .perfmodel.machine import Machine
from .perfmodel.plan_candidates import candidate_schemes, rank_schemes
from .perfmodel.planners import PLANNERS
from .perfmodel.plans import Alternative, Plan
from .perfmodel.predict import Planning
from .perfmodel.robust import RobustPlan
from .plan_text import compared, comparison, plan_text, robust_text
from .planning import PlanRequest, check_planner, known_baselines, make_plan, make_robust_plan, parse_memory
from .training.backend import connect_device, open_kernels
from .training.build import make_network, make_optimizer, state_slots, with_reduction
from .training.config import Config
from .training.executor import Executor
from .training.optimizers import OPTIMIZERS
from .training.root import on_root
from .training.schedules import Constant
from .training.step_times import Measured
from .training.trainer import Trainer

__all__ = ["plan_run", "rank_schemes_of", "rests_on", "try_run"]

#: Share of the free memory that a trial on one rank may use.
SPARE = 0.8
#: Number of layers up to which a plan for a described machine is robust by default: its search takes seconds.
FEW_LAYERS = 64


@dataclass(frozen=True)
class PlannedRun:
    """Plan of a run, with the methods that `halograd.training.train` expects.

    Attributes
    ----------
    plan
        Plan with its request.
    """

    plan: Plan

    @property
    def strategy(self) -> Strategy:
        """Strategy of the plan."""
        return self.plan.strategy

    def compare(self, measured: Measured) -> str:
        """Return lines that compare prediction and measurement, per layer and in total."""
        return "\n".join(comparison(self.plan, measured))

    def record(self, measured: Measured) -> dict[str, object]:
        """Return the comparison of :meth:`compare` as plain data, for the log; times in [s]."""
        return compared(self.plan, measured)


def plan_run(config: Config, comm: Communicator, training: bool = True) -> PlannedRun:
    """Plan a run on this communicator. Rank 0 plans, prints and saves the plan. Collective.

    Without ``strategy.machine``, all ranks first measure this machine, if it was not measured before. The plan is saved
    as ``plan.json`` in the run's directory.

    Parameters
    ----------
    training
        Whether the run trains. An evaluation (False) uses the plan saved in that directory, if it fits; else it plans
        without measuring layers, and neither prints nor saves the plan.

    Raises
    ------
    UserError
        The machine or planner is unknown, or a limit cannot be met; on all ranks.
    """
    network = make_network(config)
    kept = None if training else _kept(config, comm, network)
    if kept is not None:
        return PlannedRun(kept)
    check_planner(config.strategy.planner, "strategy.planner")  # raises on all ranks, before communication
    parse_memory(config.strategy.memory, "strategy.memory")
    with open_kernels(config.backend, comm) as kernels:
        planner = _Planner(config, comm, network, kernels, config.strategy.budget if training else 0.0)
        plan = planner.measured()
        trial = planner.tried(plan) if training else StepTrial(plan, plan.planner)
    with comm.agreement():  # the directory may not be writable
        if comm.rank == 0 and training:
            _show(trial, config, planner.robust)
    return PlannedRun(trial.plan)


def try_run(config: Config, comm: Communicator) -> StepTrial:
    """Time steps of the plan, of near baselines, and of the best cut that is the same for all layers. Collective.

    Returns the chosen plan, and the times.
    """
    network = make_network(config)
    with open_kernels(config.backend, comm) as kernels:
        planner = _Planner(config, comm, network, kernels, config.strategy.budget)
        plan = planner.measured()
        return planner.tried(plan, [GRID])


def rank_schemes_of(config: Config, comm: Communicator, strategy: Strategy) -> list[Scheme]:
    """Return the schemes of gradient reduction that are worth trying in a run, ordered by predicted time. Collective.

    The prediction uses the machine of the configuration, or the stored measurement of this machine; nothing is
    measured. Without either, the result is empty.
    """
    network = make_network(config)
    with open_kernels(config.backend, comm) as kernels:
        measuring = _measuring(config, comm, network, kernels)
        if measuring is not None and measuring.known_machine(measuring.machine_file()) is None:
            return []
        planner = _Planner(config, comm, network, kernels, budget=0.0)
        times = planner.times()
    schemes_ranked: list[Scheme] = []
    with comm.agreement():
        if comm.rank == 0:
            # Only rank 0 holds measured times.
            schemes = candidate_schemes(network, strategy, planner.batch)
            arguments = (network, strategy, planner.batch, planner.machine, times, schemes, planner.training, comm.size)
            schemes_ranked = list(rank_schemes(*arguments))
    return comm.bcast(schemes_ranked)


def _plan_path(config: Config) -> Path:
    return Path(config.output.directory) / "plan.json"


def _kept(config: Config, comm: Communicator, network: Network) -> Plan | None:
    """Return the saved plan of the run if it fits this network, number of ranks and batch; else None. Collective."""

    def load() -> Plan | None:
        try:
            plan = Plan.load(_plan_path(config))
            plan.check(network, comm.size, config.training.at_once)
        except UserError:
            return None
        return plan

    return on_root(comm.mpi, load)  # any other error must not leave the other ranks in a broadcast


def _show(trial: StepTrial, config: Config, robust: RobustPlan | None) -> None:
    """Print the trial and the plan, and save the plan in the run's directory."""
    plan, path = trial.plan, _plan_path(config)
    lines = [*trial.lines(config.backend.threads), *plan_text(plan, known_baselines(plan))]
    if robust is not None and trial.name == robust.plan.planner:
        lines += ["", *robust_text(robust)]
    print("\n".join(lines), flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    plan.save(path)


def _measuring(config: Config, comm: Communicator, network: Network, kernels: Any) -> Measuring | None:
    """Return the measurements of this machine; None if the configuration names a machine."""
    if config.strategy.machine:
        return None
    training, autotune = config.training, config.backend.autotune
    return Measuring(comm, kernels, network, training.at_once, dtype=training.dtype, autotune=autotune)


class _Planner:
    """Planner that measures on all ranks within the budget [s], and plans on rank 0.

    Methods are collective unless they are described as Local.
    """

    def __init__(
        self, config: Config, comm: Communicator, network: Network, kernels: Any, budget: float | None
    ) -> None:
        self.config, self.comm, self.network, self.kernels, self.budget = config, comm, network, kernels, budget
        self._left = budget  # remaining budget [s]
        self.batch = config.training.at_once
        accumulates, clips = config.training.accumulate > 1, config.training.clip_norm is not None
        # The batches that are prefetched, and the one that the step uses.
        ahead = config.data.prefetch + 1
        self.training = Training(config.training.dtype, state_slots(config), False, accumulates, clips, ahead)
        self.measuring = _measuring(config, comm, network, kernels)
        self.machine_file, self.machine = self._machine()
        self._once: set[str] = set()  # layers measured once in this run
        self.robust: RobustPlan | None = None  # on rank 0

    def _machine(self) -> tuple[str, Machine]:
        """Return the machine of the configuration, else this machine, measured now or before."""
        named = self.config.strategy.machine
        if named or self.measuring is None:
            return named or "", on_root(self.comm.mpi, lambda: Machine.load(named or ""))
        path = self.measuring.machine_file()
        machine = self.measuring.known_machine(path)
        if machine is None:
            self._report("profiling this machine: messages and kernels")
            machine = self.measuring.keep_machine(path)
        return str(path), machine

    def times(self) -> KernelTimes:
        """Return the kernel times: known measured times, or for a named machine its roofline. Local."""
        return RooflineTimes(self.machine) if self.measuring is None else self.measuring.times(self.machine)

    def measured(self) -> Plan:
        """Return a plan whose layers were measured, and its decisive layers twice, as far as the budget permits.

        The loop ends because each round measures a layer for the first or second time.
        """
        while True:
            times = self.times()
            plan = self._plan_on_root(times)
            missing = list(times.missing.values()) if isinstance(times, MeasuredTimes) else []
            # Only rank 0 has the times, so its list decides what all ranks measure next.
            works, again = self.comm.bcast((missing or self._unconfirmed(plan), not missing))
            if not works or not self._measure(works, again):
                return plan
            keys = {work.key for work in works}
            # A layer that was measured twice is confirmed, and leaves the set.
            self._once = self._once - keys if again else self._once | keys

    def _unconfirmed(self, plan: Plan) -> list[LayerWork]:
        """Return the decisive layers of a plan that were measured only once. Local; empty on ranks other than 0."""
        if self.comm.rank or not self._once:
            return []
        works = rests_on(plan, self.network, self.machine, self.times(), self.training)
        return [work for key, work in works.items() if key in self._once]

    def _measure(self, works: list[LayerWork], again: bool) -> bool:
        """Measure layers within the budget; return whether there are new times."""
        if self._left == 0 or self.measuring is None:
            return False
        self._report(f"profiling {len(works)} shapes of layers" + (" again" if again else ""))
        state = self.comm.bcast(self.measuring.layers(works, self._left, again, self.config.output.progress))
        if state.left:
            done = "measured once only" if again else "estimated"
            self._report(f"{state.left} of them are {done}: strategy.budget is spent")
        if self._left is not None:
            self._left = max(0.0, self._left - state.seconds)
        return state.measured > 0

    def tried(self, plan: Plan, further: Sequence[str] = ()) -> StepTrial:
        """Time steps of the plan, of baselines with similar predictions, and of one rank with all threads.

        `further` names further baselines, which are tried whatever their predicted time. Returns the plan to train
        with, and the times; without trials, `plan` and no times.
        """
        table = self.config.strategy
        if not further and (table.machine or self.budget == 0):
            return StepTrial(plan, plan.planner)
        # A planner that does not search was the user's own choice, so nothing competes with it.
        names = near_baselines(plan) if PLANNERS[table.planner].searches else []
        times, plans = self.times(), {plan.planner: plan}
        for name in dict.fromkeys([*names, *further]):
            with suppress(UserError):  # raised on all ranks: alone, its plan does not fit
                plans[name] = self._plan_on_root(times, name)
        strategies = {name: as_run(candidate.strategy, self.config) for name, candidate in plans.items()}
        strategies = {
            name: candidate
            for name, candidate in strategies.items()
            if plans[name] is plan or can_run(candidate, self.network, self.comm.size)
        }
        # One strategy on one rank: there is nothing to choose, and no other split of the cores to report.
        if len(strategies) == self.comm.size == 1 and not further:
            return StepTrial(plan, plan.planner)
        # Same check as in the run, before any exchange.
        connect_device(self.kernels, self.comm, self.config.backend.device_transport)
        self._report(f"trying steps of {', '.join(strategies)}")
        seconds = measure_steps(
            self.comm, strategies, lambda candidate: self._opened(candidate, self.comm, self.kernels)
        )
        best = fastest_or_first(seconds)
        chosen = plan if plans[best] is plan else _instead_of(plan, plans[best])
        return StepTrial(chosen, best, seconds, self._alone())

    def _alone(self) -> float | None:
        """Return the time of a step on one rank with the threads of all ranks [s]; None if that is not possible."""
        threads, seconds = self.comm.size * self.config.backend.threads, None
        on_one_host = self.comm.size > 1 and self.kernels.device.is_host and len(set(self.comm.nodes)) == 1
        # Splitting is collective, so every rank makes a communicator, although only rank 0 uses its own.
        alone = self.comm.split(self.comm.rank)
        assert alone is not None
        with closing(alone), self.comm.agreement():
            if on_one_host and self.comm.rank == 0 and threads <= usable_cores().count and self._fits_alone():
                self._report(f"trying steps of {split_text(1, threads)}")
                # This trial is optional, so an error in it must not end the run.
                with (
                    suppress(UserError, KernelError, MemoryError),
                    type(self.kernels).open(BackendOptions(threads, self.config.backend.autotune)) as kernels,
                ):
                    opened = partial(self._opened, comm=alone, kernels=kernels)
                    seconds = measure_steps(alone, {"alone": Strategy()}, opened)["alone"]
        return self.comm.bcast(seconds)

    def _fits_alone(self) -> bool:
        """Return whether this machine reports enough free memory for a step on one rank. Local."""
        pricing = Pricing(NetworkModel(self.machine), self.times(), self.training.dtype)
        needed = simulate(self.network, Strategy(), self.batch, pricing, self.training, 1).memory_bytes
        try:
            # Free pages, not all pages: the other ranks of this host hold memory too.
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except ValueError:  # the system does not report it
            return False
        return needed < SPARE * free

    @contextmanager
    def _opened(self, strategy: Strategy, comm: Communicator, kernels: Any) -> Iterator[Callable[[], object]]:
        """Yield a function that runs one training step under a strategy, on random inputs with learning rate 0."""
        # `class_weights = "balanced"` needs class counts; times do not depend on them.
        self.network.balance()
        with Executor(self.network, comm, kernels, self.batch, strategy, self.training.dtype) as executor:
            trainer = Trainer(executor, make_optimizer(self.config, executor.store), Constant(0.0))
            draw = np.random.default_rng(comm.rank)
            for name, node in self.network.inputs.items():
                array = executor.input(name).array
                # Other inputs are class indices: they stay 0, which is a class of every network.
                if node.dtype == "compute":
                    executor.device.assign(array, draw.random(array.shape, np.float32).astype(array.dtype))
            yield trainer.step
            # The updates of the last step, which otherwise wait for a next forward pass.
            trainer.synchronize()

    def _plan_on_root(self, times: KernelTimes, planner: str = "") -> Plan:
        """Plan on rank 0; return the plan, or raise its UserError, on all ranks. Collective.

        If `planner` is empty, it is that of the configuration.
        """
        return on_root(self.comm.mpi, partial(self._plan, times, planner or self.config.strategy.planner))

    def _plan(self, times: KernelTimes, planner: str) -> Plan:
        table, model = self.config.strategy, self.config.model
        # Only a size that the user has set binds the planner, which else compares several.
        bucket = table.bucket_bytes if "bucket_bytes" in table.model_fields_set else None
        limit = parse_memory(table.memory, "strategy.memory")
        planning = Planning(
            planner, limit, False, self.training, bucket, _without(self.config), table.recompute or "auto"
        )
        plan_request = PlanRequest(
            model.source, model.options, self.network, self.machine, self.machine_file, self.training.dtype
        )
        if self._is_robust(planner):
            self.robust = make_robust_plan(plan_request, self.batch, self.comm.size, planning, times)
            plan = self.robust.plan
        else:
            plan = make_plan(plan_request, self.batch, self.comm.size, planning, times)
        if table.statistics is None:
            return plan
        # The configuration sets these, not the plan.
        options = {**plan.strategy.options, "statistics": table.statistics}
        return replace(plan, strategy=replace(plan.strategy, options=options))

    def _is_robust(self, planner: str) -> bool:
        """Return whether to choose the plan with the least regret on other machines; never for baselines of a trial."""
        table = self.config.strategy
        if planner != table.planner or table.robust is False:
            return False
        few = len(self.network.layers) <= FEW_LAYERS and PLANNERS[planner].searches
        return table.robust or (table.machine is not None and few)

    def _report(self, text: str) -> None:
        if self.comm.rank == 0 and self.config.output.progress:
            print(text, file=sys.stderr, flush=True)


def as_run(strategy: Strategy, config: Config) -> Strategy:
    """Return the strategy with the configuration's reduction scheme, unless the run searches for a scheme."""
    return strategy if config.reduction.scheme().kind.searches else with_reduction(strategy, config)


def can_run(strategy: Strategy, network: Network, ranks: int) -> bool:
    """Return whether a strategy is valid for this network and number of ranks. Local; the same on all ranks."""
    try:
        strategy.validate(network, ranks)
        strategy.refuse_empty_blocks(network)
    except UserError:
        return False
    return True


def _instead_of(plan: Plan, other: Plan) -> Plan:
    """Return plan `other`, whose alternatives are `plan` and the other alternatives of `plan`."""
    chosen = Alternative(plan.planner, plan.step_seconds, plan.prediction.memory_bytes, True)
    rest = [a for a in plan.alternatives if a.name != plan.planner]
    return replace(other, alternatives=(chosen, *rest))


def _without(config: Config) -> frozenset[str]:
    """Return the schemes of gradient reduction that this run cannot use, by its transport or its optimizer."""
    # Hierarchical schemes add up in the shared memory of a node.
    by_nodes = () if TRANSPORTS.make(config.backend.transport).shares else BY_NODES
    whole = OPTIMIZERS[config.optimizer.kind].whole_parameters
    # Sharded schemes leave a rank only parts of parameters, from which these optimizers cannot compute an update.
    shards = [name for name, kind in KINDS.items() if kind.shards and whole]
    return frozenset((*by_nodes, *shards))


# -- second measurements --------------------------------------------------------------------------


def rests_on(
    plan: Plan, network: Network, machine: Machine, times: KernelTimes, training: Training
) -> dict[str, LayerWork]:
    """Return, by key, the layers (on local blocks) whose times determine a plan and the baselines. Local.

    A second measurement of these layers, averaged with the first, reduces errors that favor the plan.

    Parameters
    ----------
    plan, network
        Plan and its network.
    machine, times, training
        Machine, times and training of its prediction.
    """
    # It records which layers the simulations below need times of.
    recorded = Recorded(times)
    pricing = Pricing(NetworkModel(machine), recorded, training.dtype)
    fixed = [baseline(name, network, plan.batch, plan.ranks) for name in BASELINES]
    for strategy in [plan.strategy, *fixed]:
        simulate(network, strategy, plan.batch, pricing, training)
    return recorded.requested
