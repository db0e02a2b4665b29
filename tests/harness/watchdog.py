"""A limit per test that holds inside MPI and C calls too, and leaves every thread's traceback."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Callable
from typing import TextIO

from tests.harness.record import Record

# The second watchdog needs no interpreter lock; it acts where the first could not.
MARGIN = 15.0  # [s]


class Watchdog:
    """Timer for one test at a time; `expired(limit)` is called in its thread after the tracebacks are written.

    SIGUSR1 writes the tracebacks at any time: the runner or another rank asks for them so.
    """

    def __init__(self, record: Record) -> None:
        path = record.stack_file()
        # A copy of stderr: pytest's capture has its hands on number 2.
        self.file: TextIO = path.open("a") if path else os.fdopen(os.dup(2), "w")
        faulthandler.register(signal.SIGUSR1, file=self.file, all_threads=True)
        self._timer: threading.Timer | None = None

    def start(self, limit: float, expired: Callable[[float], None] | None) -> None:
        """Begin to watch. Without `expired` only the second watchdog acts, which ends this process."""
        self.stop()
        faulthandler.dump_traceback_later(limit + MARGIN, exit=True, file=self.file)
        if expired is not None:
            self._timer = threading.Timer(limit, self._fire, (limit, expired))
            self._timer.daemon = True
            self._timer.start()

    def stop(self) -> None:
        """End the watch."""
        faulthandler.cancel_dump_traceback_later()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self, limit: float, expired: Callable[[float], None]) -> None:
        expired(limit)
