"""Tests of signals at every stage of a program: stops with exit codes and checkpoints; SIGINT ends at once."""

from __future__ import annotations

import contextlib
import os
import platform
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.report.status import read_record, status_of
from halograd.training.log import read_log
from halograd.training.monitors import Callback
from halograd.training.process_monitor import append_line
from halograd.training.run import TrainingRun, train
from halograd.training.session import Session
from halograd.training.signals import CHECKPOINTED, StopSignals
from halograd.training.trainer import Trainer
from halograd.training.watchdog import Heartbeat, Watchdog
from tests.harness import jobs
from tests.harness.limits import LIMIT, wait_until
from tests.launch import find_mpiexec, mpiexec
from tests.training.launching import Gate, rank_processes, sets, started, wait_for_step
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


HOST = platform.node()
#: Epochs of six steps.
INTERRUPT_COMMON = ["training.batch=2", "training.epochs=40", "output.checkpoint_epochs=1", "strategy.height=3"]


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Give SIGINT its default action for started programs, even if this suite runs in the background and ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def assert_told(told: str, out: Path, rank: int) -> None:
    """Check that one line reports the interrupt, and that the log agrees with it."""
    (line,) = [line for line in told.splitlines() if line.startswith("halograd: ")]
    who = f"rank {rank} of 3 on {HOST}: " if rank else ""
    rest = r"interrupted at step \d+; the newest checkpoint is (\S+/step-\d+\.h5); go on with --resume"
    found = re.fullmatch(f"halograd: {who}{rest}", line)
    assert found and Path(found[1]).parent == out / "checkpoints" and Path(found[1]).exists(), told
    (entry,) = read_log(out / "log.jsonl", "interrupted")
    assert entry["reason"] == f"SIGINT to rank {rank} of 3" and not read_log(out / "log.jsonl", "failed")
    status = status_of(read_record(out))
    assert (status.state, status.seconds_left) == ("interrupted", None)
    assert status.detail == f"SIGINT to rank {rank} of 3 on {HOST}; go on with --resume"


@pytest.mark.parametrize("victim", [0, 2])
def test_one_rank(tmp_path, victim):
    out = tmp_path / "out"
    train = ["-m", "halograd", "train", write_config(tmp_path), *sets(*INTERRUPT_COMMON)]
    with started(3, *train, gate=Gate(tmp_path, 8)) as (process, mark):
        wait_for_step(out, 8, process)
        os.kill(rank_processes(mark)[victim], signal.SIGINT)
        stdout, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode == 130, stdout + stderr
    assert_told(stdout + stderr, out, victim)


def test_a_rank_that_waits_for_one_that_hangs(tmp_path):
    """A rank that waits in MPI for a hanging one is interrupted, although Python raises no KeyboardInterrupt in MPI."""
    out = tmp_path / "out"
    train = ["-m", "halograd", "train", write_config(tmp_path), *sets(*INTERRUPT_COMMON, "backend.transport=mpi")]
    gate = Gate(tmp_path, 8, 2)
    with started(3, *train, gate=gate) as (process, mark):
        wait_for_step(out, 8, process)
        gate.await_waiting(1)
        ranks = rank_processes(mark)
        os.kill(ranks[2], signal.SIGSTOP)
        os.kill(ranks[1], signal.SIGINT)
        stdout, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode == 130, stdout + stderr
    assert_told(stdout + stderr, out, 1)


PATIENT = """
from importlib import import_module

from halograd.cli import main

boot = import_module("halograd.comm.boot")
assert boot.PRINTING < 1e6
boot.PRINTING = 1e6
main()
"""


def test_ctrl_c_in_the_terminal_of_mpiexec(tmp_path):
    """Ctrl-C in the terminal of mpiexec gives one line of rank 0: the other ranks give it time to write that."""
    out, mark, script = tmp_path / "out", jobs.new_mark(), tmp_path / "patient.py"
    script.write_text(PATIENT)
    command = [find_mpiexec(), "-n", "3", sys.executable, str(script), "train", str(write_config(tmp_path))]
    environment = jobs.job_environment(mark, Gate(tmp_path, 8).environment)
    process, terminal = pty.fork()
    if not process:
        os.execve(command[0], [*command, *sets(*INTERRUPT_COMMON)], environment)
    told = ""
    try:
        wait_for_step(out, 8, SimpleNamespace(poll=lambda: None))
        os.write(terminal, b"\x03")
        with contextlib.suppress(OSError):  # the other end is closed
            while more := os.read(terminal, 1000).decode():
                told += more
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    finally:
        jobs.end(mark)
        os.close(terminal)
    assert code == 130, told
    assert_told(told, out, 0)


