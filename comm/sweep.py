"""Remove shared-memory segments that killed MPI runs have left behind.

MPICH names the segment of each rank and unlinks it when the rank finalizes: a rank that is killed or
aborted leaves its segment (1-3 MB), and a job that Slurm restarts under the same number meets it and hangs.
Before such a job run ``python -m halograd.comm.sweep 0`` on each node; the number is the least age [s].
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

__all__ = ["sweep"]

SHARED_MEMORY = Path("/dev/shm")
# A segment younger than this may belong to a job that is just starting and has not mapped it yet.
AGE = 60.0  # [s]
PATTERNS = ("mpich_shm_*", "mpich_shar_tmp*", "sm_segment.*", "ucx_shm_*", "vader_segment.*")


def sweep(min_age: float = AGE) -> list[Path]:
    """Remove MPI segments of this user that no live process has mapped. Local, one rank per node.

    Parameters
    ----------
    min_age
        Leave segments younger than this alone [s]: a job that is just starting creates its segments
        before it maps them.

    Returns
    -------
    list of Path
        What was removed.

    Notes
    -----
    Removing a segment takes its name away, not its memory: a process that has it mapped keeps it.
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


def _segments() -> list[Path]:
    return [path for pattern in PATTERNS for path in SHARED_MEMORY.glob(pattern)]


def _ours(path: Path, oldest: float) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and status.st_mtime <= oldest


def _mapped() -> set[str]:
    """Paths in shared memory that some process has mapped, as far as this user may look."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            for line in maps.read_text(errors="replace").splitlines():
                name = line.split(maxsplit=5)[-1]
                if name.startswith(f"{SHARED_MEMORY}/"):
                    found.add(name)
    return found


if __name__ == "__main__":
    for segment in sweep(*map(float, sys.argv[1:2])):
        print(f"removed {segment}")
