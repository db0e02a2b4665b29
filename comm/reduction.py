"""Sums over all ranks of a communicator, in place, while the ranks compute."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from halograd.comm.counters import Meter
from halograd.comm.errors import CommError
from halograd.comm.progress import Operation, Progress

__all__ = ["METHODS", "DirectReduction", "MpiReduction", "Reduction", "check_alike", "check_buffer", "check_method"]

REDUCIBLE = ("float32", "float64", "int32", "int64")
#: What `Communicator.reduction` can make of a buffer.
METHODS = ("allreduce", "ordered", "rounded", "reduce_scatter", "all_gather", "hierarchical", "accumulate")


class Reduction(ABC):
    """In-place sum of an array over all ranks; made by `Communicator.reduction`.

    ::

        fill the buffer
        reduction.start()     # does not wait
        ...                   # compute; leave the buffer alone
        reduction.finish()    # waits: the buffer holds the sum

    Collective: all ranks start their reductions in the same order; any number may be under way, and they
    may be finished in any order. The algorithm is the transport's choice; the result has the same bits on all ranks.
    `finish` may be where the ranks of a node meet and add up: until all have called it, none returns.
    Adjoint: the sum of the adjoints, that is, itself.
    """

    def __init__(self, buffer: np.ndarray, meter: Meter) -> None:
        self.buffer = buffer
        self._meter = meter
        self._started_at = 0.0
        self._under_way = False
        self.closed = False

    @property
    def buffer_bytes(self) -> int:
        """Memory that the sum takes beside the buffer on this rank, in MPI or in shared memory [B]."""
        return self.buffer.nbytes

    @property
    def on_host(self) -> Reduction:
        """The sum that the host makes: this one, or the one within it if the buffer is on a device."""
        return self

    def start(self) -> None:
        """Begin to sum the buffer. Does not wait."""
        if self._under_way:
            raise CommError(f"start(): expected finish() of {self._meter.name} before, got another start()")
        self._under_way = True
        self._started_at = time.perf_counter()
        self._meter.sent()
        self._start()

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
        self._meter.waits()
        before = time.perf_counter()
        arrived = self._finish()
        after = time.perf_counter()
        self._meter.took(self._started_at, before, arrived or after, after)

    def run(self) -> None:
        """`start` and `finish` at once, for small buffers that are needed now."""
        self.start()
        self.finish()

    def close(self) -> None:
        """Finish if under way; idempotent. Local, but all ranks do it."""
        if self._under_way:
            self.finish()
        if not self.closed:
            self.closed = True
            self._close()

    @abstractmethod
    def _start(self) -> None: ...

    @abstractmethod
    def _finish(self) -> float:
        """Wait; return when the sum was there (`time.perf_counter` [s]), 0 if not known."""

    def _close(self) -> None:
        """Give back what the sum holds. Local."""
        return None


class MpiReduction(Reduction):
    """A non-blocking all-reduce of MPI, which the progress thread drives."""

    def __init__(self, mpi_comm: MPI.Intracomm, progress: Progress, buffer: np.ndarray, meter: Meter) -> None:
        super().__init__(buffer, meter)
        self._mpi = mpi_comm
        self._progress = progress
        self._operation = Operation()
        self._idle = mpi_comm.size == 1 or not buffer.size

    @property
    def buffer_bytes(self) -> int:
        return self.buffer.nbytes if self._mpi.size > 1 else 0

    def _start(self) -> None:
        if not self._idle:
            self._operation.requests = self._post()
            self._progress.submit(self._operation)

    def _finish(self) -> float:
        return 0.0 if self._idle else self._guard(self._complete)

    def _post(self) -> Sequence[MPI.Request]:
        return [self._mpi.Iallreduce(MPI.IN_PLACE, self.buffer, MPI.SUM)]

    def _complete(self) -> float:
        self._progress.complete(self._operation)
        return self._operation.completed_at

    def _guard(self, call: Callable[[], float]) -> float:
        try:
            return call()
        except Exception as fault:
            raise CommError(f"reduction {self._meter.name} of {self.buffer.nbytes} bytes failed: {fault}") from fault


class DirectReduction(MpiReduction):
    """A reduction on the real network: `run` does not go through the progress thread."""

    def run(self) -> None:
        if self._under_way:
            raise CommError(f"run(): expected finish() of {self._meter.name} before")
        self._meter.waits()
        before = time.perf_counter()
        self._meter.sent()
        if not self._idle:
            self._guard(self._sum_now)
        after = time.perf_counter()
        self._meter.took(before, before, after, after)

    def _sum_now(self) -> float:
        self._mpi.Allreduce(MPI.IN_PLACE, self.buffer, MPI.SUM)
        return 0.0


def check_buffer(buffer: np.ndarray, any_dtype: bool = False) -> None:
    """Raise CommError unless the array can be reduced in place (or gathered, whatever its dtype). Local."""
    if not isinstance(buffer, np.ndarray):
        raise CommError(f"buffer: expected a NumPy array, got {type(buffer).__name__}")
    if not any_dtype and buffer.dtype.name not in REDUCIBLE:
        raise CommError(f"buffer: expected one of {', '.join(REDUCIBLE)}, got {buffer.dtype}; convert it to float32")
    if not (buffer.flags.c_contiguous and buffer.flags.writeable):
        raise CommError(
            f"buffer: expected a writeable C-contiguous array, got strides {buffer.strides} for shape "
            f"{buffer.shape}; reduce a packed copy"
        )


def check_alike(mpi_comm: MPI.Intracomm, first: int, buffer: np.ndarray) -> None:
    """Raise CommError unless the buffer is like that of the first rank, which is called `first`. Collective, to be
    agreed on."""
    mine = (buffer.shape, buffer.dtype.name)
    wanted = mpi_comm.bcast(mine, root=0)
    if mine != wanted:
        raise CommError(
            f"buffer: expected shape {wanted[0]} and {wanted[1]} as on rank {first}, got {mine[0]} and {mine[1]}"
        )


def check_method(method: str) -> None:
    """Raise CommError unless there is a reduction of this name. Local."""
    if method not in METHODS:
        raise CommError(f"method: expected one of {', '.join(METHODS)}, got {method!r}")
