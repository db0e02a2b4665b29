"""Functions for tests that disturb jobs: start a job, find its ranks, and wait for its steps."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from halograd.training.log import read_log
from tests.harness import jobs
from tests.harness.limits import LIMIT, wait_until
from tests.launch import find_mpiexec

ROOT = Path(__file__).parents[2]

# With it mpiexec does not find out that a rank has ended (like srun without --kill-on-bad-exit), nor ends others.
UNSEEN = ("sh", "-c", '"$@"; while :; do sleep 0.2; done', "sh")


def sets(*overrides: str) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


class Gate:
    """Gate that lets `ranks` (default: all) make a number of steps, and then stops them until they receive a signal.

    The other ranks wait for them in the next step. See `tests/support/gate`: no rank is reported as hanging before the
    test permits it, and time limits between ranks are long.
    """

    def __init__(self, folder: Path, steps: int | None = None, *ranks: int) -> None:
        self._file, self._steps = folder / f"gate-{os.urandom(4).hex()}", steps
        if steps is not None:
            self._file.write_text(" ".join(map(str, (steps, *ranks))))
        path = [str(ROOT / "tests" / "support" / "gate"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        self.environment = {"HALOGRAD_TEST_GATE": str(self._file), "PYTHONPATH": os.pathsep.join(filter(None, path))}

    def await_signal(self) -> None:
        """Return when a rank has recorded a signal that requests a stop."""
        wait_until(self._beside("noted").exists, "a rank to note a signal")

    def await_waiting(self, *ranks: int, updates: int | None = None) -> None:
        """Return when these ranks wait for another rank after a number of updates, by default that of the gate."""
        files = [self._beside(f"waits.{rank}") for rank in ranks]
        wanted = str(self._steps if updates is None else updates)
        wait_until(lambda: all(f.exists() and f.read_text() == wanted for f in files), f"ranks {ranks} to wait")

    def let_hang(self) -> None:
        """Permit that ranks without progress are reported as hanging."""
        self._beside("hangs").touch()

    def _beside(self, what: str) -> Path:
        return self._file.with_name(f"{self._file.name}.{what}")


@contextmanager
def started(
    n: int, *args: object, wrapper: Sequence[str] = (), gate: Gate | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a job, every rank by `wrapper`; yield it and its mark. Check afterwards that no process of it is left."""
    mark = jobs.new_mark()
    command = [find_mpiexec(), "-n", str(n), *wrapper, sys.executable, *map(str, args)]
    environment = jobs.job_environment(mark, gate.environment if gate else None)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    segments: set[str] = set()
    try:
        yield process, mark
        segments = jobs.segments(jobs.members(mark))
        process.communicate(timeout=LIMIT)
        assert jobs.await_end(mark) == [], "expected no process to outlive the job"
    finally:
        jobs.end(mark)
        process.kill()
        jobs.remove(segments)


def rank_processes(mark: str) -> list[int]:
    """Return the process ids of the ranks, in the order of the ranks."""
    found = {}
    for pid in jobs.members(mark):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # it has just ended
            continue
        if words[0].decode() == sys.executable and words[1] != b"-I":  # not the monitor of the ranks
            variables = dict(v.split(b"=", 1) for v in environment.split(b"\0") if b"=" in v)
            found[int(next(variables[n] for n in (b"PMI_RANK", b"OMPI_COMM_WORLD_RANK") if n in variables))] = pid
    return [found[rank] for rank in sorted(found)]


def losses(folder: Path) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in read_log(folder / "log.jsonl", "step")}


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Return when a job has logged this step."""

    def logged() -> bool:
        assert process.poll() is None, process.communicate()
        return (folder / "log.jsonl").exists() and max(losses(folder), default=0) >= step

    wait_until(logged, f"step {step} of a job")
