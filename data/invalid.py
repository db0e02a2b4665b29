"""NaN, infinity and targets out of range: which samples have some."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from .normalize import SampleRows
from .source import Dataset
from .targets import TargetRange

__all__ = ["find_invalid"]


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
