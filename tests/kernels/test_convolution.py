"""Tests of convolution and its two gradients against direct loops, on every backend."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halograd.kernels import Geometry
from halograd.kernels.kernel import ACTIVATIONS, FusedActivation
from halograd.kernels.numpy import NumpyBackend

from . import reference
from .conftest import Arrays, assert_close
from .geometries import CASES, Case


def check(a: Arrays, case: Case, bias: bool = True, f: FusedActivation | None = None) -> None:
    """Check a convolution and its gradients of input, weights and bias."""
    g, (xs, ws, bs, ys) = case.geometry, case.shapes
    x, w, dy = a.draw(*xs), a.draw(*ws), a.draw(*ys)
    b = a.draw(*bs) if bias else None
    y, dx, dw = a.poisoned(*ys), a.poisoned(*xs), a.poisoned(*ws)
    db = a.poisoned(*bs) if bias else None
    kernels = [
        a.backend.conv_forward(x, w, b, y, g, f),
        a.backend.conv_backward_data(dy, w, dx, g),
        a.backend.conv_backward_filter(x, dy, dw, db, g),
    ]
    for kernel in kernels:
        kernel()
    expected = reference.conv(x, w, b, g, ys)
    depth, rows = math.prod(ws[1:]), math.prod(ys[:-1])
    assert_close(y, reference.activated(f, expected)[0], depth + 1, "y")
    assert_close(dx, reference.conv_data(dy, w, g, xs), math.prod(g.kernel) * ws[0] // g.groups, "dx")
    assert_close(dw, reference.conv_filter(x, dy, g, ws), max(rows, 1), "dw")
    if bias:
        assert_close(db, dy.astype(np.float64).sum(axis=tuple(range(dy.ndim - 1))), max(rows, 1), "db")
    for kernel in kernels:
        kernel.close()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_direct_loops(typed, case):
    check(typed, case)


@pytest.mark.parametrize("case", CASES[:3], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_fused_activation(arrays, case, bias, kind):
    check(arrays, case, bias=bias, f=FusedActivation(kind, 0.3))


@st.composite
def cases(draw) -> Case:
    ndim = draw(st.integers(1, 3))

    def every(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(ndim))

    kernel, stride, dilation = every(1, 4 if ndim < 3 else 2), every(1, 3), every(1, 2)
    extent = [d * (k - 1) + 1 for k, d in zip(kernel, dilation)]
    lo = tuple(draw(st.integers(0, e - 1)) for e in extent)
    hi = tuple(draw(st.integers(-2, e - 1)) for e in extent)
    spatial = tuple(max(1, draw(st.integers(e - a - b, e - a - b + 5))) for e, a, b in zip(extent, lo, hi))
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    geometry = Geometry(kernel, stride, dilation, tuple(zip(lo, hi)), groups)
    sizes = [draw(st.integers(1, 2)), *(groups * draw(st.integers(1, 4)) for _ in range(2))]
    return Case("drawn", geometry, spatial, *sizes)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_drawn_geometries(arrays, case):
    check(arrays, case)


@pytest.mark.parametrize("limit", [1, 5000, 40000])
@pytest.mark.parametrize("case", [c for c in CASES if c.samples == 2][::3], ids=str)
def test_blocks_of_columns_give_the_same(case, limit):
    with NumpyBackend(column_bytes=limit) as backend:
        check(Arrays(backend, np.float64), case)


def test_blocks_of_columns_are_named():
    case = CASES[0]
    with NumpyBackend(column_bytes=1) as backend:
        a = Arrays(backend, np.float32)
        xs, ws, _, ys = case.shapes
        kernel = backend.conv_forward(a.draw(*xs), a.draw(*ws), None, a.poisoned(*ys), case.geometry)
        assert kernel.impl == "numpy:im2col in 14 blocks"


def test_weights_may_change_between_calls(arrays):
    case = CASES[1]
    g, (xs, ws, _, ys) = case.geometry, case.shapes
    x, w, y = arrays.draw(*xs), arrays.draw(*ws), arrays.poisoned(*ys)
    kernel = arrays.backend.conv_forward(x, w, None, y, g)
    kernel()
    w *= -2
    x *= 3
    kernel()
    assert_close(y, reference.conv(x, w, None, g, ys), 6 * math.prod(ws[1:]), "y")


@pytest.mark.parametrize("case", CASES[:8], ids=str)
def test_forward_and_gradients_are_adjoint(typed, case):
    """Convolution and its gradients are adjoint: <conv(x, w), dy> = <x, data(dy, w)> = <w, filter(x, dy)>."""
    a, g, (xs, ws, _, ys) = typed, case.geometry, case.shapes
    x, w, dy = a.draw(*xs), a.draw(*ws), a.draw(*ys)
    y, dx, dw = a.poisoned(*ys), a.poisoned(*xs), a.poisoned(*ws)
    a.backend.conv_forward(x, w, None, y, g)()
    a.backend.conv_backward_data(dy, w, dx, g)()
    a.backend.conv_backward_filter(x, dy, dw, None, g)()
    products = [float(np.vdot(p.astype(np.float64), q.astype(np.float64))) for p, q in ((y, dy), (x, dx), (w, dw))]
    terms = math.prod(ws) * math.prod(ys[:-1])
    bound = 4 * np.finfo(a.dtype).eps * math.sqrt(terms) * math.prod(ws[1:])
    assert max(products) - min(products) <= bound
