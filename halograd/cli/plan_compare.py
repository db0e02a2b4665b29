"""A plan beside what was measured when it ran: per layer and in total."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halograd.cli.tables import cut_text, milliseconds, table

if TYPE_CHECKING:
    from halograd.perfmodel.cost.prediction import LayerRecord
    from halograd.perfmodel.predict import Plan
    from halograd.training.step_times import Measured

__all__ = ["compared", "comparison"]

# Kinds of communication by which schemes of reduction sum gradients, or bring the sum to all.
_GRADIENTS = ("allreduce", "reduce_scatter", "all_gather", "replicated_dense")


def comparison(plan: Plan, measured: Measured) -> list[str]:
    """Lines of a table: predicted and measured time of every layer, and of the whole step."""
    p = plan.prediction
    rows = [["", "", "[ms]", "[ms]", ""]]
    for record in p.layers:
        seen = sum(measured.layers.get(record.name, (0.0, 0.0)))
        rows.append(_row(record.name, cut_text(record.parts), _predicted(record), seen))
    rows += [_row(name, "", *pair) for name, pair in _parts(plan, measured).items()]
    rows.append(_row("step", "", p.step_seconds, measured.step_seconds))
    heading = ["layer", "cut", "predicted", "measured", "error"]
    data = f"; {1e3 * measured.data:.3f} ms more for the data" if measured.data else ""
    return [
        f"predicted against measured, forward and backward; middle half of {measured.steps} step(s), rank 0{data}",
        *table(heading, rows, left=2),
    ]


def _parts(plan: Plan, measured: Measured) -> dict[str, tuple[float, float]]:
    """What makes up the step: predicted and measured [s]."""
    p = plan.prediction
    found = {
        "layers together": (sum(map(_predicted, p.layers)), sum(map(sum, measured.layers.values()))),
        "gradients, waited for": (p.allreduce_exposed, sum(measured.waits.get(kind, 0.0) for kind in _GRADIENTS)),
        "loss, waited for": (0.0, measured.waits.get("loss", 0.0)),
        "update": (p.update_seconds, measured.update),
    }
    told, seen = (sum(pair[i] for pair in found.values()) for i in (0, 1))
    return {**found, "between them": (max(0.0, p.step_seconds - told), max(0.0, measured.step_seconds - seen))}


def compared(plan: Plan, measured: Measured) -> dict[str, object]:
    """The same as plain data; times in [s]."""
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
    """What a layer takes from its start to its end, both passes; waiting for gradients is told apart [s]."""
    return record.seconds - record.allreduce_exposed


def _row(name: str, cut: str, predicted: float, measured: float) -> list[str]:
    error = f"{predicted / measured - 1:+.0%}" if measured else ""
    return [name, cut, milliseconds(predicted), milliseconds(measured), error]
