"""What a configuration asks for: network, strategy, optimizer, schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from halograd import schema
from halograd.documents import read_json, shown_path
from halograd.errors import UserError
from halograd.layers import Network
from halograd.layers.strategy import Strategy
from halograd.models import build
from halograd.perfmodel.plans import Plan, is_plan
from halograd.training.config import AdamConfig, Config, LARSConfig, ScheduleConfig, StrategyConfig
from halograd.training.cuts import other_cuts
from halograd.training.optimizers import LARS, SGD, Adam, AdamW, Optimizer
from halograd.training.schedules import Constant, Cosine, Schedule, StepDecay, WarmUp
from halograd.training.store import ParameterStore

__all__ = ["make_network", "make_optimizer", "make_schedule", "make_strategy", "with_reduction"]


def make_network(config: Config) -> Network:
    """The network of ``[model]``, with inputs ``x`` and ``target`` and the outputs ``prediction`` and ``loss``.

    Raises
    ------
    UserError
        If the model is not known, refuses an option, or cannot be trained by name.
    """
    network = build(config.model.name, **config.model.options)
    if set(network.inputs) != {"x", "target"} or "loss" not in network.outputs:
        raise UserError(
            f"model.name: expected a model with inputs x and target and an output loss, got {config.model.name!r} "
            f"with inputs {sorted(network.inputs)}"
        )
    return network


def make_strategy(
    config: StrategyConfig, size: int, network: Network | None = None, batch: int | None = None
) -> Strategy:
    """The strategy of ``[strategy]`` for `size` ranks; a plan must be one for this network and batch, if given.

    Raises
    ------
    UserError
        Parts that do not fit the ranks, with parts that would; a file that is none, or is of something else; a strategy
        that is to be planned, which `halograd.auto.plan_run` does.
    """
    if config.auto:
        raise UserError(
            "strategy: expected one that is made already, got auto; train by `halograd train`, or pass "
            "planner=halograd.auto.plan_run"
        )
    if config.file is not None:
        return _strategy_of_file(config.file, size, network, batch)
    parts = {axis: getattr(config, axis) for axis in ("depth", "height", "width") if getattr(config, axis) > 1}
    spatial = config.depth * config.height * config.width
    if config.sample is None and size % spatial:
        raise UserError(
            f"strategy: {spatial} spatial parts do not divide the {size} ranks; start a multiple of {spatial} ranks "
            f"or choose other parts{other_cuts(config, size, network, batch)}"
        )
    parts["sample"] = size // spatial if config.sample is None else config.sample
    if parts["sample"] * spatial != size:
        cuts = " x ".join(f"{n} {axis}" for axis, n in parts.items() if n > 1) or "no cut"
        raise UserError(
            f"strategy: {cuts} needs {parts['sample'] * spatial} ranks, the run has {size}; start as many or choose "
            f"other parts{other_cuts(config, size, network, batch)}"
        )
    options: dict[str, Any] = {"halo": config.halo}
    if config.statistics is not None:
        options["statistics"] = config.statistics
    return Strategy(parts, options=options, bucket_bytes=config.bucket_bytes)


def with_reduction(strategy: Strategy, config: Config) -> Strategy:
    """The strategy with the scheme of ``[reduction]``, if the configuration has that table."""
    if "reduction" not in config.model_fields_set:
        return strategy
    return replace(strategy, reduction=config.reduction.scheme())


def _strategy_of_file(path: str, size: int, network: Network | None, batch: int | None) -> Strategy:
    """What `Strategy.save` or `halograd plan` wrote."""
    data = read_json(path, "strategy")
    if not is_plan(data):
        return schema.build(Strategy, data, f"strategy {shown_path(path)}")
    plan = Plan.from_dict(data, f"plan {shown_path(path)}")
    if network is not None:
        try:
            plan.check(network, size, batch)
        except UserError as error:
            if plan.ranks == size:
                raise
            raise UserError(f"{error}, or have it planned as it starts: `--set strategy=auto`") from error
    return plan.strategy


def make_optimizer(config: Any, store: ParameterStore) -> Optimizer:
    """The optimizer of ``[optimizer]`` for these parameters."""
    if isinstance(config, AdamConfig):
        kind = {"adam": Adam, "adamw": AdamW}[config.kind]
        return kind(store, (config.beta1, config.beta2), config.epsilon, config.weight_decay)
    if isinstance(config, LARSConfig):
        return LARS(store, config.momentum, config.trust, config.weight_decay)
    return SGD(store, config.momentum, config.nesterov, config.weight_decay)


def make_schedule(config: ScheduleConfig, epochs: int, steps_per_epoch: int) -> Schedule:
    """The schedule of ``[schedule]``; epochs become steps."""

    def steps(count: float) -> int:
        return max(1, round(count * steps_per_epoch))

    schedule: Schedule = Constant(config.learning_rate)
    if config.kind == "step":
        milestones = sorted({steps(m) for m in config.milestones})
        schedule = StepDecay(config.learning_rate, tuple(milestones), config.factor)
    elif config.kind == "cosine":
        schedule = Cosine(config.learning_rate, steps(epochs), config.final)
    if config.warmup_epochs > 0:
        schedule = WarmUp(schedule, steps(config.warmup_epochs), config.warmup_start)
    return schedule
