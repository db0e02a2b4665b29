"""Tests of MPI communicators and windows: closing frees all of them, and too many open ones are rejected in time."""

import os

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import CommError, Communicator, contexts
from tests.harness import mpi
from tests.launch import mpiexec

TRANSPORTS = ["mpi", "shared", "auto", "emulated:alpha=0,beta=0,node=2"]
PROGRAM = """
import numpy as np
from mpi4py import MPI
import halograd as hg
kept = []
try:
    while True:
        {}
except hg.comm.CommError as error:
    if MPI.COMM_WORLD.rank == 0: print(error)
"""
CHANNEL = "peers = {p: 9 for p in range(c.size) if p != c.rank}; kept.append(c.channel(peers, peers, np.float32))"


def use(communicator):
    """Create every object that uses MPI communicators or windows."""
    peers = {peer: 30_000 for peer in range(communicator.size) if peer != communicator.rank}
    communicator.channel(peers, peers, np.float64)
    group = communicator.split(communicator.rank % 2)
    for one in (communicator, group):
        methods = ["allreduce", "ordered", "reduce_scatter"]
        methods += ["hierarchical"] if communicator.transport != "mpi" else []
        for method in methods:
            one.reduction(np.ones(100_000), method=method).run()
    assert communicator.nodes and group.nodes


@pytest.mark.mpi
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_closing_gives_back_all_that_was_taken(comm, transport):
    before = contexts.held()
    with Communicator(comm, transport) as communicator:
        use(communicator)
        assert contexts.held() > before + 2
    assert contexts.held() == before


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("call", ["make", "split", "channel", "reduction", "window", "hierarchical", "nodes"])
def test_a_rank_that_holds_too_many_is_refused_on_all(comm, monkeypatch, call):
    """All ranks reject a call that needs one more context on one rank; afterwards the call works."""
    calls = {
        "make": lambda made: Communicator(comm).close(),
        "split": lambda made: made.split(0),
        "channel": lambda made: made.channel({}, {}, np.float32),
        "reduction": lambda made: made.reduction(np.ones(3)),
        "window": lambda made: made.channel({}, {}, np.float32),
        "hierarchical": lambda made: made.reduction(np.ones(3), method="hierarchical"),
        "nodes": lambda made: made.nodes,
    }
    own = [contexts.hold(MPI.COMM_SELF.Dup()) for _ in range(9 if comm.rank == 1 else 0)]
    with Communicator(comm, "shared") as made:
        with monkeypatch.context() as patch:
            # A window comes after the node's communicator, which may still be made there.
            patch.setattr(contexts, "LIMIT", comm.allreduce(contexts.held(), MPI.MAX) + (call == "window"))
            with pytest.raises(CommError, match=r"expected fewer than \d+ of them.* open in a process, got \d+; close"):
                calls[call](made)
        calls[call](made)
    for one in own:
        contexts.free(one)


@pytest.mark.skipif(mpi.LAUNCHER in os.environ, reason="needs MPICH: Open MPI has 65536 contexts")
@pytest.mark.parametrize(
    ("ranks", "body"),
    [
        (1, "kept.append(hg.Communicator(MPI.COMM_WORLD))"),
        (2, f"c = hg.Communicator(MPI.COMM_WORLD); kept.append(c); {CHANNEL}"),
        (2, f"kept or kept.append(hg.Communicator(MPI.COMM_WORLD)); c = kept[0].split(0); {CHANNEL}"),
    ],
    ids=["communicators", "with channels", "groups"],
)
def test_a_program_that_closes_none_is_refused_before_mpi_ends_it(ranks, body):
    done = mpiexec(ranks, ["-c", PROGRAM.format(body)])
    assert done.returncode == 0, done.stderr
    assert "expected fewer than 1536 of them, with their groups and windows, open in a process, got 153" in done.stdout
    assert "close each when it is done (`with Communicator(...) as comm:`, or comm.close())" in done.stdout
