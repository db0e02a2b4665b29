"""How a job of several ranks ends when ranks fail.

While a communicator of several ranks is open, the others wait for this rank in their next collective. So a rank that
fails alone ends the job. Where all ranks fail alike, one of them speaks, and each ends by itself.

::

    an error leaves `with Communicator`, or nothing catches it
      |
    Guard.leave: compare with the other ranks, without a wait
      |
    end of the program     all ranks have left -> one of them speaks; a user's mistake finalizes MPI and exits with 2
    (hook, or exit)        not within PATIENCE -> this rank speaks, and aborts the job
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

from halograd.errors import TRACEBACK, UserError

from . import contexts
from .errors import is_agreed

__all__ = ["Guard", "end", "refuse"]

FAULT, MISTAKE, INTERRUPTED = 1, 2, 130  # exit codes
# How long a rank that fails waits for the others to fail alike [s]. All ranks find most mistakes of the user.
PATIENCE = {FAULT: 1.0, MISTAKE: 5.0, INTERRUPTED: 0.0}
AGREED = 30.0  # where the others are known to fail, too, unless they catch the error [s]
READING = 5.0  # for the launcher to read what was printed [s]
FORWARDING = 0.2  # and to pass it on [s]

_guards: list[Guard] = []
_print = sys.__excepthook__  # the hook that was there before
_installed = False


class Guard:
    """Finds out whether all ranks of a communicator leave it by an error. Collective to make and to close.

    Every root communicator has one. The first one replaces `sys.excepthook`, and `threading.excepthook` if that is
    Python's own.

    Attributes
    ----------
    left
        Mark, exit code and text of the error by which this rank has left; None before. Not the error itself: what its
        traceback holds is to be freed before the process ends (HDF5 crashes then if a file is open).
    """

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        self._mpi = contexts.hold(mpi_comm.Dup())  # the ranks that go on have collectives under way on the other ones
        self._marks = np.zeros(2, np.int64)
        self._request: MPI.Request | None = None
        self.rank, self.size, self.process = mpi_comm.rank, mpi_comm.size, os.getpid()
        self.left: tuple[int, int, str] | None = None
        _guards.append(self)
        _install()

    def leave(self, error: BaseException) -> None:
        """Note that this rank leaves by an error; the first one counts. Local: does not wait."""
        if self.left is None and self.process == os.getpid():
            self.left = _mark(error), _code(error), _cause(error)
            self._start(self.left[0])

    def wait(self, seconds: float) -> bool:
        """Return whether all ranks have left, within so many seconds."""
        assert self._request is not None
        deadline = time.monotonic() + seconds
        while not self._request.Test():
            if time.monotonic() >= deadline:
                return False
            time.sleep(1e-3)
        return True

    @property
    def alike(self) -> bool:
        """Whether all ranks have left by the same error; defined when they have left."""
        return bool(self._marks[0] == -self._marks[1])

    def close(self) -> None:
        """Watch no more. Ranks that have left before close it too."""
        if self._request is None:
            self._start(0)
        assert self._request is not None
        self._request.Wait()
        contexts.free(self._mpi)
        _guards.remove(self)

    def _start(self, mark: int) -> None:
        self._marks[:] = mark, -mark
        self._request = self._mpi.Iallreduce(MPI.IN_PLACE, self._marks, MPI.MAX)


def end(comm: MPI.Intracomm, code: int) -> NoReturn:
    """End all ranks of the job at once with this exit code. Local. Does not return."""
    sys.stdout.flush()
    sys.stderr.flush()
    if comm.size > 1 and not MPI.Is_finalized():
        # Abort takes the launcher's relay of this rank with it: let it read what was printed, and pass it on.
        await_reader(1, 2)
        time.sleep(FORWARDING)
        # Of MPICH, only an abort of COMM_WORLD reaches mpiexec as one, with its code; else it may pass on SIGKILL.
        (MPI.COMM_WORLD if comm.size == MPI.COMM_WORLD.size else comm).Abort(code)
    os._exit(code)


def await_reader(*files: int) -> None:
    """Return when those of the files (descriptors) that are pipes have been read empty, or after `READING`. Local."""
    deadline = time.monotonic() + READING
    for file in files:
        while _unread(file) and time.monotonic() < deadline:
            time.sleep(1e-3)


def _unread(file: int) -> int:
    """Return bytes that wait in a pipe; 0 for anything else."""
    count = array.array("i", [0])
    with contextlib.suppress(OSError):
        if stat.S_ISFIFO(os.fstat(file).st_mode):
            fcntl.ioctl(file, termios.FIONREAD, count)
    return count[0]


def refuse(error: UserError, where: str = "") -> None:
    """Print a user's mistake in one line, on one rank. A rank that is alone with it ends the job.

    Parameters
    ----------
    where
        Line of the user's code, if there is one.
    """
    together, speaks = _meet(error)
    places = [place for place in ("" if together else _rank(), where) if place]
    if speaks:
        suffix = f" ({'; '.join(places)})" if places else ""
        trace = _numbered(error) if os.environ.get(TRACEBACK) else ""
        _write(f"{trace}halograd: error: {_one_line(error)}{suffix}\n")
    if not together:
        end(MPI.COMM_WORLD, MISTAKE)


def _meet(error: BaseException) -> tuple[bool, bool]:
    """Return whether all ranks end by an error, and whether this one speaks. Returns within `PATIENCE`.

    Of an error that all ranks agreed on, the rank where it arose speaks; else the first one, or every one where the
    errors differ.
    """
    agreed = _is_agreed(error)
    deadline = time.monotonic() + (AGREED if agreed else PATIENCE[_code(error)])
    guards = _open_guards()
    for guard in guards:
        guard.leave(error)
    if not all(guard.wait(deadline - time.monotonic()) for guard in guards):
        return False, True
    if agreed:
        return True, bool(getattr(error, "arose_here", False))
    alike = all(guard.alike for guard in guards if guard.left is not None and guard.left[0] == _mark(error))
    return True, _widest(guards).rank == 0 or not alike


def _install() -> None:
    global _print, _installed
    if _installed:
        return
    _installed = True
    _print, sys.excepthook = sys.excepthook, _on_exception
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = _on_thread_exception
    atexit.register(_on_exit)


def _on_exception(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
    """Python's hook for an exception that nothing catches."""
    if not _concerns(value):
        _print(kind, value, trace)
        return
    if isinstance(value, UserError):
        refuse(value, _place(trace))
        sys.exit(MISTAKE)
    together, speaks = _meet(value)
    if speaks:
        every = together and not _is_agreed(value)
        _speak(value, f"all {_widest(_open_guards()).size} ranks" if every else _rank())
    if together and not _open_guards():  # communicators are closed, so nothing is under way
        sys.exit(FAULT)
    if not speaks:
        time.sleep(PATIENCE[MISTAKE])  # the rank that speaks ends the job meanwhile
    end(MPI.COMM_WORLD, _code(value))


