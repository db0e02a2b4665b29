"""Elementwise work in chunks that stay in the cache, with buffers that are made once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

__all__ = ["CHUNK", "buffer", "chunks", "rows"]

#: Elements per chunk: some buffers of this size fit into the second-level cache.
CHUNK = 1 << 15


def buffer(work: dict, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array of `work` with undefined contents; made at the first call, larger if a call wants more."""
    count = int(np.prod(shape))
    array = work.get(name)
    if array is None or array.size < count or array.dtype != dtype:
        array = work[name] = np.empty(count, dtype)
    return array[:count].reshape(shape)


def rows(array: np.ndarray, work: dict, name: str) -> np.ndarray:
    """``(N, *spatial, C)`` as ``(positions, C)``: a view, or a copy in `work` where the array is not packed."""
    if not array.flags.c_contiguous:
        packed = buffer(work, name, array.shape, array.dtype)
        np.copyto(packed, array)
        array = packed
    return array.reshape(-1, array.shape[-1])


def chunks(count: int, width: int) -> Iterator[slice]:
    """Slices of `count` rows of `width` elements.

    >>> [(s.start, s.stop) for s in chunks(5, CHUNK // 2)]
    [(0, 2), (2, 4), (4, 5)]
    """
    step = max(1, CHUNK // max(1, width))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))
