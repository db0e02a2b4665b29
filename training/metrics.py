"""Counts of right and wrong predictions, the scores that follow from the counts, and the file that holds both.

Counts of classes are integers, so their scores do not depend on the decomposition in any bit; errors of numbers are
summed in float64. A metric of your own is a subclass of :class:`Metric`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic_core import to_json

from halograd.documents import read_json
from halograd.errors import UserError
from halograd.registry import Registry
from halograd.schema import STRICT
from halograd.signatures import check_methods

from ..data.disk import atomic_path, check_writable
from ..layers.targets import MetricSpec
from .log import NOT_SCORES

__all__ = [
    "BINS",
    "METRICS",
    "Calibration",
    "Confusion",
    "DiceScore",
    "Ensemble",
    "Errors",
    "IoU",
    "Metric",
    "Weighted",
    "by_class",
    "check_details",
    "checked_metric",
    "counted",
    "ensemble_mean",
    "read_details",
    "scores",
    "sigmoid",
    "softmax",
    "write_details",
]


NOTHING = "no position counts: all of them are ignored or have weight 0"


class Metric(ABC):
    """Base class of metrics: counts from a prediction and its target, and the scores that follow from the counts.

    A configuration names metrics of your own for the first prediction of the loss,
    ``output.metrics = ["within.py:Within"]``; a loss names one instead of the library's:
    ``MetricSpec(metric=RelativeError)``. Every rank counts its blocks, the counts are summed over the ranks, and all
    ranks compute the scores from the sums. Names of scores are their labels in log, progress and pictures. Fields of a
    metric that is a dataclass are settings: ``"within.py:Within:limit=0.5"``.

    Attributes
    ----------
    counts
        Array of int64 or float64, of any shape, contiguous. Sums of integers do not depend on the decomposition in any
        bit.
    """

    #: Score -> whether ``"lower"`` or ``"higher"`` is better. A score that is missing here cannot be `output.best`.
    better: Mapping[str, str] = MappingProxyType({})
    counts: np.ndarray
    #: Name in the configuration, for registered classes.
    name: ClassVar[str] = ""
    __pydantic_config__ = STRICT

    def compare(self, spec: MetricSpec, shape: tuple[int, ...]) -> None:  # noqa: B027  (optional)
        """Set the comparison and create its counts, before anything is counted. Local.

        Parameters
        ----------
        spec
            Kind of the comparison: classes, threshold, ignored targets.
        shape
            Sample shape ``(*spatial, C)`` of the whole prediction.

        Raises
        ------
        UserError
            If the metric is for another kind of comparison.
        """

    @abstractmethod
    def add(self, prediction: Any, target: Any, weights: Any = None) -> None:
        """Add a block to the counts. Local.

        Parameters
        ----------
        prediction, target
            Blocks of the prediction and of the target, NumPy arrays ``(N, *spatial, C)``; do not modify them.
        weights
            Weights of the elements (:func:`counted`), if the loss has weights.
        """

    @abstractmethod
    def scores(self) -> dict[str, float | None]:
        """Compute the scores by name; the names are always the same. None: undefined."""

    def details(self) -> dict[str, Any]:
        """Return plain data on the counts, for ``halograd evaluate --details``."""
        return {"kind": "own", "counts": self.counts.tolist()}

    @property
    def empty(self) -> bool:
        """Whether all targets are ignored, so that there is no loss either; by default False."""
        return False

    def lacking(self) -> str:
        """Return the reason why these targets cannot distinguish good from bad predictions; "" if they can."""
        return NOTHING if self.empty else ""


#: Metrics by name, or by ``"FILE.py:CLASS"``.
METRICS: Registry[Metric] = Registry("metric", Metric, "output.metrics")


def checked_metric(make: Any, name: str, spec: MetricSpec, shape: tuple[int, ...]) -> Metric:
    """Create, by calling `make`, and check the metric of a comparison of the prediction `name`. Local; every rank calls
    it.

    Raises
    ------
    UserError
        If it is not a :class:`Metric`, or one of its methods or attributes is invalid.
    """
    metric = make()
    if not isinstance(metric, Metric):
        raise UserError(f"metric of {name!r}: expected a halograd.training.Metric, got {type(metric).__name__}")
    metric.compare(spec, shape)
    kind, counts = f"metric {type(metric).__name__} of {name!r}", getattr(metric, "counts", None)
    # `weights` are passed only if the loss has some.
    check_methods(metric, optional=["weights"])
    if not (isinstance(counts, np.ndarray) and counts.dtype in (np.int64, np.float64) and counts.flags.c_contiguous):
        got = f"an array of {counts.dtype}" if isinstance(counts, np.ndarray) else type(counts).__name__
        raise UserError(f"{kind}: expected `counts` to be a contiguous array of int64 or float64, got {got}")
    try:
        # The names of the scores are needed before anything is counted.
        with np.errstate(all="ignore"):
            scores = dict(metric.scores())
    except Exception as error:
        raise UserError(f"{kind}: expected scores() to work without counts (None: undefined), got {error!r}") from error
    wrong = [key for key in scores if not isinstance(key, str) or key in ("loss", *NOT_SCORES)]
    if wrong or not scores:
        reserved = ", ".join(("loss", *NOT_SCORES))
        raise UserError(f"{kind}: expected names of scores() other than {reserved}, got {wrong or 'none'}")
    for key, better in metric.better.items():
        if key not in scores or better not in ("lower", "higher"):
            raise UserError(
                f'{kind}: better: expected scores ({", ".join(scores)}) and "lower" or "higher" for each, got '
                f"{key!r}: {better!r}"
            )
    return metric


class Confusion(Metric):
    """Confusion counts of a classification of samples, pixels or cells.

    Parameters
    ----------
    classes
        Number of classes.
    threshold
        A number: there are two classes; a prediction above the threshold, or a target of at least 0.5, means "yes".
        Targets have the cut and shape of predictions; each channel is a separate classification. None: the class is
        the channel of the largest prediction; targets are class indices ``(..., 1)`` or one channel per class.
    ignored
        Index of the class whose positions are ignored; with a threshold, the ignored value of the target.
    probabilities
        Whether predictions are probabilities, not logits; used by the calibration.

    Attributes
    ----------
    counts
        ``(classes, classes)`` int64: rows are true classes, columns are predicted classes.
    calibration
        Counts of probabilities; None if they are not counted.
    """

    better = MappingProxyType(dict.fromkeys(("accuracy", "iou", "f1", "precision", "recall"), "higher"))
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
        """Count a block ``(N, ..., C)`` without the elements of weight 0 (:func:`counted`). Local."""
        with np.errstate(invalid="ignore"):  # ignored elements may be NaN
            guess, truth = self._classes(prediction, target)
        mask = np.ones(truth.shape, np.bool_)
        if self.ignored is not None:
            # With a threshold, `truth` is 0 or 1: the ignored value is one of the target.
            mask = (truth if self.threshold is None else target) != self.ignored
        if weights is not None:
            own = counted(weights, prediction.shape)
            # If a channel is a class, `truth` has no axis of channels.
            mask &= own if truth.ndim == prediction.ndim else own[..., 0]
        guess, truth = guess[mask], truth[mask]
        # One number per pair of classes: their histogram is the confusion.
        index = truth * self.classes + guess
        self.counts += np.bincount(index, minlength=self.classes**2).reshape(self.counts.shape)
        if self.calibration is not None:
            correct = truth == (guess if self.threshold is None else 1)
            self.calibration.add(self._probability(prediction, mask), correct)

    def _probability(self, prediction: Any, mask: np.ndarray) -> np.ndarray:
        """Return the probability of "yes", or of the predicted class, for the elements in `mask`."""
        if self.threshold is not None:
            return prediction[mask] if self.probabilities else sigmoid(prediction[mask])
        chosen = prediction[mask]
        return (chosen if self.probabilities else softmax(chosen)).max(axis=-1, initial=0.0)

    def _classes(self, prediction: Any, target: Any) -> tuple[np.ndarray, np.ndarray]:
        if self.threshold is not None:
            return (prediction > self.threshold).astype(np.int64), (target >= 0.5).astype(np.int64)
        guess = np.argmax(prediction, axis=-1)
        if target.shape[-1] == 1:
            return guess, target[..., 0].astype(np.int64)
        return guess, np.argmax(target, axis=-1)

    def scores(self) -> dict[str, float | None]:
        """Compute the scores of the counts."""
        return scores(self.counts)

    def details(self) -> dict[str, Any]:
        """Return the counts and the scores by class, and the calibration if it was counted."""
        details = {"kind": "classes", "confusion": self.counts.tolist(), "by_class": by_class(self.counts)}
        return details if self.calibration is None else {**details, "calibration": self.calibration.result()}

    @property
    def empty(self) -> bool:
        return not self.counts.any()

    def lacking(self) -> str:
        true = self.counts.sum(axis=1)
        if np.count_nonzero(true) != 1:
            return super().lacking()
        return f"all {true.sum()} positions that count are of class {true.argmax()}"


def scores(counts: np.ndarray) -> dict[str, float | None]:
    """Compute accuracy, IoU, F1, precision and recall of confusion counts; None where a score is not defined.

    Accuracy is that of all positions. With two classes, the other scores are those of the second class; they are
    defined if this class occurs in the targets. With more classes, each is the mean over the classes for which it is
    defined, class 0 (the background) included; the names of :class:`DiceScore` and :class:`IoU` show what they average.

    >>> scores(np.array([[5, 1], [2, 4]]))["iou"]
    0.5714285714285714
    """
    total, classes = int(counts.sum()), by_class(counts)
    chosen = [scores for scores in classes[1:] if scores["count"]] if len(classes) == 2 else classes
    means = {key: _mean([scores[key] for scores in chosen]) for key in ("iou", "f1", "precision", "recall")}
    return {"accuracy": int(np.trace(counts)) / total if total else None, **means}


def counted(weights: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return a mask of the elements of a block that have a weight above 0.

    Extents of the weights may be 1, and weights may be ``(N, C)``.

    >>> counted(np.array([[0.0], [2.0]]), (2, 3, 1))[:, :, 0]
    array([[False, False, False],
           [ True,  True,  True]])
    """
    # Weights ``(N, C)`` get axes of 1 between samples and channels.
    n, *rest = weights.shape
    axes = len(shape) - weights.ndim
    return np.broadcast_to((weights > 0).reshape(n, *(1,) * axes, *rest), shape)


