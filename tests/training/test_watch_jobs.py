"""Real jobs whose rank 0 does not answer. (Jobs that are suspended as a whole: test_watch.py, on its own clock.)"""

from __future__ import annotations

import os
import platform
import signal
from pathlib import Path

import pytest

from halograd.training.log import read_log
from tests.harness.limits import LIMIT
from tests.training.launching import Gate, rank_processes, sets, started, wait_for_step
from tests.training.runs import write_config

HOST = platform.node()
STALL = "run.stall_minutes=0.03"  # from when the test says so


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data and configuration."""
    found = tmp_path_factory.mktemp("watch")
    write_config(found)
    return found


def assert_rank_0_is_named(size: int, stderr: str, out: Path) -> None:
    """One line of our own says that rank 0 does not answer, and where all others wait."""
    (line,) = [line for line in stderr.splitlines() if line.startswith("halograd: ")]
    assert line.startswith(f"halograd: rank 0 of {size} on {HOST}: no progress for 0.03 min: it does not answer")
    for rank in range(1, size):
        assert f"rank {rank} on {HOST}: step " in line
    assert ", waiting for '" in line
    (failed,) = read_log(out / "log.jsonl", "failed")
    assert (failed["rank"], failed["host"]) == (0, HOST)


@pytest.mark.parametrize("size", [4])
def test_rank_0_is_stopped(folder, size):
    out = folder / f"stopped{size}"
    settings, gate = sets(f"output.directory={out}", f"strategy.height={size}", STALL), Gate(folder, 3, 0)
    with started(size, "-m", "halograd", "train", folder / "run.toml", *settings, gate=gate) as (process, mark):
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

run = Executor._run

def lock(self, name, category, call):
    if self.comm.rank == 0 and self.pulse.step == 2 and name == "conv2_1" and category == "backward":
        def call():
            ctypes.PyDLL(None).sleep(1000000)
    run(self, name, category, call)

Executor._run = lock
main(sys.argv[1:])
"""


@pytest.mark.parametrize("size", [2])
def test_the_interpreter_of_rank_0_is_locked(folder, size):
    """A native call that does not release the lock: its watchdog cannot run, nor can any other thread of it."""
    out, script = folder / f"locked{size}", folder / "locks.py"
    script.write_text(LOCKS)
    settings, gate = sets(f"output.directory={out}", f"strategy.height={size}", STALL), Gate(folder)
    with started(size, script, "train", folder / "run.toml", *settings, gate=gate) as (process, _):
        gate.await_waiting(1, updates=2)
        gate.let_hang()
        _, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode not in (0, 2, 64, 75, 130)
    assert_rank_0_is_named(size, stderr, out)
