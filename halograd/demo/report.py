"""Report of a demonstration: quality of network and baseline, times by stage, and the machine."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from ..data import ChannelStatistics, Hdf5Dataset, split
from ..data.disk import open_to_read
from ..data.lagrangian import CHANNELS, UNITS
from ..data.logistic import LogisticModel, best_threshold, fit, predict
from ..data.storage import dataset_of
from ..dtensor.box import Box
from ..findings import probe_mpi
from ..limits import usable_cores
from ..report.document import write_html
from ..report.pictures import Masks, Quality, best_to_worst, draw_curves, draw_masks
from ..report.timeline import draw_timeline, hidden_text, phase_rows
from ..training.checkpoint import read_header
from ..training.checkpoints import CheckpointFolder
from ..training.log import read_log
from ..training.metrics import Confusion
from ..version import __version__
from .files import DemoSettings, Files

__all__ = ["Clock", "HeldOutResults", "draw_pictures", "score_held_out", "write_report"]


@dataclass(frozen=True)
class StageTimes:
    """Wall-clock time of a stage, and CPU time of this process and the jobs it started [s]."""

    name: str
    seconds: float
    cpu: float


@dataclass
class Clock:
    """Times of the stages of a demonstration, in the order in which they end."""

    stages: list[StageTimes] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure the time of the ``with`` block as one stage."""
        begin, cpu = time.perf_counter(), _cpu()
        yield
        self.stages.append(StageTimes(name, time.perf_counter() - begin, _cpu() - cpu))

    @property
    def total(self) -> StageTimes:
        return StageTimes("total", sum(s.seconds for s in self.stages), sum(s.cpu for s in self.stages))


def _cpu() -> float:
    times = os.times()
    # Ranks of a job are children of mpiexec; their times count once they have ended.
    return times.user + times.system + times.children_user + times.children_system


# A logistic model of weight 1 turns a logit into a probability.
OF_LOGITS = LogisticModel(np.ones(1), 0.0, 0.0, 0)


@dataclass(frozen=True)
class Score:
    """Scores of one predictor on the held-out cells, with `threshold` on its probabilities."""

    name: str
    threshold: float | None
    values: dict[str, float | None]

    @property
    def iou(self) -> float:
        return self.values["iou"] or 0.0


@dataclass(frozen=True)
class HeldOutResults:
    """Results on the held-out samples, for tables and pictures.

    Attributes
    ----------
    scores
        Scores of the network, of the logistic regression, and of the cells that are already below the quality limit.
    samples
        ``(n,)`` indices of the held-out samples in the data set.
    density, truth, network, regression
        ``(n, H, W)``: float32 raw density, bool masks.
    training_cells, iterations
        Number of cells to which the regression was fitted, and number of Newton steps.
    """

    scores: tuple[Score, Score, Score]
    samples: np.ndarray
    density: np.ndarray
    truth: np.ndarray
    network: np.ndarray
    regression: np.ndarray
    training_cells: int
    iterations: int

    @cached_property
    def ious(self) -> np.ndarray:
        """IoU ``(n,)`` of the network on each held-out sample."""
        return np.array([_scores(p, t)["iou"] or 0.0 for p, t in zip(self.network, self.truth)])


def score_held_out(files: Files, settings: DemoSettings) -> HeldOutResults:
    """Fit the regression to the network's inputs; score network, regression and the quality limit on held-out samples.

    Local; holds all inputs in memory.
    """
    logits = _logits(files)
    with Hdf5Dataset(files.data) as dataset:
        training, held_out = split(len(dataset), settings.validation, settings.seed, dataset.groups)
        (inputs, masks), names = _read(dataset), dataset.fields["x"].channel_names
        density, now = (inputs[held_out, ..., names.index(n)] for n in ("Density", "scaledJacobian"))
    # In place, so that network and regression have the same inputs; density and quality were copied before.
    _statistics(files).apply(inputs)
    # A function, because each Newton step is another pass over the data.
    model = fit(lambda: ((inputs[i], masks[i]) for i in training))
    # Thresholds are chosen on training samples: on held-out ones they would make the scores too good.
    cut, _ = best_threshold(model, lambda: ((inputs[i], masks[i]) for i in training))
    network_cut, _ = best_threshold(OF_LOGITS, lambda: ((logits[i], masks[i]) for i in training))
    truth = masks[held_out] > 0.5
    network = np.stack([predict(OF_LOGITS, logits[i]) > network_cut for i in held_out])
    regression = np.stack([predict(model, inputs[i]) > cut for i in held_out])
    scores = (
        Score("network", network_cut, _scores(network, truth)),
        Score("logistic regression per cell", cut, _scores(regression, truth)),
        Score("cells below the quality limit already", None, _scores(now < _limit(files), truth)),
    )
    cells = len(training) * masks[0].size
    return HeldOutResults(scores, held_out, density, truth, network, regression, cells, model.iterations)


def _logits(files: Files) -> np.ndarray:
    """Return the logits ``(N, H, W, 1)``, by index of the sample."""
    with open_to_read(files.predictions) as file:
        # The file need not have the samples in the order of their indices.
        order = np.argsort(dataset_of(file, "sample")[:])
        return dataset_of(file, "prediction")[:][order]


