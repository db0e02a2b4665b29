"""Tests of norms against their formula in float64: of a batch, with given statistics, of groups, channels, samples."""

from __future__ import annotations

import numpy as np
import pytest

from halograd.kernels import KernelError
from halograd.kernels.cuda import CudaKernels
from halograd.kernels.kernel import ACTIVATIONS, BatchNormArrays, BatchNormTraining, FusedActivation
from halograd.kernels.norm_parts import GroupNormArrays
from halograd.kernels.norms import ChannelNormArrays

from . import reference
from .conftest import EPS, FLOAT64, Arrays, assert_close
from .reference import FUSED, RELU, activated

SHAPES = [(2, 5, 6, 16), (2, 5, 6, 18), (3, 7, 5), (1, 3, 4, 5, 7), (4, 8), (1, 33, 31, 3), (8, 1, 1, 2500), (1, 7)]
BN_EPS = 1e-3


class Problem:
    """Batch norm whose outputs are filled with NaN."""

    #: Whether `dx` uses the memory of `y`.
    overlaid = False

    def __init__(
        self, a: Arrays, shape, f: FusedActivation | None, local: bool, offset: float = 0.0, backward: bool = True
    ):
        self.a, self.f, c = a, f, shape[-1]
        self.x, self.dy = a.draw(*shape), a.draw(*shape)
        self.x += offset
        self.gamma, self.beta = a.draw(c), a.draw(c)
        self.y = a.poisoned(*shape)
        self.dx = self.y if self.overlaid else a.poisoned(*shape)
        self.mean, self.var = a.poisoned(c), a.poisoned(c)
        self.sums, self.means = a.poisoned(2, c, dtype=np.float64), a.poisoned(2, c, dtype=np.float64)
        self.count = self.x.size // c
        gradients = (self.dy, self.dx) if backward else (None, None)
        arrays = (self.gamma, self.beta, self.mean, self.var, self.sums, self.means)
        self.k = a.backend.batch_norm(BatchNormArrays(self.x, self.y, *gradients, *arrays, BN_EPS, f, local))
        self.expected = reference.batch_norm(self.x, self.dy, self.gamma, self.beta, BN_EPS, f)

    def set_statistics(self) -> None:
        """Set mean and variance from the sums, as the layer does for one process."""
        mean = self.sums[0] / self.count
        self.mean[...] = mean
        self.var[...] = self.sums[1] / self.count - mean**2

    def forward(self, local: bool) -> None:
        self.k.statistics()
        if not local:
            self.set_statistics()
        self.k.forward()

    def check_forward(self) -> None:
        want = self.expected
        assert_close(self.mean, want["mean"], self.count, "mean")
        assert_close(self.var, want["var"], self.count, "var")
        assert_close(self.y, want["y"], self.count, "y", scale=8)

    def lose_output(self) -> None:
        """Overwrite the output with NaN, because backward does not read it."""
        self.y.fill(np.nan)

    def check_backward(self) -> None:
        eps = EPS[self.x.dtype]
        bound = 16 * eps * self.count
        assert np.abs(self.sums - self.expected["sums"]).max() <= bound * 8
        assert_close(self.dx, self.expected["dx"], self.count, "dx", scale=16)


