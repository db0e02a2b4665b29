"""Memory of kernels: aligned arrays, scratch memory shared by all kernels of a backend, and named buffers.

Named buffers are kept and used again. They serve elementwise work in chunks that stay in the cache.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..device import HOST, Device, is_low
from .guards import GUARDS

__all__ = [
    "ALIGNMENT",
    "CHUNK",
    "OwnArrays",
    "Scratch",
    "Workspace",
    "aligned_empty",
    "buffer",
    "chunks",
    "constant",
    "masked",
    "nbytes_of",
    "on_host",
    "packed_strides",
    "round_up",
    "rows",
    "take",
    "total",
    "widened",
]


#: Elements of a chunk on a CPU.
CHUNK = HOST.chunk


class Workspace(dict):
    """Named buffers of one layer on its device, kept from step to step."""

    def __init__(self, device: Device = HOST) -> None:
        super().__init__()
        self.device = device
        self.chunk = device.chunk


def buffer(work: dict, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return an array of `work` with undefined contents. It is made at the first call, and again for a call with more
    elements or another dtype.
    """
    count = int(np.prod(shape))
    array = work.get(name)
    # The leading elements of the largest so far: the last chunk is shorter, and must not make the buffer again.
    if array is None or array.size < count or array.dtype != dtype:
        # A plain dict has no device: then the buffer is on the host.
        array = work[name] = getattr(work, "device", HOST).empty((count,), dtype)
    return array[:count].reshape(shape)


def constant(work: dict, name: str, values: Callable[[], Any], dtype: Any) -> Any:
    """Return a constant array of `work`. `values` is called the first time only."""
    array = work.get(name)
    if array is None:
        array = work[name] = getattr(work, "device", HOST).array(values(), dtype)
    return array


def rows(array: Any, work: dict, name: str) -> Any:
    """Return ``(N, *spatial, C)`` as ``(positions, C)``: a view, or a copy in `work` if the array is not packed."""
    if not array.flags.c_contiguous:
        packed = buffer(work, name, array.shape, array.dtype)
        np.copyto(packed, array)
        array = packed
    return array.reshape(-1, array.shape[-1])


