"""Doubles of `cupy`, cuBLAS and our own CUDA kernels on host memory, and a backend made of them."""

from __future__ import annotations

import contextlib
import ctypes
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from halograd.device import HostDevice
from halograd.kernels.cuda import Boxes
from halograd.kernels.cudnn import CudnnBackend
from halograd.kernels.cudnn.frontend import Frontend
from halograd.kernels.cudnn.runtime import Runtime
from halograd.kernels.kernel import Kernel
from halograd.kernels.memory import OwnArrays
from halograd.kernels.numpy.losses import NumpyLosses
from halograd.kernels.numpy.norms import NumpyNorms
from halograd.kernels.numpy.pointwise import NumpyPointwise
from halograd.kernels.numpy.updates import NumpyUpdates

from .fake_cudnn import CudnnDouble

CUDA_TYPES = {
    0: np.dtype(np.float32),
    1: np.dtype(np.float64),
    2: np.dtype(np.float16),
    14: np.dtype(ml_dtypes.bfloat16),
}


class DeviceArray(np.ndarray):
    """Host memory with the address attribute of a device array."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.__array_interface__["data"][0])


def device_empty(shape: Any, dtype: Any = "float32") -> DeviceArray:
    """Return an uninitialized array aligned to 512 B, as from CuPy's pool."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    raw = np.empty(nbytes + 512, np.uint8)
    start = -raw.__array_interface__["data"][0] % 512
    return raw[start : start + nbytes].view(dtype).reshape(shape).view(DeviceArray)


class CublasDouble:
    """Double of cuBLAS: matrices by columns, factors on the host, a workspace that a new stream removes.

    Attributes
    ----------
    handles
        Stream and workspace of each handle; a product needs both, and the stream must be the current one.
    computed
        Arithmetic of every product.
    """

    def __init__(self, cupy: CupyDouble) -> None:
        self._cupy = cupy
        self.computed: list[int] = []
        self.handles: dict[int, tuple[int | None, int, int]] = {}
        self._made = 0
        pointer, number, long = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
        matrix = (pointer, number, long)
        for name, types in {
            "cublasCreate_v2": (pointer,),
            "cublasDestroy_v2": (pointer,),
            "cublasSetMathMode": (pointer, number),
            "cublasSetStream_v2": (pointer, pointer),
            "cublasSetWorkspace_v2": (pointer, pointer, ctypes.c_size_t),
            "cublasGemmEx_64": (
                *(pointer, number, number, long, long, long, pointer, *matrix, *matrix, pointer, *matrix),
                *(number, number),
            ),
        }.items():
            setattr(self, name, ctypes.CFUNCTYPE(number, *types)(self._status(getattr(self, f"_{name}"))))

    @staticmethod
    def _status(call: Any) -> Any:
        """Return a C status: 0, or 7 for wrong arguments, because ctypes would ignore an exception."""

        def run(*arguments: Any) -> int:
            try:
                call(*arguments)
            except Exception:
                traceback.print_exc()
                return 7
            return 0

        return run

    def _cublasCreate_v2(self, where: int) -> None:
        assert not self._cupy.capturing, "a handle is made of memory"
        self._made += 1
        ctypes.c_void_p.from_address(where).value = 7000 + self._made
        self.handles[7000 + self._made] = (None, 0, 0)

    def _cublasDestroy_v2(self, handle: int) -> None:
        del self.handles[handle]

    def _cublasSetMathMode(self, handle: int, mode: int) -> None:
        assert handle in self.handles and mode == 16

    def _cublasSetStream_v2(self, handle: int, stream: int | None) -> None:
        assert handle in self.handles
        self.handles[handle] = (stream or 0, 0, 0)

    def _cublasSetWorkspace_v2(self, handle: int, workspace: int, nbytes: int) -> None:
        assert workspace % 256 == 0
        self.handles[handle] = (self.handles[handle][0], workspace, nbytes)

    def _cublasGemmEx_64(
        self, handle, ta, tb, m, n, k, alpha, a, at, lda, b, bt, ldb, beta, c, ct, ldc, compute, algo
    ) -> None:
        stream, workspace, nbytes = self.handles[handle]
        assert algo == -1 and stream == self._cupy.stream
        assert workspace and nbytes == 32 << 20, "without one cuBLAS allocates, which a graph would not repeat"
        ctypes.memset(workspace, 0xFF, nbytes)
        self.computed.append(compute)
        left = self._matrix(a, at, lda, (m, k), ta)
        right = self._matrix(b, bt, ldb, (k, n), tb)
        scalar = ctypes.c_double if compute == 70 else ctypes.c_float
        assert scalar.from_address(alpha).value == 1 and scalar.from_address(beta).value == 0
        out = self._matrix(c, ct, ldc, (m, n), 0)
        out[...] = left.astype(np.float64) @ right.astype(np.float64)

    @staticmethod
    def _matrix(address: int, kind: int, leading: int, shape: tuple[int, int], transposed: int) -> np.ndarray:
        rows, columns = shape[::-1] if transposed else shape
        assert leading >= rows
        dtype = CUDA_TYPES[kind]
        raw = np.ctypeslib.as_array((ctypes.c_uint8 * (columns * leading * dtype.itemsize)).from_address(address))
        by_columns = raw.view(dtype).reshape(columns, leading)[:, :rows].T
        return by_columns.T if transposed else by_columns


