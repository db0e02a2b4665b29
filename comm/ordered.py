"""Sums over MPI in the order of the ranks: every rank adds up its shard of all summands, and passes it on.

MPI may add up in any order, and another one for another number of bytes. Here the order is that of the ranks, so the
bits do not depend on the library, on the transport (sums in shared memory have this order too) or on what else is in
the buffer; and summands may be rounded on their way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from halograd.comm.counters import Meter
from halograd.comm.progress import Operation, Progress
from halograd.comm.reduction import MpiReduction
from halograd.comm.rounding import Rounding
from halograd.comm.shard import shards

__all__ = ["MpiOrderedSum", "MpiRoundedSum", "Tags"]

Tags = tuple[int, int]


#: Elements that are added up in one go: some 0.2 ms, for which whoever starts another sum may have to wait.
STEP = 1 << 17


class _TwoPhases(Operation):
    """Messages, work, messages; whoever drives it (progress thread or owner) does the work in between.

    `between` does the work in the given slice of `length` elements.
    """

    def __init__(
        self,
        first: Sequence[MPI.Prequest],
        between: Callable[[slice], None],
        length: int,
        second: Sequence[MPI.Prequest],
    ) -> None:
        super().__init__()
        self._first, self._between, self._second = list(first), between, list(second)
        self._work = [slice(i, min(i + STEP, length)) for i in range(0, length, STEP)]
        self._done = 0
        self._last = False

    def start(self) -> None:
        """Send the first messages."""
        self._last, self._done = False, 0
        self.requests = self._first
        MPI.Prequest.Startall(self._first)

    def poll(self) -> bool:
        if not MPI.Request.Testall(self.requests):
            return False
        if not self._last:
            self._go_on()
            return False
        self.completed_at = time.perf_counter()
        return True

    def wait(self) -> None:
        if not self._last:
            MPI.Request.Waitall(self.requests)
            while not self._last:
                self._go_on()
        MPI.Request.Waitall(self.requests)
        self.completed_at = time.perf_counter()

    def _go_on(self) -> None:
        """One piece of work; after the last one, the second messages."""
        if self._done < len(self._work):
            self._between(self._work[self._done])
            self._done += 1
        if self._done < len(self._work):
            return
        self._last = True
        self.requests = self._second
        MPI.Prequest.Startall(self._second)

    def free(self) -> None:
        """Free the requests; none is under way."""
        for request in (*self._first, *self._second):
            request.Free()
        self._first.clear()
        self._second.clear()


class MpiOrderedSum(MpiReduction):
    """A sum in the order of the ranks, of the bits that were given.

    Every rank receives its shard (:func:`halograd.comm.shards`) of all summands, adds them up, and sends the sum to
    all: reduce-scatter and all-gather with ``2 (P - 1) / P`` times the buffer per rank, as the best all-reduce.

    Parameters
    ----------
    tags
        Of the messages of the two phases, the same on all ranks and of no other sum or channel.
    """

    def __init__(
        self, mpi_comm: MPI.Intracomm, progress: Progress, buffer: np.ndarray, meter: Meter, tags: Tags
    ) -> None:
        super().__init__(mpi_comm, progress, buffer, meter)
        self._flat = buffer.reshape(-1)
        self._wire = self._make_wire()
        rank, self._parts = mpi_comm.rank, shards(self._wire.size, mpi_comm.size, self._wire.itemsize)
        self._own = self._parts[rank]
        length = self._own.stop - self._own.start
        self._received = [
            np.empty(0 if r == rank or self._idle else length, self._wire.dtype) for r in range(mpi_comm.size)
        ]
        first, second = self._requests(tags)
        self._two = _TwoPhases(first, self._add_up, length, second)
        self._operation = self._two

    def _make_wire(self) -> np.ndarray:
        """What travels: ``(n,)``."""
        return self._flat

    def _requests(self, tags: Tags) -> tuple[list[MPI.Prequest], list[MPI.Prequest]]:
        """Those of the two phases."""
        mpi, wire = self._mpi, self._wire
        peers = [] if self._idle else [r for r in range(mpi.size) if r != mpi.rank]
        filled = [r for r in peers if self._parts[r].stop > self._parts[r].start]
        first = [mpi.Send_init(_raw(wire[self._parts[r]]), r, tags[0]) for r in filled]
        second = [mpi.Recv_init(_raw(wire[self._parts[r]]), r, tags[1]) for r in filled]
        if self._own.stop > self._own.start:
            first += [mpi.Recv_init(_raw(self._received[r]), r, tags[0]) for r in peers]
            second += [mpi.Send_init(_raw(wire[self._own]), r, tags[1]) for r in peers]
        return first, second

    @property
    def buffer_bytes(self) -> int:
        return sum(array.nbytes for array in self._received)

    def _post(self) -> Sequence[MPI.Request]:
        self._two.start()
        return self._two.requests

    def _add_up(self, part: slice) -> None:
        """This part of the shards of all ranks to their sum, in the own shard of the wire; on either thread."""
        total, rank = self._wire[self._own][part], self._mpi.rank
        if self._idle:
            return
        # First to last: this rank's summand is in the wire, those before and behind it were received.
        result = total if rank == 0 else self._received[0][part]
        with np.errstate(all="ignore"):
            for r in range(1, self._mpi.size):
                np.add(result, total if r == rank else self._received[r][part], out=result)
        if rank:
            np.copyto(total, result)

    def _close(self) -> None:
        self._two.free()


class MpiRoundedSum(MpiOrderedSum):
    """A sum of float32 that travels as bfloat16, added up in float32 in the order of the ranks.

    Summands are rounded where they are, shards of the sum where they were added up; all ranks get the same bits.

    Attributes
    ----------
    error
        ``(n,)`` float32: what rounding took from this rank's summands so far, added to the next ones. None: it is lost,
        until :meth:`compensate` is called.
    share_error
        The same for the shard of the sum that this rank rounds.
    owned
        Where in the buffer that shard lies.

    References
    ----------
    Tang et al. 2019, *DoubleSqueeze*, Algorithm 1: both sides compensate for their own errors.
    """

    def __init__(
        self,
        mpi_comm: MPI.Intracomm,
        progress: Progress,
        buffer: np.ndarray,
        meter: Meter,
        tags: Tags,
    ) -> None:
        super().__init__(mpi_comm, progress, buffer, meter, tags)
        # Two: the main thread rounds one sum while the progress thread adds up another.
        self._rounding, self._adding = Rounding(), Rounding()
        self.owned = [self._own]
        self.error: np.ndarray | None = None
        self.share_error: np.ndarray | None = None
        self._total = np.zeros(self._own.stop - self._own.start, np.float32)

    def compensate(self, error: np.ndarray) -> None:
        """From now on add to the summands what was rounded away from those before: `error`, ``(n,)`` float32. Local."""
        self.error, self.share_error = error, np.zeros_like(self._total)

    def _make_wire(self) -> np.ndarray:
        return np.zeros(0 if self._idle else self._flat.size, np.uint16)

    @property
    def buffer_bytes(self) -> int:
        held = [self._wire, self._total] + ([] if self.share_error is None else [self.share_error])
        return super().buffer_bytes + sum(a.nbytes for a in held) + self._rounding.nbytes + self._adding.nbytes

    def _post(self) -> Sequence[MPI.Request]:
        self._rounding.encode(self._flat, self._wire, self.error)
        return super()._post()

    def _add_up(self, part: slice) -> None:
        own, total = self._wire[self._own][part], self._total[part]
        total.fill(0)
        for r, wire in enumerate(self._received):
            self._adding.add(own if r == self._mpi.rank else wire[part], total)
        self._adding.encode(total, own, None if self.share_error is None else self.share_error[part])

    def _complete(self) -> float:
        arrived = super()._complete()
        self._rounding.decode(self._wire, self._flat)
        return arrived


def _raw(memory: np.ndarray) -> tuple[np.ndarray, MPI.Datatype]:
    """The elements as words of their size, for MPI to send."""
    return memory.view(f"u{memory.itemsize}"), {8: MPI.UINT64_T, 4: MPI.UINT32_T, 2: MPI.UINT16_T}[memory.itemsize]
