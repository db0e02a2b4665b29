"""Pictures of plans: a strip of layers, colored by cut, with times; curves of scaling; times against memory."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import NullFormatter

from ..documents import writing
from ..output import cut_text, time_text
from ..report.pictures import BLUE, DARK, GREEN, GREY, ORANGE, PURPLE, RED, SKY, TEAL, YELLOW, picture
from .scaling import Series

if TYPE_CHECKING:
    from ..perfmodel.plans import LayerRecord, Plan

__all__ = ["draw_frontier", "draw_scaling", "draw_strip"]

#: Largest number of layers in one row of the strip.
ROW = 70
#: Length above which a name is shortened.
NAME = 20
CUTS = (BLUE, ORANGE, GREEN, PURPLE, SKY, YELLOW, RED, "#7F3C8D", "#80BA5A", "#A5AA99", "#E73F74", "#11A579")
HATCHES = ("", "////", "....", "xxxx")
TIMES = {"forward": DARK, "backward": GREY, "again": TEAL, "messages": RED}


def draw_strip(plan: Plan, path: Path) -> None:
    """Draw a plan as a strip of layers, in a PNG file. Local.

    Each layer is a tile, in order of computation, in the color of its cut. The bar above the tile is the time that the
    layer adds to the step: forward and backward kernels, what backward repeats of the forward pass, and waits.

    Raises
    ------
    UserError
        The file cannot be written.
    """
    records = plan.prediction.layers
    rows = math.ceil(len(records) / ROW)
    # Rows of equal length, instead of a short last one.
    per_row = math.ceil(len(records) / rows)
    cuts = Counter(cut_text(r.parts) for r in records)
    # The most frequent cuts have plain colors; hatches distinguish further ones.
    styles = dict(zip((cut for cut, _ in cuts.most_common()), itertools.product(HATCHES, CUTS)))
    longest = max(len(_short(r.name)) for r in records)
    # Sizes in inches; names are vertical, so long ones need a higher row.
    height = 1.55 + 0.062 * longest
    # Above the highest bar there is space for its value; without any time, the axis still needs an extent.
    top = max(r.seconds for r in records) * 1.18 or 1.0
    columns = 4 if len(cuts) > 3 else len(cuts)
    legend = 0.75 + 0.2 * math.ceil(len(cuts) / columns)
    size = max(7.0, 1.4 + 0.175 * per_row), legend + rows * height
    with writing(f"--picture {path}"), picture(path, *size) as figure:
        axes = figure.subplots(2 * rows, 1, height_ratios=[6, 1] * rows)
        for i in range(rows):
            row = records[i * per_row : (i + 1) * per_row]
            _bars(axes[2 * i], row, per_row, top)
            _tiles(axes[2 * i + 1], row, per_row, styles)
        _legend(figure, axes[0], plan, cuts, styles, columns)


def _bars(ax: Axes, records: Sequence[LayerRecord], width: int, top: float) -> None:
    bottoms = [0.0] * len(records)
    for term, color in TIMES.items():
        values = [1e3 * _value(r, term) for r in records]
        ax.bar(range(len(records)), values, 0.72, bottoms, color=color)
        bottoms = [a + b for a, b in zip(bottoms, values)]
    # Values of the highest bars only; those of low bars would cover each other.
    for i in sorted(range(len(records)), key=lambda i: -bottoms[i])[:8]:
        if 1e-3 * bottoms[i] > 0.12 * top:
            ax.text(i, bottoms[i], f"{bottoms[i]:.3g}", ha="center", va="bottom", fontsize=6, color=DARK)
    # The limits of `_tiles`, so that each bar stands above its tile.
    ax.set_xlim(-0.7, width - 0.3)
    ax.set_ylim(0, 1e3 * top)
    ax.set_title("ms", loc="left", fontsize=8)
    ax.spines["bottom"].set_visible(False)
    ax.set_xticks([])


def _tiles(ax: Axes, records: Sequence[LayerRecord], width: int, styles: Mapping[str, tuple[str, str]]) -> None:
    for i, record in enumerate(records):
        hatch, color = styles[cut_text(record.parts)]
        ax.add_patch(Rectangle((i - 0.5, 0), 1, 1, facecolor=color, hatch=hatch, edgecolor="white"))
    ax.set_xlim(-0.7, width - 0.3)
    ax.set_ylim(0, 1)
    ax.set_yticks([])
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.set_xticks(range(len(records)), [_short(r.name) for r in records], rotation=90, fontsize=6.5)
    ax.tick_params(axis="x", length=0, pad=2)


def _legend(
    figure: Any, ax: Axes, plan: Plan, cuts: Counter[str], styles: Mapping[str, tuple[str, str]], columns: int
) -> None:
    figure.suptitle(
        f"{plan.network} on {plan.ranks} ranks of {plan.machine}, batch {plan.batch}: {time_text(plan.step_seconds)} "
        f"per step",
        x=0.01,
        ha="left",
        fontsize=10,
    )
    handles = [
        Patch(facecolor=styles[cut][1], hatch=styles[cut][0], edgecolor="white", label=f"{cut} ({count} layers)")
        for cut, count in cuts.most_common()
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=columns, fontsize=8)
    terms = [term for term in TIMES if term != "again" or plan.prediction.total("again")]
    bars = [Patch(facecolor=TIMES[term], label=term) for term in terms]
    ax.legend(handles=bars, loc="upper right", ncols=len(bars), fontsize=8, bbox_to_anchor=(1, 1.22), borderpad=0)


def _value(record: LayerRecord, term: str) -> float:
    """Return a term of the time of a layer [s]; "messages" is all time outside of kernels."""
    if term == "messages":
        return record.seconds - record.forward - record.backward - record.again
    return float(getattr(record, term))


def _short(name: str) -> str:
    half = NAME // 2 - 1
    return name if len(name) <= NAME else f"{name[:half]}\u2026{name[-half:]}"


COLORS = {"data": ORANGE, "spatial": GREEN, "model": PURPLE, "owt": SKY}
#: Later lines are thinner and drawn over earlier ones, so that baselines with equal times are all visible.
WIDTHS = {"data": 4.5, "spatial": 3.4, "model": 2.3, "owt": 1.2}


def draw_scaling(series: Sequence[Series], title: str, path: Path) -> None:
    """Draw the time of a step against the number of ranks, one panel per series, in a PNG file. Local.

    Baselines that do not fit into memory are left out.

    Raises
    ------
    UserError
        The file cannot be written.
    """
    with writing(f"--plot {path}"), picture(path, 9.5, 4.2) as figure:
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
        for ax, one_series in zip(figure.subplots(1, len(series), squeeze=False)[0], series):
            _panel(ax, one_series)


def draw_frontier(title: str, points: Sequence[tuple[int, float, int]], path: Path) -> None:
    """Draw step times of plans against their memory, with the number of layers computed again, in a PNG file. Local.

    `points` are memory [B], step time [s] and number of layers of each plan.

    Raises
    ------
    UserError
        The file cannot be written.
    """
    with writing(f"--plot {path}"), picture(path, 6.5, 4.2) as figure:
        ax = figure.subplots()
        gib, ms = [nbytes / 2**30 for nbytes, *_ in points], [1e3 * seconds for _, seconds, _ in points]
        ax.plot(gib, ms, color=BLUE, marker="o", drawstyle="steps-pre")
        for x, y, (*_, again) in zip(gib, ms, points):
            text = f"{again} again" if again else "all kept"
            ax.annotate(text, (x, y), xytext=(4, 5), textcoords="offset points", fontsize=7, color=DARK)
        ax.set_xlim(left=0)
        ax.set_ylim(bottom=0, top=1.12 * max(ms))
        ax.set_xlabel("memory of the fullest rank [GiB]")
        ax.set_ylabel("step [ms]")
        ax.set_title(title, loc="left", fontsize=10)


def _panel(ax: Axes, series: Series) -> None:
    points = [p for p in series.points if p.seconds is not None and p.fits]
    first = series.reference()
    for name, color in COLORS.items():
        pairs = [(p.ranks, p.baselines[name]) for p in points if p.baselines and name in p.baselines]
        xy = [(ranks, 1e3 * seconds) for ranks, (seconds, fits) in pairs if fits]
        if xy:
            ax.plot(*zip(*xy), color=color, marker=".", linewidth=WIDTHS[name], label=name)
    label = "plan" if any(p.baselines for p in points) else "this grid"
    ax.plot([p.ranks for p in points], [1e3 * (p.seconds or 0) for p in points], color=BLUE, marker="o", label=label)
    if first is not None and first.seconds is not None:
        # Weak scaling: the work per rank is constant. Strong scaling: it falls with 1 / ranks.
        scale = [1.0 if series.kind == "weak" else first.ranks / p.ranks for p in points]
        ideal = [1e3 * first.seconds * s for s in scale]
        ax.plot([p.ranks for p in points], ideal, color=GREY, linestyle="--", linewidth=1, label="ideal")
    ax.set_xscale("log", base=2)
    if series.kind == "weak":
        ax.set_ylim(bottom=0)  # the ideal is a horizontal line, so start the axis at 0 to show relative distances
    else:
        ax.set_yscale("log")
    ax.set_xticks([p.ranks for p in points], [str(p.ranks) for p in points], rotation=45, color=DARK)
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("ranks")
    ax.set_ylabel("step [ms]")
    batch = f"batch {series.points[0].batch}"
    if series.kind == "weak":
        batch += f" on {series.points[0].ranks} ranks, growing with them"
    ax.set_title(f"{series.kind} scaling, {batch}", loc="left")
    ax.legend()
