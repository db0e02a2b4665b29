"""Tests of jobs that fail: killed and resumed with another cut, diverged, or with an error of one rank."""

import os
import platform
import signal
from pathlib import Path

import h5py
import pytest

from halograd.errors import UserError
from halograd.report.status import read_record, status_of
from halograd.training.directory import checkpoint_of
from halograd.training.log import read_log
from halograd.training.run import train
from halograd.training.watchdog import STALLS, read_positions
from tests.harness.limits import LIMIT, wait_until
from tests.launch import PATIENT, mpiexec
from tests.training.launching import Gate, losses, rank_processes, sets, started, wait_for_step
from tests.training.runs import write_config

COMMON = ["training.batch=2", "training.epochs=4", "output.checkpoint_steps=4", "output.keep=99"]
STEPS, KILL_AFTER = 24, 10  # six steps per epoch: step 8 is a checkpoint in the middle of the second one


def test_killed_and_resumed(tmp_path):
    """A job of 2 x 2 ranks in space, one of which is killed, is resumed by 2 ranks that cut samples.

    The losses are those of one process.
    """
    config = write_config(tmp_path)
    train = ["-m", "halograd", "train", config, *sets(*COMMON)]
    whole = mpiexec(1, [*train, *sets(f"output.directory={tmp_path / 'whole'}")])
    assert whole.returncode == 0, whole.stderr

    gate = Gate(tmp_path, KILL_AFTER, 2)
    with started(4, *train, *sets("strategy.height=2", "strategy.width=2"), gate=gate) as (process, mark):
        wait_for_step(tmp_path / "out", KILL_AFTER, process)
        ranks = rank_processes(mark)
        assert len(ranks) == 4
        os.kill(ranks[2], signal.SIGKILL)
        process.wait(timeout=LIMIT)
    assert process.returncode != 0
    assert max(losses(tmp_path / "out")) == KILL_AFTER

    assert (tmp_path / "out" / "run.lock").exists()
    # The monitor of the node reports the rank that was killed, after the launcher has ended.
    wait_until(lambda: read_log(tmp_path / "out" / "log.jsonl", "failed"), "the line of the killed rank")
    status = status_of(read_record(tmp_path / "out"))
    assert status.state == "failed" and status.detail.startswith(f"rank 2 on {platform.node()}: its process was killed")
    assert read_positions(tmp_path / "out" / STALLS)[2].process == ranks[2]  # the launcher names the process
    resumed = mpiexec(2, [*train, *sets("strategy.sample=2"), "--resume"])
    assert resumed.returncode == 0, resumed.stderr
    assert "run.lock: taken over from process" in resumed.stderr and "its process is gone" in resumed.stderr
    assert not (tmp_path / "out" / "run.lock").exists()
    found, wanted = losses(tmp_path / "out"), losses(tmp_path / "whole")
    assert list(found) == list(wanted) == list(range(1, STEPS + 1))
    assert list(found.values()) == pytest.approx(list(wanted.values()), rel=1e-9)
    mine, theirs = (read_log(tmp_path / f / "log.jsonl", "validation") for f in ("out", "whole"))
    assert [e["loss"] for e in mine] == pytest.approx([e["loss"] for e in theirs], rel=1e-9)
    assert [e["iou"] for e in mine] == [e["iou"] for e in theirs]


def test_diverged(tmp_path):
    """A diverged run prints one line, ends with exit code 2, and names the last good checkpoint."""
    config = write_config(tmp_path)
    settings = ["optimizer={kind = 'sgd'}", "schedule={kind = 'step', learning_rate = 0.01, milestones = [1]}"]
    settings += ["schedule.factor=1e30", "training.dtype=float32", "strategy.height=2"]
    done = mpiexec(2, [*PATIENT, "train", config, *sets(*settings)])
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("halograd: error: step ") and "lower schedule.learning_rate" in line
    assert f" (on rank 0 of 2 on {platform.node()}, and on 1 more); the last" in line
    named = Path(line.rpartition("the last good checkpoint is ")[2])
    with h5py.File(named) as file:
        assert "params" in file


def test_two_runs_in_one_directory(tmp_path):
    """A second run in a directory ends with a one-line error; the first one continues until its signal."""
    config = write_config(tmp_path)
    train = ["-m", "halograd", "train", config, *sets(*COMMON)]
    with started(2, *train, *sets("strategy.height=2"), gate=Gate(tmp_path, 5, 0)) as (process, mark):
        wait_for_step(tmp_path / "out", 5, process)
        for more in ([], ["--resume"]):
            second = mpiexec(1, [*train, *more])
            assert second.returncode == 2 and len(second.stderr.splitlines()) == 1
            assert "expected one that no other run writes to" in second.stderr and "held by process" in second.stderr
        os.kill(rank_processes(mark)[0], signal.SIGUSR1)
        _, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode == 75, stderr
    steps = list(losses(tmp_path / "out"))
    assert steps == list(range(1, len(steps) + 1))
    assert checkpoint_of(tmp_path / "out" / "checkpoints" / "latest.h5").name == f"step-{steps[-1]:08d}.h5"


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
main(sys.argv[1:])
"""


def test_one_rank_fails(tmp_path):
    """An error of one rank ends the job at once, with the traceback of this rank, and leaves no process."""
    config = write_config(tmp_path)
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    with started(3, script, "train", config, *sets("strategy.height=3"), gate=Gate(tmp_path)) as (process, _):
        _, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode != 0
    assert "[rank 1 of 3] RuntimeError: a bug on one rank" in stderr
    assert f"halograd: rank 1 of 3 on {platform.node()}: RuntimeError: a bug on one rank; the job ends" in stderr
    (failed,) = read_log(tmp_path / "out" / "log.jsonl", "failed")
    assert (failed["rank"], failed["cause"]) == (1, "RuntimeError: a bug on one rank") and failed["time"] > 1e9
    assert "[rank 0 of 3]" not in stderr and "[rank 2 of 3]" not in stderr


def test_bad_data_on_one_rank(tmp_path):
    """A NaN that only one rank reads ends the job with one line."""
    config = write_config(tmp_path)
    with h5py.File(tmp_path / "data.h5", "r+") as file:
        file["inputs"][1:, 13, 3, 1] = float("nan")  # the look at sample 0 before the run finds nothing
    settings = sets("strategy.height=2", "data.normalize=false")
    with started(2, "-m", "halograd", "train", config, *settings, gate=Gate(tmp_path)) as (process, _):
        _, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode != 0
    lines = [line for line in stderr.splitlines() if line.startswith("halograd: error: ")]
    assert len(lines) == 1 and "nan in sample" in lines[0] and lines[0].endswith(f"(rank 1 of 2 on {platform.node()})")
    assert "Traceback" not in stderr


@pytest.mark.mpi
def test_a_refused_start_leaves_no_trace(comm, config):
    """A run that is rejected at its start does not change the log of the previous job, which may still run."""
    folder = config.parent
    sets = [f"strategy.height={comm.size}", "training.epochs=1"]
    train(folder / "run.toml", sets, comm=comm)
    comm.Barrier()
    before = (folder / "out" / "log.jsonl").read_text()
    for more, resume in ((sets, False), ([*sets, f"strategy.height={comm.size + 1}"], True)):
        with pytest.raises(UserError):
            train(folder / "run.toml", more, resume, comm=comm)
        comm.Barrier()
        assert (folder / "out" / "log.jsonl").read_text() == before
