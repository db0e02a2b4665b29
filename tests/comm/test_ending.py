"""Tests of the start and the end of programs with several ranks, also of those that fail."""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from halograd.comm import ending, launched_size
from halograd.comm.boot import shared_memory_fault
from tests.harness import jobs, mpi
from tests.harness.jobs import job_environment, new_mark
from tests.harness.limits import LIMIT
from tests.launch import find_mpiexec, mpiexec
from tests.support.clock import DrivenClock

BOOT_START = "from halograd.comm import boot, leave\nworld = boot()\n"


def run_boot(body, ranks=3):
    """Return exit code and stderr of a program whose ranks all run `body` after `boot()`; it must end by itself."""
    done = mpiexec(ranks, ["-c", BOOT_START + body])
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


def test_boot_a_launcher_of_another_mpi_is_refused():
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "SLURM", "HYDRA"))}
    environment["OMPI_COMM_WORLD_SIZE"] = "4"
    command = [sys.executable, "-c", BOOT_START + "print('went on')"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 64
    assert "expected 4 ranks (as the launcher reports), got 1 from" in done.stderr
    assert "went on" not in done.stdout


def test_an_exception_on_one_rank_ends_the_job_with_its_traceback():
    code, stderr = run_boot("if world.rank == 1: raise OSError('file is truncated')\nworld.Barrier()")
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
    assert run_boot(body)[0] == 130


def test_a_thread_may_exit_by_itself():
    body = "import threading, sys\nt = threading.Thread(target=sys.exit, args=(3,)); t.start(); t.join()\nleave(0)"
    assert run_boot(body)[0] == 0


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
    assert run_boot(f"leave({code})")[0] == code


def test_aborting_from_one_rank():
    body = "from halograd.comm import Communicator\ncomm = Communicator(world, 'mpi')\n"
    body += "if comm.rank == 1: comm.abort(7)\ncomm.barrier()"
    code, _ = run_boot(body)
    assert code == 7


def test_a_communicator_that_is_not_closed_does_not_keep_the_program():
    body = "import numpy as np\nfrom halograd.comm import Communicator\ncomm = Communicator(world)\n"
    body += "r = comm.reduction(np.ones(4)); r.start(); r.finish(); assert r.buffer[0] == 3"
    code, stderr = run_boot(body)
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
    done = in_small_memory(1, find_mpiexec(), "-n", "2", sys.executable, "-c", BOOT_START + "leave(0)")
    assert done.returncode != 0 and "warning: shared memory: expected 27 MiB free in /dev/shm" in done.stderr


ENDING_LIMIT = 240  # [s], against a deadlock: the jobs take seconds
ENDING_START = "import sys\nfrom mpi4py import MPI\nimport halograd as hg\n"
OPEN = ENDING_START + "comm = hg.Communicator(MPI.COMM_WORLD, 'mpi')\nrank = comm.rank\n"
WITHIN = ENDING_START + "with hg.Communicator(MPI.COMM_WORLD, 'mpi') as comm:\n    rank = comm.rank\n    "
# However slow this machine is now, ranks that fail alike find out.
PATIENT = "from halograd.comm import ending\nending.PATIENCE.update({1: 200.0, 2: 200.0})\n"
# Where the others do not fail, to wait for them shows nothing.
BRISK = "from halograd.comm import ending\nending.PATIENCE.update({1: 0.1, 2: 0.1})\n"


def finish(tmp_path, text, ranks=2, options=(), env=None):
    """Return the finished process of a script on this number of ranks; 0 means without a launcher."""
    script = tmp_path / "script.py"
    script.write_text(text)
    arguments = [*options, str(script)]
    if ranks:
        return mpiexec(ranks, arguments, ENDING_LIMIT, env)
    command, environment = [sys.executable, *arguments], job_environment(new_mark(), env)
    stdin = subprocess.DEVNULL
    return subprocess.run(command, capture_output=True, text=True, timeout=ENDING_LIMIT, env=environment, stdin=stdin)


def run_ending(*script, **options):
    """Return exit code and stdout of a script, and the stderr of its ranks."""
    done = finish(*script, **options)
    return done.returncode, done.stdout, done.stderr


def ours(stderr):
    """Return the lines that the library wrote; the MPI library adds lines about the abort."""
    return [line for line in stderr.splitlines() if line.startswith("halograd: ")]


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_mistake_in_what_fit_is_given_is_one_line(tmp_path, ranks):
    """A wrong argument of `fit` is one line with the place in the script, although no communicator is open."""
    code, _, stderr = run_ending(
        tmp_path, PATIENT + ENDING_START + "hg.fit('unet2d', 'data.h5', 'out', epochs=0, batch=1)\n", ranks
    )
    expected = "halograd: error: fit(): training.epochs: expected a whole number >= 1, got 0 (script.py, line 6)\n"
    assert (code, stderr) == (2, expected)


@pytest.mark.parametrize("manager", ["with", "without"])
def test_the_example_of_the_readme_ends_when_a_rank_fails(tmp_path, manager):
    page = Path(__file__).parents[2] / "README.md"
    (code,) = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.M | re.S)
    head, line, body = code.partition("with hg.Communicator(MPI.COMM_WORLD) as comm:")
    assert line
    if manager == "without":
        line, body = "comm = hg.Communicator(MPI.COMM_WORLD)\nif True:", body
    step, fails = "trainer.step()", "trainer.step() if comm.rank == 0 or trainer.optimizer.step < 2 else 1 // 0"
    assert step in body
    code, _, stderr = run_ending(tmp_path, head + line + body.replace(step, fails))
    assert code == 1
    assert "[rank 1 of 2] ZeroDivisionError: integer division or modulo by zero" in stderr
    assert "[rank 0 of 2]" not in stderr and stderr.count("Traceback") == 1
    (last,) = ours(stderr)
    assert last.startswith(f"halograd: rank 1 of 2 on {platform.node()}: ZeroDivisionError: ")


