"""Dropout draws the bits of layers/dropout.py, whatever the block."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from halograd.dtensor import Box
from halograd.kernels import KernelError
from halograd.layers.dropout import global_counters, mix64, mix64_inplace

from ..conftest import assert_close


def dropped(shape, box, rate, seed, step, salt):
    """The mask of the layer."""
    outer, inner = global_counters(shape, box)
    z = (outer[:, None] + inner) + np.uint64(mix64(mix64(mix64(seed) + step) + salt))
    mix64_inplace(z, np.empty_like(z))
    return (z < np.uint64(int(rate * 2**64))).reshape(box.shape)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.95])
@pytest.mark.parametrize(
    ("shape", "start", "stop"),
    [
        ((4, 9, 7, 16), (1, 2, 0, 0), (3, 9, 7, 16)),
        ((4, 9, 7, 16), (0, 4, 3, 8), (4, 5, 6, 16)),
        ((3, 5), (1, 0), (3, 5)),
        ((2, 3, 4, 5, 6), (1, 1, 0, 2, 0), (2, 3, 4, 5, 6)),
        ((70000, 60000, 4, 2), (69999, 59990, 1, 0), (70000, 60000, 4, 2)),
    ],
    ids=str,
)
def test_the_bits_of_the_layer(typed, cuda, shape, start, stop, rate):
    box = Box(start, stop)
    x, y = typed.draw(*box.shape), typed.poisoned(*box.shape)
    seed, step, salt = (1 << 63) + 12345, 7, zlib.crc32(b"dropout1")
    state = np.array([seed, step], np.uint64)
    kernel = cuda.dropout(x, y, rate, salt, shape, start, state)
    for step in (7, 8):
        state[1] = step  # a kernel reads the state when it runs
        kernel()
        mask = dropped(shape, box, rate, seed, step, salt)
        assert not y[mask].any()
        assert_close(y, np.where(mask, 0, x.astype(np.float64) / (1 - rate)), 1, scale=float(4 / (1 - rate)))


def test_an_infinite_element_that_is_dropped_is_zero(cuda, arrays):
    x, y = arrays.draw(64, 8), arrays.poisoned(64, 8)
    x.fill(np.inf)
    cuda.dropout(x, y, 0.5, 1, x.shape, (0, 0), np.array([1, 2], np.uint64))()
    assert set(y.reshape(-1).tolist()) == {0.0, np.inf}


def test_refused(cuda, arrays):
    x, state = arrays.draw(2, 3), np.zeros(2, np.uint64)
    with pytest.raises(KernelError, match=r"expected a rate in \[0, 1\), got 1"):
        cuda.dropout(x, x, 1, 0, (2, 3), (0, 0), state)
    with pytest.raises(KernelError, match="expected shape and start for 2 axes"):
        cuda.dropout(x, x, 0.5, 0, (2, 3, 1), (0, 0, 0), state)
