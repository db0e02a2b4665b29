"""Tests of group, instance and layer norm, made of kernels per sample and small kernels, against their formula."""

import numpy as np
import pytest

from halograd.kernels import KernelError
from halograd.kernels.cuda import CudaKernels
from halograd.kernels.norm_parts import GroupNormArrays
from halograd.kernels.norms import ChannelNormArrays

from .conftest import FLOAT64, assert_close
from .reference import FUSED, activated

NORM_EPS = 1e-3


def group_norm(x, dy, gamma, beta, groups, f, centered=True):
    """Return group norm and its gradients in float64, by the formula; without `centered`, means count as 0."""
    x, dy, gamma, beta = (a.astype(np.float64) for a in (x, dy, gamma, beta))
    c = x.shape[-1]
    axes = (*range(1, x.ndim - 1), x.ndim)
    cut = (*x.shape[:-1], groups, c // groups)
    grouped = x.reshape(cut)
    mean = grouped.mean(axis=axes, keepdims=True) * centered
    var = np.square(grouped - mean).mean(axis=axes, keepdims=True)
    inverse = 1 / np.sqrt(var + NORM_EPS)
    xhat = ((grouped - mean) * inverse).reshape(x.shape)
    y, slope = activated(f, gamma * xhat + beta)
    masked = slope * dy
    g = (masked * gamma).reshape(cut)
    hat = xhat.reshape(cut)
    first, second = (a.mean(axis=axes, keepdims=True) for a in (g * centered, g * hat))
    rows = tuple(range(x.ndim - 1))
    return {
        "y": y,
        "dx": (inverse * (g - first - hat * second)).reshape(x.shape),
        "dbeta": masked.sum(axis=rows),
        "dgamma": (masked * xhat).sum(axis=rows),
    }


@pytest.mark.parametrize("f", FUSED, ids=str)
@pytest.mark.parametrize(
    ("shape", "groups"),
    [((3, 4, 5, 8), 2), ((2, 3, 4, 2, 6), 3), ((4, 7, 5), 1), ((2, 5, 3, 16), 16), ((3, 9, 18), 6), ((1, 65, 9, 8), 4)],
    ids=str,
)
def test_group_norm(typed, shape, groups, f):
    """The kernels of a group norm, called in the order of a step, give its outputs and gradients without the host."""
    n, c = shape[0], shape[-1]
    count = int(np.prod(shape[1:])) // groups
    x, dy, gamma, beta = typed.draw(*shape), typed.draw(*shape), typed.draw(c), typed.draw(c)
    y, dx, dgamma, dbeta = (typed.poisoned(*s) for s in (shape, shape, (c,), (c,)))
    mean, var = (typed.poisoned(n, c, dtype=np.float32 if x.dtype.itemsize < 4 else None) for _ in range(2))
    sums, means = (typed.poisoned(n, 2, c, dtype=FLOAT64) for _ in range(2))
    totals = typed.poisoned(n, 2, groups, dtype=FLOAT64)
    moments = (mean, var, sums, means, totals)
    arrays = GroupNormArrays(x, y, dy, dx, gamma, beta, dgamma, dbeta, *moments, count, NORM_EPS, f)
    k = typed.backend.group_norm(arrays)
    k.statistics()
    if (not isinstance(typed.backend, CudaKernels) or x.dtype == np.float64) and k.cancels():
        k.centered()
        k.variance()
    k.normalize()
    want = group_norm(x, dy, gamma, beta, groups, f)
    assert_close(y, want["y"], count, "y", scale=8)
    before = y.copy()
    y.fill(np.nan)
    k.normalize_again()
    np.testing.assert_array_equal(y, before)
    y.fill(np.nan)  # backward does not read it: its memory may be reused
    k.backward_sums()
    k.backward_data()
    k.close()
    assert_close(dx, want["dx"], count, "dx", scale=16)
    rows = x.size // c
    assert_close(dbeta, want["dbeta"], rows, "dbeta", scale=8)
    assert_close(dgamma, want["dgamma"], rows, "dgamma", scale=16)


@pytest.mark.parametrize("f", FUSED, ids=str)
@pytest.mark.parametrize("affine", [False, True], ids=["plain", "affine"])
@pytest.mark.parametrize("centered", [True, False], ids=["layer", "rms"])
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (3, 7, 1), (2, 5, 64), (2, 300), (1, 9, 33)], ids=str)
def test_channel_norm(typed, shape, centered, affine, f):
    c = shape[-1]
    x, dy, y = typed.draw(*shape), typed.draw(*shape), typed.poisoned(*shape)
    dx = y if affine else typed.poisoned(*shape)  # it may use the memory of the output
    vectors = [typed.draw(c), typed.draw(c), typed.poisoned(c), typed.poisoned(c)] if affine else [None] * 4
    gamma, beta = vectors[:2] if affine else (np.ones(c), np.zeros(c))
    if not centered:
        vectors[1::2], beta = [None, None], np.zeros(c)
    arrays = ChannelNormArrays(x, y, dy, dx, *vectors, NORM_EPS, f, centered)
    forward, backward = typed.backend.channel_norm(arrays)
    forward()
    flat = (-1, 1, c)
    want = group_norm(x.reshape(flat), dy.reshape(flat), gamma, beta, 1, f, centered)
    assert_close(y, want["y"].reshape(shape), max(c, 4), "y", scale=8)
    y.fill(np.nan)  # backward does not read it
    backward()
    assert_close(dx, want["dx"].reshape(shape), max(c, 4), "dx", scale=48)
    if affine:
        rows = x.size // c
        assert_close(vectors[2], want["dgamma"], rows, "dgamma", scale=16)
        if centered:
            assert_close(vectors[3], want["dbeta"], rows, "dbeta", scale=8)


def test_channel_norm_without_gradients(arrays):
    x, y = arrays.draw(4, 6), arrays.poisoned(4, 6)
    forward, backward = arrays.backend.channel_norm(ChannelNormArrays(x, y, *(None,) * 6, NORM_EPS))
    forward()
    assert backward is None and forward.workspace_bytes == 0
    assert_close(y, group_norm(x[:, None], x[:, None], np.ones(6), np.zeros(6), 1, None)["y"][:, 0], 6)


def test_refused(arrays):
    x, c, wrong = arrays.draw(2, 5, 8), arrays.draw(8), np.zeros((2, 8))
    with pytest.raises(KernelError, match=r"expected mean of shape \(2, 8\), got \(8,\)"):
        vectors = (c, c, None, None, c, c, wrong, wrong, np.zeros((2, 2, 4)))
        arrays.backend.group_norm(GroupNormArrays(x, x, None, None, *vectors, 10, NORM_EPS))
    with pytest.raises(KernelError, match="gamma and beta"):
        arrays.backend.channel_norm(ChannelNormArrays(x, x, None, None, c, *(None,) * 3, NORM_EPS))
    with pytest.raises(KernelError, match="no beta in a norm without mean"):
        arrays.backend.channel_norm(ChannelNormArrays(x, x, None, None, c, c, None, None, NORM_EPS, centered=False))
