"""Tests of metrics against direct computation over the whole array, on several ranks and with short batches."""

from itertools import product

import numpy as np
import pytest

import halograd as hg
from halograd.comm import Communicator
from halograd.kernels import get_backend
from halograd.layers.strategy import Strategy
from halograd.testing import grids
from halograd.training.evaluation import Evaluation
from halograd.training.executor import Executor
from halograd.training.metrics import Confusion, Errors, scores

BATCH, SHAPE = 4, (6, 5)


def direct(guess, truth, classes):
    """Return the confusion counts by the definition, element by element."""
    counts = np.zeros((classes, classes), np.int64)
    for g, t in zip(guess.reshape(-1), truth.reshape(-1)):
        counts[int(t), int(g)] += 1
    return counts


def test_scores_of_two_classes():
    found = scores(np.array([[50, 10], [5, 35]]))
    assert found == pytest.approx(
        {"accuracy": 0.85, "iou": 35 / 50, "f1": 70 / 85, "precision": 35 / 45, "recall": 35 / 40}
    )


def test_scores_of_many_classes():
    """A class that neither occurs nor is predicted does not lower mean scores."""
    counts = np.zeros((3, 3), np.int64)
    counts[:2, :2] = [[3, 1], [2, 4]]
    found = scores(counts)
    assert found["iou"] == pytest.approx((3 / 6 + 4 / 7) / 2) and found["f1"] == pytest.approx((6 / 9 + 8 / 11) / 2)


def test_scores_of_nothing():
    assert set(scores(np.zeros((2, 2), np.int64)).values()) == {None}
    assert Errors().scores() == {"mae": None, "rmse": None}


def test_classes():
    with pytest.raises(ValueError, match="classes: expected at least 2, got 1"):
        Confusion(1)


def test_ignored_positions():
    confusion = Confusion(3, ignored=-1)
    confusion.add(np.eye(3)[[0, 1, 2, 2]], np.array([[0], [2], [-1], [2]]))
    assert confusion.counts.tolist() == [[1, 0, 0], [0, 0, 0], [0, 1, 1]]


def network(case):
    """Return a network that is only a loss of two inputs, so that the test sets the predictions."""
    channels, target, dtype, loss = {
        "binary": (1, 1, "compute", hg.BinaryCrossEntropyWithLogits()),
        "labels": (3, 3, "compute", hg.BinaryCrossEntropyWithLogits()),
        "classes": (3, 1, "int32", hg.SoftmaxCrossEntropy(ignore_index=2)),
        "dice": (1, 1, "compute", hg.Dice()),
        "dice softmax": (3, 1, "int32", hg.Dice("softmax")),
        "dice one-hot": (3, 3, "compute", hg.Dice("softmax")),
        "regression": (2, 2, "compute", hg.MeanSquaredError()),
    }[case]
    x, t = hg.Input((*SHAPE, channels), "x"), hg.Input((*SHAPE, target), "target", dtype)
    return hg.Network({"prediction": x, "loss": loss(x, t)}, name=case)


def batches(case):
    """Yield two full batches and a short one: prediction, target, number of valid samples."""
    inputs = network(case).inputs
    for step, valid in enumerate((BATCH, BATCH, 3)):
        rng = np.random.default_rng(step)
        x = rng.standard_normal((BATCH, *inputs["x"].shape))
        shape = (BATCH, *inputs["target"].shape)
        if inputs["target"].dtype == "int32":
            t = rng.integers(0, 3, shape).astype(np.int32)
        elif case == "dice one-hot":
            t = np.eye(3)[rng.integers(0, 3, shape[:-1])]
        else:
            t = rng.random(shape)
        yield x, t, valid


def expected(case):
    total = 0
    for x, t, valid in batches(case):
        x, t = x[:valid], t[:valid]
        if case == "regression":
            total = total + np.array([x.size, np.abs(x - t).sum(), ((x - t) ** 2).sum()])
        elif case in ("binary", "labels", "dice"):
            total = total + direct(x > 0, t >= 0.5, 2)
        else:
            truth = np.argmax(t, -1) if case == "dice one-hot" else t[..., 0]
            counted = truth != 2 if case == "classes" else np.ones(truth.shape, bool)
            total = total + direct(np.argmax(x, -1)[counted], truth[counted], 3)
    return total


CASES = ["binary", "labels", "classes", "dice", "dice softmax", "dice one-hot", "regression"]


