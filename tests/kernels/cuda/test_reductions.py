"""Sums of arrays, clipping, and what scales a loss: on the device from end to end."""

from __future__ import annotations

import math

import numpy as np
import pytest


@pytest.mark.parametrize("squares", [False, True], ids=["sum", "squares"])
@pytest.mark.parametrize("count", [1, 7, 16, 3001])
def test_total(typed, cuda, count, squares):
    x, out = typed.draw(count), np.full(1, np.nan)
    cuda.total(x, out, squares)()
    exact = x.astype(np.float64)
    # Every element is added in float64.
    assert math.isclose(out[0], math.fsum(exact**2 if squares else exact), rel_tol=1e-12, abs_tol=1e-11)


def test_total_of_an_unaligned_view_and_of_nothing(cuda, arrays):
    x, out = arrays.draw(100), np.full(1, np.nan)
    cuda.total(x[1:], out)()
    assert math.isclose(out[0], x[1:].astype(np.float64).sum(), rel_tol=1e-12)
    cuda.total(x[:0], out)()
    assert out[0] == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 1023, 1026])
def test_find_nonfinite(typed, cuda, bad, where):
    fine, x, flag = typed.draw(40), typed.draw(1027), np.zeros(1, np.int32)
    kernel = cuda.find_nonfinite([fine, x], flag)
    kernel()
    assert flag[0] == 0
    x[where] = bad
    kernel()
    assert flag[0] == 1
    x[where] = 0
    kernel()
    assert flag[0] == 1, "it is cleared by update_loss_scale only"


def test_the_largest_finite_numbers_are_finite(cuda, arrays):
    x, flag = arrays.draw(8), np.zeros(1, np.int32)
    x[...] = np.finfo(np.float32).max
    cuda.find_nonfinite([x], flag)()
    assert flag[0] == 0


def test_dynamic_loss_scale(cuda):
    """Halved at an overflow, doubled after three good steps, never below 1 or above 2^24."""
    state, flag = np.array([1024.0, 0, 1 / 1024]), np.zeros(1, np.int32)
    kernel = cuda.update_loss_scale(state, flag, interval=3)
    seen = []
    for overflow in (0, 0, 1, 0, 0, 0, 0):
        flag[0] = overflow
        kernel()
        assert flag[0] == 0 and state[2] == 1 / state[0]
        seen.append(state[0])
    assert seen == [1024, 1024, 512, 512, 512, 1024, 1024]
    flag[0], state[0] = 1, 1
    kernel()
    assert state[0] == 1
    state[:2] = 2.0**24, 2
    kernel()
    assert state[0] == 2.0**24


@pytest.mark.parametrize("scale", [1.0, 1 / 1024])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clip(cuda, arrays, max_norm, scale):
    """The factor of training/clipping.py, with gradients that carry a loss scale."""
    g, squares = arrays.draw(500), np.zeros(1)
    norm = float(np.linalg.norm(g.astype(np.float64)))
    g /= np.float32(scale)
    scalars = np.array([0.1, scale, 1, 1])
    cuda.total(g, squares, squares=True)()
    cuda.clip(squares, max_norm, scalars)()
    assert math.isclose(scalars[1], scale * min(1.0, max_norm / (norm + 1e-6)), rel_tol=1e-9)
    assert scalars[[0, 2, 3]].tolist() == [0.1, 1, 1]
