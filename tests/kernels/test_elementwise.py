"""Tests of activations, sums of arrays, dense layers, dropout and interpolation."""

import itertools
import math
import zlib
from fractions import Fraction

import numpy as np
import pytest

from halograd.dtensor import Box
from halograd.kernels import ACTIVATIONS, KernelError, Resampled, Resampling
from halograd.kernels.cuda.pointwise import readers
from halograd.kernels.geometry import MODES
from halograd.kernels.kernel import BY_OUTPUT, FusedActivation, reads_input
from halograd.kernels.numpy.pointwise import mix64
from halograd.kernels.pointwise import DropoutMask

from . import reference
from .conftest import assert_close
from .reference import FUSED
from .saturation import ALPHAS


@pytest.mark.parametrize("strided", ["", "x y", "x y dy dx"], ids=["packed", "strided inputs", "strided"])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activation(typed, kind, strided):
    inner = (slice(None), slice(1, -1), slice(0, 6))
    # A leaky ReLU without slope, too: in oneDNN it is another algorithm.
    for alpha in (0.0, *ALPHAS.get(kind, ())):
        x, y, dy, dx = (
            make(2, 6, 8, 5)[inner] if name in strided.split() else make(2, 4, 6, 5)
            for name, make in zip(("x", "y", "dy", "dx"), (typed.draw, typed.poisoned, typed.draw, typed.poisoned))
        )
        x *= 3
        assert x.flags.c_contiguous != bool(strided)
        forward, backward = typed.backend.activation(kind, x, y, dy, dx, alpha)
        value, slope = reference.activation(kind, x, alpha)
        forward()
        assert_close(y, value, 4, "y")
        (y if reads_input(kind, alpha) else x).fill(np.nan)  # the memory of arrays that are not read may be reused
        backward()
        assert_close(dx, slope * dy, 4, "dx")
        forward.close()
        backward.close()


@pytest.mark.parametrize("kind", BY_OUTPUT)
def test_activation_in_place(typed, kind):
    x, dy = typed.draw(2, 5, 6, 5), typed.draw(2, 5, 6, 5)
    dx = typed.poisoned(2, 5, 6, 5)
    value, slope = reference.activation(kind, x, 0.2)
    forward, backward = typed.backend.activation(kind, x, x, dy, dx, 0.2)
    forward()
    backward()
    assert_close(x, value, 4, "y")
    assert_close(dx, slope * dy, 4, "dx")


@pytest.mark.parametrize("f", [*FUSED, FusedActivation("elu", 0.3)], ids=str)
@pytest.mark.parametrize(
    ("terms", "where"),
    [
        *itertools.product([1, 2, 3, 5], ["packed", "strided", "in place first", "in place last", "in place twice"]),
        *((terms, "packed") for terms in (33, 34, 40)),  # one primitive of oneDNN adds 33
    ],
)
def test_add(typed, terms, where, f):
    xs = [typed.draw(2, 6, 5, 18) for _ in range(terms)]
    y = typed.poisoned(2, 6, 5, 18)
    if where == "strided":
        xs, y = [x[:, 1:-1] for x in xs], y[:, 1:-1]
    elif where != "packed":
        y = xs[0 if where == "in place first" else -1]
    if where == "in place twice":
        xs.append(y)
    total = sum(x.astype(np.float64) for x in xs)
    kernel = typed.backend.add(xs, y, f)
    kernel()
    assert_close(y, reference.activated(f, total)[0], terms + 1)
    kernel.close()


