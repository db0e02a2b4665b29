"""An emulated device per rank: layers take the time of that device, and almost no CPU time.

Only layers are emulated. All other parts are the library's own: the executor's loop, sums and gathers of
gradients in shared memory on an emulated network, threads, the order of operations. So the schedule of many devices can
be measured on two cores, and the time of a layer is exact also on a busy machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mpi4py import MPI

from halograd.comm import Communicator
from halograd.comm.reduction import ReductionSpec
from halograd.comm.transports.emulated import sleep_until
from halograd.perfmodel.kernel_times import LayerTime
from halograd.program.runner import Call
from halograd.training.executor import Executor

__all__ = ["Clock", "PacedCommunicator", "PacedExecutor"]


class Clock:
    """Time at which the emulated device has finished its work. Local.

    A sleep ends late, by 0.1 ms or, on a busy machine, much more. This does not delay the device: its next layer
    starts when the previous one ended, as in a queue. The device does wait for the main thread's work on sums of
    gradients, including waits.

    Attributes
    ----------
    done
        `time.perf_counter` [s].
    """

    def __init__(self) -> None:
        self.done = 0.0
        self.reset()

    def reset(self) -> None:
        """Make the device idle now."""
        self.done = time.perf_counter()

    def compute(self, seconds: float) -> None:
        """Run a layer that takes `seconds` [s]; return after its end."""
        if seconds > 0:
            self.done += seconds
            sleep_until(self.done)

    def idle(self, seconds: float) -> None:
        """Add idle time of the device [s]."""
        self.done += seconds


class PacedCommunicator(Communicator):
    """Communicator whose sums of gradients block the device as long as the main thread.

    Parameters
    ----------
    clock
        Clock of the device.
    synchronize
        Time that the start of a sum waits for the device in the middle of backward [s].

    Attributes
    ----------
    exposed
        Time that the device has waited for sums so far: for their starts and ends [s].
    """

    def __init__(self, mpi_comm: MPI.Intracomm, transport: str, clock: Clock, synchronize: float = 0.0) -> None:
        self._clock, self.synchronize, self.exposed = clock, synchronize, 0.0
        super().__init__(mpi_comm, transport)

    def reductions(self, specs: Sequence[ReductionSpec]) -> list[Any]:
        return [self._paced(reduction, spec.kind) for reduction, spec in zip(super().reductions(specs), specs)]

    def _paced(self, reduction: Any, kind: str) -> Any:
        if kind == "loss":
            return reduction
        start, finish = reduction.start, reduction.finish
        # The gathers after a sum start when the device is idle.
        pauses = kind in ("allreduce", "reduce_scatter")

        def paced_start() -> None:
            if pauses and self.synchronize:
                self._clock.compute(self.synchronize)
                self.exposed += self.synchronize
            self._exposed(start)

        reduction.start, reduction.finish = paced_start, lambda: self._exposed(finish)
        return reduction

    def _exposed(self, call: Callable[[], None]) -> None:
        begin = time.perf_counter()
        call()
        seconds = time.perf_counter() - begin
        self._clock.idle(seconds)
        self.exposed += seconds


class _Pause:
    """Kernel that only takes time."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds

    def __call__(self) -> None:
        self._clock.compute(self._seconds)

    def close(self) -> None:
        return


class PacedExecutor(Executor):
    """Executor whose layers compute nothing, and take given times. Collective.

    Parameters
    ----------
    pace
        Time of each layer on the device.
    whole
        Time of each replicated dense layer's gradient of the whole batch [s].
    clock
        Clock of the device.
    arguments
        As for :class:`Executor`.
    """

    def __init__(
        self, pace: Mapping[str, LayerTime], whole: Mapping[str, float], clock: Clock, *arguments: Any, **more: Any
    ) -> None:
        self._pace, self._clock = pace, clock
        super().__init__(*arguments, **more)
        for name, kernel in self.program.exposed.items():
            self._pace_kernels(self.runner.instance(kernel), pace[name], whole.get(name, 0.0))

    def _pace_kernels(self, dense: Any, time_of: LayerTime, whole: float) -> None:
        """Replace the kernels of a replicated dense layer by pauses; its messages stay real."""
        dense.kernel = _Pause(self._clock, time_of.forward)
        dense.filter = _Pause(self._clock, time_of.backward_filter)
        dense.data = _Pause(self._clock, time_of.backward_data)
        dense.whole = _Pause(self._clock, whole)

    def _recorded(self, layer: str, phase: str, calls: Sequence[Call]) -> Sequence[Call]:
        if layer in self.program.exposed:
            return calls
        pace = self._pace.get(layer)
        return [] if pace is None else [partial(self._clock.compute, getattr(pace, phase))]