def _read(dataset: Hdf5Dataset) -> tuple[np.ndarray, np.ndarray]:
    n, scores = len(dataset), []
    for name, own_field in dataset.fields.items():
        scores.append(np.empty((n, *own_field.shape), np.float32))
        dataset.read(name, range(n), Box.of_shape(scores[-1].shape), scores[-1])
    # Inputs come first in `fields`.
    inputs, masks = scores
    return inputs, masks[..., 0]


def _statistics(files: Files) -> ChannelStatistics:
    """Return the normalization of the network's training."""
    checkpoint = CheckpointFolder(files.run / "checkpoints").latest
    assert checkpoint is not None, "the run was just finished"
    normalization = read_header(checkpoint)[0].normalization
    assert normalization is not None, "the configuration normalizes"
    return ChannelStatistics.from_state_dict(normalization["x"])


def _limit(files: Files) -> float:
    with open_to_read(files.data) as file:
        return float(file.attrs["limit"])


def _scores(positive: np.ndarray, truth: np.ndarray) -> dict[str, float | None]:
    # 0 or 1 instead of probabilities: the threshold of the predictor was applied before.
    counted = Confusion(2, threshold=0.5)
    counted.add(positive.astype(np.float32), truth)
    return counted.scores()


def describe_machine() -> list[tuple[str, str]]:
    """Return names and values of the machine's properties that determine times. Local."""
    return [
        ("processor", _processor()),
        ("cores for this process", str(usable_cores().count)),
        ("memory", _memory()),
        ("system", platform.platform()),
        ("halograd", __version__),
        ("Python", platform.python_version()),
        *((finding.name, finding.value) for finding in probe_mpi() if finding.status == "ok"),
        *_versions("numpy", "h5py", "onednn-cpu-gomp"),
    ]


def _processor() -> str:
    # On Linux, `platform.processor` returns the architecture, or nothing.
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory() -> str:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return "unknown"
    return f"{total / 2**30:.1f} GiB"


def _versions(*names: str) -> Iterator[tuple[str, str]]:
    for name in names:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"


COLUMNS = {"iou": "IoU", "f1": "F1", "precision": "precision", "recall": "recall", "accuracy": "accuracy"}
DENSITY_UNIT = dict(zip(CHANNELS, UNITS))["Density"].replace("^3", "³")


def read_phases(files: Files) -> dict[str, Any]:
    """Return the log entry with steps, seconds by phase and overlap of the run, measured on rank 0. Local."""
    return read_log(files.run / "log.jsonl", "phases")[-1]


def draw_pictures(files: Files, results: HeldOutResults) -> None:
    """Write ``loss.png``, ``predictions.png`` and, if the trace has enough steps, ``timeline.png``. Local."""
    log = files.run / "log.jsonl"
    steps, held_out = read_log(log, "step"), read_log(log, "validation")
    quality = Quality(
        {"iou": "network, threshold 0.5"},
        "Cells found in held-out simulations",
        "intersection over union",
        ("logistic regression per cell", results.scores[1].iou),
        "weighted cross-entropy [nat/cell]",
    )
    # In epochs: the step of the first validation is the number of steps per epoch.
    at, validated_at = ([entry["step"] / held_out[0]["step"] for entry in entries] for entries in (steps, held_out))
    draw_curves(files.out / "loss.png", steps, held_out, at, validated_at, quality)
    draw_masks(files.out / "predictions.png", _masks(results))
    title = f"Two training steps · {hidden_text(read_phases(files)['phases'])}"
    draw_timeline(files.out / "timeline.png", files.run / "timeline.json", title)


def _masks(results: HeldOutResults) -> Masks:
    """Return the masks of some held-out samples, from the best predicted to the worst."""
    rows = best_to_worst(results.ious)
    return Masks(
        results.samples[rows],
        results.truth[rows],
        {"network": results.network[rows], "logistic regression": results.regression[rows]},
        title="cells that need relaxation",
        image=results.density[rows],
        image_title="density",
        image_unit=DENSITY_UNIT,
    )


def write_report(files: Files, settings: DemoSettings, results: HeldOutResults, headline: str, clock: Clock) -> None:
    """Write ``report.html`` with the existing pictures. Local."""
    timeline = files.out / "timeline.png"
    network, regression, _ = results.scores
    write_html(
        "demo.html.j2",
        files.report,
        network=network,
        regression=regression,
        channels=len(CHANNELS),
        settings=settings,
        held_out=len(results.samples),
        headline=headline,
        results=results,
        scores=[("on held-out cells", "threshold", *COLUMNS.values()), *map(_score, results.scores)],
        out=files.out,
        config=files.config,
        timeline_picture=timeline if timeline.exists() else None,
        phases=phase_rows(read_phases(files)),
        times=[(s.name, f"{s.seconds:.1f}", f"{s.cpu:.1f}") for s in (*clock.stages, clock.total)],
        machine=describe_machine(),
    )


def _score(score: Score) -> tuple[str, ...]:
    threshold = "-" if score.threshold is None else f"{score.threshold:.2f}"
    return score.name, threshold, *("-" if score.values[c] is None else f"{score.values[c]:.3f}" for c in COLUMNS)
