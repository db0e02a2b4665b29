"""A clock that tests drive, in place of the module `time` in modules of the library."""

from __future__ import annotations

import importlib
from time import localtime, strftime
from types import ModuleType

import pytest

__all__ = ["TICK", "DrivenClock", "network_clock"]

TICK = 2.0**-20  # [s], about 1 us: sums of it are exact


class DrivenClock:
    """Stands still but for naps, and for a tick whenever it is read: polling takes time too.

    Every process that has one has its own. What processes tell each other by it, such as when a message was sent, they
    compare as they would with clocks that agree: the time of a network emulated on them is exact, whatever the load.

    Attributes
    ----------
    seconds
        What it shows; to be set by the test.
    tick
        How long it takes to read it [s].
    naps
        How long each call of `sleep` was to last [s].
    """

    def __init__(self, tick: float = TICK) -> None:
        self.seconds, self.naps = 0.0, list[float]()
        self.tick = tick

    def drive(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> DrivenClock:
        """Let these modules, which say ``import time``, read this clock and sleep on it."""
        for module in modules:
            monkeypatch.setattr(module, "time", self)
        return self

    def perf_counter(self) -> float:
        self.seconds += self.tick
        return self.seconds

    monotonic = time = process_time = perf_counter
    localtime, strftime = staticmethod(localtime), staticmethod(strftime)

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.seconds += seconds


def network_clock(monkeypatch: pytest.MonkeyPatch) -> DrivenClock:
    """The clock of this rank by which emulated messages and sums travel; it moves when the rank waits for them.

    Ranks leave a barrier at the time of the last of them.
    """
    from halograd.comm import Communicator

    names = ("channel", "reduction", "transports.emulated")
    modules = [importlib.import_module(f"halograd.comm.{name}") for name in names]
    clock, barrier = DrivenClock().drive(monkeypatch, *modules), Communicator.barrier

    def meet(comm: Communicator) -> None:
        barrier(comm)
        clock.seconds = comm.allreduce_scalar(clock.seconds, "max")

    monkeypatch.setattr(Communicator, "barrier", meet)
    return clock
