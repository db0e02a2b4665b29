"""Pictures: how the loss fell and the quality of the prediction rose, and how fast that went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from halograd.report.style import BLUE, DARK, GREEN, GREY, ORANGE, PURPLE, RED, SKY, picture

__all__ = ["Quality", "draw_curves", "draw_speed"]

#: Points of a curve; of longer ones, means are drawn.
POINTS = 2000
_COLOURS = (ORANGE, BLUE, GREEN, PURPLE, RED)
_NAMES = {"iou": "IoU", "f1": "F1", "mae": "mean absolute error", "rmse": "root of the mean square"}


@dataclass(frozen=True)
class Quality:
    """What of the validations is drawn beside the loss, and what it is compared with.

    Attributes
    ----------
    metrics
        Label by name; by default all that were logged.
    title, axis
        Of the panel.
    baseline
        Name and value of a horizontal line.
    loss_axis
        Name and unit of the loss.
    """

    metrics: dict[str, str] | None = None
    title: str = "Held-out samples"
    axis: str = ""
    baseline: tuple[str, float] | None = None
    loss_axis: str = "loss"


Entries = Sequence[dict[str, Any]]


def draw_curves(
    path: Path, steps: Entries, validations: Entries, per_epoch: int, quality: Quality | None = None
) -> None:
    """Loss of every step and epoch, validation loss and metrics, from the lines of a log. Local.

    Parameters
    ----------
    steps, validations
        Lines ``step`` (at least one) and ``validation``.
    per_epoch
        Steps of an epoch.
    """
    quality = quality or Quality()
    metrics = _metrics(validations) if quality.metrics is None else quality.metrics
    end = 1.02 * max(entry["step"] for entry in (steps[-1], *validations)) / per_epoch
    with picture(path, 9.0 if metrics else 6.0, 3.4) as figure:
        panels = figure.subplots(1, 2 if metrics else 1, squeeze=False)[0]
        _draw_loss(panels[0], steps, validations, per_epoch)
        panels[0].set(ylabel=quality.loss_axis)
        if metrics:
            _draw_quality(panels[1], validations, per_epoch, metrics, quality)
        for axes in panels:
            axes.set(xlim=(0, end), xlabel="epoch")
            axes.grid(color=GREY, alpha=0.25, linewidth=0.6)


def draw_speed(path: Path, steps: Entries, per_epoch: int) -> None:
    """Samples per second, and the learning rate. Local."""
    at = _thinned(np.array([s["step"] for s in steps]) / per_epoch)
    with picture(path, 9.0, 2.6) as figure:
        left, right = figure.subplots(1, 2)
        speed = np.array([s["samples_per_second"] for s in steps])
        left.plot(at, _thinned(speed), color=SKY, linewidth=0.7, label="each step")
        median = float(np.median(speed))
        left.axhline(median, color=BLUE, linewidth=1.2, label=f"median: {median:.4g}")
        left.set(ylabel="samples/s", title="Speed", ylim=(0, 1.1 * float(np.quantile(speed, 0.99))))
        left.legend(loc="lower right")
        right.plot(at, _thinned(np.array([s["learning_rate"] for s in steps])), color=DARK, linewidth=1.2)
        right.set(title="Learning rate", ylim=(0, None))
        for axes in (left, right):
            axes.set(xlim=(0, 1.02 * at[-1]), xlabel="epoch")
            axes.grid(color=GREY, alpha=0.25, linewidth=0.6)


def _draw_loss(axes: Any, steps: Entries, validations: Entries, per_epoch: int) -> None:
    at = np.array([s["step"] for s in steps]) / per_epoch
    losses = np.array([s["loss"] for s in steps])
    axes.plot(_thinned(at), _thinned(losses), color=SKY, linewidth=0.7, alpha=0.7, label="training, each step")
    whole = np.ceil(at - 1e-9).astype(int)  # step k of epoch 1 is at k/per_epoch
    ended = [e for e in np.unique(whole) if e <= at[-1] + 1e-9]
    means = [losses[whole == e].mean() for e in ended]
    label = "training, mean of the epoch"
    axes.plot(np.array(ended) - 0.5, means, color=BLUE, marker="o", markersize=3, label=label)
    if validations:
        x, y = [v["step"] / per_epoch for v in validations], [v["loss"] for v in validations]
        axes.plot(x, y, color=ORANGE, marker="s", markersize=3, label="held-out samples")
    if losses.min() > 0 and losses.max() > 2 * losses.min():
        axes.set(yscale="log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(lambda x, _: f"{x:g}" if f"{x:.0e}"[0] in "235" else "")
    axes.set(title="Loss")
    axes.legend()


def _draw_quality(axes: Any, validations: Entries, per_epoch: int, metrics: dict[str, str], quality: Quality) -> None:
    x, most = [v["step"] / per_epoch for v in validations], 0.0
    for colour, (name, label) in zip(_COLOURS, metrics.items()):
        values = [np.nan if v.get(name) is None else v[name] for v in validations]
        axes.plot(x, values, color=colour, marker="s", markersize=3, label=label)
        most = max([most, *(value for value in values if value == value)])
    if quality.baseline is not None:
        name, value = quality.baseline
        axes.axhline(value, color=DARK, linestyle="--", linewidth=1.2)
        axes.annotate(
            f"{name}: {value:.3f}",
            (1, value),
            xycoords=("axes fraction", "data"),
            xytext=(-2, -4),
            textcoords="offset points",
            ha="right",
            va="top",
            color=DARK,
        )
    axes.set(ylabel=quality.axis, ylim=(0, 1 if most <= 1 else None), title=quality.title)
    axes.legend(loc="upper left" if len(metrics) == 1 else "best")


def _metrics(validations: Entries) -> dict[str, str]:
    """Names and labels of what was logged, those that fit one axis."""
    known = [name for v in validations for name, value in v.items() if isinstance(value, float)]
    names = [n for n in dict.fromkeys(known) if n not in ("loss", "time", "epoch", "step")]
    return {name: _NAMES.get(name, name) for name in names[: len(_COLOURS)]}


def _thinned(values: np.ndarray) -> np.ndarray:
    """The values, or means of so many in a row that `POINTS` are left."""
    run = -(-len(values) // POINTS)
    if run <= 1:
        return values
    whole = len(values) // run * run
    return values[:whole].reshape(-1, run).mean(axis=1)
