"""Passes over the rows of a matrix ``(rows, C)`` in blocks that stay in the cache.

A loop of NumPy over C = 18 channels at a time would mostly pay for starting loops. So a block of rows is
looked at as fewer, longer rows, ``(rows / R, R * C)``, with per-channel vectors repeated R times; sums
over rows are matrix-vector products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from halograd.kernels.scratch import Scratch

__all__ = ["Piece", "RowBlocks", "column_sums", "moments", "moments_scratch_bytes"]

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


def moments_scratch_bytes(x: Any) -> int:
    """Scratch memory of :func:`moments` [B]."""
    return RowBlocks(x).largest * x.itemsize


def moments(x: Any, sums: Any, scratch: Scratch) -> Callable[[], None]:
    """A function that writes ``[sum x, sum x^2]`` per channel into `sums`, float64 ``(2, C)``.

    Each block of rows, small enough for the cache, is gone over twice: for its mean, and for the sum of
    squares about that mean. The blocks are combined in float64 (Chan, Golub, LeVeque, "Updating formulae
    and a pairwise algorithm for computing sample variances", 1979), so ``E[x^2] - mean^2`` formed in
    float64 is right even where the mean is many times the standard deviation: what the sum of a block errs
    by enters the variance squared.
    """
    blocks = RowBlocks(x)
    ones = np.ones(blocks.tallest, x.dtype)
    shift = blocks.vectors(1, x.dtype)[0]
    row = np.empty(blocks.repeat * blocks.channels, x.dtype)
    mean, first, second, extra = np.empty((4, blocks.channels))
    steps = [_step(p, x, ones, shift, row, scratch) for p in blocks.pieces]

    def run() -> None:
        sums.fill(0)
        for count, one, rows, about, deviation, long, by_channel in steps:
            np.matmul(one, rows, out=long)
            np.add.reduce(by_channel, axis=0, dtype=np.float64, out=first)
            np.divide(first, count, out=mean)
            np.copyto(shift, mean, casting="same_kind")
            np.subtract(rows, about, out=deviation)
            np.multiply(deviation, deviation, out=deviation)
            np.matmul(one, deviation, out=long)
            np.add.reduce(by_channel, axis=0, dtype=np.float64, out=second)
            np.copyto(mean, shift[0])  # what was really subtracted
            _accumulate(sums, count, mean, first, second, extra)

    return run


def _step(piece: Piece, x: Any, ones: Any, shift: Any, row: Any, scratch: Scratch) -> tuple[Any, ...]:
    height, width = piece.shape
    long = row[:width]
    return (
        height * piece.repeat,
        ones[:height],
        piece.view(x),
        shift.reshape(-1)[:width],
        scratch.view(piece.shape, x.dtype),
        long,
        long.reshape(piece.repeat, -1),
    )


def _accumulate(sums: Any, count: int, mean: Any, first: Any, second: Any, extra: Any) -> None:
    """Add a block's ``sum x = first`` and ``sum x^2 = second + m (2 first - n m)`` to `sums`; overwrites `extra`."""
    np.multiply(mean, count, out=extra)
    np.subtract(first, extra, out=extra)
    np.add(extra, first, out=extra)
    np.multiply(extra, mean, out=extra)
    np.add(second, extra, out=second)
    np.add(sums[0], first, out=sums[0])
    np.add(sums[1], second, out=sums[1])