WAITS_FOR_A_RANK = """
import os, sys, time
from pathlib import Path

class Late:
    def find_spec(self, name, *rest):
        if name == "mpi4py.MPI":
            if os.environ["PMI_RANK"] == "1":
                time.sleep(10**6)
            Path(sys.argv.pop()).touch()

sys.meta_path.insert(0, Late())
from halograd.__main__ import main
main()
"""


def test_a_rank_that_starts_mpi_when_another_has_not(tmp_path):
    """If a rank is interrupted before another has started MPI, the launcher ends both, without a traceback."""
    script, mark = tmp_path / "late.py", tmp_path / "there"
    script.write_text(WAITS_FOR_A_RANK)
    with started(2, script, "train", write_config(tmp_path), mark) as (process, job):
        wait_until(mark.exists, "a rank to start MPI")
        os.kill(rank_processes(job)[0], signal.SIGINT)
        stdout, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode and "Traceback" not in stderr, stdout + stderr


# -- one process alone --------------------------------------------------------------------------


def interrupting(monkeypatch, owner: type, name: str, calls: int) -> None:
    """Make the given call of a method raise KeyboardInterrupt."""
    call, made = getattr(owner, name), []

    def method(self, *args, **kwargs):
        made.append(name)
        if len(made) == calls:
            raise KeyboardInterrupt
        return call(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, method)


def test_a_run_of_one_process(config, tmp_path, monkeypatch):
    """An interrupted run of one process frees its resources and raises the same message; it can be resumed."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        interrupting(patch, TrainingRun, "_log_step", 4)
        words = rf"interrupted at step 4; the newest checkpoint is {out}/checkpoints/step-00000003\.h5; go on with --re"
        with pytest.raises(KeyboardInterrupt, match=words):
            train(config, comm=MPI.COMM_SELF)
    status = status_of(read_record(out))
    assert (status.state, status.detail) == ("interrupted", f"SIGINT to rank 0 of 1 on {HOST}; go on with --resume")
    assert read_log(out / "log.jsonl", "failed") == []
    train(config, [], True, comm=MPI.COMM_SELF)
    assert status_of(read_record(out)).state == "finished"


def test_a_run_that_has_not_begun(config, tmp_path, monkeypatch):
    """An interrupt before the first step leaves the log of the previous run unchanged."""
    out = tmp_path / "out"
    train(config, comm=MPI.COMM_SELF)
    before = (out / "log.jsonl").read_text()
    interrupting(monkeypatch, Session, "sampler", 1)
    with pytest.raises(KeyboardInterrupt, match=r"before the first step; .*checkpoint is .*09\."):
        train(config, [], True, comm=MPI.COMM_SELF)
    assert (out / "log.jsonl").read_text() == before


# -- who speaks ---------------------------------------------------------------------------------


def test_of_ranks_that_are_interrupted_together_one_speaks(tmp_path):
    log = tmp_path / "log.jsonl"
    log.touch()

    def words() -> list[str | None]:
        told = []
        for rank in (2, 0, 1):
            with Communicator(MPI.COMM_SELF) as alone, Watchdog(alone, 0.0, log, lambda: None) as one:
                one.follow(Heartbeat())
                one._comm = SimpleNamespace(rank=rank, size=3, instruments=alone.instruments)
                told.append(one.interrupted())
        return told

    first = "interrupted at step 1; there is no checkpoint to go on from"
    assert words() == [first, None, None]
    assert [entry["reason"] for entry in read_log(log)] == ["SIGINT to rank 2 of 3"]
    append_line(log, {"event": "begin"})  # the next job of the run
    assert words() == [first, None, None]
    log.unlink()
    assert words() == [first] * 3
