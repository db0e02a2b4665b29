"""Bias, its gradient, conversion, and the gradient of a fused ReLU."""

from __future__ import annotations

import numpy as np
import pytest

from halograd.kernels import KernelError

from ..conftest import EPS, Arrays, assert_close
from .conftest import DTYPES


@pytest.fixture(params=DTYPES, ids=str)
def typed(backend, host, request) -> Arrays:
    """Arrays of every dtype."""
    host.set_order(request.param.name in ("float64", "float16"))
    return Arrays(backend, request.param)


@pytest.mark.parametrize("relu", [False, True], ids=["linear", "relu"])
@pytest.mark.parametrize("channels", [1, 5, 8, 16])
@pytest.mark.parametrize("vector", ["own", "float32"])
def test_bias(typed, cuda, channels, relu, vector):
    y = typed.draw(2, 5, 3, channels)
    b = typed.draw(channels, dtype=None if vector == "own" else np.float32)
    want = y.astype(np.float64) + b.astype(np.float64)
    cuda.bias(y, b, relu)()
    assert_close(y, np.maximum(want, 0) if relu else want, 2)


@pytest.mark.parametrize("shape", [(2, 5, 3, 1), (2, 5, 3, 18), (4, 33, 31, 8), (1, 7), (3, 1, 300)], ids=str)
@pytest.mark.parametrize("vector", ["own", "float32", "float64"])
def test_bias_gradient(typed, cuda, shape, vector):
    dy = typed.draw(*shape)
    db = typed.poisoned(shape[-1], dtype=None if vector == "own" else np.dtype(vector))
    cuda.bias_gradient(dy, db)()
    want = dy.astype(np.float64).reshape(-1, shape[-1]).sum(axis=0)
    # In float32 at the least, and rounded once.
    eps = max(EPS[db.dtype], min(EPS[np.dtype(np.float32)], EPS[dy.dtype]))
    assert np.abs(db.astype(np.float64) - want).max() <= 4 * eps * max(8.0, np.abs(want).max()) * 8


def test_bias_gradient_of_nothing(cuda):
    db = np.full(3, np.nan, np.float32)
    cuda.bias_gradient(np.zeros((0, 4, 3), np.float32), db)()
    assert not db.any()


def test_nan_is_not_lost(cuda):
    """Like NumPy's, a ReLU and a maximum of NaN are NaN."""
    x = np.array([np.nan, -1, 2, np.nan], np.float32)
    y = np.empty_like(x)
    cuda.activation("relu", x, y, None, None, 0.0)[0]()
    assert np.array_equal(y, [np.nan, 0, 2, np.nan], equal_nan=True)
    cuda.add([x, x], y, True)()
    assert np.array_equal(y, [np.nan, 0, 4, np.nan], equal_nan=True)


def test_refused(cuda):
    with pytest.raises(KernelError, match=r"expected b of shape \(3,\), got \(2,\)"):
        cuda.bias(np.zeros((1, 3), np.float32), np.zeros(2, np.float32))
    with pytest.raises(KernelError, match="expected dtype bfloat16, float32 or float64, got float16"):
        cuda.bias_gradient(np.zeros((2, 3), DTYPES[3]), np.zeros(3, np.float16))


def test_large_offsets(cuda, monkeypatch):
    """The programs for 64-bit offsets do the same."""
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
    assert any(program.large for program in cuda.device.programs)
