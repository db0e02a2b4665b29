"""Ranks, and a folder that they share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def comm() -> Any:
    """All ranks of the test."""
    from mpi4py import MPI  # not at the top: it initialises MPI

    return MPI.COMM_WORLD


@pytest.fixture
def shared(comm: Any, tmp_path: Path) -> Path:
    """An empty folder, the same on all ranks."""
    return Path(comm.bcast(str(tmp_path)))


@pytest.fixture
def working(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The same, which is also the working folder; what it adds to the path of modules is taken away."""
    monkeypatch.chdir(shared)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield shared
