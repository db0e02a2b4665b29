"""Tests of SIGUSR1 and SIGTERM at every stage of a program, with the expected exit code of each."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from halograd.training.log import read_log
from halograd.training.monitors import Callback
from halograd.training.run import train
from halograd.training.session import Session
from halograd.training.signals import CHECKPOINTED, StopSignals
from halograd.training.trainer import Trainer
from tests.launch import mpiexec
from tests.training.launching import sets
from tests.training.runs import write_config

#: Three epochs of four steps, nothing held out: the last step is the last that is done.
COMMON = ["data.validation=0", "training.epochs=3", "strategy.height=2"]

# `python late.py train ...`: signals itself at the named stages, at those of 'all' on every rank.
SIGNALS = """
import os, signal, sys

wanted, numbers = os.environ["STAGES"].split(","), (signal.SIGUSR1, signal.SIGTERM)
rank = os.environ["PMI_RANK"]

# Whatever it needs is kept in its defaults: at the end of Python there are no globals.
def stage(name, wanted=wanted, numbers=numbers, rank=rank, kill=os.kill, pid=os.getpid(), write=os.write):
    if name in wanted:
        for number in numbers:
            kill(pid, number)
        write(2, f"{name} on {rank}\\n".encode())

def before(owner, attribute, name):
    call = getattr(owner, attribute)
    def wrapped(*args, **kwargs):
        stage(name)
        return call(*args, **kwargs)
    setattr(owner, attribute, wrapped)

class Importing:
    def find_spec(self, name, *rest):
        if name == "mpi4py.MPI":
            stage("MPI")
        if name == "halograd.cli":
            stage("import")

class AtTheEnd:
    def __del__(self, stage=stage):
        stage("teardown")  # Python has given up its signal handlers

def patch():
    import halograd.cli.run, halograd.training.run
    from halograd.training.run import TrainingRun
    from halograd.training.checkpoints import CheckpointFolder
    from mpi4py import MPI
    end = TrainingRun._end_stretch
    def last(run, epoch, ended):
        if epoch == 2:
            stage("last step")
            before(CheckpointFolder, "write", "last checkpoint")
        end(run, epoch, ended)
    TrainingRun._end_stretch = last
    before(TrainingRun, "report", "report")
    before(halograd.training.run.StopSignals, "__exit__", "handlers")
    before(halograd.cli.run, "leave", "leave")
    before(MPI, "Finalize", "finalize")

sys.meta_path.insert(0, Importing())
if not {"MPI", "import"} & set(wanted):
    patch()
