"""How the pictures look: colours that colour-blind people can tell apart (Okabe and Ito), quiet axes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from halograd.data.atomic import atomic_path

__all__ = [
    "BLUE",
    "CLASSES",
    "DARK",
    "GREEN",
    "GREY",
    "LIGHT",
    "ORANGE",
    "PURPLE",
    "RED",
    "SILVER",
    "SKY",
    "YELLOW",
    "picture",
]

BLUE, SKY, GREEN, ORANGE, RED, PURPLE = "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7"
YELLOW, DARK, GREY, SILVER, LIGHT = "#F0E442", "#333333", "#9A9A9A", "#C4C4C4", "#F4F4F4"
#: Of the classes of a segmentation, the first is the background.
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
    """A figure of this size [inch], written as PNG to `path` when the block ends. Local; needs no display."""
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.06))
        yield figure
        with atomic_path(path) as partial:
            figure.savefig(partial, format="png", facecolor="white")
