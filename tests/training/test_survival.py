"""Tests of signals, kills and hanging ranks in real jobs: each ends in time, reports the cause, and is resumed."""

from __future__ import annotations

import os
import platform
import signal
import time
from pathlib import Path

import pytest

from halograd.report.status import read_record, status_of
from halograd.training.log import read_log
from halograd.training.signals import CHECKPOINTED
from halograd.training.watchdog import LOCKED, STALLS
from tests.harness import jobs
from tests.harness.limits import LIMIT, slowness, wait_until
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


# A rank makes one of these calls in the backward pass of one layer, in the third step.
FAULTS = """
import ctypes, os, signal, sys, time
from pathlib import Path

from mpi4py import MPI

from halograd.cli import main
from halograd.training.executor import Executor

faults = {
    "hangs": lambda: time.sleep(10**6),
    "locks": lambda: ctypes.PyDLL(None).sleep(10**6),
    "stops": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "suspends": lambda: os.kill(os.getpid(), signal.SIGTSTP),
    "dies": lambda: os.kill(os.getpid(), signal.SIGKILL),
}
def listening():
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    accepting = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}
    return len([one for one in Path("/proc/self/fd").iterdir() if one.is_symlink() and os.readlink(one) in accepting])

MPI.COMM_WORLD.Barrier()
by_mpi = listening()
fault, victim = faults[sys.argv.pop(1)], int(sys.argv.pop(1))
recorded = Executor._recorded

def disturbed(self, name, category, calls):
    def disturb():
        if self.heartbeat.step == 2 and name == "conv2_1" and category == "backward":
            if listening() > by_mpi:
                os.write(2, f"halograd: {listening()} sockets listen, {by_mpi} of them are MPI's\\n".encode())
            if self.comm.rank == victim:
                fault()
    return recorded(self, name, category, [disturb, *calls])

Executor._recorded = disturbed
main()
"""
SILENT = "it does not respond (killed, stopped, in a call that locks the interpreter, or its node hangs)"


NIGHTLY = [pytest.param(*case, marks=pytest.mark.nightly) for case in (("hangs", 1), ("locks", 0), ("dies", 1))]


@pytest.mark.parametrize(("fault", "victim"), [("stops", 0), *NIGHTLY])
def test_a_rank_without_progress(whole, fault, victim):
    """The other ranks report a rank that hangs, does not respond or is dead, and no rank is left. The run goes on.

    No rank listens on a network.
    """
    script, out, size = whole / "faults.py", whole / fault, 3 if fault == "hangs" else 2
    script.write_text(FAULTS)
    settings = sets(*COMMON, f"output.directory={out}")
    patience = sets(f"strategy.height={size}", "run.stall_minutes=0.03")
    wrapper, gate = UNSEEN if fault == "dies" else (), Gate(whole)
    train = ["train", whole / "run.toml", *settings]
    with started(size, script, fault, victim, *train, *patience, wrapper=wrapper, gate=gate) as (process, mark):
        gate.await_waiting(*{*range(size)} - {victim}, updates=2)
        gate.let_hang()
        if fault == "dies":  # the launcher does not notice it
            wait_until(lambda: not rank_processes(mark), "all ranks to end")
            jobs.end(mark)
        _, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode not in (0, 2, 64, 75, 130)  # what a script does not start again
    (line,) = said(stderr)
    where = "step 3, backward of layer 'conv2_1', not in an exchange (at faults.py:" if fault == "hangs" else SILENT
    where = "its process was killed" if fault == "dies" else f"no progress for 0.03 min: {where}"
    assert line.startswith(f"halograd: rank {victim} of {size} on {HOST}: {where}")
    for rank in {*range(size)} - {victim} if fault != "dies" else ():
        assert f"rank {rank} on {HOST}: step 3, backward of layer '" in line and "waiting for 'halo: " in line
    (failed,) = read_log(out / "log.jsonl", "failed")
    assert (failed["rank"], failed["host"], failed.get("at_step", 2)) == (victim, HOST, 2)
    assert status_of(read_record(out)).state == "failed"
    (stacks,) = [one.read_text() for one in (out / STALLS).glob(f"rank-{victim:05d}.*")]
    assert ("faults.py" in stacks) == (fault in ("hangs", "locks")), stacks
    if fault == "stops":
        done = mpiexec(1, ["-m", "halograd", *train, "--resume"])
        assert done.returncode == 0, done.stderr
        told = f"halograd: the job before ended without progress: rank {victim} on {HOST}: {SILENT}"
        assert [line for line in said(done.stderr) if line.startswith(told)], done.stderr
        assert_same(out, whole / "whole")
        assert not (out / STALLS).exists()


@pytest.mark.nightly
def test_a_suspended_job(whole):
    """A job that is suspended (SIGTSTP, as by Ctrl-Z) for longer than its limit goes on when it is continued."""
    script, out = whole / "faults.py", whole / "suspended"
    script.write_text(FAULTS)
    settings = sets(*COMMON, f"output.directory={out}", "run.stall_minutes=0.01")
    with started(1, script, "suspends", 0, "train", whole / "run.toml", *settings, gate=Gate(whole)) as (process, mark):
        stopped = lambda: [one for one in rank_processes(mark) if state_of(one) == "T"]  # noqa: E731
        (suspended,) = wait_until(stopped, "the rank to stop")
        time.sleep(0.6 + min(4.0, slowness()) * LOCKED + 1)
        os.kill(suspended, signal.SIGCONT)
        _, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, stderr
    assert_same(out, whole / "whole")


def state_of(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
