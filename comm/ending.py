"""End of a job of several ranks when ranks fail.

While a communicator of several ranks is open, the other ranks wait for this rank in their next collective. So a rank
that fails alone ends the job. If all ranks fail with the same error, one of them prints it, and each rank exits.

::

    an error leaves `with Communicator`, or is not caught
      |
    Guard.leave: compare with the other ranks, without waiting
      |
    end of the program     all ranks have left -> one rank prints; a user's mistake finalizes MPI and exits with 2
    (hook, or exit)        not within PATIENCE -> this rank prints, and aborts the job
"""

from __future__ import annotations

import array
import atexit
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
import zlib
from types import TracebackType
from typing import NoReturn

import numpy as np
from mpi4py import MPI

from halograd.documents import one_line
from halograd.errors import TRACEBACK, UserError

from . import contexts
from .errors import is_agreed

__all__ = ["Guard", "end", "refuse"]

FAULT, MISTAKE, INTERRUPTED = 1, 2, 130  # exit codes
# Time that a failing rank waits for the others to fail with the same error [s]. All ranks find most mistakes of users.
PATIENCE = {FAULT: 1.0, MISTAKE: 5.0, INTERRUPTED: 0.0}
AGREED = 30.0  # the same if the others are known to fail too, unless they catch the error [s]
READING = 5.0  # time for the launcher to read what was printed [s]
FORWARDING = 0.2  # time for the launcher to forward it [s]

_guards: list[Guard] = []
_print = sys.__excepthook__  # the hook that was there before
_installed = False


class Guard:
    """Detector that finds out whether all ranks of a communicator leave it by an error. Creating and closing it is
    collective.

    Every root communicator has one guard. The first guard replaces `sys.excepthook`, and `threading.excepthook` if the
    latter is Python's own.

    Attributes
    ----------
    left
        Mark, exit code and text of the error by which this rank has left; None before. The error itself is not kept:
        objects in its traceback must be freed before the process ends (HDF5 crashes at exit if a file is open).
    """

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        self._mpi = contexts.hold(mpi_comm.Dup())  # the other ranks may be in collectives on other communicators
        self._marks = np.zeros(2, np.int64)
        self._request: MPI.Request | None = None
        self.rank, self.size, self.process = mpi_comm.rank, mpi_comm.size, os.getpid()
        self.left: tuple[int, int, str] | None = None
        _guards.append(self)
        _install()

    def leave(self, error: BaseException) -> None:
        """Record that this rank leaves by an error; only the first call counts. Local; does not wait."""
        # A forked process has this object, too, but is no rank.
        if self.left is None and self.process == os.getpid():
            self.left = _mark(error), _code(error), _cause(error)
            self._start(self.left[0])

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for all ranks to leave or call `close`; return whether they have done so.

        This rank must have left.
        """
        assert self._request is not None
        deadline = time.monotonic() + seconds
        # Not `Wait`: a rank that never leaves would block this one forever.
        while not self._request.Test():
            if time.monotonic() >= deadline:
                return False
            time.sleep(1e-3)
        return True

    @property
    def identical(self) -> bool:
        """Whether all ranks have left by the same error; valid once they have left."""
        return bool(self._marks[0] == -self._marks[1])

    def close(self) -> None:
        """Wait until all ranks have left or called `close`, and free the guard. Collective, also for ranks that have
        left.
        """
        if self._request is None:
            self._start(0)  # no mark of an error is 0
        assert self._request is not None
        self._request.Wait()
        contexts.free(self._mpi)
        _guards.remove(self)

    def _start(self, mark: int) -> None:
        # The maxima of both are the largest mark and minus the smallest one.
        self._marks[:] = mark, -mark
        self._request = self._mpi.Iallreduce(MPI.IN_PLACE, self._marks, MPI.MAX)


def end(comm: MPI.Intracomm, code: int) -> NoReturn:
    """End all ranks of the job at once with this exit code. Local; does not return.

    If `comm` has one rank, or MPI is finalized, only this process ends.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if comm.size > 1 and not MPI.Is_finalized():
        # Abort ends the launcher's relay of this rank too: let it read and forward what was printed.
        await_reader(1, 2)
        time.sleep(FORWARDING)
        # With MPICH, mpiexec reports the exit code only of an abort of COMM_WORLD; else it may report SIGKILL.
        (MPI.COMM_WORLD if comm.size == MPI.COMM_WORLD.size else comm).Abort(code)
    os._exit(code)


