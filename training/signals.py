"""Signals that ask a run to stop: note them, let the step end, write a checkpoint, go on another time.

Slurm sends SIGUSR1 some time before the limit (``--signal=USR1@120``) and SIGTERM before preemption; the launcher
passes them to every rank, or to some. No rank may act on its own: what arrived travels with the loss of the step
(`Executor.votes`), so that all ranks stop after the same one.

The command line notes them from its first line on (:func:`note_stop_signals`) and ignores them from its exit code on
(:func:`ignore_stop_signals`): at no time does a signal replace the exit code by its own.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["CHECKPOINTED", "StopSignals", "ignore_stop_signals", "note_stop_signals"]

#: Exit code (EX_TEMPFAIL) of a run that was asked to stop and can go on: start it again with ``--resume``.
CHECKPOINTED = 75

_ASKING = (signal.SIGUSR1, signal.SIGTERM)


class StopSignals:
    """Notes SIGUSR1 and SIGTERM while a ``with`` lasts; what an outer one has noted counts too. Local.

    A further signal changes nothing: launchers deliver one wish several times (Slurm to the batch script and to the
    ranks, and SIGTERM once more before SIGKILL), and a checkpoint under way must not be lost by that. SIGINT
    (Ctrl-C) is left alone; it ends the job at once (:mod:`halograd.comm.boot`).

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
                before = self._before[number] = signal.signal(number, self._note)
                outer = getattr(before, "__self__", None)
                if isinstance(outer, StopSignals) and outer.received is not None:
                    self._note(outer.received, None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()


def note_stop_signals() -> None:
    """Note SIGUSR1 and SIGTERM from here on, for a :class:`StopSignals` to come. Local, in the main thread."""
    StopSignals().__enter__()


def ignore_stop_signals() -> None:
    """Ignore SIGUSR1 and SIGTERM from here on: the exit code is decided, and the process ends. Local.

    Python gives its own handlers up before it ends, but leaves ignored signals ignored.
    """
    for number in _ASKING:
        signal.signal(number, signal.SIG_IGN)
