"""Planning a run as it starts: measure this machine if needed, plan, try steps, and hold the plan against the run.

``strategy = "auto"`` in a configuration; the command line passes :func:`plan_run` to `halograd.training.train`, and
so may a script. It lives above `training`, which knows nothing of planners.

1. A plan is made with the times that are known, what it asks for is measured, and it is made again, until it asks for
   nothing new.
2. What the plan and the baselines rest on is measured once more: among hundreds of candidates, each measured with some
   error, the minimum prefers those whose error was in their favor. Another plan may win by that; back to 1.
3. Steps of the plan, and of the baselines that are predicted to be near it, decide. What a model leaves out, such as
   ranks that wait for each other more often the more often they communicate, is of one sign for some strategies.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .cli.output import split_text
from .cli.planning import compared, comparison, plan_text
from .comm import Communicator
from .errors import UserError
from .kernels import KernelError, get_backend
from .layers import Network, Strategy
from .layers.reduction_scheme import BY_NODES, Scheme
from .limits import usable_cores
from .measuring import Measuring, StepTrial, measure_steps, rivals, settle
from .perfmodel.contenders import candidate_schemes, rank_schemes
from .perfmodel.cost import Pricing, Training, Wires, simulate
from .perfmodel.cuts import BASELINES, GRID, baseline
from .perfmodel.kernel_times import (
    KernelTimes,
    LayerWork,
    MeasuredTimes,
    Recorded,
    RooflineTimes,
)
from .perfmodel.machine import Machine
from .perfmodel.plans import Alternative, Plan
from .perfmodel.predict import Planning
from .planning import OPTIMIZER_ARRAYS, Asked, check_planner, known_baselines, make_plan, parse_memory
from .training.build import make_network, make_optimizer, with_reduction
from .training.config import Config, LARSConfig, SGDConfig
from .training.executor import Executor
from .training.kernels import connect_device, open_kernels
from .training.root import on_root
from .training.schedules import Constant
from .training.step_times import Measured
from .training.trainer import Trainer

__all__ = ["plan_run", "rank_schemes_of", "rests_on", "try_run"]

#: What one rank may take of the memory that is free, to be tried.
SPARE = 0.8


@dataclass(frozen=True)
class PlannedRun:
    """Plan that a run follows: what `halograd.training.train` wants of its planner.

    Attributes
    ----------
    plan
        Plan with its request.
    """

    plan: Plan

    @property
    def strategy(self) -> Strategy:
        """How layers are cut."""
        return self.plan.strategy

    def compare(self, measured: Measured) -> str:
        """Compare prediction and measurement, per layer and in total, in lines."""
        return "\n".join(comparison(self.plan, measured))

    def record(self, measured: Measured) -> dict[str, object]:
        """Return the same comparison as plain data, for the log; times in [s]."""
        return compared(self.plan, measured)


def plan_run(config: Config, comm: Communicator, training: bool = True) -> PlannedRun:
    """Plan a run on this communicator; rank 0 plans, shows and saves the plan. Collective.

    Without ``strategy.machine`` this machine is measured by all ranks, as far as it was not before. The plan is kept
    as ``plan.json`` in the run's directory.

    Parameters
    ----------
    training
        False for an evaluation: a plan of that directory is taken as it is, and no layers are measured.

    Raises
    ------
    UserError
        Unknown machine or planner, a limit that cannot be kept; on all ranks.
    """
    network = make_network(config)
    kept = None if training else _kept(config, comm, network)
    if kept is not None:
        return PlannedRun(kept)
    check_planner(config.strategy.planner, "strategy.planner")  # alike on all ranks
    parse_memory(config.strategy.memory, "strategy.memory")
    with open_kernels(config.backend, comm) as kernels:
        planner = _Planner(config, comm, network, kernels, config.strategy.budget if training else 0.0)
        plan = planner.measured()
        trial = planner.tried(plan) if training else StepTrial(plan, plan.planner)
    if comm.rank == 0 and training:
        _show(trial, config)
    return PlannedRun(trial.plan)


def try_run(config: Config, comm: Communicator) -> StepTrial:
    """Try the steps of the plan of `plan_run` and its rivals, the grid among them. Collective."""
    network = make_network(config)
    with open_kernels(config.backend, comm) as kernels:
        planner = _Planner(config, comm, network, kernels, config.strategy.budget)
        plan = planner.measured()
        return planner.tried(plan, [GRID])


def rank_schemes_of(config: Config, comm: Communicator, strategy: Strategy) -> list[Scheme]:
    """Return the schemes of gradient reduction that are worth trying in a run, ordered by predicted time. Collective.

    The prediction uses the machine of the configuration, or the stored measurement of this machine; nothing is measured
    here. Without either, the result is empty.
    """
    network = make_network(config)
    with open_kernels(config.backend, comm) as kernels:
        measuring = _measuring(config, comm, network, kernels)
        if measuring is not None and measuring.known_machine(measuring.machine_file()) is None:
            return []
        planner = _Planner(config, comm, network, kernels, budget=0.0)
        times = planner.times()
    found: list[Scheme] = []
    with comm.agreement():
        if comm.rank == 0:
            schemes = candidate_schemes(network, strategy, planner.batch)
            some = (network, strategy, planner.batch, planner.machine, times, schemes, planner.training, comm.size)
            found = [priced.scheme for priced in rank_schemes(*some)]
    return comm.bcast(found)


def _plan_path(config: Config) -> Path:
    return Path(config.output.directory) / "plan.json"


def _kept(config: Config, comm: Communicator, network: Network) -> Plan | None:
    """Return the plan that the run followed, if it is one for as many ranks."""
    found = None
    if comm.rank == 0 and _plan_path(config).exists():
        try:
            found = Plan.load(_plan_path(config))
            found.check(network, comm.size, config.training.at_once)
        except UserError:
            found = None
    return comm.bcast(found)


def _show(trial: StepTrial, config: Config) -> None:
    """Print the start-up table and the trial, and save the plan in the run's directory."""
    plan, path = trial.plan, _plan_path(config)
    print("\n".join([*trial.lines(config.backend.threads), *plan_text(plan, known_baselines(plan))]), flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    plan.save(path)


def _measuring(config: Config, comm: Communicator, network: Network, kernels: Any) -> Measuring | None:
    """Return None if a machine is named in the configuration: nothing is measured for it."""
    if config.strategy.machine:
        return None
    training, autotune = config.training, config.backend.autotune
    return Measuring(comm, kernels, network, training.at_once, dtype=training.dtype, autotune=autotune)


class _Planner:
    """Planner that measures with all ranks within the budget [s], and plans on rank 0. Collective, as are methods."""

    def __init__(
        self, config: Config, comm: Communicator, network: Network, kernels: Any, budget: float | None
    ) -> None:
        self.config, self.comm, self.network, self.kernels, self.budget = config, comm, network, kernels, budget
        self._left = budget  # of it, not spent yet
        self.batch = config.training.at_once
        self.training = Training(config.training.dtype, _slots(config), accumulates=config.training.accumulate > 1)
        self.measuring = _measuring(config, comm, network, kernels)
        self.machine_file, self.machine = self._machine()
        self._once: set[str] = set()  # measured in this run, and not again yet

    def _machine(self) -> tuple[str, Machine]:
        """Return the machine of the configuration, else this one, measured now or before."""
        named = self.config.strategy.machine
        if named or self.measuring is None:
            return named or "", on_root(self.comm.mpi, lambda: Machine.load(named or ""))
        path = self.measuring.machine_file()
        machine = self.measuring.known_machine(path)
        if machine is None:
            self._say("profiling this machine: messages and kernels")
            machine = self.measuring.keep_machine(path)
        return str(path), machine

    def times(self) -> KernelTimes:
        """Return known measured times; for another machine, its roofline. Local."""
        return RooflineTimes(self.machine) if self.measuring is None else self.measuring.times(self.machine)

    def measured(self) -> Plan:
        """Return the plan for which all that was asked for is measured, and what it rests on twice, as far as the
        budget goes.

        It ends: each round measures a layer that was not measured before, or not twice.
        """
        while True:
            times = self.times()
            plan = self._plan_on_root(times)
            missing = list(times.missing.values()) if isinstance(times, MeasuredTimes) else []
            works, again = self.comm.bcast((missing or self._unconfirmed(plan), not missing))
            if not works or not self._measure(works, again):
                return plan
            keys = {work.key for work in works}
            self._once = self._once - keys if again else self._once | keys

    def _unconfirmed(self, plan: Plan) -> list[LayerWork]:
        """Return layers behind the plan that were measured only once. Local; rank 0 knows the times."""
        if self.comm.rank or not self._once:
            return []
        works = rests_on(plan, self.network, self.machine, self.times(), self.training)
        return [work for key, work in works.items() if key in self._once]

    def _measure(self, works: list[LayerWork], again: bool) -> bool:
        """Measure layers, as long as the budget lasts; whether there are new times."""
        if self._left == 0 or self.measuring is None:
            return False
        self._say(f"profiling {len(works)} shapes of layers" + (" again" if again else ""))
        state = self.comm.bcast(self.measuring.layers(works, self._left, again, self.config.output.progress))
        if state.left:
            done = "measured once only" if again else "estimated"
            self._say(f"{state.left} of them are {done}: strategy.budget is spent")
        if self._left is not None:
            self._left = max(0.0, self._left - state.seconds)
        return state.measured > 0

    def tried(self, plan: Plan, asked: Sequence[str] = ()) -> StepTrial:
        """Return what takes the shortest steps of the plan and the baselines near it; and one rank with all threads.

        `asked`: names of baselines that are tried however slow they are predicted to be.
        """
        table = self.config.strategy
        if not asked and (table.machine or self.budget == 0):
            return StepTrial(plan, plan.planner)
        names = [] if table.planner in (*BASELINES, GRID) else rivals(plan)
        times, plans = self.times(), {plan.planner: plan}
        for name in dict.fromkeys([*names, *asked]):
            with suppress(UserError):  # on all ranks: as a plan of its own it does not fit
                plans[name] = self._plan_on_root(times, name)
        strategies = {name: as_run(some.strategy, self.config) for name, some in plans.items()}
        strategies = {
            name: some
            for name, some in strategies.items()
            if plans[name] is plan or can_run(some, self.network, self.comm.size)
        }
        if len(strategies) == self.comm.size == 1 and not asked:
            return StepTrial(plan, plan.planner)
        # As the run does, before any exchange.
        connect_device(self.kernels, self.comm, self.config.backend.device_transport)
        self._say(f"trying steps of {', '.join(strategies)}")
        seconds = measure_steps(self.comm, strategies, lambda some: self._opened(some, self.comm, self.kernels))
        best = settle(seconds)
        chosen = plan if plans[best] is plan else _instead_of(plan, plans[best])
        return StepTrial(chosen, best, seconds, self._alone())

    def _alone(self) -> float | None:
        """Measure a step on one rank with the threads of all of them [s]; None if that is not possible."""
        threads, seconds = self.comm.size * self.config.backend.threads, None
        on_one_host = self.comm.size > 1 and self.kernels.device.is_host and len(set(self.comm.nodes)) == 1
        alone = self.comm.split(self.comm.rank)
        assert alone is not None
        with self.comm.agreement():
            if on_one_host and self.comm.rank == 0 and threads <= usable_cores().count and self._fits_alone():
                self._say(f"trying steps of {split_text(1, threads)}")
                # The run does not need it: what one rank cannot do here is no reason to end.
                with (
                    suppress(UserError, KernelError, MemoryError),
                    get_backend(self.kernels.name, threads, self.config.backend.autotune) as kernels,
                ):
                    opened = partial(self._opened, comm=alone, kernels=kernels)
                    seconds = measure_steps(alone, {"alone": Strategy()}, opened)["alone"]
        alone.close()
        return self.comm.bcast(seconds)

    def _fits_alone(self) -> bool:
        """Return whether this machine has memory for a step on one rank. Local."""
        pricing = Pricing(Wires(self.machine), self.times(), self.training.dtype)
        needed = simulate(self.network, Strategy(), self.batch, pricing, self.training, 1).memory_bytes
        try:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except ValueError:  # a system that does not say
            return False
        return needed < SPARE * free

    @contextmanager
    def _opened(self, strategy: Strategy, comm: Communicator, kernels: Any) -> Iterator[Callable[[], object]]:
        """Return a function that trains for a step under a strategy, on noise and at rate 0."""
        self.network.balance()
        with Executor(self.network, comm, kernels, self.batch, strategy, self.training.dtype) as executor:
            trainer = Trainer(executor, make_optimizer(self.config, executor.store), Constant(0.0))
            draw = np.random.default_rng(comm.rank)
            for name, node in self.network.inputs.items():
                array = executor.input(name).array
                if node.dtype == "compute":
                    executor.device.assign(array, draw.random(array.shape, np.float32).astype(array.dtype))
            yield trainer.step
            trainer.settle()

    def _plan_on_root(self, times: KernelTimes, planner: str = "") -> Plan:
        """Return the plan on rank 0, for all ranks; a UserError is raised on all alike.

        `planner` is that of the configuration if it is empty.
        """
        return on_root(self.comm.mpi, partial(self._plan, times, planner or self.config.strategy.planner))

    def _plan(self, times: KernelTimes, planner: str) -> Plan:
        table, model = self.config.strategy, self.config.model
        bucket = table.bucket_bytes if "bucket_bytes" in table.model_fields_set else None
        limit = parse_memory(table.memory, "strategy.memory")
        planning = Planning(planner, limit, False, self.training, bucket, _without(self.config))
        asked = Asked(model.source, model.options, self.network, self.machine, self.machine_file, self.training.dtype)
        plan = make_plan(asked, self.batch, self.comm.size, planning, times)
        if table.statistics is None:
            return plan
        # They are not the plan's to choose.
        options = {**plan.strategy.options, "statistics": table.statistics}
        return replace(plan, strategy=replace(plan.strategy, options=options))

    def _say(self, text: str) -> None:
        if self.comm.rank == 0 and self.config.output.progress:
            print(text, file=sys.stderr, flush=True)


def as_run(strategy: Strategy, config: Config) -> Strategy:
    """Return the strategy with the scheme of the configuration, unless that is chosen while training."""
    return strategy if config.reduction.scheme().kind.searches else with_reduction(strategy, config)


def can_run(strategy: Strategy, network: Network, ranks: int) -> bool:
    """Return whether a strategy, made for another purpose, is valid for this run. Local; alike on all ranks."""
    try:
        strategy.validate(network, ranks)
        strategy.refuse_empty_blocks(network)
    except UserError:
        return False
    return True


def _instead_of(plan: Plan, other: Plan) -> Plan:
    """Return the other plan, with this one and the rest of its alternatives beside it."""
    beside = Alternative(plan.planner, plan.step_seconds, plan.prediction.memory_bytes, True)
    rest = [a for a in plan.alternatives if a.name != plan.planner]
    return replace(other, alternatives=(beside, *rest))


def _slots(config: Config) -> int:
    """Count the arrays of the parameters' size that the optimizer keeps."""
    plain = isinstance(config.optimizer, SGDConfig) and config.optimizer.momentum == 0
    return int(config.training.average > 0) + (0 if plain else OPTIMIZER_ARRAYS[config.optimizer.kind])


def _without(config: Config) -> frozenset[str]:
    """Return the schemes of gradient reduction that this run cannot have: they need shared memory, or whole gradients.
    """
    by_nodes = BY_NODES if config.backend.transport == "mpi" else ()
    shards = ("sharded",) if isinstance(config.optimizer, LARSConfig) else ()
    return frozenset((*by_nodes, *shards))


# -- what is measured once more -------------------------------------------------------------------


def rests_on(
    plan: Plan, network: Network, machine: Machine, times: KernelTimes, training: Training
) -> dict[str, LayerWork]:
    """Return the layers on local blocks that decide between a plan and the baselines, by key. Local.

    Measured again and averaged they lose what was luck, and another plan may be the fastest.

    Parameters
    ----------
    plan, network
        Plan and its network.
    machine, times, training
        Machine, times and training of its prediction.
    """
    recorded = Recorded(times)
    pricing = Pricing(Wires(machine), recorded, training.dtype)
    fixed = [baseline(name, network, plan.batch, plan.ranks) for name in BASELINES]
    for strategy in [plan.strategy, *fixed]:
        simulate(network, strategy, plan.batch, pricing, training)
    return recorded.asked
