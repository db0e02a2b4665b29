"""Types of numbers by name, those of 16 bits too, and which type stands behind them where digits count."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["LOW", "as_dtype", "is_low", "resolution", "wide"]

#: Types of 16 bits: for activations and their gradients; parameters, sums and statistics are float32 beside them.
LOW = ("float16", "bfloat16")


def as_dtype(name: Any) -> np.dtype:
    """The dtype of this name; ``bfloat16`` is that of ml_dtypes."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def is_low(dtype: Any) -> bool:
    """Whether a dtype, or the name of one, has 16 bits."""
    return (dtype if isinstance(dtype, str) else np.dtype(dtype).name) in LOW


def wide(dtype: Any) -> np.dtype:
    """The dtype of parameters, statistics and sums beside activations of this one.

    >>> wide("float16"), wide("float64")
    (dtype('float32'), dtype('float64'))
    """
    return np.dtype(np.float32) if is_low(dtype) else np.dtype(dtype)


def resolution(dtype: Any) -> float:
    """Distance from 1 to the next number, as `numpy.finfo` says of the types that it knows."""
    return 2.0**-7 if np.dtype(dtype).name == "bfloat16" else float(np.finfo(dtype).eps)
