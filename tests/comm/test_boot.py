"""How a program of several ranks begins and ends."""

import os
import platform
import subprocess
import sys

import pytest

from halograd.comm import ending, launched_size
from tests.harness.limits import LIMIT
from tests.launch import mpiexec
from tests.support.clock import DrivenClock

START = "from halograd.comm import boot, leave\nworld = boot()\n"


def run(body, ranks=3):
    """Exit code and stderr of a program whose ranks all run `body` after `boot()`; it must end by itself."""
    done = mpiexec(ranks, ["-c", START + body])
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("environment", "size"),
    [
        ({}, None),
        ({"PMI_SIZE": "4"}, 4),
        ({"OMPI_COMM_WORLD_SIZE": "6"}, 6),
        ({"SLURM_NTASKS": "8"}, None),
        ({"SLURM_STEP_NUM_TASKS": "8"}, None),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8"}, 8),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "PMI_SIZE": "4"}, 4),
        ({"PMI_SIZE": ""}, None),
    ],
)
def test_size_the_launcher_says(environment, size):
    assert launched_size(environment) == size


def test_a_launcher_of_another_mpi_is_refused():
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "SLURM", "HYDRA"))}
    environment["OMPI_COMM_WORLD_SIZE"] = "4"
    command = [sys.executable, "-c", START + "print('went on')"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 64
    assert "expected 4 ranks (the launcher says so), got 1 from" in done.stderr
    assert "went on" not in done.stdout


def test_an_exception_on_one_rank_ends_the_job_with_its_traceback():
    code, stderr = run("if world.rank == 1: raise OSError('file is truncated')\nworld.Barrier()")
    assert code == 1
    assert "[rank 1 of 3] Traceback (most recent call last):" in stderr
    assert "[rank 1 of 3] OSError: file is truncated" in stderr
    (line,) = [line for line in stderr.splitlines() if line.startswith("halograd: ")]
    assert line == f"halograd: rank 1 of 3 on {platform.node()}: OSError: file is truncated; the job ends"
    assert "[rank 0 of 3]" not in stderr


@pytest.mark.parametrize("attempt", range(4))
def test_the_code_of_an_abort_reaches_the_launcher(attempt):
    """Also from a clone of the communicator, where MPICH's mpiexec may see the kills that follow first."""
    body = "import time; from halograd.comm.ending import end\nmine = world.Dup()\n"
    body += "if mine.rank == 1: end(mine, 130)\ntime.sleep(60)"
    assert run(body)[0] == 130


def test_a_thread_may_exit_by_itself():
    body = "import threading, sys\nt = threading.Thread(target=sys.exit, args=(3,)); t.start(); t.join()\nleave(0)"
    assert run(body)[0] == 0


@pytest.mark.parametrize("read", [True, False])
def test_a_job_is_ended_when_the_launcher_has_read_what_was_printed(monkeypatch, read):
    """Or does not read it at all."""

    class Reader(DrivenClock):
        def sleep(self, seconds):
            super().sleep(seconds)
            if read and len(self.naps) == 3:
                assert os.read(outer, 100) == b"[rank 1 of 3] Traceback"

    module = ending
    clock = Reader(tick=0.0).drive(monkeypatch, module)
    outer, inner = os.pipe()
    os.write(inner, b"[rank 1 of 3] Traceback")
    try:
        module.await_reader(inner)
    finally:
        os.close(outer)
        os.close(inner)
    assert len(clock.naps) == 3 if read else clock.seconds == pytest.approx(module.READING, abs=2e-3)


@pytest.mark.parametrize("code", [0, 2, 75])
def test_leaving_with_a_code(code):
    assert run(f"leave({code})")[0] == code


def test_aborting_from_one_rank():
    body = "from halograd.comm import Communicator\ncomm = Communicator(world, 'mpi')\n"
    body += "if comm.rank == 1: comm.abort(7)\ncomm.barrier()"
    code, _ = run(body)
    assert code == 7


def test_a_communicator_that_is_not_closed_does_not_keep_the_program():
    body = "import numpy as np\nfrom halograd.comm import Communicator\ncomm = Communicator(world)\n"
    body += "r = comm.reduction(np.ones(4)); r.start(); r.finish(); assert r.buffer[0] == 3"
    code, stderr = run(body)
    assert (code, stderr) == (0, "")


def test_pure_arithmetic_does_not_start_mpi():
    check = "import sys, halograd.comm; halograd.comm.shards(1, 1, 1); sys.exit('mpi4py' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=LIMIT).returncode == 0
    check = "import halograd.comm as c; c.nonsense"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=LIMIT)
    assert "AttributeError: module 'halograd.comm' has no attribute 'nonsense'" in done.stderr
