"""Tests of losses with weights: torch in float64 under every cut, masks over invalid data, sums, messages."""

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
from tests.layers.losses import AXES, BATCH, SHAPE, check, make_executor, run_loss, scores_of, target
from tests.layers.norms import step, traffic
from tests.layers.weighted import CASES, FORMS, LOSSES, SOME, reference, weights_of
from tests.support.grids import grids_in_turn
from tests.support.lean import traced
from tests.support.refusals import refusals

# -- exactness ---------------------------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.torch
@pytest.mark.parametrize(("name", "form"), CASES)
def test_as_torch_on_every_grid(ranks, turn, name, form):
    check_form(ranks, turn, name, form)


def check_form(ranks, turn, name, form):
    make, function, kind = LOSSES[name]
    x, t, w = random_array((BATCH, *SHAPE), "x"), target(kind, SHAPE), weights_of(form)
    want = reference(function, x, t, w)
    for parts in grids_in_turn(ranks.size, AXES, turn):
        check(run_loss(make, (x, t, w), ranks, parts), want)


@pytest.mark.mpi
@pytest.mark.torch
@pytest.mark.parametrize("valid", [1, 2])
@pytest.mark.parametrize("name", SOME)
def test_a_short_batch_is_a_smaller_batch(ranks, turn, name, valid):
    make, function, kind = LOSSES[name]
    x, t, w = random_array((BATCH, *SHAPE), "x"), target(kind, SHAPE), weights_of("position")
    loss, gradient = reference(function, x[:valid], t[:valid], w[:valid])
    gradient = np.concatenate([gradient, np.zeros((BATCH - valid, *SHAPE))])
    for parts in grids_in_turn(ranks.size, AXES, turn):
        check(run_loss(make, (x, t, w), ranks, parts, valid=valid), (loss, gradient))


@pytest.mark.many_ranks
@pytest.mark.torch
@pytest.mark.parametrize(("name", "form"), [case for case in CASES if case[0] in SOME])
def test_uneven_and_empty_blocks(ranks, turn, name, form, monkeypatch):
    skew(monkeypatch)
    check_form(ranks, turn, name, form)


@pytest.mark.mpi
@pytest.mark.torch
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("shape", [(4,), (6, 4), (3, 4, 3, 4)])
def test_samples_without_space_lines_and_volumes(ranks, turn, name, shape):
    make, function, kind = LOSSES[name]
    x, t = random_array((BATCH, *shape), "x"), target(kind, shape)
    w = np.random.default_rng(3).random((BATCH, *shape[:-1], 1))
    want = reference(function, x, t, w)
    axes = {2: ("sample", "width"), 4: ("sample", "depth", "height", "width")}.get(len(shape), ("sample",))
    for parts in grids_in_turn(ranks.size, axes, turn):
        check(run_loss(make, (x, t, w), ranks, parts), want)


@pytest.mark.ranks(1, 2)
@pytest.mark.torch
@pytest.mark.parametrize("name", LOSSES)
def test_blocks_of_many_chunks_in_float32(ranks, name):
    make, function, kind = LOSSES[name]
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
@pytest.mark.parametrize("name", LOSSES)
def test_nothing_comes_of_a_position_without_weight(ranks, name, garbage):
    """Prediction and target at positions with weight 0 change no bit of the loss, and have gradient 0."""
    make, _, kind = LOSSES[name]
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
@pytest.mark.parametrize("name", LOSSES)
def test_no_weight_at_all_is_no_loss(ranks, name):
    make, _, kind = LOSSES[name]
    x, t, w = random_array((BATCH, *SHAPE), "x"), target(kind, SHAPE), np.zeros((BATCH, 1))
    loss, dx = run_loss(make, (x, t, w), ranks, {"height": ranks.size})
    assert loss == 0
    assert not dx.any()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("backend", ["numpy", "onednn"])
def test_weights_of_one_are_no_weights(ranks, backend):
    for name, (make, _, kind) in LOSSES.items():
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


# -- messages, memory, price -------------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("name", "form", "sums"),
    [("mse", "position", 1), ("mse, weights", "position", 2), ("ce, weights", "position", 2), ("ce", "column", 1)],
)
def test_sums_over_ranks(ranks, name, form, sums):
    """Losses with weights of any extent send one message per sum, although all ranks read weights of extent 1."""
    make, _, kind = LOSSES[name]
    given = target(kind, SHAPE), weights_of(form)
    with make_executor(make, SHAPE, given, ranks, {"height": ranks.size}, "float32") as executor:
        step(executor)
        assert traffic(ranks, lambda: step(executor)) == ({"loss": sums} if ranks.size > 1 else {})


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("form", ["position", "sample"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_step_allocates_no_array(ranks, name, form):
    make, _, kind = LOSSES[name]
    shape = (96, 96, 4)
    given = target(kind, shape), np.ones((BATCH, 96, 96, 1) if form == "position" else (BATCH, 1))
    with make_executor(make, shape, given, ranks, {"width": ranks.size}, "float32") as executor:
        step(executor)
        peak, _ = traced(lambda: step(executor))
    assert peak < 96 * 1024


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


# -- refusals ----------------------------------------------------------------------------------------

X, W, CLASSES = hg.Input(SHAPE, "x"), hg.Input((5, 3, 1), "w"), hg.Input((5, 3, 1), "t", "int32")


test_refuses_what_does_not_fit = refusals(
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
