"""Results of an evaluation by class, for the page about a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..training.metrics import read_details
from .document import Block, Heading, Picture, TableBlock, Text
from .pictures import BLUE, GREY, picture

__all__ = ["quality"]

#: Largest number of classes in a table, and in a picture of the confusion matrix.
MOST_ROWS, MOST_CELLS = 50, 40


def quality(run: Path, path: Path | None, pictures: Path, left_out: list[str]) -> Iterator[Block]:
    """Yield tables and pictures of a file of `halograd evaluate --details`; by default ``evaluation.json`` of the run.

    Raises
    ------
    UserError
        The file is of another kind, or a given file is missing.
    """
    found = path or run / "evaluation.json"
    if not found.exists():
        if path is not None:
            raise UserError(f"--details: expected a file that `halograd evaluate --details` wrote, got no {path}")
        left_out.append(f"classes: no {found}; `halograd evaluate {run} --details {found}` writes it")
        return
    details = read_details(found)
    try:
        blocks = list(_blocks(details, pictures))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise UserError(
            f"details {found}: expected what `halograd evaluate --details` wrote, got a file that was changed; write "
            "it again"
        ) from error
    yield from blocks


def _blocks(details: Mapping[str, Any], pictures: Path) -> Iterator[Block]:
    yield Heading("Quality by class")
    yield Text(f"{details['count']:,} {details['samples']} samples, predicted by step {details['step']:,}.")
    for number, one in enumerate(details["predictions"]):
        scores = [(key, _number(value)) for key, value in one["scores"].items()]
        yield TableBlock([(str(one["name"]), ""), *scores])
        if one["kind"] != "classes":
            continue
        rows = one["by_class"]
        yield TableBlock([("class", "positions", "IoU", "precision", "recall", "F1"), *map(_row, rows[:MOST_ROWS])])
        if len(rows) > MOST_ROWS:
            yield Text(f"And {len(rows) - MOST_ROWS} more classes.")
        counts = np.array(one["confusion"], np.int64)
        if len(counts) <= MOST_CELLS:
            path = pictures / f"confusion{number}.png"
            draw_confusion(path, counts)
            yield Picture(path, "Confusion: share of each true class that was predicted as each class")
        if "calibration" in one:
            yield from _calibration(one["calibration"], pictures / f"calibration{number}.png")


def _row(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        str(row["class"]),
        f"{row['count']:,}",
        *(_number(row[key]) for key in ("iou", "precision", "recall", "f1")),
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _calibration(found: Mapping[str, Any], path: Path) -> Iterator[Block]:
    bins = [row for row in found["bins"] if row["count"]]
    if not bins:
        return
    draw_reliability(path, found["bins"])
    yield Text(f"Expected calibration error: **{_number(found['error'])}**")
    yield Picture(path, "Reliability: observed frequency against the predicted probability")
    head = ("predicted probability", "positions", "mean", "frequency")
    rows = [
        (
            f"{row['from']:.3f} to {row['to']:.3f}",
            f"{row['count']:,}",
            _number(row["probability"]),
            _number(row["frequency"]),
        )
        for row in bins
    ]
    yield TableBlock([head, *rows])


def draw_confusion(path: Path, counts: np.ndarray) -> None:
    """Draw the confusion matrix, as shares of each true class (rows); shares are written if there is space. Local."""
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
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
            colour = "black" if share > 0.5 else "white"
            axes.text(column, row, f"{share:.2f}", ha="center", va="center", color=colour, fontsize=6)


def draw_reliability(path: Path, bins: Sequence[Mapping[str, Any]]) -> None:
    """Draw the frequency over the predicted probability, and the number of positions in each bin. Local."""
    some = [row for row in bins if row["count"]]
    total = sum(row["count"] for row in some)
    with picture(path, 6.0, 3.0) as figure:
        left, right = figure.subplots(1, 2)
        left.plot([0, 1], [0, 1], color=GREY, linewidth=0.8, linestyle="--")
        left.plot([r["probability"] for r in some], [r["frequency"] for r in some], "o-", color=BLUE, markersize=3)
        left.set(xlabel="predicted probability", ylabel="frequency", xlim=(0, 1), ylim=(0, 1))
        middles = [(row["from"] + row["to"]) / 2 for row in some]
        right.bar(middles, [row["count"] / total for row in some], 1 / len(bins), color=BLUE)
        right.set(xlabel="predicted probability", ylabel="share of the positions", xlim=(0, 1))
