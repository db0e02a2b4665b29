"""Convolutions as matrix products over unfolded arrays, and dense layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from halograd.kernels.convolution import Convolutions
from halograd.kernels.geometry import Geometry
from halograd.kernels.kernel import Kernel, ScratchKernel
from halograd.kernels.numpy.columns import Columns
from halograd.kernels.numpy.rows import column_sums
from halograd.kernels.scratch import Scratch, nbytes_of, round_up

__all__ = ["COLUMN_BYTES", "NumpyConvolutions"]

# An unfolded 3x3 convolution of 128 channels on 256^2 takes 300 MB; beyond this it is done in blocks [B].
COLUMN_BYTES = 1 << 29


class NumpyConvolutions(Convolutions):
    """By NumPy; `column_bytes` bounds the memory of an unfolded input [B]."""

    scratch: Scratch
    column_bytes: int = COLUMN_BYTES

    def _conv_forward(self, x: Any, w: Any, b: Any, y: Any, geometry: Geometry, relu: bool) -> Kernel:
        """``y = columns(x) w^T + b``."""
        columns = Columns(x.shape, geometry, x.dtype, self.column_bytes)
        groups, scratch = geometry.groups, self.scratch
        weights = _weights(w, groups).transpose(0, 2, 1)
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
                    if relu:
                        np.maximum(rows, 0, out=rows)

            return run

        return ScratchKernel(bind, scratch, columns.scratch_bytes, _name(columns))

    def _conv_backward_data(self, dy: Any, w: Any, dx: Any, geometry: Geometry) -> Kernel:
        """``dx = fold(dy w)``."""
        columns = Columns(dx.shape, geometry, dx.dtype, self.column_bytes)
        groups, scratch = geometry.groups, self.scratch
        weights = _weights(w, groups)
        gradients = _by_group(dy, groups)

        def bind() -> Callable[[], None]:
            prepare, fold, finish = columns.fold(dx, scratch)
            steps = [
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
        """``dw = dy^T columns(x)``, ``db = sum of dy``."""
        columns = Columns(x.shape, geometry, x.dtype, self.column_bytes)
        groups, scratch = geometry.groups, self.scratch
        gradients = _by_group(dy, groups).transpose(0, 2, 1)
        into = _weights(dw, groups)
        offset = round_up(columns.scratch_bytes)
        several = len(columns.blocks) > 1
        scratch_bytes = offset + (nbytes_of(dw.shape, dw.dtype) if several else 0)
        bias = None if db is None else column_sums(dy, db)

        def bind() -> Callable[[], None]:
            prepare, unfold = columns.unfold(x, scratch)
            part = scratch.view(into.shape, dw.dtype, offset) if several else into
            steps = [
                (fill, columns.matrix(scratch, block, x), gradients[:, :, block[2]])
                for fill, block in zip(unfold, columns.blocks)
            ]

            def run() -> None:
                prepare()
                for i, (fill, matrix, gradient) in enumerate(steps):
                    fill()
                    np.matmul(gradient, matrix, out=into if i == 0 else part)
                    if i > 0:
                        np.add(into, part, out=into)
                if bias is not None:
                    bias()

            return run

        return ScratchKernel(bind, scratch, scratch_bytes, _name(columns))

    def _dense_forward(self, x: Any, w: Any, b: Any, y: Any) -> Kernel:
        """``y = x w^T + b``."""
        weights = w.T

        def run() -> None:
            np.matmul(x, weights, out=y)
            if b is not None:
                np.add(y, b, out=y)

        return Kernel(run, "numpy:gemm")

    def _dense_backward_data(self, dy: Any, w: Any, dx: Any) -> Kernel:
        """``dx = dy w``."""
        return Kernel(lambda: np.matmul(dy, w, out=dx), "numpy:gemm")

    def _dense_backward_filter(self, x: Any, dy: Any, dw: Any, db: Any) -> Kernel:
        """``dw = dy^T x``, ``db = sum of dy``."""
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
    """Weights ``(K, *kernel, C / groups)`` as ``(groups, K / groups, depth)``."""
    return w.reshape(groups, w.shape[0] // groups, -1)


def _by_group(y: Any, groups: int) -> Any:
    """Outputs ``(N, *outputs, K)`` as ``(groups, rows, K / groups)``, a view."""
    return y.reshape(-1, groups, y.shape[-1] // groups).transpose(1, 0, 2)


def _name(columns: Columns) -> str:
    blocks = len(columns.blocks)
    kind = "gemm" if columns.direct else "im2col"
    return f"numpy:{kind}" + (f" in {blocks} blocks" if blocks > 1 else "")
