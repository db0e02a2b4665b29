"""A communicator per transport."""

import importlib

import pytest

from tests.support.clock import DrivenClock

EMULATED = "emulated:alpha=1e-4,beta=1e-10"


@pytest.fixture(params=["mpi", "shared", "auto", EMULATED], ids=lambda text: text.partition(":")[0])
def communicator(request, comm):
    """A `Communicator` of all ranks, once for every transport."""
    from halograd.comm import Communicator

    with Communicator(comm, request.param) as made:
        yield made


@pytest.fixture
def network_clock(monkeypatch):
    """The clock of this rank by which emulated messages and sums travel; it moves when a rank waits for them."""
    names = ("channel", "reduction", "transports.node_sum", "transports.timing")
    return DrivenClock().drive(monkeypatch, *(importlib.import_module(f"halograd.comm.{name}") for name in names))
