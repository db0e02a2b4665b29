"""What a run tells of itself as it begins and as it ends, for its log and for those who watch it."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from halograd import __version__

from ..comm import Communicator
from ..layers.strategy import cuts_text
from .directory import job_id
from .epochs import TrainingRun
from .log import RunLog
from .session import Session
from .step_times import RunPlan
from .timeline import write_trace

__all__ = ["begin_entry", "data_lines", "headline", "report_plan", "report_times"]

_NAMED = 20  # classes or channels in a line


def headline(session: Session) -> str:
    """Network, data, ranks and kernels in a line. Local."""
    executor = session.executor
    return (
        f"{session.network.name}: {executor.store.count:,} parameters, {len(session.samples.training)} + "
        f"{len(session.samples.validation)} samples, {session.comm.size} rank(s) ({_cuts(session)}), "
        f"{_kernels(session)}{_travels(session.comm)}"
    )


def data_lines(session: Session) -> list[str]:
    """What becomes of the data, where one would not expect it from the configuration: a line each. Local.

    The channels that are transformed before they are normalized, many by their names alone; and per target whose
    classes were counted, how often each occurs, and its weight.
    """
    return [*_transforms(session), *_balances(session)]


def _transforms(session: Session) -> Iterator[str]:
    for name, statistics in session.samples.statistics.items():
        by_rule: dict[str, list[str]] = {}
        for channel, rule in zip(session.samples.dataset.fields[name].channel_names, statistics.transforms):
            by_rule.setdefault(rule, []).append(channel)
        by_rule.pop("none", None)
        if by_rule:
            rules = "; ".join(f'{_some(channels)} by "{rule}"' for rule, channels in by_rule.items())
            yield f"{name}: transformed before they are normalized (data.transforms): {rules}"


def _balances(session: Session) -> Iterator[str]:
    factors = session.network.class_factors
    for name, counts in session.samples.class_counts.items():
        each = [f"{c}: {n:,} ({w:.4g})" for c, (n, w) in enumerate(zip(counts, factors[name]))]
        yield f"classes of {name} in the training samples, and their weights: {_some(each)}"


def _some(texts: Sequence[str]) -> str:
    more = f", and {len(texts) - _NAMED} more" if len(texts) > _NAMED else ""
    return ", ".join(texts[:_NAMED]) + more


def begin_entry(session: Session, run: TrainingRun) -> dict[str, Any]:
    """What is logged as ``begin``: who trains what, from where, how far. Collective."""
    config, comm = session.config, session.comm
    hosts = Counter(comm.allgather_objects(platform.node()))
    return {
        "step": run.optimizer.step,
        "epochs": run.epochs,
        "steps_per_epoch": len(run.sampler),
        "batch": config.training.batch,
        "samples": len(session.samples.training),
        "held_out": len(session.samples.validation),
        "invalid": len(session.samples.invalid),
        "class_counts": session.samples.class_counts,
        "network": session.network.name,
        "parameters": session.executor.store.count,
        "ranks": comm.size,
        "hosts": dict(hosts),
        "cut": _cuts(session),
        "kernels": _kernels(session),
        "transport": comm.transport,
        "device_transport": None if comm.devices.choice is None else comm.devices.choice.describe(),
        "job": job_id(),
        "version": __version__,
        "config": config.model_dump(mode="json", exclude_unset=True),
    }


def report_times(session: Session, log: RunLog, steps: int, directory: Path) -> None:
    """Timeline and table of phases of this run, if they were asked for. Collective."""
    timeline = session.timeline
    if timeline is None or not steps or not session.config.output.timeline:
        return
    session.executor.finish_spans()
    write_trace(timeline, session.comm, directory / "timeline.json")
    log.say(timeline.table(steps))


def report_plan(plan: RunPlan | None, run: TrainingRun, log: RunLog) -> None:
    """What the plan predicted, beside what was measured. Local."""
    measured = None if plan is None or run.step_times is None else run.step_times.result()
    if plan is not None and measured is not None:
        log.say(plan.compare(measured))
        log.write("prediction", step=run.optimizer.step, **plan.record(measured))


def _kernels(session: Session) -> str:
    """The backend, and how it makes products where one may choose."""
    kernels = session.executor.kernels
    return ", ".join(filter(None, (kernels.describe(), kernels.describe_arithmetic(session.executor.dtype.name))))


def _travels(comm: Communicator) -> str:
    """How arrays of devices travel; said of several ranks only."""
    choice = comm.devices.choice
    return f", arrays by {choice.describe()}" if choice is not None and comm.size > 1 else ""


def _cuts(session: Session) -> str:
    strategy = session.executor.strategy
    every = {cuts_text(strategy.cuts_of(name)) for name in session.network.layers}
    return f"{len(every)} cuts, layer by layer" if len(every) > 1 else every.pop()
