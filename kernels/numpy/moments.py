"""Sums of a packed array and of its square per channel, accurately and in one trip through memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from halograd.kernels.numpy.rows import Piece, RowBlocks
from halograd.kernels.scratch import Scratch

__all__ = ["moments", "moments_scratch_bytes"]


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
