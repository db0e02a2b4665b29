"""Tests of sums of losses, of losses of neighboring elements and of the score of an ensemble: every cut, weights."""

import functools

import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.kernels import get_backend
from halograd.kernels.memory import total
from halograd.layers.strategy import Strategy, parameter_blocks
from halograd.layers.total_loss import TotalLoss
from halograd.perfmodel.cost import memory_of, program_of
from halograd.perfmodel.kernel_times import LayerWork
from halograd.program.program import Target
from halograd.testing import grids, random_array
from halograd.training.executor import Executor
from halograd.training.optimizers import SGD
from halograd.training.schedules import Constant
from halograd.training.trainer import Trainer
from tests.layers.geometries import skew
from tests.layers.losses import AXES, check, make_executor, run_loss, scores_of
from tests.layers.norms import step, traffic
from tests.layers.oracle import torch
from tests.layers.test_losses import numeric_gradient
from tests.support.fake_device import FakeBackend

CLASSES, TOTAL_BATCH, WEIGHT = 4, 5, 0.3
SHAPES = {"x": (4, 6, CLASSES), "coarse": (2, 3, CLASSES), "whole": (CLASSES,)}
SETTINGS = {"class_weights": (0.5, 2.0, 0.0, 1.5), "label_smoothing": 0.1}


def classes(shape):
    return hg.Input((*shape[:-1], 1), f"classes of {len(shape)} {shape[0]}", "int32")


def one_task():
    """Return inputs, and a sum of two losses of one prediction."""
    x, t = hg.Input(SHAPES["x"], "x"), classes(SHAPES["x"])
    return {"x": x}, hg.SoftmaxCrossEntropy(**SETTINGS)(x, t) + 0.5 * hg.Dice("softmax", "sample")(x, t)


def scales():
    """Return inputs, and a deeply supervised sum of losses of outputs with and without spatial axes."""
    inputs = {name: hg.Input(shape, name) for name, shape in SHAPES.items()}
    terms = [hg.SoftmaxCrossEntropy(normalization="weights", **SETTINGS)(x, classes(x.shape)) for x in inputs.values()]
    return inputs, terms[0] + WEIGHT * (terms[1] + 2 * terms[2])


def tasks():
    """Return inputs, and a sum of losses of predictions of two kinds with the same extents."""
    x, y = hg.Input(SHAPES["x"], "x"), hg.Input((4, 6, 2), "y")
    mask, field = hg.Input((4, 6, 2), "mask"), hg.Input(SHAPES["x"], "field")
    return {"x": x, "y": y}, hg.Huber(0.5)(x, field) + 3 * hg.BinaryCrossEntropyWithLogits(2.0)(y, mask)


TOTAL_CASES = {f.__name__: f for f in (one_task, scales, tasks)}


def data(node, name):
    if node.dtype != "compute":
        return np.random.default_rng(3).integers(0, CLASSES, (TOTAL_BATCH, *node.shape))
    values = random_array((TOTAL_BATCH, *node.shape), name)
    return (values > 0).astype(float) if name == "mask" else values


def terms_alone(node):
    """Yield the weight and the separate loss of every term."""
    for term in node.layer.terms:
        yield term.weight, term.layer(*(node.inputs[i] for i in term.inputs))


def run(node, probed, comm, parts=None, training=True, valid=TOTAL_BATCH):
    """Return the loss, and on rank 0 the gradients of the probed predictions by name. Collective."""
    network = hg.Network({"loss": node})
    names = [name for name in probed if name in network.inputs]
    made = Executor(network, comm, get_backend("numpy"), TOTAL_BATCH, Strategy(parts or {}), "float64", probed=names)
    with made as executor:
        for name, given in network.inputs.items():
            executor.set_input(name, data(given, name))
        executor.mode.valid = valid
        for _ in range(2):  # gradients are scaled once per forward
            executor.forward(training=training)
            value = executor.loss_value()
            executor.backward()
        return value, {name: executor.gather(name, gradient=True) for name in names}


