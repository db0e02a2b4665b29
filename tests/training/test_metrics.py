"""Tests of metrics against direct computation, under every cut, with short batches: of losses, named, and a user's."""

import json
import math
from itertools import product

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.errors import UserError
from halograd.kernels import get_backend
from halograd.layers import MetricSpec
from halograd.layers.strategy import Strategy
from halograd.report.page import write_page
from halograd.report.status import read_record
from halograd.testing import grids
from halograd.training import Metric, evaluate, train
from halograd.training.evaluation import Evaluation
from halograd.training.executor import Executor
from halograd.training.log import read_log
from halograd.training.metrics import (
    BINS,
    Calibration,
    Confusion,
    Errors,
    by_class,
    counted,
    read_details,
    scores,
    sigmoid,
    write_details,
)
from tests.training.cuts import CUTS, overrides_of
from tests.training.runs import EDGE, SAMPLES, write_named, write_own, written

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


NAMED_SHAPE, NAMED_BATCH, CLASSES = (5, 6), 4, 4


def named_executor(ranks, loss, channels, kind, strategy=None):
    x, t = (
        hg.Input((*NAMED_SHAPE, channels), "x"),
        hg.Input((*NAMED_SHAPE, channels if kind == "compute" else 1), "t", kind),
    )
    network = hg.Network({"prediction": x, "loss": loss(x, t, hg.Input((*NAMED_SHAPE[:1], 1, 1), "w"))})
    return Executor(network, ranks, get_backend("numpy"), NAMED_BATCH, strategy, "float64", trainable=False)


def count(comm, metrics, loss, channels, kind, batches):
    """Yield the scores of batches ``(x, t, w, valid)`` under every cut. Collective."""
    with Communicator(comm) as ranks:
        for parts in grids(ranks.size, ("sample", "height", "width")):
            with named_executor(ranks, loss, channels, kind, Strategy(parts)) as made:
                evaluation = Evaluation(made, metrics=metrics)
                evaluation.begin()
                for x, t, w, made.mode.valid in batches:
                    for name, array in (("x", x), ("t", t), ("w", w)):
                        made.set_input(name, array)
                    made.forward(training=False)
                    evaluation.add()
                yield evaluation.finish(), evaluation.names
                evaluation.close()


def weights(rng):
    w = rng.random((NAMED_BATCH, NAMED_SHAPE[0], 1, 1))
    w[:, 1] = 0
    return w


@pytest.mark.mpi
def test_overlap_of_classes(comm):
    """Class 3 never occurs and is never predicted; class 2 is ignored."""
    rng = np.random.default_rng(4)
    batches = []
    for valid in (4, 3):
        x = rng.standard_normal((NAMED_BATCH, *NAMED_SHAPE, CLASSES))
        x[..., 3] = -9
        batches.append((x, rng.integers(0, 3, (NAMED_BATCH, *NAMED_SHAPE, 1)), weights(rng), valid))
    some = []
    for x, t, w, n in batches:
        some.append((x[:n].argmax(-1), t[:n, ..., 0], np.broadcast_to(w[:n, ..., 0] > 0, (n, *NAMED_SHAPE))))
    guess, truth, counts = (np.concatenate(arrays) for arrays in zip(*some))
    counts &= truth != 2
    guess, truth = guess[counts], truth[counts]
    dice, iou = [], []
    for c in range(3):
        hits, either = ((guess == c) & (truth == c)).sum(), ((guess == c) | (truth == c)).sum()
        dice.append(2 * hits / (hits + either))
        iou.append(hits / either)
    loss = hg.SoftmaxCrossEntropy(ignore_index=2)
    for found, names in count(comm, ["dice:each=true", "iou"], loss, CLASSES, "int32", batches):
        assert found["dice_foreground"] == pytest.approx(np.mean(dice[1:])) != found["dice_all"]
        assert found["dice_all"] == pytest.approx(np.mean(dice)) == pytest.approx(found["f1"])
        assert [found[f"dice_{c}"] for c in range(CLASSES)] == [*map(pytest.approx, dice), None]
        assert (found["iou_foreground"], found["iou_all"]) == pytest.approx((np.mean(iou[1:]), np.mean(iou)))
        assert "iou_0" not in found and names["dice_3"] == names["iou_foreground"] == "higher"


