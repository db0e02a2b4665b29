"""Stop signals: a run records them, completes the step, writes a checkpoint, and can be resumed.

Slurm sends SIGUSR1 some time before the time limit (``--signal=USR1@120``) and SIGTERM before preemption; the launcher
passes them to all ranks, or to some. No rank acts alone: ranks share signals through the loss reduction
(`PassLoss.votes`), so all of them stop after the same step.

The command line records signals from its first line on (:func:`note_stop_signals`). It ignores them as soon as its exit
code is known (:func:`ignore_stop_signals`), so that a signal never changes the exit code. This module is
imported before all other modules of the library, and imports none of them.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["CHECKPOINTED", "StopSignals", "ignore_stop_signals", "note_stop_signals"]

#: Exit code (EX_TEMPFAIL) of a run that a signal stopped and that ``--resume`` continues.
CHECKPOINTED = 75

_ASKING = (signal.SIGUSR1, signal.SIGTERM)


class StopSignals:
    """Context manager that records SIGUSR1 and SIGTERM; it takes over a signal that an outer one has recorded. Local.

    A second signal changes nothing: launchers deliver one request several times (Slurm to the batch script and to the
    ranks, and SIGTERM once more before SIGKILL), and a checkpoint in progress must not be lost. SIGINT (Ctrl-C) is not
    handled here: it ends the job at once (:mod:`halograd.comm.boot`).

    Attributes
    ----------
    received
        The first signal; None before one arrives.

    Notes
    -----
    Only the main thread can install handlers; in another thread this is a no-op.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)

    @property
    def vote(self) -> int:
        """Number of the received signal; 0 if none was received."""
        return 0 if self.received is None else int(self.received)

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in _ASKING:
                before = self._before[number] = signal.signal(number, self._note)
                # The command line installs an outer one before the imports; a signal may have arrived since.
                outer = getattr(before, "__self__", None)
                if isinstance(outer, StopSignals) and outer.received is not None:
                    self._note(outer.received, None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # In another thread than the main one, `_before` is empty.
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()


def note_stop_signals() -> None:
    """Record SIGUSR1 and SIGTERM from now on, for a later :class:`StopSignals`. Local, in the main thread."""
    # Never left: its handlers stay until others replace them.
    StopSignals().__enter__()


def ignore_stop_signals() -> None:
    """Ignore SIGUSR1 and SIGTERM from now on, because the exit code is known and the process ends. Local.

    Python removes its own handlers before it ends, but ignored signals stay ignored.
    """
    for number in _ASKING:
        signal.signal(number, signal.SIG_IGN)
