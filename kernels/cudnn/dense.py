"""Dense layers as matrix products by cuBLAS, on integer addresses, with the arithmetic named explicitly.

cuBLAS stores matrices by columns: our packed ``(rows, columns)`` array is its ``columns x rows`` matrix with leading
dimension ``columns``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from halograd.kernels.cudnn.cublas import Cublas
from halograd.kernels.cudnn.frontend import Handles
from halograd.kernels.cudnn.precision import Arithmetic
from halograd.kernels.cudnn.workspace import Workspaces
from halograd.kernels.kernel import Kernel

__all__ = ["Products", "backward_data", "backward_filter", "forward"]

# cublasOperation_t, cublasGemmAlgo_t and cudaDataType_t; the values are part of the binary interface.
_PLAIN, _TRANSPOSED = 0, 1
_DEFAULT = -1
_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}


@dataclass(frozen=True)
class Products:
    """What matrix products need.

    Attributes
    ----------
    handles
        Of cuBLAS, per thread.
    nbytes
        Workspace of a product [B].
    """

    cublas: Cublas
    handles: Handles
    workspaces: Workspaces
    nbytes: int
    arithmetic: Arithmetic

    def product(
        self,
        sizes: tuple[int, int, int],
        a: tuple[Any, int, int],
        b: tuple[Any, int, int],
        c: tuple[Any, int],
    ) -> Kernel:
        """``C = op(A) op(B)``, matrices by columns.

        Parameters
        ----------
        sizes
            Rows of C, columns of C, length of the sums.
        a, b
            Array, 0 as it is or 1 transposed, leading dimension.
        c
            Array, leading dimension. Of the dtype of A and B, or float32 where those have 16 bits.
        """
        dtype = np.dtype(a[0].dtype).name
        kind, number, compute = _TYPES[dtype], _TYPES[np.dtype(c[0].dtype).name], self.arithmetic.compute_type(dtype)
        # Factors on the host, in the type of the sums.
        factors = np.array([1, 0], np.float64 if dtype == "float64" else np.float32)
        one, zero = factors.ctypes.data, factors.ctypes.data + factors.itemsize
        pointers = [array.data.ptr for array in (a[0], b[0], c[0])]
        current, address, nbytes, gemm = self.handles.current, self.workspaces.address, self.nbytes, self.cublas.gemm
        current()  # cuBLAS is loaded and its handle made now, not in a step
        self.workspaces.reserve(nbytes)
        m, n, k = sizes
        first, second = (a[1], b[1], m, n, k, one), (zero, pointers[2], number, c[1], compute, _DEFAULT)
        left, right = (pointers[0], kind, a[2]), (pointers[1], kind, b[2])

        def run(keep: Any = (factors, a, b, c)) -> None:  # the call holds addresses only
            handle, stream = current()
            gemm(handle, address(stream, nbytes), nbytes, *first, *left, *right, *second)

        return Kernel(run, "cublas:gemm")


def forward(products: Products, x: Any, w: Any, y: Any) -> Kernel:
    """``y = x w^T``."""
    (samples, outputs), inputs = y.shape, x.shape[1]
    left, right = (w, _TRANSPOSED, inputs), (x, _PLAIN, inputs)
    return products.product((outputs, samples, inputs), left, right, (y, outputs))


def backward_data(products: Products, dy: Any, w: Any, dx: Any) -> Kernel:
    """``dx = dy w``."""
    (samples, outputs), inputs = dy.shape, dx.shape[1]
    left, right = (w, _PLAIN, inputs), (dy, _PLAIN, outputs)
    return products.product((inputs, samples, outputs), left, right, (dx, inputs))


def backward_filter(products: Products, x: Any, dy: Any, dw: Any) -> Kernel:
    """``dw = dy^T x``."""
    (samples, outputs), inputs = dy.shape, x.shape[1]
    left, right = (x, _PLAIN, inputs), (dy, _TRANSPOSED, outputs)
    return products.product((inputs, outputs, samples), left, right, (dw, inputs))
