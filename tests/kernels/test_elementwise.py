"""Tests of activations, sums of arrays and dense layers."""

import itertools

import numpy as np
import pytest

from halograd.kernels import ACTIVATIONS, KernelError
from halograd.kernels.kernel import BY_OUTPUT, FusedActivation, reads_input

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
