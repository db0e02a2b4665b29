"""`halograd plan`: the best cuts of every layer on a machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ..documents import check_output
from ..errors import UserError
from ..output import bytes_text, cut_text, mebibytes, milliseconds, split_text, table, time_text, working
from ..plan_text import plan_text, robust_text
from ..schema import build as build_value
from .options import AsJson, Batch, Full, Memory, ModelOptions, Planner, check_counts, parse_options

if TYPE_CHECKING:
    from ..local import CoreSplit
    from ..perfmodel.plans import Alternative, Plan
    from ..perfmodel.predict import Planning
    from ..perfmodel.robust import RobustPlan
    from ..planning import PlanRequest

__all__ = ["plan"]


Recompute = Annotated[
    str,
    typer.Option(
        help="What may be computed again in the backward pass if the memory does not suffice: auto (all layers), "
        "pointwise (norms, activations, sums), none."
    ),
]


@dataclass(frozen=True)
class SearchOptions:
    """Options of the search for a plan."""

    memory: Memory = None
    planner: Planner = "elimination"
    full: Full = False
    recompute: Recompute = "auto"
    robust: Annotated[
        bool,
        typer.Option(
            "--robust",
            help="Choose the plan that loses least if latency, launch time or compute rate is off by 3 x; takes about "
            "7 times as long.",
        ),
    ] = False
    frontier: Annotated[
        bool, typer.Option("--frontier", help="Plan under smaller and smaller limits: memory against step time.")
    ] = False
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="With --frontier: draw the curve to this file.")
    ] = None


@dataclass(frozen=True)
class CoreOptions:
    """Options of trials on the cores of this machine."""

    cores: Annotated[int | None, typer.Option(help="Cores of this machine, to use as ranks or threads.")] = None
    transport: Annotated[str, typer.Option(help="With --cores: transport of messages.")] = "auto"
    kernels: Annotated[str, typer.Option(help="With --cores: kernel backend.")] = "auto"
    budget: Annotated[float | None, typer.Option(help="With --cores: seconds to measure layers, per job.")] = None


def plan(
    what: ModelOptions,
    batch: Batch,
    how: SearchOptions,
    tried: CoreOptions,
    ranks: Annotated[int | None, typer.Option(help="Number of ranks; a layer may use fewer.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="PLAN.json", help="Write the plan to this file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Choose how every layer of a model is cut on a machine, within its memory.

    `halograd explain` gives the reasons; `strategy.file = "plan.json"` in a configuration trains with the plan.

    With --cores, the command finds the best number of ranks and threads on this machine: it measures, plans and tries
    each.

    \b
    Examples:
      halograd plan mesh_2k --machine lassen --ranks 16 --batch 4 -o plan.json
      halograd plan resnet50 --machine dgx-h100 --ranks 64 --batch 1024 --memory 16GiB
      halograd plan vgg_a --machine lassen --ranks 16 --batch 16 --robust
      halograd plan unet3d --machine lassen --ranks 8 --batch 1 --frontier --plot frontier.png
      halograd plan mesh_1k --option resolution=512 --machine machine.toml --ranks 2 --batch 1 --json
      halograd plan resnet50 --cores 4 --batch 1
    """
    check_counts(ranks=ranks, batch=batch, cores=tried.cores, budget=tried.budget)
    if how.plot is not None and not how.frontier:
        raise UserError("--plot: expected --frontier with it, whose curve it draws; add it, or remove --plot")
    if (ranks is None) == (tried.cores is None):
        raise UserError("plan: expected --ranks with a --machine, or --cores of this one, got both or neither")
    # Then --cores is set, because exactly one of the two is.
    if ranks is None:
        unused = {"--out": out, "--cache": what.cache, "--full": how.full, "--frontier": how.frontier}
        for option, given in unused.items():
            if given:
                raise UserError(f"--cores: expected no {option} with it, which is for a --machine; remove either")
        _try_cores(what, batch, how, tried, as_json)
        return
    # The attributes of the class are the defaults.
    for option, changed in vars(tried).items():
        if changed != getattr(CoreOptions, option):
            raise UserError(f"--{option}: expected --cores with it, as nothing is measured for a --machine; remove it")
    from ..perfmodel.predict import Planning, Rule
    from ..planning import baselines_of, check_planner, make_plan, make_robust_plan, parse_memory

    check_planner(how.planner)
    if how.robust and how.frontier:
        raise UserError("--robust: expected no --frontier with it, which compares the fastest plans; remove either")
    if out is not None and how.frontier:
        raise UserError("--out: expected no --frontier with it, which makes several plans; limit one by --memory")
    if out is not None:
        check_output(out, "--out")
    rule = build_value(cast(Any, Rule), how.recompute, at="--recompute")
    planning = Planning(how.planner, parse_memory(how.memory), how.full, what.training(), recompute=rule)
    plan_request = what.plan_request()
    if how.frontier:
        _show_frontier(plan_request, batch, ranks, planning, how.plot, as_json)
        return
    robust = None
    with working(f"planning {plan_request.model} on {ranks} ranks"):
        if how.robust:
            robust = make_robust_plan(plan_request, batch, ranks, planning)
        best = make_plan(plan_request, batch, ranks, planning) if robust is None else robust.plan
        others = baselines_of(plan_request, best)
    # The plan is printed even if its file cannot be written after all, such as on a disk that is full by now.
    if as_json:
        print(json.dumps(_as_json(best, others, robust)), flush=True)
    else:
        lines = plan_text(best, others)
        print("\n".join(lines if robust is None else [*lines, "", *robust_text(robust)]), flush=True)
    if out is not None:
        best.save(out)
    if out is not None and not as_json:
        print(f'{out}: written; `halograd explain {out}` explains it, strategy.file = "{out}" trains under it')


