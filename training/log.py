"""Log of a run, one JSON object per line, and its reader; progress bar; event files; text logs of every rank."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import platform
import stat
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, TextIO

from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic_core import from_json
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from halograd.documents import os_reason, write_whole, writing
from halograd.errors import UserError

from ..comm.terminal import terminal_columns
from ..limits import usable_cores
from .timeline import BUSY

__all__ = [
    "Entry",
    "RankLog",
    "RunLog",
    "TensorBoard",
    "lines_of",
    "parse_line",
    "parse_lines",
    "read_log",
    "rewind_log",
    "scalars_of",
    "stderr_console",
    "warn_of_lines",
]

_log = logging.getLogger(__name__)
_warned: set[tuple[Path, int]] = set()

Entry = dict[str, Any]

NOT_SCORES = ("event", "time", "epoch", "step")  # keys of a validation other than scores


class _Console(Console):
    """Console whose pipe may be closed by the program that reads it, such as `head`."""

    def on_broken_pipe(self) -> None:
        """Print nothing more. The default of rich ends the program."""
        self.quiet = True


def stderr_console() -> Console:
    """Return a console on stderr; it counts as a terminal if a terminal shows stderr, even under a launcher. Local."""
    columns = terminal_columns()
    return _Console(stderr=True, width=columns, force_terminal=True if columns else None)


class RunLog:
    """Log file and progress bar; no-op on ranks other than 0. Local.

    Parameters
    ----------
    path
        File of the log; created if missing, else continued.
    prints
        Whether this is rank 0.
    bar
        Whether to show a progress bar (only on a terminal) and to print lines.
    """

    def __init__(self, path: Path, prints: bool, bar: bool = True) -> None:
        self.path = path
        self._file: FileIO | None = None
        self._waiting = bytearray()  # lines that are not in the file yet
        self._followers: list[Callable[[dict[str, Any]], None]] = []
        self._failing = self._lost = False
        self._prints, self._bar = prints and bar, None
        self._console = stderr_console()
        if prints:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered: while writes fail, a buffer of Python drops lines after its first 8 KiB.
            self._file = path.open("ab+", buffering=0)
        if self._prints and self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=self._console)
            self._bar.start()
            self._task = self._bar.add_task("training", total=None)

    def follow(self, follower: Callable[[dict[str, Any]], None]) -> None:
        """Call `follower` with every line from now on."""
        self._followers.append(follower)

    def write(self, event: str, **values: Any) -> None:
        """Write a line ``{"event": event, ..., "time": ...}``, and flush it to the system.

        If the disk is full, lines are kept, and written with a later one. If the log was removed or replaced, it is
        written again, with a warning.
        """
        if self._file is not None:
            entry = {"event": event, **values, "time": round(time.time(), 3)}
            for follower in self._followers:
                follower(entry)
            self._waiting += f"{json.dumps(entry)}\n".encode()
            try:
                # First, because the lines of a removed log precede the one that waits.
                self._file = self._in_place(self._file)
                self._write_waiting(self._file)
                self._failing = False
            except OSError as error:
                self._cannot(error)

    def _write_waiting(self, file: FileIO) -> None:
        while self._waiting:
            del self._waiting[: file.write(self._waiting)]  # a disk that becomes full takes a part

    def _in_place(self, file: FileIO) -> FileIO:
        """Return the file under the log's name: `file` or, if that was removed or replaced, another one, which gets the
        lines of `file` if it is empty.
        """
        mine = os.fstat(file.fileno())
        try:
            current = os.stat(self.path)
        except FileNotFoundError:
            if not self.path.parent.is_dir():
                return file  # the whole run was removed or moved: its next checkpoint will report that
        else:
            if os.path.samestat(current, mine) or not stat.S_ISREG(current.st_mode):
                return file
        new = self.path.open("ab+", buffering=0)
        # A file that has lines already is continued: it may be a copy of the log.
        if os.fstat(new.fileno()).st_size == 0:
            # The descriptor still reads the lines of the removed file.
            file.seek(0)
            self._waiting[:0] = file.readall()
        if not self._lost:
            _log.warning("%s was removed or replaced while the run writes to it; its lines go to a new one", self.path)
        self._lost = True
        file.close()
        return new

    def _cannot(self, error: OSError) -> None:
        """Warn that the log cannot be written; warn again only after a successful write. This does not end a run."""
        if not self._failing:
            reason = os_reason(error) or error.strerror or error
            _log.warning("the log %s cannot be written now: %s", self.path, reason)
        self._failing = True

    def print(self, text: str) -> None:
        """Print a line for the user. An error of printing, as into a file on a full disk, does not end a run."""
        if self._prints:
            with contextlib.suppress(OSError):
                # Brackets in a text are no markup.
                self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def move(self, done: int, total: int, text: str) -> None:
        """Move the progress bar to `done` of `total` steps, with `text` before it."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, description=text)

    def close(self) -> None:
        """Close the file and end the bar; idempotent."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self._file is not None:
            try:
                # `with` closes the file also if the last lines cannot be written.
                with self._file as file:
                    self._write_waiting(file)
            except OSError as error:
                self._cannot(error)
            self._file = None

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_log(path: str | Path, event: str | None = None) -> list[Entry]:
    """Read the lines of a log, or those of one event; skip unreadable lines with a warning. Local."""
    return [entry for _, entry in _good(Path(path)) if event is None or entry["event"] == event]


def _good(path: Path) -> list[tuple[bytes, Entry]]:
    good, bad = parse_lines(lines_of(path))
    if bad:
        warn_of_lines(path, bad)
    return good


def rewind_log(path: Path, step: int) -> None:
    """Remove lines after update number `step`; a run that resumes there writes them again. Local.

    Unreadable lines are removed too, with a warning.

    Raises
    ------
    UserError
        If the log cannot be rewritten; the old log is not changed.
    """
    if not path.exists():
        return
    # Lines without a step are kept.
    kept = [line.rstrip(b"\n") for line, entry in _good(path) if entry.get("step", 0) <= step]
    with writing(f"log {path}"):
        write_whole(path, b"".join(line + b"\n" for line in kept).decode())


# -- lines -----------------------------------------------------------------------------------------
# Processes may be killed while they append to a log, and disks fill up or fail, so a line may contain anything. A line
# is skipped and counted if it is no JSON object, or if a key that readers use is missing or its value has another type.
def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, each with its line end; the last line may have none.

    Raises
    ------
    OSError
        If the file cannot be read, or is not a regular file: a read from a pipe could wait forever.
    """
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    with path.open("rb") as file:
        yield from file