@pytest.mark.parametrize("valid", [TOTAL_BATCH, 3])
@pytest.mark.parametrize("name", TOTAL_CASES)
def test_is_the_weighted_sum_of_its_terms(name, valid):
    probed, node = TOTAL_CASES[name]()
    with Communicator(MPI.COMM_SELF) as alone:
        value, found = run(node, probed, alone, valid=valid)
        parts = [(weight, *run(term, probed, alone, valid=valid)) for weight, term in terms_alone(node)]
    assert value == pytest.approx(sum(weight * loss for weight, loss, _ in parts), rel=1e-14)
    for key, have in found.items():
        want = sum(weight * gradients[key] for weight, _, gradients in parts if key in gradients)
        np.testing.assert_allclose(have, want, rtol=1e-12, atol=1e-16)


@pytest.mark.mpi
@pytest.mark.parametrize("name", TOTAL_CASES)
def test_exact_on_every_grid(name):
    with Communicator(MPI.COMM_SELF) as alone:
        probed, node = TOTAL_CASES[name]()
        want, gradients = run(node, probed, alone)
    with Communicator(MPI.COMM_WORLD) as comm:
        for parts in grids(comm.size, ("sample", "height", "width")):
            probed, node = TOTAL_CASES[name]()
            value, found = run(node, probed, comm, parts)
            assert value == pytest.approx(want, rel=1e-13)
            for key, expected in gradients.items() if comm.rank == 0 else ():
                np.testing.assert_allclose(found[key], expected, rtol=1e-12, atol=1e-16)


@pytest.mark.torch
def test_as_torch():
    lib = torch()
    functional = lib.nn.functional
    _, node = scales()
    given = {n.layer.name: data(n, n.layer.name) for n in node.inputs}
    logits = {k: lib.tensor(np.moveaxis(given[k], -1, 1).copy(), requires_grad=True) for k in SHAPES}
    weights = lib.tensor(SETTINGS["class_weights"], dtype=lib.float64)
    total = 0.0
    for factor, (key, shape) in zip((1.0, WEIGHT, 2 * WEIGHT), SHAPES.items()):
        t = lib.tensor(given[f"classes of {len(shape)} {shape[0]}"][..., 0])
        total = total + factor * functional.cross_entropy(logits[key], t, weights, label_smoothing=0.1)
    total.backward()
    with Communicator(MPI.COMM_SELF) as alone:
        value, found = run(node, SHAPES, alone)
    assert value == pytest.approx(float(total.detach()), rel=1e-13)
    for key, have in found.items():
        want = np.moveaxis(logits[key].grad.numpy(), 1, -1)
        np.testing.assert_allclose(have, want, rtol=1e-11, atol=1e-15)


def test_evaluation_leaves_out_what_is_for_training():
    """In evaluation a training-only term changes neither the loss nor its gradient."""

    def make(with_others):
        x, y, t = hg.Input((CLASSES,), "x"), hg.Input((CLASSES,), "y"), hg.Input((1,), "t", "int32")
        loss = hg.SoftmaxCrossEntropy()(x, t)
        return loss + hg.training_only(WEIGHT * hg.SoftmaxCrossEntropy()(y, t)) if with_others else loss

    with Communicator(MPI.COMM_SELF) as alone:
        value, found = run(make(True), ("x", "y"), alone, training=False)
        want, gradients = run(make(False), ("x",), alone, training=False)
        trained, _ = run(make(True), ("x", "y"), alone)
    assert value == want < trained
    assert np.array_equal(found["x"], gradients["x"]) and not found["y"].any()


@pytest.mark.mpi
def test_messages_are_those_of_the_terms():
    """A sum of any number of losses sends one message for the weights, one for Dice, and one for the loss."""
    _, node = one_task()
    with Communicator(MPI.COMM_WORLD) as comm:
        made = Executor(
            hg.Network({"loss": node}),
            comm,
            get_backend("numpy"),
            TOTAL_BATCH,
            Strategy({"height": comm.size}),
            probed=["x"],
        )
        with made as executor:
            step(executor)
            assert traffic(comm, lambda: step(executor)) == ({"loss": 3} if comm.size > 1 else {})


