"""A bounded look at the data before a run: channels and targets that carry no information.

Whatever the size of the file, a few parts of a few samples are read; fewer where the first ones already differ.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..dtensor.box import Box
from .normalize import ChannelStatistics
from .source import Dataset

__all__ = ["Look", "look_at", "look_at_data"]

_log = logging.getLogger(__name__)

LOOKS = 64
"""Samples that are looked at, at most."""
PART = 1 << 20
"""Elements that are read of one sample, but for a single row that has more."""
_NAMED = 6  # channels named in a message


@dataclass(frozen=True)
class Look:
    """What parts of some samples hold.

    Attributes
    ----------
    samples : int
        How many were looked at.
    constant : dict
        Channel -> its value, where that was the same everywhere.
    scale : float
        Largest mean of |value| or of its square over a part: what a loss is, in order of magnitude, if zero is
        predicted.
    """

    samples: int
    constant: dict[int, float]
    scale: float


def look_at(dataset: Dataset, name: str, least: int = 1) -> Look:
    """Read parts of samples that lie evenly in the file, until every channel has shown two values. Local.

    Parameters
    ----------
    dataset, name
        What is read.
    least : int
        Look at so many samples, if there are, also where the first ones differ.
    """
    samples, shape = len(dataset), dataset.fields[name].shape
    low, high, scale, seen = np.full(shape[-1], np.inf), np.full(shape[-1], -np.inf), 0.0, 0
    chosen = np.unique(np.linspace(0, samples - 1, min(samples, LOOKS)).astype(np.int64))
    for seen, sample in enumerate(chosen, 1):
        values = _part(dataset, name, int(sample), (seen - 1) / max(1, len(chosen) - 1)).reshape(-1, shape[-1])
        np.minimum(low, values.min(axis=0), out=low)
        np.maximum(high, values.max(axis=0), out=high)
        magnitude = np.abs(values, dtype=np.float64)
        scale = max(scale, float(magnitude.mean()), float(np.square(magnitude).mean()))
        if seen >= least and (low < high).all():
            break
    alone = samples * math.prod(shape[:-1]) == 1  # one number is no sign of anything
    constant = {} if alone else {int(k): float(low[k]) for k in np.flatnonzero(low == high)}
    return Look(seen, constant, scale)


def _part(dataset: Dataset, name: str, sample: int, where: float) -> NDArray[np.float32]:
    """Some rows of a sample, the first ones for `where` = 0, the last ones for 1."""
    shape = dataset.fields[name].shape
    box = Box.of_shape((1, *shape))
    if len(shape) > 1:
        rows = min(shape[0], max(1, PART // math.prod(shape[1:])))
        first = int(where * (shape[0] - rows))
        box = box.replace(1, first, first + rows)
    out = np.empty(box.shape, np.float32)
    dataset.read(name, [sample], box, out)
    return out


def look_at_data(
    dataset: Dataset,
    statistics: Mapping[str, ChannelStatistics] | None,
    sample: int = 0,
    least: int = 1,
    weights: Collection[str] = (),
) -> float:
    """Log a warning of constant inputs, of targets with a single value, and of weights of 0; the scale of the targets.
    Local.

    Parameters
    ----------
    dataset : Dataset
        With targets.
    statistics : dict of ChannelStatistics, optional
        By input, of its training samples: then that input is not looked at, because these say more.
    sample : int
        One of these samples.
    least : int
        Samples whose targets are looked at.
    weights : names
        Targets that are weights of positions.

    Raises
    ------
    DataError
        As in reading.
    """
    scale = 0.0
    for name, field in dataset.fields.items():
        if name in weights:
            _look_at_weights(dataset, name)
        elif field.is_target:
            scale = max(scale, _look_at_target(dataset, name, least))
        else:
            _look_at_input(dataset, name, (statistics or {}).get(name), sample)
    return scale


def _look_at_input(dataset: Dataset, name: str, statistics: ChannelStatistics | None, sample: int) -> None:
    if statistics is None:
        found = look_at(dataset, name)
        constant, where = found.constant, _looked_at(found.samples, len(dataset))
    else:
        values = _part(dataset, name, sample, 0.0).reshape(-1, dataset.fields[name].shape[-1])[0]
        constant = {int(k): float(values[k]) for k in np.flatnonzero(statistics.std == 0) if statistics.count > 1}
        where = "in all training samples, to 7 digits, and 0 when normalised"
    if constant:
        _log.warning(
            "%s: %s %s: a network learns nothing from that; check the file, or leave it out",
            _of(dataset, name, False), _named(constant, dataset.fields[name].channel_names), where,
        )  # fmt: skip


def _look_at_weights(dataset: Dataset, name: str) -> None:
    found = look_at(dataset, name, LOOKS)
    if set(found.constant.values()) == {0.0} and len(found.constant) == dataset.fields[name].shape[-1]:
        _log.warning(
            "%s: the weights %s are 0 %s: nothing counts where they are; check the file and data.targets",
            dataset.path, name, _looked_at(found.samples, len(dataset)),
        )  # fmt: skip


def _look_at_target(dataset: Dataset, name: str, least: int) -> float:
    """Its scale."""
    found = look_at(dataset, name, least)
    if len(found.constant) == dataset.fields[name].shape[-1]:
        numbers = ", ".join(f"{v:g}" for v in sorted(set(found.constant.values())))
        _log.warning(
            "%s: the targets are %s %s: a network learns that and nothing else; check the file and data.targets",
            _of(dataset, name, True), numbers, _looked_at(found.samples, len(dataset)),
        )  # fmt: skip
    return found.scale


def _of(dataset: Dataset, name: str, is_target: bool) -> str:
    """The file; and which of several inputs, or targets, it is."""
    several = sum(field.is_target == is_target for field in dataset.fields.values()) > 1
    return f"{dataset.path}: {name}" if several else f"{dataset.path}"


def _looked_at(some: int, samples: int) -> str:
    return f"in all {samples} samples" if some == samples else f"in all {some} of {samples} samples that were looked at"


def _named(constant: dict[int, float], names: Sequence[str]) -> str:
    """Channels with their values."""
    named = [f"channel {k} ({names[k]}) is {value:g}" for k, value in list(constant.items())[:_NAMED]]
    more = len(constant) - len(named)
    return ", ".join(named) + (f", and {more} more are constant" if more else "")
