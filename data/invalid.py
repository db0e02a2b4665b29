"""NaN, infinity and targets out of range: which samples have some."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import DataError
from .normalize import SampleRows
from .source import Dataset
from .structure import Field
from .targets import TargetRange

__all__ = ["check_values", "find_invalid"]


def check_values(
    path: Path,
    field: Field,
    limits: TargetRange | None,
    values: NDArray[Any],
    indices: Sequence[int],
    origin: Sequence[int],
) -> None:
    """Refuse numbers that were read and cannot be used. Local.

    Parameters
    ----------
    path, field
        Where they are from.
    limits
        What a target may be; None for an input, which may be any finite number.
    values
        A box of a batch, ``(N, *spatial, C)``.
    indices
        Samples of the batch.
    origin
        Where the box begins in it.

    Raises
    ------
    DataError
        Naming the first of them, its sample and its place.
    """
    good = np.isfinite(values) if limits is None else limits.allows(values)
    if good.all():
        return
    at = tuple(np.argwhere(~good)[0])
    sample, *where = (int(a + low) for a, low in zip(at, origin))
    if limits is None:
        raise DataError(
            f"{path}: {float(values[at])} in sample {indices[sample]}, {field.channel(where[-1])} at "
            f"{tuple(where[:-1])}; expected finite numbers: repair or leave out that sample, or set data.invalid to "
            '"skip" or "fill"'
        )
    other = " or choose another loss" if limits.high < np.inf else ""
    raise DataError(
        f"{path}: target {float(values[at]):g} in sample {indices[sample]} of {field.dataset!r} at {tuple(where)}; "
        f"expected {limits}: repair the data{other}"
    )


def find_invalid(dataset: Dataset, ranges: Mapping[str, TargetRange], samples: Iterable[int]) -> dict[int, str]:
    """Those of these samples with a number that cannot be used, and what the first one is. Local; reads all of them.

    Parameters
    ----------
    dataset : Dataset
        Its :attr:`Dataset.lenient` is as before afterwards.
    ranges : mapping of TargetRange
        What targets may be, by name; all finite numbers if there is none.
    samples : iterable of int

    Raises
    ------
    DataError
        A sample that cannot be read.
    """
    before, dataset.lenient = dataset.lenient, frozenset(dataset.fields)
    try:
        rows = {name: SampleRows(dataset, name) for name in dataset.fields}
        limits = {name: ranges.get(name, TargetRange()) for name in dataset.fields}
        found = {int(index): _first(dataset, int(index), rows, limits) for index in samples}
    finally:
        dataset.lenient = before
    return {index: text for index, text in found.items() if text}


def _first(dataset: Dataset, index: int, rows: Mapping[str, SampleRows], limits: Mapping[str, TargetRange]) -> str:
    for name, field in dataset.fields.items():
        for block in rows[name].of_sample(index):
            good = limits[name].allows(block)
            if not good.all():
                at = tuple(np.argwhere(~good)[0])
                where = f"target {field.dataset!r}" if field.is_target else field.channel(int(at[-1]))
                return f"{block[at]:g} in {where}"
    return ""
