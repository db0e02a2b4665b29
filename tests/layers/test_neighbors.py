"""Tests of losses of neighboring elements: brute force and torch, every cut, masks, parts of a batch, memory."""

import functools

import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.kernels import get_backend
from halograd.kernels.memory import total
from halograd.layers.strategy import Strategy, parameter_blocks
from halograd.perfmodel.cost import memory_of, program_of
from halograd.program.program import Target
from halograd.testing import grids, random_array
from halograd.training.executor import Executor
from halograd.training.optimizers import SGD
from halograd.training.schedules import Constant
from halograd.training.trainer import Trainer
from tests.layers.geometries import skew
from tests.layers.losses import AXES, check, run_loss, scores_of
from tests.layers.oracle import torch
from tests.layers.test_losses import numeric_gradient
from tests.support.fake_device import FakeBackend

SHAPE, BATCH = (6, 5, 1), 2


class Roughness(hg.Loss):
    """Mean over windows of 3 of the squared difference of prediction and target, times that of the next but one."""

    takes_weights = True
    stencil = hg.Stencil(kernel=2, dilation=2)

    def local(self, prediction, target, dx, scale, work, weights=None):
        error = prediction - target
        rows, columns = (slice(None), slice(2, None)), (slice(None), slice(None), slice(2, None))
        first, last = error[:, :-2, :-2], error[rows][columns]
        values = first * last * (1 if weights is None else weights)
        if dx is not None:
            slope = scale * (1 if weights is None else weights)
            dx.fill(0)
            dx[:, :-2, :-2] += slope * last
            dx[rows][columns] += slope * first
        return scale * total(values)


def windows(array, extent):
    """Return windows ``(N, *outputs, C, *extent)`` of an array ``(N, *spatial, C)``."""
    axes = tuple(range(1, array.ndim - 1))
    return np.lib.stride_tricks.sliding_window_view(array, (extent,) * len(axes), axes)


def weighted(values, w, extent, normalization):
    """Return the mean of the losses of windows, with weights of elements."""
    if w is None:
        return values.mean()
    parts, middle = windows(w, extent), (extent - 1) // 2
    axes = tuple(range(w.ndim, parts.ndim))
    own = parts[(..., *(middle,) * len(axes))] * (parts > 0).all(axes)
    own = np.broadcast_to(own, values.shape)
    return (own * values).sum() / (own.sum() if normalization == "weights" else own.size)


def similarity(extent, normalization="count"):
    def found(x, t, w=None):
        g = np.exp(-(((np.arange(extent) - (extent - 1) / 2) / 1.5) ** 2) / 2)
        kernel = 1.0
        for _ in x.shape[1:-1]:
            kernel = np.multiply.outer(kernel, g / g.sum())
        axes = tuple(range(-kernel.ndim, 0))
        a, b = windows(x, extent), windows(t, extent)
        mx, mt = ((kernel * part).sum(axes) for part in (a, b))
        da, db = a - mx[(..., *(None,) * kernel.ndim)], b - mt[(..., *(None,) * kernel.ndim)]
        sx, st, sxt = ((kernel * part).sum(axes) for part in (da * da, db * db, da * db))
        c1, c2 = 0.04**2, 0.12**2
        values = 1 - (2 * mx * mt + c1) * (2 * sxt + c2) / ((mx**2 + mt**2 + c1) * (sx + st + c2))
        return weighted(values, w, extent, normalization)

    return found


def gradients(operator, power, normalization="count"):
    def found(x, t, w=None):
        extent = 3 if operator == "sobel" else 2
        parts = windows(x - t, extent)
        axes, values = x.ndim - 2, 0.0
        for axis in range(axes):
            kernel = np.ones(())
            for other in range(axes):
                along, across = ([-0.5, 0, 0.5], [0.25, 0.5, 0.25]) if operator == "sobel" else ([-1, 1], [1, 0])
                kernel = np.multiply.outer(kernel, along if other == axis else across)
            values = values + np.abs((kernel * parts).sum(tuple(range(-axes, 0)))) ** power / axes
        return weighted(values, w, extent, normalization)

    return found


def rough(x, t, w=None):
    e = x - t
    values = (e[:, :-2, :-2] * e[:, 2:, 2:]).sum(-1, keepdims=True)
    if w is None:
        return values.mean()
    own = np.where(np.all([w[:, i : i - 2 or None, j : j - 2 or None] for i in (0, 2) for j in (0, 2)], 0), 1, 0)
    return (own * w[:, 1:-1, 1:-1] * values).mean()


