"""End of a run that makes no progress, with the position of every rank; report of an interrupt.

The main thread records its position (:class:`Heartbeat`). A thread of each rank compares this position with the one a
second ago:

========================= ==========================================================================================
progress                  a timer of `faulthandler` is set anew: a C thread that writes all stacks and ends the
                          process, also if a call holds the interpreter's lock
none for some seconds     the rank writes its position to a file of its own, in the folder ``stalls`` of the run
none for the time limit   the first rank that can do so reads these files, prints and logs the rank that blocks the
                          others, and ends the job; every other rank ends itself
========================= ==========================================================================================

Nothing is sent over a network, and no file is written while ranks make progress. A rank that is stopped, killed or
locked writes no position: the others, which wait for it, end. The launcher then ends the remaining processes. A rank
that is killed or crashes is reported at once by a process per node (:mod:`halograd.training.process_monitor`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from halograd.errors import UserError

from .. import comm as comm_package
from ..comm.boot import on_interrupt
from ..comm.errors import is_agreed, mark_agreed
from .directory import process_scope
from .log import Entry, parse_line
from .process_monitor import TAIL, MonitoredRanks, append_line, start_monitor

if TYPE_CHECKING:
    from ..comm import Communicator

__all__ = ["STALLS", "Heartbeat", "Position", "Watchdog", "describe_stall", "read_positions"]

STALLS = "stalls"  # folder in the directory of a run
SHOWN = 4  # maximum number of ranks that a message names
INTERVAL = 1.0  # time between two readings of the main thread's state [s]
LONGEST = 5.0  # maximum time that is counted between two readings; the process was stopped for the rest [s]
QUIET = 10.0  # time without progress until a rank writes its position [s]
# Times after the limit [s]: 32 ranks may print the message, one after the other; then the timers end locked ranks; then
# the rank that has printed aborts the job, which ends stopped ranks too; then the other ranks' timers end them.
PRINTING, PRINTERS = 0.05, 32
LOCKED = 4.0
ABORT = 4.5
LAST = 6.0
SUSPENDING = 5.0  # time after SIGTSTP within which Slurm stops a job [s]
BLANK = b" " * 8191 + b"\n"  # holds a position and some stacks
_NAME = re.compile(r"rank-(\d+)\.(.*)\.(\d+)\.txt")  # rank, host and process: launchers name the process
_COMM = str(Path(comm_package.__file__).parent)

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Heartbeat:
    """Progress of the main thread: the main thread writes it, the thread of the watchdog reads it. Local.

    A write is one store per attribute: no lock, no system call, no array. A reader may get a new phase with the old
    layer, once.

    Attributes
    ----------
    step
        Number of updates.
    count
        Number of forward and backward passes, including validation.
    phase
        ``"forward"``, ``"backward"``, ``"data"``, ``"checkpoint"``, ...
    location
        Name of the layer, or of another activity.
    """

    step: int = 0
    count: int = 0
    phase: str = "start"
    location: str = ""

    def at(self, phase: str, location: str) -> None:
        """Record the start of an activity of the main thread: its phase, and its layer or another name."""
        self.phase, self.location = phase, location


@dataclass(frozen=True)
class Position:
    """Process of a rank, and its position in the program.

    Attributes
    ----------
    host, process
        Name of the rank's node, and process ID there.
    step, phase, layer
        Number of updates; ``"forward"``, ``"backward"``, ``"data"``, ..., empty if the position is not known; name of
        the layer, empty outside of layers.
    waiting, ranks
        ``"kind: name"`` of the exchange or sum that the rank waits for (``"another rank"`` if unknown), and the other
        ranks that take part; empty if it does not wait.
    line
        Line of code that its main thread executes; ``"Fatal Python error: ..."`` if it crashed.
    since
        Time of the last progress [s], as in `time.time`.
    """

    host: str
    process: int
    step: int = 0
    phase: str = ""
    layer: str = ""
    waiting: str = ""
    ranks: Sequence[int] = ()
    line: str = ""
    since: float = 0.0

    def text(self) -> str:
        """Return a string that describes the position."""
        where = f"step {self.step + 1}, {self.phase}" + (f" of layer {self.layer!r}" if self.layer else "")
        waits = f", waiting for {self.waiting!r}" if self.waiting else ", not in an exchange"
        return f"{where}{waits}{_of_ranks(self.ranks)} (at {self.line})"


def _of_ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return ""
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return f" with rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:SHOWN]))}{more}"


def describe_stall(positions: Mapping[int, Position]) -> tuple[int, str]:
    """Return the rank that blocks the other ranks, and a string with the reason.

    It is a rank that crashed; else one whose position is not known, if possible one that another rank waits for; else
    the rank that is in no exchange; else the rank with the least progress.
    """
    known = {rank: position for rank, position in sorted(positions.items()) if position.phase}
    awaited = {rank for position in known.values() for rank in position.ranks}
    unknown = positions.keys() - known.keys()
    # Crashed ranks, which have a line, come first; then those that others wait for.
    silent = sorted(unknown, key=lambda rank: (not positions[rank].line, rank not in awaited, rank))
    if silent:
        culprit = silent[0]
        text = "it does not respond (killed, stopped, in a call that locks the interpreter, or its node hangs)"
        text = positions[culprit].line or text
    else:
        culprit = min(known, key=lambda rank: (bool(known[rank].waiting), known[rank].step, known[rank].since))
        text = known[culprit].text()
    others = [f"rank {rank} on {other.host}: {other.text()}" for rank, other in known.items() if rank != culprit]
    if others:
        more = f"; and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
        text += f". The others: {'; '.join(others[:SHOWN])}{more}"
    return culprit, text


def read_positions(folder: Path) -> dict[int, Position]:
    """Return the position of each rank that has a file; only its process if it has written no position. Local.

    A rank has a file while it runs; the file of a killed rank stays.
    """
    positions: dict[int, Position] = {}
    for path in sorted(folder.glob("rank-*.txt")):
        name = _NAME.fullmatch(path.name)
        if name is not None:
            positions[int(name[1])] = _read_position(path, Position(name[2], int(name[3])))
    return positions


def _read_position(path: Path, silent: Position) -> Position:
    with contextlib.suppress(OSError, ValueError, TypeError):
        with path.open("rb") as file:
            line = file.readline(TAIL)
        if line.startswith(b"Fatal Python error"):
            return replace(silent, line=line.decode(errors="replace").strip())
        if line.endswith(b"\n"):
            return Position(**json.loads(line))
    return silent


class _StallFile:
    """File of one rank: blank while the rank makes progress, else a line with its position, then stacks. Local.

    Its disk space is allocated first, so that the position can be written on a full disk: a rank without a position
    would be reported as the one that does not respond.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.descriptor, self.written = path, 2, False
        with contextlib.suppress(OSError):  # the folder is not shared with this node: stacks go to stderr
            self.descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o644)
        self.clear()
        self._catches = self.shared and not faulthandler.is_enabled()
        if self._catches:  # a crash (SIGSEGV, SIGBUS, SIGABRT, ...) leaves its stacks here
            faulthandler.enable(self.descriptor)

    @property
    def shared(self) -> bool:
        """Whether the file is in the directory of the run."""
        return self.descriptor != 2

    def write(self, position: Position) -> None:
        """Write the position, and make it visible on other nodes."""
        self.written = True
        if self.shared:
            with contextlib.suppress(OSError):
                os.write(self.descriptor, json.dumps(asdict(position)).encode() + b"\n")
                os.fsync(self.descriptor)

    def clear(self) -> None:
        """Remove the position: the rank makes progress again."""
        self.written = False
        if self.shared:
            with contextlib.suppress(OSError):
                # Overwritten first, so that its disk space stays allocated; only later stacks are cut off.
                os.pwrite(self.descriptor, BLANK, 0)
                os.lseek(self.descriptor, 0, os.SEEK_SET)
                os.ftruncate(self.descriptor, len(BLANK))

    def remove(self) -> None:
        """Remove the file, and the folder if it is the last one."""
        if self.shared:
            if self._catches:
                faulthandler.disable()
            os.close(self.descriptor)
            with contextlib.suppress(OSError):
                self.path.unlink()
                self.path.parent.rmdir()


