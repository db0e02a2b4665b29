"""What a run that SIGINT ends says and logs: how far it was, and what it goes on from."""

from __future__ import annotations

import json
import os
import platform
import time
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

from ..comm import Communicator
from ..comm.boot import on_interrupt
from ..comm.errors import mark_agreed
from .folder import CheckpointFolder
from .stall import Pulse
from .watchdog import Watchdog

__all__ = ["Interruption"]

TAIL = 1 << 16  # of a log: what ranks that are interrupted at the same time have written is in it [B]


class Interruption:
    """Describes an interrupt while a ``with`` lasts. Local.

    Of several ranks that are interrupted one speaks: the one whose line ``{"event": "interrupted", ...}`` is the first
    in the log. One process alone gets KeyboardInterrupt, which leaves with the same words in it.

    Parameters
    ----------
    comm
        All ranks of the job.
    log
        ``log.jsonl`` of the run.
    folder
        Its checkpoints.
    watchdog
        Is not to report the end.
    """

    def __init__(self, comm: Communicator, log: Path, folder: CheckpointFolder, watchdog: Watchdog) -> None:
        self._comm, self._log, self._folder, self._watchdog = comm, log, folder, watchdog
        self._pulse: Pulse | None = None
        self._words: AbstractContextManager[None] = on_interrupt(self.words)

    def follow(self, pulse: Pulse) -> None:
        """The run has begun, and its log, too: from now on an interrupt is logged. Local."""
        self._pulse = pulse

    def words(self) -> str | None:
        """The line to print, None if another rank prints it; announces and logs the end. Local, in any thread."""
        self._watchdog.expect_end()
        text = "interrupted before the first step"
        if self._pulse is not None:
            text = f"interrupted at step {self._pulse.step + 1}"
            if not self._is_first(self._pulse.step):
                return None
        latest = self._folder.latest
        if latest is None:
            return f"{text}; there is no checkpoint to go on from"
        return f"{text}; the newest checkpoint is {latest.resolve()}; go on with --resume"

    def _is_first(self, step: int) -> bool:
        """Log the interrupt, unless another rank has; whether the line of this rank is the first of its job."""
        reason = f"SIGINT to rank {self._comm.rank} of {self._comm.size}"
        try:
            if not interrupts(self._log):
                entry = {"event": "interrupted", "reason": reason, "host": platform.node(), "at_step": step}
                append(self._log, entry)
            return bool(interrupts(self._log)[0]["reason"] == reason)
        except (OSError, IndexError):  # a disk that takes no more: said twice is better than not at all
            return True

    def __enter__(self) -> Interruption:
        self._words.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._words.__exit__(None, None, None)
        if isinstance(error, KeyboardInterrupt):
            interrupt = KeyboardInterrupt(self.words() or "interrupted")
            mark_agreed(interrupt, True, self._comm.size)  # the watchdog knows of it
            raise interrupt from error


def append(log: Path, entry: dict[str, Any]) -> None:
    """Append a line to a log that is there, by one write: it does not mix with those of other ranks."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(descriptor, (json.dumps({**entry, "time": round(time.time(), 3)}) + "\n").encode())
    finally:
        os.close(descriptor)


def interrupts(log: Path) -> list[dict[str, Any]]:
    """The lines ``interrupted`` of the latest job, as far as they are in the last `TAIL` bytes of its log."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL))
        lines = file.read().decode(errors="replace").splitlines()
    found: list[dict[str, Any]] = []
    for line in lines:
        if line.startswith('{"event": "begin"'):
            found.clear()
        elif line.startswith('{"event": "interrupted"'):
            found.append(json.loads(line))
    return found
