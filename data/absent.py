"""Absent targets: elements of weight 0. Checks, counts and reductions ignore their stored values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..dtensor.box import Box
from .structure import Field
from .targets import LabelMap, TargetRange, check_values

__all__ = ["check_read", "has_no_weight"]

#: ``read(name, box, out)`` reads a box of a field.
Read = Callable[[str, Box, NDArray[Any]], object]


class Checked(Protocol):
    """The attributes of a data set that :func:`check_read` reads, as in :class:`Hdf5Dataset`."""

    path: Path
    fields: dict[str, Field]
    ranges: dict[str, TargetRange]

    @property
    def lenient(self) -> frozenset[str]: ...

    @property
    def labels(self) -> Mapping[str, LabelMap]: ...

    @property
    def weighted(self) -> Mapping[str, Sequence[str]]: ...

    def read(self, name: str, indices: Sequence[int], box: Box, out: NDArray[Any]) -> tuple[slice, ...]: ...


def check_read(dataset: Checked, name: str, indices: Sequence[int], box: Box, values: NDArray[Any]) -> None:
    """Apply the label map to a box that was read, and check its values. Local; modifies `values`.

    Invalid targets of weight 0 are permitted. An invalid class index of weight 0 becomes 0, which integers can
    represent.

    Parameters
    ----------
    box
        Box within the batch ``(N, *spatial, C)``, of the shape of `values`.

    Raises
    ------
    DataError
        As in :func:`check_values`.
    """
    field = dataset.fields[name]
    if name in dataset.labels:
        dataset.labels[name].apply(values)
    if name in dataset.lenient:
        return
    limits = dataset.ranges.get(name, TargetRange()) if field.is_target else None
    good = np.isfinite(values) if limits is None else limits.allows(values)
    if good.all():
        return
    if dataset.weighted.get(name):

        def read(other: str, part: Box, out: NDArray[Any]) -> object:
            return dataset.read(other, indices, part, out)

        absent = has_no_weight(read, dataset.fields, name, dataset.weighted[name], box)
        if limits is not None and limits.whole:
            values[absent & ~good] = 0
        good |= absent
    check_values(dataset.path, field, limits, values, good, indices, box.start)


def has_no_weight(read: Read, fields: Mapping[str, Field], name: str, weights: Sequence[str], box: Box) -> NDArray[Any]:
    """Return which elements of a box of a target have the weight 0 in all fields of `weights`. Local.

    Parameters
    ----------
    box
        Box within the batch ``(N, *spatial, C)`` of the target.

    Weights may have an extent of 1 on any axis, be a number per sample, or have a grid that is coarser or finer by
    whole factors. An element under finer weights has the weight 0 if all of them are 0. Weights on another grid are
    ignored.
    """
    found = np.ones(box.shape, np.bool_)
    for one in weights:
        found &= _is_zero(read, one, fields[name].shape, fields[one].shape, box)
    return found


def _is_zero(read: Read, name: str, target: Sequence[int], own: Sequence[int], box: Box) -> NDArray[Any]:
    per_sample = len(own) == 1 < len(target)
    grid = (1,) * len(target) if per_sample else tuple(own)
    if len(grid) != len(target) or any(n % m and m % n for n, m in zip(target, grid)):
        return np.zeros(box.shape, np.bool_)
    ranges, taken = [box.ranges[0]], list[NDArray[Any]]()
    for (low, high), n, m in zip(box.ranges[1:], target, grid):
        first, last = low * m // n, -(-high * m // n)
        ranges.append((first, last))
        # The index of the coarser weight that covers each element, or of the first finer weight under it.
        taken.append(np.arange(low, high) * m // n - first)
    part = Box.of_ranges([ranges[0], (0, 1)] if per_sample else ranges)
    values = np.empty(part.shape, np.float32)
    read(name, part, values)
    zero = values.reshape([high - low for low, high in ranges]) == 0
    for axis, (n, m, at) in enumerate(zip(target, grid, taken), 1):
        zero = np.logical_and.reduceat(zero, at, axis=axis) if m > n else np.take(zero, at, axis=axis)
    return zero
