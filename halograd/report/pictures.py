"""Pictures of a run: loss, quality, speed, activity of every rank, and predicted and true masks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import colormaps
from matplotlib.colors import Colormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch

from ..data.disk import atomic_path
from ..training.metrics import Confusion

__all__ = [
    "BLUE",
    "DARK",
    "GREEN",
    "GREY",
    "LIGHT",
    "ORANGE",
    "PURPLE",
    "RED",
    "SILVER",
    "SKY",
    "TEAL",
    "YELLOW",
    "Masks",
    "Quality",
    "best_to_worst",
    "draw_curves",
    "draw_masks",
    "draw_speed",
    "iou",
    "picture",
]

BLUE, SKY, GREEN, ORANGE, RED, PURPLE = "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7"
TEAL, YELLOW, DARK, GREY, SILVER, LIGHT = "#1FB5A2", "#F0E442", "#333333", "#9A9A9A", "#C4C4C4", "#F4F4F4"
#: Colors of the classes of a segmentation; the first is the background.
CLASSES = (LIGHT, BLUE, ORANGE, GREEN, PURPLE, SKY, RED, YELLOW, DARK, GREY)

SETTINGS: dict[Any, Any] = {
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.edgecolor": GREY,
    "axes.labelcolor": DARK,
    "axes.titlecolor": DARK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": DARK,
    "ytick.color": DARK,
    "legend.frameon": False,
    "figure.dpi": 130,
}


@contextmanager
def picture(path: Path, width: float, height: float) -> Iterator[Figure]:
    """Yield a figure of this size [inch], written as PNG to `path` when the block ends. Local; needs no display."""
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.06))
        yield figure
        # The layout needs the sizes of tick labels, which follow from an earlier layout.
        figure.draw_without_rendering()
        with atomic_path(path) as partial:
            figure.savefig(partial, format="png", facecolor="white")


#: Largest number of points of a curve; longer curves are averaged.
POINTS = 2000
_COLOURS = (ORANGE, BLUE, GREEN, PURPLE, RED)
_NAMES = {"iou": "IoU", "f1": "F1", "mae": "mean absolute error", "rmse": "root of the mean square"}


@dataclass(frozen=True)
class Quality:
    """Validation metrics to draw next to the loss, and a baseline.

    Attributes
    ----------
    metrics
        Label by name; None: all logged metrics.
    title, axis
        Title and axis label of the panel.
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
    path: Path,
    steps: Entries,
    validations: Entries,
    at: Sequence[float],
    validated_at: Sequence[float],
    quality: Quality | None = None,
) -> None:
    """Draw the loss of every step and epoch, validation loss and metrics, from the lines of a log. Local.

    Parameters
    ----------
    steps, validations
        Lines ``step`` (at least one) and ``validation``.
    at, validated_at
        Number of epochs after each step, and at each validation.
    quality
        Metrics and labels of the panel next to the loss; None: all logged metrics.
    """
    quality = quality or Quality()
    metrics = _metrics(validations) if quality.metrics is None else quality.metrics
    end = 1.02 * max([at[-1], *validated_at])
    with picture(path, 9.0 if metrics else 6.0, 3.4) as figure:
        panels = figure.subplots(1, 2 if metrics else 1, squeeze=False)[0]
        _draw_loss(panels[0], steps, validations, np.array(at), validated_at)
        panels[0].set(ylabel=quality.loss_axis)
        if metrics:
            _draw_quality(panels[1], validations, validated_at, metrics, quality)
        for axes in panels:
            axes.set(xlim=(0, end), xlabel="epoch")
            axes.grid(color=GREY, alpha=0.25, linewidth=0.6)


def draw_speed(path: Path, steps: Entries, epochs: Sequence[float]) -> None:
    """Draw samples per second and learning rate against `epochs`, the number of epochs after each step. Local."""
    at = _thinned(np.array(epochs))
    with picture(path, 9.0, 2.6) as figure:
        left, right = figure.subplots(1, 2)
        speed = np.array([s["samples_per_second"] for s in steps])
        left.plot(at, _thinned(speed), color=SKY, linewidth=0.7, label="each step")
        median = float(np.median(speed))
        left.axhline(median, color=BLUE, linewidth=1.2, label=f"median of all steps: {median:.4g} samples/s")
        # The fastest percent of the steps does not set the scale.
        left.set(ylabel="samples/s", title="Speed", ylim=(0, 1.1 * float(np.quantile(speed, 0.99))))
        left.legend(loc="lower right")
        right.plot(at, _thinned(np.array([s["learning_rate"] for s in steps])), color=DARK, linewidth=1.2)
        right.set(title="Learning rate", ylim=(0, None))
        for axes in (left, right):
            axes.set(xlim=(0, 1.02 * at[-1]), xlabel="epoch")
            axes.grid(color=GREY, alpha=0.25, linewidth=0.6)


