"""Kernel launches: a device, a compiled kernel, its grid and its argument record, prepared once."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ..kernel import FusedActivation, Kernel, KernelError, run_all
from ..memory import OwnArrays
from .sources import ELEMENTS, CudaProgram, dtype_name, kernels_of, record_of

__all__ = [
    "LARGE", "MOST_BLOCKS", "THREADS", "CupyLauncher", "Extents", "Function", "Launch", "Launcher", "accumulator",
    "address", "alpha_of", "is_float", "is_large", "items_grid", "power_of_two", "scalar_program", "sequence",
    "suffix", "vector_lanes",
]  # fmt: skip

#: Arrays below this extent use 32-bit offsets. The margin keeps a grid step beyond the end from overflowing.
LARGE = 1 << 30
#: Bytes of the widest access.
ACCESS = 16
#: Threads per block of all kernels.
THREADS = 256
#: Limit of CUDA on the blocks of a grid along y, and along z; along x it is 2^31 - 1.
MOST_BLOCKS = 65535

#: A compiled kernel, for :meth:`Launcher.bind`.
Function = Any
#: Blocks of a grid, or threads of a block, along x, y and z.
Extents = tuple[int, int, int]


class Launcher(ABC):
    """Memory, compiled programs and launches of a CUDA device, or of its test double. All methods are local.

    Attributes
    ----------
    units : int
        Number of multiprocessors, by which grids are sized.
    """

    units: int

    @cached_property
    def own(self) -> OwnArrays:
        """Arrays on the device that single kernels keep."""
        return OwnArrays()

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """Return a packed array on the device, contents undefined."""

    @abstractmethod
    def upload(self, array: np.ndarray) -> Any:
        """Return a device copy of a host array. May synchronize, so call it at build time."""

    @abstractmethod
    def function(self, program: CudaProgram, name: str) -> Function:
        """Return a kernel of a program. The program is compiled at the first request."""

    @abstractmethod
    def bind(self, function: Function, grid: Extents, block: Extents, record: np.ndarray) -> Callable[[], Any]:
        """Return a function that enqueues one launch on the current stream and returns at once.

        Everything but the stream is prepared here, so a call takes little more host time than the driver itself. The
        kernel takes the bytes of `record` by value at the time of the call; the caller keeps the array alive.
        """

    @abstractmethod
    def describe(self) -> str:
        """Return one line for the log."""

    def blocks(self, per_unit: int) -> int:
        """Return the number of blocks that keep the device busy, `per_unit` on each multiprocessor."""
        return self.units * per_unit


def address(array: Any) -> int:
    """Return the address of an array's first element on its own device; 0 for None."""
    if array is None:
        return 0
    # Not array.data: NumPy has no buffer protocol for bfloat16.
    if isinstance(array, np.ndarray):
        return int(array.__array_interface__["data"][0])
    return int(array.data.ptr)


class CupyLauncher(Launcher):
    """Launcher of the CUDA device that is current when this object is made, by CuPy, on CuPy's current stream.

    NVRTC compiles a program when one of its kernels is first requested. CuPy caches the result on disk, so the next
    process loads it.

    Raises
    ------
    KernelError
        If CuPy cannot be imported or finds no device.
    """

    def __init__(self) -> None:
        try:
            import cupy
        except ImportError as error:
            raise KernelError(f"CUDA kernels: expected CuPy, got {error}; pip install 'halograd[gpu]'") from error
        try:
            self.number = int(cupy.cuda.runtime.getDevice())
            properties = cupy.cuda.runtime.getDeviceProperties(self.number)
        except Exception as error:
            reason = " ".join(str(error).split())
            raise KernelError(f"CUDA kernels: expected a CUDA device, got {reason}; check nvidia-smi") from error
        self._cupy = cupy
        self._modules: dict[CudaProgram, Any] = {}
        self.units = int(properties["multiProcessorCount"])
        self.name = properties["name"].decode()

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        return self._cupy.empty(tuple(shape), dtype)

    def upload(self, array: np.ndarray) -> Any:
        return self._cupy.asarray(array)

    def function(self, program: CudaProgram, name: str) -> Function:
        if program not in self._modules:
            self._modules[program] = self._cupy.RawModule(code=program.text, options=program.options)
        try:
            # `get_function` compiles the module. A RawKernel looks up its kernel of this device at every call.
            return self._modules[program].get_function(name).kernel
        except Exception as error:
            raise KernelError(f"{program}: NVRTC does not compile {name}: {error}; report this") from error

    def bind(self, function: Function, grid: Extents, block: Extents, record: np.ndarray) -> Callable[[], None]:
        launch, stream = self._cupy.cuda.driver.launchKernel, self._cupy.cuda.get_current_stream
        # `kernelParams` of cuLaunchKernel: the address of each parameter. CuPy's own call would inspect the fields of
        # the record at every launch, which takes 12-15 us.
        parameters = np.array([address(record)], np.uint64)
        pointer, start, extents = int(function.ptr), address(parameters), (*grid, *block)

        # The pointers are bare numbers: the default argument keeps their objects alive as long as `run`.
        def run(keep: Any = (function, parameters)) -> None:
            launch(pointer, *extents, 0, stream().ptr, start, 0)

        return run

    def describe(self) -> str:
        return f"{self.name}, {self.units} multiprocessors, CuPy {self._cupy.__version__}"


