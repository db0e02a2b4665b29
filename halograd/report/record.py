"""The log of a run, as those who watch it want it. Needs neither MPI nor a GPU."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halograd.errors import UserError

__all__ = ["Record", "read_record"]

Entry = dict[str, Any]


@dataclass(frozen=True)
class Record:
    """What a run has logged.

    Attributes
    ----------
    directory
        Of the run.
    steps
        Lines ``step``, in order; the last ones, if only these were asked for.
    events
        All other lines, in order.
    modified
        When the log was last written [s], as `time.time`.
    """

    directory: Path
    steps: list[Entry] = field(default_factory=list)
    events: list[Entry] = field(default_factory=list)
    modified: float = 0.0

    def all(self, event: str) -> list[Entry]:
        """The lines of an event."""
        return [entry for entry in self.events if entry["event"] == event]

    def last(self, event: str) -> Entry | None:
        """The last line of an event, None if there is none."""
        return next((entry for entry in reversed(self.events) if entry["event"] == event), None)

    @property
    def begin(self) -> Entry:
        """How the latest job of the run began; empty for a log of an old version."""
        return self.last("begin") or {}

    @property
    def since_begin(self) -> list[Entry]:
        """What was logged by the latest job, steps apart."""
        places = [i for i, entry in enumerate(self.events) if entry["event"] == "begin"]
        return self.events[places[-1] :] if places else self.events

    @property
    def step(self) -> int:
        """The last step that is known of."""
        return max([0, *(s["step"] for s in self.steps[-1:]), *(e.get("step", 0) for e in self.events)])

    @property
    def steps_per_epoch(self) -> int:
        """As logged; of an old log, as its first validation tells."""
        known = self.begin.get("steps_per_epoch")
        first = next(iter(self.all("validation")), None)
        return int(known or (first["step"] // (first["epoch"] + 1) if first else 1) or 1)

    @property
    def checkpoint(self) -> Path | None:
        """The newest one, None if there is none."""
        folder = self.directory / "checkpoints"
        link = folder / "latest.h5"
        files = sorted(folder.glob("step-*.h5"))
        return link.resolve() if link.exists() else files[-1] if files else None


def read_record(directory: Path, tail: int | None = None) -> Record:
    """Read the log of a run; of steps the last `tail` ones, if that is given. Local.

    A last line that is being written is left out.

    Raises
    ------
    UserError
        If it is not the directory of a run.
    """
    path = directory / "log.jsonl"
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            steps, events = _sorted(file, tail)
        return Record(directory, steps, events, path.stat().st_mtime)
    except OSError as error:
        reason = "there is none" if isinstance(error, FileNotFoundError) else error.strerror
        raise UserError(
            f"{directory}: expected the directory of a run, which has a log.jsonl: {reason}; give output.directory of "
            "its configuration"
        ) from error


def _sorted(lines: Iterable[str], tail: int | None) -> tuple[list[Entry], list[Entry]]:
    steps: deque[str] = deque(maxlen=tail)
    events: list[Entry] = []
    for line in lines:
        if line.startswith('{"event": "step"'):
            steps.append(line)
        else:
            events += _parsed([line])
    return _parsed(steps), events


def _parsed(lines: Iterable[str]) -> list[Entry]:
    found = []
    for line in lines:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(entry, dict) and "event" in entry:
            found.append(entry)
    return found
