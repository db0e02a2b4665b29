"""What a run writes while it runs: one JSON object per line, and a progress bar on rank 0."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from halograd.errors import UserError
from halograd.files import write_whole
from halograd.training.log_lines import Entry, lines_of, parse_lines, warn_of_lines

__all__ = ["RunLog", "read_log", "rewind_log"]

_log = logging.getLogger(__name__)


class RunLog:
    """Log file and progress bar; on other ranks than 0 it does nothing. Local.

    Parameters
    ----------
    path
        The log; made if missing, continued otherwise.
    speaks
        Whether this is rank 0.
    bar
        Whether to show a progress bar (on a terminal only) and a line per epoch.
    """

    def __init__(self, path: Path, speaks: bool, bar: bool = True) -> None:
        self.path = path
        self._file = None
        self._followers: list[Callable[[dict[str, Any]], None]] = []
        self._failing = False
        self._speaks, self._bar = speaks and bar, None
        self._console = Console(stderr=True)
        if speaks:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
        if self._speaks and self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=self._console)
            self._bar.start()
            self._task = self._bar.add_task("training", total=None)

    def follow(self, follower: Callable[[dict[str, Any]], None]) -> None:
        """From now on tell `follower` of every line."""
        self._followers.append(follower)

    def write(self, event: str, **values: Any) -> None:
        """One line ``{"event": event, ..., "time": ...}``, on the disk when this returns as far as the system cares.

        What a full disk does not take is kept, and written with a later line.
        """
        if self._file is not None:
            entry = {"event": event, **values, "time": round(time.time(), 3)}
            for follower in self._followers:
                follower(entry)
            try:
                self._file.write(json.dumps(entry) + "\n")
                self._file.flush()
                self._failing = False
            except OSError as error:
                self._cannot(error)

    def _cannot(self, error: OSError) -> None:
        """A log that cannot be written does not end a run: say so, once until it can be written again."""
        if not self._failing:
            _log.warning("the log cannot be written now: %s", error.strerror or error)
        self._failing = True

    def say(self, text: str) -> None:
        """A line for the user."""
        if self._speaks:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def move(self, done: int, total: int, text: str) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, description=text)

    def close(self) -> None:
        """Close the file and end the bar; idempotent."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self._cannot(error)
            self._file = None

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_log(path: str | Path, event: str | None = None) -> list[Entry]:
    """The lines of a log, or those of one event; lines that cannot be read are left out, with a warning. Local."""
    return [entry for _, entry in _good(Path(path)) if event is None or entry["event"] == event]


def _good(path: Path) -> list[tuple[bytes, Entry]]:
    good, bad = parse_lines(lines_of(path))
    if bad:
        warn_of_lines(path, bad)
    return good


def rewind_log(path: Path, step: int) -> None:
    """Drop what was logged after update number `step`: a run that resumes there writes it again. Local.

    Lines that cannot be read go too, with a warning.

    Raises
    ------
    UserError
        If the log cannot be written again; the old one is as it was.
    """
    if not path.exists():
        return
    kept = [line.rstrip(b"\n") for line, entry in _good(path) if entry.get("step", 0) <= step]
    try:
        write_whole(path, b"".join(line + b"\n" for line in kept).decode())
    except OSError as error:
        raise UserError(f"{path}: expected a log that can be continued, got an error: {error.strerror}") from error
