"""Tests of losses: definition and torch, every cut, short batches, messages, rejected inputs."""

import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.kernels import get_backend
from halograd.layers.strategy import Strategy
from halograd.testing import grids, random_array
from halograd.training.executor import Executor
from tests.layers.geometries import skew
from tests.layers.losses import AXES, BATCH, CLASS_WEIGHTS, SHAPE, check, make_executor, run_loss, target
from tests.layers.norms import close, step, traffic
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


@pytest.mark.many_ranks
@pytest.mark.parametrize("name", SOME)
def test_uneven_and_empty_blocks(ranks, turn, name, monkeypatch):
    skew(monkeypatch)
    check_definition(ranks, turn, name, numeric=False)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("name", LOSSES)
def test_float32(ranks, turn, name):
    check_definition(ranks, turn, name, "float32", near=(1e-6, 1e-6))


@pytest.mark.mpi
@pytest.mark.parametrize("valid", [1, 2])
@pytest.mark.parametrize("name", SOME)
def test_a_short_batch_is_a_smaller_batch(ranks, turn, name, valid):
    check_definition(ranks, turn, name, valid=valid)


@pytest.mark.mpi
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("shape", [(4,), (6, 4), (3, 4, 3, 4)])
def test_samples_without_space_lines_and_volumes(ranks, turn, name, shape):
    make, function, kind = LOSSES[name]
    x, t = random_array((BATCH, *shape), "x"), target(kind, shape)
    axes = {2: ("sample", "width"), 4: ("sample", "depth", "height", "width")}.get(len(shape), ("sample",))
    with Communicator(MPI.COMM_SELF) as alone:
        want, gradient = run_loss(make, (x, t), alone, {})
    assert abs(want - function(x, t)) <= 1e-13 * max(1, abs(want))
    for parts in grids_in_turn(ranks.size, axes, turn):
        check(run_loss(make, (x, t), ranks, parts), (want, gradient), factor=10)


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
    ("name", "sums"), [("ce", 1), ("ce weighted, weights", 2), ("bce", 1), ("mse", 1), ("dice", 2)]
)
def test_sums_over_ranks(ranks, name, sums):
    make, _, kind = LOSSES[name]
    with make_executor(make, SHAPE, (target(kind, SHAPE),), ranks, {"height": ranks.size}) as executor:
        step(executor)
        assert traffic(ranks, lambda: step(executor)) == ({"loss": sums} if ranks.size > 1 else {})


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_a_step_allocates_no_array(ranks, name, trainable):
    make, _, kind = LOSSES[name]
    shape = (96, 96, 4)
    t = target(kind, shape)
    parts = {"width": ranks.size}
    with make_executor(make, shape, (t,), ranks, parts, "float32", trainable=trainable) as executor:

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


# -- refusals ---------------------------------------------------------------------------------------

X, CLASSES = hg.Input(SHAPE, name="x"), hg.Input((*SHAPE[:-1], 1), name="t", dtype="int32")


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


def torch_loss(name, lib):
    """Return the torch loss for channels-first logits."""
    functional = lib.nn.functional
    weights = lib.tensor(CLASS_WEIGHTS, dtype=lib.float64)
    return {
        "ce": lambda x, t: functional.cross_entropy(x, t),
        "ce weighted, weights": lambda x, t: functional.cross_entropy(x, t, weights),
        "ce smoothed": lambda x, t: functional.cross_entropy(x, t, label_smoothing=0.2),
        "ce with all": lambda x, t: functional.cross_entropy(x, t, weights, ignore_index=1, label_smoothing=0.3),
        "bce": functional.binary_cross_entropy_with_logits,
        "bce weighted": lambda x, t: functional.binary_cross_entropy_with_logits(
            x, t, pos_weight=lib.tensor(7.0, dtype=lib.float64)
        ),
        "mse": functional.mse_loss,
        "l1": functional.l1_loss,
        "huber": functional.huber_loss,
    }[name]


@pytest.mark.torch
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    "name", ["ce", "ce weighted, weights", "ce smoothed", "ce with all", "bce", "bce weighted", "mse", "l1", "huber"]
)
def test_against_torch(ranks, name):
    lib = torch()
    make, _, kind = LOSSES[name]
    x, t = random_array((BATCH, *SHAPE), "x"), target(kind, SHAPE)
    logits = lib.tensor(np.moveaxis(x, -1, 1).copy(), requires_grad=True)
    wanted = t[..., 0] if kind == "class" else np.moveaxis(t, -1, 1)
    reference = torch_loss(name, lib)(logits, lib.tensor(wanted.copy()))
    reference.backward()
    loss, dx = run_loss(make, (x, t), ranks, {"height": ranks.size})
    assert loss == pytest.approx(float(reference.detach()), rel=1e-13)
    close(dx, np.moveaxis(logits.grad.numpy(), 1, -1), factor=10)


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
