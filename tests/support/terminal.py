"""Execution of commands on a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import termios

from tests.harness import jobs

__all__ = ["on_terminal"]


def on_terminal(command: list[str]) -> tuple[int, str]:
    """Execute a command on a terminal of 133 columns; return its exit code and the text that the terminal shows."""
    mark = jobs.new_mark()
    process, terminal = pty.fork()
    if not process:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 133, 0, 0))
        with contextlib.suppress(OSError):
            os.execve(command[0], command, jobs.job_environment(mark))
        os._exit(127)
    shown = bytearray()
    try:
        with contextlib.suppress(OSError):  # the other end is closed
            while more := os.read(terminal, 10000):
                shown += more
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    finally:
        jobs.end(mark)
        os.close(terminal)
    return code, shown.decode()
