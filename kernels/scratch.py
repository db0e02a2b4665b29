"""Memory of kernels: aligned arrays, and scratch memory that all kernels of a backend share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

__all__ = ["ALIGNMENT", "Scratch", "aligned_empty", "nbytes_of", "round_up"]

ALIGNMENT = 64


def nbytes_of(shape: Sequence[int], dtype: Any) -> int:
    """Size of a packed array [B]."""
    return math.prod(shape) * np.dtype(dtype).itemsize


def round_up(nbytes: int) -> int:
    """`nbytes` rounded up to a cache line, so that what follows in a buffer is aligned [B]."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def aligned_empty(shape: Sequence[int], dtype: Any) -> Any:
    """Packed NumPy array that begins on a cache line, contents undefined."""
    nbytes = nbytes_of(shape, dtype)
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    offset = -raw.__array_interface__["data"][0] % ALIGNMENT
    return raw[offset : offset + nbytes].view(dtype).reshape(tuple(shape))


class Scratch:
    """One buffer as large as the most demanding kernel needs.

    A kernel calls :meth:`reserve` when it is built, and takes its views when it runs first; it must
    take them anew where :attr:`generation` has changed, because a later kernel reserved more.
    Nothing in it outlives a call. Not for kernels that run at the same time in several threads.

    Attributes
    ----------
    nbytes, held_bytes
        Size of the buffer, and with it of those that captured graphs still use [B].
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
        """Free no buffer any more before :meth:`release`: a captured graph remembers its address."""
        self._keeps = True

    def reserve(self, nbytes: int) -> None:
        """Make sure that at least `nbytes` [B] are there."""
        if nbytes > self.nbytes:
            if self._keeps and self._buffer is not None:
                self._kept.append(self._buffer)
            self._buffer = self._allocate((round_up(nbytes),), np.uint8)
            self.nbytes = round_up(nbytes)
            self.generation += 1

    def view(self, shape: Sequence[int], dtype: Any, offset: int = 0) -> Any:
        """Array of `shape` over the bytes from `offset` [B] on; contents undefined."""
        size = nbytes_of(shape, dtype)
        if offset + size > self.nbytes:
            raise AssertionError(f"scratch of {self.nbytes} bytes asked for {offset} + {size}")
        if size == 0:
            return self._allocate(shape, dtype)
        return self._buffer[offset : offset + size].view(dtype).reshape(shape)

    def release(self) -> None:
        """Free the buffer; kernels built on it must not run any more."""
        self._buffer, self.nbytes = None, 0
        self._kept.clear()
        self._keeps = False
        self.generation += 1
