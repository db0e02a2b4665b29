"""Results of the GPU check: one JSON line per event, on the disk before the next check begins.

``{"begin": CHECK}`` before a check, ``{"check": CHECK, "status": ...}`` behind it, both with their part and job;
``{"done": true}`` when a job has come to its end; ``{"facts": {...}}`` once per run. A killed process loses no
written result: a truncated line is skipped, and the next event begins on a line of its own.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["ABANDONED", "BAD", "JOB", "RESULTS", "SKIP", "STATES", "Key", "Result", "Results", "append"]

#: Environment of a job: the file of results; its part, name and commit as JSON; a file with checks to be left out.
RESULTS, JOB, SKIP = "HALOGRAD_GPU_RESULTS", "HALOGRAD_GPU_JOB", "HALOGRAD_GPU_SKIP"
#: Exit code of a process whose device answers no more.
ABANDONED = 86

#: Part, job.
Key = tuple[str, str]
#: `crashed`: the process died in it; `hung`: it was killed at its limit; `missing`: it needs what is not installed.
STATES = ("ok", "failed", "crashed", "hung", "skipped", "missing")
BAD = ("failed", "crashed", "hung")


def append(path: Path, **event: Any) -> None:
    """Write one event as a line of its own and flush it to the disk. Several processes may append."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(handle).st_size
        torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
        data = (b"\n" if torn else b"") + json.dumps(event, default=str).encode() + b"\n"
        while data:
            data = data[os.write(handle, data) :]
        os.fsync(handle)
    finally:
        os.close(handle)


@dataclass
class Result:
    """Result of one check.

    Attributes
    ----------
    status
        One of `STATES`.
    detail
        The finding, or the reason why there is none.
    seconds
        Duration [s].
    numbers
        Errors, times [s], bytes [B], rates, by name.
    """

    part: str
    job: str
    check: str
    status: str
    detail: str = ""
    seconds: float = 0.0
    numbers: Mapping[str, float] = field(default_factory=dict)
    commit: str = ""


class Results:
    """A file of results, which is read once and appended to. Local; threads may share it.

    Attributes
    ----------
    facts
        Versions and devices of the last run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts: dict[str, Any] = {}
        self._found: dict[tuple[str, str, str], Result] = {}
        self._begun: dict[tuple[str, str, str], int] = {}
        self._done: set[Key] = set()
        self._read = 0
        self._lock = threading.RLock()
        self.refresh()

    def refresh(self) -> None:
        """Read the events that were appended since the last call."""
        if not self.path.exists():
            return
        with self._lock, self.path.open("rb") as file:
            file.seek(self._read)
            added = file.read()
            whole = added[: added.rfind(b"\n") + 1]
            self._read += len(whole)
            for line in whole.decode(errors="replace").splitlines():
                try:
                    event = json.loads(line)
                except json.JSONDecodeError:  # the process was killed while writing it
                    continue
                if isinstance(event, dict):
                    self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        if "facts" in event:
            self.facts = event["facts"]
            return
        part, job = str(event.get("part", "")), str(event.get("job", ""))
        if "begin" in event:
            key = (part, job, event["begin"])
            self._begun[key] = self._begun.get(key, 0) + 1
        elif "check" in event:
            names = {name: event[name] for name in Result.__dataclass_fields__ if name in event}
            result = Result(**{**names, "part": part, "job": job})
            self._found[part, job, result.check] = result
            self._begun.pop((part, job, result.check), None)
        elif event.get("done"):
            self._done.add((part, job))
        elif "again" in event:
            self._forget(part, event["again"])

    def _forget(self, part: str, states: list[str]) -> None:
        """Remove the results of a part that have one of these states, because its checks are to be repeated."""
        whole = set(states) == set(STATES)
        again = [key for key, result in self._found.items() if key[0] == part and result.status in states]
        jobs = {key for key in self._done if key[0] == part} if whole else {key[:2] for key in again}
        for key in again:
            del self._found[key]
        self._done -= jobs
        self._begun = {key: n for key, n in self._begun.items() if key[0] != part}

    # ------------------------------------------------------------------ what is known
    def all(self) -> Iterator[Result]:
        """Return the last result of every check, in the order in which the checks were first made."""
        with self._lock:
            return iter(list(self._found.values()))

    def of(self, key: Key) -> list[Result]:
        """Return the results of a job."""
        return [result for result in self.all() if (result.part, result.job) == key]

    def done(self, key: Key) -> bool:
        """Return whether a job is complete."""
        return key in self._done

    def unfinished(self, key: Key) -> dict[str, int]:
        """Return the checks of a job that were begun and have no result, with the number of attempts."""
        with self._lock:
            return {check: n for (part, job, check), n in self._begun.items() if (part, job) == key}

    # ------------------------------------------------------------------ writing
    def write(self, **event: Any) -> None:
        """Append an event."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        append(self.path, **event)
        self.refresh()

    def add(self, result: Result) -> Result:
        """Append a result and return it."""
        self.write(**asdict(result))
        return result

    def again(self, part: str, states: tuple[str, ...] = STATES) -> None:
        """Mark the checks of a part that have one of these states to be repeated."""
        self.write(part=part, again=list(states))
