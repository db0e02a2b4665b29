"""`halograd plan`: the best cuts of every layer on a machine; texts of plans and of their comparison with measurements.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..documents import check_output
from ..errors import UserError
from .options import AsJson, Batch, Full, Memory, ModelOptions, Planner, check_counts, parse_options
from .output import bytes_text, cut_text, idle_text, mebibytes, milliseconds, split_text, table, time_text, working

if TYPE_CHECKING:
    from ..local import CoreSplit
    from ..perfmodel.plans import Alternative, LayerRecord, Plan
    from ..training.step_times import Measured

__all__ = ["compared", "comparison", "plan", "plan_text"]


@dataclass(frozen=True)
class SearchOptions:
    """Options of the search for a plan."""

    memory: Memory = None
    planner: Planner = "elimination"
    full: Full = False


@dataclass(frozen=True)
class CoreOptions:
    """Use of the cores of this machine in trials."""

    cores: Annotated[int | None, typer.Option(help="Try ranks and threads for so many cores of this machine.")] = None
    transport: Annotated[str, typer.Option(help="With --cores: how messages travel.")] = "auto"
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
      halograd plan mesh_1k --option resolution=512 --machine machine.toml --ranks 2 --batch 1 --json
      halograd plan resnet50 --cores 4 --batch 1
    """
    check_counts(ranks=ranks, batch=batch, cores=tried.cores, budget=tried.budget)
    if (ranks is None) == (tried.cores is None):
        raise UserError("plan: expected --ranks with a --machine, or --cores of this one, got both or neither")
    if ranks is None:
        _try_cores(what, batch, how, tried, as_json)
        return
    from ..perfmodel.predict import Planning
    from ..planning import baselines_of, check_planner, make_plan, parse_memory

    check_planner(how.planner)
    if out is not None:
        check_output(out, "--out")
    planning = Planning(how.planner, parse_memory(how.memory), how.full, what.training())
    asked = what.asked()
    with working(f"planning {asked.model} on {ranks} ranks"):
        made = make_plan(asked, batch, ranks, planning)
        others = baselines_of(asked, made)
    if out is not None:
        made.save(out)
    if as_json:
        print(json.dumps(_as_json(made, others)), flush=True)
        return
    print("\n".join(plan_text(made, others)))
    if out is not None:
        print(f'{out}: written; `halograd explain {out}` tells why, strategy.file = "{out}" trains by it')


def _try_cores(what: ModelOptions, batch: int, how: SearchOptions, tried: CoreOptions, as_json: bool) -> None:
    from ..comm.boot import launched_size
    from ..local import try_splits

    if what.machine is not None:
        raise UserError("--cores: expected no --machine with it, as this one is measured, got one; remove either")
    if launched_size() is not None:
        raise UserError("--cores: expected to be started alone, got a launcher; it starts its ranks itself")
    from ..models import build
    from ..planning import planned_settings

    what.training()
    optimizer = planned_settings(what.optimizer).model_dump()
    build(what.model, **parse_options(what.options or ()))  # report an error here once, not in every job
    strategy = {"auto": True, "planner": how.planner}
    strategy |= {} if how.memory is None else {"memory": how.memory}
    strategy |= {} if tried.budget is None else {"budget": tried.budget}
    tables = {
        "model": {"name": what.model, **parse_options(what.options or ())},
        "data": {"path": "none.h5"},  # no data are read: steps are timed on noise
        "strategy": strategy,
        "optimizer": optimizer,
        "schedule": {"learning_rate": 1e-3},
        "training": {"epochs": 1, "batch": batch, "dtype": what.dtype},
        "backend": {"kernels": tried.kernels, "transport": tried.transport},
    }
    assert tried.cores is not None
    with working(f"trying {what.model} on {tried.cores} cores") as now:
        begin = lambda ranks, threads: now(f"trying {split_text(ranks, threads)}")  # noqa: E731
        found = try_splits(tried.cores, tables, lambda line: print(line, file=sys.stderr), begin)
    print(json.dumps([vars(one) for one in found]) if as_json else "\n".join(_cores_text(what.model, batch, found)))


