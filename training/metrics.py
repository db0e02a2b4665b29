"""Metrics that are exact across ranks: every rank counts its own block, one sum joins the counts.

Counts are integers, so a metric does not depend on the decomposition in any digit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..device import is_low
from ..layers.needs import operand_blocks
from ..layers.targets import Judgement
from ..program.views import Value, View
from .calibration import Calibration
from .details import by_class
from .executor import Executor
from .mean_loss import MeanLoss
from .probabilities import sigmoid, softmax

__all__ = ["Confusion", "Errors", "Evaluation", "JudgedPair", "judged", "scores"]


class Confusion:
    """Confusion counts of a classification of samples, pixels or cells.

    Parameters
    ----------
    classes
        Number of classes.
    threshold
        Given: two classes, each prediction above it means yes, each target from 0.5 on (targets are cut and
        shaped as predictions, several channels are several questions). None: the class is the channel of the
        largest prediction; targets are class indices ``(..., 1)`` or one channel per class.
    ignored
        Class index of positions that do not count.
    probabilities
        Whether predictions are probabilities already, not logits: for their calibration.

    Attributes
    ----------
    counts
        ``(classes, classes)`` int64: rows are the true classes, columns the predicted ones.
    calibration
        Where it is set, probabilities are counted too.
    """

    calibration: Calibration | None = None

    def __init__(
        self,
        classes: int,
        threshold: float | None = None,
        ignored: int | None = None,
        probabilities: bool = False,
    ) -> None:
        if classes < 2:
            raise ValueError(f"classes: expected at least 2, got {classes}")
        self.classes, self.threshold, self.ignored = classes, threshold, ignored
        self.probabilities = probabilities
        self.counts = np.zeros((classes, classes), np.int64)

    def add(self, prediction: Any, target: Any, weights: Any = None) -> None:
        """Count a block ``(N, ..., C)``, but for what has the weight 0 (:func:`counted`). Local."""
        with np.errstate(invalid="ignore"):  # what does not count may be NaN
            guess, truth = self._classes(prediction, target)
        some = np.ones(truth.shape, np.bool_)
        if self.ignored is not None:
            some = (truth if self.threshold is None else target) != self.ignored
        if weights is not None:
            own = counted(weights, prediction.shape)
            some &= own if truth.ndim == prediction.ndim else own[..., 0]
        guess, truth = guess[some], truth[some]
        index = truth * self.classes + guess
        self.counts += np.bincount(index, minlength=self.classes**2).reshape(self.counts.shape)
        if self.calibration is not None:
            self.calibration.add(self._probability(prediction, some), truth == (guess if self.threshold is None else 1))

    def _probability(self, prediction: Any, some: np.ndarray) -> np.ndarray:
        """Probability of "yes", or of the chosen class, where `some` is true."""
        if self.threshold is not None:
            return prediction[some] if self.probabilities else sigmoid(prediction[some])
        chosen = prediction[some]
        return (chosen if self.probabilities else softmax(chosen)).max(axis=-1, initial=0.0)

    def _classes(self, prediction: Any, target: Any) -> tuple[np.ndarray, np.ndarray]:
        if self.threshold is not None:
            return (prediction > self.threshold).astype(np.int64), (target >= 0.5).astype(np.int64)
        guess = np.argmax(prediction, axis=-1)
        if target.shape[-1] == 1:
            return guess, target[..., 0].astype(np.int64)
        return guess, np.argmax(target, axis=-1)

    def scores(self) -> dict[str, float | None]:
        """What follows from the counts."""
        return scores(self.counts)

    def details(self) -> dict[str, Any]:
        """The counts, and scores by class; calibration, if it was counted."""
        found = {"kind": "classes", "confusion": self.counts.tolist(), "by_class": by_class(self.counts)}
        return found if self.calibration is None else {**found, "calibration": self.calibration.result()}


def scores(counts: np.ndarray) -> dict[str, float | None]:
    """Accuracy, IoU, F1, precision and recall of confusion counts; None where nothing is defined.

    Of the second class if there are two, else the mean over the classes that occur or were predicted.

    >>> scores(np.array([[5, 1], [2, 4]]))["iou"]
    0.5714285714285714
    """
    total, classes = int(counts.sum()), by_class(counts)
    chosen = classes[1:] if len(classes) == 2 else classes
    means = {key: _mean([one[key] for one in chosen]) for key in ("iou", "f1", "precision", "recall")}
    return {"accuracy": int(np.trace(counts)) / total if total else None, **means}


def counted(weights: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Which elements of a block of this shape have a weight above 0; weights have 1 for some extents, or ``(N, C)``.

    >>> counted(np.array([[0.0], [2.0]]), (2, 3, 1))[:, :, 0]
    array([[False, False, False],
           [ True,  True,  True]])
    """
    n, *rest = weights.shape
    axes = len(shape) - weights.ndim
    return np.broadcast_to((weights > 0).reshape(n, *(1,) * axes, *rest), shape)


