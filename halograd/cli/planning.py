"""`halograd plan`: how every layer of a network is best cut on a machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halograd.cli.plan_options import (
    Asked,
    Cache,
    Dtype,
    Full,
    MachineName,
    Memory,
    ModelName,
    Options,
    Planner,
    ask,
    check_counts,
    check_planner,
    parse_memory,
    source_of,
)

if TYPE_CHECKING:
    from halograd.perfmodel.plan_file import PlanFile
    from halograd.perfmodel.predict import Alternative, Plan

__all__ = ["baselines_of", "known_baselines", "make_plan", "plan", "plan_text"]


def plan(
    model: ModelName,
    machine: MachineName,
    ranks: Annotated[int, typer.Option(help="How many there are; a layer may use fewer.")],
    batch: Annotated[int, typer.Option(help="Samples of a global batch.")],
    memory: Memory = None,
    planner: Planner = "elimination",
    options: Options = None,
    dtype: Dtype = "float32",
    full: Full = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="PLAN.json", help="Write the plan to this file.")
    ] = None,
    cache: Cache = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Choose how every layer of a model is cut on a machine, within its memory.

    `halograd explain` tells why, and `strategy.file = "plan.json"` of a configuration trains by it.

    \b
    Examples:
      halograd plan mesh_2k --machine lassen --ranks 16 --batch 4 -o plan.json
      halograd plan resnet50 --machine dgx-h100 --ranks 64 --batch 1024 --memory 16GiB
      halograd plan mesh_1k --option resolution=512 --machine machine.toml --ranks 2 --batch 1 --json
    """
    check_counts(ranks=ranks, batch=batch)
    check_planner(planner)
    limit = parse_memory(memory)
    asked = ask(model, options, machine, dtype, cache)
    made = make_plan(asked, batch, ranks, limit, planner, full)
    others = baselines_of(asked, made.plan)
    if out is not None:
        made.save(out)
    if as_json:
        print(json.dumps(_as_json(made, others)), flush=True)
        return
    print("\n".join(plan_text(made.plan, others, made.request.kernel_times if made.request else "")))
    if out is not None:
        print(f'{out}: written; `halograd explain {out}` tells why, strategy.file = "{out}" trains by it')


def make_plan(
    asked: Asked,
    batch: int,
    ranks: int,
    limit: float | None = None,
    planner: str = "elimination",
    full: bool = False,
    slots: int = 1,
) -> PlanFile:
    """The plan of a model on a machine, and what was asked for.

    Parameters
    ----------
    limit
        Memory of one rank [B]; that of the machine's device if None.
    slots
        Arrays of the parameters' size that the optimizer keeps.
    """
    from halograd.perfmodel.cost import Training
    from halograd.perfmodel.plan_file import PlanFile, Request
    from halograd.perfmodel.predict import Planning, plan_network

    times = asked.times(batch, ranks)
    planning = Planning(planner, limit, full, Training(asked.dtype, slots))
    found = plan_network(asked.network, batch, ranks, asked.machine, times, planning)
    told = source_of(times, asked.machine)
    request = Request(
        asked.model, dict(asked.options), asked.machine.to_toml(), asked.machine_file, told, full=full, slots=slots
    )
    return PlanFile(found, request)


def baselines_of(asked: Asked, plan: Plan) -> list[Alternative]:
    """What a step takes under each baseline, in their order; a baseline that was chosen is the plan itself."""
    from halograd.perfmodel.cost.baselines import BASELINES, baseline
    from halograd.perfmodel.cost.layer_cost import Pricing
    from halograd.perfmodel.cost.simulate import Training, simulate
    from halograd.perfmodel.cost.wires import Wires
    from halograd.perfmodel.predict import Alternative

    known = {a.name: a for a in known_baselines(plan)}
    found = []
    for name in BASELINES:
        if name not in known:
            strategy = baseline(name, asked.network, plan.batch, plan.ranks, plan.strategy.bucket_bytes)
            times = asked.times(plan.batch, plan.ranks)
            pricing = Pricing(Wires(asked.machine), times, plan.dtype, best_halo=True)
            prediction = simulate(
                asked.network, strategy, plan.batch, asked.machine, times, Training(plan.dtype), plan.ranks, pricing
            )
            nbytes = prediction.memory_bytes
            limit = asked.machine.memory if plan.limit is None else plan.limit
            known[name] = Alternative(name, prediction.step_seconds, nbytes, nbytes <= limit)
        found.append(known[name])
    return found