@pytest.mark.mpi
@pytest.mark.parametrize("center", ["mean", "none"])
def test_weighted_errors(comm, center):
    """Where the weight is 0, a prediction may be NaN."""
    rng = np.random.default_rng(5)
    batches = []
    for valid in (4, 3):
        t = rng.standard_normal((NAMED_BATCH, *NAMED_SHAPE, 2)) + np.array([3, -1])
        x = t + 0.5 * rng.standard_normal(t.shape)
        x[:, 1] = np.nan
        batches.append((x, t, weights(rng), valid))
    some = [(x[:n], t[:n], np.broadcast_to(w[:n], (n, *NAMED_SHAPE, 2))) for x, t, w, n in batches]
    x, t, w = (np.concatenate(arrays) for arrays in zip(*some))
    x = np.where(w > 0, x, 0)
    each = []
    for a, b, v in zip(*(np.moveaxis(array, -1, 0) for array in (x, t, w))):
        if center == "mean":
            a, b = a - np.average(a, weights=v), b - np.average(b, weights=v)
        each.append((v * a * b).sum() / np.sqrt((v * a * a).sum() * (v * b * b).sum()))
    want = {
        "weighted_mae": np.average(np.abs(x - t), weights=w),
        "weighted_rmse": np.sqrt(np.average((x - t) ** 2, weights=w)),
        "anomaly_correlation": np.mean(each),
    }
    for c in range(2):
        parts = x[..., c], t[..., c], w[..., c]
        want[f"weighted_rmse_{c}"] = np.sqrt(np.average((parts[0] - parts[1]) ** 2, weights=parts[2]))
        want[f"anomaly_correlation_{c}"] = each[c]
    name = f"weighted:center={center},each=true"
    for found, names in count(comm, [name], hg.MeanSquaredError(), 2, "compute", batches):
        assert {key: found[key] for key in want} == pytest.approx(want, rel=1e-10)
        assert found["rmse"] != pytest.approx(want["weighted_rmse"], rel=1e-3)
        assert [names[key] for key in want] == ["lower", "lower", "higher", *["lower", "higher"] * 2]


def test_scores_of_nothing_are_undefined():
    x, w = np.zeros((NAMED_BATCH, *NAMED_SHAPE, 2)), np.zeros((NAMED_BATCH, NAMED_SHAPE[0], 1, 1))
    ((found, _),) = count(MPI.COMM_SELF, ["weighted"], hg.MeanSquaredError(), 2, "compute", [(x, x, w, 4)])
    assert "weighted_mae_0" not in found
    assert [found[key] for key in ("weighted_mae", "weighted_rmse", "anomaly_correlation")] == [None] * 3
    ((found, _),) = count(MPI.COMM_SELF, ["weighted"], hg.MeanSquaredError(), 2, "compute", [(x, x, w + 1, 4)])
    assert found["weighted_rmse"] == 0 and found["anomaly_correlation"] is None
    t, logits = np.zeros((NAMED_BATCH, *NAMED_SHAPE, 1), int), np.zeros((NAMED_BATCH, *NAMED_SHAPE, 3))
    ((found, _),) = count(MPI.COMM_SELF, ["dice"], hg.SoftmaxCrossEntropy(), 3, "int32", [(logits, t, w + 1, 4)])
    assert (found["dice_foreground"], found["dice_all"]) == (None, 1.0)


def test_overlap_of_numbers_is_refused():
    with (
        Communicator(MPI.COMM_SELF) as ranks,
        named_executor(ranks, hg.MeanSquaredError(), 2, "compute") as made,
        pytest.raises(UserError, match=r"output\.metrics: dice: .*classes, got .*numbers"),
    ):
        Evaluation(made, metrics=["dice"])


NAMED_NET = """
from halograd.layers import *

def build():
    x, t = Input((16, 16, 3), "x"), Input((16, 16, 1), "mask", "int32")
    y = Conv(2, 3, padding=1)(Conv(6, 3, padding=1, activation="relu")(x))
    return Network({"prediction": y, "loss": SoftmaxCrossEntropy()(y, t)}, name="own")
"""


@written
def named(folder):
    write_own(folder, NAMED_NET)


BEST = ["output.metrics=['dice', 'iou:each=true']", "output.best='dice_foreground'", "training.patience=1"]
NAMED_STEEP = ["schedule={kind='constant', learning_rate=0.3}", "training.epochs=9"]


