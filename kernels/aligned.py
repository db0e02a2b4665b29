"""Aligned arrays in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from halograd.kernels.scratch import ALIGNMENT, nbytes_of

__all__ = ["aligned_empty"]


def aligned_empty(shape: Sequence[int], dtype: Any) -> Any:
    """Packed NumPy array that begins on a cache line, contents undefined."""
    nbytes = nbytes_of(shape, dtype)
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    offset = -raw.__array_interface__["data"][0] % ALIGNMENT
    return raw[offset : offset + nbytes].view(dtype).reshape(tuple(shape))
