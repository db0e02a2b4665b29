"""Tests of kernels against torch, an independent implementation."""

import math

import numpy as np
import pytest

from halograd.kernels.kernel import ACTIVATIONS, BatchNormArrays

from .conftest import assert_close
from .geometries import CASES
from .reference import RELU

torch = pytest.importorskip("torch", reason="needs torch as independent oracle: pip install halograd[oracle]")
pytestmark = pytest.mark.torch
F = torch.nn.functional


def to_torch(a, gradient=True):
    """Return an array (N, *spatial, C) as a float64 tensor (N, C, *spatial)."""
    t = torch.from_numpy(np.ascontiguousarray(np.moveaxis(a.astype(np.float64), -1, 1)))
    return t.requires_grad_(gradient)


def from_torch(t):
    """Return a tensor (N, C, *spatial) as an array (N, *spatial, C)."""
    return np.moveaxis(t.detach().numpy(), 1, -1)


def padded(t, geometry, value=0.0):
    """Return a tensor with asymmetric and negative padding, which torch's own operations lack."""
    sides = [side for pair in reversed(geometry.padding) for side in pair]
    return F.pad(t, sides, value=value)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_convolution(typed, case):
    a, g, (xs, ws, bs, ys) = typed, case.geometry, case.shapes
    x, w, b, dy = a.draw(*xs), a.draw(*ws), a.draw(*bs), a.draw(*ys)
    y, dx, dw, db = a.poisoned(*ys), a.poisoned(*xs), a.poisoned(*ws), a.poisoned(*bs)
    a.backend.conv_forward(x, w, b, y, g)()
    a.backend.conv_backward_data(dy, w, dx, g)()
    a.backend.conv_backward_filter(x, dy, dw, db, g)()
    tx, tw, tb = to_torch(x), to_torch(w), torch.from_numpy(b.astype(np.float64)).requires_grad_()
    operation = (F.conv1d, F.conv2d, F.conv3d)[g.ndim - 1]
    ty = operation(padded(tx, g), tw, tb, stride=g.stride, dilation=g.dilation, groups=g.groups)
    ty.backward(to_torch(dy, gradient=False))
    rows = math.prod(ys[:-1])
    assert_close(y, from_torch(ty), math.prod(ws[1:]) + 1, "y")
    assert_close(dx, from_torch(tx.grad), math.prod(g.kernel) * ws[0] // g.groups, "dx")
    assert_close(dw, from_torch(tw.grad), rows, "dw")
    assert_close(db, tb.grad.numpy(), rows, "db")


@pytest.mark.parametrize("kernel, stride, pad", [(2, 2, 0), (3, 2, 1), (3, 2, 0), (3, 1, 1)])
@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("kind", ["max", "average exclude", "average include"])
def test_pooling(typed, kind, ndim, kernel, stride, pad):
    from halograd.kernels import Geometry

    g = Geometry.of((kernel,) * ndim, stride, pad)
    spatial = (9, 8, 7)[:ndim]
    xs, ys = (2, *spatial, 16), (2, *g.output_shape(spatial), 16)
    x, dy = typed.levels(*xs), typed.draw(*ys)
    y, dx = typed.poisoned(*ys), typed.poisoned(*xs)
    tx = to_torch(x)
    if kind == "max":
        kernels = typed.backend.max_pool(x, y, dy, dx, g)
        ty = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[ndim - 1](tx, kernel, stride, pad)
    else:
        include = kind.endswith("include")
        kernels = typed.backend.average_pool(x, y, dy, dx, g, include)
        operation = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[ndim - 1]
        ty = operation(tx, kernel, stride, pad, count_include_pad=include)
    for k in kernels:
        k()
    ty.backward(to_torch(dy, gradient=False))
    assert_close(y, from_torch(ty), g.taps, "y")
    assert_close(dx, from_torch(tx.grad), g.taps, "dx")


@pytest.mark.parametrize("relu", [None, RELU], ids=str)
@pytest.mark.parametrize("channels", [16, 18])
def test_batch_norm(typed, channels, relu):
    shape = (3, 6, 8, channels)
    x, dy, gamma, beta = typed.draw(*shape), typed.draw(*shape), typed.draw(channels), typed.draw(channels)
    y, dx, mean, var = (typed.poisoned(*s) for s in (shape, shape, (channels,), (channels,)))
    sums, means = (typed.poisoned(2, channels, dtype=np.float64) for _ in range(2))
    kernels = typed.backend.batch_norm(
        BatchNormArrays(x, y, dy, dx, gamma, beta, mean, var, sums, means, 1e-5, relu, True)
    )
    kernels.forward()
    kernels.backward_sums()
    tx = to_torch(x)
    tg, tb = (torch.from_numpy(v.astype(np.float64)).requires_grad_() for v in (gamma, beta))
    ty = F.batch_norm(tx, None, None, tg, tb, training=True, eps=1e-5)
    ty = torch.relu(ty) if relu else ty
    ty.backward(to_torch(dy, gradient=False))
    count = x.size // channels
    assert_close(y, from_torch(ty), count, "y")
    assert_close(dx, from_torch(tx.grad), count, "dx")
    eps = np.finfo(typed.dtype).eps
    assert np.abs(sums - np.stack([tb.grad.numpy(), tg.grad.numpy()])).max() <= 64 * eps * count


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activation(typed, kind):
    x, dy = typed.draw(2, 5, 6, 7), typed.draw(2, 5, 6, 7)
    y, dx = typed.poisoned(2, 5, 6, 7), typed.poisoned(2, 5, 6, 7)
    for k in typed.backend.activation(kind, x, y, dy, dx, 0.1):
        k()
    tx = torch.from_numpy(x.astype(np.float64)).requires_grad_()
    # torch divides by 6 in float32 in the gradient of its own hard sigmoid.
    others = {"hard_sigmoid": lambda v: F.relu6(v + 3) / 6, "gelu_tanh": lambda v: F.gelu(v, approximate="tanh")}
    function = others.get(kind) or getattr(F, kind.replace("_sw", "sw"))
    ty = function(tx, 0.1) if kind in ("leaky_relu", "elu") else function(tx)
    ty.backward(torch.from_numpy(dy.astype(np.float64)))
    assert_close(y, ty.detach().numpy(), 4, "y")
    assert_close(dx, tx.grad.numpy(), 4, "dx")


def test_dense(typed):
    x, w, b, dy = typed.draw(4, 9), typed.draw(5, 9), typed.draw(5), typed.draw(4, 5)
    y, dx, dw, db = typed.poisoned(4, 5), typed.poisoned(4, 9), typed.poisoned(5, 9), typed.poisoned(5)
    typed.backend.dense_forward(x, w, b, y)()
    typed.backend.dense_backward_data(dy, w, dx)()
    typed.backend.dense_backward_filter(x, dy, dw, db)()
    tx, tw, tb = (torch.from_numpy(v.astype(np.float64)).requires_grad_() for v in (x, w, b))
    ty = F.linear(tx, tw, tb)
    ty.backward(torch.from_numpy(dy.astype(np.float64)))
    assert_close(y, ty.detach().numpy(), 10, "y")
    assert_close(dx, tx.grad.numpy(), 5, "dx")
    assert_close(dw, tw.grad.numpy(), 4, "dw")
    assert_close(db, tb.grad.numpy(), 4, "db")
