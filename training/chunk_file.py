"""Files with checksums of all bytes, which are verified before they are used.

::

    0       header: signature, format, begin and end of the index, CRC-32 of the table; zeros; CRC-32 of the header
    4096    body: an HDF5 file whose user block is the header: h5py and h5dump open it as any other
    index   data for readers: the location of each array in the body, and other content
    end     table: CRC-32 of every MiB of body and index

Readers do not use HDF5. HDF5 does not verify its metadata: after one flipped bit, HDF5 may return wrong values, crash
or loop. An I/O error leaves HDF5 in a state in which it crashes when the process ends.
"""

from __future__ import annotations

import io
import os
import stat
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

__all__ = ["CHUNK", "HEADER", "ChunkWriter", "DamagedFile", "OtherFile", "VerifiedFile"]

FORMAT = 2
#: Size of the header [B]: a user block of HDF5 is a power of 2; whole pages keep the body aligned.
HEADER = 4096
#: Bytes of the body under one checksum [B].
CHUNK = 1 << 20
#: As in PNG: a byte above 127, line ends and Ctrl-Z, which transfers of text would change.
_SIGNATURE = b"\x89halograd\r\n\x1a\n\0\0\0"
_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_FIELDS = struct.Struct("<16sIIQQI")  # signature, format, CHUNK, begin and end of the index, CRC-32 of the table
_SUM = struct.Struct("<I")
_REMEDY = "use the halograd that wrote it, or train anew"
Result = TypeVar("Result")


class DamagedFile(Exception):
    """Error: the bytes of a file differ from those that were written."""


class OtherFile(Exception):
    """Error: a file has another kind or format; its body was not verified."""


