"""What a program that may be one rank of many does before anything else, and last of all.

0. MPICH crashes, without a message, when the memory that ranks share does not suffice for its start: a line says so
   before.
1. Launcher and MPI library must agree on the number of ranks: a mismatch gives N independent programs
   that each believe to be rank 0 of 1.
2. A fault on one rank must end the job (:mod:`halograd.comm.ending`).
3. A deliberate exit code must survive: finalize first, then exit (srun loses the code of MPI_Abort).
4. The first Ctrl-C on any rank ends all of them, whatever they are doing. Python runs its handlers in the main thread,
   between two of its own instructions: a rank that waits in MPI may never get there, and one that unwinds meets
   collectives that the others do not enter. So the handler of the system writes a byte into a pipe, and a thread that
   reads it ends the job.
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
TURN = 0.5  # how long ranks leave it to one of them to speak, or to the launcher to pass on what it said [s]
LAST = 2.0  # until a rank ends itself where MPI does not end the job [s]

# Of /dev/shm, MPICH 5 takes 1.0 MiB per rank, or ends by SIGBUS; UCX below it takes 4.1 MiB more where it finds them,
# and when they are nearly there it ends by SIGSEGV: seen from 16 MiB on, with 8 ranks up to 48, with 16 at 64. [MiB]
OF_MPICH, OF_UCX, NEARLY = 1.1, 4.2, 16.0

#: What to say, None if another rank has said it.
Words = Callable[[], "str | None"]
_words: Words = lambda: "interrupted"  # noqa: E731

_begun = _booted = _warned = False


def launched_size(environment: Mapping[str, str] | None = None) -> int | None:
    """Return the number of ranks the launcher says it started, None without a launcher. Local.

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


def start_text(ranks: int, multiple: bool = False) -> str:
    """Write the advice to start so many ranks; a process without a launcher gets the command to put in front. Local."""
    command = f" (mpirun -n {ranks} ...)" if launched_size() is None else ""
    return f"start {'a multiple of ' if multiple else ''}{ranks} ranks{command}"


def shared_memory_fault(free: int, environment: Mapping[str, str] | None = None) -> str | None:
    """Return what is wrong if MPICH may crash for want of shared memory on this node. Local.

    Open MPI reports it by itself, and goes on.

    Parameters
    ----------
    free
        Shared memory that the node can still give [B].
    environment
        By default that of the process, before MPI begins.
    """
    environment = os.environ if environment is None else environment
    if "OMPI_COMM_WORLD_SIZE" in environment:
        return None
    here = _first_of(("MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE"), environment)
    ranks = max(map(int, re.findall(r"(?:^|,)(\d+)", here)), default=1)  # Slurm's is of all nodes: "4(x2),3"
    least, remedy = OF_MPICH * ranks, "give the container more (docker run --shm-size=1g)"
    needed = least
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
    """Return the first of these variables that is set, an empty text without one."""
    return next((environment[name] for name in names if name in environment), "")


def warn_of_shared_memory() -> None:
    """Print a line if MPI may crash when it starts, on one rank of the node; before that. Local; once is enough."""
    from .sweep import free_memory

    global _warned
    text = None if _warned or "mpi4py.MPI" in sys.modules else shared_memory_fault(free_memory())
    _warned = True
    if text is None:
        return
    if _first_of(("MPI_LOCALRANKID", "SLURM_LOCALID"), os.environ) in ("", "0"):
        _say(f"warning: {text}")
        time.sleep(TURN)
    else:  # the launcher kills the rank that has the word as soon as another one crashes
        time.sleep(4 * TURN)


def boot() -> MPI.Intracomm:
    """Initialize MPI, and watch over all ranks until the process ends. Collective over all that were launched.

    What a :class:`~halograd.comm.Communicator` of all ranks does while it is open (:mod:`halograd.comm.ending`), boot
    does for the whole program: an exception that nothing catches on one rank ends the job.

    Returns
    -------
    MPI.Intracomm
        The communicator of all ranks, for a :class:`~halograd.comm.Communicator` to clone.

    Notes
    -----
    Ends the process with exit code 64 if the launcher started another number of ranks than MPI sees.
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
        MPI.Finalize()  # removes the segments of this process, which os._exit would leave
        os._exit(WRONG_LAUNCHER)
    if not _booted:
        _booted = True
        Guard(MPI.COMM_WORLD)
    return MPI.COMM_WORLD


def begin() -> None:
    """Check the launcher, and see to it that no shared memory stays. Collective over `MPI.COMM_WORLD`; once is enough.

    One rank per node removes shared-memory segments that killed runs have left behind, and the name of that of this
    job: whatever ends it, nothing stays.

    Raises
    ------
    CommError
        If the launcher started another number of ranks than MPI sees.
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
            f"expected {launched} ranks (the launcher says so), got {world.size} from {MPI.get_vendor()[0]}; use "
            f"the mpiexec of the same MPI, or `srun --mpi=pmi2` (MPICH) or `srun --mpi=pmix` (Open MPI)"
        )
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    if node.rank == 0:
        sweep()
        unname()
    node.Free()


def leave(code: int) -> NoReturn:
    """End the program with an exit code. Collective over all ranks: every one calls it with the same code."""
    from mpi4py import MPI

    sys.stdout.flush()
    sys.stderr.flush()
    if not MPI.Is_finalized():
        MPI.Finalize()
    # Not os._exit: mpiexec takes a rank that skips the destructors of the MPI library for one that failed.
    sys.exit(code)


@contextmanager
def on_interrupt(words: Words) -> Iterator[None]:
    """While it lasts `words`, called in a thread, gives the line that is printed at SIGINT. Local."""
    global _words
    before, _words = _words, words
    try:
        yield
    finally:
        _words = before


def end_on_interrupt(comm: MPI.Intracomm | None) -> None:
    """From here on SIGINT to this rank ends the job with code 130. Local, in the main thread.

    One process alone gets KeyboardInterrupt, which cleans up. A process that ignores or handles SIGINT keeps that.
    """
    if signal.getsignal(signal.SIGINT) not in (signal.default_int_handler, signal.SIG_DFL):
        return
    if comm is None or comm.size == 1:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, lambda number, frame: None)
    threading.Thread(target=_await_interrupt, args=(comm, reader), name="halograd-interrupt", daemon=True).start()


def _await_interrupt(comm: MPI.Intracomm, pipe: int) -> NoReturn:
    while signal.SIGINT not in os.read(pipe, 64):  # other signals have their bytes, too
        pass
    from .ending import end  # commands of one process may run where there is no MPI

    if comm.rank:
        time.sleep(TURN)
    words = _words()
    if words is not None:
        _say(f"rank {comm.rank} of {comm.size} on {platform.node()}: {words}" if comm.rank else words)
    last = threading.Timer(LAST, os._exit, (INTERRUPTED,))
    last.daemon = True
    last.start()
    end(comm, INTERRUPTED)


def _say(text: str) -> None:
    os.write(2, f"halograd: {text}\n".encode())  # one write, past all buffers
