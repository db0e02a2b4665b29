"""Tests of runs that begin with the parameters and the optimizer's state of another run."""

import os
import signal

import pytest

from halograd import Callback
from halograd.errors import UserError
from halograd.training import train
from halograd.training.log import read_log
from tests.training.cuts import CUTS, overrides_of

SETS = ["optimizer={kind='adam'}", "schedule={kind='constant', learning_rate=0.01}", "data.shuffle=false"]


class Stop(Callback):
    """Callback that stops a run after an update."""

    def __init__(self, step):
        self.step = step

    def on_step(self, step, loss, learning_rate):
        if step == self.step:
            os.kill(os.getpid(), signal.SIGUSR1)


def steps(folder):
    return [(entry["step"], entry["loss"]) for entry in read_log(folder / "log.jsonl", "step")]


@pytest.mark.ranks(1, 2, 4)
def test_a_run_goes_on_as_the_other_one_would(comm, config):
    """The order of samples is the same in every epoch, so the first epoch of the new run is the next one of the old."""
    cuts = [overrides_of(cut) for cut in CUTS[comm.size]]
    train("run.toml", [*SETS, *cuts[0], "training.epochs=2", "output.directory=old"], comm=comm)
    for number, cut in enumerate(cuts):
        new = [*SETS, *cut, "training.init_from=old", "training.epochs=1", f"output.directory=new{number}"]
        result = train("run.toml", new, comm=comm, callbacks=[Stop(8)])
        assert result["stopped"]
        comm.barrier()
        train("run.toml", new, True, comm=comm)
        comm.barrier()
    train("run.toml", [*SETS, *cuts[-1], "training.epochs=3", "output.directory=old"], True, comm=comm)
    comm.barrier()
    expected = steps(config.parent / "old")
    for number in range(len(cuts)):
        found = steps(config.parent / f"new{number}")
        assert [step for step, _ in found] == [step for step, _ in expected[6:]]
        assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected[6:]], rel=1e-9)


@pytest.mark.ranks(1, 2)
def test_refusals(comm, config):
    with pytest.raises(UserError, match=r"init_from: expected a run with checkpoints, or a checkpoint, got no"):
        train("run.toml", ["training.init_from=nothing", "output.directory=out"], comm=comm)
    train("run.toml", ["training.epochs=1", "output.directory=old"], comm=comm)
    comm.barrier()
    with pytest.raises(UserError, match=r"expected the optimizer SGD .*, got AdamW"):
        train("run.toml", ["optimizer={kind='sgd'}", "training.init_from=old", "output.directory=out2"], comm=comm)
    with pytest.raises(UserError, match=r"init_from: expected one source of initial parameters, got init too"):
        train("run.toml", ["training.init_from=old", "training.init=a.safetensors"], comm=comm)