#: Name -> layer, definition.
LOSSES = {
    "ssim": (lambda: hg.StructuralSimilarity(4.0, 5), similarity(5)),
    "ssim, even, weights": (
        lambda: hg.StructuralSimilarity(4.0, 4, normalization="weights"),
        similarity(4, "weights"),
    ),
    "difference": (hg.GradientError, gradients("difference", 1)),
    "difference, squared, weights": (
        lambda: hg.GradientError(power=2, normalization="weights"),
        gradients("difference", 2, "weights"),
    ),
    "sobel": (lambda: hg.GradientError("sobel"), gradients("sobel", 1)),
    "own": (Roughness, rough),
}
SOME = ("ssim, even, weights", "difference")


def arrays(name, form=1, shape=SHAPE):
    """Return prediction, target and weights, some of them 0; the weights have `form` channels, None: none."""
    x, t = random_array((BATCH, *shape), "x"), random_array((BATCH, *shape), "t")
    if form is None:
        return x, t
    w = 2 * np.random.default_rng(5).random((BATCH, *shape[:-1], 1 if name == "own" else form))
    w[0, 0], w[1, -1, -1] = 0, 0
    return x, t, w


@functools.cache
def definition(name, form=1, valid=BATCH):
    """Return value and gradient of the first samples."""
    function, given = LOSSES[name][1], arrays(name, form)
    x, t, *w = (array[:valid] for array in given)
    gradient = np.zeros(given[0].shape)
    gradient[:valid] = numeric_gradient(lambda a, b: function(a, b, *w), x, t)
    return function(x, t, *w), gradient


def check_near(found, want):
    assert abs(found[0] - want[0]) <= 1e-12
    assert np.abs(found[1] - want[1]).max() <= 2e-9


# -- exactness --------------------------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.parametrize("form", [None, 1])
@pytest.mark.parametrize("name", LOSSES)
def test_is_its_definition_on_every_grid(ranks, name, form):
    given = arrays(name, form)
    want = definition(name, form)
    assert np.abs(want[1]).max() > 1e-3
    for parts in grids(ranks.size, AXES):
        check_near(run_loss(LOSSES[name][0], given, ranks, parts), want)


@pytest.mark.many_ranks
@pytest.mark.parametrize("name", SOME)
def test_uneven_and_empty_blocks(ranks, name, monkeypatch):
    skew(monkeypatch)
    want = definition(name)
    for parts in grids(ranks.size, AXES):
        check_near(run_loss(LOSSES[name][0], arrays(name), ranks, parts), want)


@pytest.mark.mpi
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "own"])
@pytest.mark.parametrize("shape", [(7, 1), (5, 4, 5, 1)])
def test_lines_and_volumes(ranks, name, shape):
    make, function = LOSSES[name]
    shape = (5, 5, 5, 1) if "ssim" in name and len(shape) == 4 else shape
    given = arrays(name, 1, shape)
    with Communicator(MPI.COMM_SELF) as alone:
        want = run_loss(make, given, alone, {})
    assert abs(want[0] - function(*given)) <= 1e-12
    axes = ("sample", "width") if len(shape) == 2 else ("depth", "height", "width")
    for parts in grids(ranks.size, axes):
        check(run_loss(make, given, ranks, parts), want, factor=40)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", SOME)
def test_a_short_batch_is_a_smaller_batch(ranks, name):
    want = definition(name, valid=1)
    check_near(run_loss(LOSSES[name][0], arrays(name), ranks, {"height": 2}, valid=1), want)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("make", [lambda: hg.StructuralSimilarity(4.0), lambda: hg.GradientError("sobel", 2)])
def test_blocks_of_many_strips(ranks, make):
    """The loss of a block of several strips is the mean of those of its rows, and its gradient that of differences."""
    x, t = random_array((1, 70, 900, 2), "x"), random_array((1, 70, 900, 2), "t")
    loss, dx = run_loss(make, (x, t), ranks, {"height": ranks.size})
    with Communicator(MPI.COMM_SELF) as alone:
        size = make().stencil.kernel - 1
        rows = [run_loss(make, (x[:, i : i + 30 + size], t[:, i : i + 30 + size]), alone, {}) for i in (0, 30)]
        if 70 - size > 60:
            rows.append(run_loss(make, (x[:, 60:], t[:, 60:]), alone, {}))
        shares = [30, 30, 70 - size - 60][: len(rows)]
        direction = 1e-4 * random_array(x.shape, "direction")
        above, below = (run_loss(make, (x + d, t), alone, {})[0] for d in (direction, -direction))
    want = sum(n * found for n, (found, _) in zip(shares, rows)) / sum(shares)
    assert abs(loss - want) <= 1e-12
    assert abs(np.sum(dx * direction) - (above - below) / 2) <= 1e-11


