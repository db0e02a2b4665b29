"""A log of every rank on request: what it says, also what only rank 0 says aloud, and how it was doing."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

__all__ = ["RankLog"]

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class RankLog:
    """Writes ``rank-NNNN.log`` while a ``with`` lasts. Local.

    What modules log (from INFO on), what the rank prints, even where its output is suppressed because it is not rank
    0, and the traceback of what ends the block. Files of earlier runs are continued.

    Parameters
    ----------
    folder
        There, and seen by the rank.
    rank, size
        Of this process.

    Raises
    ------
    OSError
        If the file cannot be written.
    """

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        digits = max(4, len(str(size - 1)))
        self._file = (folder / f"rank-{rank:0{digits}d}.log").open("a", encoding="utf-8", buffering=1)
        self._handler = logging.StreamHandler(_Quiet(self._file))
        self._handler.setFormatter(logging.Formatter(FORMAT))
        self._levels: dict[logging.Logger | logging.Handler, int] = {}
        self._streams = sys.stdout, sys.stderr
        self._note(f"rank {rank} of {size} on {platform.node()}, process {os.getpid()}, cores {_cores()}")

    def __enter__(self) -> RankLog:
        root = logging.getLogger()
        # Others hear as much as before, although the logger lets more pass.
        targets: list[logging.Logger | logging.Handler] = [root, *root.handlers]
        self._levels = {target: target.level for target in targets}
        for handler in root.handlers:
            handler.setLevel(max(handler.level, root.level))
        root.setLevel(min(root.level, logging.INFO))
        root.addHandler(self._handler)
        self._streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (_Both(stream, self._file) for stream in self._streams)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.stdout, sys.stderr = self._streams
        logging.getLogger().removeHandler(self._handler)
        for target, level in self._levels.items():
            target.setLevel(level)
        self._note("ends" if error is None else "".join(traceback.format_exception(kind, error, trace)).rstrip())
        self._file.close()

    def _note(self, text: str) -> None:
        _Quiet(self._file).write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")


class _Quiet:
    """A file whose disk may be full: a log does not end a run."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
            self._file.write(text)

    def flush(self) -> None:
        """Every line goes out by itself."""


class _Both:
    """A stream whose lines go to a file too; bars that move on a terminal do not."""

    def __init__(self, stream: Any, file: TextIO) -> None:
        self._stream, self._copy = stream, _Quiet(file)

    def write(self, text: str) -> int:
        if not (self._stream.isatty() or "\x1b" in text):  # escapes move the cursor of a terminal behind a launcher
            self._copy.write(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _cores() -> str:
    """Numbers of the cores this process may use, in ranges."""
    if not hasattr(os, "sched_getaffinity"):
        return "unknown"
    runs: list[list[int]] = []
    for core in sorted(os.sched_getaffinity(0)):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