def _mean(ratios: Sequence[float | None]) -> float | None:
    defined = [ratio for ratio in ratios if ratio is not None]
    return float(np.mean(defined)) if defined else None


def by_class(counts: np.ndarray) -> list[dict[str, Any]]:
    """Compute the scores of each class of confusion counts ``(K, K)``, true classes in rows; None where undefined.

    >>> by_class(np.array([[5, 1], [2, 4]]))[1]["iou"]
    0.5714285714285714
    """
    rows = []
    for c, numbers in enumerate(zip(np.diagonal(counts), counts.sum(axis=1), counts.sum(axis=0))):
        # The diagonal, and sums of rows (targets) and columns (predictions).
        hits, true, guessed = map(int, numbers)
        rows.append(
            {
                "class": c,
                "count": true,
                "predicted": guessed,
                "iou": _ratio(hits, true + guessed - hits),
                "precision": _ratio(hits, guessed),
                "recall": _ratio(hits, true),
                "f1": _ratio(2 * hits, true + guessed),
            }
        )
    return rows


def _ratio(above: int, below: int) -> float | None:
    return above / below if below else None


@METRICS.register
class Errors(Metric):
    """Sums of differences, for regression.

    Attributes
    ----------
    counts
        ``(3,)`` float64: number of elements, sum of absolute differences, sum of their squares.
    """

    name: ClassVar[str] = "errors"
    better = MappingProxyType({"mae": "lower", "rmse": "lower"})

    def __init__(self) -> None:
        self.counts = np.zeros(3)

    def add(self, prediction: Any, target: Any, weights: Any = None) -> None:
        """Add a block without the elements of weight 0. Local."""
        if weights is not None:
            mask = counted(weights, prediction.shape)
            prediction, target = prediction[mask], target[mask]
        # Sums of many squares lose digits in float32.
        difference = prediction.astype(np.float64) - target
        self.counts += (difference.size, np.abs(difference).sum(), np.square(difference).sum())

    def scores(self) -> dict[str, float | None]:
        """Compute the mean absolute error and the root of the mean square."""
        n, absolute, squares = self.counts[:3]
        return {"mae": float(absolute / n) if n else None, "rmse": float(np.sqrt(squares / n)) if n else None}

    def details(self) -> dict[str, Any]:
        """Return the number of compared values."""
        return {"kind": "numbers", "count": int(self.counts[0])}

    @property
    def empty(self) -> bool:
        return not self.counts[0]


