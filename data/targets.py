"""Values of targets: their range, label maps, reduction to patches, and absent targets.

A label map replaces values of a file: ``255`` for "unknown", ``7`` for class 1. A reduction computes one value per
patch from the values per cell: a network with stride 64 predicts patches.

Targets of weight 0 are absent: checks, counts and reductions ignore their stored values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..dtensor.box import Box
from .disk import DataError
from .structure import Field

__all__ = [
    "RULES",
    "LabelMap",
    "TargetRange",
    "TargetReduction",
    "check_numbers",
    "check_read",
    "check_values",
    "has_no_weight",
    "kept_labels",
]

Axes = tuple[int, ...]


class TargetRange(NamedTuple):
    """Valid values of a target: ``low .. high``, or the value `ignored`; with `whole`, class indices only."""

    low: float = -np.inf
    high: float = np.inf
    whole: bool = False
    ignored: float | None = None

    @property
    def bounded(self) -> bool:
        return self.low > -np.inf

    def allows(self, values: NDArray[Any]) -> NDArray[np.bool_]:
        """Return which values are valid."""
        # A comparison with NaN is false, so NaN is invalid.
        good = (values >= self.low) & (values <= self.high) & np.isfinite(values)
        if self.whole:
            good &= values == np.trunc(values)
        if self.ignored is not None:
            good |= values == self.ignored
        return good

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a finite number"
        if not self.bounded:
            return kind
        if self.high == np.inf:
            return f"{kind} >= {self.low:g}"
        ignored = "" if self.ignored is None else f", or {self.ignored:g}, which is ignored"
        return f"{'a whole number of ' if self.whole else ''}{self.low:g} .. {self.high:g}{ignored}"


def check_values(
    path: Path,
    field: Field,
    limits: TargetRange | None,
    values: NDArray[Any],
    good: NDArray[np.bool_],
    indices: Sequence[int],
    origin: Sequence[int],
    labels: LabelMap | None = None,
) -> None:
    """Raise DataError if a value is not `good`. Local.

    Parameters
    ----------
    path, field
        File and field, for the message.
    limits
        Range of a target; None for an input, which may be any finite number.
    values
        A box of a batch, ``(N, *spatial, C)``.
    good
        Which values are valid.
    indices
        Samples of the batch.
    origin
        Start of the box in the batch.
    labels
        Label map that was applied to the values, for the message.

    Raises
    ------
    DataError
        The message has the first invalid value, its sample and its position.
    """
    if good.all():
        return
    at = tuple(np.argwhere(~good)[0])
    sample, *where = (int(a + low) for a, low in zip(at, origin))  # in the batch
    value = f"{float(values[at]):g}"
    is_missing = np.isnan(values[at]) and field.packing is not None and field.packing.masks
    if is_missing and field.packing is not None:
        value += f" (a missing value by {', '.join(field.packing.marks)})"
    replaced = [have for have, number in labels.numbers.items() if number == values[at]] if labels else []
    if replaced:
        value += f" ({' or '.join(map(str, replaced))} in the file, replaced by data.labels)"
    if limits is None:
        raise DataError(
            f"{path}: {value} in sample {indices[sample]}, {field.channel(where[-1])} at "
            f"{tuple(where[:-1])}; expected finite numbers: repair or leave out that sample, or set data.invalid to "
            '"skip" or "fill"'
        )
    other = ", or choose another loss" if limits.high < np.inf else ""
    if limits.whole and limits.ignored is None:
        other = f", ignore that class (ignore_index of the loss){other}"
    if is_missing and limits.whole:
        other = ", or, if the number is a class, remove that attribute or set data.unpack = false"
    raise DataError(
        f"{path}: target {value} in sample {indices[sample]} of {field.dataset!r} at {tuple(where)}; "
        f"expected {limits}: repair the data{other}, or give it the weight 0 there (loss(prediction, target, weights))"
    )


# -- labels ----------------------------------------------------------------------------------------------

#: Largest whole number that is exact in float32, the type in which files are read.
_EXACT = 2**24

Table = dict[str, int | dict[str, int]]


def check_numbers(labels: Table) -> Table:
    """Check and return a label map of a configuration: a table from old to new labels, or one such table per target.

    Raises ValueError for anything else.
    """
    tables = [entry for entry in labels.values() if isinstance(entry, dict)]
    if tables and len(tables) < len(labels):
        raise ValueError("expected a new number per number, or such a table per target, got both; use tables")
    keys = [key for table in tables for key in table] if tables else list(labels)
    wrong = [key for key in keys if not re.fullmatch("-?[0-9]{1,9}", key)]
    if wrong:
        raise ValueError(f"expected whole numbers of the file as keys, got {wrong[0]!r}")
    return labels


class LabelMap:
    """Map of integer labels to other integers, applied to all labels at once; other values are unchanged.

    Parameters
    ----------
    numbers
        New label by the label in the file.

    Raises
    ------
    DataError
        float32 cannot represent a label exactly.

    >>> values = np.array([0.0, 7.0, 255.0, 1.0])
    >>> LabelMap({255: -1, 7: 1, 1: 7}).apply(values)
    >>> values
    array([ 0.,  1., -1.,  7.])
    """

    def __init__(self, numbers: Mapping[int, int]) -> None:
        large = [n for pair in numbers.items() for n in pair if abs(n) > _EXACT]
        if large:
            raise DataError(f"data.labels: expected whole numbers of at most {_EXACT}, got {large[0]}")
        self.numbers = dict(sorted(numbers.items()))
        self._from = np.array(list(self.numbers), np.float64)
        self._to = np.array(list(self.numbers.values()), np.float64)

    def __str__(self) -> str:
        return ", ".join(f"{have} is {number}" for have, number in self.numbers.items())

    def apply(self, values: NDArray[Any]) -> None:
        """Replace labels in place; other values and NaN are unchanged. Local."""
        if not len(self._from):
            return
        # One pass with the old labels: a map that exchanges two labels must not apply the second rule to the first.
        # Values above all labels get the index of the last label, which they do not equal.
        at = np.minimum(np.searchsorted(self._from, values), len(self._from) - 1)
        np.copyto(values, self._to[at], where=self._from[at] == values, casting="same_kind")

    def described(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the attributes of a dataset after the replacement of its labels. Local.

        Flag values are replaced too. If two flags get the same label, or flag values are not a list of numbers, all
        attributes of flags are left out.

        >>> LabelMap({10: 1, 20: 0}).described({"flag_values": [10, 20], "flag_meanings": "water land"})
        {'flag_values': [1, 0], 'flag_meanings': 'water land'}
        """
        described = {key: value for key, value in attributes.items() if not key.startswith("flag_")}
        flags = attributes.get("flag_values")
        if not isinstance(flags, list) or any(isinstance(flag, str) for flag in flags):
            return described
        values = np.array(flags, np.float64)
        self.apply(values)
        if len(np.unique(values)) < len(values):
            return described
        return {key: [int(n) for n in values] if key == "flag_values" else attributes[key] for key in attributes}