def _show_frontier(
    plan_request: PlanRequest, batch: int, ranks: int, planning: Planning, path: Path | None, as_json: bool
) -> None:
    """Print plans from the fastest to that with the least memory; draw them if `path` is given."""
    from ..perfmodel.predict import plan_frontier

    if path is not None:
        check_output(path, "--plot")
    times = plan_request.times(batch, ranks)
    with working(f"planning {plan_request.model} on {ranks} ranks") as now:
        plans = []
        for plan in plan_frontier(plan_request.network, batch, ranks, plan_request.machine, times, planning):
            plans.append(plan)
            now(f"planning {plan_request.model} on {ranks} ranks within {bytes_text(plan.prediction.memory_bytes)}")
    if not plans:
        from ..planning import make_plan

        make_plan(plan_request, batch, ranks, planning, times)  # raises an error that names what would fit
    points = [_point(plan_request, plan) for plan in plans]
    if path is not None:
        from .pictures import draw_frontier

        curve = [(point.memory_bytes, point.step_seconds, point.again) for point in points]
        draw_frontier(
            f"{plan_request.model} on {ranks} ranks of {plan_request.machine.name}, batch {batch}", curve, path
        )
    if as_json:
        print(json.dumps([vars(point) for point in points]), flush=True)
        return
    first = points[0]
    rows = [["[MiB]", "[ms]", "", "[layers]", "", ""]]
    for point in points:
        more = f"{point.step_seconds / first.step_seconds - 1:+.1%}"
        cells = [mebibytes(point.memory_bytes), milliseconds(point.step_seconds), more, str(point.again)]
        rows.append([*cells, point.cut, point.reduction])
    print(f"{plan_request.model} on {ranks} ranks of {plan_request.machine.name}, batch {batch}, {plan_request.dtype}")
    print("\n".join(["", *table(["memory", "step", "longer", "again", "largest cut", "gradients"], rows)]))


@dataclass(frozen=True)
class FrontierPoint:
    """Memory of the fullest rank [B] and step time [s] of a plan, layers computed `again`, and other choices."""

    memory_bytes: int
    step_seconds: float
    again: int
    cut: str
    reduction: str


def _point(plan_request: PlanRequest, plan: Plan) -> FrontierPoint:
    recomputed = [
        plan.strategy.options_of(name).get("recompute", "none") != "none" for name in plan_request.network.layers
    ]
    # One cut stands for the plan: that of the layer with the largest output.
    cut = max(plan.prediction.layers, key=lambda record: record.output)
    return FrontierPoint(
        plan.prediction.memory_bytes,
        plan.step_seconds,
        sum(recomputed),
        cut_text(cut.parts),
        str(plan.strategy.reduction),
    )


