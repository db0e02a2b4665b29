"""Tests for a GPU: values, streams, stored plans, captured graphs. They also run on the double."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from halograd.kernels import Everywhere, Geometry, Windows
from halograd.kernels.cudnn import CudnnBackend
from tests.gpu.place import PLACES, gpu_count, only_gpu
from tests.kernels.geometries import CASES, Case
from tests.kernels.reference import RELU

from ..test_attention import Case as AttentionCase
from .fake_runtime import Machine
from .on_device import BOUNDS, OnDevice, attention_errors, convolution_errors, dense_errors, sums_errors, to_host

#: By cuDNN in 16 bits: blocks of keys that are merged, grouped queries, windows with biases.
ATTENTION = {
    "global": AttentionCase((Everywhere(24, 20), Everywhere(16, 12)), heads=4, d=64, e=64),
    "grouped": AttentionCase((Everywhere(197, 130),), heads=8, groups=4, d=64, e=32),
    "windows": AttentionCase((Windows(28, 7, 3), Windows(14, 7)), heads=3, d=32, e=32),
    "merged": AttentionCase((Everywhere(300, 300),), heads=2, d=64, e=64),
    "windows, biased": AttentionCase((Windows(14, 7, 3), Windows(14, 7)), heads=3, d=32, e=32, bias=True),
    "biased": AttentionCase((Everywhere(12, 12), Everywhere(10, 9)), heads=2, d=40, e=40, bias=True),
    "narrow": AttentionCase((Everywhere(33, 20),), heads=2, d=12, e=12),
}
#: Convolutions with the sums of a norm, one of them a block with rows that no output reads.
SUMMED = [
    Case("plane", Geometry.of((3, 3), 1, 1), (20, 12), 2, 16, 8),
    Case("block", Geometry.of((3, 3), 1, ((0, -2), (1, 1))), (9, 12), 1, 8, 16),
    Case("volume", Geometry.of((3, 3, 3), 1, 1), (5, 6, 4), 1, 8, 8),
]
#: The double has no kernels of ours.
ON_DOUBLE = ("global", "grouped", "windows")
G = Geometry.of((3, 3), 1, 1)
Open = Callable[..., CudnnBackend]


@pytest.fixture(params=PLACES)
def opened(request, tmp_path: Path) -> Iterator[Open]:
    """Return a function that opens the backend on the double of a GPU, and on a GPU if there is one."""
    made: list[CudnnBackend] = []
    machine = Machine(tmp_path)

    def make(**options) -> CudnnBackend:
        if request.param == "double":
            made.append(machine.open(**options))
        else:
            made.append(CudnnBackend(store=tmp_path / "plans.jsonl", **options))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


@pytest.mark.parametrize("case", CASES if gpu_count() else CASES[::6], ids=str)
@pytest.mark.parametrize("dtype", ["strict", "bfloat16", "tf32", "float16"])
def test_numbers(opened, case, dtype):
    """Convolutions are right within the bound of the precision: all geometries on a GPU, some on the double."""
    options = {"precision": dtype} if dtype in ("strict", "tf32") else {}
    found = convolution_errors(opened(**options), case, "float32" if options else dtype)
    assert max(found.values()) <= BOUNDS[dtype], found


@pytest.mark.parametrize("case", SUMMED, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_of_norms(opened, case, dtype):
    found = sums_errors(opened(), case, dtype)
    assert max(found.values()) <= 3 * BOUNDS[dtype], found


@pytest.mark.parametrize("dtype", ["float64", "strict", "tf32", "float16", "bfloat16"])
def test_dense_layers(opened, dtype):
    options = {"precision": dtype} if dtype in ("strict", "tf32") else {}
    found = dense_errors(opened(**options), "float32" if options else dtype)
    assert max(found.values()) <= BOUNDS[dtype], found


@pytest.mark.parametrize("name", ATTENTION if gpu_count() else ON_DOUBLE)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", *(["strict"] if gpu_count() else [])])
def test_attention(opened, name, dtype):
    """Attention and its gradients are right, by cuDNN where it takes the shape, and by our own kernels."""
    backend = opened()
    if backend.device.is_host and (name not in ON_DOUBLE or dtype == "strict"):
        pytest.skip("needs our own kernels, which the double does not have")
    found, impls = attention_errors(backend, ATTENTION[name], "float32" if dtype == "strict" else dtype)
    assert max(found.values()) <= BOUNDS[dtype], (found, impls)
    ours = dtype == "strict" or name == "narrow"
    refused = [s.reason for s in backend.take_substitutes()]
    names = [impl.removeprefix("empty + ") for impl in impls]  # gradients of a bias begin at 0
    assert all(name.startswith("cuda:" if ours else "cudnn:") for name in names), (impls, refused)


def kernel_and_output(backend: CudnnBackend, dtype: str = "float32"):
    """Return a forward convolution of 32 channels, and its output."""
    a = OnDevice(backend, dtype)
    y = a.poisoned(2, 16, 16, 32)
    return backend.conv_forward(a.draw(2, 16, 16, 32)[0], a.draw(32, 3, 3, 32)[0], a.draw(32)[0], y, G, RELU), y


def test_kept_plans_give_the_same(opened):
    """A backend that is opened again takes measured plans from the store, and gives the same bits."""
    results, names = [], []
    for _ in range(2):
        with opened(autotune=True, precision="tf32") as backend:
            kernel, y = kernel_and_output(backend)
            kernel()
            results.append(to_host(y))
            names.append(kernel.impl)
            assert backend.autotuned()
    assert names[0] == names[1] and np.array_equal(*results)


def test_deterministic_mode_repeats_every_bit(opened):
    backend = opened(deterministic=True, precision="tf32")
    a, case = OnDevice(backend, "float32"), Case("", G, (64, 64), 4, 32, 32)
    xs, ws, _, ys = case.shapes
    x, dy, dw = a.draw(*xs)[0], a.draw(*ys)[0], a.poisoned(*ws)
    kernel = backend.conv_backward_filter(x, dy, dw, None, G)
    results = []
    for _ in range(5):
        dw.fill(float("nan"))
        kernel()
        results.append(to_host(dw))
    assert all(np.array_equal(results[0], other) for other in results[1:])


@only_gpu
def test_two_streams_and_a_captured_graph(tmp_path):
    """Two concurrent streams have separate workspaces; a graph repeats the captured work on new data."""
    with CudnnBackend(store=tmp_path / "plans.jsonl") as backend:
        kernel, y = kernel_and_output(backend)
        other, z = kernel_and_output(backend)
        kernel()
        expected = to_host(y)
        stream = backend.xp.cuda.Stream(non_blocking=True)
        y.fill(float("nan"))
        backend.synchronize()
        for _ in range(20):
            kernel()
            with stream:
                other()
        backend.synchronize()
        assert np.array_equal(to_host(y), expected) and np.array_equal(to_host(z), expected)
        backend.before_capture()
        launch = backend.device.capture(kernel)
        y.fill(float("nan"))
        launch()
        backend.synchronize()
        assert np.array_equal(to_host(y), expected)
