"""Convolutions as matrix products over unfolded arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from halograd.kernels.geometry import Geometry
from halograd.kernels.kernel import Kernel, ScratchKernel
from halograd.kernels.numpy.columns import Columns
from halograd.kernels.numpy.rows import column_sums
from halograd.kernels.scratch import Scratch, nbytes_of, round_up

__all__ = ["conv_backward_data", "conv_backward_filter", "conv_forward"]


def conv_forward(
    x: Any, w: Any, b: Any, y: Any, geometry: Geometry, relu: bool, scratch: Scratch, limit: int
) -> Kernel:
    """``y = columns(x) w^T + b``; see :meth:`Backend.conv_forward`."""
    columns = Columns(x.shape, geometry, x.dtype, limit)
    groups = geometry.groups
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


def conv_backward_data(dy: Any, w: Any, dx: Any, geometry: Geometry, scratch: Scratch, limit: int) -> Kernel:
    """``dx = fold(dy w)``; see :meth:`Backend.conv_backward_data`."""
    columns = Columns(dx.shape, geometry, dx.dtype, limit)
    groups = geometry.groups
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


def conv_backward_filter(x: Any, dy: Any, dw: Any, db: Any, geometry: Geometry, scratch: Scratch, limit: int) -> Kernel:
    """``dw = dy^T columns(x)``, ``db = sum of dy``; see :meth:`Backend.conv_backward_filter`."""
    columns = Columns(x.shape, geometry, x.dtype, limit)
    groups = geometry.groups
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