sys.kept = AtTheEnd()
from halograd.__main__ import main
main()
"""


def run(folder: Path, *stages: str, change: str = "") -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """Run ``halograd train`` on two ranks with signals at these stages; return the process and the stages it passed."""
    script = folder / "signals.py"
    script.write_text(SIGNALS)
    words = [script, "train", write_config(folder), "--resume", *sets(*COMMON, *filter(None, [change]))]
    done = mpiexec(2, words, env={"STAGES": ",".join(stages)})
    return done, {line for line in done.stderr.splitlines() if line.endswith((" on 0", " on 1"))}


@pytest.mark.parametrize("name", ["import", "MPI"])
def test_while_the_program_starts(tmp_path, name):
    """After a signal during the start, the run stops before its first step."""
    done, passed = run(tmp_path, name)
    assert done.returncode == CHECKPOINTED, done.stderr
    assert passed == {f"{name} on 0", f"{name} on 1"}
    assert done.stdout.splitlines()[-1] == "stopped after step 0 (SIGUSR1 to rank 0 of 2); go on with --resume"
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_when_all_is_trained(tmp_path):
    """If a signal follows the last step, the exit code is 0, because the run is complete."""
    stages = ["last step", "last checkpoint", "report", "handlers", "leave", "finalize", "teardown"]
    done, passed = run(tmp_path, *stages)
    assert done.returncode == 0, done.stderr
    expected = {f"{stage} on {rank}" for stage in stages for rank in (0, 1)}
    assert passed == expected - {"last checkpoint on 1"}, done.stderr
    (finished,) = read_log(tmp_path / "out" / "log.jsonl", "finished")
    assert finished["step"] == 12 and not read_log(tmp_path / "out" / "log.jsonl", "stopped")


def test_while_a_mistake_is_told(tmp_path):
    """A signal during an error message does not change the exit code, so a batch script does not requeue the run."""
    stages = ["handlers", "leave", "finalize", "teardown"]
    done, passed = run(tmp_path, *stages, change="data.path=nowhere.h5")
    assert done.returncode == 2, done.stderr
    assert passed == {f"{stage} on {rank}" for stage in stages for rank in (0, 1)}


# -- in this process ----------------------------------------------------------------------------

ALONE = ["data.validation=0"]


def signaled(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, when: Callable[[Any], bool]) -> None:
    """Send SIGTERM to this process before a call of a method for which `when` is true."""
    call = getattr(owner, name)

    def method(self, *args, **kwargs):
        if when(self):
            os.kill(os.getpid(), signal.SIGTERM)
        return call(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, method)


def test_in_the_last_step(tmp_path, monkeypatch):
    """A signal during the last step does not stop the run, because it is complete."""
    signaled(monkeypatch, Trainer, "step", lambda trainer: trainer.optimizer.step == 11)
    done = train(write_config(tmp_path), ALONE, comm=MPI.COMM_SELF)
    assert (done["steps"], done["stopped"]) == (12, None)
    assert (tmp_path / "out" / "checkpoints" / "step-00000012.h5").exists()


def test_in_the_last_step_before_a_validation(tmp_path, monkeypatch):
    """After a signal in the last step before a validation, the next job makes this validation."""
    with monkeypatch.context() as patch:
        signaled(patch, Trainer, "step", lambda trainer: trainer.optimizer.step == 8)
        done = train(write_config(tmp_path), comm=MPI.COMM_SELF)
    assert (done["steps"], done["stopped"]) == (9, "SIGTERM to rank 0 of 1")
    done = train(tmp_path / "run.toml", [], True, comm=MPI.COMM_SELF)
    assert (done["steps"], done["stopped"]) == (9, None)
    assert [e["epoch"] for e in read_log(tmp_path / "out" / "log.jsonl", "validation")] == [0, 1, 2]


def test_after_the_last_step_of_an_epoch(tmp_path, monkeypatch):
    """Callbacks are called once per epoch, also if a signal stops the job between the epoch and this call."""
    epochs = []

    class Epochs(Callback):
        def on_epoch(self, epoch, scores):
            epochs.append(epoch)

    with monkeypatch.context() as patch:
        signaled(patch, Trainer, "step", lambda trainer: trainer.optimizer.step == 2)  # the vote is that of step 3
        done = train(write_config(tmp_path), ALONE, comm=MPI.COMM_SELF, callbacks=[Epochs()])
    assert (done["steps"], done["stopped"]) == (4, "SIGTERM to rank 0 of 1")
    train(tmp_path / "run.toml", ALONE, True, comm=MPI.COMM_SELF, callbacks=[Epochs()])
    assert epochs == [0, 1, 2]


def test_while_a_run_that_is_through_begins_again(tmp_path, monkeypatch):
    train(write_config(tmp_path), ALONE, comm=MPI.COMM_SELF)
    signaled(monkeypatch, Session, "sampler", lambda session: True)
    done = train(tmp_path / "run.toml", ALONE, True, comm=MPI.COMM_SELF)
    assert (done["steps"], done["stopped"]) == (12, None)


def test_the_first_signal_counts_and_handlers_come_back():
    before = [signal.getsignal(n) for n in (signal.SIGUSR1, signal.SIGTERM)]
    with StopSignals() as signals:
        assert (signals.received, signals.vote) == (None, 0)
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        assert (signals.received, signals.vote) == (signal.SIGUSR1, signal.SIGUSR1)
    assert [signal.getsignal(n) for n in (signal.SIGUSR1, signal.SIGTERM)] == before


def test_what_came_before_counts_too():
    with StopSignals():
        signal.raise_signal(signal.SIGTERM)
        with StopSignals() as signals:
            assert signals.received == signal.SIGTERM
            signal.raise_signal(signal.SIGUSR1)
            assert signals.received == signal.SIGTERM
        signal.raise_signal(signal.SIGUSR1)  # does not end this process


def test_no_signals_outside_of_the_main_thread():
    found = []

    def work():
        with StopSignals() as signals:
            found.append(signals.vote)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [0]
