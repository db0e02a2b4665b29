"""What a program that may be one rank of many does before anything else, and last of all.

1. Launcher and MPI library must agree on the number of ranks: a mismatch gives N independent programs
   that each believe to be rank 0 of 1.
2. A fault on one rank must end the job, or the others wait for ever in their next collective.
3. A deliberate exit code must survive: finalize first, then exit (srun loses the code of MPI_Abort).
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import platform
import stat
import sys
import termios
import threading
import time
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["boot", "launched_size", "leave"]

WRONG_LAUNCHER = 64  # exit code (EX_USAGE)
# How long a rank leaves the talking to the one where an agreed fault arose, or waits for the launcher to read what it
# has printed, before it ends the job itself.
PATIENCE = 5.0  # [s]
FORWARDING = 0.2  # [s]


def launched_size(environment: Mapping[str, str] | None = None) -> int | None:
    """Number of ranks the launcher says it started, None without a launcher. Local.

    Open MPI's mpirun says so in OMPI_COMM_WORLD_SIZE, hydra and ``srun --mpi=pmi2`` in PMI_SIZE, srun
    without either in SLURM_STEP_NUM_TASKS (SLURM_NTASKS belongs to the allocation, not to this step).

    >>> launched_size({"PMI_SIZE": "4", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"})
    4
    """
    environment = os.environ if environment is None else environment
    names = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]
    if "SLURM_STEP_ID" in environment:  # inside srun, not in the bare batch shell
        names.append("SLURM_STEP_NUM_TASKS")
    for name in names:
        if environment.get(name, "").isdigit():
            return int(environment[name])
    return None


def boot() -> MPI.Intracomm:
    """Initialize MPI, check the launcher, and make a fault on any rank end the whole job.

    Collective over all ranks that were launched. Replaces `sys.excepthook` and `threading.excepthook`:
    an uncaught exception prints its traceback, each line named by rank, then rank, host and cause in one
    line, and aborts the job with exit code 1 (130 for KeyboardInterrupt). Of an error that all ranks agreed
    on only the rank where it arose speaks. One rank per node removes shared-memory segments that killed runs
    have left behind, and the name of that of this job: whatever ends it, nothing stays.

    Returns
    -------
    MPI.Intracomm
        The communicator of all ranks, for a :class:`~halograd.comm.Communicator` to clone.

    Notes
    -----
    Ends the process with exit code 64 if the launcher started another number of ranks than MPI sees.
    """
    from mpi4py import MPI  # keep the default THREAD_MULTIPLE: MPICH yields the core at that level only

    from halograd.comm.sweep import sweep, unname

    world = MPI.COMM_WORLD
    _check_launcher(world.size)
    sys.excepthook = lambda kind, value, trace: _die(world, kind, value, trace)
    threading.excepthook = lambda args: _die_in_thread(world, args)
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    if node.rank == 0:
        sweep()
        unname()
    node.Free()
    return world


def leave(code: int) -> NoReturn:
    """End the program with an exit code. Collective over all ranks: every one calls it with the same code."""
    from mpi4py import MPI

    sys.stdout.flush()
    sys.stderr.flush()
    if not MPI.Is_finalized():
        MPI.Finalize()
    # Not os._exit: mpiexec takes a rank that skips the destructors of the MPI library for one that failed.
    sys.exit(code)


def _check_launcher(size: int) -> None:
    from mpi4py import MPI

    launched = launched_size()
    if launched is None or launched == size:
        return
    sys.stderr.write(
        f"halograd: expected {launched} ranks (the launcher says so), got {size} from {MPI.get_vendor()[0]}; use "
        f"the mpiexec of the same MPI, or `srun --mpi=pmi2` (MPICH) or `srun --mpi=pmix` (Open MPI)\n"
    )
    sys.stderr.flush()
    MPI.Finalize()  # removes the segments of this process, which os._exit would leave
    os._exit(WRONG_LAUNCHER)


def _die_in_thread(world: MPI.Intracomm, args: threading.ExceptHookArgs) -> None:
    if args.exc_type is not SystemExit:  # which ends just the thread, as without MPI
        _die(world, args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback)


def _die(
    world: MPI.Intracomm, kind: type[BaseException], value: BaseException, trace: TracebackType | None
) -> NoReturn:
    """Print the traceback and end the job. Does not return."""
    if not getattr(value, "arose_here", True):
        time.sleep(PATIENCE)  # the rank where it arose aborts the job meanwhile
    lines = "".join(traceback.format_exception(kind, value, trace)).splitlines()
    text = "".join(f"[rank {world.rank} of {world.size}] {line}\n" for line in lines)
    cause = lines[-1] if lines else kind.__name__
    text += f"halograd: rank {world.rank} of {world.size} on {platform.node()}: {cause}; the job ends\n"
    sys.stdout.flush()
    sys.stderr.write(text)  # one write: lines of several ranks do not mix
    sys.stderr.flush()
    end(world, 130 if issubclass(kind, KeyboardInterrupt) else 1)


def end(comm: MPI.Intracomm, code: int) -> NoReturn:
    """End all ranks of the job at once with this exit code. Local. Does not return."""
    from mpi4py import MPI

    if comm.size > 1 and not MPI.Is_finalized():
        # Abort takes the launcher's relay of this rank with it: let it read what was printed, and pass it on.
        await_reader(1, 2)
        time.sleep(FORWARDING)
        comm.Abort(code)
    os._exit(code)


def await_reader(*files: int) -> None:
    """Return when those of the files (descriptors) that are pipes have been read empty, or after `PATIENCE`. Local."""
    deadline = time.monotonic() + PATIENCE
    for file in files:
        while _unread(file) and time.monotonic() < deadline:
            time.sleep(1e-3)


def _unread(file: int) -> int:
    """Bytes that wait in a pipe; 0 for anything else."""
    count = array.array("i", [0])
    with contextlib.suppress(OSError):
        if stat.S_ISFIFO(os.fstat(file).st_mode):
            fcntl.ioctl(file, termios.FIONREAD, count)
    return count[0]
