"""Files on disk: HDF5 files opened for reading, with or without file locks, and files that are written atomically."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py

from halograd.documents import bytes_text, one_line, os_reason, replacing, writing
from halograd.errors import UserError

__all__ = [
    "BeingWritten",
    "DataError",
    "NotRegular",
    "atomic_path",
    "check_replaceable",
    "check_writable",
    "open_file",
    "open_to_read",
    "reason_of",
    "regular_size",
]

_log = logging.getLogger(__name__)

_LOCK = re.compile(r"unable to lock file, errno = (\d+)")
# Error if this process has the file open already without locks.
_OPEN_WITHOUT = "flag values don't match"
# flock errors if another process holds the lock; any other error means that the file system has no locks.
_HELD = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES)
_warned = False


class DataError(UserError):
    """Error: data cannot be used, or a file cannot be written."""


class BeingWritten(OSError):
    """Error: another process has the file open for writing."""


class NotRegular(OSError):
    """Error: a path is not a regular file. Opening a pipe blocks, and reading a device may never end."""


_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}


def regular_size(path: Path | str) -> int:
    """Return the size of a regular file [B]. Symbolic links are followed; nothing is opened. Local.

    Raises
    ------
    NotRegular
        The path is not a regular file.
    OSError
        The path does not exist or cannot be examined.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a device")
        raise NotRegular(errno.EINVAL, f"expected a regular file, got {kind}")
    return status.st_size


def open_file(path: Path) -> h5py.File:
    """Open an HDF5 file for reading.

    Raises
    ------
    DataError
        The file is missing, not regular, not readable, not HDF5, truncated, or being written.
    """
    try:
        size = regular_size(path)
    except FileNotFoundError as error:
        raise DataError(
            f"{path}: no such file; correct the path (data.path), or generate it (halograd generate)"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        raise DataError(f"{path}: {reason_of(error)}; correct the path") from error
    try:
        return open_to_read(path)
    except BeingWritten as error:
        raise DataError(
            f"{path}: cannot be opened, another process is writing to it; wait until it is complete, or end it"
        ) from error
    except PermissionError as error:
        raise DataError(f"{path}: cannot be opened, permission denied; make it readable") from error
    except OSError as error:
        number = _errno_of(error)
        reason = None if number is None else os_reason(OSError(number, os.strerror(number)))
        if reason is not None:  # of the system, and not of the file
            raise DataError(f"{path}: cannot be opened, {reason}") from error
        if size == 0 or not h5py.is_hdf5(path):
            raise DataError(f"{path}: expected an HDF5 file, got something else; check the path") from error
        raise DataError(
            f"{path}: cannot be opened ({one_line(error)}); the file is truncated or damaged: write it again"
        ) from error


def open_to_read(path: Path) -> h5py.File:
    """Open an HDF5 file for reading, with a lock if the file system has locks, else without one and with a warning.
    Local.

    A lock keeps other processes from writing while we read. Many Lustre and NFS mounts have no locks, and return one of
    several errors; HDF5 itself handles only one of these. A file that this process has open already without a lock is
    opened without one. The environment variable ``HDF5_USE_FILE_LOCKING`` (``FALSE``: no locks at all) takes
    precedence.

    Raises
    ------
    BeingWritten
        Another process has the file open for writing.
    NotRegular
        The file is not regular.
    OSError
        Any other error of h5py.
    """
    regular_size(path)  # raises for a named pipe, whose opening would block
    try:
        return h5py.File(path, "r", locking="best-effort")
    except OSError as error:
        match = _LOCK.search(str(error))
        if match is not None and int(match[1]) in _HELD:
            raise BeingWritten(int(match[1]), "another process is writing to it") from error
        if match is not None:
            _warn_of_locks(path, int(match[1]))
        elif _OPEN_WITHOUT not in str(error):
            raise
    return h5py.File(path, "r", locking=False)


def _warn_of_locks(path: Path, number: int) -> None:
    """Log a warning, once per process, that the file system has no locks; only messages of rank 0 are shown."""
    global _warned
    if not _warned:
        _log.warning(
            "%s: this file system has no file locks (%s); reading without locks: no program may write to it meanwhile "
            "(HDF5_USE_FILE_LOCKING=FALSE: without this message)",
            path,
            errno.errorcode.get(number, number),
        )
    _warned = True


def reason_of(error: BaseException) -> str:
    """Return the reason of a file error in lower case: the description of the system, else the error's message."""
    return (getattr(error, "strerror", None) or one_line(error)).lower()


_ERRNO = re.compile(r"errno = (\d+),")


def _errno_of(error: OSError | RuntimeError) -> int | None:
    """Return the number of a system error, which HDF5 puts into its message only; None if there is none."""
    hidden = _ERRNO.search(str(error))
    return int(hidden[1]) if hidden else getattr(error, "errno", None)


_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file of this size is not allowed, by the limit of this process (ulimit -f) or the file system",
    errno.ENOENT: "its folder was removed or moved meanwhile",
}


