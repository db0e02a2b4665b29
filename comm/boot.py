"""Start and end of a program that may be one rank of many.

0. MPICH crashes without a message if shared memory is too small for its start: a warning is printed before it starts.
1. Launcher and MPI library must agree on the number of ranks: a mismatch gives N independent programs, each of which
   runs as rank 0 of 1.
2. An exception on one rank must end the job (:mod:`halograd.comm.ending`).
3. A deliberate exit code must survive: finalize first, then exit (srun loses the code of MPI_Abort).
4. The first Ctrl-C on any rank ends all ranks, whatever they are doing. Python runs signal handlers in the main thread,
   between two of its own instructions: a rank that waits in MPI may never run them, and a rank that unwinds its stack
   enters collectives that the others do not enter. So the C-level handler writes a byte to a pipe, and a thread that
   reads the pipe ends the job.
"""

from __future__ import annotations

import os
import platform
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from .errors import CommError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "INTERRUPTED",
    "boot",
    "end_on_interrupt",
    "launched_size",
    "leave",
    "on_interrupt",
    "shared_memory_fault",
    "start_text",
    "warn_of_shared_memory",
]

WRONG_LAUNCHER = 64  # exit code (EX_USAGE)
#: Exit code of a command that SIGINT ended.
INTERRUPTED = 130
PRINTING = 0.5  # time for one rank to print, or for the launcher to forward what it printed [s]
GRACE = 2.0  # time until a rank ends itself if MPI does not end the job [s]

# MPICH 5 needs 1.0 MiB of /dev/shm per rank, or ends by SIGBUS. UCX below it uses 4.1 MiB more if they are free, and
# ends by SIGSEGV if they are nearly free: seen from 16 MiB on, with 8 ranks up to 48, with 16 ranks at 64. [MiB]
OF_MPICH, OF_UCX, NEARLY = 1.1, 4.2, 16.0

#: Function that returns the text to print; None if another rank has printed it.
Message = Callable[[], "str | None"]
_message: Message = lambda: "interrupted"  # noqa: E731

_begun = _booted = _warned = False


def launched_size(environment: Mapping[str, str] | None = None) -> int | None:
    """Return the number of ranks that the launcher started, None without a launcher. Local.

    Open MPI's mpirun sets OMPI_COMM_WORLD_SIZE, hydra and ``srun --mpi=pmi2`` set PMI_SIZE, jsrun of LSF sets
    JSM_NAMESPACE_SIZE, and srun without any of these sets SLURM_STEP_NUM_TASKS (SLURM_NTASKS belongs to the
    allocation, not to this step).

    >>> launched_size({"PMI_SIZE": "4", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"})
    4
    """
    environment = os.environ if environment is None else environment
    # Launchers before Slurm: hydra starts its proxies by srun, whose step has one task per node.
    names = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "JSM_NAMESPACE_SIZE"]
    if "SLURM_STEP_ID" in environment:  # inside srun, not in the bare batch shell
        names.append("SLURM_STEP_NUM_TASKS")
    for name in names:
        if environment.get(name, "").isdigit():
            return int(environment[name])
    return None


def start_text(ranks: int, multiple: bool = False) -> str:
    """Return the advice to start `ranks` ranks, or with `multiple` a multiple of that number. Local.

    Without a launcher it includes the command to prepend.
    """
    command = f" (mpirun -n {ranks} ...)" if launched_size() is None else ""
    return f"start {'a multiple of ' if multiple else ''}{ranks} ranks{command}"


def shared_memory_fault(free: int, environment: Mapping[str, str] | None = None) -> str | None:
    """Return a message if MPICH may crash because this node has too little shared memory; else None. Local.

    Call it before MPI is initialized, because MPI takes shared memory then. Open MPI reports this itself, and
    continues.

    Parameters
    ----------
    free
        Free shared memory of the node [B].
    environment
        Environment variables; by default those of the process.
    """
    environment = os.environ if environment is None else environment
    if "OMPI_COMM_WORLD_SIZE" in environment:
        return None
    here = _first_of(("MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE"), environment)
    # With several nodes it is not known which entry is that of this node: take the largest.
    ranks = max(map(int, re.findall(r"(?:^|,)(\d+)", here)), default=1)  # Slurm lists all nodes: "4(x2),3"
    least, remedy = OF_MPICH * ranks, "give the container more (docker run --shm-size=1g)"
    needed = least
    # If the variable is set, the user has chosen UCX's transports: do not count its shared memory.
    if "UCX_TLS" not in environment:
        needed += OF_UCX * ranks + NEARLY
        remedy += f", or set UCX_TLS=^posix, with which {least:.0f} MiB are enough to start"
    if free >= needed * 2**20:
        return None
    return (
        f"shared memory: expected {needed:.0f} MiB free in /dev/shm for {ranks} ranks on this node, got "
        f"{free / 2**20:.1f} MiB, with which MPICH may crash when it starts; {remedy}"
    )


