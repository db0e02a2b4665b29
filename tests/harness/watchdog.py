"""A limit per test that holds inside MPI and C calls too, and leaves every thread's traceback."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Callable
from typing import TextIO

from tests.harness.record import Record

GRACE_VARIABLE = "HALOGRAD_TEST_GRACE"


def grace() -> float:
    """How long after a first sign of trouble a harder measure follows [s]."""
    return float(os.environ.get(GRACE_VARIABLE, 20))


class Watchdog:
    """Timer for one test at a time; `expired(limit)` is called in a thread of its own.

    SIGUSR1 writes the tracebacks at any time: the runner or another rank asks for them so.
    """

    def __init__(self, record: Record) -> None:
        path = record.stack_file()
        # A copy of stderr: pytest's capture has its hands on number 2.
        self.file: TextIO = path.open("a") if path else os.fdopen(os.dup(2), "w")
        faulthandler.register(signal.SIGUSR1, file=self.file, all_threads=True)
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
