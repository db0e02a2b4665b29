"""Tests of interpolation and its adjoint against a resampling of every output."""

import itertools
from fractions import Fraction

import numpy as np
import pytest

from halograd.kernels import KernelError, Resampled, Resampling
from halograd.kernels.cuda.pointwise import readers
from halograd.kernels.geometry import MODES

from .conftest import assert_close

CASES = {
    "2-D x2": ((4, 5), (8, 10)),
    "2-D odd": ((5, 7), (8, 3)),
    "down": ((9, 8), (3, 4)),
    "1-D": ((6,), (15,)),
    "3-D": ((3, 2, 4), (6, 5, 8)),
    "one": ((1, 3), (4, 1)),
}


def axes(inputs, outputs, mode):
    """Return the resampling of all outputs, for each axis."""
    return [Resampled(Resampling(n, m, Fraction(n, m), mode), 0, m) for n, m in zip(inputs, outputs)]


def matrix(axis, inputs):
    """Return the resampling of one axis as a matrix."""
    first, weights = axis.table()
    taps = weights.shape[1]
    full = np.zeros((len(first), inputs + taps))
    for o, (i, some) in enumerate(zip(first, weights)):
        full[o, i : i + taps] += some
    return full[:, :inputs]


def apply(x, matrices):
    """Return x (N, *spatial, C) times a matrix along each spatial axis."""
    for axis, m in enumerate(matrices, start=1):
        x = np.moveaxis(np.tensordot(m, x, axes=(1, axis)), 0, axis)
    return x


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("channels", [3, 8])
@pytest.mark.parametrize("case", CASES)
def test_resize(typed, case, channels, mode):
    inputs, outputs = CASES[case]
    x, dy = typed.draw(2, *inputs, channels), typed.draw(2, *outputs, channels)
    y, dx = typed.poisoned(*dy.shape), typed.poisoned(*x.shape)
    made = axes(inputs, outputs, mode)
    forward, backward = typed.backend.resize(x, y, dy, dx, made)
    forward()
    backward()
    matrices = [matrix(t, n) for t, n in zip(made, inputs)]
    terms = int(np.prod([weights.shape[1] for _, weights in (axis.table() for axis in made)]))
    assert_close(y, apply(x.astype(np.float64), matrices), 8 + terms, "y")
    most = int(np.prod([4 * np.ceil(m / n) + 4 for n, m in zip(inputs, outputs)]))
    assert_close(dx, apply(dy.astype(np.float64), [m.T for m in matrices]), most, "dx")


def test_a_block_of_the_outputs(arrays):
    """A block of outputs is computed from the inputs that it reads, as on one rank."""
    r = Resampling(16, 32, Fraction(1, 2), "linear")
    start, stop = 5, 14
    low, high = r.input_range(start, stop)
    whole = np.arange(16.0)
    x, y = arrays.poisoned(1, high - low, 1), arrays.poisoned(1, stop - start, 1)
    x[0, :, 0] = whole[low:high]
    forward, backward = arrays.backend.resize(x, y, None, None, [Resampled(r, start, stop, low)])
    forward()
    assert backward is None
    want = [sum(whole[i] * w for i, w in r.taps(o)) for o in range(start, stop)]
    assert_close(y[0, :, 0], np.array(want), 2)


def test_readers_cover_every_tap():
    first, weights = np.array([0, 0, 1, 3]), np.array([[1, 0, 0], [0.5, 0.5, 0], [0.25, 0.25, 0.5], [1, 0, 0]])
    found = readers(first, weights, 5)
    for o, tap in itertools.product(range(4), range(3)):
        if weights[o, tap]:
            start, stop = found[first[o] + tap]
            assert start <= o < stop
    assert found[4].tolist() == [0, 0]


def test_refused(arrays):
    x, y, resize = arrays.draw(1, 4, 1), arrays.draw(1, 2, 1), arrays.backend.resize
    axis = Resampled(Resampling(4, 2, Fraction(2), "linear"), 0, 2)
    with pytest.raises(KernelError, match="expected one of at most 3 spatial axes each, got 2"):
        resize(x, y, None, None, [axis] * 2)
    with pytest.raises(KernelError, match=r"expected 2 outputs of the inputs \[0, 4\), got 3 of 4"):
        resize(x, arrays.draw(1, 3, 1), None, None, [axis])
    with pytest.raises(KernelError, match=r"expected 2 outputs of the inputs \[0, 4\), got 2 of 3"):
        resize(x[:, 1:], y, None, None, [axis])
