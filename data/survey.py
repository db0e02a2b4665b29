"""Passes over the data before a run: channels and targets without information, invalid values, counts of classes.

The check for channels without information is bounded: for any size of the file, it reads a few parts of a few samples,
and stops early if the first ones differ. The other passes read all of their samples.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..dtensor.box import Box
from .disk import DataError
from .normalize import ChannelStatistics, SampleRows
from .source import Dataset, sample_shape
from .targets import TargetRange, TargetReduction, has_no_weight

__all__ = [
    "Look",
    "count_classes",
    "find_invalid",
    "look_at",
    "look_at_data",
    "read_box",
]

_log = logging.getLogger(__name__)

LOOKS = 64
"""Largest number of samples that :func:`look_at` reads."""
PART = 1 << 20
"""Elements of one sample that are read at a time; a single row may have more."""
_NAMED = 6  # channels named in a message


def read_box(
    dataset: Dataset, name: str, sample: int, box: Box, reduction: TargetReduction | None = None
) -> NDArray[np.float32]:
    """Return the values of a field in a box of one sample, ``(1, *spatial, C)``; with `reduction`, the box counts
    patches. Elements of weight 0 are NaN. Local.
    """
    out = np.empty(box.shape, np.float32)
    cells = box if reduction is None else reduction.fine_box(box)
    values = out if reduction is None else np.empty(cells.shape, np.float32)
    dataset.read(name, [sample], cells, values)
    absent = _absent(dataset, name, sample, cells)
    if reduction is not None:
        reduction.apply(values, out, absent)
        if absent is not None:
            gone = np.empty(box.shape, np.float32)
            # A patch is absent if all of its cells are.
            replace(reduction, rule="all").apply(absent, gone)
            absent = gone > 0
    if absent is not None:
        out[absent] = np.nan
    return out


def _absent(dataset: Dataset, name: str, sample: int, box: Box) -> NDArray[np.bool_] | None:
    weights = getattr(dataset, "weighted", {}).get(name)
    if not weights:
        return None
    return has_no_weight(lambda *read: dataset.read(read[0], [sample], *read[1:]), dataset.fields, name, weights, box)


# -- channels and targets without information --------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """Summary of parts of some samples.

    Attributes
    ----------
    samples : int
        Number of samples that were read.
    constant : dict
        Values of the channels that have a single value in all parts, by channel.
    scale : float
        Largest mean of |value| or of its square over a part: the order of magnitude of the loss of a prediction of
        zero.
    """

    samples: int
    constant: dict[int, float]
    scale: float


def look_at(dataset: Dataset, name: str, least: int = 1, usable: NDArray[Any] | None = None) -> Look:
    """Return a summary of parts of samples, evenly spaced in the file, which are read until every channel has two
    different values. Local.

    Parameters
    ----------
    dataset, name
        Dataset, and the field of it that is read.
    least : int
        Smallest number of samples to read, if there are as many, even if the first ones differ.
    usable : int array, optional
        Samples that may be read, in order; by default all.
    """
    indices = np.arange(len(dataset)) if usable is None else usable
    samples, shape = len(indices), dataset.fields[name].shape
    low, high, scale, seen = np.full(shape[-1], np.inf), np.full(shape[-1], -np.inf), 0.0, 0
    chosen = indices[np.unique(np.linspace(0, samples - 1, min(samples, LOOKS)).astype(np.int64))]
    for seen, sample in enumerate(chosen, 1):
        # From the first rows of the first sample to the last rows of the last one.
        values = _part(dataset, name, int(sample), (seen - 1) / max(1, len(chosen) - 1)).reshape(-1, shape[-1])
        # NaN marks an absent element.
        np.fmin(low, np.fmin.reduce(values, axis=0), out=low)
        np.fmax(high, np.fmax.reduce(values, axis=0), out=high)
        # In float64, because squares of large float32 numbers overflow.
        magnitude = np.abs(values[~np.isnan(values)], dtype=np.float64)
        if magnitude.size:
            scale = max(scale, float(magnitude.mean()), float(np.square(magnitude).mean()))
        if seen >= least and (low < high).all():
            break
    alone = samples * math.prod(shape[:-1]) == 1  # a single number proves nothing
    constant = {} if alone else {int(k): float(low[k]) for k in np.flatnonzero(low == high)}
    return Look(seen, constant, scale)


def _part(dataset: Dataset, name: str, sample: int, where: float) -> NDArray[np.float32]:
    """Read some rows of a sample: the first ones for `where` = 0, the last ones for 1."""
    shape = sample_shape(dataset, name, sample)
    box = Box.of_shape((1, *shape))
    if len(shape) > 1:
        rows = min(shape[0], max(1, PART // math.prod(shape[1:])))
        first = int(where * (shape[0] - rows))
        box = box.replace(1, first, first + rows)
    return read_box(dataset, name, sample, box)


def look_at_data(
    dataset: Dataset,
    statistics: Mapping[str, ChannelStatistics] | None,
    sample: int = 0,
    least: int = 1,
    weights: Collection[str] = (),
    usable: NDArray[Any] | None = None,
) -> float:
    """Warn of constant inputs, targets with a single value and weights of 0. Return the largest scale (:class:`Look`)
    of the targets, 1 for normalized ones. Local.

    Parameters
    ----------
    dataset : Dataset
        Dataset with targets.
    statistics : dict of ChannelStatistics, optional
        Statistics of the training samples, by input (they show which channels are constant, so few samples are read),
        and by normalized target.
    sample : int
        One of the training samples.
    least : int
        Smallest number of samples whose targets are read.
    weights : names
        Targets that are weights of positions.
    usable : int array, optional
        Samples that may be read, in order; by default all. Invalid ones would end the run.

    Raises
    ------
    DataError
        As in reading.
    """
    scale, chosen = 0.0, np.arange(len(dataset)) if usable is None else usable
    for name, field in dataset.fields.items():
        if name in weights:
            _look_at_weights(dataset, name, chosen)
        elif field.is_target:
            own_scale, known = _look_at_target(dataset, name, least, chosen), name in (statistics or {})
            scale = max(scale, 1.0 if known else own_scale)  # normalized numbers are of order one
        else:
            _look_at_input(dataset, name, (statistics or {}).get(name), sample, chosen)
    return scale


def _look_at_input(
    dataset: Dataset, name: str, statistics: ChannelStatistics | None, sample: int, usable: NDArray[Any]
) -> None:
    if statistics is None:
        look = look_at(dataset, name, usable=usable)
        constant, where = look.constant, _looked_at(look.samples, len(usable))
    else:
        # Any element has the value of a constant channel. With one cell in all, every channel seems constant.
        values = _part(dataset, name, sample, 0.0).reshape(-1, dataset.fields[name].shape[-1])[0]
        constant = {int(k): float(values[k]) for k in np.flatnonzero(statistics.std == 0) if statistics.count > 1}
        where = "in all training samples, to 7 digits, and 0 after normalization"
    if constant:
        _log.warning(
            "%s: %s %s: a network learns nothing from it; check the file, or leave it out",
            _source(dataset, name, False), _named(constant, dataset.fields[name].channel_names), where,
        )  # fmt: skip


def _look_at_weights(dataset: Dataset, name: str, usable: NDArray[Any]) -> None:
    look = look_at(dataset, name, LOOKS, usable)
    if set(look.constant.values()) == {0.0} and len(look.constant) == dataset.fields[name].shape[-1]:
        _log.warning(
            "%s: the weights %s are 0 %s: no position has a loss; check the file and data.targets",
            dataset.path, name, _looked_at(look.samples, len(usable)),
        )  # fmt: skip


def _look_at_target(dataset: Dataset, name: str, least: int, usable: NDArray[Any]) -> float:
    """Warn of a target with a single value; return the scale of the target (:class:`Look`)."""
    look = look_at(dataset, name, least, usable)
    if len(look.constant) == dataset.fields[name].shape[-1]:
        numbers = ", ".join(f"{v:g}" for v in sorted(set(look.constant.values())))
        _log.warning(
            "%s: the targets are %s %s: a network learns only this value; check the file and data.targets",
            _source(dataset, name, True), numbers, _looked_at(look.samples, len(usable)),
        )  # fmt: skip
    return look.scale


def _source(dataset: Dataset, name: str, is_target: bool) -> str:
    """Return the path of the file, with the name of the field if there are several inputs, or several targets."""
    several = sum(field.is_target == is_target for field in dataset.fields.values()) > 1
    return f"{dataset.path}: {name}" if several else f"{dataset.path}"


def _looked_at(count: int, samples: int) -> str:
    return f"in all {samples} samples" if count == samples else f"in all {count} of {samples} samples that were checked"


def _named(constant: dict[int, float], names: Sequence[str]) -> str:
    """Return the constant channels with their names and values, as a string."""
    named = [f"channel {k} ({names[k]}) is {value:g}" for k, value in list(constant.items())[:_NAMED]]
    more = len(constant) - len(named)
    return ", ".join(named) + (f", and {more} more are constant" if more else "")


# -- invalid numbers ---------------------------------------------------------------------------------------


def find_invalid(dataset: Dataset, ranges: Mapping[str, TargetRange], samples: Iterable[int]) -> dict[int, str]:
    """Return samples with NaN, infinity or targets out of range, each with its first invalid value as a string. Local.

    The function reads all `samples`. Elements of weight 0 may have any value.

    Parameters
    ----------
    dataset : Dataset
        Data set; its :attr:`Dataset.lenient` is restored afterwards.
    ranges : mapping of TargetRange
        Range of targets by name; a target without a range may be any finite number.
    samples : iterable of int

    Raises
    ------
    DataError
        A sample cannot be read.
    """
    # Otherwise reading would raise at the first invalid value.
    before, dataset.lenient = dataset.lenient, frozenset(dataset.fields)
    try:
        rows = {name: SampleRows(dataset, name) for name in dataset.fields}
        limits = {name: ranges.get(name, TargetRange()) for name in dataset.fields}
        faults = {int(index): _first_invalid(dataset, int(index), rows, limits) for index in samples}
    finally:
        dataset.lenient = before
    return {index: text for index, text in faults.items() if text}


def _first_invalid(
    dataset: Dataset, index: int, rows: Mapping[str, SampleRows], limits: Mapping[str, TargetRange]
) -> str:
    for name, field in dataset.fields.items():
        last = 0
        for block in rows[name].of_sample(index):
            first, last = last, last + block.shape[1]
            good = limits[name].allows(block)
            if not good.all():
                # Only now, because reading the weights takes time.
                whole = Box.of_shape((1, *sample_shape(dataset, name, index)))
                absent = _absent(dataset, name, index, whole.replace(1, first, last))
                good |= False if absent is None else absent
            if not good.all():
                at = tuple(np.argwhere(~good)[0])
                where = f"target {field.dataset!r}" if field.is_target else field.channel(int(at[-1]))
                return f"{block[at]:g} in {where}"
    return ""


# -- classes -----------------------------------------------------------------------------------------------


def count_classes(
    dataset: Dataset, name: str, classes: int, samples: Iterable[int], reduction: TargetReduction | None = None
) -> NDArray[np.int64]:
    """Count the positions of each class in a target of these samples, by blocks of rows. Local; reads all of them.

    Parameters
    ----------
    dataset, name
        Dataset, and the target that is read. Class indices outside ``0 .. classes - 1`` (ignored ones), and positions
        of weight 0, are not counted.
    classes
        Number of classes.
    samples
        Indices of the samples.
    reduction
        Reduction of cells to patches; then patches are counted.

    Raises
    ------
    DataError
        As in reading; a target is between two classes.
    """
    counts = np.zeros(classes, np.int64)
    for sample in samples:
        fine = sample_shape(dataset, name, int(sample))
        shape = fine if reduction is None else reduction.coarse_shape(fine)
        rows = max(1, PART * shape[0] // math.prod(fine))  # rows of patches with at most about PART cells
        for first in range(0, shape[0], rows):
            box = Box.of_shape((1, *shape)).replace(1, first, min(first + rows, shape[0]))
            labels = read_box(dataset, name, int(sample), box, reduction).reshape(-1)
            # This also drops NaN, which marks elements of weight 0: a comparison with NaN is false.
            labels = labels[(labels >= 0) & (labels < classes)]
            if np.any(labels != np.rint(labels)):
                raise DataError(
                    f"{dataset.path}: sample {sample}: expected class indices in {name!r}, to count them, got "
                    f"{labels[labels != np.rint(labels)][0]:g}; give the weights as numbers"
                )
            counts += np.bincount(labels.astype(np.int64), minlength=classes)
    return counts