@pytest.mark.mpi
def test_metrics_judge_every_prediction():
    """Metrics cover every prediction; scores of the second have its output's name, training-only ones have none."""
    x = hg.Input((4, 6, 3), "x")
    logits, field = hg.Conv(CLASSES, 1, name="head")(x), hg.Conv(2, 1, name="field")(x)
    t, wanted = hg.Input((4, 6, 1), "t", "int32"), hg.Input((4, 6, 2), "wanted")
    loss = hg.SoftmaxCrossEntropy()(logits, t) + hg.MeanSquaredError()(field, wanted) + hg.Dice("softmax")(logits, t)
    loss = loss + hg.training_only(hg.Huber()(hg.Conv(2, 1, name="aux")(x), wanted))
    network = hg.Network({"prediction": logits, "velocity": field, "loss": loss})
    with Communicator(MPI.COMM_WORLD) as comm:
        found = []
        for one in (comm, comm.split(comm.rank)):
            strategy = Strategy({"height": one.size})
            with Executor(network, one, get_backend("numpy"), TOTAL_BATCH, strategy, "float64") as executor:
                for name, node in network.inputs.items():
                    executor.set_input(name, data(node, name))
                found.append(scores_of(executor))
        scores = {"loss", "accuracy", "iou", "f1", "precision", "recall"}
        assert set(found[0]) == scores | {"velocity mae", "velocity rmse"}
        assert found[0] == pytest.approx(found[1], rel=1e-12)


def test_the_targets_alone_are_compared_with():
    """Every target of a sum of losses is a target-only input, which stays in float32 with 16-bit activations."""
    _, node = scales()
    assert [node.layer.compares(i) for i in range(6)] == [False, True] * 3
    shapes = [n.shape for n in node.inputs]
    assert [node.layer.reads_classes(i, *shapes) for i in (1, 3, 5)] == [True] * 3
    assert node.layer.target_range(1, *shapes) == (0.0, CLASSES - 1.0)


def test_other_terms_are_another_work():
    """Sums of losses with other terms or settings have other keys of measured times."""
    x, t = hg.Input((2, CLASSES), "x"), hg.Input((2, 1), "t", "int32")
    losses = [
        hg.SoftmaxCrossEntropy()(x, t) + hg.Dice("softmax")(x, t),
        hg.SoftmaxCrossEntropy()(x, t) + hg.Dice("softmax", "sample")(x, t),
        hg.SoftmaxCrossEntropy()(x, t) + hg.SoftmaxCrossEntropy()(x, t),
    ]
    works = [LayerWork.of(loss.layer, [(1, 2, CLASSES), (1, 2, 1)]) for loss in losses]
    assert len({work.key for work in works}) == 3


def test_a_sum_has_the_name_of_its_first_term():
    x, t = hg.Input((2, CLASSES), "x"), hg.Input((2, 1), "t", "int32")
    loss = sum([hg.SoftmaxCrossEntropy(name="ce")(x, t), hg.Dice("softmax", name="dice")(x, t)])
    assert isinstance(loss.layer, TotalLoss) and loss.layer.name == "ce"
    assert len(loss.inputs) == 2, "what several terms read is one input"


def test_quotients_are_products():
    x, t = hg.Input((2, 3), "x"), hg.Input((2, 3), "t")
    loss = hg.MeanSquaredError()(x, t)
    assert [term.weight for term in (loss / 4).layer.terms] == [0.25]


def test_total_refusals():
    x, t, other = hg.Input((2, 3), "x"), hg.Input((2, 3), "t"), hg.Input((2, 3), "other")
    loss = hg.MeanSquaredError()(x, t)
    for factor in (0, -1.0, float("nan"), True, "2"):
        with pytest.raises(ValueError, match="loss: expected a finite number > 0 as its weight"):
            loss * factor
    for make in (lambda: loss + 1, lambda: 1 - loss, lambda: loss - 1):
        with pytest.raises(TypeError, match="expected losses to be added"):
            make()
    with pytest.raises(ValueError, match="loss: expected a finite number > 0 as its weight"):
        loss - hg.MeanSquaredError()(x, t)
    with pytest.raises(TypeError, match="expected losses to be added"):
        loss + other
    with pytest.raises(ValueError, match=r"every input to be a prediction or a target, got one .* that is both"):
        loss + hg.MeanSquaredError()(t, other)
    with pytest.raises(ValueError, match="at least one term that counts in evaluation"):
        hg.Network({"loss": hg.training_only(loss)})
    with pytest.raises(ValueError, match=r"or add it to that one \(ce \+ 0.5 \* dice\)"):
        hg.Network({"loss": loss, "other": hg.Dice()(x, t)})


SHAPE, NEIGHBORS_BATCH = (6, 5, 1), 2


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


