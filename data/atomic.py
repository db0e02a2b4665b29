"""Files that appear under their name only when they are complete."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py

from .errors import DataError
from .reading import open_to_read, reason_of, regular_size

__all__ = ["atomic_path", "check_replaceable", "check_writable"]

_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file system does not allow a file of this size",
}


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str], needed: int = 0) -> Iterator[Path]:
    """Give a path beside `path` to write to; rename it to `path` when the block ends without an error.

    If the block fails, the partial file is removed and what was there before stays.

    Parameters
    ----------
    path : path
        Final name. Its folder must exist.
    needed : int
        Size of the file to come [B]; refused beforehand if the disk has less.

    Raises
    ------
    DataError
        When the folder is missing or not writable, or the disk is or becomes full.
    """
    final = Path(path)
    _check_place(final, needed)
    partial = final.with_name(f".{final.name}.{os.getpid()}.partial")
    try:
        yield partial
        _to_disk(partial)
        os.replace(partial, final)
    except (OSError, RuntimeError) as error:  # h5py raises either for a failed write
        reason = _reason(error)
        if reason is None:
            raise
        raise DataError(f"cannot write {final}: {reason}; nothing was left behind") from error
    finally:
        partial.unlink(missing_ok=True)


def check_replaceable(path: str | os.PathLike[str], ours: str, is_ours: Callable[[h5py.File], bool]) -> None:
    """See that a file can be written, long before it is; makes its folder.

    Parameters
    ----------
    path : path
        What :func:`atomic_path` will be given.
    ours : str
        What is replaced, for the message.
    is_ours : function of an open HDF5 file
        Whether it is that.

    Raises
    ------
    DataError
        If it cannot be written, or if another file is there: that is not replaced.
    """
    check_writable(path)
    try:
        if regular_size(Path(path)) == 0:
            return
        with open_to_read(Path(path)) as file:
            if is_ours(file):
                return
    except FileNotFoundError:
        return
    except OSError:
        pass
    raise DataError(f"cannot write {path}: expected no file there, or {ours}, got another; give another path")


def check_writable(path: str | os.PathLike[str]) -> None:
    """Make the folder of `path`, and see that a file can be written there, long before it is. Leaves no file.

    Parameters
    ----------
    path : path
        What :func:`atomic_path` will be given.

    Raises
    ------
    DataError
        When that will not work.
    """
    final = Path(path)
    partial = final.with_name(f".{final.name}.{os.getpid()}.partial")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _check_place(final, 0)
        partial.touch()
        partial.unlink()
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"cannot write {final}: {reason_of(error)}; give another path") from error


def _check_place(final: Path, needed: int) -> None:
    if final.is_dir():
        raise DataError(f"cannot write {final}: it is a folder; give the name of a file in it")
    if not final.parent.is_dir():
        raise DataError(f"cannot write {final}: the folder {final.parent} does not exist; make it first")
    free = shutil.disk_usage(final.parent).free
    if needed > free:
        raise DataError(
            f"cannot write {final}: expected {needed / 1e6:,.1f} MB of free disk, got {free / 1e6:,.1f} MB; "
            "free some space, or ask for fewer or smaller samples"
        )


def _to_disk(path: Path) -> None:
    # Some file systems report a full disk only here, and a rename may overtake the data otherwise.
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: OSError | RuntimeError) -> str | None:
    """Why the disk took no more, or None for another error. HDF5 hides the number in its message."""
    for number, reason in _FULL.items():
        if getattr(error, "errno", None) == number or f"errno = {number}," in str(error):
            return reason
    if isinstance(error, PermissionError):
        return "permission denied"
    return None
