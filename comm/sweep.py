"""Removal of the shared-memory segments of killed MPI runs.

MPICH names the segment that the ranks of a node share, and unlinks it when they finalize. Ranks that are killed or
aborted do not unlink it (1-4 MB), and a job that Slurm restarts under the same job ID finds it and hangs. `unname`
unlinks the segment of this job as soon as all ranks have mapped it. A job that follows one without `unname` should
first run ``python -m halograd.comm.sweep 0`` on each node; the number is the minimum age [s].
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

__all__ = ["SHARED_MEMORY", "free_memory", "sweep", "unname"]

SHARED_MEMORY = Path("/dev/shm")
# A segment younger than this may belong to a job that is just starting and has not mapped it yet.
AGE = 60.0  # [s]
# All ranks of a node map this segment in MPI_Init, and MPICH 5.0 does not use its name again, except to unlink it at
# the end.
UNNAMED = "mpich_shm_*"
# Names of MPICH (mpich), Open MPI (sm, vader) and UCX.
PATTERNS = ("mpich_shm_*", "mpich_shar_tmp*", "sm_segment.*", "ucx_shm_*", "vader_segment.*")


def sweep(min_age: float = AGE) -> list[Path]:
    """Remove MPI segments of this user that no live process has mapped. Local, one rank per node.

    Parameters
    ----------
    min_age
        Minimum age of a segment [s]: a job that is just starting creates its segments before it maps them.

    Returns
    -------
    list of Path
        The removed segments.

    Notes
    -----
    Removal unlinks the name of a segment; a process that has mapped the segment keeps the memory.
    """
    oldest = time.time() - min_age
    candidates = [path for path in _segments() if _ours(path, oldest)]
    mapped = _mapped() if candidates else set()
    removed = []
    for path in candidates:
        if str(path) not in mapped:
            with contextlib.suppress(OSError):  # another rank or its owner was faster
                path.unlink()
                removed.append(path)
    return removed


def unname() -> list[Path]:
    """Unlink the segments of MPICH that this process has mapped. Local, one rank per node.

    Call it when all ranks of the node have left MPI_Init. The memory stays until the last process that has mapped it
    ends.

    Returns
    -------
    list of Path
        The removed segments.
    """
    removed = []
    for path in map(Path, sorted(_named_in(Path("/proc/self/maps")))):
        if path.match(UNNAMED):
            with contextlib.suppress(OSError):
                path.unlink()
                removed.append(path)
    return removed


def free_memory() -> int:
    """Return the free shared memory of this node [B]. Local.

    An access beyond it causes a bus error. Without /dev/shm, MPI uses other storage, and the result is a very large
    number.
    """
    if not SHARED_MEMORY.is_dir():
        return 1 << 62
    status = os.statvfs(SHARED_MEMORY)
    return status.f_bavail * status.f_frsize


def _segments() -> list[Path]:
    return [path for pattern in PATTERNS for path in SHARED_MEMORY.glob(pattern)]


def _ours(path: Path, oldest: float) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and status.st_mtime <= oldest


def _mapped() -> set[str]:
    """Return paths in shared memory that some process has mapped, as far as this user may read."""
    mapped: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        mapped |= _named_in(maps)
    return mapped


def _named_in(maps: Path) -> set[str]:
    """Return paths in shared memory that a process has mapped; none for an ended process or another user's."""
    with contextlib.suppress(OSError):
        # Six columns: addresses, permissions, offset, device, inode, path (which may contain spaces).
        names = {line.split(maxsplit=5)[-1] for line in maps.read_text(errors="replace").splitlines()}
        return {name for name in names if name.startswith(f"{SHARED_MEMORY}/")}
    return set()


if __name__ == "__main__":
    for segment in sweep(*map(float, sys.argv[1:2])):
        print(f"removed {segment}")
