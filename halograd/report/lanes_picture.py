"""Picture: what every rank did during some training steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.patches import Patch

from halograd.report.lanes import Bar, read_bars, step_begins, typical_steps, without
from halograd.report.style import BLUE, DARK, GREEN, LIGHT, ORANGE, PURPLE, RED, SILVER, SKY, YELLOW, picture

__all__ = ["draw_timeline"]

LANES = ("compute", "wait", "halo", "all-reduce", "I/O")
COLOURS = {
    "forward": (BLUE, "forward"),
    "backward": (SKY, "backward"),
    "update": (DARK, "update"),
    "wait": (SILVER, "wait for a message"),
    "halo": (ORANGE, "halo travels"),
    "allreduce": (RED, "all-reduce: gradients"),
    "statistics": (PURPLE, "batch-norm statistics"),
    "loss": (YELLOW, "loss"),
    "io": (GREEN, "read ahead"),
}
STEPS = 2


def draw_timeline(path: Path, trace: Path, title: str) -> bool:
    """Lanes of every rank over two typical steps of a Chrome trace; whether it holds so many. Local."""
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
        figure.legend(
            handles=handles, loc="outside lower center", ncols=len(handles), columnspacing=1.1, handlelength=1.3
        )
    return True


def _draw_rank(axes: Any, bars: Sequence[Bar], steps: Sequence[float], origin: float) -> None:
    waits = sorted((bar.begin, bar.end) for bar in bars if bar.lane == "wait")
    for row, lane in enumerate(LANES):
        axes.axhspan(row - 0.42, row + 0.42, color=LIGHT, linewidth=0)
        for kind, (colour, _) in COLOURS.items():
            spans = sorted((bar.begin, bar.end) for bar in bars if bar.lane == lane and bar.kind == kind)
            if lane == "compute":
                spans = without(spans, waits)
            axes.broken_barh([(b - origin, e - b) for b, e in spans], (row - 0.42, 0.84), facecolor=colour, linewidth=0)
    for begin in steps:
        axes.axvline(begin - origin, color=DARK, linewidth=0.8, linestyle=":")
    axes.set(yticks=range(len(LANES)), yticklabels=LANES, ylim=(len(LANES) - 0.5, -0.5))
    axes.tick_params(axis="y", length=0, labelsize=7.5)
    axes.tick_params(axis="x", labelsize=8)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
