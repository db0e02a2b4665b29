"""MPI launchers: their own output, and another MPI than the environment's for all ranks.

``run_suite.py --mpi openmpi`` selects the other MPI.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["INSTALLATIONS", "LAUNCHER", "Installation", "NotInstalled", "split_stderr"]

#: Path of the launcher; by default that of the environment.
LAUNCHER = "HALOGRAD_TEST_MPIEXEC"

# Forms that no rank writes: a line of a rank that only resembles one of them is kept.
_OF_A_LAUNCHER = re.compile(
    # Open MPI: libevent's warning of a rank's pipe that was closed while it was watched.
    r"\[warn\] Epoll \w+\(\d+\) on fd \d+ failed\. Old events were \d+;(?: \w+ change was \d+ \(\w+\)[;:])+ [^\n]*\n"
    # Open MPI: a help text in its frame, then the number of processes that have sent the same one.
    r"|^-{74}\n(?s:.+?)^-{74}\n"
    r"|^\[[^\s\]]+:\d+\] \d+ more process(?:es)? ha(?:s|ve) sent help message \S+ / [^\n]*\n"
    r"|^\[[^\s\]]+:\d+\] Set MCA parameter \"\w+_base_help_aggregate\" to 0 to see all help / error messages\n"
    # Hydra (MPICH): its launcher and its proxy on each node.
    r"|^\[(?:mpiexec|proxy:\d+(?::\d+)?)@[^\s\]]+\] [^\n]*\n",
    re.MULTILINE,
)


def split_stderr(text: str) -> tuple[str, str]:
    """Return the parts of a job's stderr that the ranks and the launcher have written."""
    return _OF_A_LAUNCHER.sub("", text), "".join(_OF_A_LAUNCHER.findall(text))


class NotInstalled(Exception):
    """Error: the MPI is not installed on this machine."""


@dataclass(frozen=True)
class Installation:
    """An MPI that a machine may have in addition to the environment's.

    Attributes
    ----------
    launchers
        Possible names of the launcher on PATH.
    version
        A word of the launcher's output for ``--version``: launchers of all MPIs have the same names.
    library
        Library that mpi4py's wheel is to load.
    tests
        Tests to run under this MPI if none are named.
    remedy
        Instructions for the installation.
    """

    launchers: tuple[str, ...]
    version: str
    library: str
    tests: tuple[str, ...]
    remedy: str

    def variables(self, path: str | None = None) -> Mapping[str, str]:
        """Return the environment variables for ranks under this MPI; `path` replaces PATH. Raises NotInstalled."""
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
