"""Metrics that are exact across ranks: every rank counts its own block, one sum joins the counts.

Counts are integers, so a metric does not depend on the decomposition in any digit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from halograd.layers.loss import Loss
from halograd.layers.value import Value
from halograd.training.executor import Executor

__all__ = ["Confusion", "Errors", "Evaluation", "scores"]


class Confusion:
    """Confusion counts of a classification of samples, pixels or cells.

    Attributes
    ----------
    counts
        ``(classes, classes)`` int64: rows are the true classes, columns the predicted ones.
    """

    def __init__(self, classes: int) -> None:
        if classes < 2:
            raise ValueError(f"classes: expected at least 2, got {classes}")
        self.classes = classes
        self.counts = np.zeros((classes, classes), np.int64)

    def add(self, prediction: Any, target: Any) -> None:
        """Count a block. Local.

        Parameters
        ----------
        prediction
            ``(..., C)`` scores, the largest of which is the class; or ``(..., 1)`` logits of the second of
            two classes (positive means yes).
        target
            ``(..., 1)`` class indices (those outside ``[0, classes)`` are not counted), or for logits the
            truth between 0 and 1 (yes from 0.5 on).
        """
        if not prediction.size:
            return
        if prediction.shape[-1] == 1:
            guess = (prediction[..., 0] > 0).astype(np.int64)
            truth = (target[..., 0] >= 0.5).astype(np.int64)
        else:
            guess = np.argmax(prediction, axis=-1)
            truth = target[..., 0].astype(np.int64)
        counted = (truth >= 0) & (truth < self.classes)
        index = truth[counted] * self.classes + guess[counted]
        self.counts += np.bincount(index, minlength=self.classes**2).reshape(self.counts.shape)

    def scores(self) -> dict[str, float | None]:
        """What follows from the counts."""
        return scores(self.counts)


def scores(counts: np.ndarray) -> dict[str, float | None]:
    """Accuracy, IoU, F1, precision and recall of confusion counts; None where nothing is defined.

    Of the second class if there are two, else the mean over the classes that occur or were predicted.

    >>> scores(np.array([[5, 1], [2, 4]]))["iou"]
    0.5714285714285714
    """
    total = int(counts.sum())
    hits = np.diagonal(counts).astype(np.float64)
    true, guessed = counts.sum(axis=1), counts.sum(axis=0)
    chosen = slice(1, 2) if len(counts) == 2 else slice(None)
    return {
        "accuracy": float(hits.sum() / total) if total else None,
        "iou": _mean(hits[chosen], (true + guessed - hits)[chosen]),
        "f1": _mean(2 * hits[chosen], (true + guessed)[chosen]),
        "precision": _mean(hits[chosen], guessed[chosen]),
        "recall": _mean(hits[chosen], true[chosen]),
    }


def _mean(above: np.ndarray, below: np.ndarray) -> float | None:
    defined = below > 0
    return float(np.mean(above[defined] / below[defined])) if defined.any() else None


class Errors:
    """Sums of differences, for regression.

    Attributes
    ----------
    counts
        ``(3,)`` float64: elements, sum of absolute differences, sum of squares.
    """

    def __init__(self) -> None:
        self.counts = np.zeros(3)

    def add(self, prediction: Any, target: Any) -> None:
        """Add a block. Local."""
        difference = prediction.astype(np.float64) - target
        self.counts += (difference.size, np.abs(difference).sum(), np.square(difference).sum())

    def scores(self) -> dict[str, float | None]:
        """Mean absolute error and root of the mean square."""
        n, absolute, squares = self.counts
        return {"mae": absolute / n if n else None, "rmse": float(np.sqrt(squares / n)) if n else None}


class Evaluation:
    """Mean loss and metrics over many batches of one executor. Collective over its communicator.

    ::

        evaluation.begin()
        for every batch: fill the inputs; executor.forward(training=False); evaluation.add()
        result = evaluation.finish()

    Prediction and target are what the loss layer reads; samples beyond ``executor.mode.valid`` do not
    count. Communication: the loss per batch, the counts once.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._prediction, self._target, kind = _judged(executor)
        channels = self._prediction.layout.shape[-1]
        self.counted: Confusion | Errors = Errors() if "MSE" in kind else Confusion(max(2, channels))
        self._reduction = executor.comm.reduction(self.counted.counts, kind="metrics")
        self._loss, self._samples = 0.0, 0

    def begin(self) -> None:
        """Forget what was counted."""
        self.counted.counts[...] = 0
        self._loss, self._samples = 0.0, 0

    def add(self) -> None:
        """Count the batch that was just computed."""
        valid = self._executor.mode.valid
        self._loss += self._executor.loss_value() * valid
        self._samples += valid
        box = self._prediction.box
        count = max(0, min(box.stop[0], valid) - box.start[0])
        if count and box.size:
            self.counted.add(self._prediction.array[:count], self._target.array[:count])

    def finish(self) -> dict[str, float | None]:
        """Mean loss per sample and the metrics, the same on all ranks."""
        self._reduction.run()
        loss = self._loss / self._samples if self._samples else None
        return {"loss": loss, **self.counted.scores()}

    def close(self) -> None:
        """Free the reduction. Collective."""
        self._reduction.close()


def _judged(executor: Executor) -> tuple[Value, Value, str]:
    for step in executor.steps:
        if isinstance(step.layer, Loss):
            return step.inputs[0], step.inputs[1], step.layer.kind
    raise ValueError(f"network {executor.network.name!r} has no loss layer, so there is nothing to compare with")
