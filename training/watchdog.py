"""The watchdog of a run, and the report of an interrupt: a job that ends early prints and logs the rank that caused the
end.

A thread on every rank reads the position of the main thread once a second (:class:`~halograd.training.watch.Pulse`),
and keeps connections to some of the other ranks (:mod:`halograd.training.peers`). The main thread only records its
layer. :mod:`halograd.training.watch` decides. Without a watchdog, launchers that do not detect a dead rank (srun
without ``--kill-on-bad-exit``) would wait forever.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from halograd.errors import UserError

from ..comm import Communicator
from ..comm.boot import on_interrupt
from ..comm.errors import is_agreed, mark_agreed
from .peers import join
from .watch import LAST, Place, Pulse, Tree, Watch

if TYPE_CHECKING:
    from .checkpoints import CheckpointFolder

__all__ = ["Watchdog", "oom_kills", "unwatched"]

TAIL = 1 << 16  # size of the end of a log that holds the lines of all simultaneously interrupted ranks [B]
FORWARDING = 0.5  # time for the launcher to forward the message, because MPI_Abort ends its relay too [s]


class Watchdog:
    """Context manager that ends the job if a rank dies or makes no progress, and reports an interrupt (SIGINT).

    Creating it is collective over `comm`; leaving the ``with`` is local. A single process raises KeyboardInterrupt with
    the message.

    Parameters
    ----------
    comm
        All ranks of the job.
    stall_minutes
        Maximum time without progress [min]; 0: no limit.
    log
        ``log.jsonl`` of the run, to which a line ``"failed"`` or ``"interrupted"`` is appended when the job is ended.
    folder
        Folder of its checkpoints, for the message on how to continue.

    Notes
    -----
    Rank 0 does not watch ranks from which no connections lead to it; it prints them.
    """

    def __init__(self, comm: Communicator, stall_minutes: float, log: Path, folder: CheckpointFolder) -> None:
        tree = Tree(comm.allgather_objects(platform.node()))
        self._comm, self._hosts, self._log, self._folder = comm, tree.hosts, log, folder
        self._pulse: Pulse | None = None
        self._main, self._oom_kills = threading.get_ident(), oom_kills()
        self._peers, joined = join(comm, tree)
        self.send = self._peers.send
        self._watch = Watch(tree, comm.rank, joined, 60 * stall_minutes, self)
        if comm.rank == 0 and (text := unwatched(tree, joined)):
            self._print(text)
        self._closing = False
        self._words: tuple[str, bool] | None = None
        running = self._run()
        self._thread = threading.Thread(target=self._peers.run, args=[running], name="halograd-watchdog", daemon=True)
        self._thread.start()
        self._reporting = on_interrupt(self.interrupted)

    def follow(self, pulse: Pulse) -> None:
        """Watch the progress of the main thread, and log an interrupt, from now on: the run has begun. Local."""
        self._pulse = pulse

    def interrupted(self) -> str | None:
        """Announce and log an interrupt; return the line to print, or None on other ranks. Local, in any thread."""
        self._words = "", False  # no other rank reports this rank
        if not self._closing:
            self._peers.wake()
        text = "interrupted before the first step"
        if self._pulse is not None:
            text = f"interrupted at step {self._pulse.step + 1}"
            if not self._is_first_interrupted():
                return None
        latest = self._folder.latest
        if latest is None:
            return f"{text}; there is no checkpoint to go on from"
        return f"{text}; the newest checkpoint is {latest.resolve()}; go on with --resume"

    def close(self) -> None:
        """Stop watching; idempotent. Local."""
        if not self._closing:
            self._closing = True
            self._peers.wake()
            self._thread.join()

    def __enter__(self) -> Watchdog:
        self._reporting.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reporting.__exit__(None, None, None)
        interrupt = None
        if isinstance(error, KeyboardInterrupt):
            interrupt = KeyboardInterrupt(self.interrupted() or "interrupted")
            mark_agreed(interrupt, True, self._comm.size)
        elif error is not None and not is_agreed(error, self._comm.size):
            # The job ends with this process, and the other ranks need the cause. A user's mistake before the job begins
            # is not logged: the log belongs to an earlier job, which may be running.
            refused = self._pulse is None and isinstance(error, UserError)
            self._words = f"{type(error).__name__}: {error}", not refused
        self.close()
        if interrupt is not None:
            raise interrupt from error

    async def _run(self) -> None:
        while not self._closing and self._words is None:
            for rank, event in await self._peers.wait(self._watch.tick()):
                if isinstance(event, str):
                    self._watch.ended(rank, None if event == "left" else self._cause(rank, event))
                else:
                    self._watch.heard(rank, event)
        if self._words is not None:
            self._watch.dying(*self._words)
        await self._peers.close()

    # -- actions of the protocol -----------------------------------------------------------------

    def state(self) -> object:
        """Return the progress of the main thread, with the exchange for which it waits."""
        return None if self._pulse is None else (*self._pulse.state(), self._comm.instruments.waiting)

    def place(self, idle: float) -> Place:
        """Return step, layer, exchange, and the line of code of the main thread."""
        pulse = self._pulse or Pulse()
        frame = sys._current_frames().get(self._main)
        where = "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        return Place(pulse.step, pulse.phase, pulse.place, self._comm.instruments.waiting or "", where, idle)

    def _cause(self, rank: int, how: str) -> str:
        """Return a text with the cause of the end of a connection."""
        if how == "lost":
            return "its node no longer responds"
        if self._hosts[rank] == self._hosts[self._comm.rank] and oom_kills() > self._oom_kills:
            return "it was killed: this node ran out of memory"
        return "its process is gone; it was killed, by hand, by the batch system or for lack of memory"

    def say(self, rank: int, cause: str) -> None:
        """Print the rank that ends the job, and the cause."""
        self._print(f"rank {rank} of {self._comm.size} on {self._hosts[rank]}: {cause}; the job ends, "
        "continue with --resume")  # fmt: skip

    def _print(self, text: str) -> None:
        """Print with one unbuffered write, because the process may have only milliseconds left."""
        os.write(2, f"halograd: {text}\n".encode())

    def log(self, rank: int, cause: str) -> None:
        """Append a line ``failed`` to the log, if possible."""
        step = 0 if self._pulse is None else self._pulse.step
        entry = {"event": "failed", "rank": rank, "host": self._hosts[rank], "cause": cause, "at_step": step}
        with contextlib.suppress(OSError):  # no log yet, or no disk: the message was printed
            append(self._log, entry)

    def _is_first_interrupted(self) -> bool:
        """Log an interrupt, unless another rank has logged one; return whether this rank's line is the first."""
        reason = f"SIGINT to rank {self._comm.rank} of {self._comm.size}"
        try:
            if not interrupts(self._log):
                step = 0 if self._pulse is None else self._pulse.step
                entry = {"event": "interrupted", "reason": reason, "host": platform.node(), "at_step": step}
                append(self._log, entry)
            return bool(interrupts(self._log)[0]["reason"] == reason)
        except (OSError, IndexError):  # full disk: a message from two ranks is better than none
            return True

    def end(self) -> None:
        """End the job. Does not return."""
        time.sleep(FORWARDING)
        # MPI_Abort may fail or hang.
        last = threading.Timer(LAST, os._exit, (1,))
        last.daemon = True
        last.start()
        self._comm.abort(1)

    def leave(self) -> None:
        """End this process, because the rank that reported the fault could not end the job. Does not return."""
        os._exit(1)


