"""Fixtures: doubles of a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from halograd.kernels.cudnn import CudnnBackend

from ..cuda.host import HostLauncher, compiler
from .fake_runtime import Machine


@pytest.fixture(scope="module")
def host() -> HostLauncher:
    """Return a launcher that compiles each program once for a file."""
    if compiler() is None:
        pytest.skip("needs g++ to run CUDA kernels on the CPU")
    return HostLauncher()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def backend(machine: Machine) -> Iterator[CudnnBackend]:
    """Return the backend with default options on the double of a GPU."""
    with machine.open() as opened:
        yield opened
