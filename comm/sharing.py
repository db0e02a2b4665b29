"""The halves of an all-reduce over MPI: sums of which every rank keeps its shard, and shards that all ranks get."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from halograd.comm.counters import Meter
from halograd.comm.progress import Progress
from halograd.comm.reduction import MpiReduction
from halograd.comm.shard import shards

__all__ = ["MpiGather", "MpiScatter"]


class MpiScatter(MpiReduction):
    """A non-blocking reduce-scatter of MPI: afterwards this rank's shard of the buffer holds the sum.

    The other shards keep this rank's summands. Adjoint: :class:`MpiGather`.
    """

    def __init__(self, mpi_comm: MPI.Intracomm, progress: Progress, buffer: np.ndarray, meter: Meter) -> None:
        super().__init__(mpi_comm, progress, buffer, meter)
        flat = buffer.reshape(-1)
        parts = shards(flat.size, mpi_comm.size, buffer.itemsize)
        self._counts = [part.stop - part.start for part in parts]
        self._shard = flat[parts[mpi_comm.rank]]
        # In place, MPI would put the sum where the buffer begins, over the summands of another rank.
        self._sum = np.empty(0 if self._idle else self._shard.size, buffer.dtype)

    @property
    def buffer_bytes(self) -> int:
        return super().buffer_bytes + self._sum.nbytes

    def _post(self) -> list[MPI.Request]:
        return [self._mpi.Ireduce_scatter(self.buffer, self._sum, self._counts, MPI.SUM)]

    def _complete(self) -> float:
        arrived = super()._complete()
        np.copyto(self._shard, self._sum)
        return arrived


class MpiGather(MpiReduction):
    """A non-blocking all-gather of MPI: every rank's shard of its buffer goes to that place on all ranks.

    Adjoint: :class:`MpiScatter`.
    """

    def __init__(self, mpi_comm: MPI.Intracomm, progress: Progress, buffer: np.ndarray, meter: Meter) -> None:
        super().__init__(mpi_comm, progress, buffer, meter)
        flat = buffer.reshape(-1)
        parts = shards(flat.size, mpi_comm.size, buffer.itemsize)
        counts, places = [part.stop - part.start for part in parts], [part.start for part in parts]
        self._message = [flat, (counts, places)]

    def _post(self) -> list[MPI.Request]:
        return [self._mpi.Iallgatherv(MPI.IN_PLACE, self._message)]
