"""Picture: predicted against true masks of held-out samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from halograd.data.lagrangian import CHANNELS, UNITS
from halograd.demo.baseline import Judged
from halograd.report.style import BLUE, DARK, LIGHT, ORANGE, PURPLE, picture
from halograd.training.metrics import Confusion

__all__ = ["draw_masks"]

TITLES = ("density", "cells that need relaxation", "network", "logistic regression")
MISSED, FALSE = ORANGE, PURPLE
SHOWN = 4
DENSITY_UNITS = dict(zip(CHANNELS, UNITS))["Density"].replace("^3", "³")


def draw_masks(path: Path, judged: Judged) -> None:
    """Some held-out samples, a row each: density, true mask, and both predictions by hit, miss and false alarm.

    The rows go in equal strides from the sample that the network predicts best to the one it predicts worst. Local.
    """
    order = np.argsort(-judged.ious, kind="stable")
    rows = order[np.unique(np.linspace(0, len(order) - 1, SHOWN).round().astype(int))]
    with picture(path, 9.6, 0.5 + 2.35 * len(rows)) as figure:
        grid = figure.subplots(len(rows), len(TITLES), squeeze=False)
        for axes, k in zip(grid, rows):
            _draw_row(figure, axes, judged, k)
        for axes, title in zip(grid[0], TITLES):
            axes.set_title(f"{title}\n{axes.get_title()}".strip())
        for axes in grid[-1]:
            axes.set_xlabel("mesh column")
        keys = ((BLUE, "hit"), (MISSED, "missed"), (FALSE, "false alarm"))
        handles = [Patch(facecolor=colour, label=label) for colour, label in keys]
        figure.legend(handles=handles, loc="outside lower right", ncols=3)


def _draw_row(figure: Any, axes: Any, judged: Judged, k: int) -> None:
    density = judged.density[k]
    image = axes[0].imshow(density, cmap="cividis", origin="lower", interpolation="nearest")
    bar = figure.colorbar(image, ax=axes[0], shrink=0.8, pad=0.02)
    bar.ax.tick_params(labelsize=7, length=2)
    bar.outline.set_visible(False)
    bar.set_label(DENSITY_UNITS, fontsize=7.5, labelpad=1)
    axes[0].set_ylabel(f"sample {judged.samples[k]}\nmesh row")
    _show(axes[1], judged.truth[k].astype(int), ListedColormap([LIGHT, DARK]), 1)
    axes[1].set_title(f"{100 * judged.truth[k].mean():.0f} % of the cells")
    for panel, mask in zip(axes[2:], (judged.network[k], judged.regression[k])):
        outcome = np.where(judged.truth[k], np.where(mask, 1, 2), np.where(mask, 3, 0))
        _show(panel, outcome, ListedColormap([LIGHT, BLUE, MISSED, FALSE]), 3)
        panel.set_title(f"IoU {_iou(mask, judged.truth[k]):.2f}")
    for panel in axes:
        panel.set(xticks=[], yticks=[])
        panel.spines[:].set_visible(False)


def _show(axes: Any, classes: np.ndarray, colours: ListedColormap, most: int) -> None:
    axes.imshow(classes, cmap=colours, vmin=0, vmax=most, origin="lower", interpolation="nearest")


def _iou(mask: np.ndarray, truth: np.ndarray) -> float:
    counted = Confusion(2, threshold=0.5)
    counted.add(mask.astype(np.float32), truth)
    return counted.scores()["iou"] or 0.0
