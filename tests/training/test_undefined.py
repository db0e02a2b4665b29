"""Tests of validations with undefined scores: no position with weight, no positive, a single class; and best scores."""

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.kernels import get_backend
from halograd.layers.strategy import Strategy
from halograd.report.status import read_record, status_of, status_text
from halograd.testing import grids
from halograd.training import evaluate
from halograd.training.evaluation import Evaluation, describe
from halograd.training.executor import Executor
from halograd.training.log import read_log
from halograd.training.metrics import Confusion, Errors
from halograd.training.run import TrainingRun, train
from tests.training.runs import EDGE, write_named, write_shared

SHAPE, BATCH, K = (4, 6), 3, 3


def case(name):
    """Return loss, targets (3 batches), weights, and number of classes (or 1) of a case."""
    classes = np.full((3 * BATCH, *SHAPE, 1), 2, np.int32)
    numbers = np.linspace(0, 1, classes.size).reshape(classes.shape)
    none = np.zeros(classes.shape)
    return {
        "mask, count": (hg.MeanSquaredError(), numbers, none, 1),
        "mask, weights": (hg.AbsoluteError(normalization="weights"), numbers, none, 1),
        "mask, classes": (hg.SoftmaxCrossEntropy(), classes, none, K),
        "mask, dice": (hg.Dice(), numbers, none, 1),
        "ignored": (hg.SoftmaxCrossEntropy(ignore_index=2), classes, None, K),
        "ignored, count": (hg.SoftmaxCrossEntropy(ignore_index=2, normalization="count"), classes, None, K),
        "ignored, dice": (hg.Dice("softmax", ignore_index=2), classes, None, K),
        "class of weight 0": (hg.SoftmaxCrossEntropy([1.0, 2.0, 0.0]), classes, None, K),
    }[name]


UNDEFINED = [
    *("mask, count", "mask, weights", "mask, classes", "mask, dice"),
    *("ignored", "ignored, count", "ignored, dice", "class of weight 0"),
]


def evaluated(ranks, parts, name, other=None):
    """Return the scores of three batches, the text about undefined ones, and the exact second loss.

    The last batch is short; `other` is the weight of the second prediction's loss.
    """
    loss, target, weights, channels = case(name)
    x, t = hg.Input((*SHAPE, channels), "x"), hg.Input(target.shape[1:], "t", "int32" if channels > 1 else "compute")
    w = [] if weights is None else [hg.Input(weights.shape[1:], "w")]
    total, second = loss(x, t, *w), hg.Input((*SHAPE, 1), "y")
    if other is not None:
        total = total + other * hg.MeanSquaredError()(second, hg.Input((*SHAPE, 1), "z"))
    network = hg.Network({"prediction": x, **({} if other is None else {"second": second}), "loss": total})
    rng = np.random.default_rng(3)
    arrays = {n: rng.standard_normal((3 * BATCH, *node.shape)) for n, node in network.inputs.items()}
    arrays |= {"t": target} if weights is None else {"t": target, "w": weights}
    with Executor(network, ranks, get_backend("numpy"), BATCH, Strategy(parts), "float64", False) as executor:
        evaluation = Evaluation(executor)
        for first, executor.mode.valid in ((0, BATCH), (BATCH, BATCH), (2 * BATCH, 1)):
            for n, array in arrays.items():
                executor.set_input(n, array[first : first + BATCH])
            executor.forward(training=False)
            evaluation.add()
        found, text = evaluation.finish(), evaluation.lacking_text
        evaluation.close()
    differences = (arrays["y"] - arrays["z"])[: 2 * BATCH + 1] if other is not None else np.zeros(1)
    return found, text, float(np.square(differences).mean())


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("name", UNDEFINED)
def test_a_loss_of_nothing_is_undefined(comm, name):
    with Communicator(comm) as ranks:
        for parts in grids(ranks.size, ("sample", "height", "width")):
            found, text, _ = evaluated(ranks, parts, name)
            assert found["loss"] is None and "loss undefined" in describe(found)
            assert text.startswith("of 'x' " if "x" in text else "of 'prediction' ") and "count" in text


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("name", ["mask, count", "mask, weights", "ignored"])
def test_a_term_of_nothing_leaves_the_others(comm, name):
    with Communicator(comm) as ranks:
        for parts in grids(ranks.size, ("sample", "height", "width")):
            found, text, want = evaluated(ranks, parts, name, 0.5)
            assert found["loss"] == pytest.approx(0.5 * want, rel=1e-13)
            assert text.count("of '") == 1 and "no position counts" in text


