"""The host: NumPy arrays, and calls that return when they are done."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from halograd.device.base import Device, Ticket

__all__ = ["HOST", "HostDevice"]


class _Now:
    """What was enqueued on the host is done."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class HostDevice(Device):
    """Host memory. Local."""

    name = "host"
    is_host = True
    # Some buffers of this size fit into the second-level cache.
    chunk = 1 << 15

    def owns(self, array: Any) -> bool:
        return not hasattr(array, "__cuda_array_interface__")  # numbers and lists are the host's too

    def address(self, array: Any) -> int:
        return int(array.__array_interface__["data"][0])

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        return np.empty(tuple(shape), dtype)

    def pinned(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        return np.zeros(tuple(shape), dtype)

    def to_host(self, array: Any) -> np.ndarray:
        return array

    def assign(self, target: Any, values: np.ndarray) -> None:
        target[...] = values

    def download(self, array: Any, pinned: np.ndarray) -> None:
        np.copyto(pinned, array)

    def upload(self, pinned: np.ndarray, array: Any) -> None:
        np.copyto(array, pinned)

    def mark(self) -> Ticket:
        return _Now()

    def synchronize(self) -> None:
        return None

    def stamp(self) -> _Now:
        return _Now()

    def seconds(self, first: Any, second: Any) -> float:
        return second.at - first.at


HOST = HostDevice()
