"""Network and logistic regression judged alike: threshold by the training cells, scores on the held-out ones."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from halograd.data import ChannelStatistics, Hdf5Dataset, split
from halograd.data.logistic import LogisticModel, best_threshold, fit, predict
from halograd.data.reading import open_to_read
from halograd.demo.files import Files
from halograd.demo.settings import DemoSettings
from halograd.dtensor.box import Box
from halograd.training.checkpoint import read_header
from halograd.training.folder import CheckpointFolder
from halograd.training.metrics import Confusion

__all__ = ["Judged", "Score", "judge"]

# A logit is all that a logistic model of weight 1 needs to be told.
OF_LOGITS = LogisticModel(np.ones(1), 0.0, 0.0, 0)


@dataclass(frozen=True)
class Score:
    """Scores of one predictor on the held-out cells, at `threshold` of its probability."""

    name: str
    threshold: float | None
    values: dict[str, float | None]

    @property
    def iou(self) -> float:
        return self.values["iou"] or 0.0


@dataclass(frozen=True)
class Judged:
    """Everything on the held-out samples, for tables and pictures.

    Attributes
    ----------
    scores
        Of the network, the logistic regression, and of the cells that are below the quality limit already.
    samples
        ``(n,)`` numbers of the held-out samples in the data set.
    density, truth, network, regression
        ``(n, H, W)``: float32 raw density, bool masks.
    training_cells, iterations
        What the regression was fitted to, and its Newton steps.
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


def judge(files: Files, settings: DemoSettings) -> Judged:
    """Fit the regression to the network's own inputs, and score both. Local; all inputs are in memory at once."""
    logits = _logits(files)
    with Hdf5Dataset(files.data) as dataset:
        training, held_out = split(len(dataset), settings.validation, settings.seed, dataset.groups)
        inputs, masks = _read(dataset)
        density, now = (inputs[held_out, ..., dataset.channel_names.index(n)] for n in ("Density", "scaledJacobian"))
    _statistics(files).apply(inputs)
    model = fit(lambda: ((inputs[i], masks[i]) for i in training))
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
    return Judged(scores, held_out, density, truth, network, regression, cells, model.iterations)


def _logits(files: Files) -> np.ndarray:
    """``(N, H, W, 1)``, by number of the sample."""
    with open_to_read(files.predictions) as file:
        order = np.argsort(file["sample"][:])
        return file["prediction"][:][order]


def _read(dataset: Hdf5Dataset) -> tuple[np.ndarray, np.ndarray]:
    n = len(dataset)
    inputs = np.empty((n, *dataset.sample_shape), np.float32)
    masks = np.empty((n, *dataset.target_shape), np.float32)
    dataset.read(range(n), Box.of_shape(inputs.shape), inputs)
    dataset.read_targets(range(n), Box.of_shape(masks.shape), masks)
    return inputs, masks[..., 0]


def _statistics(files: Files) -> ChannelStatistics:
    """Those the network was trained with."""
    checkpoint = CheckpointFolder(files.run / "checkpoints").latest
    assert checkpoint is not None, "the run was just finished"
    normalization = read_header(checkpoint)[0].normalization
    assert normalization is not None, "the configuration asks for it"
    return ChannelStatistics.from_state_dict(normalization)


def _limit(files: Files) -> float:
    with open_to_read(files.data) as file:
        return float(file.attrs["limit"])


def _scores(positive: np.ndarray, truth: np.ndarray) -> dict[str, float | None]:
    counted = Confusion(2, threshold=0.5)
    counted.add(positive.astype(np.float32), truth)
    return counted.scores()