class Ensemble(Errors):
    """Errors of the mean of the members of an ensemble, their spread, and their fair CRPS.

    ``spread`` is the root of the mean variance of the members, ``sum (x - mean)^2 / (M - 1)``: the spread of a reliable
    ensemble is about ``rmse * sqrt(M / (M + 1))``. ``crps`` is the score of :class:`halograd.layers.CRPS` with
    ``fair = 1``. Elements count once, as in :class:`Errors`.

    Attributes
    ----------
    members
        Number of members, as in :class:`halograd.layers.MetricSpec`.
    counts
        ``(5,)`` float64: number of elements of the target; sums of absolute differences of the mean, of their squares,
        of variances and of CRPS.
    """

    name: ClassVar[str] = ""
    better = MappingProxyType({"mae": "lower", "rmse": "lower", "crps": "lower"})

    def __init__(self, members: int) -> None:
        super().__init__()
        self.members, self.counts = members, np.zeros(5)

    def add(self, prediction: Any, target: Any, weights: Any = None) -> None:
        """Add a block of all members without the elements of weight 0. Local."""
        mean = ensemble_mean(prediction, self.members)
        mask = np.ones(target.shape, np.bool_) if weights is None else counted(weights, target.shape)
        # ``(elements, M)``
        x = prediction.reshape(*target.shape[:-1], self.members, -1).swapaxes(-1, -2)[mask].astype(np.float64)
        t, mean = target[mask].astype(np.float64), mean[mask]
        variance = np.square(x - mean[:, None]).sum(axis=1) / (self.members - 1)
        # Each pair of members once, one member against all earlier ones: no array of M x M.
        pairs = sum(np.abs(x[:, :k] - x[:, k : k + 1]).sum(axis=1) for k in range(1, self.members))
        # Fair CRPS: mean |x - t| - sum over pairs |x_i - x_j| / (M (M - 1)).
        score = np.abs(x - t[:, None]).mean(axis=1) - pairs / (self.members * (self.members - 1))
        difference = mean - t
        terms = np.abs(difference), np.square(difference), variance, score
        self.counts += (t.size, *(term.sum() for term in terms))

    def scores(self) -> dict[str, float | None]:
        """Compute the scores of the sums."""
        n, *_, variances, scores = self.counts
        more = {"spread": float(np.sqrt(variances / n)) if n else None, "crps": float(scores / n) if n else None}
        return super().scores() | more


