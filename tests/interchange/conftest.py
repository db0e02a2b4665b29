"""Ranks, and a folder that they share."""

from __future__ import annotations

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
