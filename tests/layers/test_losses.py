"""Tests of losses, also with weights: definition and torch, every cut, short batches, masks, messages, errors."""

import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.kernels import get_backend
from halograd.layers.loss import Loss
from halograd.layers.strategy import Strategy
from halograd.perfmodel.kernel_times import LayerWork
from halograd.testing import grids, random_array
from halograd.training.executor import Executor
from halograd.training.metrics import Confusion
from tests.layers.geometries import skew
from tests.layers.losses import (
    AXES,
    BATCH,
    CLASS_WEIGHTS,
    FORMED,
    FORMS,
    SHAPE,
    SOME_WEIGHTED,
    WEIGHTED,
    check,
    make_executor,
    reference,
    run_loss,
    scores_of,
    target,
    weights_of,
)
from tests.layers.norms import step, traffic
from tests.layers.oracle import torch
from tests.support.grids import grids_in_turn
from tests.support.lean import traced
from tests.support.refusals import refusals

# -- definitions, in float64 ------------------------------------------------------------------------


def cross_entropy(x, t, weights=None, normalization="count", smoothing=0.0, ignore=None):
    k = x.shape[-1]
    w = np.ones(k) if weights is None else np.asarray(weights)
    t = t[..., 0]
    counts = np.ones(t.shape) if ignore is None else (t != ignore).astype(float)
    t = np.where(counts > 0, t, 0)
    log_p = x - x.max(-1, keepdims=True)
    log_p = log_p - np.log(np.exp(log_p).sum(-1, keepdims=True))
    hard = -w[t] * np.take_along_axis(log_p, t[..., None], -1)[..., 0]
    soft = -(w * log_p).sum(-1) / k
    total = (counts * ((1 - smoothing) * hard + smoothing * soft)).sum()
    return total / ((counts * w[t]).sum() if normalization == "weights" else t.size)


def binary_cross_entropy(x, t, pos_weight=1.0):
    def softplus(z):
        return np.maximum(z, 0) + np.log1p(np.exp(-np.abs(z)))

    return np.mean(pos_weight * t * softplus(-x) + (1 - t) * softplus(x))


def squared_error(x, t):
    return np.mean((x - t) ** 2)


def huber(x, t, delta=1.0):
    d = np.abs(x - t)
    return np.mean(np.where(d <= delta, d * d / 2, delta * (d - delta / 2)))


def focal(x, t, gamma=2.0, positive=0.25, negative=0.75):
    p, rest = np.exp(-np.logaddexp(0, -x)), np.exp(-np.logaddexp(0, x))
    ce = t * np.logaddexp(0, -x) + (1 - t) * np.logaddexp(0, x)
    return np.mean((positive * t + negative * (1 - t)) * (t * rest + (1 - t) * p) ** gamma * ce)


def overlaps(x, t, activation, reduction):
    """Return the sum of products of probabilities and targets, and the sum of each."""
    if activation == "sigmoid":
        p = 1 / (1 + np.exp(-x))
    elif activation == "softmax":
        e = np.exp(x - x.max(-1, keepdims=True))
        p = e / e.sum(-1, keepdims=True)
    else:
        p = x
    if t.shape != x.shape:
        t = np.eye(x.shape[-1])[t[..., 0]]
    axes = tuple(range(1 if reduction == "sample" else 0, x.ndim - 1))
    return (p * t).sum(axes), p.sum(axes), t.sum(axes)


def dice(x, t, activation="sigmoid", reduction="batch", smooth=1.0):
    both, predicted, true = overlaps(x, t, activation, reduction)
    return np.mean(1 - (2 * both + smooth) / (predicted + true + smooth))


def tversky(x, t, alpha, beta, activation="sigmoid", reduction="batch", smooth=1.0):
    both, predicted, true = overlaps(x, t, activation, reduction)
    return np.mean(1 - (both + smooth) / (both + alpha * (predicted - both) + beta * (true - both) + smooth))


