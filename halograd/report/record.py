"""The log of a run, as those who watch it want it. Needs neither MPI nor a GPU."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from halograd.errors import UserError
from halograd.training.log import Entry, lines_of, parse_lines, warn_of_lines

__all__ = ["Checkpoint", "Record", "read_record"]


class Checkpoint(NamedTuple):
    """A file: its step, None if the name does not tell; when it was written [s], as `time.time`; its size [B]."""

    path: Path
    step: int | None
    modified: float
    size: int


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
    def checkpoint(self) -> Checkpoint | None:
        """The newest one, None if there is none. The run may be under way, and remove it meanwhile."""
        folder = self.directory / "checkpoints"
        for path in ((folder / "latest.h5").resolve(), *sorted(folder.glob("step-*.h5"), reverse=True)):
            with suppress(OSError):
                found, step = path.stat(), path.stem.rpartition("-")[2]
                return Checkpoint(path, int(step) if step.isdecimal() else None, found.st_mtime, found.st_size)
        return None


def read_record(directory: Path, tail: int | None = None) -> Record:
    """Read the log of a run; of its lines `step` the last `tail` ones, if that is given. Local.

    Lines that cannot be read are left out, with a warning; a last line that is being written without one.

    Raises
    ------
    UserError
        If it is not the directory of a run.
    """
    path = directory / "log.jsonl"
    try:
        steps, events = _sorted(path, tail)
        return Record(directory, steps, events, path.stat().st_mtime)
    except OSError as error:
        reason = "there is none" if isinstance(error, FileNotFoundError) else error.strerror
        raise UserError(
            f"{directory}: expected the directory of a run, which has a log.jsonl: {reason}; give output.directory of "
            "its configuration"
        ) from error


def _sorted(path: Path, tail: int | None) -> tuple[list[Entry], list[Entry]]:
    """Steps, of which only the last ones are parsed, and all else."""
    steps: deque[bytes] = deque(maxlen=tail)
    others: list[bytes] = []
    for line in lines_of(path):
        (steps if line.startswith(b'{"event": "step"') else others).append(line)
    found, bad = [], 0
    for lines in (steps, others):
        good, more = parse_lines(lines)
        found.append([entry for _, entry in good])
        bad += more
    if bad:
        warn_of_lines(path, bad)
    return [entry for entry in found[0] if entry["event"] == "step"], found[1]