def test_a_rank_that_fails_in_a_step_does_not_wait_for_its_sums(tmp_path):
    """A rank that fails while gradient sums are active ends the job, and does not wait for the sums."""
    text = ENDING_START + "x, target = hg.Input((4, 1), name='x'), hg.Input((4, 1), name='target')\n"
    text += "network = hg.Network({'loss': hg.MeanSquaredError()(hg.Conv(1, 1)(x), target)})\n"
    text += "with hg.Communicator(MPI.COMM_WORLD) as comm:\n"
    text += "    with hg.Executor(network, comm, hg.get_backend('numpy'), 2) as executor:\n"
    text += "        if comm.rank == 0: comm.barrier()\n"
    text += "        executor.forward()\n        executor.backward()\n"
    text += "        raise OSError('no such sample')\n"
    code, _, stderr = run_ending(tmp_path, text)
    assert code == 1
    assert "[rank 1 of 2] OSError: no such sample" in stderr and "[rank 0 of 2]" not in stderr


def test_a_mistake_that_all_ranks_find_is_one_line(tmp_path):
    code, _, stderr = run_ending(
        tmp_path, PATIENT + WITHIN + "hg.Strategy({'height': 7}).validate(hg.Network({}), comm.size)"
    )
    assert code == 2
    line = "halograd: error: strategy: 7 height needs 7 ranks, the run has 2; start 7 ranks or choose parts whose "
    assert stderr == f"{line}product is 2 (script.py, line 8)\n"


def test_a_mistake_is_one_line_on_one_process_too(tmp_path):
    code, _, stderr = run_ending(tmp_path, OPEN + "raise hg.UserError('expected a moon,\\ngot none')", ranks=0)
    assert (code, stderr) == (2, "halograd: error: expected a moon, got none (script.py, line 6)\n")


def test_the_traceback_of_a_mistake_is_there_on_demand(tmp_path):
    env = {"HALOGRAD_TRACEBACK": "1"}
    code, _, stderr = run_ending(tmp_path, PATIENT + OPEN + "raise hg.UserError('expected a moon, got none')", env=env)
    assert code == 2
    assert stderr.count("Traceback") == 1 and "[rank 0 of 2] halograd.errors.UserError: expected a moon" in stderr
    assert stderr.splitlines()[-1] == "halograd: error: expected a moon, got none (script.py, line 8)"


def test_a_mistake_on_one_rank_ends_the_job(tmp_path):
    code, _, stderr = run_ending(tmp_path, BRISK + OPEN + "if rank == 1: raise hg.UserError('a file')\ncomm.barrier()")
    assert code == 2 and "Traceback" not in stderr
    place = f"(rank 1 of 2 on {platform.node()}; script.py, line 8)"
    assert ours(stderr) == [f"halograd: error: a file {place}"]


