"""Runner of the jobs of a part: each is a process with a limit, and a crash affects no other check.

The runner needs the standard library only, as it runs before anything else is known to work. After a crash it starts
the job again without the checks that have a result, until the job comes to its end. Checks for which a call has no time
are left to the next call, which continues from the recorded results.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.gpu.results import ABANDONED, JOB, RESULTS, SKIP, Result, Results
from tests.harness import jobs
from tests.launch import find_mpiexec

__all__ = ["UNPLUGGED", "Job", "Part", "Runner"]

ROOT = Path(__file__).resolve().parents[2]
#: A job that has died so often is left alone; a check in which whole runs were ended so often is, too.
MOST_CRASHES, MOST_INTERRUPTIONS = 5, 3
MOST_LINES = 5
PROCESSORS = os.cpu_count() or 1
LEAST_SECONDS = 5.0  # left of a call for a job to be begun [s]


@dataclass(frozen=True)
class Job:
    """One process, or one MPI job.

    Parameters
    ----------
    name
        Name within the part.
    arguments
        Arguments of pytest, or of `module`, whose output is JSON lines.
    ranks
        Number of ranks of an MPI job; 0 for a process without MPI.
    seconds
        Limit [s] of the job in one pass over the parts, restarts included; the limit of one check is half of it.
    module
        Module to run in place of pytest.
    """

    name: str
    arguments: tuple[str, ...] = ()
    ranks: int = 0
    seconds: float = 120.0
    environment: Mapping[str, str] = field(default_factory=dict)
    module: str = ""

    def command(self, python: str = sys.executable) -> list[str]:
        """Return the command line."""
        if self.module:
            run = [python, "-m", self.module, *self.arguments]
        else:
            ranks = ("--with-mpi",) if self.ranks else ()
            run = [python, "-m", *_PYTEST, *ranks, f"--timeout={self.seconds / 2:g}", *self.arguments]
        return [find_mpiexec(), "-n", str(self.ranks), *run] if self.ranks else run


#: Plugins of pytest that the machine has of its own could fail in every job: only named ones are loaded.
UNPLUGGED: Mapping[str, str] = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
_PLUGINS = ("tests.gpu.recording", "pytest_mpi", "pytest_timeout", "_hypothesis_pytestplugin")
_PYTEST = ("pytest", "-q", "--no-header", "--tb=short", *(f"-p{name}" for name in _PLUGINS), "-m", "gpu")


@dataclass(frozen=True)
class Part:
    """Jobs that answer one question, in their order.

    Parameters
    ----------
    together
        Number of jobs that may run at the same time, if there are two processors for each: 1 for jobs that measure
        time, or need most of the device's memory.
    """

    name: str
    question: str
    jobs: tuple[Job, ...]
    together: int = 1


class Runner:
    """Runner of parts, within the time of this call.

    Parameters
    ----------
    results
        Destination of the events.
    seconds
        Time of this call [s]; no job runs longer.
    environment
        Variables for all jobs, in addition to their own.
    say
        Function that prints a line on the terminal.
    commit
        Commit of the repository, for the results.
    after_part
        Function to call after every part of a pass.
    """

    def __init__(
        self,
        results: Results,
        seconds: float,
        environment: Mapping[str, str] | None = None,
        say: Callable[[str], None] = print,
        commit: str = "",
        after_part: Callable[[], None] = lambda: None,
    ) -> None:
        self._after_part = after_part
        self.results, self._environment, self._say, self._commit = results, dict(environment or {}), say, commit
        self._deadline = time.monotonic() + seconds
        self._log = results.path.with_suffix(".log")

    @property
    def seconds_left(self) -> float:
        """Return the remaining time of this call [s]."""
        return self._deadline - time.monotonic()

    def run(self, *parts: Part) -> bool:
        """Run the jobs of the parts that are incomplete, in passes over all parts; return whether all are complete.

        A job that has used its time continues after the parts that come next, if the call has time left then.
        """
        left = list(parts)
        while left:
            known = sum(1 for _ in self.results.all())
            left = [part for part in left if not self._run(part)]
            if self.seconds_left < LEAST_SECONDS or sum(1 for _ in self.results.all()) == known:
                break
        return not left

    def _run(self, part: Part) -> bool:
        """Run the jobs of a part that are incomplete; return whether the part is complete."""
        self._say(f"== {part.name}: {part.question}")
        workers = max(1, min(part.together, PROCESSORS // 2))
        with ThreadPoolExecutor(workers) as pool:
            complete = all(list(pool.map(lambda job: self._complete(part.name, job), part.jobs)))
        found = [result for result in self.results.all() if result.part == part.name]
        counts = {state: sum(r.status == state for r in found) for state in dict.fromkeys(r.status for r in found)}
        counted = ", ".join(f"{n} {state}" for state, n in counts.items()) or "nothing"
        self._say(f"== {part.name}: {counted}" + ("" if complete else "; not all, run it again to go on"))
        self._after_part()
        return complete

    def _complete(self, part: str, job: Job) -> bool:
        """Run a job until it is complete; return False if its time, or that of the call, is too short for the rest."""
        key = (part, job.name)
        crashes = 0
        until = time.monotonic() + job.seconds
        while True:
            self._give_up_interrupted(key)
            if self.results.done(key):
                if not self.results.of(key):  # else a job in which nothing runs would look like one without a fault
                    self._print([self._add(key, "job", "failed", "it ended without a result: no check has run")])
                return True
            limit = min(until - time.monotonic(), self.seconds_left)
            if limit < min(LEAST_SECONDS, job.seconds / 2):
                return False
            before = {result.check for result in self.results.of(key)}
            ended = self._once(key, job, limit)
            self._print([result for result in self.results.of(key) if result.check not in before])
            crashes += ended.startswith(("killed", "ended", "exit"))
            if ended == "late":
                return False
            if crashes == MOST_CRASHES and not self.results.done(key):
                self._add(
                    key, "job", "failed", f"it died {MOST_CRASHES} times; later checks were not reached ({ended})"
                )
                self.results.write(part=part, job=job.name, done=True)

    def _give_up_interrupted(self, key: tuple[str, str]) -> None:
        for check, times in self.results.unfinished(key).items():
            if times >= MOST_INTERRUPTIONS:
                text = f"begun {times} times, and every time the whole run was ended in it; run it alone"
                self._print([self._add(key, check, "hung", text)])

    def _once(self, key: tuple[str, str], job: Job, limit: float) -> str:
        """Run a job once; return how it ended as a text, or ``"late"`` if it was killed at `limit` without a fault.

        A job that was killed at its limit after some progress continues in the next pass: none of its checks is at
        fault. Neither is one at fault that had less time than the limit of the job.
        """
        own = limit > 0.95 * job.seconds
        begun, known = set(self.results.unfinished(key)), len(self.results.of(key))
        with tempfile.TemporaryDirectory(prefix="halograd-gpu-") as folder:
            skip = Path(folder) / "skip.json"
            skip.write_text(json.dumps([result.check for result in self.results.of(key)]), encoding="utf-8")
            mark = jobs.new_mark()
            about = {"part": key[0], "job": key[1], "commit": self._commit}
            environment = {RESULTS: str(self.results.path), SKIP: str(skip), "TMPDIR": folder}
            environment |= {JOB: json.dumps({**about, "ranks": job.ranks}), **UNPLUGGED}
            try:
                process = self._start(job, mark, {**environment, **self._environment, **job.environment})
            except FileNotFoundError as error:
                self._add(key, "job", "missing", str(error))
                self.results.write(part=key[0], job=key[1], done=True)
                return "missing"
            code, tail = self._wait(process, mark, limit, about if job.module else None)
        self.results.refresh()
        if job.module and code == 0:
            self.results.write(part=key[0], job=key[1], done=True)
        if code is None and (not own or len(self.results.of(key)) > known):
            return "late"
        ended = f"killed after {limit:.0f} s" if code is None else _ending(code)
        if code != ABANDONED:
            self._blame(key, code, f"{ended}\n{tail}", begun)
        return ended

    def _blame(self, key: tuple[str, str], code: int | None, text: str, before: set[str]) -> None:
        """Record as crashed or hung the check that ran when the process ended, or the end of the process itself."""
        if self.results.done(key):
            if code not in (0, 1, 2, 5):  # of pytest: tests have run, cannot be collected, or there was none left
                self._add(key, "end of the process", "crashed", text)
            return
        status = "hung" if code is None else "crashed"
        under_way = [check for check in self.results.unfinished(key) if check not in before]
        again = [check for check, times in self.results.unfinished(key).items() if check in before and times > 1]
        for check in (under_way or again)[-1:] or ["job"]:
            self._add(key, check, status, text)

    def _add(self, key: tuple[str, str], check: str, status: str, detail: str) -> Result:
        return self.results.add(Result(*key, check, status, detail, commit=self._commit))

    def _print(self, found: Sequence[Result]) -> None:
        """Print the measured values and the first few failures."""
        measured = [result for result in found if result.status == "ok" and result.numbers]
        wrong = [result for result in found if result.status != "ok"]
        for result in [*measured, *wrong[:MOST_LINES]]:
            last = result.detail.strip().splitlines()[-1:]
            self._say(f"{result.status:8} {result.job}: {result.check.rpartition('/')[2]}: {' '.join(last)[:400]}")
        if len(wrong) > MOST_LINES:
            self._say(f"         {wrong[0].job}: and {len(wrong) - MOST_LINES} more")

    # ------------------------------------------------------------------ processes
    def _start(self, job: Job, mark: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            job.command(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=jobs.job_environment(mark, environment),
            preexec_fn=_die_with_parent,
        )

    def _wait(
        self, process: subprocess.Popen[bytes], mark: str, limit: float, about: Mapping[str, str] | None
    ) -> tuple[int | None, str]:
        """Return exit code (None if killed at the limit) and last lines of a job; all its processes have ended."""
        tail: deque[str] = deque(maxlen=15)
        reader = threading.Thread(target=self._read, args=(process, tail, about), daemon=True)
        reader.start()
        code: int | None
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            jobs.end(mark)
            process.kill()
            process.wait()
        reader.join(LEAST_SECONDS)
        return code, "\n".join(tail)

    def _read(self, process: subprocess.Popen[bytes], tail: deque[str], about: Mapping[str, str] | None) -> None:
        """Write the output of a job to the log, keep its last lines, and record the results in it."""
        assert process.stdout is not None
        with self._log.open("a", encoding="utf-8") as log:
            for raw in process.stdout:
                line = raw.decode(errors="replace").rstrip("\n")
                log.write(line + "\n")
                log.flush()
                event = _event(line) if about is not None else None
                if event is None:
                    tail.append(line[:300])
                elif about is not None:
                    self.results.write(**about, **event)


def _event(line: str) -> dict[str, object] | None:
    """Parse a line of a module's output; return None if it is not an event."""
    try:
        event = json.loads(line)
    except json.JSONDecodeError:
        return None
    return event if isinstance(event, dict) and ("begin" in event or "check" in event) else None


def _ending(code: int) -> str:
    """Return a text about how a process ended: the signal, or the exit code."""
    number = -code if code < 0 else code - 128
    try:
        return f"ended by {signal.Signals(number).name}"
    except ValueError:
        return f"exit code {code}"


def _die_with_parent() -> None:
    """End this child process when the runner ends, even if the runner is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