class CupyDouble:
    """Double of the part of `cupy` that the backend uses."""

    __version__ = "14.2.0"
    float64 = np.float64

    def __init__(self, devices: int = 1, capability: str = "90") -> None:
        self.stream, self.device, self.clock = 0, 0, lambda: 0.0
        self.synchronized = self.released = 0
        self.cublas = CublasDouble(self)
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(
                getDeviceCount=lambda: devices,
                getDevice=lambda: self.device,
                getDeviceProperties=lambda number: {"name": b"Double of a GPU"},
                driverGetVersion=lambda: 13020,
            ),
            Device=lambda number: SimpleNamespace(compute_capability=capability, synchronize=self._synchronize),
            get_current_stream=lambda: SimpleNamespace(ptr=self.stream),
            Event=lambda: EventDouble(self),
            get_elapsed_time=lambda start, stop: (stop.time - start.time) * 1e3,
        )
        self.capturing = False
        self.maximum, self.sum, self.lib = np.maximum, np.sum, np.lib

    def empty(self, shape: Any, dtype: Any = "float32") -> DeviceArray:
        """Return an uninitialized array; during a capture no memory may be allocated."""
        assert not self.capturing, "memory is allocated while a graph is recorded"
        return device_empty(shape, dtype)

    @staticmethod
    def asarray(values: np.ndarray) -> DeviceArray:
        """Return a device copy of a host array."""
        array = device_empty(values.shape, values.dtype)
        array[...] = values
        return array

    def _synchronize(self) -> None:
        self.synchronized += 1

    def get_default_memory_pool(self) -> Any:
        return SimpleNamespace(free_all_blocks=self._release)

    def _release(self) -> None:
        self.released += 1

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Run the block while the current stream is captured."""
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Run the block with this stream as the current one."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before


class EventDouble:
    """Double of an event, which records the clock of the device."""

    def __init__(self, cupy: CupyDouble) -> None:
        self._cupy, self.time = cupy, 0.0

    def record(self) -> None:
        self.time = self._cupy.clock()

    def synchronize(self) -> None:
        pass


class BoxesDouble(Boxes):
    """Double of the kernels for boxes: copies, sums and fills in NumPy."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(empty=device_empty, units=132, own=OwnArrays()))  # type: ignore[arg-type]

    def copy(self, pairs: Any) -> Kernel:
        return Kernel(lambda: [target.__setitem__(..., source) for source, target in pairs], "cuda:copy")

    def add_into(self, pairs: Any) -> Kernel:
        return Kernel(lambda: [np.add(target, source, out=target) for source, target in pairs], "cuda:add_into")

    def fill(self, value: float, *arrays: Any) -> Kernel:
        return Kernel(lambda: [array.fill(value) for array in arrays], "cuda:fill")


class NumpyAround(NumpyPointwise, NumpyNorms, NumpyLosses, NumpyUpdates, CudnnBackend):
    """Backend with cuDNN's convolutions and dense layers, and NumPy for everything else."""

    fuses_norms = False

    def _bias(self, y: Any, b: Any) -> Kernel:
        return Kernel(lambda: y.__setitem__(..., y.astype(np.float64) + b.astype(np.float64)), "cuda:bias")

    def _bias_gradient(self, dy: Any, db: Any) -> Kernel:
        axes = tuple(range(dy.ndim - 1))
        return Kernel(lambda: db.__setitem__(..., dy.astype(np.float64).sum(axis=axes)), "cuda:bias_gradient")


class DeviceDouble(HostDevice):
    """Double of the device that owns the arrays."""

    def __init__(self, ordinal: int = 0) -> None:
        self.ordinal, self.closed = ordinal, 0

    def close(self) -> None:
        self.closed += 1


class RuntimeDouble(Runtime):
    """Runtime with the double of cuBLAS."""

    def load_cublas(self) -> Any:
        return self.cupy.cublas


class Machine:
    """Double of a GPU with all libraries.

    Parameters
    ----------
    folder
        Folder of stored plans.
    """

    def __init__(self, folder: Path, **cupy: Any) -> None:
        self.cupy = CupyDouble(**cupy)
        self.cudnn = CudnnDouble(lambda: self.cupy.stream)
        self.cupy.clock = lambda: self.cudnn.clock
        self.store = folder / "plans.jsonl"
        self.boxes: Boxes = BoxesDouble()

    def runtime(self) -> Runtime:
        self.device = DeviceDouble(self.cupy.device)
        return RuntimeDouble(self.cupy, Frontend(self.cudnn), self.boxes, self.device, self.cupy.device)

    def open(self, **options: Any) -> CudnnBackend:
        """Return a cuDNN backend on this double of a GPU."""
        kind = NumpyAround if isinstance(self.boxes, BoxesDouble) else CudnnBackend
        return kind(store=self.store, runtime=self.runtime(), **options)