#: Name -> layer, definition, kind of target.
LOSSES = {
    "ce": (lambda: hg.SoftmaxCrossEntropy(), cross_entropy, "class"),
    "ce weighted, count": (
        lambda: hg.SoftmaxCrossEntropy(CLASS_WEIGHTS, "count"),
        lambda x, t: cross_entropy(x, t, CLASS_WEIGHTS),
        "class",
    ),
    "ce weighted, weights": (
        lambda: hg.SoftmaxCrossEntropy(CLASS_WEIGHTS),
        lambda x, t: cross_entropy(x, t, CLASS_WEIGHTS, "weights"),
        "class",
    ),
    "ce smoothed": (
        lambda: hg.SoftmaxCrossEntropy(label_smoothing=0.2),
        lambda x, t: cross_entropy(x, t, smoothing=0.2),
        "class",
    ),
    "ce with all": (
        lambda: hg.SoftmaxCrossEntropy(CLASS_WEIGHTS, label_smoothing=0.3, ignore_index=1),
        lambda x, t: cross_entropy(x, t, CLASS_WEIGHTS, "weights", 0.3, 1),
        "class",
    ),
    "ce ignoring, count": (
        lambda: hg.SoftmaxCrossEntropy(None, "count", ignore_index=1),
        lambda x, t: cross_entropy(x, t, ignore=1),
        "class",
    ),
    "bce": (lambda: hg.BinaryCrossEntropyWithLogits(), binary_cross_entropy, "mask"),
    "bce weighted": (
        lambda: hg.BinaryCrossEntropyWithLogits(7.0),
        lambda x, t: binary_cross_entropy(x, t, 7.0),
        "mask",
    ),
    "bce weighted per channel, soft": (
        lambda: hg.BinaryCrossEntropyWithLogits((1.0, 2.0, 0.5, 4.0)),
        lambda x, t: binary_cross_entropy(x, t, np.array((1.0, 2.0, 0.5, 4.0))),
        "share",
    ),
    "mse": (lambda: hg.MeanSquaredError(), squared_error, "real"),
    "l1": (lambda: hg.AbsoluteError(), lambda x, t: np.mean(np.abs(x - t)), "real"),
    "huber": (lambda: hg.Huber(), huber, "real"),
    "huber, narrow": (lambda: hg.Huber(0.3), lambda x, t: huber(x, t, 0.3), "real"),
    "focal": (lambda: hg.Focal(), focal, "mask"),
    "focal, soft": (lambda: hg.Focal(1.5, None), lambda x, t: focal(x, t, 1.5, 1.0, 1.0), "share"),
    "focal, slow": (lambda: hg.Focal(0.5), lambda x, t: focal(x, t, 0.5), "mask"),
    "tversky": (lambda: hg.Tversky(0.3, 0.7), lambda x, t: tversky(x, t, 0.3, 0.7), "mask"),
    "tversky of classes": (
        lambda: hg.Tversky(0.8, 0.1, "softmax", "sample", 0.5),
        lambda x, t: tversky(x, t, 0.8, 0.1, "softmax", "sample", 0.5),
        "class",
    ),
    "dice": (lambda: hg.Dice(), dice, "mask"),
    "dice per sample": (lambda: hg.Dice(reduction="sample"), lambda x, t: dice(x, t, reduction="sample"), "mask"),
    "dice of probabilities": (
        lambda: hg.Dice("none", smooth=30.0),
        lambda x, t: dice(x, t, "none", smooth=30.0),
        "share",
    ),
    "dice softmax": (lambda: hg.Dice("softmax"), lambda x, t: dice(x, t, "softmax"), "mask"),
    "dice softmax of classes": (
        lambda: hg.Dice("softmax", "sample", 0.1),
        lambda x, t: dice(x, t, "softmax", "sample", 0.1),
        "class",
    ),
}

#: One of each kind, where all of them would tell nothing more.
SOME = ("ce with all", "bce weighted per channel, soft", "mse", "focal, soft", "dice softmax of classes")


def numeric_gradient(function, x, t):
    """Return the gradient by central differences, element by element."""
    gradient, eps = np.zeros(x.shape), 1e-5
    for index in np.ndindex(*x.shape):
        moved = x.copy()
        moved[index] += eps
        above = function(moved, t)
        moved[index] -= 2 * eps
        gradient[index] = (above - function(moved, t)) / (2 * eps)
    return gradient


# -- exactness --------------------------------------------------------------------------------------


def check_definition(ranks, turn, name, dtype="float64", valid=BATCH, near=(1e-13, 2e-9), numeric=True):
    """Check loss and gradient against the definition on the grids of this turn.

    Samples from `valid` on have zero gradient.
    """
    make, function, kind = LOSSES[name]
    x, t = random_array((BATCH, *SHAPE), "x").astype(dtype).astype(float), target(kind, SHAPE)
    t = t.astype(dtype).astype(float) if t.dtype.kind == "f" else t
    want = function(x[:valid], t[:valid])
    gradient = numeric_gradient(function, x[:valid], t[:valid]) if numeric else None
    for parts in grids_in_turn(ranks.size, AXES, turn):
        loss, dx = run_loss(make, (x, t), ranks, parts, dtype, valid=valid)
        assert abs(loss - want) <= near[0] * max(1, abs(want))
        if numeric:
            assert np.abs(dx[:valid] - gradient).max() <= near[1]
            assert not dx[valid:].any()


@pytest.mark.mpi
@pytest.mark.parametrize("name", LOSSES)
def test_is_its_definition_on_every_grid(ranks, turn, name):
    check_definition(ranks, turn, name)


