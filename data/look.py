"""A bounded look at the data before a run: channels and targets that carry no information.

Whatever the size of the file, a few parts of a few samples are read; fewer where the first ones already differ.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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


def look_at(
    read: Callable[[Sequence[int], Box, NDArray[Any]], Any], samples: int, shape: tuple[int, ...], least: int = 1
) -> Look:
    """Read parts of samples that lie evenly in the file, until every channel has shown two values. Local.

    Parameters
    ----------
    read : callable
        :meth:`Hdf5Dataset.read` or :meth:`Hdf5Dataset.read_targets`.
    samples : int
        In the file.
    shape : tuple
        ``(*spatial, C)`` of one sample.
    least : int
        Look at so many samples, if there are, also where the first ones differ.
    """
    low, high, scale, seen = np.full(shape[-1], np.inf), np.full(shape[-1], -np.inf), 0.0, 0
    chosen = np.unique(np.linspace(0, samples - 1, min(samples, LOOKS)).astype(np.int64))
    for seen, sample in enumerate(chosen, 1):
        values = _part(read, int(sample), shape, (seen - 1) / max(1, len(chosen) - 1)).reshape(-1, shape[-1])
        np.minimum(low, values.min(axis=0), out=low)
        np.maximum(high, values.max(axis=0), out=high)
        magnitude = np.abs(values, dtype=np.float64)
        scale = max(scale, float(magnitude.mean()), float(np.square(magnitude).mean()))
        if seen >= least and (low < high).all():
            break
    alone = samples * math.prod(shape[:-1]) == 1  # one number is no sign of anything
    constant = {} if alone else {int(k): float(low[k]) for k in np.flatnonzero(low == high)}
    return Look(seen, constant, scale)


def _part(read: Callable[..., Any], sample: int, shape: tuple[int, ...], where: float) -> NDArray[np.float32]:
    """Some rows of a sample, the first ones for `where` = 0, the last ones for 1."""
    box = Box.of_shape((1, *shape))
    if len(shape) > 1:
        rows = min(shape[0], max(1, PART // math.prod(shape[1:])))
        first = int(where * (shape[0] - rows))
        box = box.replace(1, first, first + rows)
    out = np.empty(box.shape, np.float32)
    read([sample], box, out)
    return out


def look_at_data(dataset: Dataset, statistics: ChannelStatistics | None, sample: int = 0, least: int = 1) -> float:
    """Log a warning of constant inputs and of targets with a single value; the scale of the targets. Local.

    Parameters
    ----------
    dataset : Dataset
        With targets.
    statistics : ChannelStatistics, optional
        Of its training samples: then the inputs are not looked at, because these say more.
    sample : int
        One of these samples.
    least : int
        Samples whose targets are looked at.

    Raises
    ------
    DataError
        As in reading.
    """
    if statistics is None:
        inputs = look_at(dataset.read, len(dataset), dataset.sample_shape)
        constant, where = inputs.constant, _looked_at(inputs.samples, len(dataset))
    else:
        values = _part(dataset.read, sample, dataset.sample_shape, 0.0).reshape(-1, dataset.sample_shape[-1])[0]
        constant = {int(k): float(values[k]) for k in np.flatnonzero(statistics.std == 0) if statistics.count > 1}
        where = "in all training samples, to 7 digits, and 0 when normalised"
    if constant:
        _log.warning(
            "%s: %s %s: a network learns nothing from that; check the file, or leave it out",
            dataset.path, _named(constant, dataset.channel_names), where,
        )  # fmt: skip
    targets = look_at(dataset.read_targets, len(dataset), dataset.target_shape, least)
    if len(targets.constant) == dataset.target_shape[-1]:
        numbers = ", ".join(f"{v:g}" for v in sorted(set(targets.constant.values())))
        _log.warning(
            "%s: the targets are %s %s: a network learns that and nothing else; check the file and data.targets",
            dataset.path, numbers, _looked_at(targets.samples, len(dataset)),
        )  # fmt: skip
    return targets.scale


def _looked_at(some: int, samples: int) -> str:
    return f"in all {samples} samples" if some == samples else f"in all {some} of {samples} samples that were looked at"


def _named(constant: dict[int, float], names: Sequence[str]) -> str:
    """Channels with their values."""
    told = [f"channel {k} ({names[k]}) is {value:g}" for k, value in list(constant.items())[:_NAMED]]
    more = len(constant) - len(told)
    return ", ".join(told) + (f", and {more} more are constant" if more else "")