@pytest.mark.ranks(1, 2, 4)
def test_best_and_the_early_end_follow_them(comm, named):
    """A run ends after the first validation whose foreground Dice is no better, on any cut."""
    for number, cut in enumerate(CUTS[comm.size]):
        sets = [*BEST, *NAMED_STEEP, *overrides_of(cut), f"output.directory=cut{number}"]
        result = train(named, sets, comm=comm)
        comm.barrier()
        found = [entry["dice_foreground"] for entry in read_log(named.parent / f"cut{number}/log.jsonl", "validation")]
        assert len(found) < 9 and found[-1] <= max(found[:-1]) and found[:-1] == sorted(found[:-1])
        assert result["best"]["value"] == max(found) and result["best"]["name"] == "dice_foreground"
        assert result["validation"]["iou_1"] == pytest.approx(result["validation"]["iou_foreground"])


OWN_NET = """
import numpy as np
import halograd as hg
from halograd.training import Metric
from halograd.training.metrics import counted

class Shares(Metric):
    better = {{"drag": "lower", "agreement": "higher"}}

    def __init__(self):
        self.counts = np.zeros(3, np.int64)

    def add(self, prediction, target, weights=None):
        some = np.ones(prediction.shape, bool) if weights is None else counted(weights, prediction.shape)
        wrong = (prediction[some] > 0) != (target[some] > 0.5)
        self.counts += wrong.size, wrong.sum(), (wrong & (target[some] > 0.5)).sum()

    def scores(self):
        n, wrong, missed = self.counts
        return {{name: value / n if n else None for name, value in
                (("drag", wrong), ("agreement", n - wrong), ("missed", missed))}}

class Own(hg.BinaryCrossEntropyWithLogits):
    def metric_specs(self, prediction, target):
        return (hg.layers.MetricSpec(2, threshold=0.0, metric=Shares),)

def build():
    x = hg.Input(({edge}, {edge}, 3), name="x")
    y = hg.Conv(1, 3, padding=1)(hg.Conv(4, 3, padding=1, activation="relu")(x))
    return hg.Network({{"prediction": y, "loss": Own()(y, hg.Input(y.shape, name="target"))}})
"""


@written
def own(folder):
    write_own(folder, OWN_NET.format(edge=EDGE))


OWN_STEEP = ["training.epochs=8", "schedule={kind='constant', learning_rate=0.3}", "output.checkpoint_epochs=0"]


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize(("name", "choose"), [("drag", min), ("agreement", max)])
def test_its_direction_decides(comm, own, name, choose):
    """The direction that a metric declares decides which score is better, whatever its name, under every cut."""
    for number, cut in enumerate(CUTS[comm.size]):
        sets = [*overrides_of(cut), *OWN_STEEP, f"output.directory=cut{number}", f'output.best="{name}"']
        result = train(own, sets, comm=comm)
        comm.barrier()
        entries = read_log(own.parent / f"cut{number}/log.jsonl", "validation")
        found = {entry["step"]: entry[name] for entry in entries}
        assert result["best"]["step"] == choose(found, key=found.get) and len(set(found.values())) > 1
        assert result["best"]["step"] != (min if choose is max else max)(found, key=found.get)
        assert all(entry["drag"] + entry["agreement"] == pytest.approx(1) for entry in entries)
        again = evaluate(own, sets, details=f"details{number}.json", comm=comm)
        assert again[name] == found[24]
        comm.barrier()
        if comm.rank == 0:
            alone = train(own, [*sets[len(overrides_of(cut)) :], f"output.directory=a{number}"], comm=MPI.COMM_SELF)
            assert alone["best"] == result["best"]
            (details,) = json.loads((own.parent / f"details{number}.json").read_text())["predictions"]
            assert details["kind"] == "own" and details["counts"][0] == 6 * EDGE * EDGE
            folder = own.parent / f"cut{number}"
            write_page(read_record(folder), folder / "report.html", details=own.parent / f"details{number}.json")
            assert "agreement" in (folder / "report.html").read_text()
        comm.barrier()


