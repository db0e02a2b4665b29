"""Values of a file that stand for other classes: ``255`` for "unknown", ``7`` for class 1."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import DataError

__all__ = ["LabelMap", "check_numbers"]

#: Whole numbers up to here are exact in float32, in which files are read.
_EXACT = 2**24


Table = dict[str, int | dict[str, int]]


def check_numbers(labels: Table) -> Table:
    """Numbers by number, or tables of them by target, as a configuration has them. Raises ValueError for others."""
    tables = [given for given in labels.values() if isinstance(given, dict)]
    if tables and len(tables) < len(labels):
        raise ValueError("expected numbers for numbers, or a table of them per target, got both; use tables")
    keys = [key for table in tables for key in table] if tables else list(labels)
    wrong = [key for key in keys if not re.fullmatch("-?[0-9]{1,9}", key)]
    if wrong:
        raise ValueError(f"expected whole numbers of the file as keys, got {wrong[0]!r}")
    return labels


class LabelMap:
    """Replaces some whole numbers by others, all at once; what is not among them stays.

    Parameters
    ----------
    numbers
        By the number in the file.

    Raises
    ------
    DataError
        A number that float32 does not hold exactly.

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
        return ", ".join(f"{have} is {made}" for have, made in self.numbers.items())

    def apply(self, values: NDArray[Any]) -> None:
        """Replace in place; NaN stays. Local."""
        if not len(self._from):
            return
        at = np.minimum(np.searchsorted(self._from, values), len(self._from) - 1)
        np.copyto(values, self._to[at], where=self._from[at] == values, casting="same_kind")

    def described(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Attributes of a dataset as they hold for the replaced numbers. Local.

        Numbers of flags are replaced too; where two meanings have got one number, both lists are left out.

        >>> LabelMap({10: 1, 20: 0}).described({"flag_values": [10, 20], "flag_meanings": "water land"})
        {'flag_values': [1, 0], 'flag_meanings': 'water land'}
        """
        found = {key: value for key, value in attributes.items() if not key.startswith("flag_")}
        given = attributes.get("flag_values")
        if not isinstance(given, list) or any(isinstance(one, str) for one in given):
            return found
        values = np.array(given, np.float64)
        self.apply(values)
        if len(np.unique(values)) < len(values):
            return found
        return {key: [int(one) for one in values] if key == "flag_values" else attributes[key] for key in attributes}
