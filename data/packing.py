"""Packed data: the map from stored numbers to values, by the conventions of netCDF and CF.

::

    stored  --(_FillValue, missing_value, valid_range)-->  NaN, or  --(scale_factor, add_offset)-->  value

References
----------
CF Conventions 1.11, Sections 2.5.1 (missing data) and 8.1 (packed data); NetCDF Users Guide, Attribute Conventions.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from halograd.documents import one_line, shown

from .disk import DataError

__all__ = ["ATTRIBUTES", "Packing", "packing_of"]

ATTRIBUTES = (
    *("scale_factor", "add_offset", "_FillValue", "missing_value", "valid_range", "valid_min", "valid_max"),
    "_Unsigned",
)
"""Attributes of packed data: those that are numbers, and last ``_Unsigned``, which is a string."""

_log = logging.getLogger(__name__)

#: Elements unpacked at a time, so that their float64 values stay in the cache.
_AT_ONCE = 1 << 15


@dataclass(frozen=True)
class Packing:
    """Map from the stored numbers of a dataset to values: ``scale * stored + offset``, or NaN where there is no value.

    Attributes
    ----------
    dtype : str
        Dtype of the stored numbers; the attribute ``_Unsigned`` changes the signedness of the file's dtype.
    scale, offset : float
    missing : tuple of numbers
        Stored numbers without a value.
    low, high : number or None
        Smallest and largest stored number with a value; None: no limit.
    names : tuple of str
        Names of the attributes with numbers from which it was made, for messages; ignored in comparisons.
    """

    dtype: str
    scale: float = 1.0
    offset: float = 0.0
    missing: tuple[float, ...] = ()
    low: float | None = None
    high: float | None = None
    names: tuple[str, ...] = field(default=(), compare=False)

    @property
    def scales(self) -> bool:
        """Whether values differ from the stored numbers."""
        return (self.scale, self.offset) != (1.0, 0.0)

    @property
    def masks(self) -> bool:
        """Whether some stored numbers have no value."""
        return bool(self.missing) or self.low is not None or self.high is not None

    @property
    def marks(self) -> tuple[str, ...]:
        """Names of the attributes that mark stored numbers without a value."""
        return tuple(name for name in self.names if name not in ("scale_factor", "add_offset"))

    def unpack(self, stored: NDArray[Any], out: NDArray[Any], kept: Collection[float] = ()) -> None:
        """Write the values of stored data to `out`, a float array of their shape. Local.

        Values are computed in float64 and rounded once, to the dtype of `out`. Stored numbers in `kept` always have a
        value.
        """
        stored = stored.view(self.dtype)  # `_Unsigned`: the same bits, read with the other signedness
        with np.errstate(all="ignore"):  # a value that overflows becomes infinite, which a later check finds
            for part in _parts(stored.shape):
                source, target = stored[part], out[part]
                values = source
                if self.scales:
                    values = source.astype(np.float64)
                    values *= self.scale
                    values += self.offset
                np.copyto(target, values, casting="unsafe")
                if self.masks:
                    np.copyto(target, np.nan, where=self.absent(source, kept), casting="unsafe")

    def absent(self, stored: NDArray[Any], kept: Collection[float] = ()) -> NDArray[np.bool_]:
        """Return which stored numbers, of :attr:`dtype`, stand for missing values, except those in `kept`. Local."""
        absent = np.zeros(stored.shape, np.bool_)
        for number in self.missing:
            absent |= stored == number
        if self.low is not None:
            absent |= stored < self.low
        if self.high is not None:
            absent |= stored > self.high
        # Rarely needed, and a pass over the numbers for each label.
        for number in kept if absent.any() else ():
            absent &= stored != number
        return absent


def _parts(shape: Sequence[int]) -> Iterator[Any]:
    """Yield indices, along leading axes, of the parts of an array of this shape, with at most `_AT_ONCE` elements each.

    >>> list(_parts((2, 3, 20_000)))[:2]
    [(0, slice(0, 1, None)), (0, slice(1, 2, None))]
    """
    rest = math.prod(shape[1:])
    if not shape:
        yield ...
    elif rest > _AT_ONCE:
        yield from ((k, *inner) for k in range(shape[0]) for inner in _parts(shape[1:]))
    else:
        step = max(1, _AT_ONCE // max(1, rest))
        yield from ((slice(first, first + step),) for first in range(0, shape[0], step))


def packing_of(attributes: Any, dtype: np.dtype[Any], where: str) -> Packing | None:
    """Return the packing that attributes of a dataset describe; None if its numbers are the values. Local.

    Parameters
    ----------
    attributes : mapping
        Attributes, read by ``name in attributes`` and ``attributes[name]``, as in h5py and Zarr.
    dtype
        Dtype of the stored numbers.
    where
        File and dataset, for messages.

    Raises
    ------
    DataError
        An attribute violates the conventions: a factor per channel, a string, NaN, a factor of 0.
    """
    # All but `_Unsigned`, which is a string.
    numbers_by_name = {name: _numbers(attributes[name], name, where) for name in ATTRIBUTES[:-1] if name in attributes}
    numbers_by_name = {name: numbers for name, numbers in numbers_by_name.items() if numbers.size}
    scale = _number(numbers_by_name, "scale_factor", 1.0, where)
    offset = _number(numbers_by_name, "add_offset", 0.0, where)
    if scale == 0:
        raise _error("scale_factor", "a number other than 0", scale, where)
    own = _signed(attributes, dtype, where)
    missing = [
        _stored(number, own, own != dtype, name, where)
        for name in ("_FillValue", "missing_value")
        for number in numbers_by_name.get(name, ())
    ]
    known = tuple(dict.fromkeys(number for number in missing if number is not None))
    low, high = _limits(numbers_by_name, own, own != dtype, (scale, offset), where)
    packing = Packing(own.str, scale, offset, known, low, high, tuple(numbers_by_name))
    # `_Unsigned` alone makes other values, too: `own` then differs from `dtype`.
    return packing if packing.scales or packing.masks or own != dtype else None


def _error(name: str, expected: str, got: Any, where: str) -> DataError:
    return DataError(
        f"{where}: attribute {name!r}: expected {expected}, got {one_line(shown(got))}; correct or remove it, or set "
        "data.unpack = false, which reads numbers as they are stored"
    )


def _numbers(value: Any, name: str, where: str) -> NDArray[Any]:
    """Return the numbers of an attribute, ``(n,)``. Raises DataError for other types."""
    if isinstance(value, h5py.Empty):
        return np.empty(0)
    numbers = np.asarray(value)
    if numbers.dtype.kind not in "iufb":
        raise _error(name, "a number", value, where)
    return numbers.reshape(-1)


def _number(numbers_by_name: Mapping[str, NDArray[Any]], name: str, default: float, where: str) -> float:
    """Return the number of an attribute, or `default` without the attribute. Raises DataError unless it is one finite
    number.
    """
    numbers = numbers_by_name.get(name)
    if numbers is None:
        return default
    if numbers.size != 1 or not np.isfinite(numbers[0]):
        raise _error(name, "one finite number for the whole dataset", numbers.tolist(), where)
    return float(numbers[0])


def _signed(attributes: Any, dtype: np.dtype[Any], where: str) -> np.dtype[Any]:
    """Return the dtype of the stored numbers; that of integers has the signedness of the attribute ``_Unsigned``.

    NetCDF-3 stores unsigned integers as signed ones.
    """
    if "_Unsigned" not in attributes or dtype.kind not in "iu":
        return dtype
    value = attributes["_Unsigned"]
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    if not isinstance(text, str) or text.lower() not in ("true", "false"):
        raise _error("_Unsigned", "'true' or 'false'", value, where)
    kind = "u" if text.lower() == "true" else "i"
    return np.dtype(f"{dtype.str[0]}{kind}{dtype.itemsize}")


def _stored(number: Any, dtype: np.dtype[Any], turned: bool, name: str, where: str) -> float | None:
    """Return an attribute's number as a stored number; None for NaN, or (with a warning) if no stored number equals it.

    `turned`: integers have another signedness in the file than in `dtype`, and so may the number.
    """
    value = number.item()
    if value != value:  # a stored NaN stays NaN, which means a missing value without any mark
        return None
    stored: float | None = None
    if dtype.kind == "f":
        with np.errstate(all="ignore"):
            stored = np.asarray(value).astype(dtype).item()
        # Larger than the type: no stored number equals it.
        if math.isinf(stored) and not math.isinf(value):
            stored = None
    elif math.isfinite(value) and value == int(value):
        low, high = _extremes(dtype)
        stored = _turned(int(value), dtype) if turned else int(value)
        if not low <= stored <= high:
            stored = None
    if stored is None:
        _log.warning("%s: attribute %r has no effect: no number of type %s is %s", where, name, dtype, value)
    return stored


def _turned(number: float, dtype: np.dtype[Any]) -> float:
    """Return the integer of `dtype` with the bits of a number of the other signedness; an integer of `dtype` is
    unchanged.
    """
    low, high = _extremes(dtype)
    return number if low <= number <= high else number + (high - low + 1) * (1 if number < low else -1)


def _extremes(dtype: np.dtype[Any]) -> tuple[int, int]:
    return (0, 1) if dtype.kind == "b" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))


def _limits(
    numbers_by_name: Mapping[str, NDArray[Any]],
    dtype: np.dtype[Any],
    turned: bool,
    factors: tuple[float, float],
    where: str,
) -> tuple[float | None, float | None]:
    """Return the smallest and the largest stored number with a value, or None where there is no limit.

    Limits in the type of the factors, if the stored type is of another kind, are limits of values.
    """
    limits_by_side = {"low": -math.inf, "high": math.inf}
    types = [numbers_by_name[name].dtype for name in ("scale_factor", "add_offset") if name in numbers_by_name]
    for name, sides in (("valid_min", ["low"]), ("valid_max", ["high"]), ("valid_range", ["low", "high"])):
        numbers = numbers_by_name.get(name)
        if numbers is None:
            continue
        limits = numbers.tolist()
        # NetCDF Users Guide, valid_range: limits of the type of the factors hold for unpacked values.
        of_values = types and numbers.dtype == np.result_type(*types) and numbers.dtype.kind != dtype.kind
        if turned and not of_values:
            limits = [_turned(limit, dtype) for limit in limits]
        # A limit is compared with itself, too, so that NaN is refused.
        if len(limits) != len(sides) or not all(a <= b for a, b in zip(limits, limits[-1:] * len(limits))):
            raise _error(name, "one number" if len(sides) == 1 else "two rising numbers", numbers.tolist(), where)
        limits_by_side |= _packed(dict(zip(sides, limits)), dtype, *factors) if of_values else dict(zip(sides, limits))
    low, high = limits_by_side["low"], limits_by_side["high"]
    if dtype.kind == "f":
        return (low if low > -math.inf else None), (high if high < math.inf else None)
    least, most = _extremes(dtype)
    # Limits beyond the type are cut to one past its ends, which leaves no number, or all.
    first = math.ceil(min(max(low, least), most + 1))
    last = math.floor(max(min(high, most), least - 1))
    return (first if first > least else None), (last if last < most else None)


def _packed(limits: Mapping[str, float], dtype: np.dtype[Any], scale: float, offset: float) -> dict[str, float]:
    """Return limits of values as limits of stored numbers; those of integers are widened, so that rounding excludes
    none.
    """
    # Stored integers have the distance 1: a limit that rounding moved past one of them still includes it.
    slack = 0.0 if dtype.kind == "f" else 1e-3
    other = {"low": "high", "high": "low"}
    # A negative factor reverses the order: the lower limit of values is the upper one of stored numbers.
    packed = {side if scale > 0 else other[side]: (limit - offset) / scale for side, limit in limits.items()}
    return {side: number + (slack if side == "high" else -slack) for side, number in packed.items()}
