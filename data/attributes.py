"""What a file says about its numbers beside them: names, units, where they are from."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import h5py
import numpy as np

__all__ = ["OF_NUMBERS", "plain_attributes"]

#: Attributes that describe the numbers of a dataset. They hold for a target, and so for a prediction of it.
OF_NUMBERS = (
    *("units", "long_name", "standard_name", "description", "comment"),
    *("channel_names", "flag_values", "flag_meanings"),
)
#: Of a file; longer texts and lists are data.
_MOST, _LONGEST, _ITEMS = 64, 8192, 256


def plain_attributes(item: h5py.HLObject, wanted: Collection[str] | None = None) -> dict[str, Any]:
    """Texts, numbers, and lists of them among the attributes of a file or dataset; others are left out. Local.

    Parameters
    ----------
    wanted
        Names; None: all, but those of other libraries (``_NCProperties``).
    """
    try:
        names = [name for name in item.attrs if (name in wanted if wanted is not None else not name.startswith("_"))]
    except (OSError, RuntimeError, KeyError):
        return {}
    found = {name: _read(item, name) for name in names[:_MOST]}
    return {name: value for name, value in found.items() if value is not None}


def _read(item: h5py.HLObject, name: str) -> Any:
    """As plain data; None: it is of another kind, or cannot be read, which is no reason to refuse the numbers."""
    try:
        value = item.attrs[name]
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError, MemoryError):
        return None
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or not 0 < value.size <= _ITEMS:
            return None
        items = [_item(one) for one in value]
        return None if any(one is None for one in items) else items
    return _item(value)


def _item(value: Any) -> str | int | float | None:
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, str):
        return value if len(value) <= _LONGEST and "\0" not in value else None
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool | int):
        return int(value) if abs(value) < 2**63 else None
    return value if isinstance(value, float) and math.isfinite(value) else None
