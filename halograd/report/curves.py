"""Picture: how the loss fell and the quality of the prediction rose."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from halograd.report.style import BLUE, DARK, GREY, ORANGE, SKY, picture
from halograd.training.log import read_log

__all__ = ["draw_curves"]


def draw_curves(path: Path, log: Path, regression_iou: float) -> None:
    """Loss of every step and epoch, validation loss and IoU of every epoch, from the log of a run. Local."""
    steps, held_out = read_log(log, "step"), read_log(log, "validation")
    per_epoch = held_out[0]["step"]
    at = np.array([s["step"] for s in steps]) / per_epoch
    losses = np.array([s["loss"] for s in steps])
    epochs = np.array([v["epoch"] + 1 for v in held_out])
    means = [np.mean([s["loss"] for s in steps if s["epoch"] == v["epoch"]]) for v in held_out]
    with picture(path, 9.0, 3.4) as figure:
        left, right = figure.subplots(1, 2)
        left.plot(at, losses, color=SKY, linewidth=0.7, alpha=0.7, label="training, each step")
        left.plot(epochs - 0.5, means, color=BLUE, marker="o", markersize=3, label="training, mean of the epoch")
        left.plot(
            epochs, [v["loss"] for v in held_out], color=ORANGE, marker="s", markersize=3, label="held-out simulations"
        )
        left.set(yscale="log", xlabel="epoch", ylabel="weighted cross-entropy [nat/cell]", title="Loss")
        left.yaxis.set_major_formatter("{x:g}")
        left.yaxis.set_minor_formatter(lambda x, _: f"{x:g}" if f"{x:.0e}"[0] in "235" else "")
        left.legend()
        iou = [v["iou"] if v["iou"] is not None else np.nan for v in held_out]
        right.plot(epochs, iou, color=ORANGE, marker="s", markersize=3, label="network, threshold 0.5")
        right.axhline(regression_iou, color=DARK, linestyle="--", linewidth=1.2)
        right.annotate(
            f"logistic regression per cell: {regression_iou:.3f}",
            (1, regression_iou),
            xycoords=("axes fraction", "data"),
            xytext=(-2, -4),
            textcoords="offset points",
            ha="right",
            va="top",
            color=DARK,
        )
        right.set(
            xlabel="epoch", ylabel="intersection over union", ylim=(0, 1), title="Cells found in held-out simulations"
        )
        right.legend(loc="upper left")
        for axes in (left, right):
            axes.set_xlim(0, epochs[-1] * 1.02)
            axes.grid(color=GREY, alpha=0.25, linewidth=0.6)