def neighbors_arrays(name, form=1, shape=SHAPE):
    """Return prediction, target and weights, some of them 0; the weights have `form` channels, None: none."""
    x, t = random_array((NEIGHBORS_BATCH, *shape), "x"), random_array((NEIGHBORS_BATCH, *shape), "t")
    if form is None:
        return x, t
    w = 2 * np.random.default_rng(5).random((NEIGHBORS_BATCH, *shape[:-1], 1 if name == "own" else form))
    w[0, 0], w[1, -1, -1] = 0, 0
    return x, t, w


@functools.cache
def definition(name, form=1, valid=NEIGHBORS_BATCH):
    """Return value and gradient of the first samples."""
    function, given = LOSSES[name][1], neighbors_arrays(name, form)
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
    given = neighbors_arrays(name, form)
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
        check_near(run_loss(LOSSES[name][0], neighbors_arrays(name), ranks, parts), want)


@pytest.mark.mpi
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "own"])
@pytest.mark.parametrize("shape", [(7, 1), (5, 4, 5, 1)])
def test_lines_and_volumes(ranks, name, shape):
    make, function = LOSSES[name]
    shape = (5, 5, 5, 1) if "ssim" in name and len(shape) == 4 else shape
    given = neighbors_arrays(name, 1, shape)
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
    check_near(run_loss(LOSSES[name][0], neighbors_arrays(name), ranks, {"height": 2}, valid=1), want)


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
    x, t, w = neighbors_arrays(name)
    want, gradient = definition(name)
    x[w[..., 0] == 0] = np.nan
    nodes = [hg.Input(array.shape[1:], key) for key, array in zip("xtw", (x, t, w))]
    made, strategy = hg.Network({"loss": LOSSES[name][0]()(*nodes)}), Strategy({"height": ranks.size})
    with (
        FakeBackend() as kernels,
        Executor(made, ranks, kernels, NEIGHBORS_BATCH, strategy, "float16", probed=["x"]) as executor,
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
    x, t, w = neighbors_arrays(name)
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


def neighbors_step(comm, strategy, parts=1, **options):
    """Return the loss of a step with the same 4 samples in parts, scores, and parameters after it. Collective."""
    made = Executor(network(), comm, get_backend("numpy"), 4 // parts, strategy, "float64", parts=parts, **options)
    given = dict(zip("xtw", neighbors_arrays("ssim", 1, (9, 8, 2))))
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
        want = neighbors_step(alone, Strategy({}))
    for parts in grids(ranks.size, AXES):
        for rule in ("none", "block"):
            found = neighbors_step(ranks, Strategy(parts, options={"recompute": rule}), debug=True)
            check_step(found, want)
            assert found[1] == pytest.approx(want[1], rel=1e-12)


@pytest.mark.ranks(1, 2)
def test_parts_of_a_batch_have_the_loss_of_the_whole_batch(ranks):
    with Communicator(MPI.COMM_SELF) as alone:
        want = neighbors_step(alone, Strategy({}))
    check_step(neighbors_step(ranks, Strategy({"height": ranks.size}), 4), want)


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
def test_neighbors_refusals(make, text):
    with pytest.raises(ValueError, match=text):
        make()


MEMBERS, GRID, CRPS_BATCH = 3, (5, 3), 2


def integral(x, t):
    """Return ``integral (F(y) - [y >= t])^2 dy`` of members ``(M,)`` and a number."""
    ends = np.sort(np.append(x, t))
    middle = (ends[1:] + ends[:-1]) / 2
    share = (x[:, None] <= middle).mean(0)
    return np.sum(np.diff(ends) * (share - (middle >= t)) ** 2)


def score(fair, normalization="count"):
    def found(x, t, w=None):
        members = x.reshape(*t.shape[:-1], MEMBERS, -1)
        values = np.zeros(t.shape)
        for at in np.ndindex(*t.shape):
            own = members[(*at[:-1], slice(None), at[-1])]
            # The integral has f = 1 / M^2.
            pairs = np.abs(own[:, None] - own).sum() / 2
            plain = integral(own, t[at])
            values[at] = plain - fair * pairs * (1 / (MEMBERS * (MEMBERS - 1)) - 1 / MEMBERS**2)
        w = np.ones(t.shape) if w is None else np.broadcast_to(w, t.shape)
        return np.sum(w * values) / (w.sum() if normalization == "weights" else w.size)

    return found


CRPS_CASES = {
    "fair": (lambda: hg.CRPS(MEMBERS), score(1.0)),
    "plain": (lambda: hg.CRPS(MEMBERS, 0.0), score(0.0)),
    "both, weights": (lambda: hg.CRPS(MEMBERS, 0.9, normalization="weights"), score(0.9, "weights")),
}


def crps_arrays(weighted=False):
    x, t = random_array((CRPS_BATCH, *GRID, MEMBERS * 2), "x"), random_array((CRPS_BATCH, *GRID, 2), "t")
    w = 2 * np.random.default_rng(5).random((CRPS_BATCH, *GRID, 1))
    w[0, 0] = 0
    return (x, t, w) if weighted else (x, t)


@pytest.mark.mpi
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", CRPS_CASES)
def test_is_its_integral_on_every_grid(ranks, name, weighted):
    make, function = CRPS_CASES[name]
    x, t, *w = crps_arrays(weighted)
    at = (1, 2, 1, slice(None))
    gradient = np.zeros(x.shape)
    gradient[at] = numeric_gradient(lambda a, _: function(np.concatenate([x[:1], _put(x[1:], a)]), t, *w), x[at], t)
    for parts in grids(ranks.size, AXES):
        loss, dx = run_loss(make, (x, t, *w), ranks, parts)
        assert abs(loss - function(x, t, *w)) <= 1e-13
        assert np.abs(dx[at] - gradient[at]).max() <= 2e-9


def _put(x, values):
    x = x.copy()
    x[0, 2, 1] = values
    return x


@pytest.mark.mpi
@pytest.mark.parametrize("garbage", [1e6, np.nan])
def test_nothing_comes_of_a_position_without_weight(ranks, garbage):
    x, t, w = crps_arrays(True)
    want = run_loss(CRPS_CASES["fair"][0], (x, t, w), ranks, {"height": ranks.size}, "float32")
    x[0, 0], t[0, 0] = garbage, garbage
    loss, dx = run_loss(CRPS_CASES["fair"][0], (x, t, w), ranks, {"height": ranks.size}, "float32")
    assert loss == want[0] and np.array_equal(dx, want[1]) and not dx[0, 0].any()


@pytest.mark.ranks(1)
def test_equal_members_have_the_error_of_one(ranks):
    x, t = random_array((CRPS_BATCH, *GRID, 2), "x"), random_array((CRPS_BATCH, *GRID, 2), "t")
    loss, dx = run_loss(CRPS_CASES["fair"][0], (np.tile(x, MEMBERS), t), ranks, {})
    error, slope = run_loss(hg.AbsoluteError, (x, t), ranks, {})
    check((loss, dx), (error, np.tile(slope / MEMBERS, MEMBERS)))


@pytest.mark.ranks(1, 2)
def test_scores_of_an_evaluation(ranks):
    x, t, w = crps_arrays(True)
    with make_executor(CRPS_CASES["fair"][0], x.shape[1:], (t, w), ranks, {"height": ranks.size}) as executor:
        executor.set_input("x", x)
        found = scores_of(executor, ["weighted"])
    members, some = x.reshape(CRPS_BATCH, *GRID, MEMBERS, 2), w > 0
    error = (members.mean(-2) - t)[some[..., 0]]
    assert found["mae"] == pytest.approx(np.abs(error).mean())
    assert found["rmse"] == pytest.approx(np.sqrt(np.square(error).mean()))
    assert found["spread"] == pytest.approx(np.sqrt(members.var(-2, ddof=1)[some[..., 0]].mean()))
    assert found["crps"] == pytest.approx(score(1.0, "weights")(x, t, some.astype(float)))
    assert found["loss"] == pytest.approx(score(1.0)(x, t, w))
    assert found["weighted_mae"] == pytest.approx((w * np.abs(members.mean(-2) - t)).sum() / w.sum() / 2)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: hg.CRPS(1), r"members: expected a whole number of at least 2, got 1"),
        (lambda: hg.CRPS(2, 1.5), r"fair: expected a number from 0 to 1, got 1\.5"),
        (lambda: hg.CRPS(2)(hg.Input((4, 3)), hg.Input((4, 2), "t")), r"2 members of 2 channels .* got \(4, 3\)"),
    ],
)
def test_crps_refusals(make, text):
    with pytest.raises(ValueError, match=text):
        make()