def check_weighted(ranks, turn, name, form, valid=BATCH):
    """Check loss and gradient with weights against torch on the grids of this turn."""
    make, function, kind = WEIGHTED[name]
    x, t, w = random_array((BATCH, *SHAPE), "x"), target(kind, SHAPE), weights_of(form)
    loss, gradient = reference(function, x[:valid], t[:valid], w[:valid])
    gradient = np.concatenate([gradient, np.zeros((BATCH - valid, *SHAPE))])
    for parts in grids_in_turn(ranks.size, AXES, turn):
        check(run_loss(make, (x, t, w), ranks, parts, valid=valid), (loss, gradient))


#: Losses without and with weights: name, form of the weights or None.
BOTH = [
    *((name, None) for name in SOME),
    *(pytest.param(name, "position", marks=pytest.mark.torch) for name in SOME_WEIGHTED),
]


@pytest.mark.many_ranks
@pytest.mark.parametrize(
    ("name", "form"),
    [
        *BOTH,
        *(pytest.param(*c, marks=pytest.mark.torch) for c in FORMED if c[0] in SOME_WEIGHTED and c[1] != "position"),
    ],
)
def test_uneven_and_empty_blocks(ranks, turn, name, form, monkeypatch):
    skew(monkeypatch)
    if form is None:
        check_definition(ranks, turn, name, numeric=False)
    else:
        check_weighted(ranks, turn, name, form)


@pytest.mark.mpi
@pytest.mark.parametrize("valid", [1, 2])
@pytest.mark.parametrize(("name", "form"), BOTH)
def test_a_short_batch_is_a_smaller_batch(ranks, turn, name, form, valid):
    if form is None:
        check_definition(ranks, turn, name, valid=valid)
    else:
        check_weighted(ranks, turn, name, form, valid)


@pytest.mark.mpi
@pytest.mark.parametrize(("name", "form"), BOTH)
@pytest.mark.parametrize("shape", [(4,), (6, 4), (3, 4, 3, 4)])
def test_samples_without_space_lines_and_volumes(ranks, turn, name, form, shape):
    make, function, kind = (LOSSES if form is None else WEIGHTED)[name]
    given = [random_array((BATCH, *shape), "x"), target(kind, shape)]
    if form is None:
        with Communicator(MPI.COMM_SELF) as alone:
            want = run_loss(make, given, alone, {})
        assert abs(want[0] - function(*given)) <= 1e-13 * max(1, abs(want[0]))
    else:
        given.append(np.random.default_rng(3).random((BATCH, *shape[:-1], 1)))
        want = reference(function, *given)
    axes = {2: ("sample", "width"), 4: ("sample", "depth", "height", "width")}.get(len(shape), ("sample",))
    for parts in grids_in_turn(ranks.size, axes, turn):
        check(run_loss(make, given, ranks, parts), want, factor=10 if form is None else 20)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("name", LOSSES)
def test_float32(ranks, turn, name):
    check_definition(ranks, turn, name, "float32", near=(1e-6, 1e-6))


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", [n for n in LOSSES if n != "l1"])  # it has kinks
def test_blocks_of_many_chunks(ranks, name):
    """The loss of a block of several chunks of 32768 elements, the last one shorter, equals the definition."""
    make, function, kind = LOSSES[name]
    shape = (131, 117, 4)
    x, t = random_array((2, *shape), "x"), target(kind, shape, 2)
    want = function(x, t)
    loss, dx = run_loss(make, (x, t), ranks, {"height": ranks.size})
    assert abs(loss - want) <= 1e-12 * max(1, abs(want))
    direction, eps = random_array(x.shape, "direction"), 1e-4
    numeric = (function(x + eps * direction, t) - function(x - eps * direction, t)) / (2 * eps)
    assert abs(np.sum(dx * direction) - numeric) <= 1e-8


# -- extremes ---------------------------------------------------------------------------------------


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", [n for n in LOSSES if LOSSES[n][2] != "real" and n != "dice of probabilities"])
def test_huge_logits_neither_overflow_nor_lose_the_gradient(ranks, name, dtype):
    make, function, kind = LOSSES[name]
    x = 3000 * random_array((BATCH, *SHAPE), "x").round(2)
    t = target(kind, SHAPE)
    with np.errstate(over="ignore"):
        want = function(x, t)
    loss, dx = run_loss(make, (x, t), ranks, {}, dtype)
    assert abs(loss - want) <= 1e-6 * max(1, abs(want))
    assert np.isfinite(dx).all()


@pytest.mark.ranks(1)
def test_gradient_of_a_confident_binary_prediction(ranks):
    """The gradient of a confident prediction is accurate: for large x, sigmoid(-x) = exp(-x), not 0."""
    x, t = np.full((1, 1, 1, 1), 30.0), np.ones((1, 1, 1, 1))
    _, dx = run_loss(hg.BinaryCrossEntropyWithLogits, (x, t), ranks, {})
    assert dx[0, 0, 0, 0] == pytest.approx(-np.exp(-30.0), rel=1e-12)


