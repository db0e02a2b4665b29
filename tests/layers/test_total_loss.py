"""Tests of sums of losses: weights, several tasks and scales, training-only terms, every cut, messages."""

import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.kernels import get_backend
from halograd.layers.strategy import Strategy
from halograd.layers.total_loss import TotalLoss
from halograd.perfmodel.kernel_times import LayerWork
from halograd.testing import grids, random_array
from halograd.training.executor import Executor
from tests.layers.losses import scores_of
from tests.layers.norms import step, traffic
from tests.layers.oracle import torch

CLASSES, BATCH, WEIGHT = 4, 5, 0.3
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


CASES = {f.__name__: f for f in (one_task, scales, tasks)}


def data(node, name):
    if node.dtype != "compute":
        return np.random.default_rng(3).integers(0, CLASSES, (BATCH, *node.shape))
    values = random_array((BATCH, *node.shape), name)
    return (values > 0).astype(float) if name == "mask" else values


def terms_alone(node):
    """Yield the weight and the separate loss of every term."""
    for term in node.layer.terms:
        yield term.weight, term.layer(*(node.inputs[i] for i in term.inputs))


def run(node, probed, comm, parts=None, training=True, valid=BATCH):
    """Return the loss, and on rank 0 the gradients of the probed predictions by name. Collective."""
    network = hg.Network({"loss": node})
    names = [name for name in probed if name in network.inputs]
    made = Executor(network, comm, get_backend("numpy"), BATCH, Strategy(parts or {}), "float64", probed=names)
    with made as executor:
        for name, given in network.inputs.items():
            executor.set_input(name, data(given, name))
        executor.mode.valid = valid
        for _ in range(2):  # gradients are scaled once per forward
            executor.forward(training=training)
            value = executor.loss_value()
            executor.backward()
        return value, {name: executor.gather(name, gradient=True) for name in names}


@pytest.mark.parametrize("valid", [BATCH, 3])
@pytest.mark.parametrize("name", CASES)
def test_is_the_weighted_sum_of_its_terms(name, valid):
    probed, node = CASES[name]()
    with Communicator(MPI.COMM_SELF) as alone:
        value, found = run(node, probed, alone, valid=valid)
        parts = [(weight, *run(term, probed, alone, valid=valid)) for weight, term in terms_alone(node)]
    assert value == pytest.approx(sum(weight * loss for weight, loss, _ in parts), rel=1e-14)
    for key, have in found.items():
        want = sum(weight * gradients[key] for weight, _, gradients in parts if key in gradients)
        np.testing.assert_allclose(have, want, rtol=1e-12, atol=1e-16)


@pytest.mark.mpi
@pytest.mark.parametrize("name", CASES)
def test_exact_on_every_grid(name):
    with Communicator(MPI.COMM_SELF) as alone:
        probed, node = CASES[name]()
        want, gradients = run(node, probed, alone)
    with Communicator(MPI.COMM_WORLD) as comm:
        for parts in grids(comm.size, ("sample", "height", "width")):
            probed, node = CASES[name]()
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
            hg.Network({"loss": node}), comm, get_backend("numpy"), BATCH, Strategy({"height": comm.size}), probed=["x"]
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
            with Executor(network, one, get_backend("numpy"), BATCH, strategy, "float64") as executor:
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


def test_refusals():
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