def _first_of(names: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return the value of the first of these variables that is set; an empty string if none is."""
    return next((environment[name] for name in names if name in environment), "")


def warn_of_shared_memory() -> None:
    """On one rank per node, print a warning if MPI may crash when it starts. Local; only the first call acts.

    Call it before MPI is initialized.
    """
    from .sweep import free_memory

    global _warned
    # Importing mpi4py.MPI initializes MPI: if that has been done, it has not crashed.
    text = None if _warned or "mpi4py.MPI" in sys.modules else shared_memory_fault(free_memory())
    _warned = True
    if text is None:
        return
    if _first_of(("MPI_LOCALRANKID", "SLURM_LOCALID"), os.environ) in ("", "0"):
        _print(f"warning: {text}")
        time.sleep(PRINTING)  # the launcher must forward the warning before this rank may crash
    else:  # the launcher kills the rank that prints as soon as another rank crashes
        time.sleep(4 * PRINTING)


def boot() -> MPI.Intracomm:
    """Initialize MPI, and monitor all ranks until the process ends. Collective over all launched ranks.

    From then on, an uncaught exception on one rank ends the job. A :class:`~halograd.comm.Communicator` of all ranks
    does the same while it is open (:mod:`halograd.comm.ending`); `boot` does it for the whole program.

    Returns
    -------
    MPI.Intracomm
        Communicator of all ranks, for a :class:`~halograd.comm.Communicator` to clone.

    Notes
    -----
    Ends the process with exit code 64 if the launcher started a different number of ranks than MPI reports.
    """
    warn_of_shared_memory()
    from mpi4py import MPI  # keep the default THREAD_MULTIPLE: MPICH yields the core at that level only

    from .ending import Guard

    global _booted
    try:
        begin()
    except CommError as error:
        sys.stderr.write(f"halograd: {error}\n")
        sys.stderr.flush()
        MPI.Finalize()  # removes the segments of this process, which os._exit would leave in shared memory
        os._exit(WRONG_LAUNCHER)
    if not _booted:
        _booted = True
        Guard(MPI.COMM_WORLD)  # registers itself in `ending`, until the process ends
    return MPI.COMM_WORLD


def begin() -> None:
    """Check the launcher, and ensure that the job leaves no shared-memory segments when it ends. Collective over
    `MPI.COMM_WORLD`.

    Only the first call acts. One rank per node removes shared-memory segments of killed runs, and unlinks the segment
    of this job, so that it disappears however the job ends.

    Raises
    ------
    CommError
        If the launcher started a different number of ranks than MPI reports.
    """
    from mpi4py import MPI

    from .sweep import sweep, unname

    global _begun
    if _begun:
        return
    _begun, world = True, MPI.COMM_WORLD
    launched = launched_size()
    if launched not in (None, world.size):
        raise CommError(
            f"expected {launched} ranks (as the launcher reports), got {world.size} from {MPI.get_vendor()[0]}; use "
            f"the mpiexec of the same MPI, or `srun --mpi=pmi2` (MPICH) or `srun --mpi=pmix` (Open MPI)"
        )
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    # All ranks of the node have taken part in the split, so they have left MPI_Init, as `unname` requires.
    if node.rank == 0:
        sweep()
        unname()
    node.Free()


def leave(code: int) -> NoReturn:
    """End the program with an exit code. Collective over all ranks; all pass the same code."""
    from mpi4py import MPI

    sys.stdout.flush()
    sys.stderr.flush()
    if not MPI.Is_finalized():
        MPI.Finalize()
    # Not os._exit: mpiexec treats a rank that skips the destructors of the MPI library as failed.
    sys.exit(code)


@contextmanager
def on_interrupt(message: Message) -> Iterator[None]:
    """Within the context, print what `message` returns if SIGINT arrives. Local.

    :func:`end_on_interrupt` must have been called, with several ranks; its thread calls `message`.
    """
    global _message
    before, _message = _message, message
    try:
        yield
    finally:
        _message = before


def end_on_interrupt(comm: MPI.Intracomm | None) -> None:
    """Let SIGINT to this rank end the job with code 130 from now on. Local; call it in the main thread.

    In a single process (`comm` is None or has one rank), SIGINT raises KeyboardInterrupt instead, so that open contexts
    clean up. A process that ignores or handles SIGINT keeps its setting.
    """
    if signal.getsignal(signal.SIGINT) not in (signal.default_int_handler, signal.SIG_DFL):
        return
    if comm is None or comm.size == 1:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)  # `set_wakeup_fd` refuses a blocking descriptor
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # The handler does nothing, but Python writes a byte only for signals that have one.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    threading.Thread(target=_await_interrupt, args=(comm, reader), name="halograd-interrupt", daemon=True).start()


def _await_interrupt(comm: MPI.Intracomm, pipe: int) -> NoReturn:
    while signal.SIGINT not in os.read(pipe, 64):  # other signals write bytes, too
        pass
    from .ending import end  # commands of one process may run where there is no MPI

    # Rank 0 prints first; after that, `message` may return None on the others.
    if comm.rank:
        time.sleep(PRINTING)
    message = _message()
    if message is not None:
        _print(f"rank {comm.rank} of {comm.size} on {platform.node()}: {message}" if comm.rank else message)
    last = threading.Timer(GRACE, os._exit, (INTERRUPTED,))
    last.daemon = True
    last.start()
    end(comm, INTERRUPTED)


def _print(text: str) -> None:
    os.write(2, f"halograd: {text}\n".encode())  # one write, past all buffers