@pytest.mark.ranks(1)
@pytest.mark.torch
@pytest.mark.parametrize("shape", [(14, 12, 2), (11, 12, 13, 1)])
def test_structural_similarity_as_torch(ranks, shape):
    lib = torch()
    x, t = random_array((2, *shape), "x"), random_array((2, *shape), "t")
    g = np.exp(-((np.arange(-5, 6) / 1.5) ** 2) / 2)
    kernel = np.ones(())
    for _ in shape[1:]:
        kernel = np.multiply.outer(kernel, g / g.sum())
    convolve = {2: lib.nn.functional.conv2d, 3: lib.nn.functional.conv3d}[kernel.ndim]

    def mean(a):
        a = a.movedim(-1, 1)
        return convolve(a.reshape(-1, 1, *a.shape[2:]), lib.tensor(kernel[None, None]))

    a, b = lib.tensor(x, requires_grad=True), lib.tensor(t)
    mx, mt = mean(a), mean(b)
    sx, st, sxt = mean(a * a) - mx**2, mean(b * b) - mt**2, mean(a * b) - mx * mt
    c1, c2 = 0.02**2, 0.06**2
    want = 1 - ((2 * mx * mt + c1) * (2 * sxt + c2) / ((mx**2 + mt**2 + c1) * (sx + st + c2))).mean()
    want.backward()
    check(run_loss(lambda: hg.StructuralSimilarity(2.0), (x, t), ranks, {}), (want.item(), a.grad.numpy()), 200)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", ["ssim, even, weights", "difference, squared, weights"])
def test_16_bits_on_the_double_of_a_device(ranks, name):
    x, t, w = arrays(name)
    want, gradient = definition(name)
    x[w[..., 0] == 0] = np.nan
    nodes = [hg.Input(array.shape[1:], key) for key, array in zip("xtw", (x, t, w))]
    made, strategy = hg.Network({"loss": LOSSES[name][0]()(*nodes)}), Strategy({"height": ranks.size})
    with (
        FakeBackend() as kernels,
        Executor(made, ranks, kernels, BATCH, strategy, "float16", probed=["x"]) as executor,
    ):
        for key, array in zip("xtw", (x, t, w)):
            executor.set_input(key, array)
        executor.forward()
        loss = executor.loss_value()
        executor.backward()
        dx = executor.gather("x", gradient=True)
        scale = executor.mode.loss_scale
        scale = 1.0 if scale is None else float(kernels.device.to_host(scale).reshape(())[()])
    assert abs(loss - want) <= 1e-3 * want
    if ranks.rank == 0:
        assert np.abs(dx.astype(float) / scale - gradient).max() <= 4e-3 * np.abs(gradient).max()


# -- masks -------------------------------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.parametrize("garbage", [0.0, 1e6, np.nan, -np.inf])
@pytest.mark.parametrize("name", LOSSES)
def test_nothing_comes_of_an_element_without_weight(ranks, name, garbage):
    x, t, w = arrays(name)
    parts = {"height": ranks.size}
    want, gradient = run_loss(LOSSES[name][0], (x, t, w), ranks, parts, "float32")
    none = np.broadcast_to(w == 0, x.shape)
    x[none], t[none] = garbage, garbage
    with np.errstate(all="raise"):
        loss, dx = run_loss(LOSSES[name][0], (x, t, w), ranks, parts, "float32")
    assert loss == want and np.array_equal(dx, gradient) and not dx[none].any() and dx.any()


# -- sums, parts, memory -----------------------------------------------------------------------------


def network(weighted=True):
    x, t, w = hg.Input((9, 8, 2), "x"), hg.Input((9, 8, 2), "t"), hg.Input((9, 8, 1), "w")
    y = hg.Conv(2, 3, padding=1, name="last")(hg.Conv(4, 3, padding=1, activation="relu", name="first")(x))
    given = (y, t, w) if weighted else (y, t)
    loss = hg.StructuralSimilarity(4.0, 5, normalization="weights" if weighted else "count")(*given)
    loss = loss + hg.training_only(0.5 * hg.GradientError("sobel")(*given)) + 0.1 * hg.MeanSquaredError()(*given)
    return hg.Network({"prediction": y, "loss": loss})


