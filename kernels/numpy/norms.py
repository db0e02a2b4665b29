"""Batch norm in NumPy, in blocks of rows that stay in the cache, and channel norm in chunks of positions.

A NumPy loop over C = 18 channels at a time would spend most time on starting loops. So a block of rows is viewed as
fewer, longer rows, ``(rows / R, R * C)``, with per-channel vectors repeated R times. Sums over rows are matrix-vector
products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..kernel import BatchNormArrays, BatchNormKernels, Kernel, ScratchKernel, idle
from ..memory import Scratch, Workspace, buffer, chunks
from ..norm_parts import mean_and_variance
from ..norms import ChannelNormArrays, Norms

__all__ = ["NumpyBatchNorm", "NumpyNorms", "RowBlock", "RowBlocks", "column_sums", "moments"]


#: Largest block of rows [B]; it is read twice, the second time from the cache.
BLOCK_BYTES = 1 << 18
#: Length of a row to which short rows are joined [elements]; NumPy's start of a loop takes little time then.
LONG = 2048


class RowBlock:
    """Some rows of the matrix ``(rows, C)`` of a packed array, viewed as ``(height, width)`` with ``width = repeat *
    C``.
    """

    def __init__(self, start: int, stop: int, repeat: int, channels: int) -> None:
        self.start, self.stop, self.repeat, self.channels = start, stop, repeat, channels
        self.rows = stop - start
        self.shape = (self.rows // repeat, repeat * channels)

    def view(self, array: Any) -> Any:
        """Return this block of a packed ``(..., C)`` array."""
        return array.reshape(-1, self.channels)[self.start : self.stop].reshape(self.shape)


class RowBlocks:
    """Split of the rows of packed arrays of one shape ``(..., C)`` into blocks.

    Attributes
    ----------
    pieces
        The blocks in order; the last may be lower or narrower than the others.
    repeat
        Number of times that per-channel vectors are repeated along a row.
    largest
        Elements of the largest block.
    """

    pieces: list[RowBlock]

    def __init__(self, array: Any) -> None:
        channels = array.shape[-1]
        rows = array.size // channels if channels else 0
        self.channels = channels
        self.repeat = max(1, min(rows, LONG // max(1, channels)))
        # A number of long rows: as many as fit the limit, at least one.
        per_block = max(1, BLOCK_BYTES // max(1, array.itemsize * self.repeat * channels)) * self.repeat
        # Rows that do not fill a long row are a block of their own, one row high and narrower.
        whole = rows - rows % self.repeat
        self.pieces = [
            RowBlock(a, min(whole, a + per_block), self.repeat, channels) for a in range(0, whole, per_block)
        ]
        if whole < rows:
            self.pieces.append(RowBlock(whole, rows, rows - whole, channels))
        self.largest = max((p.shape[0] * p.shape[1] for p in self.pieces), default=0)
        # Shared by all blocks, which are summed one after the other.
        self._ones = np.ones(max((p.shape[0] for p in self.pieces), default=0), array.dtype)
        self._row = np.empty(self.repeat * channels, array.dtype)

    def vectors(self, count: int, dtype: Any) -> Any:
        """Return an array of zeros ``(count, repeat, C)`` for per-channel vectors repeated along long rows."""
        return np.zeros((count, self.repeat, self.channels), dtype)

    def adder(self, piece: RowBlock) -> Callable[[Any, Any], None]:
        """Return a function that writes the sum over all rows of a matrix of the shape of `piece` to `out` ``(C,)``.

        The columns are summed in the dtype of the matrix, by a product with ones; then the `repeat` sums of each
        channel in float64.
        """
        ones, row = self._ones[: piece.shape[0]], self._row[: piece.shape[1]]
        by_channel = row.reshape(piece.repeat, -1)

        def add(rows: Any, out: Any) -> None:
            np.matmul(ones, rows, out=row)
            # A long row has each channel `repeat` times.
            np.add.reduce(by_channel, axis=0, dtype=np.float64, out=out)

        return add


def column_sums(array: Any, out: Any) -> Callable[[], None]:
    """Return a function that writes the sum over all rows of `array` ``(..., C)`` into `out` ``(C,)``.

    Blocks are summed in the dtype of `array`, and their sums in float64.
    """
    blocks = RowBlocks(array)
    total, part = np.empty((2, blocks.channels))
    steps = [(blocks.adder(p), p.view(array)) for p in blocks.pieces]

    def run() -> None:
        total.fill(0)
        for add, rows in steps:
            add(rows, part)
            np.add(total, part, out=total)
        np.copyto(out, total, casting="same_kind")

    return run


def moments(x: Any, sums: Any, scratch: Scratch) -> Callable[[], None]:
    """Return a function that writes ``[sum x, sum x^2]`` per channel into `sums`, float64 ``(2, C)``.

    It uses scratch memory for the largest of the :class:`RowBlocks`.

    Each block of rows fits the cache and is read twice: for its mean, and for the sum of squares about that mean. The
    blocks are combined in float64 (Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing
    sample variances", 1979), so ``E[x^2] - mean^2`` formed in float64 is accurate even if the mean is many times the
    standard deviation: the error of a block's sum enters the variance squared.
    """
    blocks = RowBlocks(x)
    shift = blocks.vectors(1, x.dtype)[0]
    mean, first, second, extra = np.empty((4, blocks.channels))
    steps = [
        (p.rows, blocks.adder(p), p.view(x), shift.reshape(-1)[: p.shape[1]], scratch.view(p.shape, x.dtype))
        for p in blocks.pieces
    ]

    def run() -> None:
        sums.fill(0)
        for count, add, rows, about, deviation in steps:
            add(rows, first)
            # A shift near the mean is enough: the sums below correct what its rounding leaves.
            np.divide(first, count, out=mean)
            np.copyto(shift, mean, casting="same_kind")
            np.subtract(rows, about, out=deviation)
            np.multiply(deviation, deviation, out=deviation)
            add(deviation, second)
            np.copyto(mean, shift[0])  # the mean as rounded, which was subtracted
            # sum x^2 of the block is second + m (2 first - n m).
            np.multiply(mean, count, out=extra)
            np.subtract(first, extra, out=extra)
            np.add(extra, first, out=extra)
            np.multiply(extra, mean, out=extra)
            np.add(second, extra, out=second)
            np.add(sums[0], first, out=sums[0])
            np.add(sums[1], second, out=sums[1])

    return run


class NumpyBatchNorm:
    """Builder of the kernels of one batch norm without activation and residual; see :meth:`Norms.batch_norm`."""

    def __init__(self, arrays: BatchNormArrays, scratch: Scratch) -> None:
        self.a, self.scratch = arrays, scratch
        self.blocks = RowBlocks(arrays.x)

    def kernels(self) -> BatchNormKernels:
        """Return all four kernels."""
        a = self.a
        statistics = idle() if a.local else self._kernel(lambda: moments(a.x, a.sums, self.scratch))
        forward = self._kernel(self._bind_forward)
        if a.dx is None:
            return BatchNormKernels(statistics, forward, None, None)
        # Local sums need no reduction over ranks, so one kernel computes sums and `dx`.
        if a.local:
            return BatchNormKernels(statistics, forward, self._kernel(self._bind_backward_local), idle())
        backward_sums = self._kernel(lambda: self._bind_sums(a.sums))
        return BatchNormKernels(statistics, forward, backward_sums, self._kernel(lambda: self._bind_data(a.means)))

    def _kernel(self, bind: Callable[[], Callable[[], Any]]) -> Kernel:
        return ScratchKernel(bind, self.scratch, self.blocks.largest * self.a.x.itemsize, "numpy:batch_norm")

    def _buffer(self, shape: tuple[int, ...]) -> Any:
        return self.scratch.view(shape, self.a.x.dtype)

    def _bind_forward(self) -> Callable[[], None]:
        a = self.a
        vectors = self.blocks.vectors(3, a.x.dtype)  # mean, gamma / sqrt(var + eps), beta
        statistics = [moments(a.x, a.sums, self.scratch), mean_and_variance(a, a.rows)] if a.local else []
        steps = [(p.view(a.x), p.view(a.y), *vectors.reshape(3, -1)[:, : p.shape[1]]) for p in self.blocks.pieces]
        inverse = self._inverse_deviation()

        def run() -> None:
            for compute in statistics:
                compute()
            # Vectors are computed in float64 and rounded once; the loops over blocks run in the dtype of the arrays.
            np.copyto(vectors[0], a.mean, casting="same_kind")
            np.copyto(vectors[2], a.beta, casting="same_kind")
            np.multiply(inverse(), a.gamma, out=vectors[1], casting="same_kind")
            for x, y, mean, scale, beta in steps:
                np.subtract(x, mean, out=y)
                np.multiply(y, scale, out=y)
                np.add(y, beta, out=y)

        return run

    def _inverse_deviation(self) -> Callable[[], Any]:
        """Return a function that returns ``1 / sqrt(var + eps)`` in float64."""
        a, inverse = self.a, np.empty(self.a.x.shape[-1])

        def run() -> Any:
            np.add(a.var, a.eps, out=inverse)
            np.sqrt(inverse, out=inverse)
            np.reciprocal(inverse, out=inverse)
            return inverse

        return run

    def _bind_sums(self, sums: Any) -> Callable[[], None]:
        a = self.a
        vectors = self.blocks.vectors(2, a.x.dtype)  # mean, 1 / sqrt(var + eps)
        part = np.empty(self.blocks.channels)
        steps = []
        for p in self.blocks.pieces:
            arrays = (p.view(a.x), p.view(a.dy), self._buffer(p.shape))
            steps.append((self.blocks.adder(p), *arrays, *vectors.reshape(2, -1)[:, : p.shape[1]]))
        inverse = self._inverse_deviation()

        def run() -> None:
            sums.fill(0)
            np.copyto(vectors[0], a.mean, casting="same_kind")
            np.copyto(vectors[1], inverse(), casting="same_kind")
            # sums[0] = sum dy, sums[1] = sum dy * xhat.
            for add, x, dy, xhat, mean, inv in steps:
                add(dy, part)
                np.add(sums[0], part, out=sums[0])
                np.subtract(x, mean, out=xhat)
                np.multiply(xhat, inv, out=xhat)
                np.multiply(xhat, dy, out=xhat)
                add(xhat, part)
                np.add(sums[1], part, out=sums[1])

        return run

    def _bind_data(self, means: Any) -> Callable[[], None]:
        """Return a function for ``dx = scale * (dy - means[0] - (x - mean) * slope)``, ``slope = means[1] / sqrt(var +
        eps)``.
        """
        a = self.a
        vectors = self.blocks.vectors(4, a.x.dtype)  # mean, slope, means[0], scale
        steps = []
        for p in self.blocks.pieces:
            arrays = (p.view(a.x), p.view(a.dy), p.view(a.dx), self._buffer(p.shape))
            steps.append((*arrays, *vectors.reshape(4, -1)[:, : p.shape[1]]))
        inverse = self._inverse_deviation()

        def run() -> None:
            inv = inverse()
            np.copyto(vectors[0], a.mean, casting="same_kind")
            np.multiply(inv, means[1], out=vectors[1], casting="same_kind")
            np.copyto(vectors[2], means[0], casting="same_kind")
            np.multiply(inv, a.gamma, out=vectors[3], casting="same_kind")
            for x, dy, dx, correction, mean, slope, offset, scale in steps:
                np.subtract(x, mean, out=correction)
                np.multiply(correction, slope, out=correction)
                np.subtract(dy, correction, out=dx)
                np.subtract(dx, offset, out=dx)
                np.multiply(dx, scale, out=dx)

        return run

    def _bind_backward_local(self) -> Callable[[], None]:
        a = self.a
        means = np.empty((2, self.blocks.channels))
        add_up, correct = self._bind_sums(a.sums), self._bind_data(means)

        def run() -> None:
            add_up()
            np.divide(a.sums, a.rows, out=means)
            correct()

        return run


class ChannelNorm:
    """Kernels of one channel norm, chunk by chunk.

    Backward computes mean and variance again, which costs less than to store and load them.
    """

    def __init__(self, arrays: ChannelNormArrays) -> None:
        self.a, channels = arrays, arrays.x.shape[-1]
        whole = (arrays.x, arrays.y, arrays.dy, arrays.dx)
        flat: list[Any] = [None if a is None else a.reshape(-1, channels) for a in whole]
        self.x, self.y, self.dy, self.dx = flat
        self._parts = list(chunks(len(self.x), channels))
        self._sums, self._work = np.empty((2, channels)), Workspace()

    def kernels(self) -> tuple[Kernel, Kernel | None]:
        """Return the forward kernel, and the backward kernel or None."""
        forward = Kernel(self._forward, "numpy:channel_norm", close=self._work.clear)
        # The forward kernel frees the buffers of both.
        return forward, None if self.dy is None else Kernel(self._backward, "numpy:channel_norm")

    def _forward(self) -> None:
        for part in self._parts:
            y = self.y[part]
            self._normalize(self.x[part], y)
            if self.a.gamma is not None:
                y *= self.a.gamma
            if self.a.beta is not None:
                y += self.a.beta

    def _normalize(self, x: Any, out: Any) -> Any:
        """Write xhat to `out`; return 1 / std per position."""
        mean, std = (buffer(self._work, k, (len(x), 1), x.dtype) for k in ("mean", "std"))
        square = buffer(self._work, "square", x.shape, x.dtype)
        if self.a.centered:
            np.mean(x, axis=1, keepdims=True, out=mean)
            np.subtract(x, mean, out=out)
        else:
            np.copyto(out, x)
        # The variance is a mean about the mean: mean of x^2 - mean^2 would cancel.
        np.multiply(out, out, out=square)
        np.mean(square, axis=1, keepdims=True, out=std)
        std += self.a.eps
        np.sqrt(std, out=std)
        np.reciprocal(std, out=std)
        out *= std
        return std

    def _backward(self) -> None:
        self._sums.fill(0)
        for part in self._parts:
            self._backward_chunk(part)
        # The sums over positions are those of dy, and of dy * xhat.
        for i, gradient in enumerate((self.a.dbeta, self.a.dgamma)):
            if gradient is not None:
                np.copyto(gradient, self._sums[i], casting="same_kind")

    def _backward_chunk(self, part: slice) -> None:
        x, work = self.x[part], self._work
        xhat, dy, product = (buffer(work, k, x.shape, x.dtype) for k in ("xhat", "dy", "product"))
        column = buffer(work, "column", x.shape[1:], np.float64)
        mean = buffer(work, "mean", (len(x), 1), x.dtype)
        inverse = self._normalize(x, xhat)
        # A copy, because it is multiplied by gamma below.
        np.copyto(dy, self.dy[part])
        self._sums[0] += np.sum(dy, axis=0, dtype=np.float64, out=column)
        np.multiply(dy, xhat, out=product)
        self._sums[1] += np.sum(product, axis=0, dtype=np.float64, out=column)
        if self.dx is None:
            return
        if self.a.gamma is not None:
            dy *= self.a.gamma
            product *= self.a.gamma
        # dx = (g - mean(g) - xhat * mean(g * xhat)) / std, with g = dy * gamma.
        xhat *= np.mean(product, axis=1, keepdims=True, out=mean)
        if self.a.centered:
            dy -= np.mean(dy, axis=1, keepdims=True, out=mean)
        dy -= xhat
        np.multiply(dy, inverse, out=self.dx[part])


class NumpyNorms(Norms):
    """Norms in NumPy."""

    scratch: Scratch

    def _batch_norm(self, arrays: BatchNormArrays) -> BatchNormKernels:
        return NumpyBatchNorm(arrays, self.scratch).kernels()

    def _channel_norm(self, arrays: ChannelNormArrays) -> tuple[Kernel, Kernel | None]:
        return ChannelNorm(arrays).kernels()
