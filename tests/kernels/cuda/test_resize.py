"""Interpolation by tables against the resampling of every output, and its adjoint."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest

from halograd.kernels import KernelError
from halograd.kernels.cuda.resize import readers
from halograd.layers.resample import Resampling

from ..conftest import assert_close

CASES = {
    "2-D x2": ((4, 5), (8, 10)),
    "2-D odd": ((5, 7), (8, 3)),
    "down": ((9, 8), (3, 4)),
    "1-D": ((6,), (15,)),
    "3-D": ((3, 2, 4), (6, 5, 8)),
    "one": ((1, 3), (4, 1)),
}


def tables(inputs, outputs, mode):
    """Per axis: the first input of each output, and the weights of it and the next."""
    made = []
    for n, m in zip(inputs, outputs):
        taps = [Resampling(n, m, Fraction(n, m), mode).taps(o) for o in range(m)]
        weights = [[t[0][1], t[1][1] if len(t) > 1 else 0.0] for t in taps]
        made.append((np.array([t[0][0] for t in taps]), np.array(weights)))
    return made


def matrix(table, inputs):
    """The resampling of one axis as a matrix."""
    first, weights = table
    full = np.zeros((len(first), inputs + 1))
    for o, (i, pair) in enumerate(zip(first, weights)):
        full[o, i : i + 2] += pair
    return full[:, :inputs]


def apply(x, matrices):
    """x (N, *spatial, C) times a matrix along each spatial axis."""
    for axis, m in enumerate(matrices, start=1):
        x = np.moveaxis(np.tensordot(m, x, axes=(1, axis)), 0, axis)
    return x


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "linear"])
@pytest.mark.parametrize("channels", [3, 8])
@pytest.mark.parametrize("case", CASES)
def test_resize(typed, cuda, case, channels, mode):
    inputs, outputs = CASES[case]
    x, dy = typed.draw(2, *inputs, channels), typed.draw(2, *outputs, channels)
    y, dx = typed.poisoned(*dy.shape), typed.poisoned(*x.shape)
    made = tables(inputs, outputs, mode)
    forward, backward = cuda.resize(x, y, dy, dx, made)
    forward()
    backward()
    matrices = [matrix(t, n) for t, n in zip(made, inputs)]
    assert_close(y, apply(x.astype(np.float64), matrices), 8, "y")
    most = int(np.prod([np.ceil(m / n) + 2 for n, m in zip(inputs, outputs)]))
    assert_close(dx, apply(dy.astype(np.float64), [m.T for m in matrices]), most, "dx")


def test_a_block_of_the_outputs(cuda, arrays):
    """A rank has some outputs, and the inputs that they read."""
    r = Resampling(16, 32, Fraction(1, 2), "linear")
    start, stop = 5, 14
    low, high = r.input_range(start, stop)
    taps = [r.taps(o) for o in range(start, stop)]
    table = (
        np.array([t[0][0] - low for t in taps]),
        np.array([[t[0][1], t[1][1] if len(t) > 1 else 0.0] for t in taps]),
    )
    whole = np.arange(16.0)
    x, y = arrays.poisoned(1, high - low, 1), arrays.poisoned(1, stop - start, 1)
    x[0, :, 0] = whole[low:high]
    forward, backward = cuda.resize(x, y, None, None, [table])
    forward()
    assert backward is None
    want = [sum(whole[i] * w for i, w in r.taps(o)) for o in range(start, stop)]
    assert_close(y[0, :, 0], np.array(want), 2)


def test_readers_cover_every_tap():
    first, weights = np.array([0, 0, 1, 3]), np.array([[1, 0], [0.5, 0.5], [0.25, 0.75], [1, 0]])
    found = readers(first, weights, 5)
    for o, tap in itertools.product(range(4), range(2)):
        if weights[o, tap]:
            start, stop = found[first[o] + tap]
            assert start <= o < stop
    assert found[4].tolist() == [0, 0]


def test_refused(cuda, arrays):
    x, y = arrays.draw(1, 4, 1), arrays.draw(1, 2, 1)
    with pytest.raises(KernelError, match="expected one table for each of at most 3 spatial axes, got 2"):
        cuda.resize(x, y, None, None, [(0, 0)] * 2)
    with pytest.raises(KernelError, match="expected a table of 2 outputs"):
        cuda.resize(x, y, None, None, [(np.zeros(3), np.zeros((3, 2)))])
    with pytest.raises(KernelError, match=r"expected a table that reads inputs in \[0, 4\)"):
        cuda.resize(x, y, None, None, [(np.array([0, 3]), np.full((2, 2), 0.5))])
