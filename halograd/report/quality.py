"""Results of an evaluation by class, for the page about a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..training.metrics import read_details
from .pictures import BLUE, GREY, picture

__all__ = ["quality"]

#: Largest number of classes in a table, and in a picture of the confusion matrix.
MOST_ROWS, MOST_CELLS = 50, 40


def quality(run: Path, path: Path | None, pictures: Path, left_out: list[str]) -> dict[str, Any] | None:
    """Return strings, tables and pictures of a file of `halograd evaluate --details`; None if there is no file.

    The default of `path` is ``evaluation.json`` of the run.

    Raises
    ------
    UserError
        The file is of another kind, or a given file is missing.
    """
    details_path = path or run / "evaluation.json"
    if not details_path.exists():
        if path is not None:
            raise UserError(f"--details: expected a file that `halograd evaluate --details` wrote, got no {path}")
        left_out.append(f"classes: no {details_path}; `halograd evaluate {run} --details {details_path}` writes it")
        return None
    details = read_details(details_path)
    try:
        # Several metrics of one prediction have the same confusion matrix, which is shown once.
        tables = [p.get("confusion") for p in details["predictions"]]
        return {
            "count": f"{details['count']:,}",
            "samples": details["samples"],
            "step": f"{details['step']:,}",
            "predictions": [
                _prediction(p, pictures, str(i), tables[i] in tables[:i]) for i, p in enumerate(details["predictions"])
            ],
        }
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise UserError(
            f"details {details_path}: expected what `halograd evaluate --details` wrote, got a file that was changed; "
            "write it again"
        ) from error


def _prediction(details: Mapping[str, Any], pictures: Path, number: str, repeats: bool) -> dict[str, Any]:
    """Return the scores of a prediction, with tables and pictures of its classes and calibration.

    These are left out if the confusion matrix `repeats` that of an earlier metric. `number` is a part of file names.
    """
    scores = [(key, _number(value)) for key, value in details["scores"].items()]
    rows, confusion, calibration = [], None, None
    if details["kind"] == "classes" and not repeats:
        rows = details["by_class"]
        counts = np.array(details["confusion"], np.int64)
        if len(counts) <= MOST_CELLS:
            confusion = pictures / f"confusion{number}.png"
            draw_confusion(confusion, counts)
        if "calibration" in details:
            calibration = _calibration(details["calibration"], pictures / f"calibration{number}.png")
    return {
        "name": details["name"],
        "scores": scores,
        "classes": [
            (row["class"], f"{row['count']:,}", *(_number(row[key]) for key in ("iou", "precision", "recall", "f1")))
            for row in rows[:MOST_ROWS]
        ],
        "more": len(rows) - MOST_ROWS,
        "confusion": confusion,
        "calibration": calibration,
    }


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _calibration(details: Mapping[str, Any], path: Path) -> dict[str, Any] | None:
    bins = [row for row in details["bins"] if row["count"]]
    if not bins:
        return None
    draw_reliability(path, details["bins"])
    rows = [
        (
            f"{row['from']:.3f} to {row['to']:.3f}",
            f"{row['count']:,}",
            _number(row["probability"]),
            _number(row["frequency"]),
        )
        for row in bins
    ]
    return {"error": _number(details["error"]), "picture": path, "bins": rows}


def draw_confusion(path: Path, counts: np.ndarray) -> None:
    """Draw the confusion matrix, as shares of each true class (rows); shares are written if there is space. Local."""
    # A class may be absent: its row has shares of 0.
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    # In inches: a margin for labels and color bar, and an edge per class.
    size = 2.2 + 0.32 * len(counts)
    with picture(path, size + 0.8, size) as figure:
        axes = figure.subplots()
        image = axes.imshow(shares, cmap="cividis", vmin=0, vmax=1)
        axes.set_xlabel("predicted class")
        axes.set_ylabel("true class")
        if len(counts) <= 12:
            axes.set(xticks=range(len(counts)), yticks=range(len(counts)))
        figure.colorbar(image, ax=axes, shrink=0.8)
        for (row, column), share in np.ndenumerate(shares) if len(counts) <= 12 else ():
            # The colors of cividis are light for large shares.
            colour = "black" if share > 0.5 else "white"
            axes.text(column, row, f"{share:.2f}", ha="center", va="center", color=colour, fontsize=6)


def draw_reliability(path: Path, bins: Sequence[Mapping[str, Any]]) -> None:
    """Draw the frequency against the predicted probability, and the share of the positions in each bin. Local."""
    filled = [row for row in bins if row["count"]]
    total = sum(row["count"] for row in filled)
    with picture(path, 6.0, 3.0) as figure:
        left, right = figure.subplots(1, 2)
        left.plot([0, 1], [0, 1], color=GREY, linewidth=0.8, linestyle="--")
        left.plot([r["probability"] for r in filled], [r["frequency"] for r in filled], "o-", color=BLUE, markersize=3)
        left.set(xlabel="predicted probability", ylabel="frequency", xlim=(0, 1), ylim=(0, 1))
        middles = [(row["from"] + row["to"]) / 2 for row in filled]
        right.bar(middles, [row["count"] / total for row in filled], 1 / len(bins), color=BLUE)
        right.set(xlabel="predicted probability", ylabel="share of the positions", xlim=(0, 1))
