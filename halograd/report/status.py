"""`halograd status`: the progress of a run, from its log. This module needs neither MPI nor a GPU."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import from_json, to_json

from ..documents import bytes_text
from ..errors import UserError
from ..training.directory import Owner, checkpoint_of
from ..training.log import Entry, lines_of, parse_lines, warn_of_lines
from ..training.watchdog import STALLS, describe_stall, read_positions

__all__ = ["TAIL", "Record", "duration_text", "read_record", "status_of", "status_text"]


class Checkpoint(NamedTuple):
    """A checkpoint file: step (None if the name has none), time of writing [s] as in `time.time`, and size [B]."""

    path: Path
    step: int | None
    modified: float
    size: int


@dataclass(frozen=True)
class Record:
    """The log of a run.

    Attributes
    ----------
    directory
        Directory of the run.
    steps
        Lines ``step``, in order; only the last ones if a tail was requested.
    events
        All other lines, in order.
    modified
        Time of the last change of the log [s], as in `time.time`.
    """

    directory: Path
    steps: list[Entry] = field(default_factory=list)
    events: list[Entry] = field(default_factory=list)
    modified: float = 0.0

    def all(self, event: str) -> list[Entry]:
        """Return the lines of an event."""
        return [entry for entry in self.events if entry["event"] == event]

    def last(self, event: str) -> Entry | None:
        """Return the last line of an event, None if there is none."""
        return next((entry for entry in reversed(self.events) if entry["event"] == event), None)

    @property
    def begin(self) -> Entry:
        """Line ``begin`` of the latest job of the run; empty for a log of an old version."""
        return self.last("begin") or {}

    @property
    def since_begin(self) -> list[Entry]:
        """Lines of the latest job, without steps."""
        # A resumed run appends to the log of the earlier jobs.
        begins = [i for i, entry in enumerate(self.events) if entry["event"] == "begin"]
        return self.events[begins[-1] :] if begins else self.events

    def epochs_of(self, entries: Sequence[Entry]) -> list[float]:
        """Return, for each entry, the number of epochs completed at its step, with the fraction of the current one.

        The steps of a job count by that job's number of steps per epoch: a resumed run may have batches of another
        size.
        """
        jobs = [begin for begin in self.all("begin") if begin.get("steps_per_epoch")]
        positions, k = [], 0
        for step in (entry["step"] for entry in entries):  # in order of their steps, as the jobs are
            while k + 1 < len(jobs) and jobs[k + 1].get("step", 0) < step:
                k += 1
            if jobs:
                positions.append(jobs[k].get("epochs", 0) - (_last_step(jobs[k]) - step) / jobs[k]["steps_per_epoch"])
            else:
                positions.append(step / self.steps_per_epoch)
        return positions

    @property
    def step(self) -> int:
        """Last known step."""
        # With output.log_steps, the line of an event may be newer than the last line of a step.
        return max([0, *(s["step"] for s in self.steps[-1:]), *(e.get("step", 0) for e in self.events)])

    @property
    def steps_per_epoch(self) -> int:
        """Steps per epoch, as logged; for an old log, derived from its first validation, or 1 without a validation."""
        known = self.begin.get("steps_per_epoch")
        first = next(iter(self.all("validation")), None)
        return int(known or (first["step"] // (first["epoch"] + 1) if first else 1) or 1)

    @property
    def checkpoint(self) -> Checkpoint | None:
        """Newest checkpoint, or None. A running job may remove the file at any time."""
        folder = self.directory / "checkpoints"
        # Steps in names have leading zeros, so the newest file sorts last.
        for path in (checkpoint_of(folder / "latest.h5"), *sorted(folder.glob("step-*.h5"), reverse=True)):
            with suppress(OSError):
                status, step = path.stat(), path.stem.rpartition("-")[2]
                return Checkpoint(path, int(step) if step.isdecimal() else None, status.st_mtime, status.st_size)
        return None


def read_record(directory: Path, tail: int | None = None) -> Record:
    """Return the log of a run, with only the last `tail` ``step`` lines unless `tail` is None. Local.

    Unreadable lines are left out with a warning; an incomplete last line is left out without one.

    Raises
    ------
    UserError
        The directory is not that of a run.
    """
    path = directory / "log.jsonl"
    try:
        steps, events = _sorted(path, tail)
        return Record(directory, steps, events, path.stat().st_mtime)
    except OSError as error:
        reason = error.strerror
        if isinstance(error, FileNotFoundError):
            reason = "there is none, as before the first step of a run" if directory.is_dir() else "there is none"
        raise UserError(
            f"{directory}: expected the directory of a run, which has a log.jsonl: {reason}; give output.directory of "
            "its configuration"
        ) from error


def _sorted(path: Path, tail: int | None) -> tuple[list[Entry], list[Entry]]:
    """Return the last `tail` entries ``step`` of a log, and all its other entries."""
    steps: deque[bytes] = deque(maxlen=tail)
    others: list[bytes] = []
    for line in lines_of(path):
        # Almost all lines of a long log are steps, so only the last of them are parsed.
        (steps if line.startswith(b'{"event": "step"') else others).append(line)
    entries, bad = [], 0
    for lines in (steps, others):
        good, more = parse_lines(lines)
        entries.append([entry for _, entry in good])
        bad += more
    if bad:
        warn_of_lines(path, bad)
    return [entry for entry in entries[0] if entry["event"] == "step"], entries[1]


#: Number of a log's last steps that a status uses.
TAIL = 5000
# A run counts as quiet after this many step times without a line, and at least this time.
_QUIET_STEPS, _QUIET = 30, 120.0  # [s]


@dataclass(frozen=True)
class Status:
    """State of a run.

    Attributes
    ----------
    state
        ``"running"``, ``"quiet"`` (killed, or no log lines for a long time), ``"finished"``, ``"stopped"`` (after a
        checkpoint), ``"interrupted"`` (by Ctrl-C; both continue with --resume), ``"failed"``.
    detail
        Reason for the state; may be empty.
    step, steps, epoch, epochs
        Completed and total numbers; None if the log is too old to contain them. `epoch` is the current epoch, from 1.
    loss, validation
        Last loss, None without one; scores of the last validation, empty without one.
    seconds_per_step, samples_per_second
        Averages over the last two epochs of the latest job, with validation and checkpoints [s], [1/s]; None before its
        first step.
    seconds_left
        Remaining time at that speed [s].
    checkpoint, checkpoint_step, checkpoint_age, checkpoint_bytes
        The newest checkpoint; its age [s] and size [B].
    overlap
        Share of each kind of communication that overlapped with computation [%]; empty without ``output.timeline``.
    ranks, hosts, cut, job
        Properties of the latest job.
    age
        Time since the last line of the log [s].
    """

    directory: str
    state: str
    detail: str
    step: int
    steps: int | None
    epoch: int | None
    epochs: int | None
    loss: float | None
    validation: dict[str, Any]
    seconds_per_step: float | None
    samples_per_second: float | None
    seconds_left: float | None
    checkpoint: str | None
    checkpoint_step: int | None
    checkpoint_age: float | None
    checkpoint_bytes: int | None
    overlap: dict[str, float | None]
    ranks: int | None
    hosts: list[str]
    cut: str | None
    job: str | None
    age: float

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON, which has no NaN and no infinity: None stands for them."""
        data: dict[str, Any] = from_json(to_json(asdict(self), inf_nan_mode="null"))
        return data


