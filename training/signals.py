"""Signals that ask a run to stop: note them, let the step end, write a checkpoint, go on another time.

Slurm sends SIGUSR1 some time before the limit (``--signal=USR1@120``) and SIGTERM before preemption; the launcher
passes them to every rank, or to some. No rank may act on its own: what arrived travels with the loss of the step
(`Executor.votes`), so that all ranks stop after the same one.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["CHECKPOINTED", "StopSignals", "ignore_stop_signals"]

#: Exit code (EX_TEMPFAIL) of a run that was asked to stop and can go on: start it again with ``--resume``.
CHECKPOINTED = 75

_ASKING = (signal.SIGUSR1, signal.SIGTERM)


class StopSignals:
    """Notes SIGUSR1 and SIGTERM while a ``with`` lasts. Local.

    A further signal changes nothing: launchers deliver one wish several times (Slurm to the batch script and to the
    ranks, and SIGTERM once more before SIGKILL), and a checkpoint under way must not be lost by that. SIGINT
    (Ctrl-C) is left alone; it ends the job at once (:mod:`halograd.comm.interrupt`).

    Attributes
    ----------
    received
        The first signal that came; None so far.

    Notes
    -----
    Signals can be noted by the main thread only; in another one nothing is installed.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)

    @property
    def vote(self) -> int:
        """Number of the signal that came, 0 without one."""
        return 0 if self.received is None else int(self.received)

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in _ASKING:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()


def ignore_stop_signals() -> None:
    """From here on only SIGINT and SIGKILL disturb this process: it has a checkpoint, and is about to leave. Local."""
    for number in _ASKING:
        signal.signal(number, signal.SIG_IGN)
