"""Planning a run as it starts: profile this machine if needed, plan, and hold the plan against what was measured.

``strategy = "auto"`` in a configuration; the command line passes :func:`plan_run` to `halograd.training.train`, and
so may a script. It lives above `training`, which knows nothing of planners.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from halograd.cli.plan_compare import compared, comparison
from halograd.cli.plan_options import parse_memory, source_of
from halograd.cli.planning import check_planner, known_baselines, plan_text
from halograd.cli.profiling import measure_overheads
from halograd.comm import Communicator
from halograd.errors import UserError
from halograd.layers import Network, Strategy
from halograd.layers.reduction_scheme import BY_NODES, Scheme
from halograd.perfmodel.confirm import rests_on
from halograd.perfmodel.cost import Training
from halograd.perfmodel.cost.baselines import BASELINES
from halograd.perfmodel.kernel_times import KernelTimes, LayerKey, MeasuredTimes, RooflineTimes
from halograd.perfmodel.machine import Machine
from halograd.perfmodel.plan_file import PlanFile, Request
from halograd.perfmodel.predict import Alternative, Plan, Planning, plan_network
from halograd.perfmodel.profile import (
    Conditions,
    Crowd,
    LayerTimer,
    Profile,
    TimeCache,
    cache_path,
    conditions_of,
    measure_layers,
    measure_machine,
    record_path,
)
from halograd.perfmodel.reduction_choice import candidate_schemes, rank_schemes
from halograd.training.build import make_network, make_optimizer, with_reduction
from halograd.training.config import AdamConfig, Config, LARSConfig, SGDConfig
from halograd.training.executor import Executor
from halograd.training.kernels import connect_device, open_kernels
from halograd.training.root import on_root
from halograd.training.schedules import Constant
from halograd.training.step_times import Measured
from halograd.training.trainer import Trainer
from halograd.trials import measure_steps, rivals, settle

__all__ = ["PlannedRun", "plan_run", "rank_schemes_of"]

#: How often a plan is made again because it asks for layers that were not measured.
ROUNDS = 3
#: How often what the plan rests on is measured once more; the fastest of many was lucky more often than fast.
CONFIRMATIONS = 3


@dataclass(frozen=True)
class PlannedRun:
    """A plan that a run follows: what `halograd.training.train` wants of its planner.

    Attributes
    ----------
    file
        The plan, with what was asked for.
    """

    file: PlanFile

    @property
    def strategy(self) -> Strategy:
        """How layers are cut."""
        return self.file.plan.strategy

    def compare(self, measured: Measured) -> str:
        """Predicted against measured, per layer and in total, in lines."""
        return "\n".join(comparison(self.file.plan, measured))

    def record(self, measured: Measured) -> dict[str, object]:
        """The same as plain data, for the log; times in [s]."""
        return compared(self.file.plan, measured)


def plan_run(config: Config, comm: Communicator, training: bool = True) -> PlannedRun:
    """The plan of a run on this communicator; rank 0 plans, shows and saves it. Collective.

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
    _check(config)  # alike on all ranks
    return PlannedRun(_Planner(config, comm, network, training).run())


def rank_schemes_of(config: Config, comm: Communicator, strategy: Strategy) -> list[Scheme]:
    """Schemes of gradient reduction that are worth a try in a run, the best predicted first. Collective.

    By the machine of the configuration, or what is known of this one; nothing is measured for it. Where nothing is
    known there is no order, and the result is empty.
    """
    return _Planner(config, comm, make_network(config), training=False).ranked(strategy)


def _check(config: Config) -> None:
    try:
        check_planner(config.strategy.planner)
        parse_memory(config.strategy.memory)
    except UserError as error:
        raise UserError(str(error).replace("--", "strategy.", 1)) from error


def _plan_path(config: Config) -> Path:
    return Path(config.output.directory) / "plan.json"


def _kept(config: Config, comm: Communicator, network: Network) -> PlanFile | None:
    """The plan that the run followed, if it is one for as many ranks."""
    found = None
    if comm.rank == 0 and _plan_path(config).exists():
        try:
            found = PlanFile.load(_plan_path(config))
            found.plan.check(network, comm.size, config.training.batch)
        except UserError:
            found = None
    return comm.bcast(found)


