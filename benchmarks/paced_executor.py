"""An emulated device per rank: layers take the time that they would take there, and next to no CPU.

Only layers are emulated. What goes on between them is the library's own: the executor's loop, sums and gathers of
gradients in shared memory on an emulated network, threads, the order of things. So the schedule of many devices can be
measured where there are two cores, and a layer takes its time to the microsecond on a busy machine too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpi4py import MPI

from halograd.comm import Communicator
from halograd.comm.reduction import ReductionSpec
from halograd.comm.transports.emulated import sleep_until
from halograd.perfmodel.kernel_times import LayerTime
from halograd.training.executor import Executor

__all__ = ["Clock", "PacedCommunicator", "PacedExecutor"]


class Clock:
    """When the emulated device is done with all it was given. Local.

    Sleeping ends late, by 0.1 ms or, on a busy machine, much more. The device does not wait for that: its next layer
    begins when the one before ended, as if it had been in a queue. What the main thread does for the sums of gradients,
    waiting included, the device does wait for.

    Attributes
    ----------
    done
        `time.perf_counter` [s].
    """

    def __init__(self) -> None:
        self.done = 0.0
        self.reset()

    def reset(self) -> None:
        """The device is idle, now."""
        self.done = time.perf_counter()

    def compute(self, seconds: float) -> None:
        """A layer of so many seconds; returns when it is done."""
        if seconds > 0:
            self.done += seconds
            sleep_until(self.done)

    def idle(self, seconds: float) -> None:
        """The device had nothing to do for so long."""
        self.done += seconds


class PacedCommunicator(Communicator):
    """A communicator whose sums of gradients the device waits for, as the main thread does.

    Parameters
    ----------
    clock
        Of the device.
    synchronize
        What the start of a sum waits for the device in the middle of backward [s].

    Attributes
    ----------
    exposed
        What the device has waited for sums so far: their starts, and for their ends [s].
    """

    def __init__(self, mpi_comm: MPI.Intracomm, transport: str, clock: Clock, synchronize: float = 0.0) -> None:
        self._clock, self.synchronize, self.exposed = clock, synchronize, 0.0
        super().__init__(mpi_comm, transport)

    def reductions(self, specs: Sequence[ReductionSpec]) -> list[Any]:
        return [self._paced(one, spec.kind) for one, spec in zip(super().reductions(specs), specs)]

    def _paced(self, made: Any, kind: str) -> Any:
        if kind == "loss":
            return made
        start, finish = made.start, made.finish
        # The gathers that follow a sum are started by a device at rest.
        pauses = kind in ("allreduce", "reduce_scatter")

        def paced_start() -> None:
            if pauses and self.synchronize:
                self._clock.compute(self.synchronize)
                self.exposed += self.synchronize
            self._exposed(start)

        made.start, made.finish = paced_start, lambda: self._exposed(finish)
        return made

    def _exposed(self, call: Callable[[], None]) -> None:
        begin = time.perf_counter()
        call()
        seconds = time.perf_counter() - begin
        self._clock.idle(seconds)
        self.exposed += seconds


class _Pause:
    """A kernel that only takes time."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds

    def __call__(self) -> None:
        self._clock.compute(self._seconds)

    def close(self) -> None:
        return


class PacedExecutor(Executor):
    """An executor whose layers compute nothing and take given times. Collective.

    Parameters
    ----------
    pace
        Layer -> what it takes on the device.
    whole
        Replicated dense layer -> what its gradient of the whole batch takes [s].
    clock
        Of the device.
    arguments
        As for :class:`Executor`.
    """

    def __init__(
        self, pace: Mapping[str, LayerTime], whole: Mapping[str, float], clock: Clock, *arguments: Any, **more: Any
    ) -> None:
        self._pace, self._clock = pace, clock
        super().__init__(*arguments, **more)
        for name, kernel in self.program.exposed.items():
            self._pace_kernels(self.runner.made(kernel), pace[name], whole.get(name, 0.0))

    def _pace_kernels(self, dense: Any, time_of: LayerTime, whole: float) -> None:
        """Its messages are real; the kernels between them are not."""
        dense.kernel = _Pause(self._clock, time_of.forward)
        dense.filter = _Pause(self._clock, time_of.backward_filter)
        dense.data = _Pause(self._clock, time_of.backward_data)
        dense.whole = _Pause(self._clock, whole)

    def _run(self, name: str, category: str, run: Callable[[], None]) -> None:
        if name in self.program.exposed:
            run()
        elif name in self._pace:
            self._clock.compute(getattr(self._pace[name], category))