@pytest.mark.ranks(1, 2)
def test_training_ends_early_by_it(comm, own):
    sets = [*OWN_STEEP, 'output.best="drag"']
    train(own, [*sets, "output.directory=whole"], comm=comm)
    result = train(own, [*sets, "output.directory=early", "training.patience=1"], comm=comm)
    whole, early = (
        [(entry["step"], entry["drag"]) for entry in read_log(own.parent / out / "log.jsonl", "validation")]
        for out in ("whole", "early")
    )
    ends = next(k for k in range(1, len(whole)) if whole[k][1] >= min(drag for _, drag in whole[:k]))
    assert early == whole[: ends + 1] and ends + 1 < len(whole)
    assert result["best"]["step"] == min(whole[:ends], key=lambda one: one[1])[0]


@pytest.mark.ranks(1, 2)
def test_a_score_without_a_direction_is_refused(comm, own):
    """A best score without a known direction is an error before the run, on all ranks; the score itself is computed."""
    with pytest.raises(UserError, match=r"output\.best: .*got 'missed'; .* better = \{"):
        train(own, ['output.best="missed"'], comm=comm)
    assert train(own, comm=comm)["validation"]["missed"] is not None


class Sum(Metric):
    """Metric: mean of the predictions whose weight is above 0."""

    def __init__(self):
        self.counts = np.zeros(2)

    def add(self, prediction, target, weights=None):
        some = counted(weights, prediction.shape)
        self.counts += some.sum(), prediction[some].sum()

    def scores(self):
        return {"mean": self.counts[1] / self.counts[0] if self.counts[0] else None}


class Loss(hg.MeanSquaredError):
    metric = Sum

    def metric_specs(self, prediction, target):
        return (MetricSpec(metric=self.metric),)


def own_executor(ranks, metric=Sum, parts=None):
    x, t, w = (hg.Input((4, 6, 1), name) for name in "xtw")
    loss = hg.MeanSquaredError()(x, t) + Loss().changed(metric=metric)(hg.ReLU(name="relu")(x), t, w)
    network = hg.Network({"prediction": x, "loss": loss})
    return Executor(network, ranks, get_backend("numpy"), 2, hg.Strategy(parts or {}), "float32", False)


@pytest.mark.ranks(1, 2, 4)
def test_of_a_second_prediction_with_weights(comm):
    rng = np.random.default_rng(1)
    arrays = {name: rng.integers(-8, 8, (2, 4, 6, 1)).astype(np.float32) for name in "xt"}
    arrays["w"] = rng.integers(0, 2, (2, 4, 6, 1)).astype(np.float32)
    want = np.maximum(arrays["x"], 0)[arrays["w"] > 0].mean(dtype=np.float64)
    with Communicator(comm) as ranks, own_executor(ranks, parts={"height": comm.size}) as made:
        evaluation = Evaluation(made)
        assert evaluation.names["relu mean"] is None and evaluation.names["mae"] == evaluation.names["loss"] == "lower"
        for name, array in arrays.items():
            made.set_input(name, array)
        made.forward(training=False)
        evaluation.add()
        assert evaluation.finish()["relu mean"] == want
        evaluation.close()


class Broken(Sum):
    def scores(self):
        raise ZeroDivisionError


def changed(**attributes):
    return type("Own", (Sum,), attributes)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (dict, "metric of 'relu': expected a halograd.training.Metric, got dict"),
        (changed(__init__=lambda self: None), "array of int64 or float64, got NoneType"),
        (changed(__init__=lambda self: setattr(self, "counts", np.zeros(2, "f4"))), "got an array of float32"),
        (changed(scores=lambda self: {}), "names of scores() other than loss, event, time, epoch, step, got none"),
        (changed(scores=lambda self: {"loss": None, "step": 1.0}), "got ['loss', 'step']"),
        (changed(better={"mean": "less"}), """"lower" or "higher" for each, got 'mean': 'less'"""),
        (changed(better={"other": "lower"}), """better: expected scores (mean) and "lower" or"""),
        (changed(add=lambda self, x, t: None), "Own.add: expected a method that takes (self, prediction, target, weig"),
        (Broken, "metric Broken of 'relu': expected scores() to work without counts (None: undefined), got ZeroDiv"),
    ],
)
def test_what_is_no_metric_is_refused(comm, metric, message):
    with Communicator(comm) as ranks, own_executor(ranks, metric) as made, pytest.raises(UserError) as error:
        Evaluation(made)
    assert message in str(error.value) and "'relu'" * ("add" not in message) in str(error.value)


