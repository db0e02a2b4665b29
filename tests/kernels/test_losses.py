"""Tests of losses against their definitions in float64."""

from functools import partial

import numpy as np
import pytest

from halograd.kernels import KernelError
from halograd.kernels.losses import ClassTargets, LossArrays

from .conftest import BFLOAT16, EPS, FLOAT64


def close(got, want, eps, scale=1.0):
    """Check that all elements are within a few roundings of `scale`, and that none is NaN."""
    got = np.asarray(got, np.float64)
    assert not np.isnan(got).any()
    assert np.abs(got - want).max(initial=0) <= 16 * eps * scale, np.abs(got - want).max()


def cross_entropy(x, target, weights, smoothing, ignored):
    """Return the cross entropy of each position and its gradient, by the definition."""
    k = x.shape[-1]
    rows, labels = x.astype(np.float64).reshape(-1, k), target.reshape(-1).astype(np.int64)
    weights = np.ones(k) if weights is None else np.asarray(weights)
    loss, gradient = np.zeros(len(rows)), np.zeros(rows.shape)
    for i, (row, label) in enumerate(zip(rows, labels)):
        if label == ignored:
            continue
        q = np.full(k, smoothing / k) * weights
        q[label] += (1 - smoothing) * weights[label]
        p = np.exp(row - row.max())
        p /= p.sum()
        loss[i] = -(q * np.log(p)).sum()
        gradient[i] = p * q.sum() - q
    return loss.reshape(x.shape[:-1]), gradient.reshape(x.shape)


def elementwise(x, t, pos_weight):
    """Return the squared error or the binary cross entropy of each element and its gradient, by the definition."""
    z, u = x.astype(np.float64), t.astype(np.float64)
    if pos_weight == "squared error":
        return (z - u) ** 2, 2 * (z - u)
    w = 1 + (np.asarray(1.0 if pos_weight is None else pos_weight) - 1) * u
    softplus = np.log1p(np.exp(-np.abs(z))) + np.maximum(-z, 0)
    return (1 - u) * z + w * softplus, (1 - u) - w / (1 + np.exp(z))


def rounding(x):
    """Return the rounding of sums of losses: 16-bit predictions are computed in float32."""
    return EPS[FLOAT64 if x.dtype == FLOAT64 else np.dtype(np.float32)]


@pytest.mark.parametrize("options", ["plain", "weights", "smoothing", "ignore", "all", "positions", "smooth positions"])
@pytest.mark.parametrize("classes", [2, 5, 9, 40, 300])
def test_softmax_cross_entropy(typed, classes, options):
    """Loss and gradient are those of the definition, with weights of classes and of positions.

    A position with weight 0 contributes nothing, also with an invalid target and NaN logits.
    """
    rng = np.random.default_rng(classes)
    x = typed.draw(3, 4, 3, classes)
    target = rng.integers(0, classes, (3, 4, 3, 1)).astype(np.int32)
    of_classes = rng.uniform(0.5, 2, classes) if options not in ("plain", "smoothing", "ignore") else None
    smoothing = 0.1 if options in ("smoothing", "all", "smooth positions") else 0.0
    ignored = 255 if options in ("ignore", "all") else None
    if ignored:
        target[:, 0] = ignored
    values, gradient = cross_entropy(x, target, of_classes, smoothing, ignored)
    weights, w = None, np.ones((3, 4, 3, 1))
    if options.endswith("positions"):
        weights = rng.uniform(0, 2, (3, 4, 3, 1)).astype(np.float32)
        weights[:, 1], target[0, 1], x[1, 1] = 0, -7, np.nan
        w = weights.astype(np.float64)
    dx, loss = typed.poisoned(*x.shape), np.full(1, np.nan)
    targets = ClassTargets(classes, None if of_classes is None else tuple(of_classes), ignored)
    arrays = LossArrays(x, target, dx, loss, weights=weights)
    kernel = typed.backend.softmax_cross_entropy(arrays, targets, smoothing)
    kernel.set(samples=2, scale=0.25)
    kernel()
    close(loss, (values * w[..., 0])[:2].sum() * 0.25, rounding(x), scale=24 * 8)
    close(dx[:2], (gradient * w)[:2] * 0.25, EPS[x.dtype])
    assert not dx[2:].any() and not dx[w[..., 0] == 0].any()


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int64", "float32", "float64", "bfloat16", "bool"])
def test_targets_of_any_dtype(arrays, dtype):
    x, loss, expected = arrays.draw(6, 2), np.zeros(1), np.zeros(1)
    target = np.array([0, 1, 1, 0, 1, 0]).reshape(6, 1)
    for kind, out in (("int32", expected), (BFLOAT16 if dtype == "bfloat16" else dtype, loss)):
        arrays.backend.softmax_cross_entropy(LossArrays(x, target.astype(kind), None, out), ClassTargets(2))()
    assert loss[0] == expected[0] > 0