@pytest.mark.parametrize("shape", [(2, 5, 6, 16), (3, 7, 5), (1, 33, 31, 3), (4, 1), (0, 3, 4)], ids=str)
def test_bias_and_its_gradient(typed, shape):
    y, b, db = typed.draw(*shape), typed.draw(shape[-1]), typed.poisoned(shape[-1])
    added, summed = typed.backend.bias(y, b), typed.backend.bias_gradient(y, db)
    want = y.astype(np.float64) + b
    added()
    assert_close(y, want, 1, "y")
    total = y.astype(np.float64).sum(axis=tuple(range(len(shape) - 1)))
    summed()
    assert_close(db, total, y.size // shape[-1] + 1, "db")
    for kernel in (added, summed):
        kernel.close()


def test_wrong_arrays_of_a_bias_are_refused(arrays):
    y, backend = arrays.draw(2, 6, 6, 4), arrays.backend
    for make, what in ((backend.bias, "bias"), (backend.bias_gradient, "bias_gradient")):
        with pytest.raises(KernelError, match=rf"{what}: expected b of shape \(4,\), got \(3,\)"):
            make(y, arrays.draw(3))
        with pytest.raises(KernelError, match=rf"{what}: expected y packed"):
            make(y[:, 1:], arrays.draw(4))


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("n, f, k", [(1, 1, 1), (3, 7, 5), (2, 64, 10), (8, 33, 16), (5, 16, 1)])
def test_dense(typed, n, f, k, bias):
    x, w, dy = typed.draw(n, f), typed.draw(k, f), typed.draw(n, k)
    b, db = (typed.draw(k), typed.poisoned(k)) if bias else (None, None)
    y, dx, dw = typed.poisoned(n, k), typed.poisoned(n, f), typed.poisoned(k, f)
    kernels = [
        typed.backend.dense_forward(x, w, b, y),
        typed.backend.dense_backward_data(dy, w, dx),
        typed.backend.dense_backward_filter(x, dy, dw, db),
    ]
    for kernel in kernels:
        kernel()
    x, w, dy = (a.astype(np.float64) for a in (x, w, dy))
    assert_close(y, x @ w.T + (b if bias else 0), f + 1, "y")
    assert_close(dx, dy @ w, k, "dx")
    assert_close(dw, dy.T @ x, n, "dw")
    if bias:
        assert_close(db, dy.sum(axis=0), n, "db")
    for kernel in kernels:
        kernel.close()


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activation_of_large_values(typed, kind):
    """Activations of large values reach their limits, without overflow or NaN."""
    x = typed.draw(1, 4)
    x[...] = [-300, -50, 50, 300]
    dy, y, dx = typed.draw(1, 4), typed.poisoned(1, 4), typed.poisoned(1, 4)
    dy.fill(1)
    forward, backward = typed.backend.activation(kind, x, y, dy, dx, 0.5)
    forward()
    backward()
    ends = {key: [1, 1] for key in ("sigmoid", "tanh", "hard_sigmoid")}
    positive = ends.get(kind, [50, 300])
    negative = {"tanh": [-1, -1], "leaky_relu": [-150, -25], "elu": [-0.5, -0.5]}.get(kind, [0, 0])
    assert_close(y[0], np.array([*negative, *positive], np.float64), 4, "y")
    slopes = {**{key: [0, 0, 0, 0] for key in ends}, "leaky_relu": [0.5, 0.5, 1, 1]}
    assert_close(dx[0], np.array(slopes.get(kind, [0, 0, 1, 1]), np.float64), 4, "dx")


def test_activation_forward_only(arrays):
    x, y = arrays.draw(3, 4), arrays.poisoned(3, 4)
    forward, backward = arrays.backend.activation("tanh", x, y, None, None)
    assert backward is None
    forward()
    assert_close(y, np.tanh(x.astype(np.float64)), 4)


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


def test_dropout_refused(arrays):
    x, state = arrays.draw(2, 3), np.zeros(3, np.uint64)
    with pytest.raises(KernelError, match=r"expected a rate in \[0, 1\), got 1"):
        arrays.backend.dropout(x, x, None, None, DropoutMask(1, 0, (2, 3), (0, 0), state))
    with pytest.raises(KernelError, match="expected shape and start for 2 axes"):
        arrays.backend.dropout(x, x, None, None, DropoutMask(0.5, 0, (2, 3, 1), (0, 0, 0), state))


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


def test_resize_refused(arrays):
    x, y, resize = arrays.draw(1, 4, 1), arrays.draw(1, 2, 1), arrays.backend.resize
    axis = Resampled(Resampling(4, 2, Fraction(2), "linear"), 0, 2)
    with pytest.raises(KernelError, match="expected one of at most 3 spatial axes each, got 2"):
        resize(x, y, None, None, [axis] * 2)
    with pytest.raises(KernelError, match=r"expected 2 outputs of the inputs \[0, 4\), got 3 of 4"):
        resize(x, arrays.draw(1, 3, 1), None, None, [axis])
    with pytest.raises(KernelError, match=r"expected 2 outputs of the inputs \[0, 4\), got 2 of 3"):
        resize(x[:, 1:], y, None, None, [axis])
