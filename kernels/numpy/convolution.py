"""Convolutions as matrix products over unfolded arrays, and dense layers.

Unfolding (im2col) makes a matrix of a packed array; its adjoint is folding (col2im). ::

    x (1, 5, 1), kernel 3, padding (1, 1)        columns, one row per output
    . a b c d e .                                . a b
    [---]                                        a b c
      [---]                                      b c d
        ...                                      ...

A convolution is then one matrix product over the whole batch (Lee et al., "Parallel Deep Convolutional
Neural Network Training by Exploiting the Overlapping of Computation and Communication", 2017), or a few
over blocks of output rows where the matrix would take too much memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ..convolution import Convolutions
from ..geometry import Geometry
from ..kernel import FusedActivation, Kernel, ScratchKernel
from ..memory import Scratch, nbytes_of, round_up
from .norms import column_sums

__all__ = ["COLUMN_BYTES", "Block", "Columns", "Margins", "NumpyConvolutions", "edges", "tap_views"]


Block = tuple[slice, slice, slice]


class Columns:
    """Block layout of the unfolded input of one convolution; no memory of its own.

    Parameters
    ----------
    shape
        Shape of the input, ``(N, *spatial, C)``.
    geometry, dtype
        Geometry and dtype of the convolution.
    limit
        Upper bound of the memory of the matrix [B]; exceeded only if one row of outputs takes more.

    Attributes
    ----------
    blocks
        Per matrix product: slices of samples, of outputs on the first spatial axis, and of matrix rows.
    scratch_bytes
        Scratch memory for the matrix and, if there is padding, the padded input [B].
    """

    def __init__(self, shape: Sequence[int], geometry: Geometry, dtype: Any, limit: int) -> None:
        self.shape, self.geometry, self.dtype = tuple(shape), geometry, np.dtype(dtype)
        self.outputs = geometry.output_shape(shape[1:-1])
        # Columns of the matrix of a group: its channels at each tap of the window.
        self.depth = geometry.taps * shape[-1] // geometry.groups
        self.margins = Margins(shape, geometry.padding, dtype)
        # A 1x1 convolution reads x without unfolding.
        self.direct = (
            geometry.taps == 1 and set(geometry.stride) == {1} and self.outputs == tuple(shape[1:-1])
            and geometry.groups == 1 and self.margins.none
        )  # fmt: skip
        self.blocks = self._split(limit)
        self.rows = max(rows.stop - rows.start for _, _, rows in self.blocks)
        matrix = 0 if self.direct else nbytes_of((geometry.groups, self.rows, self.depth), dtype)
        # The matrix comes first, then the padded input.
        self._padded_offset = round_up(matrix)
        self.scratch_bytes = self._padded_offset + self.margins.nbytes

    def _split(self, limit: int) -> list[Block]:
        """Return blocks of whole samples if one sample fits `limit`, else blocks of rows of one sample; one block if
        nothing is unfolded.
        """
        samples, rows = self.shape[0], self.outputs[0]
        inner = math.prod(self.outputs[1:])
        # Matrix of one row of outputs on the first spatial axis, all groups together.
        row_bytes = inner * self.depth * self.geometry.groups * self.dtype.itemsize
        # Blocks follow from shapes alone, and products are added in their order: the bits do not depend on the run.
        fit = max(1, limit // max(1, row_bytes))
        if self.direct or fit >= samples * rows:
            return [(slice(0, samples), slice(0, rows), slice(0, samples * rows * inner))]
        if fit >= rows:
            step = fit // rows
            starts = range(0, samples, step)
            ends = [min(samples, n + step) for n in starts]
            return [
                (slice(n, e), slice(0, rows), slice(n * rows * inner, e * rows * inner)) for n, e in zip(starts, ends)
            ]
        return [
            (slice(n, n + 1), slice(r, e), slice((n * rows + r) * inner, (n * rows + e) * inner))
            for n in range(samples)
            for r, e in ((r, min(rows, r + fit)) for r in range(0, rows, fit))
        ]

    def matrix(self, scratch: Scratch, block: Block, x: Any = None) -> Any:
        """Return the matrix ``(groups, rows, depth)`` of a block: scratch memory, or a view of `x` if it needs no
        unfolding.
        """
        rows = block[2].stop - block[2].start
        if self.direct and x is not None:
            return x.reshape(1, rows, self.depth)
        return scratch.view((self.geometry.groups, rows, self.depth), self.dtype)

    def unfold(self, x: Any, scratch: Scratch) -> tuple[Callable[[], None], list[Callable[[], None]]]:
        """Return a function to call once before all blocks, and one per block that fills its matrix from `x`."""
        if self.direct:
            return _idle, [_idle for _ in self.blocks]
        padded = self.margins.padded(x, scratch, self._padded_offset)
        steps = [self._copy(self._windows(padded, block), scratch, block) for block in self.blocks]
        return self.margins.fill(padded, x, 0), steps

    def _windows(self, source: Any, block: Block) -> Any:
        """Return a read-only view ``(groups, n, *outputs, *kernel, C / groups)`` of a padded input."""
        samples, rows, _ = block
        g = self.geometry
        # From the first row that the block reads: blocks overlap where windows do.
        first = source[samples, rows.start * g.stride[0] :]
        item = source.strides[-1]
        spatial = source.strides[1:-1]
        channels = self.shape[-1] // g.groups
        outputs = (rows.stop - rows.start, *self.outputs[1:])
        shape = (g.groups, samples.stop - samples.start, *outputs, *g.kernel, channels)
        strides = (
            channels * item,
            source.strides[0],
            # To the next output, and to the next tap of its window.
            *(a * s for a, s in zip(spatial, g.stride)),
            *(a * d for a, d in zip(spatial, g.dilation)),
            item,
        )
        return as_strided(first, shape, strides, writeable=False)

    def _copy(self, windows: Any, scratch: Scratch, block: Block) -> Callable[[], None]:
        target = self.matrix(scratch, block).reshape(windows.shape)
        return lambda: np.copyto(target, windows)

    def fold(
        self, dx: Any, scratch: Scratch
    ) -> tuple[Callable[[], None], list[Callable[[], None]], Callable[[], None]]:
        """Return functions to call before all blocks, per block (each adds the block's matrix to `dx` or to `dx` with
        margins), and after all blocks.
        """
        if self.direct:
            return _idle, [_idle for _ in self.blocks], _idle
        # Gradients of the padding are added to the margins, and dropped with them.
        padded = self.margins.padded(dx, scratch, self._padded_offset)
        steps = [self._add(padded, scratch, block) for block in self.blocks]
        return lambda: padded.fill(0), steps, self.margins.crop(padded, dx)

    def _add(self, target: Any, scratch: Scratch, block: Block) -> Callable[[], None]:
        samples, rows, _ = block
        g = self.geometry
        channels = self.shape[-1] // g.groups
        outputs = (rows.stop - rows.start, *self.outputs[1:])
        count = samples.stop - samples.start
        columns = self.matrix(scratch, block).reshape(g.groups, count, *outputs, *g.kernel, channels)
        # Axes (n, *outputs, groups, C / groups), in the order of the target.
        columns = np.moveaxis(columns, 0, -2)
        grouped = target.reshape(*target.shape[:-1], g.groups, channels)
        inputs = tap_views(grouped[samples, rows.start * g.stride[0] :], outputs, g)
        outer = (slice(None),) * (1 + g.ndim)
        pairs = [(into, columns[(*outer, *tap)]) for into, tap in zip(inputs, np.ndindex(*g.kernel))]

        def run() -> None:
            # Windows overlap: one addition to a view of all windows would keep one of the terms of each element.
            for into, column in pairs:
                np.add(into, column, out=into)

        return run


def _idle() -> None:
    pass


class Margins:
    """Margins of a packed array ``(N, *spatial, C)``, in scratch memory.

    Negative padding adds no margin: the rows that it drops are not read.

    Attributes
    ----------
    shape
        Shape with margins.
    none
        Whether there are no margins: then the padded array is the array itself, and nothing is copied.
    nbytes
        Scratch memory of the padded array [B].
    """

    def __init__(self, shape: Sequence[int], padding: Sequence[tuple[int, int]], dtype: Any) -> None:
        self._inside = [slice(lo, lo + n) for n, (lo, _) in zip(shape[1:-1], padding)]
        extents = [lo + n + max(0, hi) for n, (lo, hi) in zip(shape[1:-1], padding)]
        self.shape, self._dtype = (shape[0], *extents, shape[-1]), dtype
        self.none = self.shape == tuple(shape)
        self.nbytes = 0 if self.none else nbytes_of(self.shape, dtype)

    def padded(self, array: Any, scratch: Scratch, offset: int = 0) -> Any:
        """Return scratch memory from `offset` [B] on for the array with margins, contents undefined; `array` itself if
        there are no margins.
        """
        return array if self.none else scratch.view(self.shape, self._dtype, offset)

    def fill(self, padded: Any, array: Any, value: float) -> Callable[[], None]:
        """Return a function that copies `array` into `padded`, with margins of `value`."""
        if self.none:
            return _idle
        interior, margins = padded[(slice(None), *self._inside)], edges(padded, self._inside)

        def run() -> None:
            for margin in margins:
                margin.fill(value)
            np.copyto(interior, array)

        return run

    def crop(self, padded: Any, array: Any) -> Callable[[], None]:
        """Return a function that copies `padded` without its margins to `array`."""
        if self.none:
            return _idle
        interior = padded[(slice(None), *self._inside)]
        return lambda: np.copyto(array, interior)


def edges(whole: Any, inside: Sequence[slice]) -> list[Any]:
    """Return views that cover what is outside of `inside` on the axes after the first, each element once: corners
    belong to the earlier axis.
    """
    views, before = [], [slice(None)]
    for part in inside:
        views += [whole[(*before, slice(0, part.start))], whole[(*before, slice(part.stop, None))]]
        before.append(part)
    return [view for view in views if view.size]


def tap_views(padded: Any, outputs: Sequence[int], geometry: Geometry) -> list[Any]:
    """Return for each tap of a window, in row-major order, the inputs that the outputs read: ``(N, *outputs, ...)``."""
    g = geometry
    # A slice ends just after the input of the last output, so that it has as many elements as there are outputs.
    return [
        padded[(slice(None), *(slice(t * d, t * d + (o - 1) * s + 1, s) for t, d, s, o in axes))]
        for axes in (zip(tap, g.dilation, g.stride, outputs) for tap in np.ndindex(*g.kernel))
    ]


# Limit of an unfolded input [B]; larger ones are split in blocks. A 3x3 convolution of 128 channels on 256^2 takes 300
# MB.
COLUMN_BYTES = 1 << 29


class NumpyConvolutions(Convolutions):
    """Convolutions and dense layers in NumPy; `column_bytes` limits the memory of an unfolded input [B]."""

    scratch: Scratch
    column_bytes: int = COLUMN_BYTES

    def _conv_forward(
        self, x: Any, w: Any, b: Any, y: Any, geometry: Geometry, activation: FusedActivation | None
    ) -> Kernel:
        """Build ``y = f(columns(x) w^T + b)``."""
        columns = Columns(x.shape, geometry, x.dtype, self.column_bytes)
        groups, scratch = geometry.groups, self.scratch
        # (groups, depth, K / groups): a view, which BLAS reads as a transposed matrix without a copy.
        weights = _weights(w, groups).transpose(0, 2, 1)
        # A view: the product of a group is written to the group's channels of `y`.
        outputs = _by_group(y, groups)
        flat = y.reshape(-1, y.shape[-1])

        def bind() -> Callable[[], None]:
            prepare, unfold = columns.unfold(x, scratch)
            steps = [
                (fill, columns.matrix(scratch, block, x), outputs[:, block[2]], flat[block[2]])
                for fill, block in zip(unfold, columns.blocks)
            ]

            def run() -> None:
                prepare()
                for fill, matrix, out, rows in steps:
                    fill()
                    np.matmul(matrix, weights, out=out)
                    if b is not None:
                        np.add(rows, b, out=rows)

            return run

        kernel = ScratchKernel(bind, scratch, columns.scratch_bytes, _name(columns))
        return self.activated(kernel, y, activation)

    def _conv_backward_data(self, dy: Any, w: Any, dx: Any, geometry: Geometry) -> Kernel:
        """Build ``dx = fold(dy w)``."""
        columns = Columns(dx.shape, geometry, dx.dtype, self.column_bytes)
        groups, scratch = geometry.groups, self.scratch
        weights = _weights(w, groups)
        gradients = _by_group(dy, groups)

        def bind() -> Callable[[], None]:
            prepare, fold, finish = columns.fold(dx, scratch)
            steps = [
                # Without unfolding, the product is written to `dx` itself.
                (gradients[:, block[2]], columns.matrix(scratch, block, dx), add)
                for add, block in zip(fold, columns.blocks)
            ]

            def run() -> None:
                prepare()
                for gradient, matrix, add in steps:
                    np.matmul(gradient, weights, out=matrix)
                    add()
                finish()

            return run

        return ScratchKernel(bind, scratch, columns.scratch_bytes, _name(columns))

    def _conv_backward_filter(self, x: Any, dy: Any, dw: Any, db: Any, geometry: Geometry) -> Kernel:
        """Build ``dw = dy^T columns(x)``, ``db = sum of dy``."""
        columns = Columns(x.shape, geometry, x.dtype, self.column_bytes)
        groups, scratch = geometry.groups, self.scratch
        gradients = _by_group(dy, groups).transpose(0, 2, 1)  # (groups, K / groups, rows)
        into = _weights(dw, groups)
        offset = round_up(columns.scratch_bytes)
        several = len(columns.blocks) > 1
        scratch_bytes = offset + (nbytes_of(dw.shape, dw.dtype) if several else 0)
        bias = None if db is None else column_sums(dy, db)

        def bind() -> Callable[[], None]:
            prepare, unfold = columns.unfold(x, scratch)
            # The first block overwrites `dw`; the others need a copy, because np.matmul cannot add to its output.
            part = scratch.view(into.shape, dw.dtype, offset) if several else into
            steps = [
                (fill, columns.matrix(scratch, block, x), gradients[:, :, block[2]])
                for fill, block in zip(unfold, columns.blocks)
            ]

            def run() -> None:
                prepare()
                for i, (fill, matrix, gradient) in enumerate(steps):
                    fill()  # all blocks share one matrix
                    np.matmul(gradient, matrix, out=into if i == 0 else part)
                    if i > 0:
                        np.add(into, part, out=into)
                if bias is not None:
                    bias()

            return run

        return ScratchKernel(bind, scratch, scratch_bytes, _name(columns))

    def _dense_forward(self, x: Any, w: Any, b: Any, y: Any) -> Kernel:
        """Build ``y = x w^T + b``."""
        weights = w.T

        def run() -> None:
            np.matmul(x, weights, out=y)
            if b is not None:
                np.add(y, b, out=y)

        return Kernel(run, "numpy:gemm")

    def _dense_backward_data(self, dy: Any, w: Any, dx: Any) -> Kernel:
        """Build ``dx = dy w``."""
        return Kernel(lambda: np.matmul(dy, w, out=dx), "numpy:gemm")

    def _dense_backward_filter(self, x: Any, dy: Any, dw: Any, db: Any) -> Kernel:
        """Build ``dw = dy^T x``, ``db = sum of dy``."""
        gradient = dy.T
        bias = None if db is None else column_sums(dy, db)

        def run() -> None:
            np.matmul(gradient, x, out=dw)
            if bias is not None:
                bias()

        return Kernel(run, "numpy:gemm")

    def _bias(self, y: Any, b: Any) -> Kernel:
        return Kernel(lambda: np.add(y, b, out=y), "numpy:bias")

    def _bias_gradient(self, dy: Any, db: Any) -> Kernel:
        return Kernel(column_sums(dy, db), "numpy:column sums")


def _weights(w: Any, groups: int) -> Any:
    """Return weights ``(K, *kernel, C / groups)`` as ``(groups, K / groups, depth)``."""
    return w.reshape(groups, w.shape[0] // groups, -1)


def _by_group(y: Any, groups: int) -> Any:
    """Return outputs ``(N, *outputs, K)`` as ``(groups, rows, K / groups)``, a view."""
    return y.reshape(-1, groups, y.shape[-1] // groups).transpose(1, 0, 2)


def _name(columns: Columns) -> str:
    blocks = len(columns.blocks)
    kind = "gemm" if columns.direct else "im2col"
    return f"numpy:{kind}" + (f" in {blocks} blocks" if blocks > 1 else "")