class _Planner:
    """Measures with all ranks, plans on rank 0."""

    def __init__(self, config: Config, comm: Communicator, network: Network, training: bool) -> None:
        self.config, self.comm, self.network, self.training = config, comm, network, training
        self.batch, self.dtype = config.training.batch, config.training.dtype
        self.machine_file = config.strategy.machine or ""
        self._once: set[LayerKey] = set()  # measured in this run, and not again yet

    def run(self) -> PlanFile:
        """Collective."""
        with open_kernels(self.config.backend, self.comm) as kernels:
            machine = self._machine(kernels)
            for left in reversed(range(ROUNDS)):
                times = self._times(kernels, machine)
                made = self._plan_on_root(machine, times)
                missing = times.missing.values() if isinstance(times, MeasuredTimes) else ()
                works = self.comm.bcast(list(missing) if left else [])
                if not works or not self._measure_layers(kernels, works):
                    break
                self._once.update(work.key for work in works)
            made = self._confirmed(kernels, machine, made)
            made, told = self._tried(kernels, machine, made)
        if self.comm.rank == 0 and self.training:
            self._show(made, told)
        return made

    def _confirmed(self, kernels: Any, machine: Machine, made: PlanFile) -> PlanFile:
        """The plan that is the fastest after what it rests on was measured once more. Collective."""
        for _ in range(CONFIRMATIONS):
            works = self.comm.bcast(self._unconfirmed(machine, made, self._times(kernels, machine)))
            if not works or not self._measure_layers(kernels, works, again=True):
                break
            self._once.difference_update(work.key for work in works)
            made = self._plan_on_root(machine, self._times(kernels, machine))
        return made

    def _unconfirmed(self, machine: Machine, made: PlanFile, times: KernelTimes) -> list[Any]:
        """Layers behind the plan that were measured once only. Local; rank 0 knows the times."""
        if self.comm.rank or not self._once:
            return []
        training = Training(self.dtype, _slots(self.config))
        works = rests_on(made.plan, self.network, machine, times, training)
        return [work for key, work in works.items() if key in self._once]

    def _tried(self, kernels: Any, machine: Machine, made: PlanFile) -> tuple[PlanFile, list[str]]:
        """What takes the shortest steps of the plan and the baselines near it; and a line about them. Collective."""
        table = self.config.strategy
        if not self.training or table.machine or table.budget == 0 or table.planner in BASELINES:
            return made, []
        names = rivals(made.plan)
        if not names:
            return made, []
        times = self._times(kernels, machine)
        files = {made.plan.planner: made}
        for name in names:
            with suppress(UserError):  # on all ranks: as a plan of its own it does not fit
                files[name] = self._plan_on_root(machine, times, name)
        strategies = {name: self._as_run(file.plan.strategy) for name, file in files.items()}
        strategies = {name: some for name, some in strategies.items() if files[name] is made or self._can_run(some)}
        if len(strategies) == 1:
            return made, []
        connect_device(kernels, self.comm, self.config.backend.device_transport)  # as the run does, before any exchange
        self._say(f"trying steps of {', '.join(strategies)}")
        seconds = measure_steps(self.comm, strategies, partial(self._opened, kernels))
        best = settle(seconds)
        told = ", ".join(f"{name} {1e3 * taken:.2f} ms" for name, taken in seconds.items())
        if files[best] is not made:
            files[best] = _instead_of(made, files[best])
        return files[best], [f"steps tried: {told}; trained by {best}"]

    def _as_run(self, strategy: Strategy) -> Strategy:
        """With the scheme of the configuration, unless that is found while training."""
        return strategy if self.config.reduction.scheme().kind.searches else with_reduction(strategy, self.config)

    def _can_run(self, strategy: Strategy) -> bool:
        """Whether a strategy, made for another purpose, is one for this run. Local; alike on all ranks."""
        try:
            strategy.validate(self.network, self.comm.size)
            strategy.refuse_empty_blocks(self.network)
        except UserError:
            return False
        return True

    @contextmanager
    def _opened(self, kernels: Any, strategy: Strategy) -> Iterator[Callable[[], object]]:
        """A function that trains for a step under a strategy, on noise and at rate 0. Collective."""
        config = self.config
        with Executor(self.network, self.comm, kernels, self.batch, strategy, self.dtype) as executor:
            trainer = Trainer(executor, make_optimizer(config.optimizer, executor.store), Constant(0.0))
            draw = np.random.default_rng(self.comm.rank)
            for name, node in self.network.inputs.items():
                array = executor.input(name).array
                if node.dtype == "compute":
                    executor.device.assign(array, draw.random(array.shape, np.float32).astype(array.dtype))
            yield trainer.step
            trainer.settle()

    def ranked(self, strategy: Strategy) -> list[Scheme]:
        """See :func:`rank_schemes_of`; rank 0 decides. Collective."""
        with open_kernels(self.config.backend, self.comm) as kernels:
            if not self.machine_file and self._known_machine(self._machine_path(kernels)) is None:
                return []
            machine = self._machine(kernels)
            times = self._times(kernels, machine)
        found: list[Scheme] = []
        with self.comm.agreement():
            if self.comm.rank == 0:
                found = self._rank(strategy, machine, times)
        return self.comm.bcast(found)

    def _rank(self, strategy: Strategy, machine: Machine, times: KernelTimes) -> list[Scheme]:
        schemes = candidate_schemes(self.network, strategy, self.batch)
        training = Training(self.dtype, _slots(self.config))
        priced = rank_schemes(self.network, strategy, self.batch, machine, times, schemes, training, self.comm.size)
        return [p.scheme for p in priced]

    # -- the machine ---------------------------------------------------------------------------

    def _machine(self, kernels: Any) -> Machine:
        """That of the configuration; else this one, measured now or before. Collective."""
        if self.machine_file:
            return on_root(self.comm.mpi, lambda: Machine.load(self.machine_file))
        path = self._machine_path(kernels)
        machine = self._known_machine(path)
        if machine is None:
            self._say("profiling this machine: messages and kernels")
            found = measure_machine(self.comm, kernels)
            found = found.with_overheads(**vars(measure_overheads(self.comm, kernels, self.dtype)))
            with self.comm.agreement():
                if self.comm.rank == 0:
                    _save(found, path)
            machine = self._known_machine(path)
        self.machine_file = str(path)
        assert machine is not None
        return machine

    def _machine_path(self, kernels: Any) -> Path:
        """Where the machine is kept: one file per device, library, ranks and transport."""
        import platform

        comm, backend = self.comm, self.config.backend
        nodes = sorted(comm.allgather_objects(platform.node()))
        conditions = Conditions.here(kernels, self._crowd(kernels), backend.autotune)
        text = "|".join([conditions.text, comm.transport, self.dtype, *nodes])
        name = hashlib.sha256(text.encode()).hexdigest()[:12]
        return Path(comm.bcast(str(cache_path().parent / "machines" / f"{comm.size}-ranks-{name}.toml")))

    def _known_machine(self, path: Path) -> Machine | None:
        found = None
        if self.comm.rank == 0 and path.exists() and record_path(path).exists():
            try:
                found = Profile.load(path).machine
            except UserError:
                found = None  # damaged: measured again
        return self.comm.bcast(found)

    # -- layers --------------------------------------------------------------------------------

    def _crowd(self, kernels: Any) -> Crowd:
        """Collective, as is what asks for it."""
        return Crowd.of(self.comm, kernels)

    def _conditions(self, kernels: Any) -> Conditions:
        crowd, autotune = self._crowd(kernels), self.config.backend.autotune
        return conditions_of(self.network, self.batch, self.comm.size, kernels, crowd, self.dtype, autotune)

    def _times(self, kernels: Any, machine: Machine) -> KernelTimes:
        """Measured times as far as they are known; of another machine, its roofline. Collective."""
        roofline = RooflineTimes(machine)
        if self.config.strategy.machine:
            return roofline
        cache = TimeCache(cache_path() if self.comm.rank == 0 else None)
        return MeasuredTimes(cache, self._conditions(kernels), roofline)

    def _measure_layers(self, kernels: Any, works: Sequence[Any], again: bool = False) -> bool:
        """Measure these, as long as the budget lasts; whether there are new times. Collective."""
        budget = self.config.strategy.budget if self.training else 0.0
        if budget == 0:
            return False
        self._say(f"profiling {len(works)} shapes of layers" + (" again" if again else ""))
        cache = TimeCache(cache_path() if self.comm.rank == 0 else None, every=8)
        conditions = self._conditions(kernels)
        timer = LayerTimer(kernels, self.comm, conditions.flush)
        with _bar(self.comm.rank == 0 and self.config.output.progress) as progress:
            state = measure_layers(works, timer, cache, conditions, budget, progress, again)
        timer.close()
        if state.left:
            self._say(f"{state.left} of them are estimated: strategy.budget is spent")
        return self.comm.bcast(state.measured) > 0

    # -- the plan ------------------------------------------------------------------------------

    def _plan_on_root(self, machine: Machine, times: KernelTimes, planner: str = "") -> PlanFile:
        """What rank 0 plans, on all ranks; a mistake of the user's is raised on all alike. Collective.

        `planner` is that of the configuration if it is empty.
        """
        made, mistake, fault = None, None, None
        if self.comm.rank == 0:
            try:
                made = self._plan(machine, times, planner or self.config.strategy.planner)
            except UserError as error:
                mistake = str(error)
            except Exception as error:
                fault = error
        self.comm.agree(fault)
        made, mistake = self.comm.bcast((made, mistake))
        if mistake is not None:
            raise UserError(mistake)
        assert made is not None
        return made

    def _plan(self, machine: Machine, times: KernelTimes, planner: str) -> PlanFile:
        settings, table = self.config.training, self.config.strategy
        slots = _slots(self.config)
        bucket = table.bucket_bytes if "bucket_bytes" in table.model_fields_set else None
        limit = parse_memory(table.memory)
        planning = Planning(planner, limit, False, Training(self.dtype, slots), bucket, _without(self.config))
        plan = plan_network(self.network, settings.batch, self.comm.size, machine, times, planning)
        plan = self._with_statistics(plan)
        told = source_of(times, machine)
        model = self.config.model
        return PlanFile(
            plan, Request(model.name, model.options, machine.to_toml(), self.machine_file, told, slots=slots)
        )

    def _with_statistics(self, plan: Plan) -> Plan:
        """With the statistics of batch norm that the configuration asks for: they are not the plan's to choose."""
        statistics = self.config.strategy.statistics
        if statistics is None:
            return plan
        options = {**plan.strategy.options, "statistics": statistics}
        return replace(plan, strategy=replace(plan.strategy, options=options))

    def _show(self, made: PlanFile, told: list[str]) -> None:
        """The start-up table, what was tried, and the plan in the run's directory."""
        plan = made.plan
        others = known_baselines(plan)
        lines = plan_text(plan, others, made.request.kernel_times if made.request else "")
        print("\n".join([*lines, *told]), flush=True)
        path = _plan_path(self.config)
        path.parent.mkdir(parents=True, exist_ok=True)
        made.save(path)

    def _say(self, text: str) -> None:
        if self.comm.rank == 0 and self.config.output.progress:
            print(text, file=sys.stderr, flush=True)


