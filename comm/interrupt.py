"""Ctrl-C in a job of several ranks: the first SIGINT on any rank ends all of them, whatever they are doing.

Python runs its handlers in the main thread, between two of its own instructions. A rank that waits in MPI may never get
there, and one that unwinds meets collectives that the others do not enter. So the handler of the system writes a byte
into a pipe, and a thread that reads it ends the job.
"""

from __future__ import annotations

import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["INTERRUPTED", "end_on_interrupt", "on_interrupt"]

#: Exit code of a command that SIGINT ended.
INTERRUPTED = 130
TURN = 0.5  # how long other ranks leave it to rank 0 to speak: a terminal interrupts all ranks at once [s]
LAST = 2.0  # until a rank ends itself where MPI does not end the job [s]

#: What to say, None if another rank has said it.
Words = Callable[[], "str | None"]
_words: Words = lambda: "interrupted"  # noqa: E731


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
    from halograd.comm.ending import end  # commands of one process may run where there is no MPI

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
