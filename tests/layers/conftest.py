"""A communicator of all ranks; freed memory is overwritten; oneDNN, where it cannot be loaded, is skipped by name."""

import pytest

from halograd.comm import Communicator
from tests.layers.norms import needs
from tests.support import freed


@pytest.fixture(autouse=True)
def _onednn(request):
    if "onednn" in request.node.name:
        needs("onednn")


@pytest.fixture(autouse=True)
def _freed(monkeypatch):
    freed.overwrite(monkeypatch)


@pytest.fixture
def ranks(comm):
    """A `Communicator` of all ranks of the test."""
    with Communicator(comm) as made:
        yield made