def _instead_of(made: PlanFile, other: PlanFile) -> PlanFile:
    """The other plan, with this one and the rest of its alternatives beside it."""
    plan, name = made.plan, other.plan.planner
    beside = Alternative(plan.planner, plan.step_seconds, plan.prediction.memory_bytes, True)
    rest = [a for a in plan.alternatives if a.name not in (name, plan.planner)]
    return replace(other, plan=replace(other.plan, alternatives=(beside, *rest)))


def _slots(config: Config) -> int:
    """Arrays of the parameters' size that the optimizer keeps."""
    if isinstance(config.optimizer, AdamConfig):
        return 2
    return int(not isinstance(config.optimizer, SGDConfig) or config.optimizer.momentum > 0)


def _without(config: Config) -> frozenset[str]:
    """Schemes of gradient reduction that this run cannot have: they need shared memory, or whole gradients."""
    by_nodes = BY_NODES if config.backend.transport == "mpi" else ()
    shards = ("sharded",) if isinstance(config.optimizer, LARSConfig) else ()
    return frozenset((*by_nodes, *shards))


def _save(found: Profile, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cache {path.parent}: expected a folder that can be made, got an error ({error.strerror}); choose another "
            "with HALOGRAD_CACHE"
        ) from error
    found.save(path)


@contextmanager
def _bar(speaks: bool) -> Iterator[Any]:
    """A progress bar on rank 0's terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("layers"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not (speaks and console.is_terminal)) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
