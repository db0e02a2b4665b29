"""cuBLAS by its C interface: what CuPy has of it refuses a stream that is captured into a graph.

A product in a graph must not let cuBLAS allocate, and products on two streams repeat every bit only if their workspaces
differ: so the workspace is the caller's, and the handles are not those of CuPy, which sets their stream at every call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from halograd.kernels.errors import KernelError

__all__ = ["Cublas", "workspace_bytes"]

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
#: CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION: products of 16 bits are summed in float32 throughout.
_MATH = 16


def workspace_bytes(capability: tuple[int, int]) -> int:
    """What cuBLAS is at its best with [B], for a compute capability."""
    return (32 if capability >= (9, 0) else 8) << 20


class Cublas:
    """The library, loaded when it is first used; makes handles for :class:`Handles`.

    Parameters
    ----------
    load
        Gives the C functions by name, :class:`ctypes.CDLL` or a double.
    """

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self._functions: dict[str, Any] = {}
        self._workspaces: dict[int, int] = {}

    def _call(self, name: str, *arguments: Any) -> None:
        if not self._functions:
            library = self._load()
            for each, types in _ARGUMENTS.items():
                self._functions[each] = function = getattr(library, each)
                function.argtypes, function.restype = types, _INT
        status = self._functions[name](*arguments)
        if status:
            raise KernelError(f"cudnn: expected cuBLAS to do {name}, got status {status}; see cublasStatus_t")

    # ------------------------------------------------------------------ as `Handles` asks for them
    def create_handle(self) -> int:
        """A handle on the current device."""
        made = ctypes.c_void_p()
        self._call("cublasCreate_v2", ctypes.addressof(made))
        self._call("cublasSetMathMode", made.value, _MATH)
        return int(made.value or 0)

    def destroy_handle(self, handle: int) -> None:
        """Free it; nothing of it may be under way."""
        self._workspaces.pop(handle, None)
        self._call("cublasDestroy_v2", handle)

    def set_stream(self, *, handle: int, stream: int) -> None:
        """Products of this handle go to this stream from now on. cuBLAS forgets the workspace with that."""
        self._workspaces.pop(handle, None)
        self._call("cublasSetStream_v2", handle, stream)

    # ------------------------------------------------------------------ products
    def gemm(self, handle: int, workspace: int, nbytes: int, *arguments: Any) -> None:
        """``cublasGemmEx_64`` with the workspace of `nbytes` [B] at an address; the stream's own.

        Raises
        ------
        KernelError
            If cuBLAS refuses it.
        """
        if self._workspaces.get(handle) != workspace:
            self._call("cublasSetWorkspace_v2", handle, workspace, nbytes)
            self._workspaces[handle] = workspace
        self._call("cublasGemmEx_64", handle, *arguments)
