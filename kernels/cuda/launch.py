"""Launches: a kernel, its grid and its record of arguments, made once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from halograd.kernels.cuda.device import THREADS, Device, address
from halograd.kernels.cuda.sources import ELEMENTS, Program, dtype_name, kernels_of, record_of
from halograd.kernels.errors import KernelError
from halograd.kernels.kernel import Kernel

__all__ = [
    "LARGE",
    "Launch",
    "accumulator",
    "is_float",
    "is_large",
    "items_grid",
    "power_of_two",
    "run_all",
    "scalar_program",
    "sequence",
    "vector_lanes",
]

#: Offsets are 32 bits wide below this: a step of a grid beyond the end must not overflow.
LARGE = 1 << 30
#: Bytes of the widest access.
ACCESS = 16


class Launch:
    """One kernel with its grid and arguments; calling it enqueues it and allocates nothing on the device.

    Parameters
    ----------
    members
        Arguments by the names of the kernel's struct: arrays (their address is taken and they are kept alive),
        numbers, and sequences of either. Members that are not named are 0.
    """

    def __init__(
        self,
        device: Device,
        program: Program,
        name: str,
        grid: Sequence[int],
        block: Sequence[int] = (THREADS,),
        **members: Any,
    ) -> None:
        self.program, self.name = program, name
        self._function = device.function(program, name)
        self._grid, self._block = _three(grid), _three(block)
        self._record = np.zeros((), record_of(program.source, kernels_of(program.source)[name]))
        self._enqueue = device.bind(self._function, self._grid, self._block, self._record)
        self._kept: dict[str, Any] = {}
        self.set(**members)

    def set(self, **members: Any) -> None:
        """Change arguments of the launches to come."""
        for name, value in members.items():
            self._kept[name] = value
            self._record[name] = _number(value)

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return math.prod(self._grid)

    def keep(self, arrays: Any) -> None:
        """Keep alive what the arguments refer to indirectly."""
        self._kept["kept"] = arrays

    def __call__(self) -> None:
        self._enqueue()


def _three(extents: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (*extents, 1, 1)[:3]
    if y > 65535 or z > 65535:
        raise KernelError(f"expected at most 65535 blocks in y and z, got {tuple(extents)}; split the batch")
    return int(x), int(y), int(z)


def _number(value: Any) -> Any:
    """What a record holds for an argument."""
    if value is None or hasattr(value, "shape"):
        return address(value)
    if isinstance(value, list | tuple):
        return [_number(v) for v in value]
    return value


def is_float(array: Any) -> bool:
    """Whether a per-channel vector is float32; else it has the dtype of the data."""
    return array is not None and dtype_name(array) == "float32"


def is_large(*arrays: Any) -> bool:
    """Whether offsets into these arrays need 64 bits."""
    return max((_extent(a) for a in arrays if a is not None), default=0) >= LARGE


def _extent(array: Any) -> int:
    """Elements from the first to the last of a strided array."""
    return 1 + sum((n - 1) * abs(s) for n, s in zip(array.shape, array.strides)) // np.dtype(array.dtype).itemsize


def scalar_program(source: str, *arrays: Any) -> Program:
    """The program for the dtype of the first array, with offsets for all of them."""
    given = [a for a in arrays if a is not None]
    return Program(source, (dtype_name(given[0]),), is_large(*given))


def vector_lanes(extent: int, *arrays: Any, lanes: int | None = None) -> int:
    """Elements per access: `lanes` (default: 16 bytes' worth) if `extent` and all addresses are multiples, else 1."""
    given = [a for a in arrays if a is not None]
    if lanes is None:
        lanes = ACCESS // np.dtype(given[0].dtype).itemsize
    aligned = all(address(a) % (lanes * np.dtype(a.dtype).itemsize) == 0 for a in given)
    return lanes if aligned and extent % lanes == 0 else 1


def items_grid(device: Device, items: int, per_unit: int = 16) -> tuple[int]:
    """Blocks for a loop over items: enough to keep the device busy, no more than there is work."""
    return (max(1, min(math.ceil(items / THREADS), device.blocks(per_unit))),)


def power_of_two(least: int, most: int) -> int:
    """The smallest power of two that is at least `least`, at most `most`."""
    return min(most, 1 << max(0, least - 1).bit_length())


def run_all(launches: Iterable[Callable[[], Any]]) -> Callable[[], None]:
    """Several launches as one function."""
    parts = tuple(launches)
    if len(parts) == 1:
        return parts[0]

    def run() -> None:
        for part in parts:
            part()

    return run


def sequence(impl: str, *launches: Launch, workspace_bytes: int = 0) -> Kernel:
    """A kernel of several launches in this order."""
    return Kernel(run_all(launches), f"cuda:{impl}", workspace_bytes)


def accumulator(dtype: str) -> np.dtype:
    """The dtype that arithmetic on `dtype` is done in (`A` in the sources)."""
    return np.dtype(np.float64 if ELEMENTS[dtype] == "double" else np.float32)