def await_reader(*files: int) -> None:
    """Wait until the pipes among these file descriptors are empty, for at most `READING` seconds. Local."""
    deadline = time.monotonic() + READING
    for file in files:
        while _unread(file) and time.monotonic() < deadline:
            time.sleep(1e-3)


def _unread(file: int) -> int:
    """Return the number of unread bytes in a pipe; 0 for anything else."""
    count = array.array("i", [0])
    with contextlib.suppress(OSError):
        if stat.S_ISFIFO(os.fstat(file).st_mode):
            fcntl.ioctl(file, termios.FIONREAD, count)
    return count[0]


def refuse(error: UserError, where: str = "") -> None:
    """Print a user's mistake in one line, on one rank if all ranks have it. If not all ranks fail, the job ends.

    Parameters
    ----------
    where
        Location in the user's code, if known.
    """
    together, prints = _await_others(error)
    # If all ranks make the mistake, no rank is named.
    locations = [location for location in ("" if together else _rank(), where) if location]
    if prints:
        suffix = f" ({'; '.join(locations)})" if locations else ""
        trace = _numbered(error) if os.environ.get(TRACEBACK) else ""
        _write(f"{trace}halograd: error: {one_line(error)}{suffix}\n")
    if not together:
        end(MPI.COMM_WORLD, MISTAKE)


def _await_others(error: BaseException) -> tuple[bool, bool]:
    """Return whether all ranks end with an error, and whether this rank prints it. Waits for at most `PATIENCE`, or
    `AGREED` if all ranks agreed on the error.

    If not all ranks end in time, or if their errors differ, every rank prints its error. Otherwise one rank does: that
    where the error arose if the ranks agreed on it, else the first.
    """
    agreed = _is_agreed(error)
    deadline = time.monotonic() + (AGREED if agreed else PATIENCE[_code(error)])
    guards = _open_guards()
    for guard in guards:
        # All before the first wait: another rank may already wait in a different one of these guards.
        guard.leave(error)
    if not all(guard.wait(deadline - time.monotonic()) for guard in guards):
        return False, True
    if agreed:
        return True, bool(getattr(error, "arose_here", False))
    # Not the guards that were left by an earlier error: they do not show whether this one is the same on all ranks.
    identical = all(guard.identical for guard in guards if guard.left is not None and guard.left[0] == _mark(error))
    return True, _widest(guards).rank == 0 or not identical


def _install() -> None:
    global _print, _installed
    if _installed:
        return
    _installed = True
    # A hook that was there before, such as that of an IDE, still prints.
    _print, sys.excepthook = sys.excepthook, _on_exception
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = _on_thread_exception
    atexit.register(_on_exit)