# -- messages and memory ----------------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("name", "form", "sums"),
    [
        *(("ce", None, 1), ("ce weighted, weights", None, 2), ("bce", None, 1), ("mse", None, 1), ("dice", None, 2)),
        *(("mse", "position", 1), ("mse, weights", "position", 2), ("ce, weights", "position", 2), ("ce", "column", 1)),
    ],
)
def test_sums_over_ranks(ranks, name, form, sums):
    """A step sends one message per sum, also with weights of extent 1, which all ranks read."""
    make, _, kind = (LOSSES if form is None else WEIGHTED)[name]
    given, dtype = (target(kind, SHAPE),), "float64"
    if form is not None:
        given, dtype = (*given, weights_of(form)), "float32"
    with make_executor(make, SHAPE, given, ranks, {"height": ranks.size}, dtype) as executor:
        step(executor)
        assert traffic(ranks, lambda: step(executor)) == ({"loss": sums} if ranks.size > 1 else {})


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("name", "form", "trainable"),
    [(name, None, trainable) for name in LOSSES for trainable in (True, False)]
    + [(name, form, True) for name in WEIGHTED for form in ("position", "sample")],
)
def test_a_step_allocates_no_array(ranks, name, form, trainable):
    make, _, kind = (LOSSES if form is None else WEIGHTED)[name]
    shape = (96, 96, 4)
    given = [target(kind, shape)]
    if form is not None:
        given.append(np.ones((BATCH, 96, 96, 1) if form == "position" else (BATCH, 1)))
    parts = {"width": ranks.size}
    with make_executor(make, shape, given, ranks, parts, "float32", trainable=trainable) as executor:

        def run():
            executor.forward()
            executor.loss_value()
            if trainable:
                executor.backward()

        run()
        peak, _ = traced(run)
    # A block has 3 * 96 * 96 * 4 * 4 / ranks bytes; NumPy's casting buffers have 64 KiB.
    assert peak < 96 * 1024


@pytest.mark.mpi
def test_a_prediction_that_others_read_too_is_not_packed(ranks):
    """A loss of an input with the halo of a convolution, which is a strided view, is right."""
    x, t = hg.Input(SHAPE, name="x"), hg.Input((*SHAPE[:-1], 1), name="t", dtype="int32")
    y = hg.Conv(SHAPE[-1], 3, padding=1, name="conv")(x)
    network = hg.Network({"y": y, "loss": hg.SoftmaxCrossEntropy()(x, t)})
    data, classes = random_array((BATCH, *SHAPE), "x"), target("class", SHAPE)
    want = cross_entropy(data, classes)
    for parts in grids(ranks.size, AXES):
        with Executor(
            network, ranks, get_backend("numpy"), BATCH, Strategy(parts), "float64", probed=["x"]
        ) as executor:
            executor.set_input("x", data)
            executor.set_input("t", classes)
            executor.forward()
            assert abs(executor.loss_value() - want) <= 1e-13 * want


# -- with weights ------------------------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.torch
@pytest.mark.parametrize(("name", "form"), FORMED)
def test_as_torch_on_every_grid(ranks, turn, name, form):
    check_weighted(ranks, turn, name, form)


@pytest.mark.ranks(1, 2)
@pytest.mark.torch
@pytest.mark.parametrize("name", WEIGHTED)
def test_blocks_of_many_chunks_in_float32(ranks, name):
    make, function, kind = WEIGHTED[name]
    shape = (131, 117, 4)
    x = random_array((2, *shape), "x").astype(np.float32).astype(float)
    t = target(kind, shape, 2)
    t = t if kind == "class" else t.astype(np.float32).astype(float)
    w = np.random.default_rng(1).integers(0, 3, (2, *shape[:-1], 1)).astype(float)
    want, gradient = reference(function, x, t, w)
    loss, dx = run_loss(make, (x, t, w), ranks, {"height": ranks.size}, "float32")
    assert abs(loss - want) <= 1e-5 * max(1, abs(want))
    assert np.abs(dx - gradient).max() <= 1e-5 * np.abs(gradient).max()


# -- masks -------------------------------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.parametrize("garbage", [9.96921e36, np.nan, -np.inf])
@pytest.mark.parametrize("name", WEIGHTED)
def test_nothing_comes_of_a_position_without_weight(ranks, name, garbage):
    """Prediction and target at positions with weight 0 change no bit of the loss, and have gradient 0."""
    make, _, kind = WEIGHTED[name]
    x, t, w = random_array((BATCH, *SHAPE), "x"), target(kind, SHAPE), np.ones((BATCH, *FORMS["position"]))
    w[:, 1], w[0] = 0, 0
    parts = {"height": ranks.size}
    want, gradient = run_loss(make, (x, t, w), ranks, parts, "float32")
    x[:, 1], t[0] = garbage, (-1 if kind == "class" else garbage)
    with np.errstate(all="raise"):
        loss, dx = run_loss(make, (x, t, w), ranks, parts, "float32")
    assert loss == want
    assert np.array_equal(dx, gradient) and not dx[:, 1].any() and not dx[0].any() and dx[1:, 0].any()