def _mean(ratios: Sequence[float | None]) -> float | None:
    defined = [ratio for ratio in ratios if ratio is not None]
    return float(np.mean(defined)) if defined else None


class Errors:
    """Sums of differences, for regression.

    Attributes
    ----------
    counts
        ``(3,)`` float64: elements, sum of absolute differences, sum of squares.
    """

    def __init__(self) -> None:
        self.counts = np.zeros(3)

    def add(self, prediction: Any, target: Any, weights: Any = None) -> None:
        """Add a block, but for what has the weight 0. Local."""
        if weights is not None:
            some = counted(weights, prediction.shape)
            prediction, target = prediction[some], target[some]
        difference = prediction.astype(np.float64) - target
        self.counts += (difference.size, np.abs(difference).sum(), np.square(difference).sum())

    def scores(self) -> dict[str, float | None]:
        """Mean absolute error and root of the mean square."""
        n, absolute, squares = self.counts
        return {"mae": float(absolute / n) if n else None, "rmse": float(np.sqrt(squares / n)) if n else None}

    def details(self) -> dict[str, Any]:
        """How many numbers were compared."""
        return {"kind": "numbers", "count": int(self.counts[0])}


class Evaluation:
    """Mean loss and metrics over many batches of one executor. Collective over its communicator.

    ::

        evaluation.begin()
        for every batch: fill the inputs; executor.forward(training=False); evaluation.add()
        result = evaluation.finish()

    Prediction and target are what the loss layer reads. Samples beyond ``executor.mode.valid`` do not count, nor does
    what has the weight 0; what has another one counts once, so that counts are whole numbers. Communication: the loss
    per batch, the counts once.

    Parameters
    ----------
    executor
        Of a network with a loss.
    calibrated
        Whether probabilities of classes are counted too, which takes an exponential per class and position.
    """

    def __init__(self, executor: Executor, calibrated: bool = False) -> None:
        self._executor = executor
        self._judged = judged(executor)
        self._counts: list[np.ndarray] = []
        for one in self._judged:
            self._counts.append(one.counter.counts)
            if calibrated and isinstance(one.counter, Confusion):
                one.counter.calibration = Calibration()
                self._counts.append(one.counter.calibration.counts)
        self._reductions = [executor.comm.reduction(counts, kind="metrics") for counts in self._counts]
        self._loss = MeanLoss(executor)

    @property
    def names(self) -> list[str]:
        """Names of the scores that :meth:`finish` returns."""
        scores = [(one.name, one.counter.scores()) for one in self._judged]
        return ["loss", *(key if not n else f"{name} {key}" for n, (name, own) in enumerate(scores) for key in own)]

    @property
    def counted(self) -> Confusion | Errors:
        """What was counted of the first prediction."""
        return self._judged[0].counter

    def begin(self) -> None:
        """Forget what was counted."""
        for counts in self._counts:
            counts[...] = 0
        self._loss.begin()

    def add(self) -> float:
        """Count the batch that was just computed; its mean loss."""
        valid = self._executor.mode.valid
        loss = self._executor.loss_value()
        self._loss.add(loss, valid)
        for one in self._judged:
            box = one.prediction.box
            count = max(0, min(box.stop[0], valid) - box.start[0])
            if count and box.size:
                # Counted there: the same counts on every device.
                to_host, view = self._executor.device.to_host, self._executor.runner.view
                arrays = (to_host(view(array)[:count]) for array in one.views)
                one.counter.add(*(a.astype(np.float32) if is_low(a.dtype) else a for a in arrays))
        return loss

    def finish(self) -> dict[str, float | None]:
        """Mean loss per sample and the metrics, the same on all ranks.

        Those of a second prediction, and of others, are named after it: ``"mask iou"``.
        """
        found: dict[str, float | None] = {"loss": self._loss.result()}
        for reduction in self._reductions:
            reduction.run()
        for number, one in enumerate(self._judged):
            scores = one.counter.scores()
            found |= {f"{one.name} {key}": score for key, score in scores.items()} if number else scores
        return found

    def details(self) -> list[dict[str, Any]]:
        """What was found of every prediction, behind :meth:`finish`: plain data, the same on all ranks. Local."""
        return [
            {"name": one.name, "target": one.nodes[1], **one.counter.details(), "scores": one.counter.scores()}
            for one in self._judged
        ]

    def close(self) -> None:
        """Free the reductions. Collective."""
        self._loss.close()
        for reduction in self._reductions:
            reduction.close()


