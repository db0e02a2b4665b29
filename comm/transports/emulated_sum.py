"""Sums, reduce-scatters and all-gathers in shared memory that take the time of the emulated network."""

from __future__ import annotations

import numpy as np

from halograd.comm.counters import Meter
from halograd.comm.transports.base import ALIGNMENT
from halograd.comm.transports.places import Places
from halograd.comm.transports.shared_rounded import StagedRoundedSum
from halograd.comm.transports.shared_shards import SharedGather, SharedScatter, StagedScatter
from halograd.comm.transports.shared_sum import SharedSum, Stage, StagedSum
from halograd.comm.transports.timing import sleep_until

__all__ = [
    "EmulatedGather",
    "EmulatedLargeScatter",
    "EmulatedLargeSum",
    "EmulatedRoundedSum",
    "EmulatedScatter",
    "EmulatedSum",
]


class EmulatedSum(SharedSum):
    """A small all-reduce that takes the time of a ring, counted from when the last rank started it."""

    def __init__(self, buffer: np.ndarray, meter: Meter, places: Places, seconds: float, nap: bool) -> None:
        super().__init__(buffer, meter, places)
        self._seconds, self._nap = seconds, nap
        self._started = self.stamps

    def _start(self) -> None:
        self._started[self._count % 2][self._mine][0] = self._started_at
        super()._start()

    def _finish(self) -> float:
        self._flags.wait_for(self._count)
        arrived = max(float(stamp[0]) for stamp in self._started[(self._count - 1) % 2]) + self._seconds
        sleep_until(arrived, self._nap)
        self._add_up()
        return arrived

    def _close(self) -> None:
        self._started.clear()
        super()._close()


class EmulatedLargeSum(StagedSum):
    """A large all-reduce: it travels for the time of a ring while the ranks compute; added up where it is finished."""

    def __init__(
        self, buffer: np.ndarray, meter: Meter, stage: Stage, places: Places, seconds: float, nap: bool
    ) -> None:
        super().__init__(buffer, meter, stage)
        self._places, self._seconds, self._nap = places, seconds, nap
        self._started = [[view.view(np.float64) for view in places.views(i * ALIGNMENT, 8)] for i in range(2)]
        self._count = 0

    def _start(self) -> None:
        self._started[self._count % 2][self._places.mine][0] = self._started_at
        self._count += 1
        self._places.flags.raise_to(self._count)
        super()._start()

    def _make(self) -> None:
        self._places.flags.wait_for(self._count)
        self.arrived = max(float(stamp[0]) for stamp in self._started[(self._count - 1) % 2]) + self._seconds
        sleep_until(self.arrived, self._nap)
        super()._make()

    def _finish(self) -> float:
        super()._finish()
        return self.arrived

    def _close(self) -> None:
        self._started.clear()
        self._places.give_back()


class EmulatedRoundedSum(EmulatedLargeSum, StagedRoundedSum):
    """A sum that travels as bfloat16 for the time of a ring; added up where it is finished."""


class EmulatedScatter(EmulatedSum, SharedScatter):
    """A small reduce-scatter that takes the time of half a ring, counted likewise."""


class EmulatedGather(EmulatedSum, SharedGather):
    """An all-gather of any size that takes the time of half a ring, counted likewise."""


class EmulatedLargeScatter(EmulatedLargeSum, StagedScatter):
    """A large reduce-scatter: it travels while the ranks compute; added up where it is finished."""