@pytest.mark.parametrize("local", [False, True], ids=["sums", "local"])
@pytest.mark.parametrize("f", FUSED, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_on_its_statistics(typed, shape, f, local):
    p = Problem(typed, shape, f, local)
    p.forward(local)
    p.check_forward()
    p.lose_output()
    p.k.backward_sums()
    if local:
        p.check_backward()
    else:
        np.divide(p.sums, p.count, out=p.means)
    p.k.backward_data()
    p.check_backward()
    p.k.close()


@pytest.mark.parametrize("local", [False, True], ids=["sums", "local"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_gradient_passes_where_the_relu_is_flat(typed, shape, local):
    """Where the ReLU outputs 0, even an infinite output gradient has the same effect as 0."""
    if typed.backend.name == "onednn" and typed.dtype == np.float32:
        pytest.skip("needs a backend that selects: oneDNN multiplies by the slope")
    p = Problem(typed, shape, RELU, local)
    p.forward(local)
    p.dy[reference.batch_norm(p.x, p.dy, p.gamma, p.beta, BN_EPS, None)["y"] <= -1e-2] = np.inf
    p.k.backward_sums()
    if not local:
        np.divide(p.sums, p.count, out=p.means)
    p.k.backward_data()
    p.check_backward()
    p.k.close()


@pytest.mark.parametrize("placed", ["alone", "residual", "overlaid"])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_every_activation(arrays, kind, placed):
    residual = placed == "residual"
    for alpha in {"leaky_relu": (1.5, -0.3), "elu": (0.7,)}.get(kind, (0.0,)):
        f, shape = FusedActivation(kind, alpha), (2, 5, 6, 16)
        if residual and f.by_input:
            with pytest.raises(KernelError, match=f"derivative follows from its output with a residual, got {kind}; "):
                Training(arrays, shape, f, local=True, residual=True)
            continue
        p = (Overlaid if placed == "overlaid" else Training)(arrays, shape, f, local=True, residual=residual)
        p.k.forward()
        assert_close(p.y, p.wanted((0, 0))["y"], p.count, "y", scale=8)
        p.lose_output()
        p.k.backward_sums()
        p.k.backward_data()
        assert_close(p.dx, p.wanted(p.wanted((0, 0))["sums"] / p.count)["dx"], p.count, "dx", scale=16)
        p.k.close()


@pytest.mark.parametrize("offset", [0.0, 10.0, 1000.0])
def test_variance_of_data_far_from_zero(arrays, offset):
    """The variance is accurate for data with a large mean; with sums in float32 it would be lost at a mean of 1000."""
    p = Problem(arrays, (1, 64, 64, 5), f=None, local=False, offset=offset)
    p.k.statistics()
    x = p.x.astype(np.float64).reshape(-1, 5)
    var = p.sums[1] / p.count - (p.sums[0] / p.count) ** 2
    assert np.abs(p.sums[0] / p.count - x.mean(axis=0)).max() <= 1e-6 * (1 + offset)
    assert np.abs(var - x.var(axis=0)).max() <= 2e-6


def test_variance_where_a_block_is_constant(arrays):
    """The variance is accurate for a block of zeros before the data, where a shift by the first values does not help.

    If a backend's own (local) statistics are less accurate, these sums may be as inaccurate, but not more.
    """
    p, own = (Problem(arrays, (1, 256, 128, 8), f=None, local=local) for local in (False, True))
    p.x[...] += 1000
    p.x[:, :128] = 0
    own.x[...] = p.x
    p.k.statistics()
    own.k.forward()
    want = p.x.astype(np.float64).reshape(-1, 8).var(axis=0)
    var = p.sums[1] / p.count - (p.sums[0] / p.count) ** 2
    bound = max(1e-6, 1.01 * np.abs(own.var / want - 1).max())
    assert bound < 1e-3
    assert np.abs(var / want - 1).max() <= bound


@pytest.mark.parametrize("local", [False, True], ids=["sums", "local"])
@pytest.mark.filterwarnings("error")
def test_large_data_with_a_relu(arrays, local):
    """Products of mean and variance may overflow in float32: then the result is right, without a warning."""
    p = Problem(arrays, (2, 4, 8, 16), f=RELU, local=local, offset=4.0, backward=False)
    p.x *= 2.0**43
    want = reference.batch_norm(p.x, p.dy, p.gamma, p.beta, BN_EPS, RELU)
    p.forward(local)
    assert_close(p.y, want["y"], p.count, "y", scale=8)


@pytest.mark.parametrize("local", [False, True], ids=["sums", "local"])
def test_forward_only(arrays, local):
    p = Problem(arrays, (2, 5, 6, 18), f=RELU, local=local, backward=False)
    assert p.k.backward_sums is None and p.k.backward_data is None
    p.forward(local)
    p.check_forward()


@pytest.mark.parametrize("local", [False, True], ids=["sums", "local"])
def test_gradient_belongs_to_the_last_forward(arrays, local):
    p = Problem(arrays, (2, 4, 4, 16), f=RELU, local=local)
    p.forward(local)
    p.x *= -1
    p.gamma *= 2
    p.expected = reference.batch_norm(p.x, p.dy, p.gamma, p.beta, BN_EPS, RELU)
    p.forward(local)
    p.check_forward()
    p.k.backward_sums()
    np.divide(p.sums, p.count, out=p.means)
    p.k.backward_data()
    p.check_backward()


class Training(Problem):
    """Batch norm in training; another process has as many elements, each larger by 1."""

    def __init__(
        self, a: Arrays, shape, f: FusedActivation | None, local: bool, from_sums: bool = True, residual: bool = False
    ):
        super().__init__(a, shape, f, local)
        self.k.close()
        c, wide = shape[-1], np.promote_types(np.float32, a.dtype) if a.dtype.itemsize > 2 else np.float32
        self.mean, self.var = a.poisoned(c, dtype=wide), a.poisoned(c, dtype=wide)
        self.running = a.draw(c, dtype=wide), a.draw(c, dtype=wide)
        self.before = [array.astype(np.float64) for array in self.running]
        self.gradients = a.poisoned(c, dtype=wide), a.poisoned(c, dtype=wide)
        self.total = self.count if local else 2 * self.count
        self.training = BatchNormTraining(self.total, from_sums, 0.1, *self.running, *self.gradients)
        arrays = (self.gamma, self.beta, self.mean, self.var, self.sums, self.means)
        self.residual = a.draw(*shape) if residual else None
        self.dresidual = a.poisoned(*shape) if residual and f else None
        more = (self.training, self.residual, self.dresidual)
        self.k = a.backend.batch_norm(
            BatchNormArrays(self.x, self.y, self.dy, self.dx, *arrays, BN_EPS, f, local, *more)
        )
        rows = self.x.astype(np.float64).reshape(-1, c)
        rows = rows if local else np.concatenate([rows, rows + 1])
        self.moments = rows.mean(axis=0), rows.var(axis=0)
        self.passed: np.ndarray | None = None

    def lose_output(self) -> None:
        """Overwrite the output with NaN, unless backward needs it (with a residual and an activation)."""
        self.passed = self.y > 0
        if self.dresidual is None:
            super().lose_output()

    def add_the_other(self) -> None:
        """Add the sums of the other process."""
        first, second = self.sums.copy()
        self.sums[0] += first + self.count
        self.sums[1] += second + 2 * first + self.count

    def wanted(self, correction) -> dict:
        """Return the expected outputs for the moments of both processes; `correction` holds the sums for dx."""
        mean, var = self.moments
        inverse = 1 / np.sqrt(var + BN_EPS)
        xhat = (self.x.astype(np.float64) - mean) * inverse
        y = self.gamma.astype(np.float64) * xhat + self.beta
        if self.residual is not None:
            y += self.residual
        y, slope = reference.activated(self.f, y)
        if self.f is not None and self.f.kind.endswith("relu") and not self.f.by_input:  # rounded as the kernel's
            slope = np.where(self.passed if self.passed is not None else self.y > 0, 1.0, self.f.alpha)
        dy = slope * self.dy.astype(np.float64)
        dx = self.gamma.astype(np.float64) * inverse * (dy - correction[0] - xhat * correction[1])
        axes = tuple(range(dy.ndim - 1))
        sums = np.stack([dy.sum(axis=axes), (dy * xhat).sum(axis=axes)])
        return {"y": y, "dx": dx, "sums": sums, "dy": dy}


class Overlaid(Training):
    """Batch norm in training whose input gradient uses the memory of the output, which backward does not read."""

    overlaid = True


@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("how", ["from sums", "given", "local"])
@pytest.mark.parametrize("f", FUSED, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_training(typed, shape, f, how, residual):
    """Training kernels give the moments over all processes, running statistics, outputs and parameter gradients."""
    if how == "local" and np.prod(shape[:-1]) == 1:
        return  # the variance of one element is 0, and so is the gradient: nothing to compare
    if residual and f is not None and f.by_input:
        return  # refused, see below
    p = Training(typed, shape, f, how == "local", how == "from sums", residual)
    if how != "local":
        p.k.statistics()
        p.add_the_other()
    if how == "given":
        p.mean[...], p.var[...] = p.moments
        p.sums.fill(np.nan)
    p.k.forward()
    for name, array, want in zip(("mean", "var"), (p.mean, p.var), p.moments):
        assert_close(array, want, p.total, name, scale=8)
    for array, before, batch in zip(p.running, p.before, (p.moments[0], p.moments[1] * p.training.unbiased)):
        assert_close(array, 0.9 * before + 0.1 * batch, p.total, "running", scale=8)
    assert_close(p.y, p.wanted((0, 0))["y"], p.total, "y", scale=8)
    p.lose_output()
    p.k.backward_sums()
    means = p.wanted((0, 0))["sums"] / p.total
    if how != "local":
        p.sums *= 2  # the other process has the same
        means *= 2
    p.k.backward_data()
    want = p.wanted(means)
    for array, total in zip(reversed(p.gradients), want["sums"]):
        assert_close(array, total, p.total, "gradients", scale=8)
    assert_close(p.dx, want["dx"], p.total, "dx", scale=16)
    if p.dresidual is not None:
        assert_close(p.dresidual, want["dy"], p.total, "dresidual", scale=0 if f == RELU else 8)
    p.k.close()


@pytest.mark.parametrize("local", [False, True], ids=["sums", "local"])
def test_training_of_a_rank_with_nothing(arrays, local):
    """A rank without elements updates running statistics from the sums of the other ranks; its gradients are 0."""
    nothing, running, gradients = arrays.draw(0, 4, 4, 3), arrays.draw(2, 3), arrays.poisoned(2, 3)
    before, (mean, var) = running.copy(), arrays.poisoned(2, 3)
    sums, means = arrays.poisoned(2, 3, dtype=np.float64), arrays.poisoned(2, 3, dtype=np.float64)
    training = BatchNormTraining(10, True, 0.5, *running, *gradients)
    vectors = (arrays.draw(3), arrays.draw(3), mean, var, sums, means)
    k = arrays.backend.batch_norm(BatchNormArrays(*(nothing,) * 4, *vectors, BN_EPS, None, local, training))
    k.statistics()
    if not local:
        assert not sums.any()
        sums[...] = [[10, 20, 30], [15, 45, 100]]
    k.forward()
    k.backward_sums()
    k.backward_data()
    assert not gradients.any()
    batch = np.zeros((2, 3)) if local else np.array([[1, 2, 3], [0.5 / 0.9, 0.5 / 0.9, 1 / 0.9]])
    np.testing.assert_allclose(running, 0.5 * before + 0.5 * batch, rtol=1e-6)


def test_a_residual_in_evaluation(typed):
    """Batch norm with a residual in evaluation is one kernel."""
    x, r, y = typed.draw(2, 5, 6, 18), typed.draw(2, 5, 6, 18), typed.poisoned(2, 5, 6, 18)
    gamma, beta, mean, var = (typed.draw(18) for _ in range(4))
    var[...] = np.abs(var.astype(np.float64)) + 0.5
    sums = typed.poisoned(2, 18, dtype=np.float64)
    vectors = (gamma, beta, mean, var, sums, sums)
    k = typed.backend.batch_norm(BatchNormArrays(x, y, None, None, *vectors, BN_EPS, RELU, False, residual=r))
    k.forward()
    wide = [a.astype(np.float64) for a in (x, r, gamma, beta, mean, var)]
    want = wide[2] * (wide[0] - wide[4]) / np.sqrt(wide[5] + BN_EPS) + wide[3] + wide[1]
    assert_close(y, np.maximum(want, 0), 8, "y", scale=8)
    k.close()


def test_wrong_residuals_are_refused(arrays):
    x, c, b = arrays.draw(2, 5, 6, 4), [arrays.draw(4) for _ in range(4)], arrays.backend
    sums, dx = arrays.poisoned(2, 4, dtype=np.float64), arrays.draw(2, 5, 6, 4)
    given = (*c, sums, sums, BN_EPS)
    with pytest.raises(KernelError, match=r"batch_norm: expected arrays of one shape, got .*residual \(2, 5, 6, 3\)"):
        b.batch_norm(BatchNormArrays(x, x, None, None, *given, None, False, residual=arrays.draw(2, 5, 6, 3)))
    with pytest.raises(KernelError, match="expected residual packed"):
        b.batch_norm(BatchNormArrays(x, x, None, None, *given, None, False, residual=arrays.draw(2, 6, 6, 4)[:, 1:]))
    with pytest.raises(KernelError, match="expected dresidual with a residual, an activation and dx, got none"):
        b.batch_norm(BatchNormArrays(x, x, dx, dx, *given, RELU, False, residual=x))
    with pytest.raises(KernelError, match="expected dresidual only with a residual, an activation and dx, got one"):
        b.batch_norm(BatchNormArrays(x, x, dx, dx, *given, None, False, residual=x, dresidual=dx))


def test_wrong_arrays_of_training_are_refused(arrays):
    x, c = arrays.draw(2, 5, 6, 4), [arrays.draw(4) for _ in range(4)]
    sums = arrays.poisoned(2, 4, dtype=np.float64)
    training = BatchNormTraining(10, True, 0.1, running_mean=arrays.draw(3), running_var=arrays.draw(4))
    with pytest.raises(KernelError, match=r"batch_norm: expected running_mean of shape \(4,\), got \(3,\)"):
        arrays.backend.batch_norm(BatchNormArrays(x, x, None, None, *c, sums, sums, BN_EPS, None, False, training))


@pytest.mark.parametrize("f", FUSED, ids=str)
def test_statistics_of_others(typed, f):
    """Kernels accept mean, variance and gradient correction from more elements than this process has."""
    p = Problem(typed, (2, 5, 6, 18), f, local=False)
    c = 18
    p.mean[...], p.var[...] = np.linspace(-1, 1, c), np.linspace(0.5, 2, c)
    p.means[...] = np.random.default_rng(3).standard_normal((2, c))
    p.k.forward()
    outputs = p.y.copy()
    p.lose_output()
    p.k.backward_sums()
    p.k.backward_data()
    inverse = 1 / np.sqrt(p.var.astype(np.float64) + BN_EPS)
    xhat = (p.x - p.mean.astype(np.float64)) * inverse
    y, slope = reference.activated(f, p.gamma * xhat + p.beta)
    dy = slope * p.dy
    assert_close(outputs, y, 4, "y", scale=8)
    want = p.gamma * inverse * (dy - p.means[0] - xhat * p.means[1])
    assert_close(p.dx, want, 16, "dx", scale=16)
    sums = np.stack([dy.sum(axis=(0, 1, 2)), (dy * xhat).sum(axis=(0, 1, 2))])
    assert np.abs(p.sums - sums).max() <= 16 * EPS[p.x.dtype] * p.count * 8


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