@dataclass(frozen=True)
class JudgedPair:
    """A prediction beside its target.

    Attributes
    ----------
    name
        That of the output, or of the layer that makes it; with the target's behind it where another pair has it.
    nodes
        Names of both in the network.
    prediction, target
        As the loss reads them.
    weights
        What this rank has for its block, perhaps with 1 for some of the extents; None: all count.
    """

    name: str
    nodes: tuple[str, str]
    prediction: Value
    target: Value
    counter: Confusion | Errors
    weights: View | None = None

    @property
    def views(self) -> list[View]:
        """What is counted: prediction and target, perhaps weights."""
        found = [self.prediction.view, self.target.view]
        return found if self.weights is None else [*found, self.weights]


#: What a file of predictions has of the first pair.
_TAKEN = ("prediction", "target", "sample")


def judged(executor: Executor) -> list[JudgedPair]:
    """Predictions and targets that the loss to be minimised reads, and how they are judged."""
    network, node = executor.network, executor.network.outputs.get("loss")
    step = next((step for step in executor.steps if node is not None and step.layer is node.layer), None)
    judgements = [] if step is None else step.layer.judgements(*(value.layout.shape[1:] for value in step.inputs))
    if step is not None and node is not None and judgements:
        outputs = {made: name for name, made in network.outputs.items()}
        found = list[JudgedPair]()
        for one in judgements:
            made, target = node.inputs[one.prediction], node.inputs[one.target]
            nodes = network.names[made], network.names[target]
            values = step.inputs[one.prediction], step.inputs[one.target]
            weights = None
            if one.weights is not None:
                given = step.inputs[one.weights]
                weights = given.brought(operand_blocks(given.layout.shape, values[0].layout.boxes))
            name = outputs.get(made, nodes[0])
            if found and (name in _TAKEN or any(name == other.name for other in found)):
                name = f"{name} {nodes[1]}"
            found.append(JudgedPair(name, nodes, *values, _counter(one), weights))
        return found
    raise ValueError(f"network {executor.network.name!r} has no loss layer, so there is nothing to compare with")


def _counter(judgement: Judgement) -> Confusion | Errors:
    if judgement.classes is None:
        return Errors()
    return Confusion(judgement.classes, judgement.threshold, judgement.ignored, judgement.probabilities)