def test_ranks_that_work_apart_end_apart(tmp_path):
    """A mistake that all ranks of one communicator find does not affect the ranks of another one."""
    text = PATIENT + ENDING_START + "world = MPI.COMM_WORLD\nhalf = world.Split(world.rank // 2)\n"
    text += "with hg.Communicator(half, 'mpi') as comm:\n"
    text += "    if world.rank >= 2: raise hg.UserError('no such moon')\n    comm.barrier()\nprint('fine')"
    code, stdout, stderr = run_ending(tmp_path, text, ranks=4)
    assert (code, stdout.count("fine"), stderr) == (2, 2, "halograd: error: no such moon (script.py, line 9)\n")


@pytest.mark.parametrize("kind", ["UserError", "OSError"])
def test_an_agreed_error_is_told_where_it_arose(tmp_path, kind):
    """The message of an agreed error names the rank where it arose; all ranks close together, without an abort."""
    kind = "hg.UserError" if kind == "UserError" else kind
    body = f"comm.agree({kind}('bad disk') if rank == 1 else None)"
    done = finish(tmp_path, PATIENT + WITHIN + body)
    assert done.returncode == (2 if "User" in kind else 1)
    assert "bort" not in done.stderr + done.launcher and "[rank 0 of 2]" not in done.stderr
    (line,) = ours(done.stderr)
    assert "rank 1: bad disk" in line


def test_an_error_that_all_ranks_raise_has_one_traceback(tmp_path):
    code, _, stderr = run_ending(tmp_path, PATIENT + OPEN + "no_such_name", ranks=3)
    assert code == 1 and stderr.count("Traceback") == 1
    assert "[rank 0 of 3] NameError: name 'no_such_name' is not defined" in stderr
    assert ours(stderr) == ["halograd: all 3 ranks: NameError: name 'no_such_name' is not defined; the job ends"]


def test_of_errors_that_differ_every_one_is_told(tmp_path):
    # Whichever speaks first would end the job.
    body = "end = ending.end\nending.end = lambda world, code: (world.Barrier(), end(world, code))\n"
    body += "raise ValueError(f'sample {rank} is bad')"
    code, _, stderr = run_ending(tmp_path, PATIENT + OPEN + body)
    assert code == 1
    assert all(f"[rank {rank} of 2] ValueError: sample {rank} is bad" in stderr for rank in range(2))


@pytest.mark.parametrize(
    ("head", "body", "code", "text"),
    [
        (PATIENT, "if rank == 1: sys.exit()", 0, ""),
        (PATIENT, "sys.exit(75)", 75, ""),
        (BRISK, "if rank == 1: sys.exit(3)\n    comm.barrier()", 3, "rank 1 of 2 on .*: ended after SystemExit: 3,"),
    ],
    ids=["one", "all with a code", "one with a code"],
)
def test_exits_from_within(tmp_path, head, body, code, text):
    found, _, stderr = run_ending(tmp_path, head + WITHIN + body)
    assert found == code
    assert "Traceback" not in stderr
    assert re.search(text, stderr) if text else stderr == ""


def test_an_interrupt_ends_the_job_with_130(tmp_path):
    code, _, stderr = run_ending(tmp_path, OPEN + "if rank == 1: raise KeyboardInterrupt\ncomm.barrier()")
    assert code == 130 and "[rank 1 of 2] KeyboardInterrupt" in stderr and "[rank 0 of 2]" not in stderr


def test_an_exception_in_a_thread_ends_the_job(tmp_path):
    body = "import threading\ndef work(): raise OSError('a bad sample')\n"
    body += "if rank == 1: threading.Thread(target=work).start()\n"
    body += "comm.mpi.recv(source=1 - rank)"
    code, _, stderr = run_ending(tmp_path, OPEN + body)
    assert code == 1 and "[rank 1 of 2] OSError: a bad sample" in stderr


def test_an_exception_that_the_script_catches_is_its_own(tmp_path):
    body = "try:\n    if rank == 1: raise ValueError\nexcept ValueError:\n    pass\ncomm.barrier()\ncomm.close()"
    assert run_ending(tmp_path, OPEN + body) == (0, "", "")


def test_ranks_that_all_leave_by_an_error_they_catch_go_on_alone(tmp_path):
    """After a caught error that all ranks share, one rank may run longer than the other, and no process is aborted."""
    text = ENDING_START + "try:\n    with hg.Communicator(MPI.COMM_WORLD, 'mpi') as comm: raise ValueError\n"
    text += "except ValueError:\n    pass\n"
    text += PATIENT + "MPI.COMM_WORLD.Barrier()\nif comm.rank == 0: MPI.COMM_WORLD.recv(source=1)\n"
    text += "else:\n    import atexit\n    atexit.unregister(ending._on_exit)\n"
    text += "    atexit.register(lambda: MPI.COMM_WORLD.send(0, dest=0))\n    atexit.register(ending._on_exit)\n"
    assert run_ending(tmp_path, text) == (0, "", "")


