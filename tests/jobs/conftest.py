"""A private Slurm for the tests of one session."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.private_slurm import CannotStart, PrivateSlurm, available


@pytest.fixture(scope="session")
def slurm() -> Iterator[PrivateSlurm]:
    """Yield a Slurm of two nodes with 8 cores and 2 GPUs each; partition `urgent` has a higher priority than `main`."""
    if not available():
        pytest.skip("needs Slurm (`apt-get install slurm-wlm munge`)")
    # Not in pytest's own folder: the path of a socket must be short, and daemons need a folder that others may enter.
    folder = Path(tempfile.mkdtemp(prefix="halograd-slurm-"))
    folder.chmod(0o755)
    found = PrivateSlurm(folder)
    try:
        try:
            found.start()
        except CannotStart as reason:
            pytest.skip(f"needs a Slurm that can start on this machine: {reason}")
        yield found
    finally:
        found.stop()
        shutil.rmtree(folder, ignore_errors=True)
