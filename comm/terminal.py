"""The terminal that shows this process's stderr, also through the pipes of a launcher. Linux; no MPI."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

__all__ = ["terminal_columns"]

#: Processes that forward the output of ranks, by the beginnings of their names.
LAUNCHERS = re.compile(r"mpiexec|mpirun|hydra_|orte|prte")
MOST = 16  # maximum number of ancestors to examine


def terminal_columns() -> int | None:
    """Return the width of the terminal that shows this process's stderr [columns]; None for a file or another program.

    Launchers read the output of a rank from a pipe and write it to their own stderr, so ``isatty()`` is false for a
    rank although a user sees its output.
    """
    path = _end(os.getpid())
    if path is None:
        return None
    try:
        terminal = os.open(path, os.O_RDONLY | os.O_NOCTTY)
        try:
            return os.get_terminal_size(terminal).columns or 80  # 0 if the terminal does not know its width
        finally:
            os.close(terminal)
    except OSError:
        return None


def _end(process: int) -> str | None:
    """Return the terminal where a process's stderr ends, also through pipes of launchers; None if there is none."""
    stderr = _files(process).get("2", "")
    for ancestor, name in _ancestors(process):
        if not stderr.startswith("pipe:"):
            break
        files = _files(ancestor)
        # A launcher reads the pipe of a rank from a descriptor other than its own stdout and stderr.
        if LAUNCHERS.match(name) and stderr in [file for number, file in files.items() if number not in ("1", "2")]:
            stderr = files.get("2", "")
    return stderr if stderr.startswith(("/dev/pts/", "/dev/tty")) else None


def _ancestors(process: int) -> Iterator[tuple[int, str]]:
    """Yield the ID and name of the parent process, of its parent, and so on."""
    for _ in range(MOST):
        try:
            with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
                # "PID (NAME) STATE PARENT ...", where the name may contain spaces and parentheses.
                process = int(file.read().rpartition(")")[2].split()[1])
            with open(f"/proc/{process}/comm", encoding="utf-8", errors="replace") as file:
                yield process, file.read().strip()
        except (OSError, ValueError, IndexError):
            return


def _files(process: int) -> dict[str, str]:
    """Return the targets of the open files of a process, by descriptor; empty for a process of another user."""
    files, folder = {}, f"/proc/{process}/fd"
    try:
        for number in os.listdir(folder):
            files[number] = os.readlink(f"{folder}/{number}")
    except OSError:
        pass
    return files