def known_baselines(plan: Plan) -> list[Alternative]:
    """Baselines that were priced when the plan was made; those with the plan's own cuts take what it takes."""
    from halograd.perfmodel.cost.baselines import BASELINES
    from halograd.perfmodel.predict import Alternative

    known = {a.name: a for a in plan.alternatives}
    # Equal strategies are left out of `alternatives`; a baseline that was asked for by name is the only one priced.
    same = BASELINES if set(known) & set(BASELINES) else (plan.planner,)
    own = plan.step_seconds, plan.prediction.memory_bytes
    return [known.get(name, Alternative(name, *own, True)) for name in BASELINES if name in known or name in same]


# -- output -------------------------------------------------------------------------------------


def _as_json(made: PlanFile, others: Sequence[Alternative]) -> dict[str, Any]:
    plan = made.plan
    rows = [{**vars(a), "speed_up": a.step_seconds / plan.step_seconds if plan.step_seconds else None} for a in others]
    return {**made.as_dict(), "step_seconds": plan.step_seconds, "baselines": rows}


def plan_text(plan: Plan, others: Sequence[Alternative], kernel_times: str) -> list[str]:
    """The plan as lines: what it is for, its layers, its totals, and the baselines beside it."""
    from halograd.cli.tables import idle_text

    totals = [*_totals(plan), *idle_text(plan)]
    return [*_headline(plan, kernel_times), "", *_layers(plan), "", *totals, "", *_comparison(plan, others)]


def _headline(plan: Plan, kernel_times: str) -> list[str]:
    from halograd.cli.tables import bytes_text

    limit = "" if plan.limit is None else f", at most {bytes_text(plan.limit)} per rank"
    lines = [
        f"{plan.network} on {plan.ranks} ranks of {plan.machine}, batch {plan.batch}, {plan.dtype}{limit}",
        f"planner {plan.planner}{', optimal among its candidates' if plan.optimal else ''}, "
        f"{plan.planning_seconds:.2f} s; kernel times: {kernel_times}",
    ]
    return lines


def _layers(plan: Plan) -> list[str]:
    from halograd.cli.tables import cut_text, mebibytes, milliseconds, table

    digits = 3 if plan.step_seconds < 1 else 1
    heading = ["layer", "cut", "ranks", "forward", "backward", "halo", "all-reduce", "redistr.", "other", "memory"]
    units = ["", "", "", *["[ms]"] * 6, "[MiB]"]
    rows = [units]
    for r in plan.prediction.layers:
        other = r.channel + r.statistics + r.packing
        times = (r.forward, r.backward, r.halo, r.allreduce, r.redistribution, other)
        cells = [milliseconds(t, digits) for t in times]
        rows.append([r.name, cut_text(r.parts), str(r.ranks), *cells, mebibytes(r.memory)])
    total = [plan.prediction.total(t) for t in ("forward", "backward", "halo", "allreduce", "redistribution")]
    total.append(sum(plan.prediction.total(t) for t in ("channel", "statistics", "packing")))
    memory = mebibytes(plan.prediction.total("memory"))
    rows.append(["sum", "", "", *(milliseconds(t, digits) for t in total), memory])
    return table(heading, rows, left=2)


def _totals(plan: Plan) -> list[str]:
    from halograd.cli.tables import bytes_text, time_text

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
    """How gradients are summed, in words."""
    from halograd.cli.tables import bytes_text

    scheme = plan.strategy.reduction
    return f"{scheme}, {bytes_text(plan.strategy.bucket_bytes)} each" if scheme.has_buckets else str(scheme)


def _comparison(plan: Plan, others: Sequence[Alternative]) -> list[str]:
    from halograd.cli.tables import mebibytes, milliseconds, table

    rows = [["", "[ms]", "of the plan", "[MiB]", ""]]
    rows.append(["plan", milliseconds(plan.step_seconds), "", mebibytes(plan.prediction.memory_bytes), ""])
    for a in others:
        faster = f"{a.step_seconds / plan.step_seconds:.2f} x" if plan.step_seconds else ""
        note = "" if a.fits else "does not fit"
        if (a.step_seconds, a.memory_bytes) == (plan.step_seconds, plan.prediction.memory_bytes):
            note = "the plan"
        rows.append([a.name, milliseconds(a.step_seconds), faster, mebibytes(a.memory_bytes), note])
    return table(["strategy", "step", "speed-up", "memory", ""], rows)