#: Losses that ignore positions, and how many channels their predictions have.
IGNORING = {
    "dice": (lambda **more: hg.Dice(**more), 1),
    "dice of probabilities, by sample": (lambda **more: hg.Dice("none", "sample", **more), 1),
    "dice of classes": (lambda **more: hg.Dice("softmax", **more), 4),
    "tversky of classes": (lambda **more: hg.Tversky(0.3, 0.7, "softmax", "sample", **more), 4),
}


def with_ignored(channels, ignored):
    """Return a prediction, a target with ignored positions, and the mask of the other positions."""
    rng = np.random.default_rng(4)
    t = rng.integers(0, max(2, channels), (BATCH, *SHAPE[:-1], 1))
    there = rng.random(t.shape) < 0.6
    t = np.where(there, t, ignored)
    return rng.random((BATCH, *SHAPE[:-1], channels)), t if channels > 1 else t.astype(float), there.astype(float)


@pytest.mark.mpi
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignored", [-1, 1])
@pytest.mark.parametrize("name", IGNORING)
def test_ignored_positions_are_those_of_weight_0(ranks, turn, name, ignored, weighted):
    make, channels = IGNORING[name]
    x, t, there = with_ignored(channels, ignored)
    there = there * (t != ignored)
    given = [np.random.default_rng(3).random(there.shape)] if weighted else []
    first, *_ = grids(ranks.size, AXES)
    want = run_loss(make, (x, t, there * given[0] if weighted else there), ranks, first)
    for parts in grids_in_turn(ranks.size, AXES, turn):
        check(run_loss(lambda: make(ignore_index=ignored), (x, t, *given), ranks, parts, valid=BATCH), want)


@pytest.mark.mpi
@pytest.mark.parametrize("name", IGNORING)
def test_ignored_positions_are_not_judged(ranks, turn, name):
    make, channels = IGNORING[name]
    x, t, there = with_ignored(channels, -1)
    some = there[..., 0] > 0
    counts = Confusion(max(2, channels), None if channels > 1 else 0.5 if "probabilities" in name else 0.0)
    counts.add(x[some], t[some])
    for parts in grids_in_turn(ranks.size, AXES, turn):
        shape, loss = x.shape[1:], lambda: make(ignore_index=-1)
        with make_executor(loss, shape, (t,), ranks, parts, trainable=False) as executor:
            executor.set_input("x", x)
            found = scores_of(executor)
        assert {key: found[key] for key in counts.scores()} == counts.scores()


def test_what_is_ignored_of_a_sum_is_what_all_its_losses_ignore():
    x, t = hg.Input((4, 3), "x"), hg.Input((4, 1), "t", "int32")

    def ignored(*losses):
        node = sum((loss(x, t) for loss in losses[1:]), losses[0](x, t))
        return node.layer.ignored_target(1)

    assert ignored(hg.SoftmaxCrossEntropy(ignore_index=7), hg.Dice("softmax", ignore_index=7)) == 7
    assert ignored(hg.SoftmaxCrossEntropy(ignore_index=7), hg.Dice("softmax")) is None
    assert ignored(hg.SoftmaxCrossEntropy(), hg.Dice("softmax")) is None
    with pytest.raises(ValueError, match="Dice: expected a target of one channel with ignore_index, got"):
        hg.Dice(ignore_index=1)(x, hg.Input((4, 3), "t"))


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", WEIGHTED)
def test_no_weight_at_all_is_no_loss(ranks, name):
    make, _, kind = WEIGHTED[name]
    x, t, w = random_array((BATCH, *SHAPE), "x"), target(kind, SHAPE), np.zeros((BATCH, 1))
    loss, dx = run_loss(make, (x, t, w), ranks, {"height": ranks.size})
    assert loss == 0
    assert not dx.any()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("backend", ["numpy", "onednn"])
