"""Watches over the ranks of a run: a rank that dies or does not move ends the job, with a message that says which.

A thread on every rank looks once a second at where the main thread is (:class:`~halograd.training.pulse.Pulse`), and
keeps a line to rank 0 (:mod:`halograd.training.peers`). The main thread does nothing for it but note the layer.

- The line of a rank ends without a word: its process was killed, or its node is gone. Rank 0 says so at once and ends
  the job; launchers that do not notice (srun without ``--kill-on-bad-exit``) would wait for ever. If it is rank 0 that
  is gone, the others say so.
- A rank has been at one place for longer than allowed: rank 0 asks all ranks where they are, says who waits for whom,
  and ends the job.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from halograd.comm import Communicator
from halograd.comm.errors import is_agreed
from halograd.data.errors import DataError
from halograd.errors import UserError
from halograd.training.log import read_log
from halograd.training.peers import Line, Listener, Peers, connect
from halograd.training.pulse import Pulse
from halograd.training.stall import Place, describe_stall

__all__ = ["Watchdog"]

INTERVAL = 1.0  # between two looks [s]
ANSWERS = 3.0  # how long ranks are given to say where they are [s]
TURN = 2.5  # how long other ranks leave it to rank 1 to say that rank 0 is gone [s]
FORWARDING = 0.5  # for the launcher to pass on what was said: to abort takes its relay along [s]
LAST = 2.0  # until a rank ends itself when all is said [s]
GRACE = 8.0  # for a rank with an error of its own to end the job itself: the command line takes 5 of them [s]


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
    One connection per rank to rank 0. If one cannot be made, rank 0 says so, and that rank is not watched from outside.
    """

    def __init__(self, comm: Communicator, stall_minutes: float, log: Path) -> None:
        self._comm, self._patience, self._log = comm, 60 * stall_minutes, log
        self._pulse: Pulse | None = None
        self._hosts: list[str] = comm.allgather_objects(platform.node())
        self._main = threading.get_ident()
        self._before: tuple[Any, ...] | None = None
        self._since = self._complained = time.monotonic()
        self._over = False  # somebody ends the job already
        self._deadline = math.inf
        self._closing = False
        self._places: dict[int, Place] = {}
        self._peers = Peers(self._connect(), self._told, self._ended)
        self._oom_kills = oom_kills()
        self._thread = threading.Thread(target=self._run, name="halograd-watchdog", daemon=True)
        self._thread.start()

    def follow(self, pulse: Pulse) -> None:
        """From now on this has to move. Local."""
        self._pulse = pulse

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
            # Others find out when this process ends the job; rank 0 logs why.
            refused = self._pulse is None and isinstance(error, (UserError, DataError))
            self._last_words(f"{type(error).__name__}: {error}", logged=not refused)
        self.close()

    # -- lines ---------------------------------------------------------------------------------

    def _connect(self) -> dict[int, Line]:
        """Lines to rank 0, or from it to all others. Collective."""
        comm, listener = self._comm, None
        if comm.size == 1:
            return {}
        if comm.rank == 0:
            try:
                listener = Listener(everywhere=len(set(self._hosts)) > 1)
            except OSError as error:
                self._say(f"no rank is watched: {error}")
        where = comm.bcast(listener.where if listener else None)
        if where is None:
            return {}
        if listener is None:
            line = connect(where, comm.rank)
            return {} if line is None else {0: line}
        lines = listener.accept(set(range(1, comm.size)))
        listener.close()
        missing = sorted(set(range(1, comm.size)) - lines.keys())
        if missing:
            self._say(f"rank {missing[0]} on {self._hosts[missing[0]]} ({len(missing)} in all) cannot reach rank 0 on "
                      f"{self._hosts[0]} and is not watched")  # fmt: skip
        return lines

    def _told(self, rank: int, message: dict[str, Any]) -> None:
        """A message came."""
        kind = message.get("kind")
        if kind == "where":  # rank 0 asks
            self._peers.send(kind="place", **self._place().as_dict())
        elif kind == "place":
            self._places[rank] = Place.from_dict(message)
        elif kind == "stalled" and not self._over:
            self._report_stall()
        elif kind == "dying" and not self._over:
            self._announce_end(GRACE)
            if message.get("logged"):
                self._write(rank, str(message.get("cause")))
        elif kind == "ending":  # rank 0 knows of it: what ends from now on ends because of that
            self._over, self._deadline = True, time.monotonic() + float(message["within"])

    def _ended(self, rank: int, how: str) -> None:
        """The line to a rank ended without a word."""
        if self._over or self._closing:
            return
        self._over = True
        if self._comm.rank > 1:
            time.sleep(TURN)  # rank 1 speaks, if it is alive
            if self._was_said(rank):
                os._exit(1)
        self._end(rank, self._cause(rank, how))

    def _was_said(self, rank: int) -> bool:
        """Whether the log ends with the end of this rank: somebody has spoken, whom this rank has no line to."""
        try:
            entries = read_log(self._log)
        except OSError:
            return False
        return bool(entries) and (entries[-1].get("event"), entries[-1].get("rank")) == ("failed", rank)

    def _cause(self, rank: int, how: str) -> str:
        if how == "lost":
            return "its node does not answer any more"
        if self._hosts[rank] == self._hosts[self._comm.rank] and oom_kills() > self._oom_kills:
            return "it was killed: this node ran out of memory"
        return "its process is gone; it was killed, by hand, by the batch system or for lack of memory"

    def _last_words(self, cause: str, logged: bool) -> None:
        """This rank is about to end the job because of a fault of its own.

        A job that was refused before it began is not `logged`: the log is that of a job before, which may be running.
        """
        if self._comm.rank == 0:
            if not self._over:
                self._announce_end(GRACE)
                if logged:
                    self._write(0, cause)
        else:
            self._peers.send(kind="dying", cause=cause, logged=logged)

    # -- looking -------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            self._peers.wait(INTERVAL)
            if time.monotonic() > self._deadline:
                os._exit(1)  # the rank that had a fault has said so, and could not end the job
            if self._patience and self._pulse is not None and not self._over:
                self._look()

    def _look(self) -> None:
        assert self._pulse is not None
        now, state = time.monotonic(), (*self._pulse.state(), self._comm.waiting)
        if state != self._before:
            self._before, self._since, self._complained = state, now, now
        elif now - self._complained > self._patience:
            self._complained = now  # not again at once
            if self._comm.rank == 0 or not self._peers.lines:
                self._report_stall()
            else:
                self._peers.send(kind="stalled")

    def _place(self) -> Place:
        """Where this rank is."""
        pulse = self._pulse or Pulse()
        frame = sys._current_frames().get(self._main)
        where = "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        idle = time.monotonic() - self._since
        return Place(pulse.step, pulse.phase, pulse.place, self._comm.waiting or "", where, idle)

    def _report_stall(self) -> None:
        """Ask all ranks, say what they said, end the job. On rank 0, or on one that has no line to it."""
        self._over = True
        self._places = {self._comm.rank: self._place()}
        self._peers.send(kind="where")
        deadline = time.monotonic() + ANSWERS
        expected = {self._comm.rank, *self._peers.lines}
        while expected - self._places.keys() and time.monotonic() < deadline:
            self._peers.wait(deadline - time.monotonic())
        told = [self._places.get(rank) for rank in range(self._comm.size)]
        rank, text = describe_stall(self._hosts, told, self._patience)
        self._end(rank, text)

    # -- the end -------------------------------------------------------------------------------

    def _announce_end(self, within: float) -> None:
        """Somebody ends the job, and has said or will say why: nobody else shall.

        A rank that is still there after so many seconds ends itself: to abort ends the others only where the launcher
        sees to it.
        """
        self._over, self._deadline = True, time.monotonic() + within
        if self._comm.rank == 0:
            self._peers.send(kind="ending", within=within)

    def _end(self, rank: int, cause: str) -> None:
        """Say who it was and why, and end the job. Does not return."""
        self._say(f"rank {rank} of {self._comm.size} on {self._hosts[rank]}: {cause}; the job ends, "
                  "go on with --resume")  # fmt: skip
        self._write(rank, cause)
        self._announce_end(LAST)
        time.sleep(FORWARDING)
        # MPI may be in no state to end anything.
        last = threading.Timer(LAST, os._exit, (1,))
        last.daemon = True
        last.start()
        self._comm.abort(1)

    def _say(self, text: str) -> None:
        # One write, past all buffers: the process may have milliseconds left.
        os.write(2, f"halograd: {text}\n".encode())

    def _write(self, rank: int, cause: str) -> None:
        """A line in the log; one write at its end, so that it does not mix with others."""
        step = 0 if self._pulse is None else self._pulse.step
        entry = {"event": "failed", "rank": rank, "host": self._hosts[rank], "cause": cause, "at_step": step}
        entry["time"] = round(time.time(), 3)
        try:
            descriptor = os.open(self._log, os.O_WRONLY | os.O_APPEND)
        except OSError:  # no log yet, or no disk: the message was said
            return
        try:
            os.write(descriptor, (json.dumps(entry) + "\n").encode())
        except OSError:
            pass
        finally:
            os.close(descriptor)


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