class ChunkWriter(io.RawIOBase):
    """New file for ``h5py.File(writer, "w", userblock_size=HEADER)``. Local. Call `finish` after h5py has closed it.

    Without an HDF5 file, the new file has no body, only the header, an index and the table.

    If a write fails inside HDF5 (disk full), HDF5 cannot close the file, and reports the error again when the process
    ends. So this class hides the error from HDF5: it keeps the error, drops later writes, and raises the error at the
    end.

    Raises
    ------
    OSError
        At the end of the ``with`` block, the first error (such as ENOSPC). The file is then incomplete.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("w+b", buffering=0)
        self._fault: OSError | None = None
        self._sums: dict[int, int] = {}

    def _try(self, call: Callable[[], Result], otherwise: Result) -> Result:
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
        start, done = self._file.tell(), 0
        # An unbuffered file may write fewer bytes than requested.
        while done < len(view):
            done += self._file.write(view[done:])
        self._note(start, view)
        return done

    def _note(self, start: int, view: memoryview) -> None:
        """Compute the checksums of chunks that `view` fills; partially filled chunks are read again at the end."""
        # A write before the end of the header gives chunk -1, which has no checksum; `-(-a // b)` rounds up.
        for chunk in range((start - HEADER) // CHUNK, -(-(start + len(view) - HEADER) // CHUNK)):
            begin = HEADER + chunk * CHUNK - start
            if begin >= 0 and begin + CHUNK <= len(view):
                self._sums[chunk] = zlib.crc32(view[begin : begin + CHUNK])
            else:
                # HDF5 writes metadata again, so an earlier checksum may be that of other bytes.
                self._sums.pop(chunk, None)

    def finish(self, index: bytes) -> None:
        """Write the index and the table after the bytes of HDF5, and the header at the start of the file."""
        self._try(lambda: self._finish(index), None)

    def _finish(self, index: bytes) -> None:
        # `max`: without an HDF5 file, the index begins after the space of the header.
        begin = self._file.seek(max(HEADER, self._file.seek(0, os.SEEK_END)))
        end = begin + self._write_all(memoryview(index))
        table = b"".join(_SUM.pack(self._sum(chunk, end)) for chunk in range(_chunks(end, CHUNK)))
        header = _FIELDS.pack(_SIGNATURE, FORMAT, CHUNK, begin, end, zlib.crc32(table))
        header = header.ljust(HEADER - _SUM.size, b"\0")
        # The header is written last: without it, the rest is not taken for a complete file.
        for start, data in ((end, table), (0, header + _SUM.pack(zlib.crc32(header)))):
            self._file.seek(start)
            self._write_all(memoryview(data))

    def _sum(self, chunk: int, end: int) -> int:
        if chunk not in self._sums:
            start = HEADER + chunk * CHUNK
            data = memoryview(bytearray(min(CHUNK, end - start)))
            self._file.seek(start)
            _read_all(self._file, data)
            return zlib.crc32(data)
        return self._sums[chunk]

    def readinto(self, buffer) -> int:
        """Read bytes that HDF5 has written."""
        return self._file.readinto(buffer)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def truncate(self, size: int | None = None) -> int:
        end = self.tell() if size is None else size
        # A chunk that loses bytes has another checksum.
        self._sums = {chunk: known for chunk, known in self._sums.items() if HEADER + (chunk + 1) * CHUNK <= end}
        return self._try(lambda: self._file.truncate(end), end)

    def close(self) -> None:
        """Close the file. Idempotent. Raises the first OSError of a write."""
        if not self.closed:
            super().close()
            self._file.close()
            if self._fault is not None:
                raise self._fault


class VerifiedFile:
    """Reader of a file that :class:`ChunkWriter` wrote. Local.

    A chunk is read when a byte of it is needed, compared with its checksum, and kept in memory. No byte is read twice
    or returned unverified.

    Parameters
    ----------
    path
        A regular file; a pipe, a folder or a device is rejected without being opened.

    Attributes
    ----------
    bytes_read
        Bytes read from the file system so far [B].
    identity
        Checksum of the header, and so of all bytes.

    Raises
    ------
    DamagedFile
        If bytes, the signature included, differ from those that were written, or cannot be read; also raised by every
        method that reads.
    OtherFile
        If it is not a regular file, begins like an HDF5 file without this header, or has another version of the format.
    OSError
        If it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        # Before `open`, which waits for a writer if the path is a pipe.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OtherFile("a folder, a pipe or a device; name a file")
        self._file = path.open("rb", buffering=0)
        self.bytes_read = 0
        try:
            self._begin()
        except BaseException:
            self._file.close()
            raise

    def _begin(self) -> None:
        """Read and verify header and table, and allocate memory for body and index."""
        size = os.fstat(self._file.fileno()).st_size
        header = bytes(self._read(0, min(HEADER, size)))
        if header.startswith(_HDF5_SIGNATURE):
            raise OtherFile(f"an HDF5 file without checksums (format 1, or no checkpoint at all); {_REMEDY}")
        if not header.startswith(_SIGNATURE):
            raise DamagedFile("its signature is wrong")
        # Before any offset in the header is used.
        if len(header) < HEADER or zlib.crc32(header[: -_SUM.size]) != _SUM.unpack(header[-_SUM.size :])[0]:
            raise DamagedFile("the checksum of its header is wrong")
        _, version, self._chunk, self._index, self._end, table_sum = _FIELDS.unpack_from(header)
        if version != FORMAT:
            raise OtherFile(f"format {version}; {_REMEDY}")
        count = _chunks(self._end, self._chunk)
        if size != self._end + _SUM.size * count:
            raise DamagedFile(f"expected {self._end + _SUM.size * count} bytes, got {size}")
        table = self._read(self._end, _SUM.size * count)
        if zlib.crc32(table) != table_sum:
            raise DamagedFile("the checksum of its table of checksums is wrong")
        self.identity = _SUM.unpack(header[-_SUM.size :])[0]
        self._sums = np.frombuffer(table, "<u4").tolist()
        self._known = [False] * count
        self._memory = np.empty(self._end, np.uint8)  # the system allocates pages when they are filled
        self._memory[:HEADER] = np.frombuffer(header, np.uint8)

    def load(self, start: int = 0, stop: int | None = None) -> None:
        """Read and verify those bytes from `start` to `stop` (by default all) that are not verified yet."""
        last = self._end if stop is None else min(stop, self._end)
        # `max`: the header is verified already.
        first = max(0, (start - HEADER) // self._chunk)
        for chunk in range(first, -(-(last - HEADER) // self._chunk)):
            if not self._known[chunk]:
                begin = HEADER + chunk * self._chunk
                end = min(begin + self._chunk, self._end)
                data = self._read(begin, end - begin, self._memory.data[begin:end])
                if zlib.crc32(data) != self._sums[chunk]:
                    raise DamagedFile(f"the checksum of its bytes {begin} to {end} is wrong")
                self._known[chunk] = True

    def index(self) -> bytes:
        """Return the verified index."""
        return self.view(self._index, self._end - self._index).tobytes()

    def view(self, start: int, nbytes: int) -> np.ndarray:
        """Return verified bytes: ``(nbytes,)`` uint8, a read-only view."""
        self.load(start, start + nbytes)
        view = self._memory[start : start + nbytes]  # no copy: arrays of a checkpoint may be large
        view.flags.writeable = False
        return view

    def _read(self, start: int, nbytes: int, into: memoryview | None = None) -> memoryview:
        data = memoryview(bytearray(nbytes)) if into is None else into
        try:
            self._file.seek(start)
            count = _read_all(self._file, data)
        # A bad sector is reported as an I/O error: for readers the same as wrong bytes.
        except OSError as error:
            raise DamagedFile(f"its bytes {start} to {start + nbytes} cannot be read: {error.strerror}") from error
        self.bytes_read += count
        if count < nbytes:
            raise DamagedFile(f"it ends at byte {start + count}")
        return data

    def close(self) -> None:
        """Close the file and free its memory, except views that are still in use; idempotent."""
        self._file.close()
        self._memory = np.empty(0, np.uint8)


def _chunks(end: int, chunk: int) -> int:
    return max(0, -(-(end - HEADER) // chunk))


def _read_all(file: io.RawIOBase | io.FileIO, data: memoryview) -> int:
    """Read into `data` until it is full or the file ends; return the number of bytes [B]."""
    done = 0
    while done < len(data):
        count = file.readinto(data[done:])
        if not count:
            break
        done += count
    return done
