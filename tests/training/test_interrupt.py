"""Tests of SIGINT: a run ends at once, logs it, and names in one line the checkpoint to resume from."""

from __future__ import annotations

import contextlib
import os
import platform
import pty
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.report.status import read_record, status_of
from halograd.training.log import read_log
from halograd.training.process_monitor import append_line
from halograd.training.run import TrainingRun, train
from halograd.training.session import Session
from halograd.training.watchdog import Heartbeat, Watchdog
from tests.harness import jobs
from tests.harness.limits import LIMIT, wait_until
from tests.launch import find_mpiexec
from tests.training.launching import Gate, rank_processes, sets, started, wait_for_step
from tests.training.runs import write_config

HOST = platform.node()
#: Epochs of six steps.
COMMON = ["training.batch=2", "training.epochs=40", "output.checkpoint_epochs=1", "strategy.height=3"]


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
    train = ["-m", "halograd", "train", write_config(tmp_path), *sets(*COMMON)]
    with started(3, *train, gate=Gate(tmp_path, 8)) as (process, mark):
        wait_for_step(out, 8, process)
        os.kill(rank_processes(mark)[victim], signal.SIGINT)
        stdout, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode == 130, stdout + stderr
    assert_told(stdout + stderr, out, victim)


def test_a_rank_that_waits_for_one_that_hangs(tmp_path):
    """A rank that waits in MPI for a hanging one is interrupted, although Python raises no KeyboardInterrupt in MPI."""
    out = tmp_path / "out"
    train = ["-m", "halograd", "train", write_config(tmp_path), *sets(*COMMON, "backend.transport=mpi")]
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
        os.execve(command[0], [*command, *sets(*COMMON)], environment)
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
