"""Fixtures: a communicator of all ranks, memory that is overwritten after use, and a skip where oneDNN is missing."""

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