def _draw_loss(
    axes: Any, steps: Entries, validations: Entries, at: np.ndarray, validated_at: Sequence[float]
) -> None:
    losses = np.array([s["loss"] for s in steps])
    axes.plot(_thinned(at), _thinned(losses), color=SKY, linewidth=0.7, alpha=0.7, label="training, each step")
    whole = np.ceil(at - 1e-9).astype(int)  # step k of the first epoch is at k / steps of an epoch
    # Only complete epochs.
    ended = [e for e in np.unique(whole) if e <= at[-1] + 1e-9]
    means = [losses[whole == e].mean() for e in ended]
    label = "training, mean of the epoch"
    # A mean is drawn in the middle of its epoch, over the losses that it averages.
    axes.plot(np.array(ended) - 0.5, means, color=BLUE, marker="o", markersize=3, label=label)
    if validations:
        y = [np.nan if v["loss"] is None else v["loss"] for v in validations]
        axes.plot(validated_at, y, color=ORANGE, marker="s", markersize=3, label="held-out samples")
    if losses.min() > 0 and losses.max() > 2 * losses.min():
        axes.set(yscale="log")
        axes.yaxis.set_major_formatter("{x:g}")
        # Labels at 2, 3 and 5 times a power of 10: all nine would overlap.
        axes.yaxis.set_minor_formatter(lambda x, _: f"{x:g}" if f"{x:.0e}"[0] in "235" else "")
    axes.set(title="Loss")
    axes.legend()


def _draw_quality(
    axes: Any, validations: Entries, at: Sequence[float], metrics: dict[str, str], quality: Quality
) -> None:
    most, least = 0.0, 1.0
    for colour, (name, label) in zip(_COLOURS, metrics.items()):
        values = [np.nan if v.get(name) is None else v[name] for v in validations]
        axes.plot(at, values, color=colour, marker="s", markersize=3, label=label)
        # Without NaN.
        known = [value for value in values if value == value]
        most, least = max([most, *known]), min([least, *known])
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
    if quality.baseline is not None:
        least = min(least, quality.baseline[1])
    # Scores near 1 differ in the last tenths, which an axis from 0 would hide.
    low = max(0.0, 1 - 1.1 * (1 - least)) if most <= 1 and least > 0.5 else 0.0
    axes.set(ylabel=quality.axis, ylim=(low, 1 if most <= 1 else None), title=quality.title)
    axes.legend(loc="upper left" if len(metrics) == 1 else "best")


def _metrics(validations: Entries) -> dict[str, str]:
    """Return names and labels of the logged metrics, at most as many as there are colors."""
    known = [name for v in validations for name, value in v.items() if isinstance(value, float)]
    names = [n for n in dict.fromkeys(known) if n not in ("loss", "time", "epoch", "step")]
    return {name: _NAMES.get(name, name) for name in names[: len(_COLOURS)]}


