"""Dtypes by the names that configurations have for them."""

from __future__ import annotations

import numpy as np

from ..device import as_dtype

__all__ = ["dtype_of"]


def dtype_of(name: str) -> np.dtype:
    """``"float32"``, ``"float64"``, ``"bfloat16"`` or ``"float16"``.

    >>> dtype_of("bfloat16").itemsize
    2
    """
    return np.dtype(as_dtype(name))