@contextlib.contextmanager
def atomic_path(
    path: str | os.PathLike[str], needed: int = 0, parents: bool = False, remedy: str = "choose another folder"
) -> Iterator[Path]:
    """Yield a temporary path next to `path`; rename it to `path` when the block ends without an error.

    If the block fails, the partial file is removed and an existing file at `path` is not changed. This is
    :func:`halograd.documents.replacing` with a check of the free space, and disk errors raised as DataError.

    Parameters
    ----------
    path : path
        Final name. Its folder must exist, unless `parents`.
    needed : int
        Size of the file to come [B]; an error is raised before the block runs if the disk has less space.
    parents : bool
        Whether to create a missing folder, which is removed again if the block fails.
    remedy : str
        What helps against too little space, in addition to freeing some; a part of the message.

    Raises
    ------
    DataError
        The folder is missing or not writable, the disk is or becomes full, or another disk error occurs.
    """
    final = Path(path)
    with contextlib.ExitStack() as folder:
        if parents:
            with writing(f"cannot write {final}", kind=DataError):
                folder.enter_context(_new_folder(final.parent))
        try:
            _check_location(final, needed, remedy)
            with replacing(final) as partial:
                yield partial
        except (OSError, RuntimeError) as error:  # h5py raises either for a failed write
            reason = _reason(error, final)
            if reason is None:
                raise
            raise DataError(f"cannot write {final}: {reason}") from error


@contextlib.contextmanager
def _new_folder(folder: Path, keep: bool = True) -> Iterator[None]:
    """Create a folder for the block. Remove the new folders if the block fails, or if ``keep=False``."""
    new = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        keep = False
        raise
    finally:
        for path in new if not keep else ():  # the innermost comes first: only empty folders can be removed
            with contextlib.suppress(OSError):  # it is not empty, or does not exist
                path.rmdir()


def check_replaceable(path: str | os.PathLike[str], ours: str, is_ours: Callable[[Path], bool]) -> None:
    """Check early that a file can be written at `path` without replacing a foreign file, unless that file is empty. The
    check leaves no file.

    Parameters
    ----------
    path : path
        Later argument of :func:`atomic_path`, with ``parents``.
    ours : str
        Description of the file that may be replaced, for the message.
    is_ours : function of a path
        Function that returns whether the regular file, or the folder, may be replaced. An OSError means that it may
        not.

    Raises
    ------
    DataError
        The path cannot be written, or a foreign file or folder exists there.
    """
    final = Path(path)
    with contextlib.suppress(OSError, ValueError):  # ValueError: a null character in the name
        if final.is_dir() and is_ours(final):  # before `check_writable`, which refuses folders
            return
    check_writable(final)
    try:
        if regular_size(final) == 0 or is_ours(final):
            return
    except FileNotFoundError:
        return
    except OSError:
        pass
    raise DataError(f"cannot write {path}: expected no file there, or {ours}, got another; give another path")


def check_writable(path: str | os.PathLike[str]) -> None:
    """Check early that a file can be written at `path`, in a folder that may be missing. The check leaves no file.

    Parameters
    ----------
    path : path
        Later argument of :func:`atomic_path`, with ``parents``.

    Raises
    ------
    DataError
        The path cannot be written.
    """
    final = Path(path)
    # The name that `replacing` uses: it may be too long where `final` is not.
    partial = final.with_name(f".{final.name}.{os.getpid()}.partial")
    try:
        with _new_folder(final.parent, keep=False):
            _check_location(final)
            partial.touch()
            partial.unlink()
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):  # of `_check_location`; a DataError is a ValueError
            raise
        raise DataError(f"cannot write {final}: {reason_of(error)}; give another path") from error


def _check_location(final: Path, needed: int = 0, remedy: str = "") -> None:
    if final.is_dir():
        raise DataError(f"cannot write {final}: it is a folder; give the name of a file in it")
    if not final.parent.is_dir():
        raise DataError(f"cannot write {final}: the folder {final.parent} does not exist; make it first")
    free = shutil.disk_usage(final.parent).free
    if needed > free:
        texts = bytes_text(needed), bytes_text(free)
        # Rounded sizes that are equal would explain nothing.
        expected, there = texts if texts[0] != texts[1] else (f"{needed:,} B", f"{free:,} B")
        raise DataError(
            f"cannot write {final}: expected {expected} of free disk, got {there}; free some space, or {remedy}"
        )


def _reason(error: OSError | RuntimeError, final: Path) -> str | None:
    """Return the reason and remedy of a disk error at `final`; None for any other error."""
    name: Any = getattr(error, "filename", None)
    named = isinstance(name, str | os.PathLike)  # a file descriptor is not a name
    # Also the partial file, whose name contains that of the final one.
    mine = named and Path(name).parent == final.parent and final.name in Path(name).name
    if (named and not mine) or isinstance(error, BeingWritten | NotRegular):
        return None  # an error of a file that the block reads
    number = _errno_of(error)
    # A missing file without a name may be one that the block reads.
    if number in _FULL and (mine or number != errno.ENOENT):
        return f"{_FULL[number]}; nothing was left behind"
    reason = None if number is None else os_reason(OSError(number, os.strerror(number)))
    # `os_reason` gives REASON; REMEDY, and the note is put between them.
    return None if reason is None else "; nothing was left behind; ".join(reason.split("; ", 1))
