"""Tests of a run's monitors: divergence, the best validation, early stopping, undefined scores."""

from __future__ import annotations

import errno
import importlib
import math

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.cli.run import run as command
from halograd.comm import Communicator
from halograd.errors import UserError
from halograd.kernels import get_backend
from halograd.layers import MeanSquaredError
from halograd.layers.strategy import Strategy
from halograd.report.status import read_record, status_of, status_text
from halograd.testing import grids
from halograd.training import evaluate
from halograd.training.backend import _warn_of_threads
from halograd.training.checkpoints import CheckpointFolder
from halograd.training.config import BackendConfig
from halograd.training.directory import checkpoint_of
from halograd.training.evaluation import Evaluation, describe
from halograd.training.executor import Executor
from halograd.training.log import read_log
from halograd.training.metrics import Confusion, Errors
from halograd.training.monitors import BestScore, LossWatch
from halograd.training.run import TrainingRun, train
from tests.training.runs import EDGE, SAMPLES, write_named, write_shared

WILD = ["optimizer={kind='sgd'}", "schedule.kind=constant", "schedule.warmup_epochs=0", "schedule.learning_rate=1e8"]


def judged(losses: list[float], validation: float | None = None, scale: float = 0.0) -> str | None:
    watch = LossWatch(scale)
    for loss in losses:
        watch.add(loss)
    return watch.check_epoch(validation)


SOUND = [[0.7] * 10, [0.7, 600, 500], [0.7, 0.1, 1e-9], [0.0, 0.0], [1e-9, 9e-7], [-3.0, -9.0, 2.0]]


@pytest.mark.parametrize("losses", SOUND)
def test_sound_losses(losses):
    assert judged(losses) is None and judged(losses, 900 * abs(losses[0])) is None


@pytest.mark.parametrize("losses", [[0.7, 1e5, 1e4], [2e-6, 2e-1], [0.7, 1e200, 1e200], [-1.0, 5e3, 5e3]])
def test_diverged_losses(losses):
    found = judged(losses)
    assert found is not None and f"the mean loss is {np.mean(losses):.3g}, expected less than 1000 times" in found


def test_a_validation_loss():
    assert judged([0.5, 0.4], 499.0) is None
    found = judged([0.5, 0.4], 501.0)
    assert found == "the validation loss is 501, expected less than 1000 times 0.5, its first size"
    assert "validation loss is 1.1e+18" in str(judged([0.7, 7.5e13], 1.1e18))


def test_a_regression_of_rare_large_numbers():
    """A regression with rare large targets does not count as diverged: its scale is that of the targets."""
    rain = [1.0, 1.0, 1e6, 1.0, 3e6, 2e5]
    assert judged(rain) is not None  # of classes there is no such loss
    assert judged(rain, 1e6, scale=1e6) is None
    assert judged([1.0, 1e10, 1e12], scale=1e6) is not None


def test_losses_that_are_not_known_yet_and_losses_that_come_back():
    watch = LossWatch()
    assert watch.check_epoch(1e9) is None  # nothing to compare with
    for loss in (math.nan, 2.0, 1e6):  # on a device the first one is known a step later
        watch.add(loss)
    assert watch.first == 2.0 and watch.check_epoch(None) is not None and watch.diverged is not None
    watch.add(1.0)
    assert watch.check_epoch(None) is None and watch.diverged is None


def test_the_mean_of_an_epoch_waits_for_its_last_loss_only():
    class Pending:
        asked = 0

        def __float__(self):
            Pending.asked += 1
            return 3.0

    watch = LossWatch()
    watch.add(1.0)
    watch.add(2.0)
    watch.add(Pending())
    assert watch.mean == 1.5 and not Pending.asked
    assert watch.end_epoch() == 2.0 and watch.check_epoch(None) is None and Pending.asked == 1
    assert math.isnan(watch.mean)


@pytest.mark.ranks(1, 2)
def test_a_run_that_diverges(comm, config, caplog):
    """A diverging run gives one warning and a log line per epoch, on all ranks; a resumed run reports it again."""
    cut = [f"strategy.sample={comm.size}"]
    result = train(config, [*cut, *WILD], comm=comm)
    assert math.isfinite(result["loss"]) and "its first size" in result["diverged"]
    assert len({*comm.allgather(result["diverged"])}) == 1
    told = [r for r in caplog.records if "the loss has diverged" in r.message]
    assert len(told) == 1 and "epoch 1: " in told[0].message and "lower schedule.learning_rate" in told[0].message
    comm.Barrier()
    log = config.parent / "out" / "log.jsonl"
    assert [e["epoch"] for e in read_log(log, "diverged")] == [0, 1, 2]
    again = train(config, [*cut, *WILD], resume=True, comm=comm)
    assert again["loss"] is None and again["diverged"] == result["diverged"]
    comm.Barrier()
    longer = train(config, [*cut, *WILD[:-1], "schedule.learning_rate=1e-9", "training.epochs=4"], True, comm=comm)
    assert longer["diverged"] is not None  # its own first loss is not what it is compared with


