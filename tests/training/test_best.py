"""The best validation: its checkpoint is kept, and training ends when none was better for long."""

from __future__ import annotations

import math

import pytest
from mpi4py import MPI

from halograd.errors import UserError
from halograd.training import evaluate, train
from halograd.training.log import read_log
from halograd.training.monitors import BestScore
from tests.training.runs import write_shared

#: Validations go up and down.
STEEP = ("schedule.learning_rate=0.3", 'schedule.kind="constant"')
NAMES = ("loss", "iou", "flow rmse")


@pytest.mark.parametrize(
    ("name", "values", "best"),
    [
        ("loss", [0.5, 0.4, 0.45, 0.4, 0.3], 5),
        ("iou", [0.5, 0.4, 0.45, 0.5], 1),
        ("flow rmse", [3.0, 2.0, math.nan, 2.5], 2),
        ("iou", [None, math.nan, 0.1], 3),
        ("none", [0.5, 0.4], 0),
        ("loss", [math.inf, 1.0], 2),
    ],
)
def test_which_is_the_best(name, values, best):
    """The first of equal ones; one that is undefined is none."""
    score = BestScore(name, NAMES)
    found = [score.judge({name: value}, step) for step, value in enumerate(values, 1)]
    assert score.step == best and (not best or (found[best - 1] and not any(found[best:])))
    again = BestScore(name, NAMES)
    again.load_state_dict(score.state_dict())
    assert again.state_dict() == score.state_dict() and not BestScore("iou", NAMES).step
    other = BestScore("iou" if name != "iou" else "loss", NAMES)
    other.load_state_dict(score.state_dict())
    assert other.step == 0


def test_patience():
    score = BestScore("loss", NAMES, 2)
    for step, value, ended in ((1, 0.5, False), (2, 0.6, False), (3, 0.4, False), (4, 0.5, False), (5, None, True)):
        score.judge({"loss": value}, step)
        assert score.exhausted == ended
    assert score.describe() == "best loss 0.4000 at step 3"
    for names, name, wrong in (((), "loss", "data.validation = 0"), (NAMES, "none", "none")):
        with pytest.raises(UserError, match=rf"training.patience: expected held-out samples .*, got {wrong}"):
            BestScore(name, names, 3)


@pytest.fixture
def config(comm, shared):
    return write_shared(comm, shared)


def validations(folder, name):
    return {entry["step"]: entry[name] for entry in read_log(folder / "log.jsonl", "validation")}


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", ["loss", "iou"])
def test_its_checkpoint_is_kept(comm, config, name):
    """However many come after it; evaluated, it gives the score that was the best."""
    out = config.parent / "out"
    sets = ["training.epochs=8", "output.keep=1", f'output.best="{name}"', *STEEP]
    result = train(config, [*sets, "output.checkpoint_epochs=0"], comm=comm)
    comm.barrier()
    found = validations(out, name)
    best = min(found, key=found.get) if name == "loss" else max(found, key=found.get)
    assert result["best"]["step"] == best < 24, "otherwise this shows nothing"
    assert (out / "checkpoints/best.h5").resolve().name == f"step-{best:08d}.h5"
    assert sorted(path.name for path in (out / "checkpoints").glob("step-*.h5")) == [
        f"step-{best:08d}.h5",
        "step-00000024.h5",
    ]
    again = evaluate(out / "checkpoints/best.h5", comm=comm)
    assert again["step"] == best and again[name] == pytest.approx(found[best], rel=1e-12)


@pytest.mark.ranks(1, 2)
def test_a_run_that_gives_up(comm, config):
    """Interrupted or not, after the same validation; what is resumed then ends at once."""
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
    with pytest.raises(UserError, match=r"output.best: expected one of loss, accuracy, iou, .*, none, got 'dice'"):
        train(config, ['output.best="dice"'], comm=MPI.COMM_SELF)
    with pytest.raises(UserError, match=r"training.patience: expected held-out samples .*, got data.validation = 0"):
        train(config, ["training.patience=2", "data.validation=0"], comm=MPI.COMM_SELF)
