"""HDF5 files opened to read, on file systems with locks and without."""

from __future__ import annotations

import errno
import logging
import re
from pathlib import Path

import h5py

__all__ = ["BeingWritten", "open_to_read"]

_log = logging.getLogger(__name__)

_LOCK = re.compile(r"unable to lock file, errno = (\d+)")
# This process has it open already, as a file without locks.
_OPEN_WITHOUT = "flag values don't match"
# What flock answers when another process holds the lock; anything else means that there are no locks to be had.
_HELD = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES)
_told = False


class BeingWritten(OSError):
    """Another process has the file open to write."""


def open_to_read(path: Path) -> h5py.File:
    """Open a file to read, with a lock where the file system has locks, else without one and with a message. Local.

    A lock keeps others from writing while we read. Many Lustre and NFS mounts have none, and answer an attempt with
    one of several errors; HDF5 itself gets over just one of these. The environment variable ``HDF5_USE_FILE_LOCKING``
    (``FALSE``: no locks at all) wins over what is done here.

    Raises
    ------
    BeingWritten
        Another process has it open to write.
    OSError
        Whatever else h5py says.
    """
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
            "%s: this file system has no file locks (%s); reading without: nobody may write to it meanwhile "
            "(HDF5_USE_FILE_LOCKING=FALSE: without this message)",
            path,
            errno.errorcode.get(number, number),
        )
    _told = True
