"""Entry of the command line: who speaks, what an error looks like, how a job of several ranks ends."""

from __future__ import annotations

import logging
import os
import platform
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from halograd.comm.boot import boot, end, launched_size, leave
from halograd.comm.interrupt import INTERRUPTED, end_on_interrupt
from halograd.errors import UserError
from halograd.training.signals import ignore_stop_signals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi4py import MPI

__all__ = ["main", "run"]

USER_MISTAKE = 2
# How long a rank with a user's mistake waits for the others to find the same one before it ends the job alone.
PATIENCE = 5.0  # [s]

# Typer carries a click of its own since 0.25, an installed one before.
_UsageError: type[Any] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and end the process. Collective over the ranks that were launched.

    Exit code 0, 2 for a user's mistake (one line on stderr, no traceback), 130 for SIGINT, 1 for any other fault. Of
    several ranks only rank 0 prints; a fault on any rank ends the job at once with that rank's traceback.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    world = _world(arguments)
    mine = None if world is None else world.Dup()  # nobody else's messages
    end_on_interrupt(mine)
    if mine is not None and mine.rank:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (open until the process ends)
    try:
        code = run(arguments, mine)
    finally:
        ignore_stop_signals()
    if mine is None:
        sys.exit(code)
    leave(code)


def run(arguments: Sequence[str], comm: MPI.Intracomm | None = None) -> int:
    """Run one command and return the exit code. Collective over `comm`; without it this process is alone."""
    speaks = comm is None or comm.rank == 0
    who = "" if speaks or comm is None else f"rank {comm.rank} of {comm.size} on {platform.node()}: "
    form = f"halograd: {who.replace('%', '%%')}%(message)s"
    logging.basicConfig(level=logging.WARNING if speaks else logging.ERROR, format=form)
    try:
        from halograd.cli.commands import app

        # Neither `app`, which would replace the hook by which `boot` ends the job on a fault, nor `command.main`, which
        # makes an exit like any other of KeyboardInterrupt.
        command = typer.main.get_command(app)
        with command.make_context("halograd", list(arguments) or ["--help"]) as context:
            return int(command.invoke(context) or 0)
    except typer.Exit as ended:  # of --help
        return ended.exit_code
    except _UsageError as error:
        return _complain(_usage(error), error, comm)
    except KeyboardInterrupt as error:
        if comm is not None and comm.size > 1:
            raise  # ends the other ranks
        print(f"halograd: {error.args[0] if error.args else 'interrupted'}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `halograd ... | head`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return 0
    except Exception as error:
        if not isinstance(error, _mistakes()):
            raise
        return _complain(str(error), error, comm)


def _world(arguments: Sequence[str]) -> MPI.Intracomm | None:
    """The ranks that were launched, None for a process started alone."""
    if launched_size() is None:
        return None
    if "doctor" not in arguments[:1]:
        return boot()
    try:  # the doctor reports a wrong launcher instead of dying of it
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return None
    return MPI.COMM_WORLD


def _mistakes() -> tuple[type[Exception], ...]:
    """Errors that are the user's to mend: the common one, and those of the folders that are loaded."""
    names = {"halograd.data.errors": "DataError"}
    return (UserError, *(getattr(sys.modules[module], name) for module, name in names.items() if module in sys.modules))


def _usage(error: Any) -> str:
    command = error.ctx.command_path if getattr(error, "ctx", None) else "halograd"
    return f"{error.format_message().rstrip('.')}; see `{command} --help`"


def _complain(text: str, error: Exception, comm: MPI.Intracomm | None) -> int:
    """Say one line on rank 0; a rank that is alone with its mistake says it and ends the job."""
    line = f"halograd: error: {' '.join(text.split())}"
    if comm is not None and not getattr(error, "agreed", False) and not _everyone_is_here(comm):
        print(f"{line} (rank {comm.rank} of {comm.size} on {platform.node()})", file=sys.stderr, flush=True)
        end(comm, USER_MISTAKE)
    if comm is None or comm.rank == 0:
        print(line, file=sys.stderr, flush=True)
    return USER_MISTAKE


def _everyone_is_here(comm: MPI.Intracomm) -> bool:
    """Whether all ranks come here within `PATIENCE`."""
    request = comm.Ibarrier()
    deadline = time.monotonic() + PATIENCE
    while not request.Test():
        if time.monotonic() > deadline:
            return False
        time.sleep(1e-3)
    return True
