"""Metrics against direct computation over the whole array, on several ranks and with short batches."""

import numpy as np
import pytest

from halograd.layers import BinaryCrossEntropyWithLogits, Dice, Input, MeanSquaredError, Network, SoftmaxCrossEntropy
from halograd.training.metrics import Confusion, Errors, Evaluation, scores

BATCH, SHAPE = 4, (6, 5)


def direct(guess, truth, classes):
    """Counts by the definition, element by element."""
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
    """Class 2 neither occurs nor is predicted: it does not lower the mean."""
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
    """A loss of two inputs: predictions are what the test says."""
    channels, target, dtype, loss = {
        "binary": (1, 1, "compute", BinaryCrossEntropyWithLogits()),
        "labels": (3, 3, "compute", BinaryCrossEntropyWithLogits()),
        "classes": (3, 1, "int32", SoftmaxCrossEntropy(ignore_index=2)),
        "dice": (1, 1, "compute", Dice()),
        "dice softmax": (3, 1, "int32", Dice("softmax")),
        "dice one-hot": (3, 3, "compute", Dice("softmax")),
        "regression": (2, 2, "compute", MeanSquaredError()),
    }[case]
    x, t = Input((*SHAPE, channels), "x"), Input((*SHAPE, target), "target", dtype)
    return Network({"prediction": x, "loss": loss(x, t)}, name=case)


def batches(case):
    """Two full batches and a short one."""
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
    from halograd.comm import Communicator
    from halograd.kernels import get_backend
    from halograd.layers.strategy import Strategy
    from halograd.testing import grids
    from halograd.training.executor import Executor

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
                assert found["loss"] == pytest.approx(np.average(losses, weights=[4, 4, 3]), rel=1e-13)
                evaluation.close()


@pytest.mark.ranks(1)
def test_no_loss(comm):
    from halograd.comm import Communicator
    from halograd.kernels import get_backend
    from halograd.layers import ReLU
    from halograd.training.executor import Executor

    net = Network(ReLU()(Input((4, 4, 1))), name="bare")
    with (
        Communicator(comm) as ranks,
        Executor(net, ranks, get_backend("numpy"), 1, trainable=False) as executor,
        pytest.raises(ValueError, match="network 'bare' has no loss layer"),
    ):
        Evaluation(executor)