def test_what_counts_say_of_targets():
    """Scores of two classes are undefined if one does not occur; scores of more classes use the classes that occur."""
    pair, several, errors = Confusion(2), Confusion(3), Errors()
    for counter in (pair, several, errors):
        assert counter.empty and counter.lacking().startswith("no position counts")
    pair.counts[:] = [[5, 2], [0, 0]]
    found = pair.scores()
    assert found.pop("accuracy") == 5 / 7 and set(found.values()) == {None}
    assert not pair.empty and pair.lacking() == "all 7 positions that count are of class 0"
    several.counts[:] = [[0, 0, 0], [1, 3, 0], [0, 0, 0]]
    assert several.scores()["iou"] == pytest.approx((0 + 3 / 4) / 2)
    assert several.lacking() == "all 4 positions that count are of class 1"
    several.counts[2, 2] = 1
    errors.counts[0] = 1
    assert not several.lacking() and not errors.lacking() and not errors.empty


def change_mask(comm, config, change):
    """Change the mask of all samples by a function, on rank 0. Collective."""
    if comm.rank == 0:
        with h5py.File(config.parent / "data.h5", "r+") as file:
            mask = file["mask"][()]
            change(mask)
            file["mask"][...] = mask
    comm.barrier()


def without_positives(mask):
    mask[...] = 0


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("best", "value"),
    [(None, None), ('output.best="iou"', None), ('output.best="loss"', 1), ('output.best="accuracy"', 1)],
)
def test_a_validation_without_a_positive(comm, config, caplog, best, value):
    """A validation without positives has undefined scores, which patience ignores; run and evaluation report this."""
    change_mask(comm, config, without_positives)
    sets = [f"strategy.height={comm.size}", "training.epochs=4", *([best] if best else []), "training.patience=2"]
    result = train(config, [*sets, "schedule.learning_rate=0.001"], comm=comm)
    comm.barrier()
    checkpoints, log = config.parent / "out/checkpoints", config.parent / "out/log.jsonl"
    said = [text for text in caplog.messages if "all 1536 positions that count are of class 0" in text]
    assert said[0].startswith("validation after epoch 1: of 'prediction' ")
    if value is None:
        assert result["steps"] == 12 and result["best"] == {**result["best"], "value": None, "step": 0, "waited": 0}
        assert not (checkpoints / "best.h5").exists()
        assert len(said) == 2 and said[1].startswith("there is no best.h5: of 'prediction' all 1536")
        assert all("data.validation, data.split, training.seed" in text and "output.best" in text for text in said)
        assert [entry["step"] for entry in read_log(log, "no_best")] == [12]
    else:
        assert result["best"]["step"] and (checkpoints / "best.h5").exists() and len(said) == 1
        assert not read_log(log, "no_best")
    caplog.clear()
    evaluate(config, ["output.directory=out"], comm=comm)
    assert any("validation samples: of 'prediction' all 1536" in text for text in caplog.messages)


