"""The directory of a run. One run at a time holds it through ``run.lock``, which names its owner.

Rank 0 creates the lock before anything else is written, touches it every few seconds, and removes it at the end. A run
takes over the lock of a killed run:

| owner | taken over |
|---|---|
| the same batch job, before it was requeued | at once |
| a process of this machine (and of this container) | if the process is gone |
| any other process, such as one on another node | if it no longer touches the lock |

The lock only needs to create, rename and touch a file, because shared file systems often have no other locks. A run
that lost its lock while it was stopped or cut off detects this before its next checkpoint, and ends.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import platform
import re
import stat
import threading
import time
import uuid
import zlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType

from halograd.documents import writing
from halograd.errors import UserError

__all__ = ["Owner", "RunLock", "checkpoint_of", "job_id", "make_folder", "process_scope"]

BEAT = 10.0  # time between two touches of an owner [s]
POLL = 0.5  # time between two readings of the lock of another run [s]
ENDING = 5.0  # time for a process of this machine to end [s]
SILENCE = 60.0  # an owner on another machine is gone if it has not touched the lock for this time [s]
OLD = 900.0  # an older lock is taken over without waiting: clocks of nodes differ by less than this [s]

#: Environment variables with the number of a batch job.
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")

#: Content of ``latest.h5`` and ``best.h5``.
_POINTER = re.compile(r"(step-\d+\.h5)\n?")

_log = logging.getLogger(__name__)


def checkpoint_of(path: Path) -> Path:
    """Return the checkpoint that ``latest.h5`` or ``best.h5`` names, else the path itself, with links resolved. Local.

    These are text files with the name of a file in their folder, because many file systems have no symbolic links.
    Older versions created links.
    """
    checkpoint = Path(os.path.realpath(path))
    with contextlib.suppress(OSError, UnicodeDecodeError):  # opening the file will report the error
        status = os.stat(checkpoint)
        # A name is short: checkpoints themselves are not read here.
        if stat.S_ISREG(status.st_mode) and status.st_size < 256:
            name = _POINTER.fullmatch(checkpoint.read_text(encoding="ascii"))
            return checkpoint if name is None else checkpoint.with_name(name[1])
    return checkpoint


def job_id() -> str | None:
    """Return the ID of the batch job that this process belongs to; None without one. Local."""
    return next((os.environ[name] for name in _JOBS if name in os.environ), None)


def make_folder(path: Path) -> None:
    """Create a folder of a run. Local. Raises UserError if that fails."""
    with writing(f"output.directory {path}"):
        path.mkdir(parents=True, exist_ok=True)


@dataclass(frozen=True)
class Owner:
    """Process that holds a directory; empty for a lock that cannot be read.

    Attributes
    ----------
    key
        Random string, different for every run.
    place
        Scope of process IDs: boot of the kernel, and namespace.
    started
        Start time of the process in the kernel's unit (clock ticks after the boot); empty if unknown.
    job, restarts
        Job of the batch system, and the number of times that it was requeued.
    """

    key: str = ""
    host: str = ""
    place: str = ""
    process: int = 0
    started: str = ""
    job: str = ""
    restarts: int = 0

    @classmethod
    def this(cls) -> Owner:
        """Return the owner for this process."""
        pid = os.getpid()
        # Slurm sets the count only after a requeue.
        restarts, started = os.environ.get("SLURM_RESTART_COUNT", ""), _started(pid) or ""
        requeued = int(restarts) if restarts.isdecimal() else 0
        return cls(uuid.uuid4().hex, platform.node(), process_scope(), pid, started, job_id() or "", requeued)

    @classmethod
    def parse(cls, text: str) -> Owner:
        """Return the owner in the text of a lock; an empty owner if the text is not that of a lock."""
        try:
            parsed = json.loads(text)
            owner = cls(**{field.name: parsed[field.name] for field in fields(cls)})
        except (ValueError, KeyError, TypeError, RecursionError):
            return cls()
        typed = all(type(getattr(owner, field.name)) is type(field.default) for field in fields(cls))
        # `os.kill` takes 0 and negative numbers for groups of processes.
        return owner if typed and 0 < owner.process < 1 << 31 else cls()

    def here(self, other: Owner) -> bool:
        """Return whether `other` runs in the scope of this owner's process IDs."""
        return bool(self.place) and (self.place, self.host) == (other.place, other.host)

    def gone(self, me: Owner) -> str | None:
        """Return the reason why this owner has ended; None if it runs, or if that cannot be known here."""
        if self.job and self.job == me.job and self.restarts < me.restarts:
            return "the job was requeued"
        if self.here(me) and not _alive(self.process, self.started):
            return "its process is gone"
        return None

    def __str__(self) -> str:
        if not self.key:
            return "an unknown process"
        return f"process {self.process} on {self.host}" + (f" (job {self.job})" if self.job else "")