DETAILS_NET = """
import halograd as hg

def build():
    x = hg.Input((16, 16, 2), name="x")
    mask, kind = hg.Input((16, 16, 1), "mask", "int32"), hg.Input((1,), "kind", "int32")
    valid, yes = hg.Input((16, 16, 1), "valid"), hg.Input((16, 16, 2), "yes")
    y = hg.Conv(4, 3, padding=1, activation="relu")(x)
    logits, whole = hg.Conv(4, 1, name="logits")(y), hg.Dense(3, name="whole")(hg.GlobalAveragePool()(y))
    answers = hg.Conv(2, 1, name="answers")(y)
    loss = hg.SoftmaxCrossEntropy(ignore_index=-1)(logits, mask, valid) + hg.SoftmaxCrossEntropy()(whole, kind)
    loss = loss + hg.BinaryCrossEntropyWithLogits()(answers, yes)
    return hg.Network({"prediction": logits, "kind": whole, "answers": answers, "loss": loss}, name="judged")
"""
DATA = """
validation = 0.5
inputs = "u"
targets = {mask = "label", kind = "kind", valid = "valid", yes = "yes"}
"""


@written
def details(folder):
    rng = np.random.default_rng(5)
    arrays = {
        "u": rng.standard_normal((SAMPLES, EDGE, EDGE, 2)),
        "label": rng.integers(-1, 3, (SAMPLES, EDGE, EDGE)),  # class 3 is nowhere
        "kind": rng.integers(0, 3, SAMPLES),
        "valid": rng.integers(0, 2, (SAMPLES, EDGE, EDGE)),
        "yes": rng.integers(0, 2, (SAMPLES, EDGE, EDGE, 2)),
    }
    write_named(folder, DETAILS_NET, DATA, arrays, u="NHWC")


# -- by NumPy ----------------------------------------------------------------------------------------


def confusion(guess, truth, classes):
    counts = np.zeros((classes, classes), int)
    for t, g in zip(truth.tolist(), guess.tolist()):
        counts[t, g] += 1
    return counts


def reliability(probability, true):
    """Return count, mean probability and frequency of each bin, and the expected calibration error."""
    rows, error = [], 0.0
    for k in range(BINS):
        last = k == BINS - 1
        some = (probability >= k / BINS) & ((probability < (k + 1) / BINS) | last)
        n = int(some.sum())
        rows.append((n, probability[some].mean() if n else None, true[some].mean() if n else None))
        error += n * abs(rows[-1][1] - rows[-1][2]) / len(true) if n else 0.0
    return rows, error


def check(found, guess, truth, probability, true, classes):
    counts = confusion(guess, truth, classes)
    assert found["confusion"] == counts.tolist()
    for c, row in enumerate(found["by_class"]):
        both, either = ((truth == c) & (guess == c)).sum(), ((truth == c) | (guess == c)).sum()
        assert (row["count"], row["predicted"]) == ((truth == c).sum(), (guess == c).sum())
        assert row["iou"] == (pytest.approx(both / either) if either else None)
        assert row["recall"] == (pytest.approx(both / (truth == c).sum()) if (truth == c).any() else None)
        assert row["precision"] == (pytest.approx(both / (guess == c).sum()) if (guess == c).any() else None)
    rows, error = reliability(probability, true)
    assert found["calibration"]["error"] == pytest.approx(error, abs=1e-6)
    for row, (count, mean, frequency) in zip(found["calibration"]["bins"], rows):
        assert row["count"] == count
        assert row["probability"] == (None if mean is None else pytest.approx(mean, abs=1e-6))
        assert row["frequency"] == (None if frequency is None else pytest.approx(frequency))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.mpi