def _concerns(error: BaseException) -> bool:
    """Return whether the end by an error is not as in any other Python program."""
    if MPI.Is_finalized() or _is_interactive():
        return False
    guards, agreed = _open_guards(), _is_agreed(error)
    if isinstance(error, UserError):
        return bool(guards) or agreed
    return MPI.COMM_WORLD.size > 1 and (_of_several(guards) or agreed)


def _on_thread_exception(args: threading.ExceptHookArgs) -> None:
    """Python's hook for an exception that ends a thread: the main thread may wait for that thread for ever."""
    if args.exc_type is SystemExit or _is_interactive() or not _of_several(_open_guards()):
        threading.__excepthook__(args)
        return
    value = args.exc_value or args.exc_type()
    _speak(value, _rank())
    end(MPI.COMM_WORLD, _code(value))


def _on_exit() -> None:
    """End the job if this rank has left alone by an error that something caught, or by `sys.exit` with a code."""
    for guard in [] if _is_interactive() else _open_guards():
        if guard.left is not None and not guard.wait(PATIENCE[MISTAKE]):
            _, code, cause = guard.left
            _write(f"halograd: {_rank()}: ended after {cause}, the others have not; the job ends\n")
            end(MPI.COMM_WORLD, code)


def _open_guards() -> list[Guard]:
    """Return those of this process; a process that was forked from it has no part in them."""
    return [] if MPI.Is_finalized() else [guard for guard in _guards if guard.process == os.getpid()]


def _is_agreed(error: BaseException) -> bool:
    """Return whether all ranks of all communicators that are open raise this error."""
    return is_agreed(error, max((guard.size for guard in _open_guards()), default=1))


def _widest(guards: list[Guard]) -> Guard | MPI.Intracomm:
    """Return that of the most ranks; all ranks that were launched if there is none."""
    return max(guards, key=lambda guard: guard.size, default=MPI.COMM_WORLD)


def _of_several(guards: list[Guard]) -> bool:
    return any(guard.size > 1 for guard in guards)


def _is_interactive() -> bool:
    """Return whether the process has a prompt, now or when the script is over: ``python -i``, IPython, Jupyter."""
    return hasattr(sys, "ps1") or bool(sys.flags.inspect)


def _code(error: BaseException) -> int:
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return MISTAKE if isinstance(error, UserError) else FAULT


def _mark(error: BaseException) -> int:
    """Return a number that is the same for errors of one type and text; not 0."""
    return zlib.crc32(f"{type(error).__qualname__}: {error}".encode()) + 1


def _rank() -> str:
    return f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size} on {platform.node()}"


def _speak(error: BaseException, who: str) -> None:
    """Print the traceback of an error, and what came of it."""
    last = f"halograd: {who}: {_cause(error)}; the job ends\n"
    if _print is sys.__excepthook__:
        _write(f"{_numbered(error)}{last}")
    else:
        _print(type(error), error, error.__traceback__)
        _write(last)


def _numbered(error: BaseException) -> str:
    """Return the traceback of an error; of several ranks, each line names this one."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    world = MPI.COMM_WORLD
    if world.size == 1:
        return text
    return "".join(f"[rank {world.rank} of {world.size}] {line}\n" for line in text.splitlines())


def _cause(error: BaseException) -> str:
    text = _one_line(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _place(trace: TracebackType | None) -> str:
    """File and line of the innermost call that is the user's code, not this package's or Python's."""
    others = {"halograd", *sys.stdlib_module_names}
    found = ""
    for frame, line in traceback.walk_tb(trace):
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in others:
            found = f"{os.path.basename(frame.f_code.co_filename)}, line {line}"
    return found


def _write(text: str) -> None:
    """Print on stderr, in one write: lines of several ranks do not mix."""
    sys.stdout.flush()
    sys.stderr.write(text)
    sys.stderr.flush()
