"""Dense layers as cuBLAS matrix products on device addresses, with an explicit compute type.

cuBLAS stores matrices by columns: our packed ``(rows, columns)`` array is its ``columns x rows`` matrix with leading
dimension ``columns``.

The products call cuBLAS's C interface, because CuPy's wrapper refuses a stream that is being captured into a graph. In
a graph, cuBLAS must not allocate, and products on two streams are reproducible only with separate workspaces: so the
caller owns the workspace. The handles are our own too, because CuPy sets the stream of its handle at every call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..kernel import Kernel, KernelError
from .frontend import Handles, Workspaces
from .graphs import Arithmetic

__all__ = ["Cublas", "Products", "backward_data", "backward_filter", "forward", "workspace_bytes"]


_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_MATRIX = (_POINTER, _INT, _LONG)
_ARGUMENTS = {
    "cublasCreate_v2": (_POINTER,),
    "cublasDestroy_v2": (_POINTER,),
    "cublasSetMathMode": (_POINTER, _INT),
    "cublasSetStream_v2": (_POINTER, _POINTER),
    "cublasSetWorkspace_v2": (_POINTER, _POINTER, ctypes.c_size_t),
    "cublasGemmEx_64": (
        *(_POINTER, _INT, _INT, _LONG, _LONG, _LONG, _POINTER),
        *_MATRIX,
        *_MATRIX,
        _POINTER,
        *_MATRIX,
        *(_INT, _INT),
    ),
}
#: CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION: 16-bit products are summed in float32 only.
_MATH = 16


def workspace_bytes(capability: tuple[int, int]) -> int:
    """Return the workspace size at which cuBLAS performs best [B], for a compute capability."""
    return (32 if capability >= (9, 0) else 8) << 20


class Cublas:
    """The cuBLAS library, loaded at first use; creates handles for :class:`Handles`.

    Parameters
    ----------
    load
        Function that returns the C functions by name: :class:`ctypes.CDLL` or a test double.
    """

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self._functions: dict[str, Any] = {}
        self._workspaces: dict[int, int] = {}

    def _call(self, name: str, *arguments: Any) -> None:
        if not self._functions:
            library = self._load()
            # All or none: of a library that lacks one, a later call must not find the others and fail in a step.
            functions = {each: getattr(library, each) for each in _ARGUMENTS}
            for each, function in functions.items():
                function.argtypes, function.restype = _ARGUMENTS[each], _INT
            self._functions = functions
        status = self._functions[name](*arguments)
        if status:
            raise KernelError(f"cudnn: expected cuBLAS to do {name}, got status {status}; see cublasStatus_t")

    # ------------------------------------------------------------------ interface for `Handles`
    def create_handle(self) -> int:
        """Return a handle on the current device."""
        handle = ctypes.c_void_p()
        self._call("cublasCreate_v2", ctypes.addressof(handle))
        self._call("cublasSetMathMode", handle.value, _MATH)
        return int(handle.value or 0)

    def destroy_handle(self, handle: int) -> None:
        """Free a handle. No work of it may be pending."""
        self._workspaces.pop(handle, None)
        self._call("cublasDestroy_v2", handle)

    def set_stream(self, *, handle: int, stream: int) -> None:
        """Set the stream of later products of this handle. cuBLAS then forgets the handle's workspace."""
        self._workspaces.pop(handle, None)
        self._call("cublasSetStream_v2", handle, stream)

    # ------------------------------------------------------------------ products
    def gemm(self, handle: int, workspace: int, nbytes: int, *arguments: Any) -> None:
        """Call ``cublasGemmEx_64`` with a workspace of `nbytes` [B] at address `workspace`, which belongs to the
        stream.

        Raises
        ------
        KernelError
            If cuBLAS returns an error.
        """
        # Set again only if the stream was set, or the arena has grown: both are rare.
        if self._workspaces.get(handle) != workspace:
            self._call("cublasSetWorkspace_v2", handle, workspace, nbytes)
            self._workspaces[handle] = workspace
        self._call("cublasGemmEx_64", handle, *arguments)


# cublasOperation_t, cublasGemmAlgo_t and cudaDataType_t; the values are part of the binary interface.
_PLAIN, _TRANSPOSED = 0, 1
_DEFAULT = -1
_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}


@dataclass(frozen=True)
class Products:
    """Settings of matrix products.

    Attributes
    ----------
    handles
        cuBLAS handles, one per thread.
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
        """Return a kernel for ``C = op(A) op(B)``; matrices are stored by columns.

        Parameters
        ----------
        sizes
            Rows of C, columns of C, length of the sums.
        a, b
            Array, 0 (as it is) or 1 (transposed), leading dimension.
        c
            Array, leading dimension. Its dtype is that of A and B, or float32 if those have 16 bits.
        """
        dtype = np.dtype(a[0].dtype).name
        kind, number, compute = _TYPES[dtype], _TYPES[np.dtype(c[0].dtype).name], self.arithmetic.compute_type(dtype)
        # alpha = 1 and beta = 0 are on the host, in the type of the sums. cuBLAS reads them during the call, so a graph
        # keeps their values.
        factors = np.array([1, 0], np.float64 if dtype == "float64" else np.float32)
        alpha, beta = factors.ctypes.data, factors.ctypes.data + factors.itemsize
        pointers = [array.data.ptr for array in (a[0], b[0], c[0])]
        current, address, nbytes, gemm = self.handles.current, self.workspaces.address, self.nbytes, self.cublas.gemm
        current()  # load cuBLAS and create its handle now, not during a step
        self.workspaces.reserve(nbytes)
        m, n, k = sizes
        # Arguments of cublasGemmEx: transa, transb, m, n, k, alpha, A, B, beta, C, compute type, algorithm.
        first, second = (a[1], b[1], m, n, k, alpha), (beta, pointers[2], number, c[1], compute, _DEFAULT)
        left, right = (pointers[0], kind, a[2]), (pointers[1], kind, b[2])

        def run(keep: Any = (factors, a, b, c)) -> None:  # the call holds addresses only, so keep the arrays alive
            handle, stream = current()
            gemm(handle, address(stream, nbytes), nbytes, *first, *left, *right, *second)

        return Kernel(run, "cublas:gemm")


def forward(products: Products, x: Any, w: Any, y: Any) -> Kernel:
    """Return a kernel for ``y = x w^T``."""
    # By columns: y^T = w x^T, where w is stored as w^T.
    (samples, outputs), inputs = y.shape, x.shape[1]
    left, right = (w, _TRANSPOSED, inputs), (x, _PLAIN, inputs)
    return products.product((outputs, samples, inputs), left, right, (y, outputs))


def backward_data(products: Products, dy: Any, w: Any, dx: Any) -> Kernel:
    """Return a kernel for ``dx = dy w``."""
    # By columns: dx^T = w^T dy^T, both as they are stored.
    (samples, outputs), inputs = dy.shape, dx.shape[1]
    left, right = (w, _PLAIN, inputs), (dy, _PLAIN, outputs)
    return products.product((inputs, samples, outputs), left, right, (dx, inputs))


def backward_filter(products: Products, x: Any, dy: Any, dw: Any) -> Kernel:
    """Return a kernel for ``dw = dy^T x``."""
    # By columns: dw^T = x^T dy, where dy is stored as dy^T.
    (samples, outputs), inputs = dy.shape, x.shape[1]
    left, right = (x, _PLAIN, inputs), (dy, _TRANSPOSED, outputs)
    return products.product((inputs, outputs, samples), left, right, (dw, inputs))
