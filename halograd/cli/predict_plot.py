"""Curves of strong and weak scaling."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from halograd.cli.predicting import Series
from halograd.errors import UserError
from halograd.report.style import BLUE, DARK, GREEN, GREY, ORANGE, PURPLE, SKY, picture

__all__ = ["draw_scaling"]

COLORS = {"data": ORANGE, "spatial": GREEN, "model": PURPLE, "owt": SKY}


def draw_scaling(series: Sequence[Series], title: str, path: Path) -> None:
    """Write the picture: a panel per series, time of a step over ranks. Local.

    Baselines that do not fit into memory are left out.

    Raises
    ------
    UserError
        If the file cannot be written.
    """
    try:
        with picture(path, 9.5, 4.2) as figure:
            figure.suptitle(title, x=0.01, ha="left", fontsize=10)
            for ax, some in zip(figure.subplots(1, len(series), squeeze=False)[0], series):
                _panel(ax, some)
    except OSError as error:
        raise UserError(
            f"--plot {path}: expected a path that can be written, got an error ({error.strerror}); choose another"
        ) from error


def _panel(ax: Axes, series: Series) -> None:
    points = [p for p in series.points if p.seconds is not None and p.fits]
    first = series.reference()
    for name, color in COLORS.items():
        some = [(p.ranks, p.baselines[name]) for p in points if p.baselines]
        xy = [(ranks, 1e3 * seconds) for ranks, (seconds, fits) in some if fits]
        if xy:
            ax.plot(*zip(*xy), color=color, marker=".", linewidth=1.2, label=name)
    label = "plan" if any(p.baselines for p in points) else "this grid"
    ax.plot([p.ranks for p in points], [1e3 * (p.seconds or 0) for p in points], color=BLUE, marker="o", label=label)
    if first is not None and first.seconds is not None:
        scale = [1.0 if series.kind == "weak" else first.ranks / p.ranks for p in points]
        ideal = [1e3 * first.seconds * s for s in scale]
        ax.plot([p.ranks for p in points], ideal, color=GREY, linestyle="--", linewidth=1, label="ideal")
    ax.set_xscale("log", base=2)
    if series.kind == "weak":
        ax.set_ylim(bottom=0)  # ideal is a level line: what matters is the distance to it, against the whole
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
