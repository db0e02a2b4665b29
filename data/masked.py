"""Weights made from targets: 0 where a target has no valid number (``data.invalid = "mask"``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..dtensor.box import Box
from .disk import DataError
from .source import DatasetView, overlap
from .structure import Field
from .targets import TargetRange

__all__ = ["Masked"]


class Masked(DatasetView):
    """Samples of another data set, with weights that are 0 where a target is invalid. Local.

    Invalid targets (NaN, infinity, missing values, numbers out of range) are read as 0. A weight of one channel is 0
    where any channel of one of its targets is invalid. Weights that are also fields of `dataset` are multiplied by
    this mask; they may have an extent of 1 on any axis, or be a number per sample.

    Parameters
    ----------
    dataset : Dataset
        Samples with targets. From then on it permits their invalid values.
    targets : mapping of names
        Names of the targets that each weight belongs to, by the name of the weight.
    channels : mapping of int
        Number of channels of each weight: 1, or that of its targets.
    ranges : mapping of TargetRange
        Valid values of the targets, by name.

    Attributes
    ----------
    weighted : mapping of names
        Names of the weights of a target, by its name (:class:`Hdf5Dataset`).

    Raises
    ------
    DataError
        Targets of one weight, or that weight in the data, are on different grids.
    """

    def __init__(
        self,
        dataset: Any,
        targets: Mapping[str, Sequence[str]],
        channels: Mapping[str, int],
        ranges: Mapping[str, TargetRange],
    ) -> None:
        super().__init__(dataset)
        self.weighted: Mapping[str, Sequence[str]] = {}
        self._targets = targets
        self._limits = {target: ranges.get(target, TargetRange()) for names in targets.values() for target in names}
        self.fields |= {name: self._field(name, names, channels[name]) for name, names in targets.items()}
        # The setter lets the other data set read invalid targets; here they become weights.
        self.lenient = dataset.lenient

    def _field(self, name: str, targets: Sequence[str], channels: int) -> Field:
        fields = self.dataset.fields
        first, *others = [fields[target].shape for target in targets]
        for target, shape in zip(targets[1:], others):
            if shape[:-1] != first[:-1]:
                raise DataError(
                    f'{self.path}: data.invalid = "mask": expected targets of {name!r} on one grid, got {targets[0]!r} '
                    f"of {first[:-1]} and {target!r} of {shape[:-1]}; give each target weights of its own"
                )
        own = fields[name] if name in fields else Field(f"mask of {targets[0]}", "channels last", (1,), [])
        grid = (*first[:-1], channels)
        # A number per sample is a weight of all positions.
        stored = own.shape if len(own.shape) == len(grid) else (1,) * len(grid)
        if len(own.shape) not in (1, len(grid)) or any(m not in (1, n) for m, n in zip(stored, grid)):
            raise DataError(
                f'{self.path}: data.invalid = "mask": expected {own.dataset!r} on the grid {grid} of its target '
                f"{targets[0]!r}, with 1 for any extent, got {own.shape}; write it on that grid"
            )
        names = [f"channel {k}" for k in range(channels)]
        return replace(own, shape=grid, channel_names=names, is_target=True, chunks=None)

    @property
    def extents(self) -> dict[str, NDArray[np.int64]] | None:
        """Extents of every sample by the name of the field (:class:`FileSet`); weights have those of their targets."""
        extents = getattr(self.dataset, "extents", None)
        return None if extents is None else extents | {name: extents[names[0]] for name, names in self._targets.items()}

    @property
    def lenient(self) -> frozenset[str]:
        return self._lenient

    @lenient.setter
    def lenient(self, names: frozenset[str]) -> None:
        self._lenient = names
        self.dataset.lenient = names | self._limits.keys()

    def slow_chunks(self, name: str, box: Box, shuffled: bool) -> str:
        """Return the warning of :meth:`Hdf5Dataset.slow_chunks` for a field of the other data set; "" for weights."""
        slow = getattr(self.dataset, "slow_chunks", None)
        return slow(name, box, shuffled) if slow is not None and name not in self._targets else ""

    def read(self, name: str, indices: Sequence[int], box: Box, out: NDArray[Any]) -> tuple[slice, ...]:
        """Read a box as :meth:`Dataset.read` does."""
        if name not in self._targets:
            filled = self.dataset.read(name, indices, box, out)
            if name in self._limits:
                values = out[filled]
                # Integers, such as class indices, cannot represent NaN.
                values[~self._limits[name].allows(values)] = 0
            return filled
        part, filled = overlap(box, (len(indices), *self.fields[name].shape))
        if part.size == 0:
            return filled
        weights = out[filled]
        weights[...] = self._stored(name, indices, part, out.dtype)
        for target in self._targets[name]:
            weights *= self._valid(target, self.fields[name].shape[-1], indices, part, out.dtype)
        return filled

    def _stored(self, name: str, indices: Sequence[int], part: Box, dtype: Any) -> Any:
        """Return the weights that the other data set has in a box, as an array that broadcasts to the box; 1 if it has
        none.
        """
        if name not in self.dataset.fields:
            return 1
        shape, grid = self.dataset.fields[name].shape, self.fields[name].shape
        extents = shape if len(shape) == len(grid) else (1,) * len(grid)
        ranges = [(0, 1) if n == 1 else limits for n, limits in zip(extents, part.ranges[1:])]
        # A number per sample is read as (N, 1), without spatial axes.
        own = ranges if len(shape) == len(grid) else [(0, 1)]
        stored = np.zeros(Box.of_ranges([part.ranges[0], *own]).shape, dtype)  # nothing is read beyond a smaller sample
        self.dataset.read(name, indices, Box.of_ranges([part.ranges[0], *own]), stored)
        return stored.reshape(len(stored), *(high - low for low, high in ranges))

    def _valid(self, target: str, weights: int, indices: Sequence[int], part: Box, dtype: Any) -> NDArray[np.bool_]:
        """Return the mask of valid targets in the box `part` of a weight that has `weights` channels.

        With one channel of weights, an element is valid if all channels of the target are.
        """
        channels = self.dataset.fields[target].shape[-1]
        box = Box.of_ranges([*part.ranges[:-1], (0, channels)])
        values = np.full(box.shape, np.nan, dtype)  # nothing is read beyond a smaller sample: no target is there
        self.dataset.read(target, indices, box, values)
        good = self._limits[target].allows(values)
        if weights == channels:
            return good[..., slice(*part.ranges[-1])]
        return np.asarray(good.all(-1, keepdims=True))
