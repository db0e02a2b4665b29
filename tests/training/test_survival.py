"""Tests of signals, kills and hanging ranks in real jobs: each ends in time, reports the cause, and is resumed."""

from __future__ import annotations

import os
import platform
import signal
from pathlib import Path

import pytest

from halograd.training.log import read_log
from halograd.training.signals import CHECKPOINTED
from tests.harness import jobs
from tests.harness.limits import LIMIT, wait_until
from tests.launch import mpiexec
from tests.training.launching import UNSEEN, Gate, losses, rank_processes, sets, started, wait_for_step
from tests.training.runs import write_config

HOST = platform.node()
#: Four epochs of six steps.
COMMON = ["training.batch=2", "training.epochs=4", "output.checkpoint_epochs=2"]
STEPS = 24


def curve(folder: Path) -> tuple[dict[int, float], list[tuple]]:
    """Return the losses by step, and the epoch and loss of every validation."""
    return losses(folder), [(e["epoch"], e["loss"]) for e in read_log(folder / "log.jsonl", "validation")]


def assert_same(found: Path, wanted: Path) -> None:
    (mine, judged), (theirs, expected) = curve(found), curve(wanted)
    assert list(mine) == list(theirs) == list(range(1, STEPS + 1))
    assert list(mine.values()) == pytest.approx(list(theirs.values()), rel=1e-9)
    assert [epoch for epoch, _ in judged] == [epoch for epoch, _ in expected]
    assert [loss for _, loss in judged] == pytest.approx([loss for _, loss in expected], rel=1e-9)


def said(stderr: str) -> list[str]:
    """Return the lines that the library, and not the launcher, has written."""
    found = [line for line in stderr.splitlines() if line.startswith("halograd: ")]
    assert found, stderr
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with data, configuration, and an undisturbed run of one process in `whole`."""
    folder = tmp_path_factory.mktemp("survival")
    config = write_config(folder)
    done = mpiexec(1, ["-m", "halograd", "train", config, *sets(*COMMON, f"output.directory={folder / 'whole'}")])
    assert done.returncode == 0, done.stderr
    return folder


def test_signals(whole):
    """After USR1 to the launcher, and after TERM twice to one rank, the exit code is 75, and no step is lost."""
    out = whole / "signals"
    train = ["-m", "halograd", "train", whole / "run.toml", "--resume", *sets(*COMMON, f"output.directory={out}")]
    gate = Gate(whole, 8, 0)
    with started(2, *train, *sets("strategy.height=2"), gate=gate) as (process, _):
        wait_for_step(out, 8, process)
        gate.await_waiting(1)  # the launcher signals all ranks: of those that get it in one step the first is named
        process.send_signal(signal.SIGUSR1)
        stdout, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode == CHECKPOINTED, stderr
    assert f"halograd: no checkpoint in {out}/checkpoints yet: starting from the beginning" in stderr.splitlines()
    (stopped,) = read_log(out / "log.jsonl", "stopped")
    first = stopped["step"]
    assert first in (9, 10) and max(losses(out)) == first and stopped["code"] == 75  # the step of the gate, or the next
    assert stdout.splitlines()[-1] == f"stopped after step {first} (SIGUSR1 to rank 0 of 2); go on with --resume"

    gate = Gate(whole, first + 3, 1)
    with started(3, *train, *sets("strategy.sample=1", "strategy.width=3"), gate=gate) as (process, mark):
        wait_for_step(out, first + 3, process)
        victim = rank_processes(mark)[1]
        os.kill(victim, signal.SIGTERM)
        gate.await_signal()
        os.kill(victim, signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode == CHECKPOINTED, stderr
    assert max(losses(out)) - first in (4, 5)
    assert stdout.splitlines()[-1].endswith("(SIGTERM to rank 1 of 3); go on with --resume")

    done = mpiexec(1, train)
    assert done.returncode == 0, done.stderr
    assert_same(out, whole / "whole")
    assert [p.name for p in (out / "checkpoints").glob(".*")] == []


@pytest.mark.parametrize("victim", [1, 0])
def test_killed_rank(whole, victim):
    """After SIGKILL of a rank under a launcher that ignores it, there is one message, and no rank is left."""
    out = whole / f"killed{victim}"
    train = ["-m", "halograd", "train", whole / "run.toml", *sets(*COMMON, f"output.directory={out}")]
    gate = Gate(whole, 3, victim)
    with started(3, *train, *sets("strategy.height=3"), wrapper=UNSEEN, gate=gate) as (process, mark):
        wait_for_step(out, 3, process)
        os.kill(rank_processes(mark)[victim], signal.SIGKILL)
        wait_until(lambda: not rank_processes(mark), "all ranks to end")
        jobs.end(mark)  # the launcher
        _, stderr = process.communicate(timeout=LIMIT)
    (failed,) = read_log(out / "log.jsonl", "failed")
    assert (failed["rank"], failed["host"]) == (victim, HOST) and "it was killed" in failed["cause"]
    (line,) = said(stderr)
    assert line.startswith(f"halograd: rank {victim} of 3 on {HOST}: its process is gone; it was killed")


def test_stopped_rank(whole):
    """A rank that does not respond (SIGSTOP, as on a node that hangs) is named by the other ranks."""
    out = whole / "frozen"
    train = ["-m", "halograd", "train", whole / "run.toml", *sets(*COMMON, f"output.directory={out}")]
    gate = Gate(whole, 3, 2)
    with started(3, *train, *sets("strategy.height=3", "run.stall_minutes=0.03"), gate=gate) as (process, mark):
        wait_for_step(out, 3, process)
        gate.await_waiting(0, 1)
        os.kill(rank_processes(mark)[2], signal.SIGSTOP)
        gate.let_hang()
        _, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode != 0
    (line,) = said(stderr)
    assert line.startswith(f"halograd: rank 2 of 3 on {HOST}: no progress for 0.03 min: it does not respond")
    assert f"rank 0 on {HOST}: step " in line and ", waiting for '" in line


HANGS = """
import sys, time
from halograd.cli import main
from halograd.training.executor import Executor

