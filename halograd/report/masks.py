"""Picture: predicted against true masks of samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import Colormap, ListedColormap
from matplotlib.patches import Patch

from halograd.report.style import BLUE, CLASSES, DARK, LIGHT, ORANGE, PURPLE, picture
from halograd.training.metrics import Confusion

__all__ = ["SHOWN", "Masks", "best_to_worst", "draw_masks", "iou"]

#: Samples of a picture.
SHOWN = 4
MISSED, FALSE = ORANGE, PURPLE


@dataclass(frozen=True)
class Masks:
    """What a picture shows: a row per sample.

    Attributes
    ----------
    samples
        ``(n,)`` numbers in the data set.
    truth, predicted
        ``(n, H, W)`` classes, integers or bool; by name of the predictor.
    classes
        How many there are. With two, a prediction is drawn as hit, missed and false alarm, with more as it is.
    title
        Of the true masks.
    image, image_title, image_unit
        ``(n, H, W)``: what the network sees, if it is to be shown.
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
    """Intersection over union of one sample, as in the scores of a run; 0 where it is not defined."""
    counted = Confusion(classes)
    counted.add(np.eye(classes, dtype=np.float32)[mask.astype(int)], truth.astype(int)[..., None])
    return counted.scores()["iou"] or 0.0


def best_to_worst(ious: np.ndarray) -> np.ndarray:
    """Numbers of at most `SHOWN` samples, in equal strides from the best predicted to the worst.

    >>> best_to_worst(np.array([0.1, 0.9, 0.5])).tolist()
    [1, 2, 0]
    """
    order = np.argsort(-np.asarray(ious), kind="stable")
    return order[np.unique(np.linspace(0, len(order) - 1, SHOWN).round().astype(int))]


def draw_masks(path: Path, masks: Masks) -> None:
    """A row per sample: what the network sees, the true mask, and the predictions. Local."""
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
    _show(panels[0], truth, colours, 1 if binary else masks.classes - 1)
    panels[0].set_title(f"{100 * truth.mean():.0f} % of the cells" if binary else "")
    for panel, predicted in zip(panels[1:], masks.predicted.values()):
        mask = predicted[k].astype(int)
        if binary:
            outcome = np.where(truth, np.where(mask, 1, 2), np.where(mask, 3, 0))
            _show(panel, outcome, ListedColormap([LIGHT, BLUE, MISSED, FALSE]), 3)
        else:
            _show(panel, mask, colours, masks.classes - 1)
        panel.set_title(f"IoU {iou(mask, truth, masks.classes):.2f}")
    for panel in row:
        panel.set(xticks=[], yticks=[])
        panel.spines[:].set_visible(False)


def _colours(classes: int) -> Colormap:
    """A colour for each class; with many of them, neighbors look alike."""
    return ListedColormap(CLASSES[:classes]) if classes <= len(CLASSES) else colormaps["turbo"]


def _draw_image(figure: Any, axes: Any, values: np.ndarray, unit: str) -> None:
    image = axes.imshow(values, cmap="cividis", origin="lower", interpolation="nearest")
    bar = figure.colorbar(image, ax=axes, shrink=0.8, pad=0.02)
    bar.ax.tick_params(labelsize=7, length=2)
    bar.outline.set_visible(False)
    bar.set_label(unit, fontsize=7.5, labelpad=1)


def _show(axes: Any, classes: np.ndarray, colours: Colormap, most: int) -> None:
    axes.imshow(classes, cmap=colours, vmin=0, vmax=most, origin="lower", interpolation="nearest")
