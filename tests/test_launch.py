"""Tests of MPI jobs that serial tests start: their results, and that they leave nothing."""

import subprocess

import pytest

from tests.harness import jobs, mpi
from tests.harness.limits import GRACE_VARIABLE, wait_until
from tests.harness.mpi import split_stderr
from tests.launch import mpiexec


def script(tmp_path, body):
    path = tmp_path / "job.py"
    path.write_text("import os, sys, time\nfrom mpi4py import MPI\nworld = MPI.COMM_WORLD\n" + body)
    return [path]


def test_result_of_a_job(tmp_path):
    line = 'rank {world.rank} of {world.size} {os.environ["WORD"]} {os.getcwd()}'
    body = f"os.write(1, f'{line}\\n'.encode())\nsys.exit(3)\n"
    done = mpiexec(2, script(tmp_path, body), env={"WORD": "moon"}, cwd=tmp_path)
    assert done.returncode == 3
    assert sorted(done.stdout.splitlines()) == [f"rank {r} of 2 moon {tmp_path}" for r in (0, 1)]


EPOLL = (
    "[warn] Epoll MOD(1) on fd 25 failed. Old events were 6; read change was 0 (none); write change was 2 (del); "
    "close change was 0 (none): Bad file descriptor\n"
)
DASHES = 74 * "-" + "\n"
ABORTED = f"{DASHES}MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\nwith errorcode 3.\n\n{DASHES}"
FRAMES = f"{DASHES}mpirun could not.\n{DASHES}{ABORTED}"
AGGREGATED = (
    "[n1:7] 1 more process has sent help message help-mpi-api.txt / mpi-abort\n"
    '[n1:7] Set MCA parameter "orte_base_help_aggregate" to 0 to see all help / error messages\n'
)
HYDRA = "[proxy:0:0@n1] HYD_pmcd_pmip_control_cmd_cb (proxy/pmip_cb.c:480): assert (!closed) failed\n"
OURS = "halograd: error: no such moon (script.py, line 9)\n"


@pytest.mark.parametrize("noise", [EPOLL, ABORTED, FRAMES, AGGREGATED, HYDRA, "[mpiexec@n1] Timeout\n"])
def test_what_a_launcher_writes_is_told_from_what_ranks_write(noise):
    """The launcher's output is separated from the ranks' at any position, also within a line of a rank."""
    assert split_stderr(noise) == ("", noise)
    assert split_stderr(OURS + noise + OURS) == (OURS + OURS, noise)
    assert split_stderr(noise + OURS + noise) == (OURS, noise + noise)
    assert split_stderr(f"halograd: er{EPOLL}ror\n") == ("halograd: error\n", EPOLL)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no newline",
        "[warn] Epoll is not what this rank waits with\n",
        "[warn] of a rank\n",
        "[rank 1 of 2] ValueError: [mpiexec@n1] is no rank\n",
        f"{DASHES}a table\n",
        f"{DASHES[1:]}a table\n{DASHES[1:]}",
        "Abort(3) on node 1 (rank 1 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 3) - process 1\n",
        "[n1:7] 1 more process has ended\n",
    ],
)
def test_nothing_that_ranks_write_is_lost(text):
    assert split_stderr(text) == (text, "")


def test_the_stderr_of_a_job_is_that_of_its_ranks(tmp_path, monkeypatch, capfd):
    """A job's stderr contains the ranks' output only; the launcher's goes to the stderr of the test."""
    launcher = tmp_path / "mpiexec"
    launcher.write_text(f"#!/bin/sh\nshift 2\n\"$@\"\ncode=$?\nprintf '%s' '{EPOLL}' >&2\nexit $code\n")
    launcher.chmod(0o755)
    monkeypatch.setenv(mpi.LAUNCHER, str(launcher))
    done = mpiexec(1, ["-c", f"import sys; sys.stderr.write({OURS!r}); sys.exit(2)"])
    assert (done.returncode, done.stderr, done.launcher) == (2, OURS, EPOLL)
    assert capfd.readouterr().err == EPOLL


def test_job_that_hangs_is_killed_with_all_its_ranks(tmp_path, monkeypatch):
    """A job that hangs is killed with all its ranks; the test triggers the limit after all ranks have printed."""
    communicate = subprocess.Popen.communicate

    def until_they_hang(process, timeout=None):
        def all_have_printed():
            try:
                communicate(process, timeout=0.02)
            except subprocess.TimeoutExpired as expired:
                return len((expired.output or b"").splitlines()) == 3

        if timeout is None:
            return communicate(process)
        wait_until(all_have_printed, "three ranks")
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", until_they_hang)
    body = "os.write(1, f'{os.getpid()}\\n'.encode())\nif world.rank: time.sleep(10**6)\nworld.Barrier()\n"
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        mpiexec(3, script(tmp_path, body))
    pids = [int(line) for line in caught.value.output.split()]
    assert len(pids) == 3
    assert not [pid for pid in pids if jobs.alive(pid)]


def test_segments_of_an_aborted_job_are_swept(tmp_path, monkeypatch):
    """The shared-memory segments of an aborted job, which the watcher has recorded, are removed."""
    name, segments = "halograd-test-launch", jobs.segments
    jobs.remove([name])  # of a run of this test that was killed: what was there before the job is not the job's

    def seen(pids):
        found = segments(pids)
        if name in found:
            (tmp_path / "seen").touch()
        return found

    monkeypatch.setattr(jobs, "segments", seen)
    body = """
with open("/dev/shm/halograd-test-launch", "w+b") as file:
    import mmap
    file.truncate(4096)
    kept = mmap.mmap(file.fileno(), 4096)
while not os.path.exists("seen"):
    time.sleep(0.01)
world.Abort(5)
"""
    done = mpiexec(1, script(tmp_path, body), cwd=tmp_path)
    assert done.returncode == 5
    assert not (jobs.SHARED_MEMORY / "halograd-test-launch").exists()


def test_process_that_outlives_a_good_job_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv(GRACE_VARIABLE, "0.5")
    body = "import subprocess as s\ns.Popen(['sleep', '99999'], stdout=s.DEVNULL, stderr=s.DEVNULL, stdin=s.DEVNULL)\n"
    with pytest.raises(AssertionError, match="expected no process to outlive the job"):
        mpiexec(1, script(tmp_path, body))


def test_a_job_knows_nothing_of_the_run_of_the_suite_that_started_it(monkeypatch):
    """A job does not inherit the record and launcher variables of the run of the suite that started it."""
    inherited = {"HALOGRAD_TEST_RECORD": "outer", "PMI_RANK": "1", "SLURM_PROCID": "1"}
    for name, value in {**inherited, "KEPT": "yes"}.items():
        monkeypatch.setenv(name, value)
    environment = jobs.job_environment("mark", {"HALOGRAD_TEST_RECORD": "own"})
    assert environment["KEPT"] == "yes"
    assert environment["HALOGRAD_TEST_RECORD"] == "own"
    assert not {"PMI_RANK", "SLURM_PROCID"} & set(environment)
    assert "HALOGRAD_TEST_RECORD" not in jobs.job_environment("mark")