def test_weights_of_one_are_no_weights(ranks, backend):
    for name, (make, _, kind) in WEIGHTED.items():
        x, t = random_array((BATCH, *SHAPE), "x"), target(kind, SHAPE)
        ones = np.ones((BATCH, *FORMS["position"]))
        loss, dx = run_loss(make, (x, t, ones), ranks, {"width": ranks.size}, "float32", backend)
        again, _ = run_loss(make, (x, t, 2 * ones), ranks, {"width": ranks.size}, "float32", backend)
        want, gradient = run_loss(make, (x, t), ranks, {"width": ranks.size}, "float32", backend)
        assert loss == pytest.approx(want, rel=1e-6), name
        np.testing.assert_allclose(dx, gradient, atol=1e-6 * np.abs(gradient).max(), err_msg=name)
        by_weight = name.endswith(("weights", "alone"))
        if not isinstance(make(), hg.Dice):
            assert again == pytest.approx(want if by_weight else 2 * want, rel=1e-6), name


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", ["int32", "compute"])
def test_weights_may_be_whole_numbers(ranks, kind):
    x, t, w = random_array((BATCH, *SHAPE), "x"), target("real", SHAPE), np.arange(15).reshape(5, 3, 1) % 2
    found = []
    for dtype in ("float64", "float32"):
        nodes = hg.Input(SHAPE, "x"), hg.Input(SHAPE, "t"), hg.Input(w.shape, "w", kind)
        with Executor(
            hg.Network({"loss": hg.MeanSquaredError()(*nodes)}), ranks, get_backend("numpy"), BATCH, dtype=dtype
        ) as e:
            for name, array in (("x", x), ("t", t), ("w", np.broadcast_to(w, (BATCH, *w.shape)))):
                e.set_input(name, array)
            e.forward()
            found.append(e.loss_value())
    want = np.mean(w * (x - t) ** 2)
    assert found[0] == pytest.approx(want, rel=1e-13) and found[1] == pytest.approx(want, rel=1e-6)


# -- sums of losses ----------------------------------------------------------------------------------


def two_scales():
    """Return a sum of losses of two extents with one weight per sample; the first loss is training-only."""
    fine, coarse = hg.Input((4, 6, 4), "fine"), hg.Input((2, 3, 4), "coarse")
    t, few, w = hg.Input((4, 6, 1), "t", "int32"), hg.Input((2, 3, 4), "few"), hg.Input((1,), "w")
    mask = hg.Input((4, 6, 1), "mask")
    loss = hg.training_only(0.3 * hg.Huber()(coarse, few, w)) + hg.SoftmaxCrossEntropy(normalization="weights")(
        fine, t, w
    )
    return loss + 0.5 * hg.Dice("softmax")(fine, t, mask)


def evaluated(node, comm, parts, training):
    network = hg.Network({"loss": node})
    probed = ["fine", "coarse"]
    with Executor(network, comm, get_backend("numpy"), 5, Strategy(parts), "float64", probed=probed) as executor:
        for name, given in network.inputs.items():
            values = np.abs(random_array((5, *given.shape), name))
            executor.set_input(name, (3 * values).astype(int) % 4 if given.dtype == "int32" else values)
        executor.forward(training=training)
        value = executor.loss_value()
        executor.backward()
        return value, [executor.gather(name, gradient=True) for name in probed]


@pytest.mark.mpi
@pytest.mark.parametrize("training", [True, False])
def test_a_sum_of_weighted_losses_on_every_grid(ranks, training):
    with Communicator(MPI.COMM_SELF) as alone:
        want, gradients = evaluated(two_scales(), alone, {}, training)
        other, _ = evaluated(two_scales(), alone, {}, not training)
    assert (want > other) == training
    for parts in grids(ranks.size, AXES):
        value, found = evaluated(two_scales(), ranks, parts, training)
        assert value == pytest.approx(want, rel=1e-13)
        for have, expected in zip(found, gradients) if ranks.rank == 0 else ():
            np.testing.assert_allclose(have, expected, rtol=1e-12, atol=1e-16)


def test_an_array_may_be_target_and_weights():
    """The conditions of both roles apply: weights are at least 0."""
    x, t = hg.Input(SHAPE, "x"), hg.Input(SHAPE, "t")
    layer = (hg.MeanSquaredError()(x, t, t) + hg.AbsoluteError()(x, t)).layer
    assert layer.target_range(1, SHAPE, SHAPE) == (0.0, np.inf) and not layer.weighs(1)


def test_what_a_sum_says_of_its_weights():
    node = two_scales()
    shapes, layer = [n.shape for n in node.inputs], node.layer
    roles = {n.layer.name: (layer.compares(i), layer.weighs(i)) for i, n in enumerate(node.inputs)}
    assert roles == {
        "coarse": (False, False),
        "few": (True, False),
        "w": (True, True),
        "fine": (False, False),
        "t": (True, False),
        "mask": (True, True),
    }
    names = [n.layer.name for n in node.inputs]
    assert layer.target_range(names.index("w"), *shapes) == (0.0, np.inf)
    assert not layer.reads_classes(names.index("mask"), *shapes)
    (one,) = layer.comparisons(*shapes)
    assert [names[i] for i in (one.prediction, one.target, one.weights)] == ["fine", "t", "w"]
    assert set(hg.Network({"loss": node}).targets) == {"few", "w", "t", "mask"}


