"""Samples that are held out by name: those of files, of simulations, or of years."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .disk import DataError

__all__ = ["KINDS", "Unit", "belonging_to", "held_out", "years"]

Unit = Literal["file", "simulation", "year"]
KINDS: tuple[Unit, ...] = ("file", "simulation", "year")
"""Meanings of a name, in the order in which they are tried."""
_SECONDS = {"second": 1, "sec": 1, "s": 1, "minute": 60, "min": 60, "hour": 3600, "hr": 3600, "h": 3600, "day": 86400}
_SINCE = re.compile(r"\s*([a-zA-Z]+?)s?\s+since\s+(\d+)-(\d+)-(\d+)(?:[T\s]+(\d+):(\d+)(?::(\d+))?)?")
#: Lengths of the months of calendars of CF whose years all have one length.
_MONTHS = {"noleap": [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31], "360_day": [30] * 12}
_MONTHS["all_leap"] = [31, 29, *_MONTHS["noleap"][2:]]
_SAME = {"365_day": "noleap", "366_day": "all_leap"}
_GREGORIAN = ("standard", "gregorian", "proleptic_gregorian")
_NAMED = 8  # files that a message names


def held_out(dataset: Any, names: Sequence[str]) -> NDArray[np.bool_]:
    """Return which samples belong to one of the names, ``(N,)``. Local, the same on every rank.

    A name is that of a file, else a value of the dataset ``simulation``, else a year (:func:`belonging_to`).

    Raises
    ------
    DataError
        A name belongs to no sample, or all samples are held out.
    """
    found = np.zeros(len(dataset), np.bool_)
    for name in names:
        for kind in KINDS:
            own = _own(dataset, kind, name)
            if own.any():
                break
        else:
            files = getattr(dataset, "names", [])
            listed = f"; files: {', '.join(files[:_NAMED])}{', ...' if len(files) > _NAMED else ''}" if files else ""
            raise DataError(
                f"{dataset.path}: data.validation: expected names of files, values of the dataset 'simulation', or "
                f"years of the coordinate of time, got {name!r}, to which no sample belongs{listed}"
            )
        found |= own
    if found.all():
        raise DataError(
            f"{dataset.path}: data.validation: expected some of the {len(dataset)} samples, got all of them by "
            f"{', '.join(map(repr, names))}; leave some for training"
        )
    return found


def _own(dataset: Any, kind: Unit, name: str) -> NDArray[np.bool_]:
    if hasattr(dataset, "belonging"):
        return dataset.belonging(kind, name)
    if kind == "simulation" and dataset.groups is not None:
        return np.asarray(dataset.groups).astype(str) == name
    return np.zeros(len(dataset), np.bool_)


def belonging_to(kind: Unit, name: str, texts: Sequence[str], structure: Any) -> NDArray[np.bool_]:
    """Return which samples of a file belong to a name, ``(N,)``. Local.

    Parameters
    ----------
    texts
        Names of the file: its path, its name, and this without its suffix. They may match `name` as a pattern (``*``).
    structure : Structure
        Structure of the file.
    """
    if kind == "file":
        return np.full(structure.samples, any(fnmatchcase(text, name) or text == name for text in texts))
    if kind == "simulation":
        values = None if structure.groups is None else structure.groups.astype(str)
    else:
        of_time = None if structure.times is None else years(structure.times, structure.time_units, structure.calendar)
        values = None if of_time is None else of_time.astype(str)
    return np.zeros(structure.samples, np.bool_) if values is None else values == name


def years(times: NDArray[np.float64], units: str, calendar: str = "standard") -> NDArray[np.int64] | None:
    """Return the year of each time; None for units or calendars other than those of CF. Local.

    >>> years(np.array([0.0, 364.5, 365.0]), "days since 2001-01-01").tolist()
    [2001, 2001, 2002]
    >>> years(np.array([0.0, 359.0, 360.0]), "days since 2001-01-01", "360_day").tolist()
    [2001, 2001, 2002]
    """
    found, calendar = _SINCE.match(units), _SAME.get(calendar.lower(), calendar.lower())
    seconds = _SECONDS.get(found[1].lower()) if found else None
    if found is None or seconds is None or not np.isfinite(times).all():
        return None
    year, month, day, *clock = (int(text or 0) for text in found.groups()[1:])
    first = clock[0] * 3600 + clock[1] * 60 + clock[2] + np.rint(times * seconds)
    if calendar in _GREGORIAN:
        begin = np.datetime64(f"{year:04}-{month:02}-{day:02}", "s")
        return (begin + first.astype("timedelta64[s]")).astype("datetime64[Y]").astype(np.int64) + 1970
    if calendar not in _MONTHS:
        return None
    months = _MONTHS[calendar]
    days = sum(months[: month - 1]) + day - 1 + np.floor(first / 86400)
    return year + np.floor_divide(days, sum(months)).astype(np.int64)
