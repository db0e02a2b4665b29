"""Predicted and measured times of the layers of a planned run: a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from halograd.cli.tables import cut_text
from halograd.errors import UserError
from halograd.perfmodel.plan_file import PlanFile
from halograd.report.document import Block, Table, Text

__all__ = ["prediction_table"]


def prediction_table(entry: Mapping[str, Any], plan: Path) -> Iterator[Block]:
    """Table of a line ``prediction`` of a log; `plan` tells how layers were cut, where it is still there. Local."""
    cuts = _cuts(plan)
    rows = [
        _row(name, cuts.get(name, ""), pair["predicted"], pair["measured"]) for name, pair in entry["layers"].items()
    ]
    layers = (sum(pair[key] for pair in entry["layers"].values()) for key in ("predicted", "measured"))
    rows.append(_row("layers together", "", *layers))
    rows.append(_row("**step**", "", entry["predicted_step_seconds"], entry["measured_step_seconds"]))
    yield Text(
        f"Forward and backward; middle half of {entry['steps']} step(s) of rank 0. Waiting for data takes "
        f"{1e3 * entry['data_seconds']:.3f} ms more."
    )
    yield Table([("layer", "cut", "predicted [ms]", "measured [ms]", "error"), *rows])
    waits = entry["waits"]
    if waits:
        rows = [(kind, f"{1e3 * seconds:.3f}") for kind, seconds in waits.items()]
        yield Table([("waited for", "[ms]"), *rows])


def _row(name: str, cut: str, predicted: float, measured: float) -> tuple[str, ...]:
    error = f"{predicted / measured - 1:+.0%}" if measured else "-"
    return name, cut, f"{1e3 * predicted:.3f}", f"{1e3 * measured:.3f}", error


def _cuts(path: Path) -> dict[str, str]:
    """Layer -> how it is cut."""
    try:
        plan = PlanFile.load(path).plan
    except (UserError, OSError):
        return {}
    return {record.name: cut_text(record.parts) for record in plan.prediction.layers}
