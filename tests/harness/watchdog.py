"""A time limit per test that also holds inside MPI and C calls, and writes every thread's traceback."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from tests.harness.jobs import alive
from tests.harness.limits import grace, scaled
from tests.harness.record import Record, stack_path


class Watchdog:
    """Timer for one test at a time; it calls `expired(limit)` in a thread of its own.

    SIGUSR2, which the runner or another rank sends, writes the tracebacks at any time.
    """

    def __init__(self, record: Record) -> None:
        path = record.stack_file()
        # A copy of stderr: pytest's capture has its hands on number 2.
        self.file: TextIO = path.open("a") if path else os.fdopen(os.dup(2), "w")
        faulthandler.register(signal.SIGUSR2, file=self.file, all_threads=True)
        self._timer: threading.Timer | None = None

    def start(self, limit: float, expired: Callable[[float], None] | None) -> None:
        """Start the timer. Without `expired` only the second watchdog acts, which ends this process.

        The second watchdog needs no interpreter lock; it acts after the grace time if the first one could not.
        """
        self.stop()
        faulthandler.dump_traceback_later(limit + grace(), exit=True, file=self.file)
        if expired is not None:
            self._timer = threading.Timer(limit, expired, (limit,))
            self._timer.daemon = True
            self._timer.start()

    def stop(self) -> None:
        """Stop the timer."""
        faulthandler.cancel_dump_traceback_later()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def ask_for_stacks(folder: Path | None, pids: Mapping[int, int]) -> None:
    """Make processes, given by rank, write their tracebacks to the files of this record; return when they have.

    Without a record the tracebacks go to stderr, and the function does not wait for them.
    """
    for pid in pids.values():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR2)
    deadline = time.monotonic() + (0.5 if folder is None else scaled(20))
    before: dict[int, int] = {}
    while time.monotonic() < deadline:
        time.sleep(0.1)
        if folder is not None:
            paths = {rank: stack_path(folder, rank) for rank, pid in pids.items() if alive(pid)}
            sizes = {rank: path.stat().st_size if path.exists() else 0 for rank, path in paths.items()}
            if sizes == before and all(sizes.values()):
                return
            before = sizes
