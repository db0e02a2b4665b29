"""Tests with arrays of more than 2^31 elements, whose offsets do not fit into 32 bits, in cuDNN and in our own kernels.

The arrays are zero except in some windows, at both ends and at element 2^31. All other elements of the result must
be zero, and NumPy computes each window alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from halograd.device import as_dtype
from halograd.kernels import Backend, Geometry, get_backend
from tests.gpu.place import gpu_count
from tests.kernels.cudnn.on_device import BOUNDS
from tests.support.fake_device import FakeBackend

G = Geometry.of((3, 3), 1, 1)
WINDOW, AROUND = 6, 3
#: Extent and channels: 2^32 elements, 8 GiB an array.
SIZES = {"double": (40, 4), "gpu": (8192, 64)}


@pytest.fixture(scope="module", params=["double", *[pytest.param("gpu", marks=pytest.mark.gpu)] * bool(gpu_count())])
def large(request) -> Iterator[tuple[Backend, np.ndarray, Any, Any]]:
    """Return a backend, weights, and two arrays (1, extent, extent, channels) in bfloat16."""
    extent, channels = SIZES[request.param]
    with FakeBackend() if request.param == "double" else get_backend("cudnn") as kernels:
        memory = kernels.device.memory()
        if request.param == "gpu" and memory.free < 40 << 30:
            pytest.skip(f"needs 40 GiB of GPU memory, {memory.free >> 30} are free")
        weights = np.random.default_rng(5).standard_normal((channels, 3, 3, channels)) / 30
        shape = (1, extent, extent, channels)
        yield kernels, weights.astype(as_dtype("bfloat16")), *(kernels.zeros(shape, "bfloat16") for _ in range(2))


def windows(extent: int) -> list[tuple[slice, slice]]:
    """Return rows and columns of each window and its surroundings: the corners, and the middle with element 2^31."""
    places = [(0, 0), (extent // 2 - 3, 0), (extent // 2 - 3, extent - WINDOW), (extent - WINDOW, extent - WINDOW)]
    return [
        (
            slice(max(0, row - AROUND), min(extent, row + WINDOW + AROUND)),
            slice(max(0, column - AROUND), min(extent, column + WINDOW + AROUND)),
        )
        for row, column in places
    ]


def put(kernels: Backend, array: Any, seed: int) -> list[np.ndarray]:
    """Set an array to zero except in its windows; return the values of the windows with the surrounding zeros."""
    array.fill(0)
    extent, found = array.shape[1], []
    random = np.random.default_rng(seed)
    for rows, columns in windows(extent):
        values = np.zeros((1, rows.stop - rows.start, columns.stop - columns.start, array.shape[3]))
        inner = tuple(slice(AROUND if s.start else 0, (-AROUND if s.stop < extent else None)) for s in (rows, columns))
        drawn = random.standard_normal(values[:, inner[0], inner[1]].shape)
        values[:, inner[0], inner[1]] = drawn
        values = values.astype(array.dtype)
        kernels.device.assign(array[:, rows, columns], values)
        found.append(values.astype(np.float64))
    return found


def check(kernels: Backend, array: Any, expected: list[np.ndarray]) -> None:
    """Check that the windows have the expected values, and that all other elements are zero."""
    nonzero = 0
    for (rows, columns), want in zip(windows(array.shape[1]), expected):
        got = kernels.device.to_host(array[:, rows, columns]).astype(np.float64)
        error = np.abs(got - want).max() / max(1.0, np.abs(want).max())
        assert error <= BOUNDS["bfloat16"], f"rows {rows}, columns {columns}: wrong by {error:.1e}"
        nonzero += int(np.count_nonzero(got))
        kernels.device.assign(array[:, rows, columns], np.zeros_like(got).astype(array.dtype))
    top = array.max()
    assert float(top) == 0 and float(array.min()) == 0, "something was written where only zeros belong"
    assert nonzero, "nothing was written at all"


def reference(name: str, *arrays: np.ndarray) -> np.ndarray:
    """Compute one window with NumPy in float64; elements outside of it are zero, like NumPy's padding."""
    with get_backend("numpy") as numpy:
        out = np.zeros(arrays[0].shape if name != "conv_backward_filter" else _weights(arrays[0]))
        if name == "conv_backward_filter":
            numpy.conv_backward_filter(*arrays, out, None, G)()
        elif name == "conv_forward":
            numpy.conv_forward(*arrays, None, out, G)()
        else:
            numpy.conv_backward_data(*arrays, out, G)()
        return out


def _weights(x: np.ndarray) -> tuple[int, ...]:
    return (x.shape[-1], 3, 3, x.shape[-1])


def test_forward(large):
    kernels, w, x, y = large
    given = put(kernels, x, 1)
    y.fill(1)
    kernels.conv_forward(x, kernels.device.array(w), None, y, G)()
    check(kernels, y, [reference("conv_forward", part, w.astype(np.float64)) for part in given])


def test_backward_data(large):
    kernels, w, dy, dx = large
    given = put(kernels, dy, 2)
    dx.fill(1)
    kernels.conv_backward_data(dy, kernels.device.array(w), dx, G)()
    check(kernels, dx, [reference("conv_backward_data", part, w.astype(np.float64)) for part in given])


def test_backward_filter(large):
    kernels, w, x, dy = large
    pairs = list(zip(put(kernels, x, 3), put(kernels, dy, 4)))
    dw = kernels.device.array(np.full(w.shape, np.nan, np.float32))
    kernels.conv_backward_filter(x, dy, dw, None, G)()
    expected = sum(reference("conv_backward_filter", *pair) for pair in pairs)
    error = np.abs(kernels.device.to_host(dw) - expected).max() / np.abs(expected).max()
    assert error <= BOUNDS["bfloat16"]


def test_our_own_kernels(large):
    kernels, _, x, y = large
    given = put(kernels, x, 6)
    y.fill(1)
    kernels.activation("relu", x, y, None, None)[0]()
    check(kernels, y, [np.maximum(part, 0) for part in given])
