"""Event files of TensorBoard: records with checksums, of protocol buffers that are few enough to be written by hand.

A record is ``length (8 bytes) | checksum of it | event | checksum of it``, numbers with the lowest byte first. A
checksum is the CRC-32C, rotated and shifted: one of data that hold checksums would be weak without that.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

__all__ = ["EventFile", "crc32c"]

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, reflected
_MASK = 0xA282EAD8


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """Castagnoli's CRC-32 (RFC 3720).

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    value = 0xFFFFFFFF
    for byte in data:
        value = (value >> 8) ^ _TABLE[(value ^ byte) & 0xFF]
    return value ^ 0xFFFFFFFF


class EventFile:
    """Appends events to a new file; every one is handed to the system before the call returns. Local.

    Parameters
    ----------
    path
        A name that no file has; TensorBoard looks for names with ``tfevents``.
    wall_time
        Of the first record [s], as `time.time`.

    Raises
    ------
    OSError
        If the file exists or cannot be written.
    """

    def __init__(self, path: Path, wall_time: float) -> None:
        self._file: BinaryIO = path.open("xb", buffering=0)
        self._write(_double(1, wall_time) + _bytes(3, b"brain.Event:2"))

    def scalars(self, wall_time: float, step: int, values: dict[str, float]) -> None:
        """Numbers by tag at a step; kept as float32."""
        summary = b"".join(_bytes(1, _bytes(1, tag.encode()) + _float(2, value)) for tag, value in values.items())
        self._write(_double(1, wall_time) + _integer(2, step) + _bytes(5, summary))

    def start(self, wall_time: float, step: int) -> None:
        """A run that was taken back begins here: readers drop what other files have from this step on."""
        self._write(_double(1, wall_time) + _integer(2, step) + _bytes(7, _integer(1, 1)))

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()

    def _write(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        record = length + _masked(length) + event + _masked(event)
        if self._file.write(record) != len(record):  # half of it: nothing behind it could be read
            raise OSError("the disk takes no more")


def _masked(data: bytes) -> bytes:
    value = crc32c(data)
    return struct.pack("<I", (((value >> 15) | (value << 17)) + _MASK) & 0xFFFFFFFF)


# -- protocol buffers: field number and wire type, then the value -----------------------------------


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)
