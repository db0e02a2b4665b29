"""Ranks that each have a double of a GPU, and checks of all operations that they enqueue."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mpi4py import MPI

from halograd.comm import Communicator
from halograd.comm.gpu import link
from tests.support.fake_nccl import FakeNccl
from tests.support.happens_before import check_collectives, find_races
from tests.support.stream_device import StreamBackend, StreamDevice
from tests.support.trace import Entry

__all__ = ["Rank", "gathered", "gpu_ranks", "steps"]


class Rank:
    """Rank and its double of a GPU.

    Attributes
    ----------
    choice
        The result of `use_device`.
    """

    def __init__(self, comm: Communicator, kernels: StreamBackend, nccl: FakeNccl) -> None:
        self.comm, self.kernels, self.nccl = comm, kernels, nccl
        self.device: StreamDevice = kernels.device
        self.choice: Any = None

    def trace_barriers(self, monkeypatch: Any) -> None:
        """Record the barriers of this communicator in the traces, because they order the hosts."""
        comm, trace, barrier, count = self.comm, self.device.trace, self.comm.barrier, itertools.count()

        def traced() -> None:
            number = next(count)
            trace.add("host record", "barrier", event=(("barrier", number, comm.rank), number))
            barrier()
            for rank in range(comm.size):
                trace.add("host wait", "barrier", event=(("barrier", number, rank), number))

        monkeypatch.setattr(comm, "barrier", traced)


@contextmanager
def gpu_ranks(monkeypatch: Any, transport: str, sharing: bool = False, **options: Any) -> Iterator[Rank]:
    """Open a communicator over MPI's ranks, each with a separate double of a GPU, or all with the same one.

    With the transport ``"none"`` no transport is selected yet. At the end the traces of all ranks are checked together.
    """
    world = MPI.COMM_WORLD.Dup()
    folder = Path(world.bcast(tempfile.mkdtemp(prefix="halograd-nccl-") if world.rank == 0 else None))
    address = "0000:3b:00.0" if sharing else f"0000:{world.rank:02d}:00.0"
    kernels = StreamBackend(world.rank, address)
    nccl = FakeNccl(kernels.device, world, folder)
    monkeypatch.setattr(link, "load_nccl", lambda: nccl)
    # MPI does reach the memory of this double.
    monkeypatch.setattr(link, "claim_fault", lambda mpi: "")
    monkeypatch.setattr(link, "prove", lambda ordinal: "")
    with Communicator(MPI.COMM_WORLD) as comm:
        rank = Rank(comm, kernels, nccl)
        if transport != "none":
            rank.choice = comm.use_device(kernels.device, transport, **options)
        yield rank
    assert all(c.dead for c in nccl.communicators), "a communicator of NCCL was left"
    faults = None
    traces = gathered(world, kernels.device)
    if traces is not None:
        faults = find_races(traces) + check_collectives(traces)
    faults = world.bcast(faults)
    kernels.close()
    if world.rank == 0:
        shutil.rmtree(folder)
    world.Free()
    assert not faults, "\n".join(faults[:10])


def gathered(mpi: MPI.Intracomm, device: StreamDevice) -> list[list[Entry]] | None:
    """Return the traces of all ranks on rank 0, None on the others. Collective."""
    return mpi.gather(device.trace.entries)


def steps(entries: list[Entry]) -> list[str]:
    """Return the names of the operations and marks of a trace."""
    return [entry.name for entry in entries if entry.kind in ("op", "mark")]
