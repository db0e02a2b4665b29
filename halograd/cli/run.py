"""Entry point of the command line: output on rank 0, error messages, and the end of a job of several ranks."""

from __future__ import annotations

import gc
import logging
import os
import platform
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from ..comm.boot import INTERRUPTED, boot, end_on_interrupt, launched_size, leave, warn_of_shared_memory
from ..documents import os_reason, shown_path
from ..errors import TRACEBACK, UserError
from ..training.signals import ignore_stop_signals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi4py import MPI

__all__ = ["main", "run"]

USER_MISTAKE = 2
#: Largest number of characters of a path in a message.
LONGEST_PATH = 300

# Typer includes its own click since 0.25; before, it used an installed one.
_UsageError: type[Any] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and end the process. Collective over the ranks that were launched.

    Exit codes: 0 for success, 2 for a user error (one line on stderr, no traceback), 75 for a training that stopped
    after a checkpoint, 130 for SIGINT, 1 for any other error. Only rank 0 prints; another error on any rank ends the
    job at once with that rank's traceback.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] not in (["plan"], ["predict"]):  # they keep what they make, and scanning it takes long
        # The entry point has disabled it for the imports.
        gc.enable()
    world = _world(arguments)
    end_on_interrupt(world)
    if world is not None and world.rank:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (open until the process ends)
    try:
        code = run(arguments, world)
    finally:
        ignore_stop_signals()
    try:
        sys.stderr.flush()
    except OSError:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (Python would end with code 120)
    if world is None:
        gc.freeze()  # else the interpreter scans all objects at its end
        sys.exit(code)
    leave(code)


def run(arguments: Sequence[str], comm: MPI.Intracomm | None = None) -> int:
    """Run one command and return the exit code. Collective over `comm`; None: this process alone."""
    prints = comm is None or comm.rank == 0
    who = "" if prints or comm is None else f"rank {comm.rank} of {comm.size} on {platform.node()}: "
    # The host name becomes part of a format, in which % has a meaning.
    form = f"halograd: {who.replace('%', '%%')}%(message)s"
    logging.basicConfig(level=logging.WARNING if prints else logging.ERROR, format=form)
    try:
        from .commands import app

        # Not `app`, which would replace boot's exception hook, and not `command.main`, which turns KeyboardInterrupt
        # into a normal exit.
        command = typer.main.get_command(app)
        with command.make_context("halograd", list(arguments) or ["--help"]) as context:
            return int(command.invoke(context) or 0)
    except typer.Exit as ended:  # of --help
        return ended.exit_code
    except _UsageError as error:
        return _complain(UserError(_usage(error)), comm)
    except KeyboardInterrupt as error:
        if comm is not None and comm.size > 1:
            raise  # ends the other ranks
        print(f"halograd: {error.args[0] if error.args else 'interrupted'}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `halograd ... | head`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return 0
    except UserError as error:  # before the next clause: OutOfMemory is a MemoryError, too
        return _complain(error, comm)
    except (MemoryError, OSError) as error:
        mistake = _mistake(error)
        if mistake is None:
            raise
        return _complain(mistake, comm)


def _world(arguments: Sequence[str]) -> MPI.Intracomm | None:
    """Return the communicator of the launched ranks; None without a launcher, or if `doctor` cannot import MPI."""
    if launched_size() is None:
        return None
    if "doctor" not in arguments[:1]:
        return boot()
    warn_of_shared_memory()
    try:  # the doctor reports a wrong launcher and does not fail
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return None
    return MPI.COMM_WORLD


def _mistake(error: MemoryError | OSError) -> UserError | None:
    """Convert a system error to a user error with a remedy; return None if the user cannot correct it."""
    if isinstance(error, MemoryError):
        text = f"expected enough memory, got an error: {error}; use more ranks, or smaller samples, batches or networks"
    else:
        reason = os_reason(error)
        if reason is None:
            return None
        name = error.filename if isinstance(error.filename, str | Path) else ""  # a descriptor has no name
        text = f"expected files that can be read and written, got {shown_path(name)[:LONGEST_PATH]}: {reason}"
    mistake = UserError(text)
    mistake.__dict__.update(vars(error))  # keep whether all ranks raise it
    mistake.__cause__ = error
    return mistake


def _usage(error: Any) -> str:
    command = error.ctx.command_path if getattr(error, "ctx", None) else "halograd"
    return f"{error.format_message().rstrip('.')}; see `{command} --help`"


def _complain(error: UserError, comm: MPI.Intracomm | None) -> int:
    """Print a user error on one rank, and return the exit code. An error of only one rank ends the job."""
    if comm is None:
        if os.environ.get(TRACEBACK):
            traceback.print_exception(error)
        print(f"halograd: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    else:
        from ..comm.ending import refuse

        refuse(error)
    return USER_MISTAKE
