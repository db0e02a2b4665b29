"""Tests of loss scaling, which runs entirely on the device."""

import numpy as np
import pytest


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 1023, 1026])
def test_find_nonfinite(typed, bad, where):
    fine, x, flag = typed.draw(40), typed.draw(1027), np.zeros(1, np.int32)
    kernel = typed.backend.find_nonfinite([fine, x], flag)
    kernel()
    assert flag[0] == 0
    x[where] = bad
    kernel()
    assert flag[0] == 1
    x[where] = 0
    kernel()
    assert flag[0] == 1, "it is cleared by update_loss_scale only"


def test_the_largest_finite_numbers_are_finite(arrays):
    x, flag = arrays.draw(8), np.zeros(1, np.int32)
    x[...] = np.finfo(np.float32).max
    arrays.backend.find_nonfinite([x], flag)()
    assert flag[0] == 0


def test_dynamic_loss_scale(backend):
    """The loss scale is halved after an overflow and doubled after three steps without one, between 1 and 2^24."""
    state, flag = np.array([1024.0, 0, 1 / 1024]), np.zeros(1, np.int32)
    kernel = backend.update_loss_scale(state, flag, interval=3)
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
