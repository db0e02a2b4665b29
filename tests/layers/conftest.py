"""A communicator of all ranks; tests that name oneDNN are skipped, with the reason, where it cannot be loaded."""

import pytest

from halograd.comm import Communicator
from tests.layers.norms import needs


@pytest.fixture(autouse=True)
def _onednn(request):
    if "onednn" in request.node.name:
        needs("onednn")


@pytest.fixture
def ranks(comm):
    """A `Communicator` of all ranks of the test."""
    with Communicator(comm) as made:
        yield made