@pytest.mark.ranks(1, 2)
def test_runs_that_do_not_diverge(comm, config, caplog):
    cut = [f"strategy.sample={comm.size}", "output.log_steps=2"]
    assert train(config, cut, comm=comm)["diverged"] is None
    assert train(config, [*cut, "training.epochs=4"], resume=True, comm=comm)["diverged"] is None
    assert not [r for r in caplog.records if "diverged" in r.message]
    comm.Barrier()
    steps = [e["step"] for e in read_log(config.parent / "out" / "log.jsonl", "step")]
    assert steps == [1, 2, 4, 6, 8, 9, 10, 12]  # the first one is what later ones are compared with


@pytest.mark.ranks(1)
def test_a_schedule_that_is_stretched_is_said(comm, config, caplog, capsys):
    """A resumed run with more epochs gets a warning that its cosine schedule, and so the learning rate, changes."""
    cosine = ["schedule.kind=cosine", "output.log_steps=1", "output.progress=true"]
    train(config, cosine, comm=comm)
    said = capsys.readouterr().err
    losses = [e["loss"] for e in read_log(config.parent / "out" / "log.jsonl", "step") if e["epoch"] == 0]
    assert len(losses) == 3 and f"epoch 1/3: mean loss {np.mean(losses):.5f}, validation" in said
    train(config, cosine, resume=True, comm=comm)
    assert not [r for r in caplog.records if "schedule" in r.message]
    train(config, [*cosine, "training.epochs=4"], resume=True, comm=comm)
    (message,) = [r.getMessage() for r in caplog.records if "schedule" in r.message]
    assert "(3 epochs before, 4 now): the learning rate of step 10 is" in message
    assert message.endswith("would have been 0")