class Watchdog:
    """Context manager that ends the job if it makes no progress, and reports an interrupt (SIGINT).

    Entering and leaving the ``with`` block is local. After an interrupt, a single process raises KeyboardInterrupt with
    the message.

    Parameters
    ----------
    comm
        All ranks of the job.
    stall_minutes
        Maximum time without progress [min]; 0: no limit.
    log
        Path of ``log.jsonl`` of the run, to which a line ``"failed"`` or ``"interrupted"`` is appended when the job is
        ended.
    newest
        Function that returns the newest checkpoint, for the message on how to continue.
    """

    def __init__(self, comm: Communicator, stall_minutes: float, log: Path, newest: Callable[[], Path | None]) -> None:
        self._comm, self._patience, self._log, self._newest = comm, 60 * stall_minutes, log, newest
        self._main = threading.get_ident()
        self._heartbeat: Heartbeat | None = None
        self._thread: threading.Thread | None = None
        # A lock that one thread may take twice: the handler of SIGTSTP interrupts the main thread, perhaps in `_arm`.
        self._closing, self._arming, self._quiet_until = threading.Event(), threading.RLock(), 0.0
        self._handler: Any = None  # handler of SIGTSTP before
        self._monitor: subprocess.Popen[bytes] | None = None
        self._reporting = on_interrupt(self.interrupted)

    def follow(self, heartbeat: Heartbeat) -> None:
        """Watch the progress of the main thread, and log errors and interrupts, from now on. Collective.

        Without a limit (`stall_minutes` = 0), the progress is not watched.
        """
        self._heartbeat = heartbeat
        if not self._patience:
            return
        comm, folder = self._comm, self._log.with_name(STALLS)
        with contextlib.suppress(OSError):
            if comm.rank == 0:
                _clear(folder)
                folder.mkdir(exist_ok=True)
        # A rank creates its file after rank 0 has removed those of the job before: the first exchange orders them.
        ranks = comm.allgather_objects((platform.node(), process_scope(), os.getpid()))
        names = [f"rank-{rank:05d}.{host}.{process}.txt" for rank, (host, _, process) in enumerate(ranks)]
        self._hosts = [host for host, *_ in ranks]
        self._file = _StallFile(folder / names[comm.rank])
        self._seen = [rank for rank, shared in enumerate(comm.allgather_objects(self._file.shared)) if shared]
        # A process ID is valid on one node, in one namespace: a monitor watches the ranks of its own.
        mine = ranks[comm.rank][:2]
        node = {rank: (ranks[rank][2], str(folder / names[rank])) for rank in self._seen if ranks[rank][:2] == mine}
        if comm.size > 1 and mine[1] and comm.rank == min(node, default=None):
            self._monitor = start_monitor(MonitoredRanks(str(self._log), mine[0], comm.size, len(self._seen), node))
        # Only the main thread can set handlers; one of the user stays.
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
            self._handler = signal.signal(signal.SIGTSTP, self._suspend)
        self._arm(self._patience + LOCKED)
        self._thread = threading.Thread(target=self._run, name="halograd-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching; idempotent. Local."""
        self._closing.set()
        if self._thread is not None:
            # First, because the thread sets the timer anew.
            self._thread.join()
            self._thread = None
            if self._handler is not None:
                signal.signal(signal.SIGTSTP, self._handler)
            faulthandler.cancel_dump_traceback_later()
            self._file.remove()
        if self._monitor is not None:
            self._monitor.terminate()
            self._monitor.wait()
            self._monitor = None

    def __enter__(self) -> Watchdog:
        self._reporting.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reporting.__exit__(None, None, None)
        self.close()
        if isinstance(error, KeyboardInterrupt):
            interrupt = KeyboardInterrupt(self.interrupted() or "interrupted")
            mark_agreed(interrupt, True, self._comm.size)
            raise interrupt from error
        # The job ends with this process. A user's mistake before the job begins is not logged: the log belongs to an
        # earlier job, which may be running.
        alone = error is not None and not is_agreed(error, self._comm.size)
        if alone and not (self._heartbeat is None and isinstance(error, UserError)):
            cause = f"{type(error).__name__}: {error}"
            self._log_first("failed", rank=self._comm.rank, host=platform.node(), cause=cause)

    # -- progress --------------------------------------------------------------------------------

    def _state(self) -> object:
        """Return a value that changes when the main thread makes progress."""
        heartbeat = self._heartbeat or Heartbeat()
        return heartbeat.step, heartbeat.count, heartbeat.phase, heartbeat.location, self._comm.instruments.waiting

    def _position(self, since: float) -> Position:
        """Return the position of this rank, with the main thread's line of code; `since` as in :class:`Position`."""
        heartbeat, meter, frame = self._heartbeat or Heartbeat(), self._comm.instruments.waiting, None
        frame = sys._current_frames().get(self._main)
        line = "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        ranks = [] if meter is None else [rank for rank in meter.ranks if rank != self._comm.rank]
        waiting = meter.label if meter is not None else "another rank" if _in_comm(frame) else ""
        here = platform.node(), os.getpid()
        return Position(*here, heartbeat.step, heartbeat.phase, heartbeat.location, waiting, ranks, line, since)

    def _arm(self, seconds: float) -> None:
        """Set the timer that ends this process after `seconds` [s], with all stacks in its file; no-op for a while
        after SIGTSTP.
        """
        with self._arming:
            if time.monotonic() >= self._quiet_until:
                faulthandler.dump_traceback_later(seconds, exit=True, file=self._file.descriptor)

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        """Cancel the timer (SIGTSTP: Ctrl-Z, or Slurm, which stops a job two seconds later); otherwise the timer would
        end the job when the job continues. A single process stops.
        """
        with self._arming:
            self._quiet_until = time.monotonic() + SUSPENDING
            faulthandler.cancel_dump_traceback_later()
        if self._comm.size == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    def _run(self) -> None:
        # A short limit needs shorter intervals.
        interval, before, idle, since = min(INTERVAL, self._patience / 8), None, 0.0, time.time()
        ticked = time.monotonic()
        while not self._closing.wait(interval):
            now, state = time.monotonic(), self._state()
            # In a longer gap, this process was stopped, or the machine suspended: it could make no progress.
            idle += min(now - ticked, LONGEST)
            ticked = now
            if state != before:
                before, idle, since = state, 0.0, time.time()
                self._arm(self._patience + LOCKED)
                if self._file.written:
                    self._file.clear()
            elif idle > self._patience:
                self._end(since)
            elif idle > min(QUIET, self._patience / 4) and not self._file.written:
                self._file.write(self._position(since))

    # -- the end ---------------------------------------------------------------------------------

    def _end(self, since: float) -> None:
        """Report the rank that blocks the others, unless another rank does, and end this process. Does not return."""
        # What follows may hang on a file system: the process ends nevertheless.
        self._arm(LAST)
        faulthandler.dump_traceback(self._file.descriptor)
        # One rank after the other, so that later ranks see in the log that an earlier one has reported.
        time.sleep(PRINTING * min(self._comm.rank, PRINTERS))
        if self._report(since):
            self._arm(LAST)
            time.sleep(ABORT)
            self._comm.abort(1)
        # Meanwhile the timer or the abort of another rank ends this process.
        time.sleep(2 * LAST)

    def _report(self, since: float) -> bool:
        """Print and log the rank that blocks the others; return False if another rank does."""
        if _latest(self._log, "failed"):
            return False
        written, mine = read_positions(self._log.with_name(STALLS)), self._comm.rank
        positions = {rank: written.get(rank, Position(self._hosts[rank], 0)) for rank in self._seen}
        rank, text = describe_stall({**positions, mine: self._position(since)})
        cause = f"no progress for {self._patience / 60:.3g} min: {text}"
        host, size, stacks = self._hosts[rank], self._comm.size, self._log.with_name(STALLS)
        if not self._log_first("failed", rank=rank, host=host, cause=cause):
            return False
        text = f"rank {rank} of {size} on {host}: {cause}; the job ends, its stacks are in {stacks}"
        os.write(2, f"halograd: {text}, continue with --resume\n".encode())  # one write, past all buffers
        return True

    def interrupted(self) -> str | None:
        """Log an interrupt; return the line to print, or None if another rank prints it. Local, in any thread."""
        text = "interrupted before the first step"
        # Before `follow`, the log may belong to an earlier job.
        if self._heartbeat is not None:
            text = f"interrupted at step {self._heartbeat.step + 1}"
            reason = f"SIGINT to rank {self._comm.rank} of {self._comm.size}"
            if not self._log_first("interrupted", reason=reason, host=platform.node()):
                return None
        latest = self._newest()
        if latest is None:
            return f"{text}; there is no checkpoint to go on from"
        return f"{text}; the newest checkpoint is {latest.resolve()}; go on with --resume"

    def _log_first(self, event: str, **values: Any) -> bool:
        """Append a line to the log, unless another rank has logged this event; return whether it is the first one."""
        by, step = self._comm.rank, 0 if self._heartbeat is None else self._heartbeat.step
        try:
            if not _latest(self._log, event):
                append_line(self._log, {"event": event, **values, "at_step": step, "by": by})
            # Several ranks may have appended a line: the first line decides.
            return bool(_latest(self._log, event)[0]["by"] == by)
        except (OSError, LookupError):  # no log yet, or no disk: messages from two ranks are better than none
            return True


def _clear(folder: Path) -> None:
    """Remove the files of a killed job; warn if a rank of it had crashed, or made no progress when it was killed."""
    positions = read_positions(folder)
    if any(position.line for position in positions.values()):
        rank, text = describe_stall(positions)
        _log.warning("the job before ended without progress: rank %d on %s: %s", rank, positions[rank].host, text)
    for path in folder.glob("rank-*.txt"):
        path.unlink()


def _in_comm(frame: FrameType | None) -> bool:
    """Return whether a thread is in a function of the package `comm`, where it may wait for other ranks."""
    while frame is not None and not frame.f_code.co_filename.startswith(_COMM):
        frame = frame.f_back
    return frame is not None


def _latest(log: Path, event: str) -> list[Entry]:
    """Return the lines of an event of the latest job in the last `TAIL` bytes of `log`; none without a log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL))
            entries = [parse_line(line) for line in file.read().splitlines()]
    except OSError:
        return []
    matching: list[Entry] = []
    for entry in filter(None, entries):
        # The end of the log may have lines of earlier jobs.
        if entry["event"] == "begin":
            matching.clear()
        elif entry["event"] == event:
            matching.append(entry)
    return matching