def parse_lines(lines: Iterable[bytes]) -> tuple[list[tuple[bytes, Entry]], int]:
    """Return the readable lines, each with its entry, and the number of unreadable lines.

    Empty lines are ignored, and so is a last line without a line end, which is incomplete.
    """
    good, bad = [], 0
    for line in lines:
        entry = parse_line(line)
        if entry is not None:
            good.append((line, entry))
        elif line.strip() and line.endswith(b"\n"):
            bad += 1
    return good, bad


def warn_of_lines(path: Path, bad: int) -> None:
    """Warn of `bad` skipped lines of a log; only once, although a log may be read several times."""
    if (path, bad) not in _warned:
        _log.warning("%s: %d line(s) cannot be read and are skipped", path, bad)
    _warned.add((path, bad))


def parse_line(line: bytes) -> Entry | None:
    """Return the entry of a line; None if the line is not one of a log."""
    try:
        entry = from_json(line)
        event = entry["event"]
        (_LoggedValidation if event == "validation" else _Line).model_validate(entry)
    except (ValueError, TypeError, LookupError):  # a ValidationError is a ValueError
        return None
    return entry if entry.keys() >= _REQUIRED.get(event, set()) else None


# The limits keep the arithmetic of readers finite, and give each time a date [s].
_Count = Annotated[int, Field(ge=0, lt=1 << 53)]
_Finite = Annotated[float, Field(gt=-(1 << 53), lt=1 << 53, allow_inf_nan=False)]
_Time = Annotated[float, Field(ge=0, lt=1e11, allow_inf_nan=False)]
_Rate = Annotated[float, Field(allow_inf_nan=False)]  # no reader computes with it, and it may be as large as configured
_Number = float  # also NaN and infinity, which a run may measure


class _Logged(BaseModel):
    """Table that has other keys too, with any values."""

    model_config = ConfigDict(extra="allow", strict=True)


class _LoggedWork(_Logged):
    seconds: _Finite


class _LoggedMessages(_Logged):
    communication: _Finite
    blocked: _Finite
    overlap: _Finite | None


class _LoggedPhases(_Logged):
    """Seconds of the categories in `BUSY`, and of each kind of messages."""

    __pydantic_extra__: dict[str, _LoggedMessages]


_BUSY: dict[str, Any] = dict.fromkeys(BUSY, (_LoggedWork, None))


class _LoggedLayer(_Logged):
    __pydantic_extra__: dict[str, _Finite]

    predicted: _Finite
    measured: _Finite


class _LoggedOutput(_Logged):
    log_steps: _Count = 1


class _LoggedConfig(_Logged):
    __pydantic_extra__: dict[str, dict[str, Any]]

    output: _LoggedOutput = _LoggedOutput()


class _LoggedValidation(_Logged):
    """Line of the event ``"validation"``, whose scores may have any names."""

    __pydantic_extra__: dict[str, _Number | None]

    event: str
    time: _Time = 0.0
    epoch: _Count
    step: _Count
    loss: _Number | None


