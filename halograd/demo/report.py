"""The report of a demonstration: what was trained, how well it predicts, where the time went."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from halograd.data.atomic import atomic_path
from halograd.data.lagrangian import CHANNELS, UNITS
from halograd.demo.baseline import Judged, Score
from halograd.demo.clock import Clock, Stage
from halograd.demo.files import Files
from halograd.demo.machine import describe_machine
from halograd.demo.settings import DemoSettings
from halograd.report.curves import Quality, draw_curves
from halograd.report.document import Block, Code, Heading, Picture, Table, Text, to_html, to_markdown
from halograd.report.lanes_picture import draw_timeline
from halograd.report.masks import Masks, best_to_worst, draw_masks
from halograd.report.phases import about_timeline, hidden_text, phase_tables
from halograd.training.log import read_log

__all__ = ["draw_pictures", "read_phases", "write_report"]

COLUMNS = {"iou": "IoU", "f1": "F1", "precision": "precision", "recall": "recall", "accuracy": "accuracy"}
DENSITY_UNIT = dict(zip(CHANNELS, UNITS))["Density"].replace("^3", "³")


def read_phases(files: Files) -> dict[str, Any]:
    """Steps, sums of seconds by phase and overlap of the run, as rank 0 has measured them. Local."""
    return read_log(files.run / "log.jsonl", "phases")[-1]


def draw_pictures(files: Files, judged: Judged) -> None:
    """Write ``loss.png``, ``predictions.png`` and ``timeline.png``. Local."""
    log = files.run / "log.jsonl"
    steps, held_out = read_log(log, "step"), read_log(log, "validation")
    quality = Quality(
        {"iou": "network, threshold 0.5"},
        "Cells found in held-out simulations",
        "intersection over union",
        ("logistic regression per cell", judged.scores[1].iou),
        "weighted cross-entropy [nat/cell]",
    )
    draw_curves(files.out / "loss.png", steps, held_out, held_out[0]["step"], quality)
    draw_masks(files.out / "predictions.png", _masks(judged))
    title = f"Two training steps · {hidden_text(read_phases(files)['phases'])}"
    draw_timeline(files.out / "timeline.png", files.run / "timeline.json", title)


def _masks(judged: Judged) -> Masks:
    """Some held-out samples, from the one that the network predicts best to the one it predicts worst."""
    rows = best_to_worst(judged.ious)
    return Masks(
        judged.samples[rows],
        judged.truth[rows],
        {"network": judged.network[rows], "logistic regression": judged.regression[rows]},
        title="cells that need relaxation",
        image=judged.density[rows],
        image_title="density",
        image_unit=DENSITY_UNIT,
    )


def write_report(files: Files, settings: DemoSettings, judged: Judged, headline: str, clock: Clock) -> None:
    """Write ``report.md`` and ``report.html`` with the pictures that are there. Local."""
    blocks = [
        Heading("halograd demo: which cells of a mesh need relaxation?", 1),
        *_summary(files, settings, judged, headline),
        *_quality(judged, files.out),
        *_timeline(read_phases(files), files.out),
        *_times(clock),
        *_what_next(files, settings),
    ]
    for path, text in ((files.report, to_markdown(blocks)), (files.page, to_html(blocks))):
        with atomic_path(path) as partial:
            partial.write_text(text, encoding="utf-8")


def _summary(files: Files, settings: DemoSettings, judged: Judged, headline: str) -> Iterator[Block]:
    network, regression, _ = judged.scores
    yield Text(
        f"**IoU on held-out simulations: network {network.iou:.3f}, "
        f"logistic regression on the same 18 channels {regression.iou:.3f}.**"
    )
    yield Text(
        f"{settings.samples} samples of {settings.resolution} x {settings.resolution} cells, two of each simulation; "
        f"{len(judged.samples)} samples of simulations that the training has not seen are held out. "
        f"{settings.ranks} MPI ranks share every batch of {settings.batch} samples: {settings.sample} parts of the "
        f"batch x {settings.height} parts of the rows of each sample."
    )
    yield Code(headline)


def _quality(judged: Judged, out: Path) -> Iterator[Block]:
    yield Heading("Prediction against truth")
    yield Table([("on held-out cells", "threshold", *COLUMNS.values()), *map(_score, judged.scores)])
    yield Text(
        f"The regression was fitted to all {judged.training_cells:,} training cells until it converged "
        f"({judged.iterations} Newton steps), on inputs normalised as those of the network. Both thresholds are those "
        "with the best IoU on the training cells."
    )
    yield Picture(out / "predictions.png", "Predicted against true masks of held-out samples, from best to worst")
    yield Text("Rows go from the held-out sample that the network predicts best to the one it predicts worst.")
    yield Heading("Training")
    yield Picture(out / "loss.png", "Loss and IoU over the epochs")


def _score(score: Score) -> tuple[str, ...]:
    threshold = "-" if score.threshold is None else f"{score.threshold:.2f}"
    return score.name, threshold, *("-" if score.values[c] is None else f"{score.values[c]:.3f}" for c in COLUMNS)


def _timeline(entry: dict[str, Any], out: Path) -> Iterator[Block]:
    yield Heading("Timeline")
    if (out / "timeline.png").exists():
        yield Picture(out / "timeline.png", "What each rank did during two steps")
    yield about_timeline("run/timeline.json")
    yield from phase_tables(entry)


def _times(clock: Clock) -> Iterator[Block]:
    def row(stage: Stage) -> tuple[str, ...]:
        return stage.name, f"{stage.seconds:.1f}", f"{stage.cpu:.1f}"

    yield Heading("Times and machine")
    yield Table([("stage", "wall [s]", "CPU [s]"), *map(row, (*clock.stages, clock.total))])
    yield Table([("machine", ""), *describe_machine()])


def _what_next(files: Files, settings: DemoSettings) -> Iterator[Block]:
    yield Heading("What next")
    yield Text("Change `config.toml` and train again, on any number of ranks, into a folder of your own:")
    mine = files.out / "mine"
    yield Code(
        f"mpiexec -n {settings.ranks} halograd train {files.config} --set output.directory={mine}\n"
        f"mpiexec -n {settings.ranks} halograd evaluate {mine}"
    )
