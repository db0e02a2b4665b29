"""Watches over the ranks of a run: a rank that dies or does not move ends the job, with a message that says which.

A thread on every rank looks once a second at where the main thread is (:class:`~halograd.training.stall.Pulse`), and
keeps connections to some of the other ranks (:mod:`halograd.training.peers`); the main thread does nothing for it but
note the layer. :mod:`halograd.training.watch` decides. Launchers that do not notice a dead rank (srun without
``--kill-on-bad-exit``) would wait for ever.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from halograd.errors import UserError

from ..comm import Communicator
from ..comm.errors import is_agreed
from .meeting import join
from .peers import Peers
from .stall import Place, Pulse
from .tree import Tree
from .watch import LAST, Message, Watch

__all__ = ["Watchdog", "oom_kills", "unwatched"]

FORWARDING = 0.5  # for the launcher to pass on what was printed: to abort takes its relay along [s]


class Watchdog:
    """Watches while a ``with`` lasts. Collective over `comm` to make; each rank leaves by itself.

    Parameters
    ----------
    comm
        All ranks of the job.
    stall_minutes
        How long a rank may be at one place; 0: for ever.
    log
        Where a line ``{"event": "failed", ...}`` is appended when the job is ended.

    Notes
    -----
    If some ranks have no connection to rank 0, it says so, and they are not watched from there.
    """

    def __init__(self, comm: Communicator, stall_minutes: float, log: Path) -> None:
        tree = Tree(comm.allgather_objects(platform.node()))
        lines, joined = join(comm, tree)
        self._comm = comm
        self._peers = Peers(lines, self._heard, self._ended)
        self._here = Here(comm, tree.hosts, log, self._peers)
        self._watch = Watch(tree, comm.rank, joined, 60 * stall_minutes, self._here)
        if comm.rank == 0 and (text := unwatched(tree, joined)):
            self._here.print(text)
        self._closing = False
        self._words: tuple[str, bool] | None = None
        self._thread = threading.Thread(target=self._run, name="halograd-watchdog", daemon=True)
        self._thread.start()

    def follow(self, pulse: Pulse) -> None:
        """From now on this has to move. Local."""
        self._here.pulse = pulse

    def expect_end(self) -> None:
        """Announce that this rank ends the job and has said why: no other rank reports it. Local, in any thread."""
        self._words = "", False
        if not self._closing:
            self._peers.wake()

    def close(self) -> None:
        """Watch no more; idempotent. Local."""
        if not self._closing:
            self._closing = True
            self._peers.wake()
            self._thread.join()
            self._peers.close()

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not is_agreed(error, self._comm.size):
            # Other ranks find out when this process ends the job. What is refused before the job begins is not logged:
            # the log is that of a job before, which may be running.
            refused = self._here.pulse is None and isinstance(error, UserError)
            self._words = f"{type(error).__name__}: {error}", not refused
        self.close()

    def _run(self) -> None:
        while not self._closing and self._words is None:
            self._peers.wait(self._watch.tick())
        if self._words is not None:
            self._watch.dying(*self._words)

    def _heard(self, rank: int, message: Message) -> None:
        self._watch.heard(rank, message)

    def _ended(self, rank: int, how: str) -> None:
        self._watch.ended(rank, None if how == "left" else self._here.cause(rank, how))


class Here:
    """What this rank can do: a :class:`~halograd.training.watch.Station`. Local; made by the main thread."""

    def __init__(self, comm: Communicator, hosts: Sequence[str], log: Path, peers: Peers) -> None:
        self.pulse: Pulse | None = None
        self.send = peers.send
        self._comm, self._hosts, self._log = comm, hosts, log
        self._main = threading.get_ident()
        self._oom_kills = oom_kills()

    def state(self) -> object:
        """Everything that the main thread notes."""
        return None if self.pulse is None else (*self.pulse.state(), self._comm.instruments.waiting)

    def place(self, idle: float) -> Place:
        """Step, layer, exchange, and the line of code."""
        pulse = self.pulse or Pulse()
        frame = sys._current_frames().get(self._main)
        where = "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        return Place(pulse.step, pulse.phase, pulse.place, self._comm.instruments.waiting or "", where, idle)

    def cause(self, rank: int, how: str) -> str:
        """Why a connection ended, in words."""
        if how == "lost":
            return "its node does not answer any more"
        if self._hosts[rank] == self._hosts[self._comm.rank] and oom_kills() > self._oom_kills:
            return "it was killed: this node ran out of memory"
        return "its process is gone; it was killed, by hand, by the batch system or for lack of memory"

    def say(self, rank: int, cause: str) -> None:
        """Print which rank it was and why."""
        self.print(f"rank {rank} of {self._comm.size} on {self._hosts[rank]}: {cause}; the job ends, "
                   "go on with --resume")  # fmt: skip

    def print(self, text: str) -> None:
        """Print in one write, past all buffers: the process may have milliseconds left."""
        os.write(2, f"halograd: {text}\n".encode())

    def log(self, rank: int, cause: str) -> None:
        """Append a line; one write at the end of the file, so that it does not mix with others."""
        step = 0 if self.pulse is None else self.pulse.step
        entry = {"event": "failed", "rank": rank, "host": self._hosts[rank], "cause": cause, "at_step": step}
        entry["time"] = round(time.time(), 3)
        try:
            descriptor = os.open(self._log, os.O_WRONLY | os.O_APPEND)
        except OSError:  # no log yet, or no disk: the message was printed
            return
        try:
            os.write(descriptor, (json.dumps(entry) + "\n").encode())
        except OSError:
            pass
        finally:
            os.close(descriptor)

    def end(self) -> None:
        """End the job. Does not return."""
        time.sleep(FORWARDING)
        # MPI may be in no state to end anything.
        last = threading.Timer(LAST, os._exit, (1,))
        last.daemon = True
        last.start()
        self._comm.abort(1)

    def leave(self) -> None:
        """End this process: the rank that had a fault has said so, and could not end the job. Does not return."""
        os._exit(1)


def unwatched(tree: Tree, joined: list[set[int]]) -> str:
    """Which ranks rank 0 does not watch, in words; empty if it watches all. Local."""
    reached = set(tree.reached(0, joined))
    missing = [rank for rank in tree.order if rank not in reached]
    if not missing:
        return ""
    return (
        f"rank {missing[0]} on {tree.hosts[missing[0]]} ({len(missing)} in all) cannot reach rank 0 on "
        f"{tree.hosts[0]} and is not watched"
    )


def oom_kills() -> int:
    """How often this node, as far as it can be seen from here, has killed a process for lack of memory. Local."""
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
