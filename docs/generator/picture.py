"""Draw the README's picture from runs of the demonstration: ``python -m docs.generator.picture DEMO ONE_RANK``.

DEMO is the folder of ``halograd demo``, and ONE_RANK a run of its configuration on one rank.
"""

from __future__ import annotations

import sys
from pathlib import Path

import h5py
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch
from PIL import Image

from halograd.data import Hdf5Dataset, split
from halograd.report.pictures import BLUE, DARK, GREY, LIGHT, ORANGE, PURPLE, best_to_worst, iou, picture
from halograd.training.log import read_log

PATH = Path(__file__).resolve().parents[1] / "assets" / "demo.png"


def draw(demo: Path, one_rank: Path) -> None:
    """Draw a sample in its blocks, its prediction, and the losses of the ranks and of one process."""
    with h5py.File(demo / "predictions.h5") as file, h5py.File(demo / "mesh.h5") as data:
        samples = file["sample"][...]
        guesses, truths = file["prediction"][..., 0] > 0, file["target"][..., 0] > 0.5
        held_out = np.flatnonzero(np.isin(samples, _held_out(demo)))
        row = held_out[best_to_worst(np.array([iou(guesses[k], truths[k]) for k in held_out]))[1]]
        density = data["inputs"][samples[row], ..., 0]
        outcome = np.where(truths[row], np.where(guesses[row], 1, 2), np.where(guesses[row], 3, 0))
    with picture(PATH, 9.6, 2.9) as figure:
        figure.set_dpi(100)
        left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1, 1.25))
        box = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1.5}
        middle_row = len(density) / 2 - 0.5
        left.imshow(density, cmap="cividis", origin="lower")
        left.set_title("a sample in two blocks,\none per rank")
        for name, height in (("rank 0", 0.25), ("rank 1", 0.75)):
            left.text(4, height * len(density), name, color=DARK, va="center", bbox=box)
        for column in (0.3, 0.7):  # halos travel both ways
            left.annotate(
                "",
                (column * len(density), middle_row + 9),
                (column * len(density), middle_row - 9),
                arrowprops={"arrowstyle": "<->", "color": DARK, "linewidth": 1.2},
            )
        left.text(0.5 * len(density), middle_row + 12, "halo", color=DARK, ha="center", va="bottom", bbox=box)
        middle.imshow(outcome, cmap=ListedColormap([LIGHT, BLUE, ORANGE, PURPLE]), vmin=0, vmax=3, origin="lower")
        middle.set_title("cells of the mesh that need\nrelaxation, as predicted")
        for axes in (left, middle):
            axes.axhline(middle_row, color=DARK, linewidth=1.2, linestyle="--")
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
        keys = ((BLUE, "hit"), (ORANGE, "missed"), (PURPLE, "false alarm"))
        handles = [Patch(facecolor=color, label=label) for color, label in keys]
        middle.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=3, columnspacing=0.8)
        for name, run, style in (
            ("4 ranks: 2 samples x 2 blocks", demo / "run", {"color": BLUE, "linewidth": 4, "alpha": 0.6}),
            ("1 process, uncut", one_rank, {"color": DARK, "marker": ".", "linestyle": "none"}),
        ):
            steps = read_log(run / "log.jsonl", "step")
            per_epoch = sum(entry["epoch"] == 0 for entry in steps)
            means = np.array([entry["loss"] for entry in steps]).reshape(-1, per_epoch).mean(axis=1)
            right.plot(np.arange(len(means)) + 1, means, label=name, **style)
        right.set(xlabel="epoch", ylim=(0, None))
        right.set_title("training loss")
        right.grid(color=GREY, alpha=0.25, linewidth=0.5)
        right.legend()
    Image.open(PATH).quantize(200).save(PATH, optimize=True)


def _held_out(demo: Path) -> np.ndarray:
    """Return the samples that the run has not trained on."""
    config = read_log(demo / "run" / "log.jsonl", "begin")[0]["config"]
    with Hdf5Dataset(config["data"]["path"]) as dataset:
        return split(len(dataset), config["data"]["validation"], config["training"]["seed"], dataset.groups)[1]


if __name__ == "__main__":
    draw(*map(Path, sys.argv[1:]))