def _last_step(begin: Entry) -> int:
    """Return the number of the last epoch's last step; in logs of old versions, all epochs have equally many steps."""
    return int(begin.get("last_step", begin.get("epochs", 0) * begin.get("steps_per_epoch", 0)))


def status_of(record: Record, now: float | None = None) -> Status:
    """Return the state of a run at the time `now` [s]. Local."""
    now = time.time() if now is None else now
    begin, step, age = record.begin, record.step, max(0.0, now - record.modified)
    epochs, per_epoch = begin.get("epochs"), record.steps_per_epoch
    total, epoch = None, None
    if epochs:
        # Logs of old versions lack steps_per_epoch; then it is derived from the first validation.
        total = _last_step({"steps_per_epoch": per_epoch, **begin})
        # Counted from the end, because batches of earlier jobs may have another size.
        epoch = max(1, min(epochs, epochs + 1 + (step - total) // per_epoch))
    pace = _pace(record)
    state, detail = _state(record, now, age, pace)
    going = state in ("running", "quiet")
    validation = record.last("validation") or {}
    phases: dict[str, Any] = next((e["phases"] for e in reversed(record.since_begin) if e["event"] == "phases"), {})
    checkpoint = record.checkpoint
    return Status(
        str(record.directory),
        state,
        detail,
        step,
        total,
        epoch,
        epochs,
        record.steps[-1]["loss"] if record.steps else None,
        {k: v for k, v in validation.items() if k not in ("event", "time")},
        pace,
        begin["batch"] / pace if pace and "batch" in begin else None,
        pace * (total - step) if pace and total and going else None,
        None if checkpoint is None else str(checkpoint.path),
        None if checkpoint is None else checkpoint.step,
        None if checkpoint is None else max(0.0, now - checkpoint.modified),
        None if checkpoint is None else checkpoint.size,
        {kind: p["overlap"] for kind, p in phases.items() if "overlap" in p},
        begin.get("ranks"),
        list(begin.get("hosts", ())),
        begin.get("cut"),
        begin.get("job"),
        age,
    )


def _state(record: Record, now: float, age: float, pace: float | None) -> tuple[str, str]:
    """Return the state of a run, and the reason for it."""
    for entry in record.since_begin:  # the line of an interrupt is not always the last one
        if entry["event"] == "interrupted":
            return "interrupted", f"{entry['reason']} on {entry['host']}; go on with --resume"
    for entry in reversed(record.since_begin):
        if entry["event"] == "finished":
            diverged = record.last("diverged")
            # The log also has divergences of earlier epochs or jobs, from which the loss has recovered.
            if diverged is None or diverged["step"] != entry.get("step"):
                return "finished", ""
            return "finished", f"but diverged: {diverged['reason']}"
        if entry["event"] == "failed":  # processes that end with the job may have reported further ranks
            first = next(line for line in record.since_begin if line["event"] == "failed")
            return "failed", f"rank {first['rank']} on {first['host']}: {first['cause']}"
        if entry["event"] == "stopped":  # with a code if a signal came, without if the loss is not finite any more
            return ("stopped" if "code" in entry else "failed"), str(entry["reason"])
    positions = read_positions(record.directory / STALLS)
    since = max((position.since for position in positions.values()), default=0.0)
    stalled = ""
    if any(position.line for position in positions.values()):
        rank, where = describe_stall(positions)
        stalled = f"no progress for {duration_text(max(0.0, now - since))}: " if since else ""
        stalled += f"rank {rank} on {positions[rank].host}: {where}"
    # With output.log_steps, lines are rarer than steps.
    every = record.begin.get("config", {}).get("output", {}).get("log_steps", 1)
    gone = _is_gone(record.directory)
    if gone or age > max(_QUIET, _QUIET_STEPS * every * (pace or 0.0)):
        text = f"nothing was logged for {duration_text(age)}: it was killed, hangs, or is in a long validation"
        text = "the process of rank 0 is gone: the run was killed" if gone else text
        if len(positions) > 1:  # launchers name the process that was killed
            text += f"; {STALLS} lists the process of each rank"
        return "quiet", stalled or text
    return "running", stalled


def _is_gone(directory: Path) -> bool:
    """Return whether the process that holds the directory ran on this machine and has ended without releasing it."""
    with suppress(OSError, ValueError):
        return Owner.parse((directory / "run.lock").read_text(encoding="utf-8")).gone(Owner.this()) is not None
    return False


def _pace(record: Record) -> float | None:
    """Return the time per step of the latest job [s], or None without steps.

    It includes the pauses between steps, and is a mean over the last two epochs, or over the last three lines if these
    cover more. With fewer lines it is the time of the last step alone.
    """
    begun = record.begin.get("step", 0)
    # Earlier jobs of the run may have had other ranks, or another machine.
    own = [s for s in record.steps if s["step"] > begun]
    timed = [s for s in own if "time" in s]
    least = timed[-1]["step"] - 2 * record.steps_per_epoch if timed else 0
    # With output.log_steps, two epochs may have fewer than three lines.
    window = max([s for s in timed if s["step"] >= least], timed[-3:], key=len)
    if len(window) > 2 and window[-1]["step"] > window[0]["step"]:
        return (window[-1]["time"] - window[0]["time"]) / (window[-1]["step"] - window[0]["step"])
    # With one or two lines there is no interval between steps: the time of the last step alone.
    return float(own[-1]["seconds"]) if own else None


def status_text(status: Status) -> list[str]:
    """Return the status as lines."""
    done = f"step {status.step:,}"
    if status.steps:
        share = 100 * status.step // status.steps
        done += f" of {status.steps:,} ({share} %), epoch {status.epoch} of {status.epochs}"
    lines = [f"{status.directory}: {status.state}, {done}"]
    if status.detail:
        lines.append(_line(status.state, status.detail))
    if status.loss is not None:
        lines.append(_line("loss", f"{status.loss:.5g}{_validation_text(status.validation)}"))
    if status.seconds_per_step:
        speed = "" if status.samples_per_second is None else f", {status.samples_per_second:.4g} samples/s"
        lines.append(_line("speed", f"{status.seconds_per_step:.4g} s/step{speed} (last two epochs, all included)"))
    if status.seconds_left is not None:
        lines.append(_line("time left", f"{duration_text(status.seconds_left)}{_until(status.seconds_left)}"))
    lines.append(_line("checkpoint", _checkpoint_text(status)))
    hidden = ", ".join(f"{kind} {ratio:.1f} %" for kind, ratio in status.overlap.items() if ratio is not None)
    lines.append(_line("hidden", hidden or "not measured: output.timeline = true measures it after an epoch"))
    if status.ranks is not None:
        job = f"; job {status.job}" if status.job else ""
        hosts = ", ".join(status.hosts[:4]) + (f" and {len(status.hosts) - 4} more" if len(status.hosts) > 4 else "")
        lines.append(_line("ranks", f"{status.ranks} on {hosts}, {status.cut}{job}"))
    lines.append(_line("log", f"last written {duration_text(status.age)} ago"))
    return lines


def _line(name: str, text: str) -> str:
    return f"  {name:<11} {text}"


def _validation_text(validation: dict[str, Any]) -> str:
    numbers = [f"{k} {v:.4g}" for k, v in validation.items() if k not in ("epoch", "step") and v is not None]
    return f"; validation after epoch {validation['epoch'] + 1}: {', '.join(numbers)}" if numbers else ""


def _until(seconds: float) -> str:
    """Return a string with the time of day after `seconds` [s]; empty if it cannot be represented."""
    try:
        return time.strftime(", until %a %H:%M", time.localtime(time.time() + seconds))
    except (OverflowError, ValueError, OSError):
        return ""


def _checkpoint_text(status: Status) -> str:
    if status.checkpoint is None or status.checkpoint_age is None:
        return "none yet"
    size = bytes_text(status.checkpoint_bytes or 0)
    age = duration_text(status.checkpoint_age)
    step = "" if status.checkpoint_step is None else f"step {status.checkpoint_step:,}, "
    return f"{step}{age} ago, {size}: {status.checkpoint}"


def duration_text(seconds: float) -> str:
    """Return a duration in its one or two largest units.

    >>> [duration_text(seconds) for seconds in (0.4, 59.7, 198, 7500, 180000)]
    ['0 s', '1 min 00 s', '3 min 18 s', '2 h 05 min', '2 d 2 h']
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
