"""Tests of pooling and its gradient against direct loops, on every backend."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halograd.kernels import Geometry

from . import reference
from .conftest import Arrays, assert_close

CASES = {
    "2/2/0": (Geometry.of((2, 2), 2), (6, 7)),
    "3/2/1 overlapping": (Geometry.of((3, 3), 2, 1), (8, 9)),
    "3/2/0": (Geometry.of((3, 3), 2), (8, 9)),
    "3/1/1": (Geometry.of((3, 3), 1, 1), (5, 6)),
    "asymmetric": (Geometry.of((3, 2), (2, 1), ((1, 0), (0, 1))), (7, 6)),
    "negative hi": (Geometry.of((3, 3), 2, ((1, -1), (0, -2))), (8, 9)),
    "dilated": (Geometry.of((3, 2), 1, ((2, 2), (1, 1)), dilation=(2, 2)), (7, 6)),
    "global": (Geometry.of((5, 6)), (5, 6)),
    "1-D": (Geometry.of((3,), 2, 1), (9,)),
    "3-D": (Geometry.of((2, 3, 2), 2, ((0, 0), (1, 1), (1, 0))), (4, 5, 5)),
    "many taps": (Geometry.of((17, 16), 3, 2), (19, 18)),
}
MAXIMA = ("max", "ties", "no numbers")


def make(a: Arrays, geometry, spatial, channels=5, ties=False):
    """Return arrays x, y, dy, dx of a pooling."""
    xs = (2, *spatial, channels)
    ys = (2, *geometry.output_shape(spatial), channels)
    return a.levels(*xs) if ties else a.draw(*xs), a.poisoned(*ys), a.draw(*ys), a.poisoned(*xs)


def outcomes(a, kind, x, y, dy, dx, geometry):
    """Return the kernels of a pooling, and its expected results."""
    if kind in MAXIMA:
        return a.backend.max_pool(x, y, dy, dx, geometry), reference.max_pool(x, dy, geometry, y.shape)
    include = kind == "include pad"
    made = a.backend.average_pool(x, y, dy, dx, geometry, count_include_pad=include)
    return made, reference.average_pool(x, dy, geometry, y.shape, include)


@pytest.mark.parametrize("kind", [*MAXIMA, "exclude pad", "include pad"])
@pytest.mark.parametrize("channels", [5, 16, 18])
@pytest.mark.parametrize("name", CASES)
def test_pools(typed, name, channels, kind):
    geometry, spatial = CASES[name]
    x, y, dy, dx = make(typed, geometry, spatial, channels, kind == "ties")
    if kind == "no numbers":
        x[:, :-3] = -np.inf
    (forward, backward), (value, gradient) = outcomes(typed, kind, x, y, dy, dx, geometry)
    forward()
    if kind in MAXIMA:
        assert np.array_equal(y, value.astype(y.dtype))
    else:
        assert_close(y, value, geometry.taps, "y")
    for array in (x, y):  # their memory may be reused
        array.fill(np.nan)
    backward()
    assert_close(dx, gradient, geometry.taps, "dx")
    forward.close()
    backward.close()


@st.composite
def pools(draw):
    ndim = draw(st.integers(1, 3))
    kernel = tuple(draw(st.integers(1, 4)) for _ in range(ndim))
    stride = tuple(draw(st.integers(1, 3)) for _ in range(ndim))
    lo = tuple(draw(st.integers(0, (k - 1) // 2)) for k in kernel)
    hi = tuple(draw(st.integers(-2, (k - 1) // 2)) for k in kernel)
    spatial = tuple(k + 2 + draw(st.integers(0, 5 - ndim)) for k in kernel)
    return Geometry(kernel, stride, (1,) * ndim, tuple(zip(lo, hi))), spatial, draw(st.integers(1, 5))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=pools(), include=st.booleans())
def test_drawn_geometries(arrays, drawn, include):
    geometry, spatial, channels = drawn
    x, y, dy, dx = make(arrays, geometry, spatial, channels, ties=True)
    for kernel in arrays.backend.max_pool(x, y, dy, dx, geometry):
        kernel()
    value, gradient = reference.max_pool(x, dy, geometry, y.shape)
    assert_close(y, value, 1, "max y")
    assert_close(dx, gradient, geometry.taps, "max dx")
    for kernel in arrays.backend.average_pool(x, y, dy, dx, geometry, include):
        kernel()
    value, gradient = reference.average_pool(x, dy, geometry, y.shape, include)
    assert_close(y, value, geometry.taps, "average y")
    assert_close(dx, gradient, geometry.taps, "average dx")


@pytest.mark.parametrize("kind", ["max", "exclude pad"])
def test_forward_only(arrays, kind):
    geometry, spatial = CASES["3/2/1 overlapping"]
    x, y, dy, dx = make(arrays, geometry, spatial)
    _, (value, _) = outcomes(arrays, kind, x, y, dy, dx, geometry)
    if kind == "max":
        forward, backward = arrays.backend.max_pool(x, y, None, None, geometry)
    else:
        forward, backward = arrays.backend.average_pool(x, y, None, None, geometry, False)
    assert backward is None
    forward()
    assert_close(y, value, geometry.taps)


def test_no_positions_are_held_without_a_gradient(backends):
    """Also with padding, where the first tap of a window is not the first element of the input."""
    arrays = Arrays(backends("numpy"), np.float32)
    geometry, spatial = CASES["3/2/1 overlapping"]
    x, y, _, _ = make(arrays, geometry, spatial)
    forward, _ = arrays.backend.max_pool(x, y, None, None, geometry)
    assert forward.workspace_bytes == 0


def test_remembered_positions_survive_other_kernels(arrays):
    """Positions of maxima for backward are not in shared scratch memory, so other kernels do not overwrite them."""
    geometry, spatial = CASES["3/2/1 overlapping"]
    x, y, dy, dx = make(arrays, geometry, spatial)
    forward, backward = arrays.backend.max_pool(x, y, dy, dx, geometry)
    forward()
    x2, y2, dy2, dx2 = make(arrays, geometry, (20, 20))
    other, other_backward = arrays.backend.max_pool(x2, y2, dy2, dx2, geometry)
    other()
    other_backward()
    backward()
    _, gradient = reference.max_pool(x, dy, geometry, y.shape)
    assert_close(dx, gradient, geometry.taps)


def test_max_of_negative_values_ignores_padding(arrays):
    geometry, spatial = CASES["3/1/1"]
    x, y, _, _ = make(arrays, geometry, spatial)
    np.negative(np.abs(x) + 1, out=x)
    forward, _ = arrays.backend.max_pool(x, y, None, None, geometry)
    forward()
    assert y.max() <= -1 and math.isfinite(y.min())
