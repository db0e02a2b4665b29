"""Sums over all ranks of a communicator, in place, while the ranks compute."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from halograd.comm.counters import Meter
from halograd.comm.errors import CommError
from halograd.comm.progress import Operation, Progress

__all__ = ["Reduction", "check_buffer"]

REDUCIBLE = ("float32", "float64", "int32", "int64")


class Reduction:
    """In-place sum of an array over all ranks; made by `Communicator.reduction`.

    ::

        fill the buffer
        reduction.start()     # does not wait; proceeds on the progress thread
        ...                   # compute; leave the buffer alone
        reduction.finish()    # waits: the buffer holds the sum

    Collective: all ranks start their reductions in the same order; any number may be under way, and they
    may be finished in any order. Messages are not bound to one algorithm: MPI chooses.
    Adjoint: the sum of the adjoints, that is, itself.
    """

    def __init__(self, mpi_comm: MPI.Intracomm, progress: Progress, buffer: np.ndarray, meter: Meter) -> None:
        self.buffer = buffer
        self._mpi = mpi_comm
        self._progress = progress
        self._meter = meter
        self._operation = Operation()
        self._started_at = 0.0
        self._under_way = False
        self.closed = False
        self._idle = mpi_comm.size == 1 or not buffer.size

    def start(self) -> None:
        """Begin to sum the buffer. Does not wait."""
        if self._under_way:
            raise CommError(f"start(): expected finish() of {self._meter.name} before, got another start()")
        self._under_way = True
        self._started_at = time.perf_counter()
        self._meter.sent()
        if not self._idle:
            self._operation.requests = self._post()
            self._progress.submit(self._operation)

    def finish(self) -> None:
        """Return when the buffer holds the sum over all ranks.

        Raises
        ------
        CommError
            If the reduction was not started, or failed, be it on the progress thread.
        """
        if not self._under_way:
            raise CommError(f"finish(): expected start() of {self._meter.name} before")
        self._under_way = False
        before = time.perf_counter()
        arrived = before
        if not self._idle:
            arrived = self._guard(self._complete)
        self._meter.took(self._started_at, before, arrived, time.perf_counter())

    def run(self) -> None:
        """`start` and `finish` at once, for small buffers that are needed now."""
        self.start()
        self.finish()

    def close(self) -> None:
        """Finish if under way; idempotent. Local, but all ranks do it."""
        if self._under_way:
            self.finish()
        self.closed = True

    def _post(self) -> list[MPI.Request]:
        return [self._mpi.Iallreduce(MPI.IN_PLACE, self.buffer, MPI.SUM)]

    def _complete(self) -> float:
        """Wait; return when the sum was there (`time.perf_counter` [s])."""
        self._progress.complete(self._operation)
        return self._operation.completed_at

    def _guard(self, call: Callable[[], float]) -> float:
        try:
            return call()
        except Exception as fault:
            raise CommError(
                f"reduction {self._meter.name} of {self.buffer.nbytes} bytes failed: {fault}"
            ) from fault


class DirectReduction(Reduction):
    """A reduction on the real network: `run` does not go through the progress thread."""

    def run(self) -> None:
        if self._under_way:
            raise CommError(f"run(): expected finish() of {self._meter.name} before")
        before = time.perf_counter()
        self._meter.sent()
        if not self._idle:
            self._guard(self._sum_now)
        after = time.perf_counter()
        self._meter.took(before, before, after, after)

    def _sum_now(self) -> float:
        self._mpi.Allreduce(MPI.IN_PLACE, self.buffer, MPI.SUM)
        return 0.0


def check_buffer(buffer: np.ndarray) -> None:
    """Raise CommError unless the array can be reduced in place. Local."""
    if not isinstance(buffer, np.ndarray):
        raise CommError(f"buffer: expected a NumPy array, got {type(buffer).__name__}")
    if buffer.dtype.name not in REDUCIBLE:
        raise CommError(
            f"buffer: expected one of {', '.join(REDUCIBLE)}, got {buffer.dtype}; convert it to float32"
        )
    if not (buffer.flags.c_contiguous and buffer.flags.writeable):
        raise CommError(
            f"buffer: expected a writeable C-contiguous array, got strides {buffer.strides} for shape "
            f"{buffer.shape}; reduce a packed copy"
        )