def test_prediction_and_target_that_are_not_packed(arrays):
    """Strided predictions and targets are copied at every call, so new values are used."""
    wide, dx, found, want = arrays.draw(4, 6, 5), arrays.poisoned(4, 3, 5), np.zeros(1), np.zeros(1)
    targets = np.arange(48).reshape(4, 12, 1) % 5
    x, target = wide[:, ::2], targets[:, :6:2]
    kernel = arrays.backend.softmax_cross_entropy(LossArrays(x, target, dx, found), ClassTargets(5))
    for _ in range(2):
        wide *= -1
        kernel.set(3, 0.5)
        kernel()
        gradient = arrays.poisoned(4, 3, 5)
        packed = LossArrays(x.copy(), target.copy(), gradient, want)
        plain = arrays.backend.softmax_cross_entropy(packed, ClassTargets(5))
        plain.set(3, 0.5)
        plain()
        assert found[0] == want[0] and np.array_equal(dx, gradient)


def test_gradient_times_a_loss_scale(typed):
    x, target, factor = typed.draw(4, 3), np.array([[0], [1], [2], [1]], np.uint8), np.array([1024.0])
    plain, scaled, loss = typed.poisoned(4, 3), typed.poisoned(4, 3), np.zeros((2, 1))
    typed.backend.softmax_cross_entropy(LossArrays(x, target, plain, loss[0]), ClassTargets(3))()
    typed.backend.softmax_cross_entropy(LossArrays(x, target, scaled, loss[1], factor), ClassTargets(3))()
    assert loss[0] == loss[1]
    close(scaled.astype(np.float64) / 1024, plain.astype(np.float64), EPS[x.dtype])


@pytest.mark.parametrize("divisor", [4.0, 0.0])
def test_a_divisor_that_is_known_when_the_kernel_runs(typed, divisor):
    x, target, given = typed.draw(4, 3), np.array([[0], [1], [2], [1]], np.uint8), np.array([np.nan])
    plain, divided, loss = typed.poisoned(4, 3), typed.poisoned(4, 3), np.zeros((2, 1))
    typed.backend.softmax_cross_entropy(LossArrays(x, target, plain, loss[0]), ClassTargets(3))()
    arrays = LossArrays(x, target, divided, loss[1], divisor=given)
    kernel = typed.backend.softmax_cross_entropy(arrays, ClassTargets(3))
    given[0] = divisor
    kernel()
    share = 1 / divisor if divisor else 0.0
    close(loss[1], loss[0] * share, EPS[FLOAT64])
    close(divided, plain.astype(np.float64) * share, EPS[x.dtype])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_infinite_logits_where_no_position_counts(arrays, smoothing):
    """Infinite logits at an ignored position leave the loss finite, as in torch, although 0 * inf is NaN."""
    x, target = arrays.draw(1, 2, 3), np.array([[[255], [1]]], np.uint8)
    alone, both = np.empty(1), np.empty(1)
    given = ClassTargets(3, None, 255)
    arrays.backend.softmax_cross_entropy(LossArrays(x, target, None, alone), given, smoothing)()
    x[0, 0, 0], dx = -np.inf, arrays.poisoned(1, 2, 3)
    arrays.backend.softmax_cross_entropy(LossArrays(x, target, dx, both), given, smoothing)()
    assert both[0] == alone[0] > 0
    assert not dx[0, 0].any() and np.isfinite(dx).all()


def test_large_logits(arrays):
    x = arrays.draw(2, 3)
    x[...] = [[1e4, -1e4, 0], [-300, 300, 300]]
    dx, loss = arrays.poisoned(2, 3), np.zeros(1)
    arrays.backend.softmax_cross_entropy(LossArrays(x, np.array([[1], [1]]), dx, loss), ClassTargets(3))()
    assert abs(loss[0] - (2e4 + np.log(2))) < 1e-2
    close(dx, [[1, -1, 0], [0, -0.5, 0.5]], EPS[x.dtype])


@pytest.mark.parametrize("weighted", [False, True])
def test_target_weight(backend, weighted):
    target = np.arange(700, dtype=np.int16).reshape(7, 100, 1) % 5
    targets, total = ClassTargets(5, (1.0, 2.0, 3.0, 4.0, 5.0) if weighted else None, 4), np.zeros(1)
    kernel = backend.target_weight(target, total, targets)
    kernel.set(3, 1.0)
    kernel()
    assert total[0] == 60 * (1 + 2 + 3 + 4 if weighted else 4)