#: Type by key, of the lines of all other events.
_LINE: dict[str, Any] = {
    **dict.fromkeys(("step", "epoch", "at_step", "steps", "epochs", "steps_per_epoch", "last_step"), _Count),
    **dict.fromkeys(("batch", "samples", "held_out", "parameters", "ranks", "rank", "code"), _Count),
    "time": _Time,
    "learning_rate": _Rate,
    **dict.fromkeys(("seconds", "data_seconds", "samples_per_second"), _Finite),
    **dict.fromkeys(("predicted_step_seconds", "measured_step_seconds"), _Finite),
    **dict.fromkeys(("loss", "gradient_norm"), _Number),
    **dict.fromkeys(("network", "cut", "kernels", "transport", "version"), str),
    **dict.fromkeys(("host", "cause", "reason", "path", "scheme"), str),
    **dict.fromkeys(("job", "device_transport"), str | None),
    "hosts": dict[str, _Count],
    "phases": create_model("_AllPhases", __base__=_LoggedPhases, **_BUSY),
    "layers": dict[str, _LoggedLayer],
    "waits": dict[str, _Finite],
    "config": _LoggedConfig,
}
_OPTIONAL: dict[str, Any] = {key: (kind, None) for key, kind in _LINE.items()}
_Line = create_model("_Line", __base__=_Logged, event=(str, ...), **_OPTIONAL)
#: Keys that readers expect, by event.
_REQUIRED: dict[str, set[str]] = {
    "step": {"step", "loss", "learning_rate", "seconds", "samples_per_second"},
    "phases": {"steps", "phases"},
    "failed": {"rank", "host", "cause"},
    "stopped": {"reason"},
    "diverged": {"step", "reason"},
    "early_stop": {"step", "reason"},
    "no_best": {"step", "reason"},
    "prediction": {"steps", "predicted_step_seconds", "measured_step_seconds", "data_seconds", "waits", "layers"},
}

# -- event files of TensorBoard --------------------------------------------------------------------
#: Key of a logged step -> tag.
_TAGS = {
    "loss": "training/loss",
    "learning_rate": "training/learning_rate",
    "gradient_norm": "training/gradient_norm",
    "samples_per_second": "speed/samples_per_second",
    "seconds": "speed/seconds_per_step",
}


def scalars_of(entry: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a log line by TensorBoard's tag; empty for lines that are not plotted.

    >>> scalars_of({"event": "validation", "epoch": 0, "step": 9, "loss": 0.5, "iou": None})
    {'validation/loss': 0.5}
    """
    if entry["event"] == "step":
        return {tag: entry[key] for key, tag in _TAGS.items() if key in entry}
    if entry["event"] == "validation":
        scores = {f"validation/{key}": value for key, value in entry.items() if key not in NOT_SCORES}
    elif entry["event"] == "phases":
        scores = {f"hidden_percent/{kind}": p.get("overlap") for kind, p in entry["phases"].items()}
    else:
        return {}
    return {tag: float(value) for tag, value in scores.items() if value is not None}


class TensorBoard:
    """Writer of scalars to ``events.out.tfevents.*`` in a folder, one new file per start of the run. Local; rank 0.

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
        If no file can be created there. If a later write fails, the file is closed with a warning.
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
        # TensorBoard reads files with "tfevents" in their name.
        path = folder / f"events.out.tfevents.{int(now):010d}.{platform.node()}.{os.getpid()}.{time.monotonic_ns()}"
        self._file = path.open("xb", buffering=0)
        # The first record of a file has the version of the format.
        self._write(wall_time=now, file_version="brain.Event:2")
        # Lets TensorBoard drop what earlier files have from this step on: the resumed run writes it again.
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
        # A TFRecord: length, its checksum, data, their checksum.
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


# -- text logs -------------------------------------------------------------------------------------
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class RankLog:
    """Context manager that writes ``rank-NNNN.log``. Local.

    The log has the records of modules (from INFO on), the output of the rank, and the traceback of an error that ends
    the ``with`` block. Output that is suppressed, because the rank is not rank 0, is in the log too; output to a
    terminal is not. Files of earlier runs are continued.

    Parameters
    ----------
    folder
        Existing folder that the rank can write to.
    rank, size
        Rank of this process, and number of ranks.

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
        # Other handlers get the same records as before, although the logger passes more records.
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
    """File that ignores errors such as a full disk, which must not end a run."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: the file is closed
            self._file.write(text)

    def flush(self) -> None:
        """Do nothing: the file is line-buffered."""


class _Both:
    """Stream that also copies its text to a file, unless it is a terminal or the text has escape sequences."""

    def __init__(self, stream: Any, file: TextIO) -> None:
        self._stream, self._copy = stream, _Quiet(file)

    def write(self, text: str) -> int:
        # Progress bars: a terminal's, or those that a launcher passes on, whose escape sequences move the cursor.
        if not (self._stream.isatty() or "\x1b" in text):
            self._copy.write(text)
        return self._stream.write(text)

    # `flush`, `fileno`, `encoding`, ...: those of the stream.
    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _cores() -> str:
    """Return a string with the cores that this process may use, as ranges, and the limit on their number, if any."""
    cores = usable_cores()
    runs: list[list[int]] = []
    for core in sorted(cores.bound):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    ranges = ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return ranges if cores.count == len(cores.bound) else f"{ranges} ({cores.count} at a time)"
