"""Evaluation of a network on samples: mean loss and scores over all ranks, predictions in a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from halograd.documents import score_text
from halograd.errors import UserError

from ..data import Batch, ChannelStatistics
from ..data.coordinates import SOURCES, write_sources
from ..data.disk import atomic_path, check_replaceable, open_to_read
from ..device import is_low
from ..layers.needs import operand_blocks
from ..layers.targets import MetricSpec
from ..lowering.views import Value, View
from .executor import Executor, Gather
from .metrics import METRICS, Calibration, Confusion, Ensemble, Errors, Metric, checked_metric, ensemble_mean
from .session import Session

__all__ = [
    "ComparedPair",
    "Evaluation",
    "MeanLoss",
    "check_predictions",
    "compared_pairs",
    "describe",
    "evaluate_parts",
    "gather_samples",
    "write_predictions",
]


class Evaluation:
    """Mean loss and metrics over many batches of one executor. Collective over the executor's communicator.

    ::

        evaluation.begin()
        for every batch: fill the inputs; executor.forward(training=False); evaluation.add()
        result = evaluation.finish()

    The prediction and the target are the inputs of the loss layer. Samples beyond ``executor.mode.valid`` and elements
    of weight 0 are ignored. Elements of any other weight count once, except in :class:`Weighted
    <halograd.training.metrics.Weighted>`.
    Communication: one sum of the loss per batch, and in :meth:`finish` one sum per array of counts.

    Parameters
    ----------
    executor
        Executor of a network with a loss.
    calibrated
        Whether to count probabilities of classes, too; this costs an exponential per class and position.
    metrics
        Metrics of the first prediction, by their names in :data:`METRICS`, in addition to those of the loss; of an
        ensemble they compare the mean.
    statistics
        Statistics of normalized targets, by name: metrics compare in the units of the data.

    Raises
    ------
    UserError
        If a metric is unknown or invalid, or has the same score as another one.
    """

    def __init__(
        self,
        executor: Executor,
        calibrated: bool = False,
        metrics: Sequence[str] = (),
        statistics: Mapping[str, ChannelStatistics] | None = None,
    ) -> None:
        self._executor, self._statistics = executor, statistics or {}
        self._pairs = compared_pairs(executor)
        self._counted = list(self._pairs)
        first, owners = self._pairs[0], dict.fromkeys(self.names, "the loss")
        for name in metrics:
            *space, channels = first.prediction.layout.shape[1:]
            # Metrics in addition to those of the loss get the mean of an ensemble.
            shape = (*space, channels // first.spec.members)
            metric = checked_metric(lambda name=name: METRICS.make(name), first.name, first.spec, shape)
            self._counted.append(replace(first, name=f"{first.name} by {type(metric).__name__}", metric=metric))
            for key in metric.scores():
                if key in owners:
                    raise UserError(
                        f"output.metrics: {name}: expected other scores than those of {owners[key]}, got {key!r}; "
                        f"remove {name}"
                    )
                owners[key] = name
        self._counts: list[np.ndarray] = []
        for pair in self._counted:
            self._counts.append(pair.metric.counts)
            if calibrated and isinstance(pair.metric, Confusion):
                pair.metric.calibration = Calibration()
                self._counts.append(pair.metric.calibration.counts)
        self._reductions = [executor.comm.reduction(counts, kind="metrics") for counts in self._counts]
        self._loss = MeanLoss(executor)

    def follow(self, executor: Executor) -> None:
        """Count the batches of another executor of the same network from now on, such as one for another size. Local.
        """
        if executor is self._executor:
            return
        self._executor, pairs = executor, compared_pairs(executor)
        pairs += pairs[:1] * (len(self._counted) - len(pairs))  # metrics in addition to those of the loss
        # Only the views change: the metrics, whose counts the reductions sum, stay.
        self._counted = [
            replace(pair, prediction=other.prediction, target=other.target, weights=other.weights)
            for pair, other in zip(self._counted, pairs, strict=True)
        ]
        self._loss.follow(executor)

    @property
    def names(self) -> dict[str, str | None]:
        """Names of the scores of :meth:`finish`, and whether "lower" or "higher" is better; None: not declared."""
        names: dict[str, str | None] = {"loss": "lower"}
        for pair in self._counted:
            names |= {f"{pair.prefix}{key}": pair.metric.better.get(key) for key in pair.metric.scores()}
        return names

    @property
    def counted(self) -> Metric:
        """Metric that counts the results of the first prediction."""
        return self._pairs[0].metric

    @property
    def of_numbers(self) -> bool:
        """Whether the first prediction is a regression."""
        return self._pairs[0].spec.classes is None

    @property
    def blind(self) -> bool:
        """Whether the counts of no prediction can distinguish good from bad predictions (:meth:`Metric.lacking`)."""
        return all(pair.metric.lacking() for pair in self._pairs)

    @property
    def lacking_text(self) -> str:
        """The predictions whose counts cannot distinguish good from bad, with the reason; "" if there are none."""
        lacking = [(pair.name, pair.metric.lacking()) for pair in self._pairs]
        return "; ".join(f"of {name!r} {text}" for name, text in lacking if text)

    def begin(self) -> None:
        """Set all counts to zero."""
        for counts in self._counts:
            # In place, because the reductions sum these arrays.
            counts[...] = 0
        self._loss.begin()

    def add(self) -> float:
        """Count the last computed batch; return its mean loss."""
        valid = self._executor.mode.valid
        loss = self._executor.loss_value()
        self._loss.add(loss, valid)
        for number, pair in enumerate(self._counted):
            box = pair.prediction.box
            # The last batch is filled up: this rank's block may have fewer valid samples, or none.
            count = max(0, min(box.stop[0], valid) - box.start[0])
            if count and box.size:
                # The host counts, so that the counts are the same for every device.
                to_host, view = self._executor.device.to_host, self._executor.runner.view
                # Valid samples come first in a batch.
                arrays = (to_host(view(array)[:count]) for array in pair.views)
                prediction, target, *weights = (a.astype(np.float32) if is_low(a.dtype) else a for a in arrays)
                if pair.nodes[1] in self._statistics:
                    restored = self._statistics[pair.nodes[1]].restored
                    prediction = restored(prediction, box.start[-1])
                    target = restored(target, pair.target.box.start[-1])
                if number >= len(self._pairs) and pair.spec.members > 1:
                    prediction = ensemble_mean(prediction, pair.spec.members)
                pair.metric.add(prediction, target, **({"weights": weights[0]} if weights else {}))
        return loss

    def finish(self) -> dict[str, float | None]:
        """Compute the mean loss per sample and the scores, the same on all ranks. None: undefined.

        Scores of the second and later predictions have the name of their prediction first: ``"mask iou"``.
        """
        loss = self._loss.result()
        for reduction in self._reductions:
            reduction.run()
        # If no element counts, the loss is undefined too.
        scores = {"loss": None if all(pair.metric.empty for pair in self._pairs) else loss}
        for pair in self._counted:
            for key, score in pair.metric.scores().items():
                scores[f"{pair.prefix}{key}"] = None if score is None else float(score)
        return scores

    def details(self) -> list[dict[str, Any]]:
        """Return the details of every prediction, after :meth:`finish`: plain data, the same on all ranks. Local."""
        return [
            {"name": pair.name, "target": pair.nodes[1], **pair.metric.details(), "scores": pair.metric.scores()}
            for pair in self._counted
        ]

    def close(self) -> None:
        """Free the reductions. Collective."""
        self._loss.close()
        for reduction in self._reductions:
            reduction.close()


@dataclass(frozen=True)
class ComparedPair:
    """A prediction and its target.

    Attributes
    ----------
    name
        Name of the output, or of the layer that computes the prediction; followed by the target's name if another pair
        has this name.
    prefix
        Prefix of the names of the pair's scores: its name and a space, or "" for the first pair.
    nodes
        Names of the prediction and of the target in the network.
    prediction, target
        Values that the loss reads.
    spec, metric
        Kind of comparison, and the metric that counts its results.
    weights
        Weights of this rank's block, with extents of 1 where they are broadcast; None: all elements count.
    weight_node
        Name of the weights in the network.
    """

    name: str
    prefix: str
    nodes: tuple[str, str]
    prediction: Value
    target: Value
    spec: MetricSpec
    metric: Metric
    weights: View | None = None
    weight_node: str | None = None

    @property
    def views(self) -> list[View]:
        """Views of prediction and target, and of the weights if there are any."""
        views = [self.prediction.view, self.target.view]
        return views if self.weights is None else [*views, self.weights]


#: Names of the datasets of the first pair, and of the samples, in a file of predictions.
_TAKEN = ("prediction", "target", "sample", *SOURCES)


def compared_pairs(executor: Executor) -> list[ComparedPair]:
    """List the predictions and targets that the minimized loss reads, each with its metric.

    Raises
    ------
    ValueError
        If the network has no loss that compares predictions with targets.
    """
    network, node = executor.network, executor.network.outputs.get("loss")
    step = next((step for step in executor.program.steps if node is not None and step.layer is node.layer), None)
    comparisons = [] if step is None else step.layer.comparisons(*(value.layout.shape[1:] for value in step.inputs))
    if step is not None and node is not None and comparisons:
        outputs = {prediction: name for name, prediction in network.outputs.items()}
        pairs = list[ComparedPair]()
        for spec in comparisons:
            prediction, target = node.inputs[spec.prediction], node.inputs[spec.target]
            nodes = network.names[prediction], network.names[target]
            values = step.inputs[spec.prediction], step.inputs[spec.target]
            weights = weight_node = None
            if spec.weights is not None:
                weight_node = network.names[node.inputs[spec.weights]]
                weight_value = step.inputs[spec.weights]
                # Only the weights of this rank's block of the prediction.
                weights = weight_value.brought(operand_blocks(weight_value.layout.shape, values[0].layout.boxes))
            name = outputs.get(prediction, nodes[0])
            # Names must differ in a file of predictions; the first pair is written without its name.
            if pairs and (name in _TAKEN or any(name == other.name for other in pairs)):
                name = f"{name} {nodes[1]}"
            metric: Metric
            if spec.metric is not None:
                metric = checked_metric(spec.metric, name, spec, values[0].layout.shape[1:])
            elif spec.classes is None:
                metric = Errors() if spec.members == 1 else Ensemble(spec.members)
            else:
                metric = Confusion(spec.classes, spec.threshold, spec.ignored, spec.probabilities)
            prefix = f"{name} " if pairs else ""
            pairs.append(ComparedPair(name, prefix, nodes, *values, spec, metric, weights, weight_node))
        return pairs
    raise ValueError(f"network {executor.network.name!r}: expected a loss layer, whose targets scores need, got none")


class MeanLoss:
    """Mean loss over batches; it does not depend on how samples are divided into batches.

    A loss is a mean over samples, so batches of fewer samples have less weight. For a term that is divided by a sum of
    weights, numerator and weights are summed over all batches before the division. A batch without weight is ignored,
    and so is a term without weight in all batches; without any other term the loss is undefined. Losses that are not
    means (Dice of a batch) are averaged over the batches.

    Communication: one sum of 16 B per divided term in :meth:`result`.
    """

    def __init__(self, executor: Executor) -> None:
        self.follow(executor)
        # If so, the loss is undefined when no batch has a weight.
        self._only_divided = 0 < len(self._divided) == len(executor.program.terms)
        #: By divided term: this rank's part times the samples of a batch, and times the divisor.
        self._own = np.zeros((len(self._divided), 2))
        self._sum = executor.comm.reduction(self._own, kind="metrics") if self._divided else None
        self.begin()

    def follow(self, executor: Executor) -> None:
        """Add the batches of another executor of the same network from now on. Local."""
        view, self._to_host = executor.runner.view, executor.device.to_host
        terms = executor.program.terms
        self._divided = [(view(value), view(divisor)) for value, divisor in terms if divisor is not None]

    def begin(self) -> None:
        """Set all sums to zero. Local."""
        self._total, self._samples = 0.0, 0
        self._own[...] = 0
        self._divisors = np.zeros(len(self._divided))

    def add(self, loss: float, samples: int) -> None:
        """Add the loss of a batch of `samples` valid samples. Local."""
        self._total += loss * samples
        self._samples += samples
        for k, arrays in enumerate(self._divided):
            value, divisor = (float(self._to_host(array)[0]) for array in arrays)
            # `value` is this rank's numerator over the divisor of all ranks, so ``value * divisor`` is the numerator.
            self._own[k] += value * samples, value * divisor
            self._divisors[k] += divisor

    def result(self) -> float | None:
        """Compute the mean, the same on all ranks; None: undefined. Collective; once after :meth:`begin`."""
        if self._sum is not None:
            self._sum.run()
        if not self._samples or (self._only_divided and not self._divisors.any()):
            return None
        # Divided terms are quotients of sums over all batches; what is left of the loss is a mean over samples.
        quotients = [total / divisor for (_, total), divisor in zip(self._own, self._divisors) if divisor > 0]
        return (self._total - float(self._own[:, 0].sum())) / self._samples + float(sum(quotients))

    def close(self) -> None:
        """Free the reduction. Collective."""
        if self._sum is not None:
            self._sum.close()


def evaluate_parts(
    parts: Iterable[tuple[Session, Sequence[Batch]]],
    evaluation: Evaluation,
    interrupted: Callable[[], bool] | None = None,
) -> dict[str, Any] | None:
    """Compute loss and scores of the batches of several sessions of the same network. Collective.

    `interrupted` is called after every batch, and must return the same on all ranks. Returns None as soon as
    `interrupted` returns True.
    """
    evaluation.begin()
    for session, batches in parts:
        evaluation.follow(session.executor)
        # `feed` fills the inputs before it yields.
        for _ in session.feed(batches):
            session.executor.forward(training=False)
            evaluation.add()
            if interrupted is not None and interrupted():
                return None
    return evaluation.finish()


def describe(metrics: dict[str, Any]) -> str:
    """Return the metrics as a string of one line."""
    return ", ".join(f"{name} {'undefined' if value is None else score_text(value)}" for name, value in metrics.items())


def check_predictions(path: Path) -> None:
    """Check, before predictions are computed, that they can be written (:func:`check_replaceable`). Local."""
    check_replaceable(path, "older predictions", _is_ours)


def _is_ours(path: Path) -> bool:
    names = {"prediction", "target"}
    with open_to_read(path) as file:
        others = [file[name] for name in file if name not in _TAKEN]
        pairs = all(isinstance(group, h5py.Group) and set(group) == names for group in others)
        return pairs and names | {"sample"} <= set(file)


def gather_samples(
    session: Session, batches: Sequence[Batch], names: Mapping[Any, str]
) -> tuple[list[int], dict[Any, np.ndarray]]:
    """Compute batches, and gather values of all their samples on rank 0. Collective.

    Parameters
    ----------
    names
        Names of inputs and of layers whose outputs are kept, by the key in the result.

    Returns
    -------
    Indices of the samples in the data set, and on rank 0 (empty elsewhere) arrays ``(n, *spatial, C)``: normalized
    targets and their predictions in the units of the data; 16 bits as float32.
    """
    executor, units = session.executor, dict[str, ChannelStatistics | None]()
    for pair in compared_pairs(executor):
        for node in pair.nodes:
            # A node in several comparisons has the units of the first one.
            units.setdefault(node, session.samples.statistics.get(pair.nodes[1]))
    parts: dict[Any, list[np.ndarray]] = {key: [] for key in names}
    samples: list[int] = []
    with closing(Gather(executor, list(names.values()))) as way:
        for batch in session.feed(batches):
            executor.forward(training=False)
            # This finishes the loss reduction, with the votes of this pass.
            executor.loss_value()
            for (key, node), whole in zip(names.items(), way.run()):
                if whole is not None:
                    valid, known = whole[: batch.valid], units.get(node)
                    # A copy: the next run overwrites the array.
                    valid = valid.astype(np.float32) if is_low(valid.dtype) else valid.copy()
                    parts[key].append(valid if known is None else known.restored(valid))
            samples += batch.indices[: batch.valid]
    return samples, {key: np.concatenate(arrays) for key, arrays in parts.items() if arrays}


def write_predictions(session: Session, batches: Sequence[Batch], path: Path) -> None:
    """Write datasets ``prediction``, ``target`` ``(n, *spatial, C)``, ``sample`` ``(n,)``. Collective; rank 0 writes.

    ``sample`` is the index of a sample in the data set; ``source_file`` and ``source_sample`` are its file and its
    index in this file. The second and later predictions that the loss compares are ``NAME/prediction`` and
    ``NAME/target``. Predictions are the inputs of the loss (logits); normalized targets and their predictions are
    written in the units of the data. With ``data.invalid = "mask"``, targets of a regression are NaN where their weight
    is 0, because invalid ones are read as 0. Rank 0 holds all of them at once, so this is for images and small sets.
    """
    names: dict[str, str] = {}
    masks: dict[str, str] = {}
    for number, pair in enumerate(compared_pairs(session.executor)):
        folder = f"{pair.name}/" if number else ""
        names |= {f"{folder}prediction": pair.nodes[0], f"{folder}target": pair.nodes[1]}
        if pair.weight_node is not None and session.config.data.invalid == "mask":
            masks[f"{folder}target"] = pair.weight_node
    weights = {f"weights of {key}": node for key, node in masks.items()}
    samples, arrays = gather_samples(session, batches, names | weights)
    with session.comm.agreement():
        if session.comm.rank:  # the other ranks only take part in the agreement
            return
        for key in masks:
            _mark_absent(arrays[key], arrays.pop(f"weights of {key}"))
        with atomic_path(path, parents=True) as partial, h5py.File(partial, "w", locking=False) as file:
            for key, array in arrays.items():
                file[key] = array
            file["sample"] = np.array(samples, np.int64)
            write_sources(file, session.samples.dataset, samples)


def _mark_absent(target: np.ndarray, weights: np.ndarray) -> None:
    """Set numbers to NaN where their weight is 0; class indices, which have no NaN, do not change."""
    if np.issubdtype(target.dtype, np.floating):
        n, *rest = weights.shape
        absent = weights.reshape(n, *(1,) * (target.ndim - weights.ndim), *rest) == 0
        target[np.broadcast_to(absent, target.shape)] = np.nan
