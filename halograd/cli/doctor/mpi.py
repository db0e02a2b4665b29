"""MPI: library, thread level, ranks, and whether they can talk."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from halograd.cli.doctor.finding import Finding
from halograd.comm.boot import launched_size

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["probe_mpi", "probe_ranks", "probe_shared_memory"]

SHARED_MEMORY = Path("/dev/shm")
# Enough for MPI's own segments and the halo windows of small networks; containers often give 64 MiB in all.
ENOUGH_PER_RANK = 64 << 20  # [B]


def probe_mpi() -> Iterator[Finding]:
    """Library, its version and thread level. Local."""
    try:
        import mpi4py
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        remedy = "pip install 'halograd[mpich]', or load the cluster's MPI (MPI4PY_LIBMPI=/path/of/libmpi.so)"
        yield Finding("MPI library", "fail", " ".join(str(error).split()), remedy)
        return
    vendor, version = MPI.get_vendor()
    standard = ".".join(map(str, MPI.Get_version()))
    yield Finding("MPI library", "ok", f"{vendor} {'.'.join(map(str, version))}, standard {standard}")
    yield _thread_level(MPI.Query_thread())
    yield Finding("mpi4py", "ok", mpi4py.__version__)


def _thread_level(level: int) -> Finding:
    from mpi4py import MPI

    names = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }
    if level == MPI.THREAD_MULTIPLE:
        return Finding("thread level", "ok", names[level])
    remedy = "expected multiple, for the progress thread: unset MPI4PY_RC_THREAD_LEVEL, or build MPI with threads"
    return Finding("thread level", "fail", names.get(level, str(level)), remedy)


def probe_ranks(world: MPI.Intracomm) -> Iterator[Finding]:
    """Ranks and nodes, a sum over all ranks, a window shared within the node. Collective over `world`."""
    from mpi4py import MPI

    launched = launched_size()
    if launched not in (None, world.size):
        remedy = "start with the mpiexec of the same MPI, or srun --mpi=pmi2 (MPICH) or pmix (Open MPI)"
        yield Finding("ranks", "fail", f"the launcher started {launched}, MPI sees {world.size}", remedy)
        return
    nodes = Counter(world.allgather(MPI.Get_processor_name()))
    yield Finding("ranks", "ok", f"{world.size} on " + ", ".join(f"{host} ({n})" for host, n in nodes.items()))
    total = np.array([world.rank + 1.0])
    world.Allreduce(MPI.IN_PLACE, total)
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    assert isinstance(node, MPI.Intracomm)
    window = MPI.Win.Allocate_shared(1 << 20, 1, comm=node)
    neighbour, _ = window.Shared_query((node.rank + 1) % node.size)
    shared = neighbour is not None and len(neighbour) == 1 << 20
    window.Free()
    node.Free()
    expected = world.size * (world.size + 1) / 2
    right = total[0] == expected and shared
    value = f"sum over ranks {total[0]:g} of {expected:g}, shared window {'mapped' if shared else 'not mapped'}"
    yield Finding("communication", "ok" if right else "fail", value, "" if right else "try another MPI")


def probe_shared_memory(ranks_on_node: int) -> Iterator[Finding]:
    """Space for windows that the ranks of a node share. Local."""
    if not SHARED_MEMORY.is_dir():
        yield Finding("shared memory", "note", "no /dev/shm here; MPI puts its windows elsewhere")
        return
    usage = shutil.disk_usage(SHARED_MEMORY)
    value = f"{usage.free / 2**20:.0f} MiB free of {usage.total / 2**20:.0f} in {SHARED_MEMORY}"
    if not os.access(SHARED_MEMORY, os.W_OK):
        yield Finding("shared memory", "fail", "no write access to /dev/shm", "ask for it, or set TMPDIR for MPI")
    elif usage.free < ranks_on_node * ENOUGH_PER_RANK:
        remedy = "give the container more (docker run --shm-size=2g), or train with the transport mpi"
        yield Finding("shared memory", "warn", value, remedy)
    else:
        yield Finding("shared memory", "ok", value)