def test_strided_targets_are_copied_once(backend):
    target, total = (np.arange(40, dtype=np.int16) % 5).reshape(2, 20, 1)[:, ::2], np.zeros(1)
    kernel = backend.target_weight(target, total, ClassTargets(5, (1.0, 2.0, 3.0, 4.0, 5.0)))
    kernel()
    assert total[0] == 60 and kernel.workspace_bytes == target.nbytes


def test_target_weight_times_that_of_positions(backend):
    """The sum of target weights includes the weights of positions; weight 0 excludes also an invalid class."""
    target = np.arange(20, dtype=np.int16).reshape(2, 10, 1) % 5
    weights = np.linspace(0, 3, 20, dtype=np.float32).reshape(2, 10, 1)
    target[0, 0], total = 99, np.zeros(1)
    kernel = backend.target_weight(target, total, ClassTargets(5, (1.0, 2.0, 3.0, 4.0, 5.0), 4), weights)
    kernel()
    own = np.array([1.0, 2.0, 3.0, 4.0, 0.0])[target[target < 5]]
    assert total[0] == pytest.approx((own * weights[target < 5]).sum(), rel=1e-6)


@pytest.mark.parametrize("channels", [None, 1, 5], ids=["plain", "positions", "elements"])
@pytest.mark.parametrize("pos_weight", ["squared error", None, 3.0, (0.5, 1.0, 2.0, 4.0, 1.0)], ids=str)
def test_elementwise_losses(typed, pos_weight, channels):
    """Loss and gradient are those of the definition, with strided weights that have 1 or all channels.

    An element with weight 0 contributes nothing, also if it is NaN or infinite.
    """
    x, t, rng = typed.draw(3, 6, 5), typed.draw(3, 6, 5), np.random.default_rng(2)
    t[...] = rng.integers(0, 3, t.shape) / 2
    make = typed.backend.mean_squared_error
    if pos_weight != "squared error":
        x[0] *= 30
        make = partial(typed.backend.binary_cross_entropy, pos_weight=pos_weight)
    values, gradient = elementwise(x, t, pos_weight)
    weights, w = None, np.ones((3, 6, 1))
    if channels is not None:
        weights = rng.uniform(0, 3, (3, 12, channels))[:, ::2]
        weights[0, 2], x[0, 2], t[0, 2] = 0, np.nan, np.inf
        w = weights
    dx, loss = typed.poisoned(*x.shape), np.zeros(1)
    kernel = make(LossArrays(x, t, dx, loss, divisor=np.array([4.0]), weights=weights))
    kernel.set(2, 3.0)
    kernel()
    want = (values * w)[:2].sum() * 0.75 / 5
    close(loss, want, rounding(x), scale=8 + want)
    close(dx[:2], (gradient * w)[:2] * 0.75 / 5, EPS[x.dtype], scale=3)
    assert not dx[2:].any() and (weights is None or not dx[0, 2].any())


@pytest.mark.parametrize("samples", [3, 0])
def test_without_gradient_or_samples(arrays, samples):
    x, loss = arrays.draw(samples, 4), np.ones(1)
    kernel = arrays.backend.mean_squared_error(LossArrays(x, x, None if samples else x, loss))
    kernel.set(samples, 1.0)
    kernel()
    assert loss[0] == 0


def test_refused(arrays):
    with pytest.raises(KernelError, match=r"expected a target of shape \(3, 1\), got \(3,\)"):
        arrays.backend.softmax_cross_entropy(
            LossArrays(arrays.draw(3, 4), np.zeros(3, np.int32), None, np.zeros(1)), ClassTargets(4)
        )
    with pytest.raises(KernelError, match=r"expected targets out of .*, got complex64; convert them"):
        arrays.backend.mean_squared_error(
            LossArrays(arrays.draw(3, 4), np.zeros((3, 4), np.complex64), None, np.zeros(1))
        )
    x, wide = arrays.draw(3, 4), np.ones((3, 4), np.float32)
    with pytest.raises(KernelError, match=r"expected weights of shape \(3, 1\), got \(3, 4\)"):
        labels = np.zeros((3, 1), np.int32)
        arrays.backend.softmax_cross_entropy(LossArrays(x, labels, None, np.zeros(1), weights=wide), ClassTargets(4))
    with pytest.raises(KernelError, match=r"expected weights of shape \(3, 1\) or \(3, 4\), got \(3, 2\)"):
        arrays.backend.mean_squared_error(LossArrays(x, x, None, np.zeros(1), weights=wide[:, :2]))