@pytest.mark.mpi
@pytest.mark.parametrize("case", CASES)
def test_evaluation(comm, case):
    with Communicator(comm) as ranks:
        for parts in grids(ranks.size, ("sample", "height", "width")):
            strategy = Strategy(parts)
            with Executor(network(case), ranks, get_backend("numpy"), BATCH, strategy, "float64", False) as executor:
                evaluation = Evaluation(executor)
                for _ in range(2):  # again from the start
                    evaluation.begin()
                    losses = []
                    for x, t, valid in batches(case):
                        executor.set_input("x", x)
                        executor.set_input("target", t)
                        executor.mode.valid = valid
                        executor.forward(training=False)
                        losses.append(evaluation.add())
                    found = evaluation.finish()
                want = expected(case)
                np.testing.assert_allclose(evaluation.counted.counts, want, rtol=1e-13 if case == "regression" else 0)
                if case == "regression":
                    assert found["rmse"] == pytest.approx(np.sqrt(want[2] / want[0]), rel=1e-12)
                else:
                    assert {k: found[k] for k in scores(want)} == scores(want)
                want = counted_loss() if case == "classes" else np.average(losses, weights=[4, 4, 3])
                assert found["loss"] == pytest.approx(want, rel=1e-13)
                evaluation.close()


def counted_loss():
    """Return the loss of the case "classes" by its definition: the mean over all positions that are not ignored."""
    each = []
    for x, t, valid in batches("classes"):
        logits, truth = x[:valid], t[:valid]
        losses = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, truth, -1)[..., 0]
        each.append(losses[truth[..., 0] != 2])
    return np.concatenate(each).mean()


def weighted():
    """Return a network with a sum of weighted losses, one of classes, and one for training only."""
    x, y = hg.Input((*SHAPE, 3), "x"), hg.Input((1,), "y")
    t, w = hg.Input((*SHAPE, 1), "t", "int32"), hg.Input((*SHAPE, 1), "w")
    z, v = hg.Input((1,), "z"), hg.Input((1,), "v")
    classes = hg.SoftmaxCrossEntropy([1.0, 2.0, 3.0])(x, t, w)
    loss = 0.5 * classes + hg.MeanSquaredError(normalization="weights")(y, z, v) + 0.25 * hg.MeanSquaredError()(y, z)
    extra = hg.training_only(hg.Huber(normalization="weights")(y, z, v))
    return hg.Network({"prediction": x, "other": y, "loss": loss + extra}, name="weighted")


def weighted_samples():
    rng = np.random.default_rng(9)
    found = {n: rng.standard_normal((8, *node.shape)) for n, node in weighted().inputs.items()}
    found["t"], found["w"] = rng.integers(0, 3, (8, *SHAPE, 1)).astype(np.int32), rng.random((8, *SHAPE, 1))
    found["v"] = rng.random((8, 1))
    for name in ("w", "v"):
        found[name][2:5] = 0  # so that whole batches of 1 and 2 samples have no weight
    return found


@pytest.mark.ranks(1, 2, 4)
def test_the_loss_does_not_depend_on_the_batch(comm):
    given = weighted_samples()
    difference = (given["y"] - given["z"])[:, 0] ** 2
    weights = np.array([1.0, 2.0, 3.0])[given["t"]][..., 0] * given["w"][..., 0]
    logits = given["x"]
    losses = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, given["t"], -1)[..., 0]
    want = 0.5 * (weights * losses).sum() / weights.sum() + 0.25 * difference.mean()
    want += (given["v"][:, 0] * difference).sum() / given["v"].sum()
    with Communicator(comm) as ranks:
        for parts, batch in product(grids(ranks.size, ("sample", "height", "width")), (1, 2, 3, 8)):
            strategy = Strategy(parts)
            with Executor(weighted(), ranks, get_backend("numpy"), batch, strategy, "float64", False) as executor:
                evaluation = Evaluation(executor)
                for first in range(0, 8, batch):
                    executor.mode.valid = len(given["x"][first : first + batch])
                    for name, array in given.items():
                        some = np.zeros((batch, *array.shape[1:]), array.dtype)
                        some[: executor.mode.valid] = array[first : first + batch]
                        executor.set_input(name, some)
                    executor.forward(training=False)
                    evaluation.add()
                assert evaluation.finish()["loss"] == pytest.approx(want, rel=1e-13)
                evaluation.close()


@pytest.mark.ranks(1)
def test_no_loss(comm):
    net = hg.Network(hg.ReLU()(hg.Input((4, 4, 1))), name="bare")
    with (
        Communicator(comm) as ranks,
        Executor(net, ranks, get_backend("numpy"), 1, trainable=False) as executor,
        pytest.raises(ValueError, match="network 'bare': expected a loss layer"),
    ):
        Evaluation(executor)