# -- metrics -----------------------------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.parametrize("form", FORMS)
def test_metrics_do_not_judge_what_has_no_weight(ranks, turn, form):
    x = hg.Input((5, 3, 4), "x")
    logits, field = hg.Conv(3, 1, name="head")(x), hg.Conv(4, 1, name="field")(x)
    t, wanted, w = hg.Input((5, 3, 1), "t", "int32"), hg.Input((5, 3, 4), "wanted"), hg.Input(FORMS[form], "w")
    few = hg.Input((5, 3, 1), "few")
    loss = hg.SoftmaxCrossEntropy()(logits, t, few) + hg.MeanSquaredError()(field, wanted, w)
    network = hg.Network({"prediction": logits, "field": field, "loss": loss})
    given = {"x": random_array((BATCH, 5, 3, 4), "x"), "wanted": random_array((BATCH, 5, 3, 4), "y")}
    given |= {"t": target("class", (5, 3, 3)), "few": weights_of("position"), "w": weights_of(form)}
    for parts in grids_in_turn(ranks.size, AXES, turn):
        with Executor(network, ranks, get_backend("numpy"), BATCH, Strategy(parts), "float64") as executor:
            for name, array in given.items():
                executor.set_input(name, array)
            found = scores_of(executor)
            whole = [executor.gather(name) for name in ("head", "field")]
        if ranks.rank == 0:
            right = (np.argmax(whole[0], -1) == given["t"][..., 0])[given["few"][..., 0] > 0]
            assert found["accuracy"] == right.mean()
            w = given["w"].reshape((BATCH, *(1,) * (4 - given["w"].ndim), *given["w"].shape[1:]))
            counts = np.broadcast_to(w > 0, whole[1].shape)
            assert found["field mae"] == pytest.approx(np.abs(whole[1] - given["wanted"])[counts].mean(), rel=1e-13)


def test_weights_are_part_of_the_work():
    """Weights change the key of the work, and their reads are counted."""
    plain, weighted = hg.MeanSquaredError(), hg.MeanSquaredError(normalization="weights")
    shapes = [(2, 4, 3), (2, 4, 3)]
    alone, more = LayerWork.of(plain, shapes), LayerWork.of(weighted, [*shapes, (2, 4, 1)])
    assert alone.key != more.key
    sizes = [24, 24]
    assert plain.passes.inputs(False, [*sizes, 8]) - plain.passes.inputs(False, sizes) == 24


# -- losses of one's own -----------------------------------------------------------------------------


class Cubed(Loss):
    takes_weights = True

    def local(self, prediction, target, dx, scale, work, weights=None):
        w = 1.0 if weights is None else weights
        d = prediction - target
        if dx is not None:
            dx[...] = scale * w * 3 * d**2
        return scale * float(np.sum(w * d**3))


class Unweighted(Loss):
    def local(self, prediction, target, dx, scale, work):
        return 0.0


@pytest.mark.mpi
@pytest.mark.parametrize("normalization", ["count", "weights"])
def test_a_loss_of_ones_own(ranks, normalization):
    def make():
        made = Cubed()
        made.normalization = normalization
        return made

    x, t, w = random_array((BATCH, *SHAPE), "x"), target("real", SHAPE), weights_of("column")
    full = np.broadcast_to(w, (BATCH, 5, 3, 1))
    below = full.sum() if normalization == "weights" else full.size
    want = (full * (x - t) ** 3).sum() / below, 3 * full * (x - t) ** 2 / below
    for parts in grids(ranks.size, AXES):
        check(run_loss(make, (x, t, w), ranks, parts), want)


# -- refusals ---------------------------------------------------------------------------------------

X, W, CLASSES = hg.Input(SHAPE, "x"), hg.Input((5, 3, 1), "w"), hg.Input((5, 3, 1), "t", "int32")


