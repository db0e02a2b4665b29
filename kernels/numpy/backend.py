"""The kernels of NumPy, put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from halograd.kernels.aligned import aligned_empty
from halograd.kernels.backend import Backend
from halograd.kernels.geometry import Geometry
from halograd.kernels.kernel import BatchNormArrays, BatchNormKernels, Kernel
from halograd.kernels.numpy import conv, dense, elementwise, pooling
from halograd.kernels.numpy.batch_norm import NumpyBatchNorm
from halograd.kernels.numpy.rows import column_sums
from halograd.kernels.scratch import Scratch
from halograd.kernels.threads import BlasLimit

__all__ = ["COLUMN_BYTES", "NumpyBackend"]

# An unfolded 3x3 convolution of 128 channels on 256^2 takes 300 MB; beyond this it is done in blocks [B].
COLUMN_BYTES = 1 << 29


class NumpyBackend(Backend):
    """Kernels by NumPy; `threads` is that of its BLAS.

    Parameters
    ----------
    threads
        Threads of matrix products; everything else runs on one.
    column_bytes
        Bound of the memory of an unfolded input [B].
    """

    name: ClassVar[str] = "numpy"

    def __init__(self, threads: int = 1, column_bytes: int = COLUMN_BYTES) -> None:
        self.xp = np
        self.version = np.__version__
        self.threads = threads
        self.dtypes = self.conv_dtypes = ("float32", "float64")
        self.dtype_remedy = "use float32, or the backend onednn for bfloat16 convolutions"
        self.scratch = Scratch(aligned_empty)
        self._column_bytes = column_bytes
        self._blas = BlasLimit(threads)

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        return aligned_empty(shape, dtype)

    @property
    def held_bytes(self) -> int:
        return self.scratch.nbytes

    def close(self) -> None:
        self.scratch.release()
        self._blas.close()

    def _conv_forward(self, x: Any, w: Any, b: Any, y: Any, geometry: Geometry, relu: bool) -> Kernel:
        return conv.conv_forward(x, w, b, y, geometry, relu, self.scratch, self._column_bytes)

    def _conv_backward_data(self, dy: Any, w: Any, dx: Any, geometry: Geometry) -> Kernel:
        return conv.conv_backward_data(dy, w, dx, geometry, self.scratch, self._column_bytes)

    def _conv_backward_filter(self, x: Any, dy: Any, dw: Any, db: Any, geometry: Geometry) -> Kernel:
        return conv.conv_backward_filter(x, dy, dw, db, geometry, self.scratch, self._column_bytes)

    def _max_pool(self, x: Any, y: Any, dy: Any, dx: Any, geometry: Geometry) -> tuple[Kernel, Kernel | None]:
        return pooling.max_pool(x, y, dy, dx, geometry, self.scratch)

    def _average_pool(
        self, x: Any, y: Any, dy: Any, dx: Any, geometry: Geometry, count_include_pad: bool
    ) -> tuple[Kernel, Kernel | None]:
        return pooling.average_pool(x, y, dy, dx, geometry, count_include_pad, self.scratch)

    def _batch_norm(self, arrays: BatchNormArrays) -> BatchNormKernels:
        return NumpyBatchNorm(arrays, self.scratch).kernels()

    def _activation(self, kind: str, x: Any, y: Any, dy: Any, dx: Any, alpha: float) -> tuple[Kernel, Kernel | None]:
        return elementwise.activation(kind, x, y, dy, dx, alpha, self.scratch)

    def _add(self, xs: list[Any], y: Any, relu: bool) -> Kernel:
        return elementwise.add(xs, y, relu)

    def _bias(self, y: Any, b: Any) -> Kernel:
        return elementwise.bias(y, b)

    def _bias_gradient(self, dy: Any, db: Any) -> Kernel:
        return Kernel(column_sums(dy, db), "numpy:column sums")

    def _dense_forward(self, x: Any, w: Any, b: Any, y: Any) -> Kernel:
        return dense.dense_forward(x, w, b, y)

    def _dense_backward_data(self, dy: Any, w: Any, dx: Any) -> Kernel:
        return dense.dense_backward_data(dy, w, dx)

    def _dense_backward_filter(self, x: Any, dy: Any, dw: Any, db: Any) -> Kernel:
        return dense.dense_backward_filter(x, dy, dw, db)
