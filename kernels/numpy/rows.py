"""Passes over the rows of a matrix ``(rows, C)`` in blocks that stay in the cache.

A loop of NumPy over C = 18 channels at a time would mostly pay for starting loops. So a block of rows is
looked at as fewer, longer rows, ``(rows / R, R * C)``, with per-channel vectors repeated R times; sums
over rows are matrix-vector products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["Piece", "RowBlocks", "column_sums"]

BLOCK_BYTES = 1 << 18
LONG = 2048


class Piece:
    """Some rows of the matrix, seen as ``(height, width)`` with ``width = repeat * C``."""

    def __init__(self, start: int, stop: int, repeat: int, channels: int) -> None:
        self.start, self.stop, self.repeat, self.channels = start, stop, repeat, channels
        self.shape = ((stop - start) // repeat, repeat * channels)

    def view(self, array: Any) -> Any:
        """This piece of a packed ``(..., C)`` array."""
        return array.reshape(-1, self.channels)[self.start : self.stop].reshape(self.shape)


class RowBlocks:
    """How the rows of packed arrays of one shape ``(..., C)`` are cut into pieces.

    Attributes
    ----------
    pieces
        In order; the last may be lower or narrower than the others.
    repeat
        Length that per-channel vectors must be repeated to, in rows.
    largest
        Elements of the largest piece.
    """

    def __init__(self, array: Any) -> None:
        channels = array.shape[-1]
        rows = array.size // channels if channels else 0
        self.channels, self.rows = channels, rows
        self.repeat = max(1, min(rows, LONG // max(1, channels)))
        per_block = max(1, BLOCK_BYTES // max(1, array.itemsize * self.repeat * channels)) * self.repeat
        whole = rows - rows % self.repeat
        self.pieces = [Piece(a, min(whole, a + per_block), self.repeat, channels) for a in range(0, whole, per_block)]
        if whole < rows:
            self.pieces.append(Piece(whole, rows, rows - whole, channels))
        self.largest = max((p.shape[0] * p.shape[1] for p in self.pieces), default=0)
        self.tallest = max((p.shape[0] for p in self.pieces), default=0)

    def vectors(self, count: int, dtype: Any) -> Any:
        """``(count, repeat, C)`` array for per-channel vectors repeated along long rows."""
        return np.zeros((count, self.repeat, self.channels), dtype)


def column_sums(array: Any, out: Any) -> Callable[[], None]:
    """A function that writes the sum over all rows of `array` ``(..., C)`` into `out` ``(C,)``.

    Blocks are summed in the dtype of `array`, and their sums in float64.
    """
    blocks = RowBlocks(array)
    ones = np.ones(blocks.tallest, array.dtype)
    long = np.empty(blocks.repeat * blocks.channels, array.dtype)
    total, part = np.empty((2, blocks.channels))
    steps = [
        (ones[: p.shape[0]], p.view(array), long[: p.shape[1]], long[: p.shape[1]].reshape(p.repeat, -1))
        for p in blocks.pieces
    ]

    def run() -> None:
        total.fill(0)
        for one, rows, row, by_channel in steps:
            np.matmul(one, rows, out=row)
            np.add.reduce(by_channel, axis=0, dtype=np.float64, out=part)
            np.add(total, part, out=total)
        np.copyto(out, total, casting="same_kind")

    return run
