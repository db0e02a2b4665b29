"""Tests of a user's metrics: the same under every cut, and compared in their own direction."""

import json

import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.errors import UserError
from halograd.kernels import get_backend
from halograd.layers import MetricSpec
from halograd.report.page import write_page
from halograd.report.status import read_record
from halograd.training import Executor, Metric, evaluate, train
from halograd.training.evaluation import Evaluation
from halograd.training.log import read_log
from halograd.training.metrics import counted
from tests.training.cuts import CUTS, overrides_of
from tests.training.runs import EDGE, write_own

NET = """
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


def write(folder):
    write_own(folder, NET.format(edge=EDGE))


STEEP = ["training.epochs=8", "schedule={kind='constant', learning_rate=0.3}", "output.checkpoint_epochs=0"]


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize(("name", "choose"), [("drag", min), ("agreement", max)])
def test_its_direction_decides(comm, config, name, choose):
    """The direction that a metric declares decides which score is better, whatever its name, under every cut."""
    for number, cut in enumerate(CUTS[comm.size]):
        sets = [*overrides_of(cut), *STEEP, f"output.directory=cut{number}", f'output.best="{name}"']
        result = train(config, sets, comm=comm)
        comm.barrier()
        entries = read_log(config.parent / f"cut{number}/log.jsonl", "validation")
        found = {entry["step"]: entry[name] for entry in entries}
        assert result["best"]["step"] == choose(found, key=found.get) and len(set(found.values())) > 1
        assert result["best"]["step"] != (min if choose is max else max)(found, key=found.get)
        assert all(entry["drag"] + entry["agreement"] == pytest.approx(1) for entry in entries)
        again = evaluate(config, sets, details=f"details{number}.json", comm=comm)
        assert again[name] == found[24]
        comm.barrier()
        if comm.rank == 0:
            alone = train(config, [*sets[len(overrides_of(cut)) :], f"output.directory=a{number}"], comm=MPI.COMM_SELF)
            assert alone["best"] == result["best"]
            (details,) = json.loads((config.parent / f"details{number}.json").read_text())["predictions"]
            assert details["kind"] == "own" and details["counts"][0] == 6 * EDGE * EDGE
            folder = config.parent / f"cut{number}"
            write_page(read_record(folder), folder / "report.html", details=config.parent / f"details{number}.json")
            assert "agreement" in (folder / "report.html").read_text()
        comm.barrier()


@pytest.mark.ranks(1, 2)
def test_training_ends_early_by_it(comm, config):
    sets = [*STEEP, 'output.best="drag"']
    train(config, [*sets, "output.directory=whole"], comm=comm)
    result = train(config, [*sets, "output.directory=early", "training.patience=1"], comm=comm)
    whole, early = (
        [(entry["step"], entry["drag"]) for entry in read_log(config.parent / out / "log.jsonl", "validation")]
        for out in ("whole", "early")
    )
    ends = next(k for k in range(1, len(whole)) if whole[k][1] >= min(drag for _, drag in whole[:k]))
    assert early == whole[: ends + 1] and ends + 1 < len(whole)
    assert result["best"]["step"] == min(whole[:ends], key=lambda one: one[1])[0]


@pytest.mark.ranks(1, 2)
def test_a_score_without_a_direction_is_refused(comm, config):
    """A best score without a known direction is an error before the run, on all ranks; the score itself is computed."""
    with pytest.raises(UserError, match=r"output\.best: .*got 'missed'; .* better = \{"):
        train(config, ['output.best="missed"'], comm=comm)
    assert train(config, comm=comm)["validation"]["missed"] is not None


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


def executor(ranks, metric=Sum, parts=None):
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
    with Communicator(comm) as ranks, executor(ranks, parts={"height": comm.size}) as made:
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
    with Communicator(comm) as ranks, executor(ranks, metric) as made, pytest.raises(UserError) as error:
        Evaluation(made)
    assert message in str(error.value) and "'relu'" * ("add" not in message) in str(error.value)
