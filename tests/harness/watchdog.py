"""A limit per test that holds inside MPI and C calls too, and leaves every thread's traceback."""

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
    """Timer for one test at a time; `expired(limit)` is called in a thread of its own.

    SIGUSR2 writes the tracebacks at any time: the runner or another rank asks for them so.
    """

    def __init__(self, record: Record) -> None:
        path = record.stack_file()
        # A copy of stderr: pytest's capture has its hands on number 2.
        self.file: TextIO = path.open("a") if path else os.fdopen(os.dup(2), "w")
        faulthandler.register(signal.SIGUSR2, file=self.file, all_threads=True)
        self._timer: threading.Timer | None = None

    def start(self, limit: float, expired: Callable[[float], None] | None) -> None:
        """Begin to watch. Without `expired` only the second watchdog acts, which ends this process.

        It needs no interpreter lock, and acts after the grace time where the first one could not.
        """
        self.stop()
        faulthandler.dump_traceback_later(limit + grace(), exit=True, file=self.file)
        if expired is not None:
            self._timer = threading.Timer(limit, expired, (limit,))
            self._timer.daemon = True
            self._timer.start()

    def stop(self) -> None:
        """End the watch."""
        faulthandler.cancel_dump_traceback_later()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def ask_for_stacks(folder: Path | None, pids: Mapping[int, int]) -> None:
    """Have processes, given by rank, write their tracebacks to the files of this record; return when they have.

    Without a record they go to stderr, and nothing says when.
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