def ensemble_mean(prediction: Any, members: int) -> np.ndarray:
    """Return the mean of the members that the channels ``(..., M C)`` hold one after the other, float64 ``(..., C)``.

    >>> ensemble_mean(np.array([[1.0, 10.0, 3.0, 20.0]]), 2)
    array([[ 2., 15.]])
    """
    return prediction.reshape(*prediction.shape[:-1], members, -1).mean(axis=-2, dtype=np.float64)


@dataclass
class _Overlap(Metric):
    """Overlap of predicted and true classes: the counts are those of :class:`Confusion`, the scores are different."""

    __pydantic_config__ = STRICT

    each: bool = False

    def compare(self, spec: MetricSpec, shape: tuple[int, ...]) -> None:
        if spec.classes is None:
            raise UserError(f"output.metrics: {self.name}: expected a loss of classes, got one of numbers; remove it")
        settings = spec.threshold, spec.ignored, spec.probabilities
        self._confusion = Confusion(spec.classes, *settings)
        # The same array, which the ranks sum in place.
        self.counts = self._confusion.counts
        self.better = MappingProxyType(dict.fromkeys(self.scores(), "higher"))

    def add(self, prediction: Any, target: Any, weights: Any = None) -> None:
        """Count a block without ignored positions and those of weight 0. Local."""
        self._confusion.add(prediction, target, weights)

    def scores(self) -> dict[str, float | None]:
        """Compute ``NAME_foreground``, ``NAME_all`` and, if requested, ``NAME_0``, ``NAME_1``, ..."""
        ratios = [scores["f1" if self.name == "dice" else self.name] for scores in by_class(self.counts)]
        scores = {f"{self.name}_foreground": _mean(ratios[1:]), f"{self.name}_all": _mean(ratios)}
        return scores | {f"{self.name}_{c}": ratio for c, ratio in enumerate(ratios if self.each else ())}

    def details(self) -> dict[str, Any]:
        """Return the counts and the scores by class."""
        return self._confusion.details()

    @property
    def empty(self) -> bool:
        return self._confusion.empty

    def lacking(self) -> str:
        return self._confusion.lacking()


@METRICS.register
@dataclass
class DiceScore(_Overlap):
    """Dice coefficient ``2 TP / (2 TP + FP + FN)`` of classes, over all positions of all samples.

    ``dice_foreground`` is the mean over all classes but 0, ``dice_all`` over all of them, ``dice_1``, ... that of a
    class (``"dice:each=true"``). Classes that neither occur nor are predicted are left out; a score without any is
    undefined.
    """

    name: ClassVar[str] = "dice"