def unwatched(tree: Tree, joined: list[set[int]]) -> str:
    """Return a text on the ranks that rank 0 does not watch; empty if it watches all. Local."""
    reached = set(tree.reached(0, joined))
    missing = [rank for rank in tree.order if rank not in reached]
    if not missing:
        return ""
    return (
        f"rank {missing[0]} on {tree.hosts[missing[0]]} ({len(missing)} in all) cannot reach rank 0 on "
        f"{tree.hosts[0]} and is not watched"
    )


def oom_kills() -> int:
    """Return the number of processes that this node, or its container, has killed because memory ran out. Local."""
    for path, key in (("/sys/fs/cgroup/memory.events", "oom_kill"), ("/proc/vmstat", "oom_kill")):
        try:
            lines = Path(path).read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, value = line.partition(" ")
            if name == key and value.strip().isdigit():
                return int(value)
    return 0


def append(log: Path, entry: dict[str, Any]) -> None:
    """Append a line to an existing log in one write, so that lines of several ranks do not mix."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(descriptor, (json.dumps({**entry, "time": round(time.time(), 3)}) + "\n").encode())
    finally:
        os.close(descriptor)


def interrupts(log: Path) -> list[dict[str, Any]]:
    """Return the lines ``interrupted`` of the latest job in the last `TAIL` bytes of its log."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL))
        lines = file.read().decode(errors="replace").splitlines()
    found: list[dict[str, Any]] = []
    for line in lines:
        if line.startswith('{"event": "begin"'):
            found.clear()
        elif line.startswith('{"event": "interrupted"'):
            found.append(json.loads(line))
    return found