recorded = Executor._recorded

def hang(self, name, category, calls):
    def wait():
        if self.comm.rank == 1 and self.pulse.step == 2 and name == "conv2_1" and category == "backward":
            time.sleep(10**6)
    return recorded(self, name, category, [wait, *calls])

Executor._recorded = hang
main(sys.argv[1:])
"""


def test_stalled_layer(whole):
    """If one rank hangs in a layer, the message names the layer, and the exchange in which the others wait."""
    script, out = whole / "hangs.py", whole / "stalled"
    script.write_text(HANGS)
    settings = sets(*COMMON, f"output.directory={out}", "strategy.height=3", "run.stall_minutes=0.03")
    gate = Gate(whole)
    with started(3, script, "train", whole / "run.toml", *settings, gate=gate) as (process, _):
        gate.await_waiting(0, 2, updates=2)
        gate.let_hang()
        _, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode != 0
    (line,) = said(stderr)
    where = "no progress for 0.03 min: step 3, backward of layer 'conv2_1', not in an exchange (at hangs.py:"
    assert line.startswith(f"halograd: rank 1 of 3 on {HOST}: {where}")
    assert f"rank 0 on {HOST}: step 3, backward of layer '" in line and "waiting for 'halo: " in line
    (failed,) = read_log(out / "log.jsonl", "failed")
    assert failed["rank"] == 1 and failed["at_step"] == 2


STALL = "run.stall_minutes=0.03"  # from when the test says so


def assert_rank_0_is_named(size: int, stderr: str, out: Path) -> None:
    """Check that one line reports that rank 0 does not respond, and where all others wait."""
    (line,) = [line for line in stderr.splitlines() if line.startswith("halograd: ")]
    assert line.startswith(f"halograd: rank 0 of {size} on {HOST}: no progress for 0.03 min: it does not respond")
    for rank in range(1, size):
        assert f"rank {rank} on {HOST}: step " in line
    assert ", waiting for '" in line
    (failed,) = read_log(out / "log.jsonl", "failed")
    assert (failed["rank"], failed["host"]) == (0, HOST)


@pytest.mark.parametrize("size", [4])
def test_rank_0_is_stopped(whole, size):
    out = whole / f"stopped{size}"
    settings, gate = sets(f"output.directory={out}", f"strategy.height={size}", STALL), Gate(whole, 3, 0)
    with started(size, "-m", "halograd", "train", whole / "run.toml", *settings, gate=gate) as (process, mark):
        wait_for_step(out, 3, process)
        gate.await_waiting(*range(1, size))
        os.kill(rank_processes(mark)[0], signal.SIGSTOP)
        gate.let_hang()
        _, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode not in (0, 2, 64, 75, 130)  # what a script does not start again
    assert_rank_0_is_named(size, stderr, out)


LOCKS = """
import ctypes, sys
from halograd.cli import main
from halograd.training.executor import Executor

recorded = Executor._recorded

def lock(self, name, category, calls):
    def wait():
        if self.comm.rank == 0 and self.pulse.step == 2 and name == "conv2_1" and category == "backward":
            ctypes.PyDLL(None).sleep(1000000)
    return recorded(self, name, category, [wait, *calls])

Executor._recorded = lock
main(sys.argv[1:])
"""


@pytest.mark.parametrize("size", [2])
def test_the_interpreter_of_rank_0_is_locked(whole, size):
    """If a native call locks the interpreter of rank 0, and so its watchdog, the other ranks name rank 0."""
    out, script = whole / f"locked{size}", whole / "locks.py"
    script.write_text(LOCKS)
    settings, gate = sets(f"output.directory={out}", f"strategy.height={size}", STALL), Gate(whole)
    with started(size, script, "train", whole / "run.toml", *settings, gate=gate) as (process, _):
        gate.await_waiting(1, updates=2)
        gate.let_hang()
        _, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode not in (0, 2, 64, 75, 130)
    assert_rank_0_is_named(size, stderr, out)