@METRICS.register
@dataclass
class IoU(_Overlap):
    """Intersection over union ``TP / (TP + FP + FN)`` of classes: ``iou_foreground``, ... as in :class:`DiceScore`."""

    name: ClassVar[str] = "iou"


@METRICS.register
@dataclass
class Weighted(Metric):
    """Errors of numbers, each element times its weight, and the correlation of anomalies.

    ``weighted_mae`` is ``sum w |x - t| / sum w``, ``weighted_rmse`` the root of ``sum w (x - t)^2 / sum w``.
    ``anomaly_correlation`` is ``sum w x' t' / sqrt(sum w x'^2 sum w t'^2)`` per channel, then the mean over channels;
    anomalies ``x'`` and ``t'`` are differences from the weighted means of a channel over all samples, or with
    ``center = "none"`` the numbers themselves, for data that are anomalies already. Without weights, all are 1. With
    ``each = true`` there are also the three scores of every channel: ``weighted_mae_0``, ...

    Attributes
    ----------
    counts
        ``(C, 8)`` float64: sums of ``w``, ``w |d|``, ``w d^2``, ``w x``, ``w t``, ``w x^2``, ``w t^2``, ``w x t``.
    """

    name: ClassVar[str] = "weighted"
    __pydantic_config__ = STRICT
    better = MappingProxyType({"weighted_mae": "lower", "weighted_rmse": "lower", "anomaly_correlation": "higher"})

    center: Literal["mean", "none"] = "mean"
    each: bool = False

    def compare(self, spec: MetricSpec, shape: tuple[int, ...]) -> None:
        if spec.classes is not None:
            raise UserError(f"output.metrics: {self.name}: expected a loss of numbers, got one of classes; remove it")
        self.counts = np.zeros((shape[-1], 8))
        better, channels = type(self).better, range(shape[-1] if self.each else 0)
        more = {f"{key}_{c}": way for c in channels for key, way in better.items()}
        self.better = MappingProxyType({**better, **more})

    def add(self, prediction: Any, target: Any, weights: Any = None) -> None:
        """Add a block; where the weight is 0, numbers may be NaN. Local."""
        x, t = (array.astype(np.float64).reshape(-1, array.shape[-1]) for array in (prediction, target))
        w = np.ones_like(x)
        if weights is not None:
            n, *rest = weights.shape
            whole = weights.reshape(n, *(1,) * (prediction.ndim - weights.ndim), *rest)
            w = np.broadcast_to(whole, prediction.shape).astype(np.float64).reshape(x.shape)
            x, t = np.where(w > 0, x, 0), np.where(w > 0, t, 0)
        # In the order of `counts`; the 1 gives the sum of the weights.
        terms = 1, np.abs(x - t), np.square(x - t), x, t, x * x, t * t, x * t
        self.counts += np.stack([(w * term).sum(axis=0) for term in terms], axis=-1)

    def scores(self) -> dict[str, float | None]:
        """Compute the scores of the sums."""
        scores = self._scores(self.counts)
        for c in range(len(self.counts) if self.each else 0):
            scores |= {f"{key}_{c}": score for key, score in self._scores(self.counts[c : c + 1]).items()}
        return scores

    def _scores(self, counts: np.ndarray) -> dict[str, float | None]:
        """Compute the scores of some channels together."""
        weight, absolute, squares = counts[:, :3].sum(axis=0).tolist()
        scores: dict[str, float | None] = dict.fromkeys(type(self).better)
        if weight > 0:
            scores["weighted_mae"], scores["weighted_rmse"] = absolute / weight, float(np.sqrt(squares / weight))
        # Channels without weight have neither mean nor correlation.
        each = counts[counts[:, 0] > 0]
        w, x, t, xx, tt, xt = each[:, [0, 3, 4, 5, 6, 7]].T
        if self.center == "mean":
            # Sums about the weighted means: sum w (x - mean)^2 = sum w x^2 - (sum w x)^2 / sum w.
            xx, tt, xt = xx - x * x / w, tt - t * t / w, xt - x * t / w
        # A constant channel has no correlation; by rounding, its sum of squares may even be negative.
        varying = (xx > 0) & (tt > 0)
        scores["anomaly_correlation"] = _mean((xt[varying] / np.sqrt(xx[varying] * tt[varying])).tolist())
        return scores

    @property
    def empty(self) -> bool:
        return not self.counts[:, 0].any()


