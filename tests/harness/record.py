"""Record of every test's outcome, one JSON line per event, which remains readable after the process has died.

Each rank appends to its own file in the folder named by `VARIABLE`; without it nothing is written. Rank 0's file
holds the verdicts. `stack-RANK.txt` beside it takes the tracebacks of a rank that hangs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VARIABLE = "HALOGRAD_TEST_RECORD"


class Record:
    """Writer of the events of one rank."""

    def __init__(self, rank: int) -> None:
        self.folder = Path(os.environ[VARIABLE]) if VARIABLE in os.environ else None
        self._path = self.folder / f"events-{rank}.jsonl" if self.folder else None
        self._rank = rank

    def write(self, **event: Any) -> None:
        """Append one event; the file is opened and closed each time, so that a killed process loses no event."""
        if self._path:
            with self._path.open("a") as file:
                file.write(json.dumps(event) + "\n")

    def stack_file(self) -> Path | None:
        """Path of the file for this rank's tracebacks if it hangs; None without a record."""
        return stack_path(self.folder, self._rank) if self.folder else None


def stack_path(folder: Path, rank: int) -> Path:
    """Return the path of the file for a rank's tracebacks."""
    return folder / f"stack-{rank}.txt"


@dataclass
class Verdict:
    """Outcome of one test in one run."""

    test: str
    outcome: str
    text: str = ""
    seconds: float = 0.0


@dataclass
class Outcomes:
    """Content of a run's record.

    Attributes
    ----------
    verdicts
        One verdict per test that was begun; a test that never ended counts as failed.
    collected
        Number of collected tests; None if the run ended during collection.
    nightly
        Number of tests for this run that have the mark ``nightly``.
    pids
        Process id of each rank.
    segments
        Names of the shared-memory files that the ranks mapped.
    stacks
        Tracebacks of each rank that wrote any.
    """

    verdicts: list[Verdict] = field(default_factory=list)
    collected: int | None = None
    nightly: int = 0
    pids: dict[int, int] = field(default_factory=dict)
    segments: set[str] = field(default_factory=set)
    stacks: dict[int, str] = field(default_factory=dict)

    def count(self, outcome: str) -> int:
        """Return the number of tests with this outcome."""
        return sum(v.outcome == outcome for v in self.verdicts)


def read(folder: Path) -> Outcomes:
    """Read the record of a run, complete or not."""
    found = Outcomes()
    begun: dict[str, Verdict] = {}
    for path in sorted(folder.glob("events-*.jsonl")):
        for event in _events(path):
            if "pid" in event:
                found.pids[int(path.stem.removeprefix("events-"))] = event["pid"]
            found.segments |= set(event.get("segments", ()))
            found.collected = event.get("collected", found.collected)
            found.nightly = event.get("nightly", found.nightly)
            if "begin" in event:
                begun.setdefault(event["begin"], Verdict(event["begin"], "failed", "did not end"))
            if "end" in event:
                begun[event["end"]] = Verdict(
                    event["end"], event["outcome"], event.get("text", ""), event.get("seconds", 0.0)
                )
    # A rank that gives up leaves its reason last: it outweighs what rank 0 knows of that test.
    for path in sorted(folder.glob("events-*.jsonl")):
        for event in _events(path):
            if "fatal" in event:
                begun[event["fatal"]] = Verdict(event["fatal"], "failed", event["text"])
    found.verdicts = list(begun.values())
    for path in sorted(folder.glob("stack-*.txt")):
        if text := path.read_text(errors="replace").strip():
            found.stacks[int(path.stem.removeprefix("stack-"))] = text
    return found


def _events(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(errors="replace").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:  # the process was killed while writing it
            continue
