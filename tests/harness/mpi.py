"""Another MPI than that of the environment, for all ranks that the suite starts: ``run_suite.py --mpi openmpi``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["INSTALLATIONS", "LAUNCHER", "Installation", "NotInstalled"]

#: Path of the launcher; by default that of the environment.
LAUNCHER = "HALOGRAD_TEST_MPIEXEC"


class NotInstalled(Exception):
    """This machine has no such MPI."""


@dataclass(frozen=True)
class Installation:
    """An MPI that a machine may have beside that of the environment.

    Attributes
    ----------
    launchers
        Names that its launcher may have on PATH.
    version
        A word of what the launcher prints for ``--version``: launchers of all MPIs share their names.
    library
        What mpi4py's wheel is to load.
    tests
        What is run under it where no tests are named.
    remedy
        How to install it.
    """

    launchers: tuple[str, ...]
    version: str
    library: str
    tests: tuple[str, ...]
    remedy: str

    def variables(self, path: str | None = None) -> Mapping[str, str]:
        """Variables with which ranks run under it; `path` in place of PATH. Raises NotInstalled."""
        own = Path(sys.executable).parent
        folders = [f for f in (os.environ.get("PATH", "") if path is None else path).split(os.pathsep) if f]
        searched = os.pathsep.join(f for f in folders if Path(f) != own)
        for name in self.launchers:
            launcher = shutil.which(name, path=searched)
            if launcher is not None and self.version in _version(launcher):
                return {LAUNCHER: launcher, "MPI4PY_LIBMPI": self.library}
        raise NotInstalled(f"expected one of {', '.join(self.launchers)} on PATH, got none; {self.remedy}")


def _version(launcher: str) -> str:
    done = subprocess.run([launcher, "--version"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout


INSTALLATIONS = {
    "openmpi": Installation(
        ("mpirun.openmpi", "mpiexec.openmpi", "mpirun", "mpiexec"),
        "Open",  # "(OpenRTE)" of version 4, "(Open MPI)" of version 5
        "libmpi.so.40",
        ("tests/comm", "tests/dtensor", "tests/training/test_restart.py::test_killed_and_resumed"),
        "apt-get install openmpi-bin libopenmpi3",
    )
}
