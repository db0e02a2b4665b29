"""Pairs of times: inputs of some time steps, and targets of later ones, without copies (``data.lag``).

::

    rows of one simulation      0   1   2   3   4   5   6   7
    lag = 2, history = 2        x       x                        inputs, oldest first
    rollout = 2                                 y       y        targets

A sample is a row with all of its steps in the same simulation, or file, and without a gap in time between them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..dtensor.box import Box
from .disk import DataError
from .sampler import Unit, belonging_samples
from .source import DatasetView, checked_index, overlap
from .structure import Field

__all__ = ["TimeSteps", "simulations"]

_log = logging.getLogger(__name__)

#: A distance in time of more than so many usual ones is a gap; months have 28 to 31 days.
_GAP = 1.5


def simulations(dataset: Any) -> NDArray[np.int64]:
    """Return a number for every row of a data set; rows with the same number follow one another in time. Local.

    Rows have different numbers if they are of different groups (``simulation``) or files, or if the coordinate of time
    has a gap or a step backwards between them.
    """
    files = getattr(dataset, "file_of", np.zeros(len(dataset), np.int64))
    groups = np.zeros(len(dataset), np.int64) if dataset.groups is None else dataset.groups
    # A number per pair of file and group. `reshape`: in NumPy 2.0 the inverse along an axis has two axes.
    numbers = np.unique(np.stack([files, groups], 1), axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)
    times = [getattr(getattr(part, "structure", None), "times", None) for part in getattr(dataset, "parts", [])]
    breaks = np.zeros(len(dataset), np.int64)
    for file, own in enumerate(times):
        rows = np.flatnonzero(files == file)
        if own is None:
            continue
        for number in np.unique(numbers[rows]):
            chain = np.flatnonzero(numbers[rows] == number)
            distances = np.diff(own[chain])
            # The median, because gaps are few and may be long.
            usual = np.median(distances) if len(distances) else 0.0
            # Each gap or step backwards begins a new number.
            breaks[rows[chain[1:]]] = np.cumsum(~((distances > 0) & (distances <= _GAP * usual)))
    if breaks.any():
        _log.warning(
            "%s: gaps or steps backwards of time: %d; data.lag pairs no samples across them",
            dataset.path, len(np.unique(np.stack([numbers, breaks], 1), axis=0)) - len(np.unique(numbers)),
        )  # fmt: skip
    return np.unique(np.stack([numbers, breaks], 1), axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)


class TimeSteps(DatasetView):
    """Samples made of several time steps of another data set, in which each sample is one time. Local.

    Inputs have the channels of `history` steps, oldest first, the last step being that of the sample; targets have
    those of the next `rollout` steps. Fields that all samples share are unchanged.

    Parameters
    ----------
    dataset : Dataset
        Times, in order within each simulation (:func:`simulations`).
    lag : int
        Distance of two steps, in samples of `dataset`.
    history, rollout : int
        Numbers of steps of inputs and of targets.
    labelled : bool
        Whether targets are read; else the steps of inputs suffice.

    Attributes
    ----------
    rows : int64 array
        Samples of `dataset` that have all of their steps, in order.

    Raises
    ------
    DataError
        No sample has all of its steps.
    """

    def __init__(self, dataset: Any, lag: int, history: int = 1, rollout: int = 1, labelled: bool = True) -> None:
        super().__init__(dataset)
        self.lag, self.history, self.rollout = lag, history, rollout
        numbers = simulations(dataset)
        # Stable: rows of a simulation stay in order of time, also if simulations alternate in the file.
        order = np.argsort(numbers, kind="stable")
        # Offsets of the earliest and the latest row of a sample from the row that gives it its number.
        first, last = -lag * (history - 1), lag * rollout if labelled else 0
        chosen = np.arange(-first, len(order) - last)
        if len(chosen):
            ordered = numbers[order]
            # Sorted, so equal numbers at both ends mean that all rows between are of that simulation, too.
            chosen = chosen[ordered[chosen + first] == ordered[chosen + last]]
        if not len(chosen):
            longest = int(np.bincount(numbers).max()) if len(numbers) else 0
            raise DataError(
                f"{self.path}: data.lag: expected {1 + last - first} successive times in one simulation (of one file), "
                f"got at most {longest}; choose a smaller lag, history or rollout, or correct the dataset 'simulation'"
            )
        # Back to the order of the file: samples keep their order under any lag.
        chosen = chosen[np.argsort(order[chosen], kind="stable")]
        self._order, self._chosen = order, chosen
        self.rows = order[chosen].astype(np.int64)
        if dataset.groups is not None:
            self.groups = dataset.groups[self.rows]
        elif labelled and len(np.unique(numbers)) > 1:  # neighbors in time are held out together
            self.groups = numbers[self.rows]
        self.fields = {name: self._field(name) for name in dataset.fields}

    def _field(self, name: str) -> Field:
        field, steps = self.dataset.fields[name], len(self._steps(name))
        shape = (*field.shape[:-1], field.shape[-1] * steps)
        return replace(field, shape=shape, channel_names=[*field.channel_names] * steps)

    def _steps(self, name: str) -> Sequence[int]:
        """Return the distances of the steps of a field from that of the sample, in samples of the other data set."""
        field = self.dataset.fields[name]
        if field.static:
            return (0,)
        if field.is_target:
            return range(self.lag, self.lag * self.rollout + 1, self.lag)
        return range(-self.lag * (self.history - 1), 1, self.lag)

    def __len__(self) -> int:
        return len(self.rows)

    def __getattr__(self, name: str) -> Any:
        attribute = super().__getattr__(name)
        if name == "extents" and attribute is not None:
            return {field: extents[self.rows] for field, extents in attribute.items()}
        return attribute[self.rows] if name == "file_of" else attribute

    def place(self, index: int) -> str:
        """Return the source and number of a sample, for messages."""
        return self.dataset.place(self._row(index))

    def belonging(self, kind: Unit, name: str) -> NDArray[np.bool_]:
        """Return which samples belong to a file, a simulation or a year of this name, ``(N,)`` (:func:`held_out`)."""
        return belonging_samples(self.dataset, kind, name)[self.rows]

    def source(self, index: int) -> tuple[str, int]:
        """Return the path of a sample's file, and the sample's number in it."""
        row = self._row(index)
        return self.dataset.source(row) if hasattr(self.dataset, "source") else (str(self.path), row)

    def slow_chunks(self, name: str, box: Box, shuffled: bool) -> str:
        """Return the warning of :meth:`Hdf5Dataset.slow_chunks` for the steps of a field."""
        slow = getattr(self.dataset, "slow_chunks", None)
        return "" if slow is None else slow(name, box.replace(-1, 0, self.dataset.fields[name].shape[-1]), shuffled)

    def read(self, name: str, indices: Sequence[int], box: Box, out: NDArray[Any]) -> tuple[slice, ...]:
        """Read a box as :meth:`Dataset.read` does."""
        part, filled = overlap(box, (len(indices), *self.fields[name].shape))
        if part.size == 0:
            return filled
        target, channels = out[filled], self.dataset.fields[name].shape[-1]
        first, last = part.ranges[-1]
        for number, step in enumerate(self._steps(name)):
            low, high = max(first, number * channels), min(last, (number + 1) * channels)
            if low < high:
                rows = [self._row(int(index), step) for index in indices]
                own = part.replace(-1, low - number * channels, high - number * channels)
                self.dataset.read(name, rows, own, target[..., low - first : high - first])
        return filled

    def _row(self, index: int, step: int = 0) -> int:
        return int(self._order[self._chosen[checked_index(self, index)] + step])