def _thinned(values: np.ndarray) -> np.ndarray:
    """Return `values`, or means of consecutive ones if there are more than `POINTS`."""
    run = -(-len(values) // POINTS)
    if run <= 1:
        return values
    # The last values, which fill no run, are left out, so that all points are means of as many values.
    whole = len(values) // run * run
    return values[:whole].reshape(-1, run).mean(axis=1)


#: Largest number of samples in a picture.
SHOWN = 4
MISSED, FALSE = ORANGE, PURPLE


@dataclass(frozen=True)
class Masks:
    """Data of a picture of masks, with one row per sample.

    Attributes
    ----------
    samples
        ``(n,)`` indices of the samples in the data set.
    truth, predicted
        ``(n, H, W)`` classes, integers or bool; `predicted` by name of the predictor. Positions whose truth is not a
        class are left blank.
    classes
        Number of classes. With two, a prediction is drawn as hits, misses and false alarms; with more, as classes.
    title
        Title of the true masks.
    image, image_title, image_unit
        ``(n, H, W)``: input of the network, its title, and the unit of its color bar; None: no input is shown.
    """

    samples: np.ndarray
    truth: np.ndarray
    predicted: Mapping[str, np.ndarray]
    classes: int = 2
    title: str = "truth"
    image: np.ndarray | None = None
    image_title: str = ""
    image_unit: str = ""


def iou(mask: np.ndarray, truth: np.ndarray, classes: int = 2) -> float:
    """Compute intersection over union of one sample, as in the scores of a run; 0 if it is not defined.

    Positions whose truth is not a class do not count.
    """
    counted, known = Confusion(classes), (truth >= 0) & (truth < classes)
    # One-hot, because the predicted class is the channel with the largest value.
    counted.add(np.eye(classes, dtype=np.float32)[mask[known].astype(int)], truth[known].astype(int)[..., None])
    return counted.scores()["iou"] or 0.0


def best_to_worst(ious: np.ndarray) -> np.ndarray:
    """Return the indices of at most `SHOWN` samples, evenly spaced from the best predicted to the worst.

    >>> best_to_worst(np.array([0.1, 0.9, 0.5])).tolist()
    [1, 2, 0]
    """
    order = np.argsort(-np.asarray(ious), kind="stable")
    # Positions repeat if there are fewer samples than SHOWN.
    return order[np.unique(np.linspace(0, len(order) - 1, SHOWN).round().astype(int))]


def draw_masks(path: Path, masks: Masks) -> None:
    """Draw a row per sample: input of the network, true mask, and predictions. Local."""
    panels = (masks.image is not None) + 1 + len(masks.predicted)
    with picture(path, 2.4 * panels, 0.5 + 2.35 * len(masks.samples)) as figure:
        grid = figure.subplots(len(masks.samples), panels, squeeze=False)
        for k, row in enumerate(grid):
            _draw_row(figure, row, masks, k)
        titles = [masks.image_title] * (masks.image is not None) + [masks.title, *masks.predicted]
        for axes, title in zip(grid[0], titles):
            axes.set_title(f"{title}\n{axes.get_title()}".strip())
        for axes in grid[-1]:
            axes.set_xlabel("column")
        if masks.classes == 2:
            keys = ((BLUE, "hit"), (MISSED, "missed"), (FALSE, "false alarm"))
            handles = [Patch(facecolor=colour, label=label) for colour, label in keys]
            figure.legend(handles=handles, loc="outside lower right", ncols=3)


def _draw_row(figure: Any, row: Any, masks: Masks, k: int) -> None:
    truth, panels = masks.truth[k].astype(int), list(row)
    row[0].set_ylabel(f"sample {masks.samples[k]}\nrow")
    if masks.image is not None:
        _draw_image(figure, panels.pop(0), masks.image[k], masks.image_unit)
    binary = masks.classes == 2
    colours = ListedColormap([LIGHT, DARK]) if binary else _colours(masks.classes)
    known = (truth >= 0) & (truth < masks.classes)
    _show(panels[0], np.ma.array(truth, mask=~known), colours, 1 if binary else masks.classes - 1)
    panels[0].set_title(f"{100 * np.mean(truth[known] if known.any() else 0):.0f} % of the cells" if binary else "")
    for panel, predicted in zip(panels[1:], masks.predicted.values()):
        mask = predicted[k].astype(int)
        if binary:
            # Indices of the colors: 0 correctly negative, 1 hit, 2 missed, 3 false alarm.
            outcome = np.where(truth, np.where(mask, 1, 2), np.where(mask, 3, 0))
            _show(panel, np.ma.array(outcome, mask=~known), ListedColormap([LIGHT, BLUE, MISSED, FALSE]), 3)
        else:
            _show(panel, np.ma.array(mask, mask=~known), colours, masks.classes - 1)
        panel.set_title(f"IoU {iou(mask, truth, masks.classes):.2f}")
    for panel in row:
        panel.set(xticks=[], yticks=[])
        panel.spines[:].set_visible(False)


def _colours(classes: int) -> Colormap:
    """Return a map of a color for each class; with more than ten classes, adjacent classes have similar colors."""
    return ListedColormap(CLASSES[:classes]) if classes <= len(CLASSES) else colormaps["turbo"]


def _draw_image(figure: Any, axes: Any, values: np.ndarray, unit: str) -> None:
    image = axes.imshow(values, cmap="cividis", origin="lower", interpolation="nearest")
    bar = figure.colorbar(image, ax=axes, shrink=0.8, pad=0.02)
    bar.ax.tick_params(labelsize=7, length=2)
    bar.outline.set_visible(False)
    bar.set_label(unit, fontsize=7.5, labelpad=1)


def _show(axes: Any, classes: np.ndarray, colours: Colormap, most: int) -> None:
    axes.imshow(classes, cmap=colours, vmin=0, vmax=most, origin="lower", interpolation="nearest")
