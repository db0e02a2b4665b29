"""Time of the host to enqueue one operation: halograd's kernels, CuPy operations, cuDNN plans, matrix products.
Local.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from halograd.kernels import Backend, Geometry

__all__ = ["Outcome", "time_host"]

Outcome = tuple[str, dict[str, float]]
ROUNDS, CALLS = 7, 300
EMPTY = """
struct Arguments { unsigned long long a, b, c, d; };
extern "C" __global__ void empty(Arguments p) {}
"""
FIELDS = np.dtype([(name, np.uint64) for name in "abcd"])


def time_host(kernels: Backend) -> Outcome:
    """Time calls with almost no device work; return a text and the median time per call [s]."""
    cases = {**_ours(kernels), **_raw(kernels)}
    numbers = {name: _seconds(kernels, call) for name, call in cases.items()}
    parts = [f"{name} {1e6 * seconds:.1f}" for name, seconds in numbers.items()]
    return f"us per call: {', '.join(parts)}", numbers


def _ours(kernels: Backend) -> dict[str, Callable[[], Any]]:
    """Return calls of halograd's kernels and of array operations by name."""
    x, y = (kernels.zeros((2, 4, 4, 8), "float32") for _ in range(2))
    w, dense = kernels.zeros((8, 3, 3, 8), "float32"), kernels.zeros((8, 8), "float32")
    flat, out = kernels.zeros((4, 8), "float32"), kernels.zeros((4, 8), "float32")
    return {
        "kernel of ours": kernels.activation("relu", x, y, None, None)[0],
        "np.add": lambda: np.add(x, x, out=y),
        "np.copyto": lambda: np.copyto(y, x),
        "fill": lambda: y.fill(0),
        "cuDNN": kernels.conv_forward(x, w, None, y, Geometry.of((3, 3), 1, 1)),
        "cuBLAS": kernels.dense_forward(flat, dense, None, out),
        "mark": kernels.device.mark,
    }


def _raw(kernels: Backend) -> dict[str, Callable[[], Any]]:
    """Return a CuPy kernel with its arguments as a structured record, and as a void view of it."""
    cupy = getattr(kernels.device, "cupy", None)
    if cupy is None or not hasattr(cupy, "RawModule"):
        return {}
    function = cupy.RawModule(code=EMPTY).get_function("empty")
    record = np.zeros((), FIELDS)
    void = record.view(np.dtype((np.void, FIELDS.itemsize)))
    function.compile()
    return {
        "raw, record": lambda: function((1,), (1,), (record,)),
        "raw, void view": lambda: function((1,), (1,), (void,)),
        "bound, void view": lambda: function.kernel((1,), (1,), (void,)),
    }


def _seconds(kernels: Backend, call: Callable[[], Any]) -> float:
    times = []
    for _ in range(ROUNDS):
        kernels.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - begin) / CALLS)
    kernels.synchronize()
    return float(np.median(times))
