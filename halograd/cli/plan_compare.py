"""A plan beside what was measured when it ran: per layer and in total."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halograd.cli.tables import cut_text, milliseconds, table

if TYPE_CHECKING:
    from halograd.perfmodel.cost.prediction import LayerRecord
    from halograd.perfmodel.predict import Plan
    from halograd.training.step_times import Measured

__all__ = ["compared", "comparison"]


def comparison(plan: Plan, measured: Measured) -> list[str]:
    """Lines of a table: predicted and measured time of every layer, and of the whole step."""
    p = plan.prediction
    rows = [["", "", "[ms]", "[ms]", ""]]
    for record in p.layers:
        seconds = _predicted(record)
        rows.append(
            _row(record.name, cut_text(record.parts), seconds, sum(measured.layers.get(record.name, (0.0, 0.0))))
        )
    layers = sum(_predicted(r) for r in p.layers)
    seen = sum(sum(pair) for pair in measured.layers.values())
    rows.append(_row("layers together", "", layers, seen))
    rows.append(_row("gradients, waited for", "", p.allreduce_exposed, measured.waits.get("allreduce", 0.0)))
    rows.append(_row("update", "", p.update_seconds, measured.update))
    rows.append(_row("step", "", p.step_seconds, measured.step_seconds))
    rest = measured.step_seconds - seen - measured.waits.get("allreduce", 0.0) - measured.update
    told = p.step_seconds - layers - p.allreduce_exposed - p.update_seconds
    rows.insert(-1, _row("between them", "", max(0.0, told), max(0.0, rest)))
    heading = ["layer", "cut", "predicted", "measured", "error"]
    data = f"; {1e3 * measured.data:.3f} ms more for the data" if measured.data else ""
    return [
        f"predicted against measured, forward and backward; medians of {measured.steps} steps, rank 0{data}",
        *table(heading, rows, left=2),
    ]


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
