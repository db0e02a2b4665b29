"""Access to oneDNN for tests, which skip where it is missing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from halograd.kernels import Backend, KernelError, get_backend


def opened(name: str) -> Backend:
    """Open a backend, or skip the test if it cannot be opened."""
    try:
        return get_backend(name)
    except KernelError as error:
        pytest.skip(f"needs the backend {name}: {error}")


@pytest.fixture(scope="module")
def onednn() -> Iterator[Backend]:
    """Return oneDNN with one thread."""
    with opened("onednn") as backend:
        yield backend