def _cores_text(model: str, batch: int, found: Sequence[CoreSplit]) -> list[str]:
    """Return lines with the time of every split, and the best split."""
    best = min(found, key=lambda one: one.seconds)
    rows = [["", "[ms]", "[ms]", "", "[ms]", ""]]
    for one in found:
        times = [milliseconds(t) for t in (one.predicted, one.seconds)]
        alike = milliseconds(one.alike) if one.ranks > 1 else "-"
        rows.append([split_text(one.ranks, one.threads), *times, one.by, alike, "the best" if one is best else ""])
    heading = ["cores as", "predicted", "step", "cut by", "all layers alike", ""]
    lines = [f"{model}, batch {batch}, tried on this machine", "", *table(heading, rows, left=1)]
    lines += ["", f"best: {split_text(best.ranks, best.threads)}, {time_text(best.seconds)} a step"]
    cut = [one for one in found if one.ranks > 1]
    if best.ranks == 1 and cut:
        least = min(cut, key=lambda one: one.alike)
        more = least.alike / best.seconds - 1
        lines.append(f"cutting every layer over {least.ranks} ranks would take {more:.0%} longer")
    return lines


# -- output -------------------------------------------------------------------------------------


def _as_json(plan: Plan, others: Sequence[Alternative]) -> dict[str, Any]:
    rows = [{**vars(a), "speed_up": a.step_seconds / plan.step_seconds if plan.step_seconds else None} for a in others]
    return {**plan.as_dict(), "step_seconds": plan.step_seconds, "baselines": rows}


def plan_text(plan: Plan, others: Sequence[Alternative]) -> list[str]:
    """Return the plan as lines: its request, layers and totals, and the baselines for comparison."""
    totals = [*_totals(plan), *idle_text(plan)]
    return [*_headline(plan), "", *_layers(plan), "", *totals, "", *_beside(plan, others)]


def _headline(plan: Plan) -> list[str]:
    limit = "" if plan.limit is None else f", at most {bytes_text(plan.limit)} per rank"
    lines = [
        f"{plan.network} on {plan.ranks} ranks of {plan.machine}, batch {plan.batch}, {plan.dtype}{limit}",
        f"planner {plan.planner}{', optimal among its candidates' if plan.optimal else ''}, "
        f"{plan.planning_seconds:.2f} s; kernel times: {plan.kernel_times}",
    ]
    return lines


def _layers(plan: Plan) -> list[str]:
    digits = 3 if plan.step_seconds < 1 else 1
    heading = ["layer", "cut", "ranks", "forward", "backward", "halo", "all-reduce", "redistr.", "other", "output"]
    units = ["", "", "", *["[ms]"] * 6, "[MiB]"]
    rows = [units]
    for r in plan.prediction.layers:
        other = r.channel + r.statistics + r.packing
        times = (r.forward, r.backward, r.halo, r.allreduce, r.redistribution, other)
        cells = [milliseconds(t, digits) for t in times]
        rows.append([r.name, cut_text(r.parts), str(r.ranks), *cells, mebibytes(r.output)])
    total = [plan.prediction.total(t) for t in ("forward", "backward", "halo", "allreduce", "redistribution")]
    total.append(sum(plan.prediction.total(t) for t in ("channel", "statistics", "packing")))
    rows.append(["sum", "", "", *(milliseconds(t, digits) for t in total), mebibytes(plan.prediction.total("output"))])
    return table(heading, rows, left=2)


def _totals(plan: Plan) -> list[str]:
    p = plan.prediction
    hidden = p.total("halo") - p.total("halo_exposed")
    lines = [
        f"step        {time_text(p.step_seconds)} ({p.samples_per_second:.4g} samples/s)",
        f"  layers    forward {time_text(p.forward_seconds)}, backward {time_text(p.backward_seconds)}",
        f"  gradients {time_text(p.allreduce_seconds)} of all-reduce, of which {time_text(p.allreduce_exposed)} "
        f"waited for; update {time_text(p.update_seconds)}; summed by {_scheme(plan)}",
    ]
    if p.total("halo"):
        lines.insert(2, f"  halos     {time_text(p.total('halo'))}, of which {time_text(hidden)} behind computation")
    uses = sorted(((n, use) for use, n in p.memory.items() if n), reverse=True)
    some = ", ".join(f"{use} {bytes_text(n)}" for n, use in uses[:4])
    lines.append(
        f"memory      {bytes_text(p.memory_bytes)} on the fullest rank: {some}{', ...' if len(uses) > 4 else ''}"
    )
    return lines


