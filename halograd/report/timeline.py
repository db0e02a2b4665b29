"""Timeline of a run: the activity of every rank during some training steps, and the hidden share of communication."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.patches import Patch

from .pictures import BLUE, DARK, GREEN, LIGHT, ORANGE, PURPLE, RED, SILVER, SKY, TEAL, YELLOW, picture

__all__ = [
    "Bar",
    "draw_timeline",
    "hidden_text",
    "phase_rows",
    "step_begins",
    "typical_steps",
    "without",
]

Interval = tuple[float, float]


@dataclass(frozen=True)
class Bar:
    """One bar of a trace.

    Attributes
    ----------
    row
        Row of the trace: "compute", "wait", "I/O", "halo", "gradient sums", "other sums" or "other".
    kind
        "forward", "backward", "again", "update", "wait", "io"; for communication "halo", "allreduce", "statistics", ...
    begin, end
        Times since the beginning of the trace [ms].
    """

    rank: int
    row: str
    kind: str
    begin: float
    end: float


def read_bars(path: Path) -> list[Bar]:
    """Return the bars of a Chrome trace that a run has written. Local."""
    events = json.loads(path.read_text())["traceEvents"]
    # Threads of the trace are the rows, processes are the ranks.
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    bars = []
    for e in events:
        if e["ph"] == "X":
            row, kind = rows[e["pid"], e["tid"]], e["cat"]
            if kind == "communication":  # a halo, or an all-reduce of gradients, statistics or the loss
                kind = e["name"].partition(":")[0]
            # Times of Chrome traces are in microseconds.
            bars.append(Bar(e["pid"], row, kind, 1e-3 * e["ts"], 1e-3 * (e["ts"] + e["dur"])))
    return bars


def step_begins(bars: Sequence[Bar], rank: int) -> list[float]:
    """Return the start of each step of a rank: the start of its first forward span, which updates may overlap [ms]."""
    mine = sorted((b for b in bars if b.rank == rank and b.kind in ("forward", "backward")), key=lambda b: b.begin)
    # Kinds of the spans before; the first span begins a step as if it came after a backward pass.
    before = ["backward", *(bar.kind for bar in mine)]
    return [bar.begin for kind, bar in zip(before, mine) if kind == "backward" and bar.kind == "forward"]


def typical_steps(bars: Sequence[Bar], count: int) -> Interval | None:
    """Return an interval of `count` whole steps of rank 0 with median length; None if there are too few steps."""
    begins = np.array(step_begins(bars, 0)[1:])  # the begin of the first step may be missing
    if len(begins) <= count:
        return None
    # Of `count` consecutive steps, from each step on.
    durations = begins[count:] - begins[:-count]
    first = int(np.argmin(np.abs(durations - np.median(durations))))
    return float(begins[first]), float(begins[first + count])


def without(spans: Sequence[Interval], holes: Sequence[Interval]) -> list[Interval]:
    """Return the parts of the spans outside the holes. Spans and holes are sorted and do not overlap.

    >>> without([(0, 10), (12, 14)], [(1, 2), (9, 13)])
    [(0, 1), (2, 9), (13, 14)]
    """
    left = []
    for begin, end in spans:
        for b, e in holes:
            if e <= begin or b >= end:
                continue
            if b > begin:
                left.append((begin, b))
            begin = max(begin, e)
        if begin < end:
            left.append((begin, end))
    return left


ROWS = ("compute", "wait", "halo", "gradient sums", "other sums", "I/O")
COLOURS = {
    "forward": (BLUE, "forward"),
    "backward": (SKY, "backward"),
    "again": (TEAL, "forward again"),
    "update": (DARK, "update"),
    "wait": (SILVER, "wait for a message"),
    "halo": (ORANGE, "halo travels"),
    "allreduce": (RED, "all-reduce of gradients"),
    "statistics": (PURPLE, "batch-norm statistics"),
    "loss": (YELLOW, "loss"),
    "io": (GREEN, "read ahead"),
}
STEPS = 2
#: Largest number of entries in one row of the legend.
LEGEND = 9


def draw_timeline(path: Path, trace: Path, title: str) -> bool:
    """Draw the rows of every rank over two typical steps; return whether the trace has enough steps. Local."""
    bars = read_bars(trace)
    window = typical_steps(bars, STEPS)
    if window is None:
        return False
    begin, end = window
    shown = [bar for bar in bars if bar.end > begin and bar.begin < end]
    ranks = sorted({bar.rank for bar in shown})
    with picture(path, 11.0, 0.9 + 1.15 * len(ranks)) as figure:
        grid = figure.subplots(len(ranks), 1, sharex=True, squeeze=False)[:, 0]
        for axes, rank in zip(grid, ranks):
            _draw_rank(axes, [bar for bar in shown if bar.rank == rank], step_begins(bars, rank), begin)
            axes.set_title(f"rank {rank}", loc="left", fontweight="bold", pad=2)
        grid[-1].set(xlim=(0, end - begin), xlabel="time [ms]")
        figure.suptitle(title, fontsize=9.5)
        kinds = {bar.kind for bar in shown}
        handles = [Patch(facecolor=c, label=label) for kind, (c, label) in COLOURS.items() if kind in kinds]
        columns = len(handles) if len(handles) <= LEGEND else -(-len(handles) // 2)
        figure.legend(handles=handles, loc="outside lower center", ncols=columns, columnspacing=1.1, handlelength=1.3)
    return True


def _draw_rank(axes: Any, bars: Sequence[Bar], steps: Sequence[float], origin: float) -> None:
    waits = sorted((bar.begin, bar.end) for bar in bars if bar.row == "wait")
    for y, row in enumerate(ROWS):
        axes.axhspan(y - 0.42, y + 0.42, color=LIGHT, linewidth=0)
        for kind, (colour, _) in COLOURS.items():
            spans = sorted((bar.begin, bar.end) for bar in bars if bar.row == row and bar.kind == kind)
            if row == "compute":
                # A span of computation includes its waits, which have a row of their own.
                spans = without(spans, waits)
            axes.broken_barh([(b - origin, e - b) for b, e in spans], (y - 0.42, 0.84), facecolor=colour, linewidth=0)
    for begin in steps:
        axes.axvline(begin - origin, color=DARK, linewidth=0.8, linestyle=":")
    # The axis points down, so that the first row is at the top.
    axes.set(yticks=range(len(ROWS)), yticklabels=ROWS, ylim=(len(ROWS) - 0.5, -0.5))
    axes.tick_params(axis="y", length=0, labelsize=7.5)
    axes.tick_params(axis="x", labelsize=8)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)


KINDS = {"allreduce": "all-reduce of gradients", "halo": "halo exchange", "statistics": "batch-norm statistics"}


def phase_rows(entry: dict[str, Any]) -> dict[str, list[tuple[str, ...]]]:
    """Return the rows of two tables, ``work`` and ``messages``, for a line ``phases`` of a log [ms/step]."""
    phases, steps = entry["phases"], max(1, entry["steps"])
    kinds = ("forward", "backward", "again", "update")
    spent = [(COLOURS[c][1], phases[c]["seconds"]) for c in kinds if c in phases]
    blocked = sum(p.get("blocked") or 0.0 for p in phases.values())
    reading = phases.get("io", {}).get("seconds", 0.0)
    spent += [("of these, blocked in communication", blocked), ("reading ahead", reading)]
    messages: list[tuple[str, ...]] = [
        (
            KINDS.get(name, name),
            f"{1e3 * p['communication'] / steps:.1f}",
            f"{1e3 * p['blocked'] / steps:.1f}",
            _percent(p["overlap"]),
        )
        for name, p in phases.items()
        if "communication" in p
    ]
    return {"work": [(name, f"{1e3 * s / steps:.1f}") for name, s in spent], "messages": messages}


def hidden_text(phases: dict[str, Any]) -> str:
    """Return a line with the overlap ratios of the whole run."""
    parts = [f"{KINDS[k]} {_percent(phases[k]['overlap'])}" for k in ("halo", "allreduce") if k in phases]
    return f"hidden behind computation over the whole run: {', '.join(parts) or 'no communication'}"


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1f} %"
