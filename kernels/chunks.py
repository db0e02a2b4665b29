"""Elementwise work in chunks that stay in the cache, with buffers that are made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from halograd.device import HOST, Device, is_low

__all__ = ["CHUNK", "Work", "buffer", "chunks", "constant", "on_host", "rows", "take", "total", "widened"]

CHUNK = HOST.chunk


class Work(dict):
    """Buffers of one layer by name, kept from step to step, on its device."""

    def __init__(self, device: Device = HOST) -> None:
        super().__init__()
        self.device = device
        self.chunk = device.chunk


def buffer(work: dict, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
    """An array of `work` with undefined contents; made at the first call, larger if a call wants more."""
    count = int(np.prod(shape))
    array = work.get(name)
    if array is None or array.size < count or array.dtype != dtype:
        array = work[name] = getattr(work, "device", HOST).empty((count,), dtype)
    return array[:count].reshape(shape)


def constant(work: dict, name: str, values: Callable[[], Any], dtype: Any) -> Any:
    """An array of `work` that never changes; `values` is called the first time only."""
    found = work.get(name)
    if found is None:
        found = work[name] = getattr(work, "device", HOST).array(values(), dtype)
    return found


def rows(array: Any, work: dict, name: str) -> Any:
    """``(N, *spatial, C)`` as ``(positions, C)``: a view, or a copy in `work` where the array is not packed."""
    if not array.flags.c_contiguous:
        packed = buffer(work, name, array.shape, array.dtype)
        np.copyto(packed, array)
        array = packed
    return array.reshape(-1, array.shape[-1])


def chunks(count: int, width: int, work: dict | None = None) -> Iterator[slice]:
    """Slices of `count` rows of `width` elements; as long as the device of `work` wants them.

    >>> [(s.start, s.stop) for s in chunks(5, CHUNK // 2)]
    [(0, 2), (2, 4), (4, 5)]
    """
    step = max(1, getattr(work, "chunk", CHUNK) // max(1, width))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def on_host(array: Any) -> bool:
    """Whether an array is NumPy's: its values may be looked at without waiting for a device."""
    return isinstance(array, np.ndarray)


def widened(array: Any, work: dict, name: str) -> Any:
    """The array, or a copy in float32 in `work` where it has 16 bits: to compute with."""
    if not is_low(array.dtype):
        return array
    copy = buffer(work, name, array.shape, np.float32)
    np.copyto(copy, array)
    return copy


def total(array: Any) -> Any:
    """Sum of all elements in float64: a number, of an array on a device an array of no axes there."""
    found = np.sum(array, dtype=np.float64)
    return float(found) if on_host(array) else found


def take(array: Any, index: Any, out: Any) -> None:
    """``out = array[index]`` of a flat array, for indices that are all inside."""
    if on_host(array):
        np.take(array, index, out=out, mode="clip")  # NumPy would copy `out` to raise errors
    else:
        np.take(array, index, out=out)
