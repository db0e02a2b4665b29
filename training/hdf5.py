"""A file for HDF5 to write to that fails in Python, not inside the library.

A write that fails inside HDF5 (disk full) leaves a file that can neither be closed nor forgotten: the
library complains again when the process ends. Here HDF5 never sees the fault; it is kept and raised
when everything is closed.
"""

from __future__ import annotations

import io
from pathlib import Path
from types import TracebackType

__all__ = ["FaultHolder"]


class FaultHolder(io.RawIOBase):
    """A new file, for ``h5py.File(holder, "w")``; leaving the ``with`` raises what went wrong in writing.

    Once a write has failed, the rest is swallowed: the file is worthless and about to be removed.

    Raises
    ------
    OSError
        On exit, the first fault (such as ENOSPC).
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("w+b", buffering=0)
        self._fault: OSError | None = None

    def _try(self, call, otherwise):
        if self._fault is not None:
            return otherwise
        try:
            return call()
        except OSError as error:
            self._fault = error
            return otherwise

    def write(self, data) -> int:
        """Write all of `data`."""
        view = memoryview(data).cast("B")
        return self._try(lambda: self._write_all(view), len(view))

    def _write_all(self, view: memoryview) -> int:
        done = 0
        while done < len(view):
            done += self._file.write(view[done:])
        return done

    def readinto(self, buffer) -> int:
        """Read what HDF5 wrote before."""
        return self._file.readinto(buffer)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def truncate(self, size: int | None = None) -> int:
        return self._try(lambda: self._file.truncate(size), size or 0)

    def flush(self) -> None:
        """Nothing is buffered here."""

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def __enter__(self) -> FaultHolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if self._fault is not None:
            raise self._fault
