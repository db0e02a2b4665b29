"""A communicator per transport."""

import pytest

EMULATED = "emulated:alpha=1e-4,beta=1e-10"


@pytest.fixture(params=["mpi", "shared", "auto", EMULATED], ids=lambda text: text.partition(":")[0])
def communicator(request, comm):
    """A `Communicator` of all ranks, once for every transport."""
    from halograd.comm import Communicator

    with Communicator(comm, request.param) as made:
        yield made
