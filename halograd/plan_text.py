"""Text output of plans, and of their comparison with measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .output import bytes_text, cut_text, idle_text, mebibytes, milliseconds, table, time_text

if TYPE_CHECKING:
    from .perfmodel.plans import Alternative, LayerRecord, Plan
    from .perfmodel.robust import RobustPlan
    from .training.step_times import Measured

__all__ = ["compared", "comparison", "plan_text", "robust_text"]

#: Smallest regret that is printed.
NOTICED = 0.005


def plan_text(plan: Plan, others: Sequence[Alternative]) -> list[str]:
    """Return the plan as lines: its request, layers and totals, and the baselines."""
    totals = [*_totals(plan), *idle_text(plan)]
    return [*_headline(plan), "", *_layers(plan), "", *totals, "", *_compared(plan, others)]


def robust_text(robust: RobustPlan) -> list[str]:
    """Return lines on the largest regret of a robust plan, and on the variation of the machine that causes it."""
    if not robust.plan.step_seconds:
        return []
    known, fastest = robust.regrets[""], max(robust.fastest.values())
    lines = [
        f"robust      at most {max(robust.regrets.values()):.1%} slower than the best plan found if latency, launch "
        f"time or compute rate is off by {robust.factor:g} x (the fastest plan: {fastest:.1%}); {known:.1%} here"
    ]
    worst = robust.worst
    # "" is the machine as described, for which there is no variation to name.
    if robust.regrets[worst] >= NOTICED and worst:
        strategy = robust.others[worst]
        largest = max(robust.plan.prediction.layers, key=lambda record: record.output).name
        cut = cut_text({axis: n for axis, n in strategy.parts_of(largest).items() if n > 1})
        lines.append(
            f"sensitive   with {worst}, another plan would be {robust.regrets[worst]:.1%} faster: {cut} of {largest}, "
            f"gradients summed by {strategy.reduction}"
        )
    return lines


def _headline(plan: Plan) -> list[str]:
    limit = "" if plan.limit is None else f", at most {bytes_text(plan.limit)} per rank"
    lines = [
        f"{plan.network} on {plan.ranks} ranks of {plan.machine}, batch {plan.batch}, {plan.dtype}{limit}",
        f"planner {plan.planner}{', optimal among its candidates' if plan.optimal else ''}, "
        f"{plan.planning_seconds:.2f} s; kernel times: {plan.kernel_times}",
    ]
    return lines


#: Columns of the table of layers, and the fields of a record that they add up.
_TERMS = {
    "forward": ("forward",),
    "backward": ("backward",),
    "again": ("again",),
    "halo": ("halo",),
    "all-reduce": ("allreduce",),
    "redistr.": ("redistribution",),
    "other": ("channel", "statistics", "packing"),
}


def _layers(plan: Plan) -> list[str]:
    # Columns of [ms] stay narrow for long steps.
    digits = 3 if plan.step_seconds < 1 else 1
    p, terms = plan.prediction, dict(_TERMS)
    if not p.total("again"):
        del terms["again"]
    rows = [["", "", "", *["[ms]"] * len(terms), "[MiB]"]]
    for r in p.layers:
        cells = [milliseconds(sum(getattr(r, f) for f in fields), digits) for fields in terms.values()]
        rows.append([r.name, cut_text(r.parts), str(r.ranks), *cells, mebibytes(r.output)])
    total = [milliseconds(sum(map(p.total, fields)), digits) for fields in terms.values()]
    rows.append(["sum", "", "", *total, mebibytes(p.total("output"))])
    heading = ["layer", "cut", "ranks", *terms, "output"]
    return table(heading, rows, left=2)


def _totals(plan: Plan) -> list[str]:
    p = plan.prediction
    # The exposed part of a halo exchange is waited for; the rest overlaps with kernels.
    hidden = p.total("halo") - p.total("halo_exposed")
    again = f", of which {time_text(p.total('again'))} repeat the forward pass" if p.total("again") else ""
    lines = [
        f"step        {time_text(p.step_seconds)} ({p.samples_per_second:.4g} samples/s)",
        f"  layers    forward {time_text(p.forward_seconds)}, backward {time_text(p.backward_seconds)}{again}",
        f"  gradients {time_text(p.allreduce_seconds)} of all-reduce, of which {time_text(p.allreduce_exposed)} "
        f"waited for; update {time_text(p.update_seconds)}; summed by {_scheme(plan)}",
    ]
    if p.total("halo"):
        lines.insert(2, f"  halos     {time_text(p.total('halo'))}, of which {time_text(hidden)} behind computation")
    uses = sorted(((n, use) for use, n in p.memory.items() if n), reverse=True)
    listed = ", ".join(f"{use} {bytes_text(n)}" for n, use in uses[:4])
    lines.append(
        f"memory      {bytes_text(p.memory_bytes)} on the fullest rank: {listed}{', ...' if len(uses) > 4 else ''}"
    )
    return lines


def _scheme(plan: Plan) -> str:
    """Return the scheme of a plan's gradient reduction as a string, with the size of its buckets if it has any."""
    scheme = plan.strategy.reduction
    return f"{scheme}, {bytes_text(plan.strategy.bucket_bytes)} each" if scheme.has_buckets else str(scheme)


