"""Fixtures: a communicator per transport."""

import pytest

from tests.support import clock

EMULATED = "emulated:alpha=1e-4,beta=1e-10"


@pytest.fixture(params=["mpi", "shared", "auto", EMULATED], ids=lambda text: text.partition(":")[0])
def communicator(request, comm):
    """Return a `Communicator` of all ranks, once for every transport."""
    from halograd.comm import Communicator

    with Communicator(comm, request.param) as made:
        yield made


@pytest.fixture
def nodes_of_two(monkeypatch):
    """Pretend that ranks 0 and 1 of a communicator are on one node, and 2 and 3 on the next."""
    from halograd.comm.transports import base

    monkeypatch.setattr(base, "split_node", lambda comm: comm.Split(comm.rank // 2, comm.rank))


@pytest.fixture
def network_clock(monkeypatch):
    """Return the clock of this rank that times emulated messages and sums."""
    return clock.network_clock(monkeypatch)
