"""Tests of the start and the end of programs with several ranks."""

import os
import platform
import shutil
import subprocess
import sys

import pytest

from halograd.comm import ending, launched_size
from halograd.comm.boot import shared_memory_fault
from tests.harness import jobs, mpi
from tests.harness.limits import LIMIT
from tests.launch import find_mpiexec, mpiexec
from tests.support.clock import DrivenClock

START = "from halograd.comm import boot, leave\nworld = boot()\n"


def run(body, ranks=3):
    """Return exit code and stderr of a program whose ranks all run `body` after `boot()`; it must end by itself."""
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
        ({"JSM_NAMESPACE_SIZE": "42"}, 42),
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
    assert "expected 4 ranks (as the launcher reports), got 1 from" in done.stderr
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
    """The exit code of an abort reaches the launcher, also from a cloned communicator."""
    body = "import time; from halograd.comm.ending import end\nmine = world.Dup()\n"
    body += "if mine.rank == 1: end(mine, 130)\ntime.sleep(60)"
    assert run(body)[0] == 130


def test_a_thread_may_exit_by_itself():
    body = "import threading, sys\nt = threading.Thread(target=sys.exit, args=(3,)); t.start(); t.join()\nleave(0)"
    assert run(body)[0] == 0


@pytest.mark.parametrize("read", [True, False])
def test_a_job_is_ended_when_the_launcher_has_read_what_was_printed(monkeypatch, read):
    """Waiting for the launcher ends when it has read the printed error, or after a limit if it reads nothing."""

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


@pytest.mark.parametrize(
    ("name", "folders"),
    [("Communicator", "('layers', 'training', 'perfmodel')"), ("Network", "('perfmodel', 'data', 'auto')")],
)
def test_a_name_loads_what_it_needs_and_no_more(name, folders):
    """A name loads only the modules that it needs: a script with a communicator does not load planners and training."""
    check = f"import sys, halograd; halograd.{name}; sys.exit([m for m in sys.modules if m.split('.')[1:2] and "
    check += f"m.split('.')[0] == 'halograd' and m.split('.')[1] in {folders}] or 0)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stderr) == (0, "")


HYDRA = {"PMI_SIZE": "8", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "4"}
SLURM = {"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1,4(x2),3"}


@pytest.mark.parametrize(
    ("environment", "needed"),
    [
        ({}, 21),
        (HYDRA, 37),
        (SLURM, 37),
        ({**SLURM, **HYDRA, "MPI_LOCALNRANKS": "1"}, 21),
        ({**HYDRA, "UCX_TLS": "^posix"}, 4),
        ({**HYDRA, "MPI_LOCALRANKID": "3"}, 37),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, None),
    ],
)
def test_shared_memory_that_does_not_suffice_to_start(environment, needed):
    """Too little shared memory gives a message with the need of all ranks of a node; Open MPI has its own message."""
    found = shared_memory_fault(0, environment)
    assert shared_memory_fault(100 << 20, environment) is None
    if needed is None:
        assert found is None
        return
    assert f"expected {needed} MiB free in /dev/shm for " in found and "got 0.0 MiB" in found and "--shm-size" in found
    assert ("set UCX_TLS=^posix" in found) == ("UCX_TLS" not in environment)
    assert shared_memory_fault((needed - 1) << 20, environment) is not None
    assert shared_memory_fault((needed + 1) << 20, environment) is None


def in_small_memory(mebibytes, *command, **variables):
    """Run a command in its own namespace with a /dev/shm of this size."""
    script = f'mount -t tmpfs -o size={mebibytes}m tmpfs /dev/shm && exec "$@"'
    isolated = ["unshare", "--mount", "--map-root-user", "sh", "-c", script, "sh"]
    if shutil.which("unshare") is None or subprocess.run([*isolated, "true"], capture_output=True).returncode:
        pytest.skip("needs unshare, and leave to mount in a name space of its own")
    environment = jobs.job_environment(jobs.new_mark(), variables)
    return subprocess.run([*isolated, *command], capture_output=True, text=True, timeout=LIMIT, env=environment)


@pytest.mark.skipif(mpi.LAUNCHER in os.environ, reason="needs MPICH: Open MPI reports it by itself")
@pytest.mark.parametrize("ranks", [0, 1, 2])
def test_a_line_before_mpi_crashes_for_want_of_shared_memory(ranks):
    """The first rank of a node prints one warning about too little shared memory before MPICH may crash."""
    launcher = [find_mpiexec(), "-n", str(ranks)] if ranks else []
    command = [*launcher, sys.executable, "-m", "halograd", "doctor"]
    done = in_small_memory(16, *command)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("halograd: ")]
    needed = {0: 21, 1: 21, 2: 27}[ranks]
    assert f"warning: shared memory: expected {needed} MiB free in /dev/shm for {ranks or 1} ranks on this node" in line
    sound = in_small_memory(16, *command, UCX_TLS="^posix")
    assert sound.returncode == 0 and "halograd: " not in sound.stderr, sound.stdout + sound.stderr
    assert "train with the transport mpi, and set UCX_TLS=^posix" in sound.stdout


@pytest.mark.skipif(mpi.LAUNCHER in os.environ, reason="needs MPICH: Open MPI reports it by itself")
def test_a_program_says_it_too():
    done = in_small_memory(1, find_mpiexec(), "-n", "2", sys.executable, "-c", START + "leave(0)")
    assert done.returncode != 0 and "warning: shared memory: expected 27 MiB free in /dev/shm" in done.stderr