def _scheme(plan: Plan) -> str:
    """Return a text for the gradient reduction of a plan."""
    scheme = plan.strategy.reduction
    return f"{scheme}, {bytes_text(plan.strategy.bucket_bytes)} each" if scheme.has_buckets else str(scheme)


def _beside(plan: Plan, others: Sequence[Alternative]) -> list[str]:
    rows = [["", "[ms]", "of the plan", "[MiB]", ""]]
    rows.append(["plan", milliseconds(plan.step_seconds), "", mebibytes(plan.prediction.memory_bytes), ""])
    for a in others:
        faster = f"{a.step_seconds / plan.step_seconds:.2f} x" if plan.step_seconds else ""
        note = "" if a.fits else "does not fit"
        if (a.step_seconds, a.memory_bytes) == (plan.step_seconds, plan.prediction.memory_bytes):
            note = "the plan"
        rows.append([a.name, milliseconds(a.step_seconds), faster, mebibytes(a.memory_bytes), note])
    return table(["strategy", "step", "speed-up", "memory", ""], rows)


# -- comparison with measurements -----------------------------------------------------------------

# Kinds of communication in which reduction schemes sum gradients, or distribute the sum.
_GRADIENTS = ("allreduce", "reduce_scatter", "all_gather", "replicated_dense")


def comparison(plan: Plan, measured: Measured) -> list[str]:
    """Return lines of a table: predicted and measured time of every layer, and of the whole step."""
    p = plan.prediction
    rows = [["", "", "[ms]", "[ms]", ""]]
    for record in p.layers:
        seen = sum(measured.layers.get(record.name, (0.0, 0.0)))
        rows.append(_row(record.name, cut_text(record.parts), _predicted(record), seen))
    rows += [_row(name, "", *pair) for name, pair in _of_step(plan, measured).items()]
    rows.append(_row("step", "", p.step_seconds, measured.step_seconds))
    heading = ["layer", "cut", "predicted", "measured", "error"]
    data = f"; {1e3 * measured.data:.3f} ms more for the data" if measured.data else ""
    return [
        f"predicted against measured, forward and backward; middle half of {measured.steps} step(s), rank 0{data}",
        *table(heading, rows, left=2),
    ]


def _of_step(plan: Plan, measured: Measured) -> dict[str, tuple[float, float]]:
    """Return predicted and measured times of the parts of the step [s]."""
    p = plan.prediction
    found = {
        "layers together": (sum(map(_predicted, p.layers)), sum(map(sum, measured.layers.values()))),
        "gradients, waited for": (p.allreduce_exposed, sum(measured.waits.get(kind, 0.0) for kind in _GRADIENTS)),
        "loss, waited for": (0.0, measured.waits.get("loss", 0.0)),
        "update": (p.update_seconds, measured.update),
    }
    predicted, seen = (sum(pair[i] for pair in found.values()) for i in (0, 1))
    return {**found, "between them": (max(0.0, p.step_seconds - predicted), max(0.0, measured.step_seconds - seen))}


def compared(plan: Plan, measured: Measured) -> dict[str, object]:
    """Return the same comparison as plain data; times in [s]."""
    layers = {
        record.name: {
            "predicted": _predicted(record),
            "measured": sum(measured.layers.get(record.name, (0.0, 0.0))),
        }
        for record in plan.prediction.layers
    }
    return {
        "steps": measured.steps,
        "predicted_step_seconds": plan.step_seconds,
        "measured_step_seconds": measured.step_seconds,
        "data_seconds": measured.data,
        "waits": dict(measured.waits),
        "layers": layers,
    }


def _predicted(record: LayerRecord) -> float:
    """Return the time of a layer from start to end, both passes; without the wait for gradients [s]."""
    return record.seconds - record.allreduce_exposed


def _row(name: str, cut: str, predicted: float, measured: float) -> list[str]:
    error = f"{predicted / measured - 1:+.0%}" if measured else ""
    return [name, cut, milliseconds(predicted), milliseconds(measured), error]
