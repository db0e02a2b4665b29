"""Tests of the metrics that a configuration names, against direct formulas: the same under every cut."""

import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.errors import UserError
from halograd.kernels import get_backend
from halograd.layers.strategy import Strategy
from halograd.testing import grids
from halograd.training import train
from halograd.training.evaluation import Evaluation
from halograd.training.executor import Executor
from halograd.training.log import read_log
from tests.training.cuts import CUTS, overrides_of
from tests.training.runs import write_own

SHAPE, BATCH, CLASSES = (5, 6), 4, 4


def executor(ranks, loss, channels, kind, strategy=None):
    x, t = hg.Input((*SHAPE, channels), "x"), hg.Input((*SHAPE, channels if kind == "compute" else 1), "t", kind)
    network = hg.Network({"prediction": x, "loss": loss(x, t, hg.Input((*SHAPE[:1], 1, 1), "w"))})
    return Executor(network, ranks, get_backend("numpy"), BATCH, strategy, "float64", trainable=False)


def count(comm, metrics, loss, channels, kind, batches):
    """Yield the scores of batches ``(x, t, w, valid)`` under every cut. Collective."""
    with Communicator(comm) as ranks:
        for parts in grids(ranks.size, ("sample", "height", "width")):
            with executor(ranks, loss, channels, kind, Strategy(parts)) as made:
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
    w = rng.random((BATCH, SHAPE[0], 1, 1))
    w[:, 1] = 0
    return w


@pytest.mark.mpi
def test_overlap_of_classes(comm):
    """Class 3 never occurs and is never predicted; class 2 is ignored."""
    rng = np.random.default_rng(4)
    batches = []
    for valid in (4, 3):
        x = rng.standard_normal((BATCH, *SHAPE, CLASSES))
        x[..., 3] = -9
        batches.append((x, rng.integers(0, 3, (BATCH, *SHAPE, 1)), weights(rng), valid))
    some = []
    for x, t, w, n in batches:
        some.append((x[:n].argmax(-1), t[:n, ..., 0], np.broadcast_to(w[:n, ..., 0] > 0, (n, *SHAPE))))
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
        t = rng.standard_normal((BATCH, *SHAPE, 2)) + np.array([3, -1])
        x = t + 0.5 * rng.standard_normal(t.shape)
        x[:, 1] = np.nan
        batches.append((x, t, weights(rng), valid))
    some = [(x[:n], t[:n], np.broadcast_to(w[:n], (n, *SHAPE, 2))) for x, t, w, n in batches]
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
    for found, names in count(comm, [f"weighted:center={center}"], hg.MeanSquaredError(), 2, "compute", batches):
        assert {key: found[key] for key in want} == pytest.approx(want, rel=1e-10)
        assert found["rmse"] != pytest.approx(want["weighted_rmse"], rel=1e-3)
        assert [names[key] for key in want] == ["lower", "lower", "higher"]


def test_scores_of_nothing_are_undefined():
    x, w = np.zeros((BATCH, *SHAPE, 2)), np.zeros((BATCH, SHAPE[0], 1, 1))
    ((found, _),) = count(MPI.COMM_SELF, ["weighted"], hg.MeanSquaredError(), 2, "compute", [(x, x, w, 4)])
    assert [found[key] for key in ("weighted_mae", "weighted_rmse", "anomaly_correlation")] == [None] * 3
    ((found, _),) = count(MPI.COMM_SELF, ["weighted"], hg.MeanSquaredError(), 2, "compute", [(x, x, w + 1, 4)])
    assert found["weighted_rmse"] == 0 and found["anomaly_correlation"] is None
    t, logits = np.zeros((BATCH, *SHAPE, 1), int), np.zeros((BATCH, *SHAPE, 3))
    ((found, _),) = count(MPI.COMM_SELF, ["dice"], hg.SoftmaxCrossEntropy(), 3, "int32", [(logits, t, w + 1, 4)])
    assert (found["dice_foreground"], found["dice_all"]) == (None, 1.0)


def test_overlap_of_numbers_is_refused():
    with (
        Communicator(MPI.COMM_SELF) as ranks,
        executor(ranks, hg.MeanSquaredError(), 2, "compute") as made,
        pytest.raises(UserError, match=r"output\.metrics: dice: .*classes, got .*numbers"),
    ):
        Evaluation(made, metrics=["dice"])


NET = """
from halograd.layers import *

def build():
    x, t = Input((16, 16, 3), "x"), Input((16, 16, 1), "mask", "int32")
    y = Conv(2, 3, padding=1)(Conv(6, 3, padding=1, activation="relu")(x))
    return Network({"prediction": y, "loss": SoftmaxCrossEntropy()(y, t)}, name="own")
"""


def write(folder):
    write_own(folder, NET)


BEST = ["output.metrics=['dice', 'iou:each=true']", "output.best='dice_foreground'", "training.patience=1"]
STEEP = ["schedule={kind='constant', learning_rate=0.3}", "training.epochs=9"]


@pytest.mark.ranks(1, 2, 4)
def test_best_and_the_early_end_follow_them(comm, config):
    """A run ends after the first validation whose foreground Dice is no better, on any cut."""
    for number, cut in enumerate(CUTS[comm.size]):
        sets = [*BEST, *STEEP, *overrides_of(cut), f"output.directory=cut{number}"]
        result = train(config, sets, comm=comm)
        comm.barrier()
        found = [entry["dice_foreground"] for entry in read_log(config.parent / f"cut{number}/log.jsonl", "validation")]
        assert len(found) < 9 and found[-1] <= max(found[:-1]) and found[:-1] == sorted(found[:-1])
        assert result["best"]["value"] == max(found) and result["best"]["name"] == "dice_foreground"
        assert result["validation"]["iou_1"] == pytest.approx(result["validation"]["iou_foreground"])
