"""The log of a run as event files of TensorBoard (``output.tensorboard = true``)."""

from __future__ import annotations

import logging
import os
import platform
import struct
import time
from pathlib import Path
from typing import Any

from halograd.errors import UserError

__all__ = ["TensorBoard", "scalars_of"]

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

    Every line of the log is flushed to the system before the call returns.

    Parameters
    ----------
    folder
        Folder of the files; created if missing.
    step
        Number of updates so far: TensorBoard drops later entries of earlier files.

    Raises
    ------
    UserError
        If tensorboardX is not installed.
    OSError
        If no file can be created there. If a later write fails, the file is given up with a warning.
    """

    def __init__(self, folder: Path, step: int) -> None:
        try:
            from tensorboardX.proto.event_pb2 import Event, SessionLog
            from tensorboardX.proto.summary_pb2 import Summary
            from tensorboardX.record_writer import masked_crc32c
        except ImportError as error:
            raise UserError(
                f"output.tensorboard: expected tensorboardX, got {error}; pip install 'halograd[tensorboard]'"
            ) from error
        self._event, self._summary, self._checksum = Event, Summary, masked_crc32c
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        path = folder / f"events.out.tfevents.{int(now):010d}.{platform.node()}.{os.getpid()}.{time.monotonic_ns()}"
        self._file = path.open("xb", buffering=0)
        self._write(wall_time=now, file_version="brain.Event:2")
        if step:
            self._write(wall_time=now, step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def __call__(self, entry: dict[str, Any]) -> None:
        """Write the scalars of a line of the log."""
        values = scalars_of(entry)
        if self._file.closed or not values:
            return
        summary = self._summary(value=[self._summary.Value(tag=tag, simple_value=x) for tag, x in values.items()])
        try:
            self._write(wall_time=entry["time"], step=entry["step"], summary=summary)
        except OSError as error:
            _log.warning("the TensorBoard file can no longer be written: %s", error.strerror or error)
            self.close()

    def _write(self, **event: Any) -> None:
        data: bytes = self._event(**event).SerializeToString()
        length = struct.pack("<Q", len(data))
        record = b"".join(part + struct.pack("<I", self._checksum(part)) for part in (length, data))
        if self._file.write(record) != len(record):  # an incomplete record: readers stop at it
            raise OSError("the disk is full")

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
