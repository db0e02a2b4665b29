"""Tests of the reference loops, with which all kernels are compared, against torch, an independent implementation."""

import numpy as np
import pytest

from halograd.kernels import Geometry

from . import reference
from .geometries import CASES
from .reference import RELU

torch = pytest.importorskip("torch", reason="needs torch as independent oracle: pip install halograd[oracle]")
pytestmark = pytest.mark.torch
F = torch.nn.functional


def draw(*shapes):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape) for shape in shapes]


def to_torch(a, gradient=True):
    """Return an array (N, *spatial, C) as a float64 tensor (N, C, *spatial)."""
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(a, -1, 1))).requires_grad_(gradient)


def assert_equal(found, tensor):
    """Check that an array (N, *spatial, C) equals a tensor (N, C, *spatial) within the rounding of long sums."""
    want = tensor.detach().numpy()
    np.testing.assert_allclose(found, np.moveaxis(want, 1, -1) if want.ndim > 1 else want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_convolution(case):
    g, (xs, ws, bs, ys) = case.geometry, case.shapes
    x, w, b, dy = draw(xs, ws, bs, ys)
    tx, tw, tb = to_torch(x), to_torch(w), torch.from_numpy(b)
    # torch's own operations have neither asymmetric nor negative padding.
    padded = F.pad(tx, [side for pair in reversed(g.padding) for side in pair])
    operation = (F.conv1d, F.conv2d, F.conv3d)[g.ndim - 1]
    ty = operation(padded, tw, tb, stride=g.stride, dilation=g.dilation, groups=g.groups)
    ty.backward(to_torch(dy, gradient=False))
    assert_equal(reference.conv(x, w, b, g, ys), ty)
    assert_equal(reference.conv_data(dy, w, g, xs), tx.grad)
    assert_equal(reference.conv_filter(x, dy, g, ws), tw.grad)


@pytest.mark.parametrize("kernel, stride, pad", [(2, 2, 0), (3, 2, 1), (3, 2, 0), (3, 1, 1)])
@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("kind", ["max", "exclude pad", "include pad"])
def test_pooling(kind, ndim, kernel, stride, pad):
    g, spatial = Geometry.of((kernel,) * ndim, stride, pad), (7, 6, 5)[:ndim]
    xs, ys = (2, *spatial, 3), (2, *g.output_shape(spatial), 3)
    x, dy = np.random.default_rng(1).integers(-1, 2, xs).astype(float), draw(ys)[0]  # with many equal elements
    tx = to_torch(x)
    if kind == "max":
        y, dx = reference.max_pool(x, dy, g, ys)
        ty = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[ndim - 1](tx, kernel, stride, pad)
    else:
        include = kind == "include pad"
        y, dx = reference.average_pool(x, dy, g, ys, include)
        operation = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[ndim - 1]
        ty = operation(tx, kernel, stride, pad, count_include_pad=include)
    ty.backward(to_torch(dy, gradient=False))
    assert_equal(y, ty)
    assert_equal(dx, tx.grad)


@pytest.mark.parametrize("relu", [None, RELU], ids=str)
def test_batch_norm(relu):
    x, dy, gamma, beta = draw((3, 6, 8, 5), (3, 6, 8, 5), (5,), (5,))
    found = reference.batch_norm(x, dy, gamma, beta, 1e-5, relu)
    tx, tg, tb = to_torch(x), *(torch.from_numpy(v).requires_grad_() for v in (gamma, beta))
    ty = F.batch_norm(tx, None, None, tg, tb, training=True, eps=1e-5)
    ty = torch.relu(ty) if relu else ty
    ty.backward(to_torch(dy, gradient=False))
    assert_equal(found["y"], ty)
    assert_equal(found["dx"], tx.grad)
    assert_equal(found["sums"][0], tb.grad)
    assert_equal(found["sums"][1], tg.grad)
