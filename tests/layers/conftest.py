"""A communicator of all ranks; freed memory is overwritten; oneDNN, where it cannot be loaded, is skipped by name."""

import pytest

from halograd.comm import Communicator
from tests.support import freed
from tests.support.onednn import onednn, opened  # noqa: F401


@pytest.fixture(autouse=True)
def _onednn(request):
    if "onednn" in request.node.name:
        opened("onednn").close()


@pytest.fixture(autouse=True)
def _freed(monkeypatch):
    freed.overwrite(monkeypatch)


@pytest.fixture
def ranks(comm):
    """Return a `Communicator` of all ranks of the test."""
    with Communicator(comm) as made:
        yield made
