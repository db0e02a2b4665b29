"""Tests of validations between epochs (`training.validate_every`): best score, patience, schedule, resumption."""

import os
import signal

import pytest

from halograd.training import train
from halograd.training.log import read_log
from halograd.training.monitors import Callback
from tests.training.runs import write_config

#: Six steps per epoch.
SETS = [
    "training.validate_every=4",
    "training.batch=2",
    "training.epochs=4",
    "schedule={kind='plateau', learning_rate=0.3, factor=0.5, patience=1}",
    "training.patience=3",
    "output.checkpoint_epochs=0",
]


class Stop(Callback):
    """Signal to the last rank after a step."""

    def __init__(self, comm, step):
        self.victim, self.step = comm.rank == comm.size - 1, step

    def on_step(self, step, loss, learning_rate):
        if step == self.step and self.victim:
            os.kill(os.getpid(), signal.SIGUSR1)


def entries(folder):
    kinds = ("step", "validation", "early_stop", "checkpoint")
    fields = ("event", "step", "epoch", "loss", "learning_rate", "best")
    found = [entry for entry in read_log(folder / "log.jsonl") if entry["event"] in kinds]
    return [{key: entry.get(key) for key in fields} for entry in found]


@pytest.mark.ranks(2)
def test_between_epochs_and_resumed(comm, config):
    """Interrupted before, during or long after a validation, a run goes on the same, to the same best and last one."""
    cut = [f"strategy.height={comm.size}"]
    whole = train(config, [*SETS, *cut, "output.directory=whole"], comm=comm)
    for signalled, stopped in ((3, 4), (8, 8), (9, 10)):
        result = train(config, [*SETS, *cut], signalled > 3, comm=comm, callbacks=[Stop(comm, signalled)])
        assert result["stopped"] is not None and result["steps"] == stopped
    again = train(config, [*SETS, *cut], True, comm=comm)
    assert again["best"] == whole["best"] and again["steps"] == whole["steps"] and again["validation"]
    if comm.rank == 0:
        want, got = (entries(config.parent / name) for name in ("whole", "out"))
        validated = [one for one in want if one["event"] == "validation"]
        steps = [one["step"] for one in validated]
        assert steps == [4, 8, 12, 16, 20, 24][: len(steps)] and [one["epoch"] for one in validated[:3]] == [0, 1, 1]
        assert [one for one in got if one["event"] != "checkpoint"] == [x for x in want if x["event"] != "checkpoint"]
        assert len({one["learning_rate"] for one in want if one["event"] == "step"}) > 1
        losses = {one["step"]: one["loss"] for one in validated}
        assert whole["best"]["step"] == min(losses, key=losses.get)
        better = [one["step"] for one in want if one["event"] == "checkpoint" and one["best"]]
        assert better[-1] == whole["best"]["step"] and better[0] == 4


def test_the_last_update_is_validated(working):
    config = write_config(working)
    train(config, ["training.validate_every=4", "training.epochs=2", "output.checkpoint_epochs=0"])
    assert [one["step"] for one in read_log(working / "out/log.jsonl", "validation")] == [4, 6]
    assert [one["step"] for one in read_log(working / "out/log.jsonl", "checkpoint")] == [6]
