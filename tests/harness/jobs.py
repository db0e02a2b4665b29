"""Processes and shared memory of one job: find them, end them, see what they leave behind.

A job carries a mark in its environment that all its descendants inherit, because the process group does not
hold it together: hydra gives every rank a session of its own.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from tests.harness.limits import grace
from tests.harness.record import VARIABLE

MARK = "HALOGRAD_TEST_JOB"
PROC = Path("/proc")
SHARED_MEMORY = Path("/dev/shm")

# A job must not believe to be a rank of the job that starts it, nor write into its record.
OF_OUTER_MPI = ("PMI_", "PMIX_", "OMPI_", "HYDI_", "HYDRA_", "MPIR_CVAR_", "MPI_LOCAL", "SLURM_")
LAUNCHER_VARIABLES = (*OF_OUTER_MPI, VARIABLE)

# Threads: several ranks share few cores. Open MPI refuses root and more ranks than cores unless told.
TEST_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MPLBACKEND": "Agg",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # version 4
    "OMPI_MCA_orte_execute_quiet": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def new_mark() -> str:
    """Mark for a job; one that is started inside another job belongs to that one too."""
    outer = os.environ.get(MARK)
    own = uuid.uuid4().hex[:12]
    return f"{outer}/{own}" if outer else own


def job_environment(mark: str, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment for a job with this mark: that of this process without what its launcher has put there."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_VARIABLES)}
    return {**inherited, **TEST_ENVIRONMENT, MARK: mark, **(extra or {})}


def bytecode(folder: Path) -> dict[str, str]:
    """Environment that keeps bytecode in `folder` where none may be written beside the sources; else an empty one.

    Without any, each of thousands of processes compiles all that it imports: a sixth of the suite's time.
    """
    if not os.environ.get("PYTHONDONTWRITEBYTECODE"):
        return {}
    return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}


def members(mark: str) -> list[int]:
    """Process ids of the live processes that carry the mark, or one that starts with it and a slash."""
    wanted = f"\0{MARK}={mark}".encode()
    found = []
    for folder in PROC.glob("[0-9]*"):
        with suppress(OSError):
            environment = b"\0" + (folder / "environ").read_bytes()
            at = environment.find(wanted)
            if at >= 0 and environment[at + len(wanted) :][:1] in (b"\0", b"/", b""):
                found.append(int(folder.name))
    return [pid for pid in found if pid != os.getpid()]


def alive(pid: int) -> bool:
    """Whether this process exists and is more than an entry that its parent has not asked for."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def names_in_shared_memory() -> set[str]:
    """Names of all shared-memory files of this machine."""
    return set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.exists() else set()


def segments(pids: Iterable[int]) -> set[str]:
    """Names of the shared-memory files that these processes have mapped and that still have a name."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            for line in (PROC / str(pid) / "maps").read_text(errors="replace").splitlines():
                path = line.split(maxsplit=5)[-1]
                if path.startswith(f"{SHARED_MEMORY}/") and not path.endswith("(deleted)"):
                    found.add(Path(path).name)
    return found


def end(mark: str) -> list[int]:
    """Kill every process of the job; return the ids of those that are still there after the grace time."""
    deadline = time.monotonic() + grace()
    while pids := members(mark):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return pids
        time.sleep(0.05)
    return []


def await_end(mark: str) -> list[int]:
    """Process ids of the job that are alive after at most the grace time; nothing is killed."""
    deadline = time.monotonic() + grace()
    while (pids := members(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return pids


def await_removal(names: Iterable[str]) -> list[str]:
    """Those of the shared-memory files that exist after at most the grace time."""
    deadline = time.monotonic() + grace()
    while (left := [n for n in names if (SHARED_MEMORY / n).exists()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return sorted(left)


def remove(names: Iterable[str]) -> None:
    """Remove shared-memory files of a job that was killed: MPICH leaves one then."""
    for name in names:
        with suppress(OSError):
            (SHARED_MEMORY / name).unlink()
