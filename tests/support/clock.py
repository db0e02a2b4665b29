"""Clock that tests set and advance, in place of the module `time` in modules of the library."""

from __future__ import annotations

import importlib
from time import localtime, strftime
from types import ModuleType

import pytest

__all__ = ["TICK", "DrivenClock", "network_clock"]

TICK = 2.0**-20  # [s], about 1 us: sums of it are exact


class DrivenClock:
    """A clock that advances only when something sleeps on it, and by one tick whenever it is read, as polling takes
    time.

    Each process has its own clock. Processes compare times that they send each other, such as when a message was sent,
    as if their clocks agreed: the time of a network emulated on these clocks is exact, whatever the load of the
    machine.

    Attributes
    ----------
    seconds
        Time that the clock shows [s]; the test may set it.
    tick
        Time that one reading takes [s].
    naps
        Duration of each call of `sleep` [s].
    """

    def __init__(self, tick: float = TICK) -> None:
        self.seconds, self.naps = 0.0, list[float]()
        self.tick = tick

    def drive(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> DrivenClock:
        """Replace the module `time` in these modules by this clock; return the clock."""
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
    """Return this rank's clock for emulated messages and sums; it advances when the rank waits for them.

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