BINS = 15
"""Number of bins of equal width (Guo et al. 2017)."""
#: Probabilities are summed as integer multiples of this unit, so that sums do not depend on the order.
_UNIT = 2.0**-24


class Calibration:
    """Predicted probabilities and frequencies in :data:`BINS` bins ``[k / 15, (k + 1) / 15)``; the last one includes 1.

    A classification by the largest channel counts the probability of the predicted class, and whether it is true. A
    classification by a threshold counts the probability of "yes", and whether that is true.

    Attributes
    ----------
    counts
        ``(BINS, 3)`` int64: number of positions, sum of their probabilities in units of ``2^-24``, number of true
        positions.

    References
    ----------
    Guo et al., "On calibration of modern neural networks", ICML 2017, Equations 2 and 3.
    """

    def __init__(self) -> None:
        self.counts = np.zeros((BINS, 3), np.int64)

    def add(self, probability: np.ndarray, true: np.ndarray) -> None:
        """Count positions by their probabilities ``(n,)``; `true` ``(n,)`` marks the true ones. Local."""
        # The last bin includes 1.
        where = np.clip((probability * BINS).astype(np.int64), 0, BINS - 1)
        units = np.rint(probability.astype(np.float64) / _UNIT)
        self.counts[:, 0] += np.bincount(where, minlength=BINS)
        # Whole numbers below 2^53: their sum is exact in any order.
        self.counts[:, 1] += np.bincount(where, units, BINS).astype(np.int64)
        self.counts[:, 2] += np.bincount(where[true], minlength=BINS)

    def result(self) -> dict[str, Any]:
        """Compute the expected calibration error, and the bins from which it follows.

        ``error`` is the mean of ``|probability - frequency|`` over positions, None without positions. ``bins`` has a
        row per bin: its limits, positions, mean probability and frequency.
        """
        bins, error, total = [], 0.0, int(self.counts[:, 0].sum())
        for k, (count, units, true) in enumerate(self.counts.tolist()):
            probability, frequency = (units * _UNIT / count, true / count) if count else (None, None)
            row = {"from": k / BINS, "to": (k + 1) / BINS, "count": count}
            bins.append({**row, "probability": probability, "frequency": frequency})
            # Equation 3: ``count / total * |true / count - probability|``, in which `count` cancels.
            error += abs(units * _UNIT - true)
        return {"error": error / total if total else None, "bins": bins}


def sigmoid(block: np.ndarray) -> np.ndarray:
    """Compute the sigmoid of each logit, without overflow or cancellation: small probabilities are accurate."""
    e = np.abs(block)
    np.negative(e, out=e)
    np.exp(e, out=e)
    # s / (1 + e) with s = 1 where the logit is positive, else e.
    y = np.maximum(e, block >= 0)
    e += 1
    y /= e
    return y


def softmax(block: np.ndarray) -> np.ndarray:
    """Compute the probabilities of logits ``(N, ..., K)`` over the last axis."""
    # Exponentials of at most 1 do not overflow.
    y = block - block.max(axis=-1, keepdims=True)
    np.exp(y, out=y)
    y /= y.sum(axis=-1, keepdims=True)
    return y


_WRITTEN_BY = "halograd evaluate"


def check_details(path: Path) -> None:
    """Check that the file can be written, and that an existing file is from an earlier evaluation. Local."""
    if path.exists():
        read_details(path)
    check_writable(path)


def write_details(path: Path, about: Mapping[str, Any], predictions: list[dict[str, Any]]) -> None:
    """Write a JSON file with `about`, the subject of the evaluation, and the details of every prediction. Local."""
    details = {"written_by": _WRITTEN_BY, **about, "predictions": predictions}
    with atomic_path(path, parents=True) as partial:
        # JSON has no NaN and no infinity.
        partial.write_bytes(to_json(details, indent=1, inf_nan_mode="null") + b"\n")


def read_details(path: Path) -> dict[str, Any]:
    """Read a file that :func:`write_details` wrote. Local.

    Raises
    ------
    UserError
        If the file is of another kind.
    """
    details = read_json(path, "details")
    if not isinstance(details, dict) or details.get("written_by") != _WRITTEN_BY:
        raise UserError(
            f"details {path}: expected a file that `halograd evaluate --details` wrote, got another; give another path"
        )
    return details
