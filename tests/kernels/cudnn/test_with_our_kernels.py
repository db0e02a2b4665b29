"""Tests of the cuDNN backend with our own CUDA kernels, compiled for the CPU, and the double of cuDNN."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from halograd.kernels import Geometry
from halograd.kernels.cuda import Boxes
from halograd.kernels.cudnn import CudnnBackend
from tests.kernels import reference
from tests.kernels.conftest import Arrays, assert_close
from tests.kernels.cuda.host import HostLauncher, compiler
from tests.kernels.every import every_kernel
from tests.kernels.geometries import CASES
from tests.kernels.reference import RELU
from tests.kernels.test_convolution import check

from .fake_runtime import Machine, device_empty

G = Geometry.of((3, 3), 1, 1)


@pytest.fixture(scope="module")
def host() -> HostLauncher:
    """Return a launcher that compiles each program once for this file."""
    if compiler() is None:
        pytest.skip("needs g++ to run CUDA kernels on the CPU")
    return HostLauncher()


@pytest.fixture
def backend(host, tmp_path) -> Iterator[CudnnBackend]:
    machine = Machine(tmp_path)
    host.empty = device_empty
    machine.boxes = Boxes(host)
    with machine.open() as opened:
        yield opened


def test_every_kernel_runs(arrays):
    for kernel in every_kernel(arrays):
        kernel()
        kernel.close()


@pytest.mark.parametrize("case", [CASES[i] for i in (1, 17, 25, 28)], ids=str)
def test_convolutions(arrays, case):
    check(arrays, case, f=RELU)


def test_copies_conversions_and_zeroed_rows(backend):
    """Convolutions are right with float32 weights for bfloat16, a misaligned array, and rows that no output reads."""
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    a = Arrays(backend, bfloat16)
    geometry = Geometry.of((3, 3), 1, ((0, -2), (1, 1)))
    x, w = a.draw(1, 9, 5, 3)[:, 1:], a.draw(7, 3, 3, 3, dtype=np.float32)
    ys = (1, *geometry.output_shape((8, 5)), 7)
    dy, y, dx = a.draw(*ys), a.poisoned(*ys), a.poisoned(1, 9, 5, 3)[:, 1:]
    dw, db = a.poisoned(7, 3, 3, 3, dtype=np.float32), a.poisoned(7, dtype=np.float32)
    assert x.data.ptr % 16
    backend.conv_forward(x, w, None, y, geometry, RELU)()
    backend.conv_backward_data(dy, w, dx, geometry)()
    backend.conv_backward_filter(x, dy, dw, db, geometry)()
    rounded = w.astype(bfloat16)
    assert_close(y, np.maximum(reference.conv(x, rounded, None, geometry, ys), 0), 2)
    assert_close(dx, reference.conv_data(dy, rounded, geometry, dx.shape), 2)
    assert (dx[:, -2:] == 0).all()
    np.testing.assert_allclose(dw, reference.conv_filter(x, dy, geometry, w.shape), rtol=2**-7, atol=2**-7)
    np.testing.assert_allclose(db, dy.astype(np.float64).sum(axis=(0, 1, 2)), rtol=1e-5, atol=1e-5)


def test_dense_layers_with_bias(backend):
    dtype = np.dtype(np.float32)
    a = Arrays(backend, dtype)
    x, w, b, dy = a.draw(5, 7), a.draw(3, 7), a.draw(3), a.draw(5, 3)
    y, dw, db = a.poisoned(5, 3), a.poisoned(3, 7), a.poisoned(3)
    backend.dense_forward(x, w, b, y)()
    backend.dense_backward_filter(x, dy, dw, db)()
    eps = np.finfo(dtype).eps
    wide = [v.astype(np.float64) for v in (x, w, b, dy)]
    np.testing.assert_allclose(y.astype(np.float64), wide[0] @ wide[1].T + wide[2], rtol=16 * eps, atol=16 * eps)
    np.testing.assert_allclose(dw.astype(np.float64), wide[3].T @ wide[0], rtol=16 * eps, atol=16 * eps)
    np.testing.assert_allclose(db.astype(np.float64), wide[3].sum(axis=0), rtol=16 * eps, atol=16 * eps)