def step(comm, strategy, parts=1, **options):
    """Return the loss of a step with the same 4 samples in parts, scores, and parameters after it. Collective."""
    made = Executor(network(), comm, get_backend("numpy"), 4 // parts, strategy, "float64", parts=parts, **options)
    given = dict(zip("xtw", arrays("ssim", 1, (9, 8, 2))))
    given = {name: np.concatenate([array, array[::-1] ** 2]) for name, array in given.items()}
    with made as executor:
        trainer = Trainer(executor, SGD(executor.store), Constant(0.1))

        def fill(part):
            for name, array in given.items():
                executor.set_input(name, array[part * executor.batch : (part + 1) * executor.batch])

        for part in range(parts if executor.counted else 0):
            fill(part)
            executor.count()
        for part in range(parts):
            fill(part)
            if part + 1 < parts:
                trainer.add()
        loss = float(trainer.step())
        trainer.synchronize()
        scores = scores_of(executor) if parts == 1 else None
        return loss, scores, executor.store.gather(comm, executor.store.params) or {}


def check_step(found, want):
    assert found[0] == pytest.approx(want[0], rel=1e-12)
    for name, array in found[2].items():
        np.testing.assert_allclose(array, want[2][name], rtol=1e-10, atol=1e-13)


@pytest.mark.mpi
def test_a_sum_of_losses_on_every_grid(ranks):
    with Communicator(MPI.COMM_SELF) as alone:
        want = step(alone, Strategy({}))
    for parts in grids(ranks.size, AXES):
        for rule in ("none", "block"):
            found = step(ranks, Strategy(parts, options={"recompute": rule}), debug=True)
            check_step(found, want)
            assert found[1] == pytest.approx(want[1], rel=1e-12)


@pytest.mark.ranks(1, 2)
def test_parts_of_a_batch_have_the_loss_of_the_whole_batch(ranks):
    with Communicator(MPI.COMM_SELF) as alone:
        want = step(alone, Strategy({}))
    check_step(step(ranks, Strategy({"height": ranks.size}), 4), want)


@pytest.mark.mpi
def test_memory_is_as_predicted():
    made, size = network(), MPI.COMM_WORLD.size
    strategy, dtype = Strategy({"height": size}), np.dtype("float32")
    with (
        Communicator(MPI.COMM_WORLD) as comm,
        Executor(made, comm, get_backend("numpy"), 2, strategy, dtype) as executor,
    ):
        found, blocks = dict(executor.predicted_bytes), parameter_blocks(made, strategy, size)
        want = memory_of(program_of(made, strategy, Target(2, size, comm.rank, dtype), blocks), blocks, 0)
        with comm.agreement():
            for use in ("kernel workspace", "messages"):  # an estimate; and sums of the executor, not of the program
                del found[use], want[use]
            assert found == want and (size == 1 or found["halo copy"])
            assert executor.program.placement.size == len(executor.runner.arena)


# -- refusals ----------------------------------------------------------------------------------------


class Strided(hg.Loss):
    stencil = hg.Stencil(2, stride=2)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: hg.StructuralSimilarity(1.0)(hg.Input((9, 20, 1)), hg.Input((9, 20, 1), "t")), r"does not fit into"),
        (lambda: hg.StructuralSimilarity(0), r"data_range: expected a number > 0, got 0"),
        (lambda: hg.StructuralSimilarity(1.0, 2.5), r"window, sigma: .* got 2\.5, 1\.5"),
        (lambda: hg.StructuralSimilarity(1.0, k2=0), r"k1, k2: expected numbers > 0, got 0\.01, 0"),
        (lambda: hg.GradientError("scharr"), r"operator: expected one of .* got 'scharr'"),
        (lambda: hg.GradientError(power=3), r"power: expected one of \(1, 2\), got 3"),
        (lambda: hg.GradientError()(hg.Input((4,)), hg.Input((4,), "t")), r"expected samples with spatial axes"),
        (lambda: hg.GradientError()(hg.Input((4, 1)), hg.Input((5, 1), "t")), r"expected a target of .*\(4, 1\)"),
        (lambda: Strided()(hg.Input((4, 1)), hg.Input((4, 1), "t")), r"expected a stencil of stride 1 without padding"),
    ],
)
def test_refusals(make, text):
    with pytest.raises(ValueError, match=text):
        make()