def test_a_rank_that_leaves_alone_and_ends_does_not_leave_the_others_waiting(tmp_path):
    text = BRISK + ENDING_START + "try:\n    with hg.Communicator(MPI.COMM_WORLD, 'mpi') as comm:\n"
    text += "        if comm.rank == 1: raise ValueError('no luck')\n        comm.barrier()\n"
    text += "except ValueError:\n    pass\n"
    code, _, stderr = run_ending(tmp_path, text)
    assert code == 1
    (line,) = ours(stderr)
    assert "rank 1 of 2 on " in line
    assert "ended after ValueError: no luck, the other ranks have not ended; the job ends" in line


def test_before_a_prompt_nothing_ends(tmp_path):
    """With ``python -i``, an error of the script or of typed code does not end the job."""
    # Each rank writes to a file of its own: the launcher mixes what two write within a line.
    body = "import os\nos.dup2(os.open(os.devnull, os.O_RDONLY), 0)\n"
    body += f"os.dup2(os.open(f{str(tmp_path)!r} f'/{{rank}}', os.O_WRONLY | os.O_CREAT), 2)\n"
    code, _, stderr = run_ending(tmp_path, OPEN + body + "raise hg.UserError('a typing error')", options=["-i"])
    assert code == 0 and ours(stderr) == [], stderr
    for rank in range(2):
        written = (tmp_path / str(rank)).read_text()
        assert written.count("halograd.errors.UserError: a typing error") == 1 and ours(written) == []


def test_a_hook_that_was_there_before_still_prints(tmp_path):
    hook = "import sys\nsys.excepthook = lambda kind, value, trace: sys.stderr.write(f'mine: {value}\\n')\n"
    code, _, stderr = run_ending(tmp_path, hook + OPEN + "if rank == 1: raise OSError('disk')\ncomm.barrier()")
    assert code == 1 and stderr.startswith("mine: disk\nhalograd: rank 1 of 2 on ") and "Traceback" not in stderr


def test_a_test_harness_catches_what_it_wants(tmp_path):
    """A test that fails on all ranks, also in a thread, does not stop the other tests."""
    (tmp_path / "test_it.py").write_text(
        ENDING_START + "import threading\nimport pytest\n"
        "def test_that_fails():\n"
        "    with hg.Communicator(MPI.COMM_WORLD, 'mpi'): raise ValueError('in a test')\n"
        "def test_of_an_exit():\n"
        "    with pytest.raises(SystemExit), hg.Communicator(MPI.COMM_WORLD, 'mpi'): sys.exit(2)\n"
        "@pytest.mark.filterwarnings('ignore::pytest.PytestUnhandledThreadExceptionWarning')\n"
        "def test_of_a_thread():\n"
        "    with hg.Communicator(MPI.COMM_WORLD, 'mpi') as comm:\n"
        "        thread = threading.Thread(target=lambda: 1 / 0)\n        thread.start()\n        thread.join()\n"
        "        comm.barrier()\n"
    )
    # Open MPI gives its ranks a terminal.
    options = ["-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    options.append(str(tmp_path / "test_it.py"))
    done = mpiexec(2, options, ENDING_LIMIT)
    assert done.returncode == 1 and done.stdout.count("1 failed, 2 passed") == 2, done.stdout + done.stderr
    assert "the job ends" not in done.stderr


def test_a_process_that_was_forked_has_no_part_in_it(tmp_path):
    body = "import os\n    pid = os.fork()\n    if pid == 0:\n        try: raise ValueError('in the child')\n"
    body += "        except ValueError as error: sys.excepthook(ValueError, error, None); comm._guard.leave(error)\n"
    body += "        os._exit(0)\n    os.waitpid(pid, 0)\n    comm.barrier()\nprint('fine')"
    code, stdout, stderr = run_ending(tmp_path, WITHIN + body)
    assert (code, stdout.count("fine")) == (0, 2) and ours(stderr) == []


def test_ending_a_launcher_of_another_mpi_is_refused(tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "SLURM", "HYDRA"))}
    code, _, stderr = run_ending(tmp_path, OPEN, ranks=0, env={**environment, "OMPI_COMM_WORLD_SIZE": "4"})
    assert code == 1 and "CommError: expected 4 ranks (as the launcher reports), got 1 from" in stderr