def _compared(plan: Plan, others: Sequence[Alternative]) -> list[str]:
    rows = [["", "[ms]", "of the plan", "[MiB]", ""]]
    rows.append(["plan", milliseconds(plan.step_seconds), "", mebibytes(plan.prediction.memory_bytes), ""])
    for a in others:
        faster = f"{a.step_seconds / plan.step_seconds:.2f} x" if plan.step_seconds else ""
        note = "" if a.fits else "does not fit"
        # Equal to the byte: the search chose the cuts of this baseline.
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
    cuts = {record.name: cut_text(record.parts) for record in p.layers}
    rows += [_row(name, cuts.get(name, ""), *pair) for name, pair in _of_layers(plan, measured).items()]
    rows += [_row(name, "", *pair) for name, pair in _of_step(plan, measured).items()]
    rows.append(_row("step", "", p.step_seconds, measured.step_seconds))
    heading = ["layer", "cut", "predicted", "measured", "error"]
    data = f"; {1e3 * measured.data:.3f} ms more for the data" if measured.data else ""
    return [
        f"predicted against measured, forward and backward; middle half of {measured.steps} step(s), rank 0{data}",
        *table(heading, rows, left=2),
    ]


def _of_layers(plan: Plan, measured: Measured) -> dict[str, tuple[float, float]]:
    """Return predicted and measured times of layers in both passes, and of what backward computes again [s]."""
    times = {}
    for record in plan.prediction.layers:
        forward, backward, again = measured.layers.get(record.name, (0.0, 0.0, 0.0))
        times[record.name] = _predicted(record) - record.again, forward + backward
        if record.again or again:
            times[f"{record.name} (again)"] = record.again, again
    return times


def _of_step(plan: Plan, measured: Measured) -> dict[str, tuple[float, float]]:
    """Return predicted and measured times of the parts of the step [s]."""
    p = plan.prediction
    times = {
        "layers together": (sum(map(_predicted, p.layers)), sum(map(sum, measured.layers.values()))),
        "gradients, waited for": (p.allreduce_exposed, sum(measured.waits.get(kind, 0.0) for kind in _GRADIENTS)),
        "loss, waited for": (0.0, measured.waits.get("loss", 0.0)),
        "update": (p.update_seconds, measured.update),
    }
    predicted, seen = (sum(pair[i] for pair in times.values()) for i in (0, 1))
    return {**times, "between them": (max(0.0, p.step_seconds - predicted), max(0.0, measured.step_seconds - seen))}


def compared(plan: Plan, measured: Measured) -> dict[str, object]:
    """Return the comparison of :func:`comparison` as plain data; times in [s]."""
    layers = {
        name: {"predicted": predicted, "measured": seen}
        for name, (predicted, seen) in _of_layers(plan, measured).items()
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
    """Return the predicted time of both passes of a layer, without the wait for sums of gradients [s]."""
    return record.seconds - record.allreduce_exposed


def _row(name: str, cut: str, predicted: float, measured: float) -> list[str]:
    error = f"{predicted / measured - 1:+.0%}" if measured else ""
    return [name, cut, milliseconds(predicted), milliseconds(measured), error]
