"""Tests of CUDA kernels beyond those of every backend: bias with other dtypes, order of threads, and memory."""

from __future__ import annotations

import numpy as np
import pytest

from halograd.kernels import KernelError
from halograd.kernels.kernel import BatchNormArrays

from ..conftest import EPS, FLOAT64, Arrays, assert_close
from ..reference import RELU
from .conftest import DTYPES


@pytest.fixture(params=DTYPES, ids=str)
def typed(backend, host, request) -> Arrays:
    """Return a factory of arrays for each dtype; threads run in reverse order for every second one."""
    host.set_order(request.param.name in ("float64", "float16"))
    return Arrays(backend, request.param)


@pytest.mark.parametrize("channels", [1, 5, 8, 16])
@pytest.mark.parametrize("vector", ["own", "float32"])
def test_bias(typed, cuda, channels, vector):
    y = typed.draw(2, 5, 3, channels)
    b = typed.draw(channels, dtype=None if vector == "own" else np.float32)
    want = y.astype(np.float64) + b.astype(np.float64)
    cuda._bias(y, b)()
    assert_close(y, want, 2)


@pytest.mark.parametrize("shape", [(2, 5, 3, 1), (2, 5, 3, 18), (4, 33, 31, 8), (1, 7), (3, 1, 300)], ids=str)
@pytest.mark.parametrize("vector", ["own", "float32", "float64"])
def test_bias_gradient(typed, cuda, shape, vector):
    dy = typed.draw(*shape)
    db = typed.poisoned(shape[-1], dtype=None if vector == "own" else np.dtype(vector))
    cuda._bias_gradient(dy, db)()
    want = dy.astype(np.float64).reshape(-1, shape[-1]).sum(axis=0)
    # computed at least in float32, and rounded once
    eps = max(EPS[db.dtype], min(EPS[np.dtype(np.float32)], EPS[dy.dtype]))
    assert np.abs(db.astype(np.float64) - want).max() <= 4 * eps * max(8.0, np.abs(want).max()) * 8


def test_nan_is_not_lost(cuda):
    """ReLU and maximum return NaN for NaN, as in NumPy."""
    x = np.array([np.nan, -1, 2, np.nan], np.float32)
    y = np.empty_like(x)
    cuda.activation("relu", x, y, None, None, 0.0)[0]()
    assert np.array_equal(y, [np.nan, 0, 2, np.nan], equal_nan=True)
    cuda.add([x, x], y, RELU)()
    assert np.array_equal(y, [np.nan, 0, 4, np.nan], equal_nan=True)


def test_refused(cuda):
    with pytest.raises(KernelError, match="expected dtype bfloat16, float32 or float64, got float16"):
        cuda._bias_gradient(np.zeros((2, 3), DTYPES[3]), np.zeros(3, np.float16))


def test_large_offsets(cuda, monkeypatch):
    """The programs for 64-bit offsets give the same results as those for 32 bits."""
    from halograd.kernels import Geometry
    from halograd.kernels.cuda import launch

    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 6, 5, 8)).astype(np.float32)
    found = []
    for limit in (launch.LARGE, 1):
        monkeypatch.setattr(launch, "LARGE", limit)
        y, dx = np.empty((2, 3, 3, 8), np.float32), np.empty_like(x)
        dy = np.ones_like(y)
        for kernel in cuda.max_pool(x, y, dy, dx, Geometry.of((3, 3), 2, 1)):
            kernel()
        db, z = np.empty(8, np.float32), np.empty_like(x)
        cuda.bias_gradient(x, db)()
        cuda.add([x[:, 1:], x[:, :-1]], z[:, 1:], False)()
        found.append((y, dx, db, z[:, 1:].copy()))
    assert all(np.array_equal(a, b) for a, b in zip(*found))
    assert any(program.large for program in cuda.launcher.programs)


def test_many_targets_have_large_offsets(cuda, monkeypatch):
    """The weight of many targets is summed by the program for 64-bit offsets; in 32 bits 2^31 would be negative."""
    from halograd.kernels.cuda import launch
    from halograd.kernels.losses import ClassTargets

    monkeypatch.setattr(launch, "LARGE", 1)
    monkeypatch.setattr(cuda.launcher, "programs", set())
    total = np.empty(1)
    cuda.target_weight(np.array([[0], [1], [1]], np.uint8), total, ClassTargets(2, (1.0, 3.0)))()
    assert total[0] == 7
    assert [program.large for program in cuda.launcher.programs] == [True]


def test_the_order_of_threads_does_not_matter(cuda, arrays):
    """Results do not depend on the order of threads in any bit, because each sum tree has one order."""
    x, dy = arrays.draw(2, 40, 13, 12), arrays.draw(2, 40, 13, 12)
    gamma, beta = arrays.draw(12), arrays.draw(12)
    found = []
    for backward in (False, True):
        cuda.launcher.set_order(backward)
        y, dx = arrays.poisoned(*x.shape), arrays.poisoned(*x.shape)
        mean, var, sums = arrays.poisoned(12), arrays.poisoned(12), arrays.poisoned(2, 12, dtype=FLOAT64)
        vectors = (gamma, beta, mean, var, sums, np.zeros((2, 12)))
        k = cuda.batch_norm(BatchNormArrays(x, y, dy, dx, *vectors, 1e-3, RELU, True))
        k.forward()
        k.backward_sums()
        total = np.zeros(1)
        cuda.sum_of_squares([(x, 1), (dy, 2)], total)()
        found.append((y, dx, mean, var, sums, total))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(*found))


def test_nothing_is_allocated_when_kernels_run(cuda, arrays, monkeypatch):
    x, y = arrays.draw(2, 5, 8), arrays.poisoned(2, 5, 8)
    dx, dy = arrays.poisoned(2, 5, 8), arrays.draw(2, 5, 8)
    c, sums = arrays.draw(8), arrays.poisoned(2, 8, dtype=FLOAT64)
    vectors = (c, c.copy(), c.copy(), c.copy(), sums, sums.copy())
    k = cuda.batch_norm(BatchNormArrays(x, y, dy, dx, *vectors, 1e-3, RELU, True))
    k.forward()
    k.backward_sums()

    def refuse(*_):
        raise AssertionError("allocates")

    for name in ("empty", "upload", "function"):
        monkeypatch.setattr(cuda.launcher, name, refuse)
    k.forward()
    k.backward_sums()


def test_kernels_follow_scratch_that_has_grown(cuda, arrays):
    """Kernels built before a later kernel enlarges the scratch memory use the enlarged memory."""
    dy, db = arrays.draw(30, 4), arrays.poisoned(4)
    small = cuda.bias_gradient(dy, db)
    small()
    generation = cuda.scratch.generation
    wide, dw = arrays.draw(3000, 40), arrays.poisoned(40)
    large = cuda.bias_gradient(wide, dw)
    assert cuda.scratch.generation > generation
    for kernel in (large, small):
        kernel()
    assert_close(db, dy.astype(np.float64).sum(axis=0), 30)
    assert_close(dw, wide.astype(np.float64).sum(axis=0), 3000)
