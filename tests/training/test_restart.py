"""Jobs that end badly: killed in mid-epoch and resumed elsewhere, diverged, or failed on one rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py
import pytest

from halograd.training.log import read_log
from tests.harness import jobs
from tests.launch import find_mpiexec, mpiexec
from tests.training.runs import write_config

# Messages take their time, so that there is time to kill.
SLOW = "backend.transport=emulated:alpha=2e-3,beta=0"
COMMON = ["training.batch=2", "training.epochs=4", "output.checkpoint_steps=4", "output.keep=99"]
STEPS, KILL_AFTER = 24, 10  # six steps per epoch: step 8 is a checkpoint in the middle of the second one


def sets(*overrides: str) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


@contextmanager
def started(n: int, *args: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A job and its mark; afterwards nothing of it must be alive."""
    mark = jobs.new_mark()
    command = [find_mpiexec(), "-n", str(n), sys.executable, *map(str, args)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=jobs.job_environment(mark)
    )
    segments: set[str] = set()
    try:
        yield process, mark
        segments = jobs.segments(jobs.members(mark))
        process.communicate(timeout=30)
        assert jobs.await_end(mark) == [], "expected no process to outlive the job"
    finally:
        jobs.end(mark)
        process.kill()
        jobs.remove(segments)


def rank_processes(mark: str) -> list[int]:
    """Process ids of the ranks of a job: those that run our Python."""
    found = []
    for pid in jobs.members(mark):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if words[0].decode() == sys.executable:
            found.append(pid)
    return sorted(found)


def losses(folder: Path) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in read_log(folder / "log.jsonl", "step")}


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not (folder / "log.jsonl").exists() or max(losses(folder), default=0) < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "expected the job to make steps"
        time.sleep(0.005)


@pytest.mark.timeout(240)
def test_killed_and_resumed(tmp_path):
    """kill -9 of one of 4 ranks (2 x 2 spatial) in mid-epoch, resumed by 2 ranks (sample cut): the same curve."""
    config = write_config(tmp_path)
    train = ["-m", "halograd", "train", config, *sets(*COMMON)]
    whole = mpiexec(1, [*train, *sets(f"output.directory={tmp_path / 'whole'}")])
    assert whole.returncode == 0, whole.stderr

    with started(4, *train, *sets(SLOW, "strategy.height=2", "strategy.width=2")) as (process, mark):
        wait_for_step(tmp_path / "out", KILL_AFTER, process)
        ranks = rank_processes(mark)
        assert len(ranks) == 4
        os.kill(ranks[2], signal.SIGKILL)
        process.wait(timeout=30)
    assert process.returncode != 0
    assert KILL_AFTER <= max(losses(tmp_path / "out")) < STEPS

    resumed = mpiexec(2, [*train, *sets("strategy.sample=2"), "--resume"])
    assert resumed.returncode == 0, resumed.stderr
    found, wanted = losses(tmp_path / "out"), losses(tmp_path / "whole")
    assert list(found) == list(wanted) == list(range(1, STEPS + 1))
    assert list(found.values()) == pytest.approx(list(wanted.values()), rel=1e-9)
    mine, theirs = (read_log(tmp_path / f / "log.jsonl", "validation") for f in ("out", "whole"))
    assert [e["loss"] for e in mine] == pytest.approx([e["loss"] for e in theirs], rel=1e-9)
    assert [e["iou"] for e in mine] == [e["iou"] for e in theirs]


@pytest.mark.timeout(120)
def test_diverged(tmp_path):
    """One line on stderr, exit code 2, the last good checkpoint named and readable."""
    config = write_config(tmp_path)
    settings = ["optimizer={kind = 'sgd'}", "schedule={kind = 'step', learning_rate = 0.01, milestones = [1]}"]
    settings += ["schedule.factor=1e300", "strategy.height=2"]
    done = mpiexec(2, ["-m", "halograd", "train", config, *sets(*settings)])
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("halograd: error: step ") and "lower schedule.learning_rate" in line
    named = Path(line.rpartition("the last good checkpoint is ")[2])
    with h5py.File(named) as file:
        assert "params" in file


FAILS = """
import sys
from halograd.cli import main
from halograd.training.trainer import Trainer

step = Trainer.step

def fail(self):
    if self.executor.comm.rank == 1 and self.optimizer.step == 2:
        raise RuntimeError("a bug on one rank")
    return step(self)

Trainer.step = fail
main(["train", sys.argv[1], "--set", "strategy.height=3"])
"""


@pytest.mark.timeout(120)
def test_one_rank_fails(tmp_path):
    """The job ends at once, with the traceback of the rank that failed, and leaves no process."""
    config = write_config(tmp_path)
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    with started(3, script, config) as (process, _):
        wait_for_step(tmp_path / "out", 1, process)
        begin = time.monotonic()
        _, stderr = process.communicate(timeout=30)
        assert time.monotonic() - begin < 10
    assert process.returncode != 0
    assert "[rank 1 of 3] RuntimeError: a bug on one rank" in stderr
    assert "[rank 0 of 3]" not in stderr and "[rank 2 of 3]" not in stderr


@pytest.mark.timeout(120)
def test_bad_data_on_one_rank(tmp_path):
    """A NaN that only the rank of the lower half reads ends the job with one line."""
    config = write_config(tmp_path)
    with h5py.File(tmp_path / "data.h5", "r+") as file:
        file["inputs"][:, 13, 3, 1] = float("nan")
    settings = sets("strategy.height=2", "data.normalize=false")
    with started(2, "-m", "halograd", "train", config, *settings) as (process, _):
        _, stderr = process.communicate(timeout=60)
    assert process.returncode != 0
    lines = [line for line in stderr.splitlines() if line.startswith("halograd: error: ")]
    assert len(lines) == 1 and "nan in sample" in lines[0] and lines[0].endswith("(rank 1 of 2)")
    assert "Traceback" not in stderr