class RunLock:
    """Lock of the directory of a run, from `acquire` to the end of the ``with`` block. Local; rank 0 acquires.

    Parameters
    ----------
    directory
        Directory of the run; `acquire` creates it if it is missing. If it was missing and is empty at the end, it is
        removed.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / "run.lock"
        self._me = Owner.this()
        self._created_folder = self._held = False
        self._folder: int | None = None  # descriptor of the directory, valid even if it is moved
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run lock", daemon=True)

    def acquire(self) -> None:
        """Take the directory; wait until it is free, or its owner is known to be gone.

        Raises
        ------
        UserError
            If another run uses the directory, or it cannot be created.
        OSError
            If no file can be created in it.
        """
        self._created_folder = not self.path.parent.exists()
        make_folder(self.path.parent)
        self._folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        begun, first = time.monotonic(), None
        while not self._create(self.path):
            seen = self._look()
            if seen is None:
                continue  # the owner has released it
            owner = Owner.parse(seen[0])
            reason = self._reason(owner, seen, first or seen, time.monotonic() - begun)
            if reason is not None and self._replace(seen[0]):
                _log.warning("%s: taken over from %s: %s", self.path, owner, reason)
                break
            if first is None and reason is None and not owner.here(self._me):
                _log.warning("%s: held by %s; waiting up to %g s for a sign that it runs", self.path, owner, SILENCE)
            # Later readings are compared with the first one: has the owner touched the lock since?
            first = first or seen
            time.sleep(POLL)
        self._held = True
        self._thread.start()

    def _reason(self, owner: Owner, seen: tuple[str, float], first: tuple[str, float], waited: float) -> str | None:
        """Return the reason to take the lock over; None to read it again. Raises UserError if the owner runs."""
        reason = owner.gone(self._me)
        if reason is not None:
            return reason
        if owner.here(self._me):
            if waited >= ENDING:
                raise self._in_use(owner)
        # The owner has touched the lock since the first reading, or another run has replaced it.
        elif seen != first:
            raise self._in_use(owner)
        elif time.time() - seen[1] >= OLD or waited >= SILENCE:
            return "it no longer touches the lock"
        return None

    def _in_use(self, owner: Owner) -> UserError:
        return UserError(
            f"output.directory: expected one that no other run writes to, got {self.path.parent}, held by {owner}; "
            f"wait until it ends, choose another directory, or, if you know that it is gone, remove {self.path}"
        )

    def check(self) -> None:
        """Check, before a write, that directory and lock still belong to this run. Local; no-op without the lock.

        Raises
        ------
        UserError
            If another run has taken the directory over, or it was removed or moved.
        """
        if not self._held:
            return
        if not self._stays():
            raise UserError(
                f"output.directory: expected {self.path.parent} to stay while a run writes to it, got one that was "
                "removed or moved; the run ends here: move it back and continue with --resume, or start a new run"
            )
        with contextlib.suppress(OSError):  # the next write will report the disk error
            seen = self._look()
            if seen is None:  # removed by hand
                self._create(self.path)
                seen = self._look()
            owner = self._me if seen is None else Owner.parse(seen[0])
            if owner != self._me:
                raise UserError(
                    f"output.directory: {self.path.parent} was taken over by {owner}, because this run did not touch "
                    "its lock; this run ends here"
                )

    def _stays(self) -> bool:
        """Return whether the directory still has its name; its open descriptor keeps the inode number in use."""
        try:
            return self._folder is None or os.path.samestat(os.stat(self.path.parent), os.fstat(self._folder))
        except FileNotFoundError:
            return False
        except OSError:  # the next write will report the disk error
            return True

    def _create(self, path: Path) -> bool:
        """Create a file that names this run; return whether the name was free."""
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(asdict(self._me), file)
        except OSError:
            # A lock without text names no owner, so no run could find out that its owner is gone.
            path.unlink(missing_ok=True)
            raise
        return True

    def _replace(self, text: str) -> bool:
        """Replace the lock with content `text` by this run's lock; return False if another run claimed, replaced or
        released it first.

        A claim is a file that names the run which may replace this lock; only the run that creates it may. If that run
        is killed before it removes the claim, another run removes the claim after `SILENCE`.
        """
        # Its name has a checksum of the old lock, so all runs that read the same lock compete for one file.
        claim = self.path.with_name(f"run.lock.{zlib.crc32(text.encode()):08x}")
        if not self._create(claim):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - claim.lstat().st_mtime >= SILENCE:
                    claim.unlink()
            return False
        seen = self._look()
        # Another run replaced or released the lock after this run had read it.
        if seen is None or seen[0] != text:
            claim.unlink()
            return False
        os.replace(claim, self.path)  # the claim names this run, so it becomes the lock
        return True

    def _look(self) -> tuple[str, float] | None:
        """Return the text of the lock, and the time of its last touch [s]; None if there is no lock.

        Raises
        ------
        OSError
            If it is not a regular file: a dangling link exists, but cannot be read.
        """
        no_lock = OSError(errno.EINVAL, "no regular file, so not a lock of a run; remove it", str(self.path))
        try:
            # Open it, because NFS then queries the server; non-blocking, in case it is a pipe.
            name = self.path if self._folder is None else self.path.name
            descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=self._folder)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO) and not self.path.is_symlink():
                raise
            raise no_lock from error
        try:
            state = os.fstat(descriptor)
            if not stat.S_ISREG(state.st_mode):
                raise no_lock
            return os.read(descriptor, 1 << 16).decode(errors="replace"), state.st_mtime
        finally:
            os.close(descriptor)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT):
            with contextlib.suppress(OSError):
                # A run that was suspended must not touch the lock of the run that has taken over.
                if self._is_mine():
                    os.utime(self.path.name, dir_fd=self._folder)

    def _is_mine(self) -> bool:
        seen = self._look()
        return seen is not None and Owner.parse(seen[0]) == self._me

    def release(self) -> None:
        """Release the directory; idempotent."""
        if self._held:
            self._held = False
            self._ended.set()
            # With a limit: the thread may hang in a call of the file system.
            self._thread.join(BEAT)
            with contextlib.suppress(OSError):
                # Another run may have taken the lock over while this one was suspended.
                if self._is_mine():
                    os.unlink(self.path.name, dir_fd=self._folder)
        if self._created_folder and self._stays():
            with contextlib.suppress(OSError):  # the directory is not empty
                self.path.parent.rmdir()
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def process_scope() -> str:
    """Return a string for the scope of process IDs: boot of the kernel, and namespace; empty if unknown. Local."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """Return the start time of a process; "" if it is a zombie, None if it is not visible."""
    try:
        # The name of the program is in parentheses, and may contain spaces and ")". The start time is field 22.
        state, *rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return "" if state in "ZX" else rest[18]


def _alive(pid: int, started: str) -> bool:
    """Return whether the process with this start time still runs, or may run because its start time is not visible."""
    try:
        # Signal 0 is not delivered: only the existence of the process is checked.
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the process of another user exists
        pass
    start = _started(pid)
    return start is None or start == started