@pytest.mark.ranks(1, 2)
def test_a_score_that_is_undefined_now_and_then(comm, config, caplog, monkeypatch):
    """One message reports a precision that is sometimes undefined, and patience counts only the other validations."""
    given = iter([None, 0.5, None, 0.6, float("nan"), 0.4, None, 0.3, 0.9])
    validate = TrainingRun.validate
    monkeypatch.setattr(TrainingRun, "validate", lambda run: {**validate(run), "precision": next(given)})
    sets = [f"strategy.height={comm.size}", "training.epochs=9", 'output.best="precision"', "training.patience=2"]
    result = train(config, sets, comm=comm)
    assert result["steps"] == 24 and result["best"] == {"name": "precision", "value": 0.6, "step": 12, "waited": 2}
    (said,) = [text for text in caplog.messages if "undefined" in text]
    assert said.startswith("validation after epoch 1: precision is undefined: it is no candidate for best.h5, and ")


@pytest.mark.ranks(1)
def test_a_score_that_is_never_defined(comm, config, caplog, monkeypatch):
    validate = TrainingRun.validate
    monkeypatch.setattr(TrainingRun, "validate", lambda run: {**validate(run), "precision": None})
    result = train(config, ['output.best="precision"'], comm=comm)
    assert result["best"]["step"] == 0 and not (config.parent / "out/checkpoints/best.h5").exists()
    assert caplog.messages[-1].startswith("there is no best.h5: precision was undefined in every validation; hold out")


@pytest.mark.ranks(2, 4)
def test_ranks_without_positives_do_not_matter(comm, config):
    """Scores are defined if all positives are in the block of one rank, and equal those of one process."""

    def upper(mask):
        mask[:, EDGE // comm.size :] = 0

    change_mask(comm, config, upper)
    sets = ["training.epochs=3", 'output.best="iou"', "output.checkpoint_epochs=0"]
    found = train(config, [*sets, f"strategy.height={comm.size}"], comm=comm)
    comm.barrier()
    cut = read_log(config.parent / "out/log.jsonl", "validation")
    alone = train(config, [*sets, f"output.directory=alone{comm.rank}"], comm=MPI.COMM_SELF)
    whole = read_log(config.parent / f"alone{comm.rank}/log.jsonl", "validation")
    assert [entry["iou"] for entry in cut] == [entry["iou"] for entry in whole] and cut[-1]["iou"] is not None
    assert found["best"] == alone["best"] and found["best"]["step"]


MASKED = f"""
import halograd as hg

def build():
    x, t, w = (hg.Input(({EDGE}, {EDGE}, n), name=name) for n, name in ((3, "x"), (1, "target"), (1, "w")))
    y = hg.Conv(1, 3, padding=1)(x)
    return hg.Network({{"prediction": y, "loss": hg.MeanSquaredError()(y, t, w)}})
"""


def write_masked(folder):
    rng = np.random.default_rng(2)
    fields = {"inputs": rng.standard_normal((8, EDGE, EDGE, 3)), "t": rng.standard_normal((8, EDGE, EDGE))}
    arrays = {name: array.astype(np.float32) for name, array in fields.items()}
    arrays["w"] = np.zeros((8, EDGE, EDGE), np.float32)
    table = 'validation = 0.25\ntargets = {target = "t", w = "w"}\n'
    write_named(folder, MASKED, table, arrays, inputs="NHWC")


@pytest.mark.ranks(1, 2)
def test_a_run_without_any_position_that_counts(comm, working, caplog):
    """A run in which no position counts writes a readable log, shows its state, and never stops early."""
    config = write_shared(comm, working, write_masked)
    result = train(config, [f"strategy.height={comm.size}", "training.patience=1"], comm=comm)
    comm.barrier()
    found = read_log(working / "out/log.jsonl", "validation")
    assert [entry["loss"] for entry in found] == [None] * 3 and result["best"]["value"] is None
    assert not [text for text in caplog.messages if "cannot be read" in text]
    assert "finished" in status_text(status_of(read_record(working / "out")))[0]
    assert caplog.messages[-1].startswith("there is no best.h5: of 'prediction' no position counts: ")
