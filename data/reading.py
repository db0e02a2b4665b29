"""HDF5 files opened to read, on file systems with locks and without."""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
from pathlib import Path

import h5py

from .errors import DataError

__all__ = ["BeingWritten", "NotRegular", "one_line", "open_file", "open_to_read", "reason_of", "regular_size"]

_log = logging.getLogger(__name__)

_LOCK = re.compile(r"unable to lock file, errno = (\d+)")
# This process has it open already, as a file without locks.
_OPEN_WITHOUT = "flag values don't match"
# What flock answers when another process holds the lock; anything else means that there are no locks to be had.
_HELD = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES)
_told = False


class BeingWritten(OSError):
    """Another process has the file open to write."""


class NotRegular(OSError):
    """A folder, a pipe, a device: to open a pipe waits for another process, to read a device may never end."""


_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}


def regular_size(path: Path | str) -> int:
    """The size of a regular file [B]; symbolic links are followed. Local; opens nothing.

    Raises
    ------
    NotRegular
        It is something else.
    OSError
        There is none, or it cannot be looked up.
    """
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "a device")
        raise NotRegular(errno.EINVAL, f"expected a regular file, got {kind}")
    return found.st_size


def open_file(path: Path) -> h5py.File:
    """Open to read.

    Raises
    ------
    DataError
        File missing, not a regular one, not HDF5, truncated, being written.
    """
    try:
        size = regular_size(path)
    except FileNotFoundError as error:
        raise DataError(
            f"{path}: no such file; correct the path (data.path), or generate it (halograd generate)"
        ) from error
    except (OSError, ValueError) as error:  # a null character in the name is a ValueError
        raise DataError(f"{path}: {reason_of(error)}; correct the path") from error
    try:
        return open_to_read(path)
    except BeingWritten as error:
        raise DataError(
            f"{path}: cannot be opened, another process is writing to it; wait until it is complete, or end that one"
        ) from error
    except PermissionError as error:
        raise DataError(f"{path}: cannot be opened, permission denied; have it made readable") from error
    except OSError as error:
        if size == 0 or not h5py.is_hdf5(path):
            raise DataError(f"{path}: expected an HDF5 file, got something else; check the path") from error
        raise DataError(
            f"{path}: cannot be opened ({one_line(error)}); the file is truncated or damaged: write it again"
        ) from error


def open_to_read(path: Path) -> h5py.File:
    """Open a file to read, with a lock where the file system has locks, else without one and with a message. Local.

    A lock keeps others from writing while we read. Many Lustre and NFS mounts have none, and answer an attempt with
    one of several errors; HDF5 itself gets over just one of these. The environment variable ``HDF5_USE_FILE_LOCKING``
    (``FALSE``: no locks at all) wins over what is done here.

    Raises
    ------
    BeingWritten
        Another process has it open to write.
    NotRegular
        It is no regular file.
    OSError
        Whatever else h5py says.
    """
    regular_size(path)
    try:
        return h5py.File(path, "r", locking="best-effort")
    except OSError as error:
        found = _LOCK.search(str(error))
        if found is not None and int(found[1]) in _HELD:
            raise BeingWritten(int(found[1]), "another process is writing to it") from error
        if found is not None:
            _tell(path, int(found[1]))
        elif _OPEN_WITHOUT not in str(error):
            raise
    return h5py.File(path, "r", locking=False)


def _tell(path: Path, number: int) -> None:
    """Say it once in a process; only rank 0 is heard."""
    global _told
    if not _told:
        _log.warning(
            "%s: this file system has no file locks (%s); reading without: no program may write to it meanwhile "
            "(HDF5_USE_FILE_LOCKING=FALSE: without this message)",
            path,
            errno.errorcode.get(number, number),
        )
    _told = True


def reason_of(error: BaseException) -> str:
    """Why a file cannot be used, without a capital."""
    return (getattr(error, "strerror", None) or one_line(error)).lower()


def one_line(said: object) -> str:
    """The message of an error, or another text, without its line breaks."""
    return " ".join(str(said).split())
