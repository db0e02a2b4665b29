"""What the launchers need of a device: memory, compiled programs, and launches with everything bound."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from halograd.kernels.cuda.sources import Program

__all__ = ["THREADS", "Device", "Extents", "Function", "address"]

#: Threads per block of all kernels.
THREADS = 256

#: A compiled kernel, for :meth:`Device.bind`.
Function = Any
#: Blocks of a grid, or threads of a block, along x, y and z.
Extents = tuple[int, int, int]


class Device(ABC):
    """A CUDA device, or a double of one. All methods are local.

    Attributes
    ----------
    units : int
        Multiprocessors, by which grids are sized.
    """

    units: int

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """Packed array on the device, contents undefined."""

    @abstractmethod
    def upload(self, array: np.ndarray) -> Any:
        """Copy of a host array on the device. May synchronize: for build time."""

    @abstractmethod
    def function(self, program: Program, name: str) -> Function:
        """A kernel of a program, which is compiled when first asked for."""

    @abstractmethod
    def bind(self, function: Function, grid: Extents, block: Extents, record: np.ndarray) -> Callable[[], Any]:
        """What enqueues one launch on the current stream and returns at once.

        Everything but the stream is prepared here, so that a call costs the host little more than the driver's own
        time. The kernel takes the bytes of `record` by value as they are at the call; the caller keeps the array.
        """

    @abstractmethod
    def describe(self) -> str:
        """One line for the log."""

    def blocks(self, per_unit: int) -> int:
        """Blocks that keep the device busy, `per_unit` on each multiprocessor."""
        return self.units * per_unit


def address(array: Any) -> int:
    """Address of an array's first element on its own device; 0 for None."""
    if array is None:
        return 0
    # Not array.data of a NumPy array: there is no buffer of bfloat16.
    if isinstance(array, np.ndarray):
        return int(array.__array_interface__["data"][0])
    return int(array.data.ptr)
