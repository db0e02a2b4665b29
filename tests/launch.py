"""Start of programs from inside a serial test: an MPI job, or a single command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path

from tests.harness import jobs, mpi
from tests.harness.limits import LIMIT, scaled

__all__ = ["PATIENT", "FinishedJob", "command_line", "find_mpiexec", "mpiexec"]

#: ``-m halograd`` for ranks that all fail in the same way, with a long wait for each other on a slow machine.
PATIENT = (
    "-c",
    "from halograd.cli import main; from halograd.comm import ending; ending.PATIENCE[2] = ending.AGREED = 1e6; main()",
)


class FinishedJob(subprocess.CompletedProcess[str]):
    """An MPI job that has ended: `stderr` is the ranks' output, `launcher` that of mpiexec itself."""

    launcher = ""


def find_mpiexec() -> str:
    """Return the mpiexec of the suite's run, otherwise the one next to this Python, otherwise the first on PATH."""
    if named := os.environ.get(mpi.LAUNCHER):
        return named
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise FileNotFoundError(f"expected mpiexec in {beside.parent} or on PATH, got none; pip install mpich")
    return found


def command_line(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a halograd command in a separate process with these environment variables."""
    command = [sys.executable, "-m", "halograd", *map(str, arguments)]
    env = jobs.job_environment(jobs.new_mark(), variables)
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=env)


def mpiexec(
    n: int,
    args: Sequence[str | PathLike[str]],
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | PathLike[str] | None = None,
) -> FinishedJob:
    """Run ``mpiexec -n N python ARGS`` and return its exit code, stdout and the stderr of its ranks as text.

    The launcher's own output goes to the test's stderr, which pytest shows if the test fails.

    ``mpiexec(4, ["-m", "halograd", "doctor"])``. After `timeout` (on an idle machine [s]; by default `LIMIT`) the whole
    job is killed and `subprocess.TimeoutExpired` raised, with the output so far. A job that ends by itself with code 0
    must leave neither a process nor a shared-memory segment, or this raises `AssertionError`. Leftovers of a failing
    job are removed (MPICH leaves a segment after every abort).
    """
    mark, limit = jobs.new_mark(), LIMIT if timeout is None else scaled(timeout)
    command = [find_mpiexec(), "-n", str(n), sys.executable, *map(str, args)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=jobs.job_environment(mark, env),
        cwd=cwd,
        start_new_session=True,
    ) as process:
        seen: set[str] = set()
        watcher = threading.Thread(target=_watch, args=(process, mark, seen), daemon=True)
        watcher.start()
        try:
            stdout, stderr = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired as expired:
            jobs.end(mark)
            stdout, stderr = process.communicate()
            jobs.remove(seen)
            raise subprocess.TimeoutExpired(command, limit, stdout, stderr) from expired
        finally:
            left = jobs.await_end(mark) if process.returncode == 0 else []
            jobs.end(mark)
            watcher.join()
    _judge(process.returncode, left, seen, stderr)
    done = FinishedJob(command, process.returncode, stdout)
    done.stderr, done.launcher = mpi.split_stderr(stderr)
    sys.stderr.write(done.launcher)
    return done


def _watch(process: subprocess.Popen[str], mark: str, seen: set[str]) -> None:
    """Collect the names of the shared-memory segments of the job while it runs.

    The search through all processes of a machine takes long, so it runs only if there are new names.
    """
    before = jobs.names_in_shared_memory()
    while process.poll() is None:
        if jobs.names_in_shared_memory() - before - seen:
            seen |= jobs.segments(jobs.members(mark))
        time.sleep(0.05)


def _judge(code: int, left: list[int], seen: set[str], stderr: str) -> None:
    if code != 0:
        jobs.remove(seen)
        return
    kept = jobs.await_removal(seen)
    jobs.remove(seen)
    assert not left, f"expected no process to outlive the job, got {left}\n{stderr}"
    assert not kept, f"expected no shared memory to outlive the job, got {kept}\n{stderr}"
