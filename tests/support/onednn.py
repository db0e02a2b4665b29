"""oneDNN, or a skip that says why there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from halograd.kernels import Backend, KernelError, get_backend


def opened(name: str) -> Backend:
    """Open a backend, or skip the test where it cannot be had."""
    try:
        return get_backend(name)
    except KernelError as error:
        pytest.skip(f"needs the backend {name}: {error}")


@pytest.fixture(scope="module")
def onednn() -> Iterator[Backend]:
    """oneDNN with one thread."""
    with opened("onednn") as backend:
        yield backend
