"""What the launchers need of a device: memory, compiled programs and somebody who launches them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from halograd.kernels.cuda.sources import Program

__all__ = ["THREADS", "Device", "Function", "address"]

#: Threads per block of all kernels.
THREADS = 256

#: A compiled kernel: called with grid, block and a tuple of one record, by value; returns at once.
Function = Callable[[tuple[int, int, int], tuple[int, int, int], tuple[Any]], Any]


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