def test_threads_that_are_not_read_are_said(monkeypatch, caplog):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    _warn_of_threads(BackendConfig(kernels="numpy", threads=1))
    _warn_of_threads(BackendConfig(kernels="cudnn"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    _warn_of_threads(BackendConfig(kernels="numpy"))
    assert not caplog.messages
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    _warn_of_threads(BackendConfig(kernels="numpy"))
    assert caplog.messages == [
        "OMP_NUM_THREADS=2 is ignored: a rank computes with 1 thread(s); set backend.threads (--threads N)"
    ]


@pytest.mark.ranks(1)
def test_a_regression_of_rain(comm, config, caplog):
    """A run whose targets are mostly zero and rarely a thousand is not reported as diverged."""
    with h5py.File(config.parent / "data.h5", "r+") as file:
        mask = file["mask"][()].astype(np.float32)
        del file["mask"]
        mask[: SAMPLES - 2], mask[SAMPLES - 2 :] = 1e-3 * mask[: SAMPLES - 2], 1e3
        file["mask"] = mask
    mesh = importlib.import_module("halograd.models.mesh")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mesh, "BinaryCrossEntropyWithLogits", lambda pos_weight, name: MeanSquaredError(name=name))
        sets = ["model.pos_weight=1.0", "training.seed=1", "training.batch=1", "data.validation=0"]
        result = train(config, sets, comm=comm)
    assert result["diverged"] is None and not [r for r in caplog.records if "diverged" in r.message]
    losses = [e["loss"] for e in read_log(config.parent / "out" / "log.jsonl", "step")]
    assert np.mean(losses[:19]) > 1e3 * losses[0]


@pytest.mark.ranks(1)
def test_what_the_command_line_says_last(comm, config, capsys):
    sets = [word for s in WILD for word in ("--set", s)]
    assert command(["train", str(config), *sets]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("diverged, not trained, to step 9; ")
    lines = status_text(status_of(read_record(config.parent / "out")))
    assert any("but diverged: the validation loss is" in line for line in lines)
    assert command(["train", str(config), "--set", f"output.directory={config.parent / 'other'}"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("trained to step 9; ")


#: Validations go up and down.
STEEP = ("schedule.learning_rate=0.3", 'schedule.kind="constant"')
NAMES = {"loss": "lower", "iou": "higher", "flow rmse": "lower", "flow drag": "lower", "drift": None}


@pytest.mark.parametrize(
    ("name", "values", "best"),
    [
        ("loss", [0.5, 0.4, 0.45, 0.4, 0.3], 5),
        ("iou", [0.5, 0.4, 0.45, 0.5], 1),
        ("flow rmse", [3.0, 2.0, math.nan, 2.5], 2),
        ("flow drag", [3.0, 2.0, 2.5], 2),
        ("iou", [None, math.nan, 0.1], 3),
        ("none", [0.5, 0.4], 0),
        ("loss", [math.inf, 1.0], 2),
    ],
)
def test_which_is_the_best(name, values, best):
    """The first of equal scores is the best; an undefined score never is."""
    score = BestScore(name, NAMES)
    found = [score.update({name: value}, step) for step, value in enumerate(values, 1)]
    assert score.step == best and (not best or (found[best - 1] and not any(found[best:])))
    again = BestScore(name, NAMES)
    again.load_state_dict(score.state_dict())
    assert again.state_dict() == score.state_dict() and not BestScore("iou", NAMES).step
    other = BestScore("iou" if name != "iou" else "loss", NAMES)
    other.load_state_dict(score.state_dict())
    assert other.step == 0


def test_patience():
    """A validation with an undefined score neither uses up the patience nor restores it."""
    score = BestScore("loss", NAMES, 2)
    values = [None, math.nan, None, 0.5, 0.6, 0.4, 0.5, None, math.nan, 0.4]
    for step, value in enumerate(values, 1):
        score.update({"loss": value}, step)
        assert score.exhausted == (step == len(values))
    assert score.describe() == "best loss 0.4000 at step 6"
    for names, name, wrong in (({}, "loss", "data.validation = 0"), (NAMES, "none", "none")):
        with pytest.raises(UserError, match=rf"training.patience: .*held-out.*, got {wrong}"):
            BestScore(name, names, 3)


def validations(folder, name):
    return {entry["step"]: entry[name] for entry in read_log(folder / "log.jsonl", "validation")}


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", ["loss", "iou"])
def test_its_checkpoint_is_kept(comm, config, name):
    """The best checkpoint is kept whatever follows, and its evaluation gives the best score."""
    out = config.parent / "out"
    sets = ["training.epochs=8", "output.keep=1", f'output.best="{name}"', *STEEP]
    result = train(config, [*sets, "output.checkpoint_epochs=0"], comm=comm)
    comm.barrier()
    found = validations(out, name)
    best = min(found, key=found.get) if name == "loss" else max(found, key=found.get)
    assert result["best"]["step"] == best < 24, "otherwise this shows nothing"
    assert checkpoint_of(out / "checkpoints/best.h5").name == f"step-{best:08d}.h5"
    assert sorted(path.name for path in (out / "checkpoints").glob("step-*.h5")) == [
        f"step-{best:08d}.h5",
        "step-00000024.h5",
    ]
    again = evaluate(out / "checkpoints/best.h5", comm=comm)
    assert again["step"] == best and again[name] == pytest.approx(found[best], rel=1e-12)


@pytest.mark.ranks(1, 2)
def test_after_a_full_disk(comm, config, monkeypatch):
    """A validation whose checkpoint could not be written is not the best: ``best.h5`` names the best one on disk."""
    sets = ["training.epochs=8", *STEEP]
    lost = train(config, [*sets, f"output.directory={config.parent / 'whole'}"], comm=comm)["best"]["step"]
    write = CheckpointFolder.write

    def full(self, snapshot, progress, *rest):
        if progress.step == lost:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, snapshot, progress, *rest)

    monkeypatch.setattr(CheckpointFolder, "write", full)
    result = train(config, sets, comm=comm)
    comm.barrier()
    found = validations(config.parent / "out", "loss")
    del found[lost]
    best = min(found, key=found.get)
    assert result["best"]["step"] == best and lost < max(found)
    assert checkpoint_of(config.parent / "out/checkpoints/best.h5").name == f"step-{best:08d}.h5"


@pytest.mark.ranks(1, 2)
def test_a_run_that_gives_up(comm, config):
    """A run with patience stops at the same validation, interrupted or not; resumed again it ends at once."""
    sets = ["training.epochs=40", "training.patience=3", *STEEP]
    whole = train(config, [*sets, f"output.directory={config.parent / 'whole'}"], comm=comm)
    comm.barrier()
    found = validations(config.parent / "whole", "loss")
    last = max(found)
    assert last < 120 and whole["steps"] == last and whole["stopped"] is None
    assert whole["best"]["step"] == min(found, key=found.get) == last - 9  # three epochs of three steps
    (entry,) = read_log(config.parent / "whole/log.jsonl", "early_stop")
    assert entry["step"] == last and entry["reason"].startswith("no better loss in 3 validations; best loss 0.")
    train(config, [*sets, f"training.epochs={last // 3 - 2}"], comm=comm)
    parts = train(config, sets, resume=True, comm=comm)
    assert parts["best"] == whole["best"] and parts["steps"] == last
    again = train(config, sets, resume=True, comm=comm)
    assert again["steps"] == last and again["best"]["waited"] == 3


@pytest.mark.ranks(1)
def test_refusals(comm, config):
    with pytest.raises(UserError, match=r"output.best: .*loss, .*none, got 'dice'"):
        train(config, ['output.best="dice"'], comm=MPI.COMM_SELF)
    with pytest.raises(UserError, match=r"training.patience: .*got data.validation = 0"):
        train(config, ["training.patience=2", "data.validation=0"], comm=MPI.COMM_SELF)


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
