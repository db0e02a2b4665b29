"""Processes and shared memory of one job: functions that find them, end them and check what they leave.

A job's environment contains a mark that all its descendants inherit. A process group would not do: hydra gives every
rank a session of its own.
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
#: Variable with the folder of CUDA programs that the processes of the suite have compiled for the CPU.
COMPILED = "HALOGRAD_TEST_COMPILED"
PROC = Path("/proc")
SHARED_MEMORY = Path("/dev/shm")

# A job must not believe to be a rank of the job that starts it, nor write into its record.
OF_OUTER_MPI = ("PMI_", "PMIX_", "OMPI_", "HYDI_", "HYDRA_", "MPIR_CVAR_", "MPI_LOCAL", "SLURM_")
LAUNCHER_VARIABLES = (*OF_OUTER_MPI, VARIABLE)

# Several ranks share few cores: a rank has one thread, and sleeps where MPICH would take the core of the rank that it
# waits for. Open MPI refuses root and more ranks than cores unless told.
TEST_ENVIRONMENT = {
    "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
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
    """Return a mark for a job; the mark of a job that is started inside another job begins with the latter's."""
    outer = os.environ.get(MARK)
    own = uuid.uuid4().hex[:12]
    return f"{outer}/{own}" if outer else own


def job_environment(mark: str, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for a job with this mark: this process's, without the variables of its launcher."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_VARIABLES)}
    return {**inherited, **TEST_ENVIRONMENT, MARK: mark, **(extra or {})}


def bytecode(folder: Path) -> dict[str, str]:
    """Return variables that keep bytecode in `folder` if it cannot be written beside the sources; otherwise none.

    Without bytecode each of thousands of processes compiles all that it imports, which takes a sixth of the suite's
    time.
    """
    if not os.environ.get("PYTHONDONTWRITEBYTECODE"):
        return {}
    return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}


def members(mark: str) -> list[int]:
    """Return the ids of the live processes that carry the mark, or a mark that starts with it and a slash."""
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
    """Return whether this process exists and is not a zombie."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def names_in_shared_memory() -> set[str]:
    """Return the names of all shared-memory files of this machine."""
    return set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.exists() else set()


def segments(pids: Iterable[int]) -> set[str]:
    """Return the names of the shared-memory files that these processes have mapped and that still have a name."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            for line in (PROC / str(pid) / "maps").read_text(errors="replace").splitlines():
                path = line.split(maxsplit=5)[-1]
                if path.startswith(f"{SHARED_MEMORY}/") and not path.endswith("(deleted)"):
                    found.add(Path(path).name)
    return found


def end(mark: str) -> list[int]:
    """Kill every process of the job; return the ids of processes that are alive after the grace time."""
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
    """Wait at most the grace time for the end of the job, without a kill; return the ids of its live processes."""
    deadline = time.monotonic() + grace()
    while (pids := members(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return pids


def await_removal(names: Iterable[str]) -> list[str]:
    """Wait at most the grace time; return those of the shared-memory files that still exist."""
    deadline = time.monotonic() + grace()
    while (left := [n for n in names if (SHARED_MEMORY / n).exists()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return sorted(left)


def remove(names: Iterable[str]) -> None:
    """Remove the shared-memory files of a killed job, which MPICH leaves."""
    for name in names:
        with suppress(OSError):
            (SHARED_MEMORY / name).unlink()
