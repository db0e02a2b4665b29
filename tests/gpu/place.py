"""Selection of the device for GPU tests: always the double, and a GPU if the machine has one."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import pytest

__all__ = ["PLACES", "gpu_count", "only_gpu"]


@cache
def gpu_count() -> int:
    """Return the number of CUDA devices that the driver reports, without creating a context."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


#: Parameters of a fixture. Where there is no GPU, tests/gpu/test_environment.py says so for all.
PLACES: list[Any] = ["double", *([pytest.param("gpu", marks=pytest.mark.gpu)] if gpu_count() else [])]


def only_gpu(test: Any) -> Any:
    """Mark a test, or a whole file by ``pytestmark``, as one that needs a GPU and cannot run on the double."""
    skipped = pytest.mark.skipif(not gpu_count(), reason="needs a GPU")
    return skipped(pytest.mark.gpu(test))