def _try_cores(what: ModelOptions, batch: int, how: SearchOptions, tried: CoreOptions, as_json: bool) -> None:
    from ..comm.boot import launched_size
    from ..local import try_splits

    if how.robust:
        raise UserError("--cores: expected no --robust with it, as this machine is measured, got both; remove either")
    if what.machine is not None:
        raise UserError("--cores: expected no --machine with it, as this one is measured, got one; remove either")
    if launched_size() is not None:
        raise UserError("--cores: expected to be started alone, got a launcher; it starts its ranks itself")
    from ..models import build
    from ..planning import planned_settings

    # Only for its check, whose error names --optimizer.
    what.training()
    optimizer = planned_settings(what.optimizer).model_dump()
    build(what.model, **parse_options(what.options or ()))  # report an error here once, not in every job
    strategy = {"auto": True, "planner": how.planner}
    strategy |= {} if how.recompute == "auto" else {"recompute": how.recompute}
    strategy |= {} if how.memory is None else {"memory": how.memory}
    strategy |= {} if tried.budget is None else {"budget": tried.budget}
    tables = {
        "model": {"name": what.model, **parse_options(what.options or ())},
        "data": {"path": "none.h5"},  # no data are read: steps are timed on noise
        "strategy": strategy,
        "optimizer": optimizer,
        # A required key; steps are timed with a learning rate of 0.
        "schedule": {"learning_rate": 1e-3},
        "training": {"epochs": 1, "batch": batch, "dtype": what.dtype},
        "backend": {"kernels": tried.kernels, "transport": tried.transport},
    }
    assert tried.cores is not None
    with working(f"trying {what.model} on {tried.cores} cores") as now:
        begin = lambda ranks, threads: now(f"trying {split_text(ranks, threads)}")  # noqa: E731
        splits = try_splits(tried.cores, tables, lambda line: print(line, file=sys.stderr), begin)
    print(
        json.dumps([vars(split) for split in splits]) if as_json else "\n".join(_cores_text(what.model, batch, splits))
    )


def _cores_text(model: str, batch: int, splits: Sequence[CoreSplit]) -> list[str]:
    """Return lines with the time of every split, in which the best split is marked."""
    best = min(splits, key=lambda split: split.seconds)
    rows = [["", "[ms]", "[ms]", "", "[ms]", ""]]
    for split in splits:
        times = [milliseconds(t) for t in (split.predicted, split.seconds)]
        uniform = milliseconds(split.uniform) if split.ranks > 1 else "-"
        rows.append(
            [split_text(split.ranks, split.threads), *times, split.by, uniform, "the best" if split is best else ""]
        )
    heading = ["cores as", "predicted", "step", "cut by", "one cut for all", ""]
    lines = [f"{model}, batch {batch}, tried on this machine", "", *table(heading, rows, left=1)]
    lines += ["", f"best: {split_text(best.ranks, best.threads)}, {time_text(best.seconds)} a step"]
    cut = [split for split in splits if split.ranks > 1]
    if best.ranks == 1 and cut:
        # One rank is fastest: show what it would cost to cut every layer.
        least = min(cut, key=lambda split: split.uniform)
        more = least.uniform / best.seconds - 1
        lines.append(f"cutting every layer over {least.ranks} ranks would take {more:.0%} longer")
    return lines


# -- output -------------------------------------------------------------------------------------


def _as_json(plan: Plan, others: Sequence[Alternative], robust: RobustPlan | None) -> dict[str, Any]:
    rows = [{**vars(a), "speed_up": a.step_seconds / plan.step_seconds if plan.step_seconds else None} for a in others]
    table = {**plan.as_dict(), "step_seconds": plan.step_seconds, "baselines": rows}
    if robust is not None:
        names = {name or "as described": name for name in robust.regrets}
        regrets = {text: [robust.regrets[name], robust.fastest[name]] for text, name in names.items()}
        table["robust"] = {
            "factor": robust.factor,
            "regrets": {text: own for text, (own, _) in regrets.items()},
            "regrets_of_fastest": {text: before for text, (_, before) in regrets.items()},
        }
    return table
