"""Unfolding (im2col) of packed arrays into a matrix, and its adjoint, folding (col2im).

::

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

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from halograd.kernels.geometry import Geometry
from halograd.kernels.scratch import Scratch, nbytes_of, round_up

__all__ = ["Block", "Columns", "Margins"]

Block = tuple[slice, slice, slice]


class Columns:
    """The unfolded input of one convolution; pure bookkeeping until views are taken.

    Parameters
    ----------
    shape
        Shape of the input, ``(N, *spatial, C)``.
    geometry, dtype
        Of the convolution.
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
        self.depth = geometry.taps * shape[-1] // geometry.groups
        self.margins = Margins(shape, geometry.padding)
        # A 1x1 convolution reads x as it lies.
        self.direct = (
            geometry.taps == 1 and set(geometry.stride) == {1} and self.outputs == tuple(shape[1:-1])
            and geometry.groups == 1 and self.margins.none
        )  # fmt: skip
        self.blocks = self._split(limit)
        self.rows = max(rows.stop - rows.start for _, _, rows in self.blocks)
        matrix = 0 if self.direct else nbytes_of((geometry.groups, self.rows, self.depth), dtype)
        self._padded_offset = round_up(matrix)
        padded = 0 if self.margins.none else nbytes_of(self.margins.shape, dtype)
        self.scratch_bytes = self._padded_offset + padded

    def _split(self, limit: int) -> list[Block]:
        """Whole samples per block if one fits `limit`, else rows of one sample."""
        samples, rows = self.shape[0], self.outputs[0]
        inner = math.prod(self.outputs[1:])
        row_bytes = inner * self.depth * self.geometry.groups * self.dtype.itemsize
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
        """Matrix ``(groups, rows, depth)`` of a block: scratch memory, or `x` itself where nothing is to be done."""
        rows = block[2].stop - block[2].start
        if self.direct and x is not None:
            return x.reshape(1, rows, self.depth)
        return scratch.view((self.geometry.groups, rows, self.depth), self.dtype)

    def unfold(self, x: Any, scratch: Scratch) -> tuple[Callable[[], None], list[Callable[[], None]]]:
        """What to call once before all blocks, and once per block to fill its matrix from `x`."""
        if self.direct:
            return _idle, [_idle for _ in self.blocks]
        prepare, source = self._padded_input(x, scratch)
        return prepare, [self._copy(self._windows(source, block), scratch, block) for block in self.blocks]

    def _padded_input(self, x: Any, scratch: Scratch) -> tuple[Callable[[], None], Any]:
        if self.margins.none:
            return _idle, x
        padded = scratch.view(self.margins.shape, self.dtype, self._padded_offset)
        interior, edges = self.margins.interior(padded), self.margins.edges(padded)

        def prepare() -> None:
            for edge in edges:
                edge.fill(0)
            np.copyto(interior, x)

        return prepare, padded

    def _windows(self, source: Any, block: Block) -> Any:
        """Read-only view ``(groups, n, *outputs, *kernel, C / groups)`` of a padded input."""
        samples, rows, _ = block
        g = self.geometry
        first = source[samples, rows.start * g.stride[0] :]
        item = source.strides[-1]
        spatial = source.strides[1:-1]
        channels = self.shape[-1] // g.groups
        outputs = (rows.stop - rows.start, *self.outputs[1:])
        shape = (g.groups, samples.stop - samples.start, *outputs, *g.kernel, channels)
        strides = (
            channels * item,
            source.strides[0],
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
        """What to call before all blocks, per block to add its matrix up in `dx`, and after all blocks."""
        if self.direct:
            return _idle, [_idle for _ in self.blocks], _idle
        target = dx if self.margins.none else scratch.view(self.margins.shape, self.dtype, self._padded_offset)
        steps = [self._add(target, scratch, block) for block in self.blocks]

        def prepare() -> None:
            target.fill(0)

        if self.margins.none:
            return prepare, steps, _idle
        interior = self.margins.interior(target)
        return prepare, steps, lambda: np.copyto(dx, interior)

    def _add(self, target: Any, scratch: Scratch, block: Block) -> Callable[[], None]:
        samples, rows, _ = block
        g = self.geometry
        channels = self.shape[-1] // g.groups
        outputs = (rows.stop - rows.start, *self.outputs[1:])
        count = samples.stop - samples.start
        columns = self.matrix(scratch, block).reshape(g.groups, count, *outputs, *g.kernel, channels)
        # Axes (n, *outputs, groups, C / groups), as in the target.
        columns = np.moveaxis(columns, 0, -2)
        grouped = target.reshape(*target.shape[:-1], g.groups, channels)
        pairs = []
        for tap in itertools.product(*(range(k) for k in g.kernel)):
            starts = [
                t * d + (rows.start * g.stride[0] if a == 0 else 0) for a, (t, d) in enumerate(zip(tap, g.dilation))
            ]
            where = tuple(slice(b, b + (o - 1) * s + 1, s) for b, o, s in zip(starts, outputs, g.stride))
            at = (slice(None),) * (1 + g.ndim)
            pairs.append((grouped[(samples, *where)], columns[(*at, *tap)]))

        def run() -> None:
            for into, column in pairs:
                np.add(into, column, out=into)

        return run


def _idle() -> None:
    pass


class Margins:
    """Margins of a packed array ``(N, *spatial, C)``; negative padding adds none, as its rows are not read.

    Attributes
    ----------
    shape
        Shape with margins.
    none
        Whether there are no margins.
    """

    def __init__(self, shape: Sequence[int], padding: Sequence[tuple[int, int]]) -> None:
        self._lo = [lo for lo, _ in padding]
        self._inner = list(shape[1:-1])
        sizes = [lo + n + max(0, hi) for n, (lo, hi) in zip(self._inner, padding)]
        self.shape = (shape[0], *sizes, shape[-1])
        self.none = self.shape == tuple(shape)

    def interior(self, padded: Any) -> Any:
        """View of the array proper."""
        return padded[(slice(None), *(slice(lo, lo + n) for lo, n in zip(self._lo, self._inner)))]

    def edges(self, padded: Any) -> list[Any]:
        """Views that cover all margins; corners belong to the earlier axis."""
        views = []
        at: list[slice] = [slice(None)]
        for lo, n in zip(self._lo, self._inner):
            views += [padded[(*at, slice(0, lo))], padded[(*at, slice(lo + n, None))]]
            at.append(slice(lo, lo + n))
        return [view for view in views if view.size]