def _on_exception(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
    """Handle an uncaught exception (`sys.excepthook`)."""
    if not _concerns(value):
        _print(kind, value, trace)
        return
    if isinstance(value, UserError):
        refuse(value, _location(trace))
        sys.exit(MISTAKE)  # Python accepts this from a hook: exit handlers run, and MPI is finalized
    together, prints = _await_others(value)
    if prints:
        every = together and not _is_agreed(value)
        _print_traceback(value, f"all {_widest(_open_guards()).size} ranks" if every else _rank())
    if together and not _open_guards():  # communicators are closed, so nothing is under way
        sys.exit(FAULT)
    if not prints:
        time.sleep(PATIENCE[MISTAKE])  # the rank that prints ends the job in this time
    end(MPI.COMM_WORLD, _code(value))


def _concerns(error: BaseException) -> bool:
    """Return whether this module handles the error, rather than Python's own hook."""
    if MPI.Is_finalized() or _is_interactive():
        return False
    guards, agreed = _open_guards(), _is_agreed(error)
    # A user's mistake is printed in one line, also if there is one rank.
    if isinstance(error, UserError):
        return bool(guards) or agreed
    return MPI.COMM_WORLD.size > 1 and (_of_several(guards) or agreed)


def _on_thread_exception(args: threading.ExceptHookArgs) -> None:
    """Handle an exception that ends a thread; the main thread may wait for that thread forever."""
    # SystemExit ends a thread only, without a message.
    if args.exc_type is SystemExit or _is_interactive() or not _of_several(_open_guards()):
        threading.__excepthook__(args)
        return
    # `exc_value` may be None.
    value = args.exc_value or args.exc_type()
    _print_traceback(value, _rank())
    end(MPI.COMM_WORLD, _code(value))


def _on_exit() -> None:
    """End the job if this rank alone has left by an error that was caught, or by `sys.exit` with a code."""
    for guard in [] if _is_interactive() else _open_guards():
        if guard.left is not None and not guard.wait(PATIENCE[MISTAKE]):
            _, code, cause = guard.left
            _write(f"halograd: {_rank()}: ended after {cause}, the other ranks have not ended; the job ends\n")
            end(MPI.COMM_WORLD, code)


def _open_guards() -> list[Guard]:
    """Return the open guards of this process; a forked process has none."""
    return [] if MPI.Is_finalized() else [guard for guard in _guards if guard.process == os.getpid()]


def _is_agreed(error: BaseException) -> bool:
    """Return whether all ranks of all communicators that are open raise this error."""
    return is_agreed(error, max((guard.size for guard in _open_guards()), default=1))


def _widest(guards: list[Guard]) -> Guard | MPI.Intracomm:
    """Return the guard with the most ranks; without guards, the communicator of all launched ranks."""
    return max(guards, key=lambda guard: guard.size, default=MPI.COMM_WORLD)


def _of_several(guards: list[Guard]) -> bool:
    return any(guard.size > 1 for guard in guards)


def _is_interactive() -> bool:
    """Return whether the process has a prompt, now or after the script: ``python -i``, IPython, Jupyter."""
    return hasattr(sys, "ps1") or bool(sys.flags.inspect)


def _code(error: BaseException) -> int:
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return MISTAKE if isinstance(error, UserError) else FAULT


def _mark(error: BaseException) -> int:
    """Return a nonzero number that is the same for errors of the same type and text."""
    return zlib.crc32(f"{type(error).__qualname__}: {error}".encode()) + 1


def _rank() -> str:
    return f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size} on {platform.node()}"


def _print_traceback(error: BaseException, who: str) -> None:
    """Print the traceback of an error, and a line about the end of the job."""
    last = f"halograd: {who}: {_cause(error)}; the job ends\n"
    if _print is sys.__excepthook__:
        _write(f"{_numbered(error)}{last}")
    else:
        # Another hook was installed before, such as one of an IDE: it prints in its own way.
        _print(type(error), error, error.__traceback__)
        _write(last)


def _numbered(error: BaseException) -> str:
    """Return the traceback of an error; with several ranks, each line names this rank."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    world = MPI.COMM_WORLD
    if world.size == 1:
        return text
    return "".join(f"[rank {world.rank} of {world.size}] {line}\n" for line in text.splitlines())


def _cause(error: BaseException) -> str:
    text = one_line(str(error))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _location(trace: TracebackType | None) -> str:
    """Return file and line of the innermost call in the user's code, outside this package and the standard library."""
    others = {"halograd", *sys.stdlib_module_names}
    location = ""
    for frame, line in traceback.walk_tb(trace):
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in others:
            location = f"{os.path.basename(frame.f_code.co_filename)}, line {line}"
    return location


def _write(text: str) -> None:
    """Print to stderr in one write, so that lines of several ranks do not mix."""
    sys.stdout.flush()
    sys.stderr.write(text)
    sys.stderr.flush()
