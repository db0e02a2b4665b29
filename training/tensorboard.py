"""The log of a run as event files of TensorBoard (``output.tensorboard = true``)."""

from __future__ import annotations

import logging
import os
import platform
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from halograd.training.event_file import EventFile

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
    """The numbers of a line of the log by tag; none for lines that are not drawn.

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
    """Writes scalars to ``events.out.tfevents.*`` in a folder, a new file for every start. Local; rank 0.

    Parameters
    ----------
    folder
        Made if missing.
    step
        Updates done so far: what earlier files have from later ones is dropped by TensorBoard.

    Raises
    ------
    OSError
        If no file can be made there. One that cannot be written later is given up, with a message.
    """

    def __init__(self, folder: Path, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        path = folder / f"events.out.tfevents.{int(now):010d}.{platform.node()}.{os.getpid()}.{time.monotonic_ns()}"
        self._file: EventFile | None = EventFile(path, now)
        if step:
            self._file.start(now, step + 1)

    def __call__(self, entry: dict[str, Any]) -> None:
        """Take a line of the log."""
        values = scalars_of(entry)
        if self._file is None or not values:
            return
        try:
            self._file.scalars(entry["time"], entry["step"], values)
        except OSError as error:
            _log.warning("TensorBoard's file cannot be written any more: %s", error.strerror or error)
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
