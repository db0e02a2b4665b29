"""Tests that name oneDNN are skipped, with the reason, where it cannot be loaded."""

import pytest

from tests.layers.norms import needs


@pytest.fixture(autouse=True)
def _onednn(request):
    if "onednn" in request.node.name:
        needs("onednn")
