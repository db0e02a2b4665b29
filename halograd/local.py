"""Ranks on this machine: finding the launcher, and running a command on several ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from .errors import UserError

__all__ = ["find_mpiexec", "run_ranks"]

# Open MPI refuses more ranks than cores without this.
ENVIRONMENT = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def find_mpiexec() -> str:
    """The mpiexec beside this Python (the `mpich` wheel), else the first on PATH. Local.

    Raises
    ------
    UserError
        If there is none.
    """
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise UserError(
            f"expected mpiexec in {beside.parent} or on PATH, got none; pip install 'halograd[mpich]', or load an MPI"
        )
    return found


def run_ranks(mpiexec: str, ranks: int, arguments: Sequence[str], say: Callable[[str], None]) -> list[str]:
    """Run ``halograd ARGUMENTS`` on that many ranks; what was printed, line by line.

    `say` is given every line as it comes. Other libraries compute with one thread per rank. Interrupted, the job is
    ended too.

    Raises
    ------
    UserError
        If the job failed; its own message was given to `say`.
    """
    command = [mpiexec, "-n", str(ranks), sys.executable, "-m", "halograd", *arguments]
    environment = {**ENVIRONMENT, **os.environ, **dict.fromkeys(THREADS, "1")}
    lines = []
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        env=environment,
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                lines.append(line.rstrip("\n"))
                say(lines[-1])
        except BaseException:
            process.terminate()  # mpiexec ends its ranks
            raise
    if process.returncode:
        raise UserError(
            f"`halograd {arguments[0]}` on {ranks} ranks: expected exit code 0, got {process.returncode}; "
            "see its message above, and `halograd doctor`"
        )
    return lines
