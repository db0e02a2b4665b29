"""What the steps of a run were spent on, and what of the communication was hidden: tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from halograd.report.document import Block, Table, Text

__all__ = ["about_timeline", "hidden_text", "phase_tables"]

KINDS = {"allreduce": "all-reduce of gradients", "halo": "halo exchange", "statistics": "batch-norm statistics"}


def about_timeline(file: str) -> Text:
    """What the picture of a timeline shows; `file` holds all steps."""
    return Text(
        "Two training steps of median length. Hidden is what the ranks computed while a message travelled: "
        "overlap ratio = (duration - time blocked) / duration (Lee et al. 2017, Eq. 11). Where ranks outnumber cores, "
        f"most of a wait is the time in which the core computes for another rank. `{file}` holds all "
        "steps: open it in https://ui.perfetto.dev."
    )


def phase_tables(entry: dict[str, Any]) -> Iterator[Block]:
    """Tables of a line ``phases`` of a log."""
    phases, steps = entry["phases"], max(1, entry["steps"])
    spent = [(c, phases[c]["seconds"]) for c in ("forward", "backward", "update") if c in phases]
    blocked = sum(p.get("blocked") or 0.0 for p in phases.values())
    reading = phases.get("io", {}).get("seconds", 0.0)
    spent += [("of these, blocked in communication", blocked), ("reading, beside", reading)]
    yield Table([("phase (rank 0)", "ms/step"), *((name, f"{1e3 * s / steps:.1f}") for name, s in spent)])
    rows = [
        (
            KINDS.get(name, name),
            f"{1e3 * p['communication'] / steps:.1f}",
            f"{1e3 * p['blocked'] / steps:.1f}",
            _percent(p["overlap"]),
        )
        for name, p in phases.items()
        if "communication" in p
    ]
    yield Table([("communication (rank 0)", "duration, ms/step", "blocked, ms/step", "hidden"), *rows])


def hidden_text(phases: dict[str, Any]) -> str:
    """What was hidden over the whole run, in a line."""
    parts = [f"{KINDS[k]} {_percent(phases[k]['overlap'])}" for k in ("halo", "allreduce") if k in phases]
    return f"hidden behind computation over the whole run: {', '.join(parts) or 'nothing travelled'}"


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1f} %"
