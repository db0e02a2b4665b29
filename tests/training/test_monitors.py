"""Tests of a run's monitors: divergence of the loss, the best validation, early stopping."""

from __future__ import annotations

import errno
import importlib
import math

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from halograd.cli.run import run as command
from halograd.errors import UserError
from halograd.layers import MeanSquaredError
from halograd.report.status import read_record, status_of, status_text
from halograd.training import evaluate
from halograd.training.backend import _warn_of_threads
from halograd.training.checkpoints import CheckpointFolder
from halograd.training.config import BackendConfig
from halograd.training.directory import checkpoint_of
from halograd.training.log import read_log
from halograd.training.monitors import BestScore, LossWatch
from halograd.training.run import train
from tests.training.runs import SAMPLES

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