def test_as_numpy_finds_on_every_cut(comm, details):
    """Details equal NumPy's under every cut, for ignored positions, classes per sample, and two outputs."""
    train(details, [f"strategy.sample={comm.size}", "training.epochs=1"], comm=comm)
    for cut in CUTS[comm.size]:
        sets = ["strategy={}", *overrides_of(cut)]
        evaluate(details, sets, predictions="p.h5", details="details.json", comm=comm)
    if comm.rank:
        return
    evaluate(details, ["strategy={}"], details="alone.json", comm=MPI.COMM_SELF)
    with open("details.json") as mine, open("alone.json") as theirs:
        found, alone = json.load(mine), json.load(theirs)
    assert [one["confusion"] for one in found["predictions"]] == [one["confusion"] for one in alone["predictions"]]
    assert found["count"] == 10 and found["samples"] == "validation" and found["loss"] == pytest.approx(alone["loss"])
    mask, kind, answers = found["predictions"]
    assert [one["name"] for one in (mask, kind, answers)] == ["prediction", "kind", "answers"]
    with h5py.File("p.h5") as file, h5py.File("data.h5") as data:
        x, t = file["prediction"][()], file["target"][..., 0]
        some = (data["valid"][()][file["sample"][()]] > 0) & (t != -1)
        p, truth = softmax(x)[some], t[some]
        check(mask, p.argmax(-1), truth, p.max(-1), p.argmax(-1) == truth, 4)
        assert mask["by_class"][3]["recall"] is None
        p, truth = softmax(file["kind/prediction"][()]), file["kind/target"][:, 0]
        check(kind, p.argmax(-1), truth, p.max(-1), p.argmax(-1) == truth, 3)
        p, truth = 1 / (1 + np.exp(-file["answers/prediction"][()].ravel())), file["answers/target"][()].ravel() >= 0.5
        check(answers, (p > 0.5).astype(int), truth.astype(int), p, truth, 2)


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=40), st.integers(0, 40))
def test_calibration_is_its_definition_in_any_order(given, cut):
    """Calibration follows its definition, in any order of the samples; counts of two parts add up to the whole."""
    p, true = np.array([q for q, _ in given], float), np.array([t for _, t in given], bool)
    whole, first, second = Calibration(), Calibration(), Calibration()
    whole.add(p, true)
    first.add(p[:cut], true[:cut])
    second.add(p[cut:][::-1], true[cut:][::-1])
    assert np.array_equal(whole.counts, first.counts + second.counts)
    found = whole.result()
    assert sum(row["count"] for row in found["bins"]) == len(given)
    if not given:
        assert found["error"] is None
        return
    where = np.minimum((p * BINS).astype(int), BINS - 1)
    error = sum(abs(p[where == k].sum() - true[where == k].sum()) for k in range(BINS)) / len(p)
    assert found["error"] == pytest.approx(error, abs=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_small_probabilities_are_accurate(dtype):
    """A probability near 0 has the relative accuracy of its dtype, where ``(1 + tanh(x / 2)) / 2`` would be 0."""
    x = np.linspace(-80, 80, 641).astype(dtype)
    wide = x.astype(np.longdouble)
    exact = np.where(wide < 0, np.exp(wide), 1) / (1 + np.exp(-np.abs(wide)))
    y = sigmoid(x)
    assert y.dtype == dtype
    assert np.max(np.abs(y / exact - 1)) < 4 * np.finfo(dtype).eps
    with np.errstate(over="raise"):
        assert sigmoid(np.array([-1e30, -np.inf, np.inf, 1e30], dtype)).tolist() == [0, 0, 1, 1]


def test_probabilities_that_are_some_already():
    """The calibration of a loss of probabilities uses the predictions without a sigmoid."""
    p, t = np.array([[0.9], [0.2], [0.6]]), np.array([[1.0], [0.0], [0.0]])
    made = Confusion(2, 0.5, probabilities=True)
    made.calibration = Calibration()
    made.add(p, t)
    found = made.details()["calibration"]
    assert found["error"] == pytest.approx((0.1 + 0.2 + 0.6) / 3, abs=1e-6)


def test_of_nothing():
    assert by_class(np.zeros((2, 2), int))[0] == {
        **{"class": 0, "count": 0, "predicted": 0},
        **dict.fromkeys(("iou", "precision", "recall", "f1")),
    }


def test_what_is_no_number_is_null(tmp_path):
    """Values that are not finite are written as null, which JSON permits, so a diverged network can be evaluated."""
    write_details(tmp_path / "d.json", {"loss": math.nan}, [{"scores": {"rmse": math.inf, "mae": 1.0}, "bins": [0.5]}])
    found = read_details(tmp_path / "d.json")
    assert found["loss"] is None and found["predictions"] == [{"scores": {"rmse": None, "mae": 1.0}, "bins": [0.5]}]