class Launch:
    """One kernel with its grid and arguments. A call enqueues it and allocates nothing on the device.

    Parameters
    ----------
    members
        Arguments by the names of the kernel's struct: arrays (their address is taken and they are kept alive),
        numbers, and sequences of either. Members that are not named are 0.
    """

    def __init__(
        self,
        launcher: Launcher,
        program: CudaProgram,
        name: str,
        grid: Sequence[int],
        block: Sequence[int] = (THREADS,),
        **members: Any,
    ) -> None:
        self.program, self.name = program, name
        self._function = launcher.function(program, name)
        self._grid, self._block = _three(grid), _three(block)
        self._record = np.zeros((), record_of(program.source, kernels_of(program.source)[name]))
        # Before the members are set: every launch reads the record anew.
        self._enqueue = launcher.bind(self._function, self._grid, self._block, self._record)
        self._kept: dict[str, Any] = {}
        self.set(**members)

    def set(self, **members: Any) -> None:
        """Change arguments of later launches."""
        for name, value in members.items():
            self._kept[name] = value
            self._record[name] = _number(value)

    @property
    def blocks(self) -> int:
        """Number of blocks of the grid."""
        return math.prod(self._grid)

    def keep(self, arrays: Any) -> None:
        """Keep alive the arrays that the arguments refer to indirectly."""
        self._kept["kept"] = arrays

    def __call__(self) -> None:
        self._enqueue()


def _three(extents: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (*extents, 1, 1)[:3]
    # Samples are the only blocks that may be so many: factories limit the others.
    if max(y, z) > MOST_BLOCKS:
        raise KernelError(
            f"expected at most {MOST_BLOCKS} samples of a rank, which are blocks of a grid, got {max(y, z)}; use more "
            "parts of the batch (training.accumulate) or more ranks"
        )
    return int(x), int(y), int(z)


def _number(value: Any) -> Any:
    """Return the value that a record stores for an argument."""
    if value is None or hasattr(value, "shape"):
        return address(value)
    if isinstance(value, list | tuple):
        return [_number(v) for v in value]
    return value


def is_float(array: Any) -> bool:
    """Return whether a per-channel vector is float32; else it is None or has the dtype of the data."""
    return array is not None and dtype_name(array) == "float32"


def is_large(*arrays: Any) -> bool:
    """Return whether offsets into any of the arrays need 64 bits."""
    # What counts is the distance from the first to the last element: a view may have few that are far from each other.
    return any(
        sum((n - 1) * abs(s) for n, s in zip(a.shape, a.strides)) // np.dtype(a.dtype).itemsize + 1 >= LARGE
        for a in arrays
        if a is not None
    )


def scalar_program(source: str, *arrays: Any, activation: FusedActivation | None = None) -> CudaProgram:
    """Return the program of `source` for the dtype of the first array, with offsets wide enough for all arrays.

    Arrays that are None are skipped.
    """
    present = [a for a in arrays if a is not None]
    return CudaProgram(source, (dtype_name(present[0]),), is_large(*present), activation.kind if activation else None)


def alpha_of(activation: FusedActivation | None) -> float:
    """Return the parameter of an activation; 0 without activation."""
    return activation.alpha if activation else 0.0


def vector_lanes(extent: int, *arrays: Any, lanes: int | None = None) -> int:
    """Return the elements per access: `lanes` (default: 16 bytes' worth) if alignment permits, else 1.

    Alignment permits it if `extent` and all addresses are multiples of `lanes` elements.
    """
    present = [a for a in arrays if a is not None]
    if lanes is None:
        lanes = ACCESS // np.dtype(present[0].dtype).itemsize
    aligned = all(address(a) % (lanes * np.dtype(a.dtype).itemsize) == 0 for a in present)
    return lanes if aligned and extent % lanes == 0 else 1


def items_grid(launcher: Launcher, items: int, per_unit: int = 16) -> tuple[int]:
    """Return the grid of a loop over items: enough blocks to keep the device busy, and no more than the items need."""
    # CUDA refuses a grid without blocks.
    return (max(1, min(math.ceil(items / THREADS), launcher.blocks(per_unit))),)


def power_of_two(least: int, most: int) -> int:
    """Return the smallest power of two that is at least `least`, limited to `most`."""
    return min(most, 1 << max(0, least - 1).bit_length())


def sequence(impl: str, *launches: Launch, workspace_bytes: int = 0) -> Kernel:
    """Return a kernel that runs several launches in this order."""
    return Kernel(run_all(launches), f"cuda:{impl}", workspace_bytes)


def accumulator(dtype: str) -> np.dtype:
    """Return the dtype of the arithmetic on `dtype` (`A` in the sources)."""
    return np.dtype(np.float64 if ELEMENTS[dtype] == "double" else np.float32)


def suffix(lanes: int) -> str:
    """Return the suffix of a kernel's name: ``"1"`` for one element per access, ``"v"`` for several."""
    return "1" if lanes == 1 else "v"
