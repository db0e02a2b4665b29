"""The log of a run as event files of TensorBoard (``output.tensorboard = true``)."""

from __future__ import annotations

import logging
import os
import platform
import struct
import time
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

__all__ = ["EventFile", "TensorBoard", "crc32c", "scalars_of"]

_log = logging.getLogger(__name__)

#: Key of a logged step -> tag.
_STEP = {
    "loss": "training/loss",
    "learning_rate": "training/learning_rate",
    "gradient_norm": "training/gradient_norm",
    "samples_per_second": "speed/samples_per_second",
    "seconds": "speed/seconds_per_step",
}
_ABOUT = {"event", "epoch", "step", "time"}


def scalars_of(entry: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a log line by tag; none for lines that are not plotted.

    >>> scalars_of({"event": "validation", "epoch": 0, "step": 9, "loss": 0.5, "iou": None})
    {'validation/loss': 0.5}
    """
    if entry["event"] == "step":
        return {tag: entry[key] for key, tag in _STEP.items() if key in entry}
    if entry["event"] == "validation":
        found = {f"validation/{key}": value for key, value in entry.items() if key not in _ABOUT}
    elif entry["event"] == "phases":
        found = {f"hidden_percent/{kind}": p.get("overlap") for kind, p in entry["phases"].items()}
    else:
        return {}
    return {tag: float(value) for tag, value in found.items() if value is not None}


class TensorBoard:
    """Writer of scalars to ``events.out.tfevents.*`` in a folder, a new file for every start. Local; rank 0.

    Parameters
    ----------
    folder
        Folder of the files; created if missing.
    step
        Number of updates so far: TensorBoard drops later entries of earlier files.

    Raises
    ------
    OSError
        If no file can be created there. If a later write fails, the file is given up with a warning.
    """

    def __init__(self, folder: Path, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        path = folder / f"events.out.tfevents.{int(now):010d}.{platform.node()}.{os.getpid()}.{time.monotonic_ns()}"
        self._file: EventFile | None = EventFile(path, now)
        if step:
            self._file.start(now, step + 1)

    def __call__(self, entry: dict[str, Any]) -> None:
        """Write the scalars of a line of the log."""
        values = scalars_of(entry)
        if self._file is None or not values:
            return
        try:
            self._file.scalars(entry["time"], entry["step"], values)
        except OSError as error:
            _log.warning("the TensorBoard file can no longer be written: %s", error.strerror or error)
            self.close()

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# -- event files -----------------------------------------------------------------------------------
# Records with checksums. Few protocol buffers are needed, so they are encoded by hand. A record is
# ``length (8 bytes) | its checksum | event | its checksum``, numbers with the lowest byte first. A checksum is the
# CRC-32C, rotated and shifted, because a CRC of data that contain their CRC is weak.

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
    """Compute the CRC-32C checksum (Castagnoli; RFC 3720).

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    value = 0xFFFFFFFF
    for byte in data:
        value = (value >> 8) ^ _TABLE[(value ^ byte) & 0xFF]
    return value ^ 0xFFFFFFFF


class EventFile:
    """Writer of events to a new file; each is flushed to the system before the call returns. Local.

    Parameters
    ----------
    path
        Path of a new file; TensorBoard searches for names with ``tfevents``.
    wall_time
        Time of the first record [s], as `time.time`.

    Raises
    ------
    OSError
        If the file exists or cannot be written.
    """

    def __init__(self, path: Path, wall_time: float) -> None:
        self._file: BinaryIO = path.open("xb", buffering=0)
        self._write(_double(1, wall_time) + _bytes(3, b"brain.Event:2"))

    def scalars(self, wall_time: float, step: int, values: dict[str, float]) -> None:
        """Write numbers by tag for a step, as float32."""
        summary = b"".join(_bytes(1, _bytes(1, tag.encode()) + _float(2, value)) for tag, value in values.items())
        self._write(_double(1, wall_time) + _integer(2, step) + _bytes(5, summary))

    def start(self, wall_time: float, step: int) -> None:
        """Mark the start of a run that was set back, so that readers drop entries of other files from this step on."""
        self._write(_double(1, wall_time) + _integer(2, step) + _bytes(7, _integer(1, 1)))

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()

    def _write(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        record = length + _masked(length) + event + _masked(event)
        if self._file.write(record) != len(record):  # an incomplete record: readers stop at it
            raise OSError("the disk is full")


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