def kept_labels(name: str, ranges: Mapping[str, TargetRange], labels: Mapping[str, LabelMap]) -> list[float]:
    """Return the values of a field that are labels even if the file marks them as missing values. Local.

    These are the value that the loss ignores, and the labels that a label map replaces.
    """
    ignored = ranges[name].ignored if name in ranges else None
    mapped: list[float] = [*labels[name].numbers] if name in labels else []
    return mapped if ignored is None else [*mapped, ignored]


# -- patches ---------------------------------------------------------------------------------------------


def _center(cells: NDArray[Any], there: NDArray[np.bool_], axes: Axes) -> NDArray[Any]:
    """Return the value of the cell in the middle of the patch (the lower one of two)."""
    # From the last axis on, because `take` removes the axis and renumbers those after it.
    for axis in sorted(axes, reverse=True):
        cells = np.take(cells, (cells.shape[axis] - 1) // 2, axis=axis)
    return cells


def _majority(cells: NDArray[Any], there: NDArray[np.bool_], axes: Axes) -> NDArray[Any]:
    return 2 * np.sum((cells > 0.5) & there, axis=axes) > np.sum(there, axis=axes)


def _fraction(cells: NDArray[Any], there: NDArray[np.bool_], axes: Axes) -> NDArray[Any]:
    # NumPy orders a sum over several axes by all extents of the array, and thus by the cut: the cells of a patch become
    # one contiguous row, and absent ones zeros, so that the order of its sum depends on its own extents only.
    values = np.moveaxis(np.where(there, cells, 0), axes, range(-len(axes), 0)).astype(np.float64, "C")
    total = values.reshape(*values.shape[: -len(axes)], -1).sum(axis=-1)
    return total / np.maximum(np.sum(there, axis=axes), 1)


def _max(cells: NDArray[Any], there: NDArray[np.bool_], axes: Axes) -> NDArray[Any]:
    largest = np.max(cells, axis=axes, where=there, initial=-np.inf)
    return np.where(np.any(there, axis=axes), largest, 0)


RULES: dict[str, Callable[[NDArray[Any], NDArray[np.bool_], Axes], Any]] = {
    "any": lambda cells, there, axes: np.any((cells > 0.5) & there, axis=axes),
    "all": lambda cells, there, axes: np.all((cells > 0.5) | ~there, axis=axes),
    "majority": _majority,
    "fraction": _fraction,
    "max": _max,
    "center": _center,
}
"""``any``, ``all``, ``majority`` (more than half) give 0 or 1; ``fraction`` the mean; ``max``; ``center`` one cell.

Functions of the cells, a mask of the present cells, and the axes of a patch. All but ``center`` ignore absent cells.
"""


@dataclass(frozen=True)
class TargetReduction:
    """Rule and size of patches.

    Attributes
    ----------
    rule : str
        Key of :data:`RULES`.
    factors : tuple of int
        Cells per patch, per spatial axis.

    >>> half = TargetReduction("any", (2, 2))
    >>> half.fine_box(Box((0, 1, 0, 0), (3, 2, 4, 1)))
    Box((0, 2, 0, 0), (3, 4, 8, 1))
    """

    rule: str
    factors: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise DataError(f"target rule: expected one of {', '.join(RULES)}, got {self.rule!r}")
        if not self.factors or any(f < 1 for f in self.factors):
            raise DataError(f"cells per patch: expected 1 or more on every spatial axis, got {self.factors}")

    def coarse_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return ``(*spatial, C)`` of the patches, for cells of that shape. Raises DataError if patches do not divide
        the grid.
        """
        *spatial, channels = shape
        if len(spatial) != len(self.factors) or any(n % f for n, f in zip(spatial, self.factors)):
            raise DataError(
                f"expected a grid of {len(self.factors)} axes divisible into patches of {self.factors}, got "
                f"{tuple(spatial)}; use another resolution or patch"
            )
        return (*(n // f for n, f in zip(spatial, self.factors)), channels)

    def fine_box(self, box: Box) -> Box:
        """Return the cells ``(N, *spatial, C)`` of a box of patches."""
        scale = (1, *self.factors, 1)
        return Box(tuple(a * s for a, s in zip(box.start, scale)), tuple(b * s for b, s in zip(box.stop, scale)))

    @property
    def skips(self) -> bool:
        """Whether the rule can ignore absent cells."""
        return self.rule != "center"

    def apply(self, cells: NDArray[Any], out: NDArray[Any], absent: NDArray[np.bool_] | None = None) -> None:
        """Reduce cells ``(N, *spatial, C)`` patch by patch to out ``(N, *patches, C)``. Local.

        A patch depends on its own cells only, so any decomposition along patches gives the same values. The rules other
        than ``center`` ignore cells that are `absent`: with them, a patch of only absent cells is 0, or 1 for ``all``.
        """
        n, *patches, channels = out.shape
        if cells.shape != (n, *(p * f for p, f in zip(patches, self.factors)), channels):
            raise DataError(f"expected cells for patches {out.shape} of {self.factors}, got shape {cells.shape}")
        if out.size == 0:
            return
        split: list[int] = [n]
        for p, f in zip(patches, self.factors):
            split += [p, f]
        # (N, patches, cells, patches, cells, ..., C): the cells of a patch are at the axes 2, 4, ...
        axes = tuple(2 + 2 * k for k in range(len(patches)))
        there = np.broadcast_to(np.True_, cells.shape) if absent is None else ~absent
        out[...] = RULES[self.rule](cells.reshape(*split, channels), there.reshape(*split, channels), axes)


#: ``read(name, box, out)`` reads a box of a field.
Read = Callable[[str, Box, NDArray[Any]], object]


class Checked(Protocol):
    """Protocol: the part of a data set that :func:`check_read` uses, as in :class:`Hdf5Dataset`."""

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
    """Apply the label map to a box that was read, and check its values, unless the field may have invalid ones. Local;
    modifies `values`.

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
    check_values(dataset.path, field, limits, values, good, indices, box.start, dataset.labels.get(name))


def has_no_weight(read: Read, fields: Mapping[str, Field], name: str, weights: Sequence[str], box: Box) -> NDArray[Any]:
    """Return which elements of a box of the target `name` have the weight 0 in all fields of `weights`. Local.

    Weights may have an extent of 1 on any axis, be a number per sample, or have a grid that is coarser or finer by
    whole factors. An element under finer weights has the weight 0 if all of them are 0. Weights on another grid count
    as not 0.

    Parameters
    ----------
    box
        Box within the batch ``(N, *spatial, C)`` of the target.
    """
    mask = np.ones(box.shape, np.bool_)
    for weight in weights:
        mask &= _is_zero(read, weight, fields[name].shape, fields[weight].shape, box)
    return mask


def _is_zero(read: Read, name: str, target: Sequence[int], own: Sequence[int], box: Box) -> NDArray[Any]:
    per_sample = len(own) == 1 < len(target)
    grid = (1,) * len(target) if per_sample else tuple(own)
    if len(grid) != len(target) or any(n % m and m % n for n, m in zip(target, grid)):
        return np.zeros(box.shape, np.bool_)
    ranges, parts = [box.ranges[0]], list[NDArray[Any]]()
    for (low, high), n, m in zip(box.ranges[1:], target, grid):
        first, last = low * m // n, -(-high * m // n)  # the weights that cover the box
        ranges.append((first, last))
        # The index of the coarser weight that covers each element, or of the first finer weight under it.
        parts.append(np.arange(low, high) * m // n - first)
    part = Box.of_ranges([ranges[0], (0, 1)] if per_sample else ranges)
    values = np.empty(part.shape, np.float32)
    read(name, part, values)
    zero = values.reshape([high - low for low, high in ranges]) == 0
    for axis, (n, m, at) in enumerate(zip(target, grid, parts), 1):
        # Finer weights must all be 0 under an element; coarser ones are repeated.
        zero = np.logical_and.reduceat(zero, at, axis=axis) if m > n else np.take(zero, at, axis=axis)
    return zero
