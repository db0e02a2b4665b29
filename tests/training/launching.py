"""Jobs that tests disturb: start one, find its ranks, wait until it makes steps."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from halograd.training.log import read_log
from tests.harness import jobs
from tests.launch import find_mpiexec

# Messages take their time, so that there is time to kill.
SLOW = "backend.transport=emulated:alpha=2e-3,beta=0"

# With it mpiexec does not find out that a rank has ended (like srun without --kill-on-bad-exit), nor ends others.
UNSEEN = ("sh", "-c", '"$@"; while :; do sleep 0.2; done', "sh")


def sets(*overrides: str) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


@contextmanager
def started(n: int, *args: object, wrapper: Sequence[str] = ()) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A job and its mark, every rank started by `wrapper`; afterwards nothing of it must be alive."""
    mark = jobs.new_mark()
    command = [find_mpiexec(), "-n", str(n), *wrapper, sys.executable, *map(str, args)]
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
    """Process ids of the ranks of a job, in the order of the ranks: those that run our Python."""
    found = {}
    for pid in jobs.members(mark):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # it has just ended
            continue
        if words[0].decode() == sys.executable:
            variables = dict(v.split(b"=", 1) for v in environment.split(b"\0") if b"=" in v)
            found[int(next(variables[n] for n in (b"PMI_RANK", b"OMPI_COMM_WORLD_RANK") if n in variables))] = pid
    return [found[rank] for rank in sorted(found)]


def losses(folder: Path) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in read_log(folder / "log.jsonl", "step")}


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not (folder / "log.jsonl").exists() or max(losses(folder), default=0) < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "expected the job to make steps"
        time.sleep(0.005)