test_refuses_what_does_not_fit = refusals(
    (lambda: hg.SoftmaxCrossEntropy(normalization="mean"), "normalization: expected one of"),
    (lambda: hg.SoftmaxCrossEntropy(label_smoothing=1.0), r"expected a number in \[0, 1\)"),
    (lambda: hg.SoftmaxCrossEntropy((1.0, -1.0)), "expected one number >= 0 per class"),
    (lambda: hg.SoftmaxCrossEntropy((1.0, 1.0))(X, CLASSES), "expected 4 numbers, one per class, got 2"),
    (lambda: hg.SoftmaxCrossEntropy()(X, X), r"expected a target of shape \(5, 3, 1\)"),
    (lambda: hg.BinaryCrossEntropyWithLogits(0.0), "expected a number > 0"),
    (lambda: hg.BinaryCrossEntropyWithLogits((1.0, 2.0))(X, X), "one for each of 4 channels, got 2"),
    (lambda: hg.BinaryCrossEntropyWithLogits()(X, CLASSES), "of the prediction's shape"),
    (lambda: hg.MeanSquaredError()(X, CLASSES), "of the prediction's shape"),
    (lambda: hg.AbsoluteError()(X, CLASSES), "of the prediction's shape"),
    (lambda: hg.Huber(0.0), "delta: expected a number > 0"),
    (lambda: hg.Focal(-1.0), "gamma: expected a number >= 0"),
    (lambda: hg.Focal(alpha=1.5), r"alpha: expected a number in \[0, 1\] or None"),
    (lambda: hg.Tversky(0.0, 0.0), "alpha, beta: expected numbers >= 0, not both 0"),
    (lambda: hg.Dice("relu"), "activation: expected one of"),
    (lambda: hg.Dice(reduction="mean"), "reduction: expected one of"),
    (lambda: hg.Dice(smooth=0.0), "smooth: expected a number > 0"),
    (lambda: hg.Dice()(X, CLASSES), r"expected a target of shape \(5, 3, 4\), got"),
    (lambda: hg.Dice("softmax")(X, hg.Input((5, 3, 2), name="t")), r"\(5, 3, 4\) or \(5, 3, 1\), got"),
    (lambda: hg.MeanSquaredError(normalization="mean"), r"normalization: expected one of \('count', 'weights'\)"),
    (lambda: hg.MeanSquaredError()(X), "expected .* got 1 inputs"),
    (lambda: hg.MeanSquaredError()(X, X, W, W), "perhaps weights, got 4 inputs"),
    (lambda: Unweighted()(X, X, W), "Unweighted: expected .* got 3 inputs"),
    (
        lambda: hg.SoftmaxCrossEntropy()(X, CLASSES, X),
        r"expected weights of shape \(5, 3, 1\), with 1 for any of its extents, or \(1,\), got \(5, 3, 4\)",
    ),
    (lambda: hg.MeanSquaredError()(X, X, hg.Input((5, 2, 1), "v")), r"of shape \(5, 3, 4\), .* got \(5, 2, 1\)"),
    (lambda: hg.MeanSquaredError()(X, X, hg.Input((2,), "v")), r"of shape \(5, 3, 4\), .* got \(2,\)"),
    (lambda: hg.Dice("softmax")(X, CLASSES, X), r"of shape \(5, 3, 1\), .* got \(5, 3, 4\)"),
    (
        lambda: hg.Network(
            {"y": X * W, "loss": hg.MeanSquaredError(name="mse")(X * W, hg.Input(SHAPE, "t"), W)}, "net"
        ),
        "expected weights of 'mse' that no prediction depends on, got some of input 'w', which is normalized",
    ),
)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("wrong", [-1, 4])
@pytest.mark.parametrize("name", ["ce", "ce weighted, weights", "dice softmax of classes"])
def test_refuses_a_target_that_is_no_class(ranks, name, wrong):
    make, _, kind = LOSSES[name]
    t = target(kind, SHAPE)
    t[1, 2, 1, 0] = wrong
    with (
        make_executor(make, SHAPE, (t,), ranks, {}) as executor,
        pytest.raises(ValueError, match=rf"expected targets in \[0, 4\), got {wrong}"),
    ):
        executor.forward()


# -- torch ------------------------------------------------------------------------------------------


def ignoring(x, t, w):
    weights = torch().tensor(CLASS_WEIGHTS, dtype=x.dtype)
    options = {"ignore_index": 1, "label_smoothing": 0.3}
    return torch().nn.functional.cross_entropy(x.movedim(-1, 1), t[..., 0], weights, **options)


def of_positives(x, t, w):
    return torch().nn.functional.binary_cross_entropy_with_logits(x, t, pos_weight=torch().tensor(7.0))


#: Functions of torch that get weights of 1.
AS_TORCH = WEIGHTED | {
    "ce with all": (LOSSES["ce with all"][0], ignoring, "class"),
    "bce weighted": (LOSSES["bce weighted"][0], of_positives, "mask"),
}


@pytest.mark.torch
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", AS_TORCH)
def test_without_weights_as_torch(ranks, name):
    make, function, kind = AS_TORCH[name]
    x, t = random_array((BATCH, *SHAPE), "x"), target(kind, SHAPE)
    want = reference(function, x, t, np.ones((BATCH, 1)))
    check(run_loss(make, (x, t), ranks, {"height": ranks.size}), want)


@pytest.mark.parametrize("way", [lambda x: x, lambda x: hg.Tanh()(x)])
def test_a_probed_input_that_is_compared_with_is_refused(way):
    """A target that depends on a probed input is an error, because the loss computes no gradient of its target."""
    x = hg.Input((4, 3), "x")
    network = hg.Network({"loss": hg.MeanSquaredError(name="mse")(hg.Conv(3, 1)(x), way(x))})
    message = r"^mse: expected a target that depends on no probed input, got one that does; a loss has no gradient"
    with Communicator(MPI.COMM_SELF) as alone:
        with pytest.raises(ValueError, match=message):
            Executor(network, alone, get_backend("numpy"), 2, dtype="float64", probed=["x"])
        Executor(network, alone, get_backend("numpy"), 2, dtype="float64").close()
