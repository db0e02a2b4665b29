"""Quantities with units as strings, such as ``"1.2 us"`` and ``"16 GiB"``, and the types of such values in files."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Annotated

from pydantic import BeforeValidator, Field

from halograd.documents import shown
from halograd.schema import LARGEST

__all__ = [
    "UNITS",
    "Bytes",
    "BytesPerSecond",
    "Flops",
    "FlopsPerSecond",
    "Seconds",
    "SecondsPerByte",
    "format_quantity",
    "parse_quantity",
]

#: Unit -> the measured quantity, and an example.
UNITS = {
    "s": ("a time", "1.2 us"),
    "s/B": ("a time per byte", "25.7 ps/B"),
    "B": ("a size", "16 GiB"),
    "B/s": ("a bandwidth", "12.5 GB/s"),
    "flop": ("a number of operations", "300 Mflop"),
    "flop/s": ("a rate of operations", "15.7 Tflop/s"),
}
_DECIMAL = {"p": 1e-12, "n": 1e-9, "u": 1e-6, "µ": 1e-6, "m": 1e-3, "": 1.0}
_LARGE = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_PREFIXES = {
    "s": _DECIMAL,
    "s/B": _DECIMAL,
    "B": _LARGE | _BINARY,
    "B/s": _LARGE | _BINARY,
    "flop": _LARGE,
    "flop/s": _LARGE,
}
_QUANTITY = re.compile(r"\s*(?P<number>[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)\s*(?P<unit>\S*)\s*", re.ASCII)
_LONGEST = 100  # characters


def parse_quantity(text: object, unit: str) -> float:
    """Return the number in `text`, converted to `unit`.

    Parameters
    ----------
    text
        A number and a unit with an optional prefix: ``p n u m`` (or none) before seconds, ``k M G T P`` before
        bytes and operations, ``Ki Mi Gi Ti`` before bytes. The space between number and unit may be left out.
    unit
        One of `UNITS`: "s", "s/B", "B", "B/s", "flop", "flop/s".

    Returns
    -------
    float
        At least 0, in `unit`.

    Raises
    ------
    ValueError
        If `text` is not a string, has no unit or a unit of another kind, or is negative.

    Examples
    --------
    >>> parse_quantity("16GiB", "B") == 16 * 2**30
    True
    >>> parse_quantity("15.7 Tflop/s", "flop/s")
    15700000000000.0
    """
    kind, example = UNITS[unit]
    expected = f'expected {kind} with its unit, such as "{example}", got {shown(text)}'
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) and len(text) <= _LONGEST else None
    if match is None:
        raise ValueError(f"{expected}; write a number and a unit in quotes")
    scales = {prefix + unit: scale for prefix, scale in _PREFIXES[unit].items()}
    if match["unit"] not in scales:
        raise ValueError(f"{expected}; the unit must be one of {', '.join(dict.fromkeys(scales))}")
    value, scale = float(match["number"]), scales[match["unit"]]
    # Divided by 1e6 instead of multiplied by 1e-6: "1.2 us" then becomes exactly the float 1.2e-06.
    value = value / round(1 / scale) if scale < 1 else value * scale
    if value < 0 or not math.isfinite(value):
        raise ValueError(f"{expected}; it must be finite and not negative")
    return value


def format_quantity(value: float, unit: str) -> str:
    """Return `value` [`unit`] as a string that `parse_quantity` converts back to exactly the same float.

    It refuses values that are not finite, which are shown as ``inf`` and ``nan``.
    """
    # Whole numbers without .0; a float holds every integer below 2**53.
    return f"{int(value)} {unit}" if value < 2**53 and value % 1 == 0 else f"{value!r} {unit}"


def _read_as(unit: str) -> BeforeValidator:
    return BeforeValidator(partial(parse_quantity, unit=unit))


# Bounds far beyond any machine: within them no cost overflows or divides by 0.
Seconds = Annotated[float, Field(le=LARGEST), _read_as("s")]
SecondsPerByte = Annotated[float, Field(le=LARGEST), _read_as("s/B")]
Bytes = Annotated[float, Field(ge=1, le=LARGEST), _read_as("B")]
BytesPerSecond = Annotated[float, Field(ge=1 / LARGEST, le=LARGEST), _read_as("B/s")]
Flops = Annotated[float, Field(le=LARGEST), _read_as("flop")]
FlopsPerSecond = Annotated[float, Field(ge=1 / LARGEST, le=LARGEST), _read_as("flop/s")]
