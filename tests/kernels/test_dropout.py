"""Tests that dropout draws the same bits for any block and backend."""

import math
import zlib

import numpy as np
import pytest

from halograd.dtensor import Box
from halograd.kernels import KernelError
from halograd.kernels.numpy.pointwise import mix64
from halograd.kernels.pointwise import DropoutMask

from .conftest import assert_close


def dropped(shape, box, rate, seed, step, salt):
    """Return the dropout mask of a box, computed element by element."""
    key = mix64(mix64(mix64(seed) + step) + salt)
    index = np.arange(box.size, dtype=object)
    position = np.zeros(box.size, dtype=object)
    for axis in reversed(range(box.ndim)):
        position += (index % box.shape[axis] + box.start[axis]) * math.prod(shape[axis + 1 :])
        index //= box.shape[axis]
    # `mix64` adds GOLDEN first, which an element does `position` times.
    bits = [mix64(int(key) + 0x9E3779B97F4A7C15 * (int(p) - 1)) for p in position]
    return np.array([b < int(rate * 2**64) for b in bits]).reshape(box.shape)


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
def test_the_bits_of_a_block(typed, shape, start, stop, rate):
    box = Box(start, stop)
    x, y = typed.draw(*box.shape), typed.poisoned(*box.shape)
    seed, step, salt = (1 << 63) + 12345, 7, zlib.crc32(b"dropout1")
    state = np.array([seed, step, 0], np.uint64)
    dy, dx = typed.draw(*box.shape), typed.poisoned(*box.shape)
    forward, backward = typed.backend.dropout(x, y, dy, dx, DropoutMask(rate, salt, shape, start, state))
    for step, first in ((7, 0), (8, 0), (8, 3)):
        state[1:] = step, first  # a kernel reads the state when it runs
        part = Box(*((n[0] + first, *n[1:]) for n in (box.start, box.stop)))
        mask = dropped(shape, part, rate, seed, step, salt)
        for kernel, given, found in ((forward, x, y), (backward, dy, dx)):
            kernel()
            assert not found[mask].any()
            want = np.where(mask, 0, given.astype(np.float64) / (1 - rate))
            assert_close(found, want, 1, scale=float(4 / (1 - rate)))


def test_an_infinite_element_that_is_dropped_is_zero(arrays):
    x, y = arrays.draw(64, 8), arrays.poisoned(64, 8)
    x.fill(np.inf)
    mask = DropoutMask(0.5, 1, x.shape, (0, 0), np.array([1, 2, 0], np.uint64))
    forward, backward = arrays.backend.dropout(x, y, None, None, mask)
    forward()
    assert set(y.reshape(-1).tolist()) == {0.0, np.inf} and backward is None


def test_refused(arrays):
    x, state = arrays.draw(2, 3), np.zeros(3, np.uint64)
    with pytest.raises(KernelError, match=r"expected a rate in \[0, 1\), got 1"):
        arrays.backend.dropout(x, x, None, None, DropoutMask(1, 0, (2, 3), (0, 0), state))
    with pytest.raises(KernelError, match="expected shape and start for 2 axes"):
        arrays.backend.dropout(x, x, None, None, DropoutMask(0.5, 0, (2, 3, 1), (0, 0, 0), state))