def chunks(count: int, width: int, work: dict | None = None) -> Iterator[slice]:
    """Yield slices of `count` rows of `width` elements. The device of `work` sets their length.

    >>> [(s.start, s.stop) for s in chunks(5, CHUNK // 2)]
    [(0, 2), (2, 4), (4, 5)]
    """
    step = max(1, getattr(work, "chunk", CHUNK) // max(1, width))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def on_host(array: Any) -> bool:
    """Return whether an array is a NumPy array, whose values can be read without a wait for a device."""
    return isinstance(array, np.ndarray)


def widened(array: Any, work: dict, name: str) -> Any:
    """Return the array, or for a 16-bit array a float32 copy in `work`, to compute with."""
    if not is_low(array.dtype):
        return array
    copy = buffer(work, name, array.shape, np.float32)
    np.copyto(copy, array)
    return copy


def masked(array: Any, none: Any, work: dict, name: str) -> Any:
    """Return a copy of ``(positions, C)`` in `work` with 0 where `none` ``(positions, 1 or C)`` is true."""
    copy = buffer(work, name, array.shape, array.dtype)
    np.copyto(copy, array)
    np.copyto(copy, 0, where=none)
    return copy


def total(array: Any) -> Any:
    """Return the sum of all elements in float64: a number, or for a device array a 0-d array on that device."""
    total_of_array = np.sum(array, dtype=np.float64)
    return float(total_of_array) if on_host(array) else total_of_array


def take(array: Any, index: Any, out: Any) -> None:
    """Compute ``out = array[index]`` for a flat array. All indices must be inside."""
    if on_host(array):
        np.take(array, index, out=out, mode="clip")  # "raise" would copy `out`
    else:
        np.take(array, index, out=out)


#: Size of a cache line, and of the widest vectors (AVX-512) [B].
ALIGNMENT = 64


def nbytes_of(shape: Sequence[int], dtype: Any) -> int:
    """Return the size of a packed array [B]."""
    return math.prod(shape) * np.dtype(dtype).itemsize


def packed_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a packed array [elements].

    >>> packed_strides((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def round_up(nbytes: int) -> int:
    """Return `nbytes` [B] rounded up to a multiple of the cache-line size, so that the next array in a buffer is
    aligned.
    """
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def aligned_empty(shape: Sequence[int], dtype: Any) -> Any:
    """Return a packed NumPy array that begins on a cache line, contents undefined."""
    nbytes = nbytes_of(shape, dtype)
    if GUARDS.active:
        return GUARDS.surround(nbytes, ALIGNMENT).view(dtype).reshape(tuple(shape))
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)  # NumPy guarantees 16 bytes only
    offset = -raw.__array_interface__["data"][0] % ALIGNMENT
    return raw[offset : offset + nbytes].view(dtype).reshape(tuple(shape))


class OwnArrays:
    """Count of the arrays that single kernels hold in addition to their arguments, as long as the arrays exist.

    Attributes
    ----------
    nbytes
        Size of these arrays [B].
    """

    def __init__(self) -> None:
        self.nbytes = 0

    def add(self, *arrays: Any) -> int:
        """Count arrays that a kernel has allocated. Return their size [B]."""
        nbytes = [int(array.nbytes) for array in arrays]
        for array, size in zip(arrays, nbytes):
            # Kernels may be dropped without `close`.
            weakref.finalize(array, self._subtract, size).atexit = False
            self.nbytes += size
        return sum(nbytes)

    def _subtract(self, nbytes: int) -> None:
        self.nbytes -= nbytes


class Scratch:
    """One buffer as large as the largest kernel needs.

    A kernel calls :meth:`reserve` when it is built and takes its views at its first run. It must take new views after
    :attr:`generation` has changed, because a later kernel reserved more. Contents are undefined between calls. Kernels
    that run at the same time in several threads must not share it.

    Attributes
    ----------
    nbytes, held_bytes
        Size of the buffer, and total size with the old buffers that captured graphs still use [B].
    """

    def __init__(self, allocate: Callable[[Sequence[int], Any], Any]) -> None:
        self.generation = 0
        self.nbytes = 0
        self._allocate = allocate
        self._buffer: Any = None
        self._keeps, self._kept = False, list[Any]()

    @property
    def held_bytes(self) -> int:
        return self.nbytes + sum(buffer.nbytes for buffer in self._kept)

    def before_capture(self) -> None:
        """Keep all buffers until :meth:`release`, because a captured graph keeps their addresses."""
        self._keeps = True

    def reserve(self, nbytes: int) -> None:
        """Make the buffer at least `nbytes` [B] large."""
        if nbytes > self.nbytes:
            # Views keep the old buffer until their kernels take new ones; a captured graph has addresses only.
            if self._keeps and self._buffer is not None:
                self._kept.append(self._buffer)
            self._buffer = self._allocate((round_up(nbytes),), np.uint8)
            self.nbytes = round_up(nbytes)
            self.generation += 1

    def view(self, shape: Sequence[int], dtype: Any, offset: int = 0) -> Any:
        """Return an array of `shape` over the bytes from `offset` [B] on; contents undefined."""
        size = nbytes_of(shape, dtype)
        if offset + size > self.nbytes:
            raise AssertionError(f"expected a view within {self.nbytes} B of scratch memory, got {offset} + {size} B")
        if size == 0:  # there may be no buffer yet
            return self._allocate(shape, dtype)
        return self._buffer[offset : offset + size].view(dtype).reshape(shape)

    def release(self) -> None:
        """Free the buffer; kernels built on it can no longer run."""
        self._buffer, self.nbytes = None, 0
        self._kept.clear()
        self._keeps = False
        # A kernel that is called nevertheless takes new views, and `view` raises: it writes to no freed memory.
        self.generation += 1
