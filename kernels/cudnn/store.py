"""Plans on disk: one appended line of JSON per plan, so that several ranks may write at once."""

from __future__ import annotations

import base64
import fcntl
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Entry", "PlanStore", "store_path"]

_log = logging.getLogger("halograd.kernels")


def store_path() -> Path:
    """Return the path of the plan file: in $HALOGRAD_CACHE, else in ``halograd`` below $XDG_CACHE_HOME or ~/.cache."""
    chosen = os.environ.get("HALOGRAD_CACHE")
    if chosen:
        return Path(chosen) / "cudnn_plans.jsonl"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "halograd" / "cudnn_plans.jsonl"


@dataclass(frozen=True)
class Entry:
    """A stored plan, or a stored comparison of two kernels.

    Attributes
    ----------
    name
        Name of the execution plan (its number differs between versions, its name does not), or of the faster kernel.
    workspace_bytes
        Workspace of a run [B].
    blob
        The serialized plan if its build ran a compiler, else None.
    seconds
        Times of the candidates or kernels by name [s]; empty if the plan was not chosen by measurement.
    """

    name: str
    workspace_bytes: int
    blob: bytes | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """Return the entry as plain data."""
        blob = None if self.blob is None else base64.b64encode(self.blob).decode("ascii")
        return {"name": self.name, "workspace": self.workspace_bytes, "blob": blob, "seconds": dict(self.seconds)}

    @classmethod
    def from_json(cls, fields: dict[str, object]) -> Entry:
        """Return the entry that :meth:`to_json` wrote. Raises ValueError, TypeError or KeyError for other input."""
        blob, seconds = fields["blob"], fields["seconds"]
        if not isinstance(fields["name"], str) or not isinstance(seconds, dict):
            raise ValueError("expected a name and times")
        decoded = None if blob is None else base64.b64decode(str(blob), validate=True)
        times = {str(name): float(value) for name, value in seconds.items()}
        return cls(fields["name"], int(str(fields["workspace"])), decoded, times)


class PlanStore:
    """Plans stored under one set of conditions. Local.

    The file is only a cache. A plan that cannot be read is made again; a plan that cannot be written is lost, with one
    warning. A damaged line (from a killed run or a full disk) is skipped. The later of two lines for one key counts. If
    a plan is missing, the store reads what other processes have added since: ranks share what one of them compiled.

    Parameters
    ----------
    path
        The file. It and its folder are created with the first plan. None: memory only.
    conditions
        Versions of cuDNN, its frontend and the driver, and the device. Plans under other conditions are ignored.
    """

    def __init__(self, path: Path | None, conditions: str) -> None:
        self.path, self.conditions = path, conditions
        self._entries: dict[str, Entry] = {}
        self._warned, self._seen = False, 0
        self._read()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str) -> Entry | None:
        """Return the plan stored under a key, or None."""
        if key not in self._entries:
            self._read()
        return self._entries.get(key)

    def put(self, key: str, entry: Entry) -> None:
        """Store a plan in memory and on disk."""
        self._entries[key] = entry
        if self.path is None:
            return
        # Conditions in each line: one file serves machines and versions that share a home folder.
        line = json.dumps([self.conditions, key, entry.to_json()], separators=(",", ":")) + "\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _append(self.path, line)
        except OSError as error:
            self._warn(f"plans are not kept: {self.path} cannot be written ({error.strerror})")

    def _read(self) -> None:
        if self.path is None:
            return
        try:
            with self.path.open("rb") as file:
                # Only what was added since the last time.
                file.seek(self._seen)
                added = file.read()
        except FileNotFoundError:
            return
        except OSError as error:
            self._warn(f"kept plans are not used: {self.path} cannot be read ({error.strerror})")
            return
        # A line without an end is still being written, or a killed run left it: read it again next time.
        whole = added[: added.rfind(b"\n") + 1]
        self._seen += len(whole)
        for line in whole.decode("utf-8", errors="replace").splitlines():
            self._take(line)

    def _take(self, line: str) -> None:
        try:
            conditions, key, fields = json.loads(line)
            # A later line of the same key replaces an earlier one.
            if conditions == self.conditions:
                self._entries[str(key)] = Entry.from_json(fields)
        except (ValueError, TypeError, KeyError, RecursionError):
            return

    def _warn(self, text: str) -> None:
        if not self._warned:
            _log.warning("kernels: cuDNN's %s; choose another folder with HALOGRAD_CACHE", text)
            self._warned = True


def _append(path: Path, line: str) -> None:
    """Append one whole line under a lock. Terminates an unfinished line of a killed run first."""
    # O_APPEND and a lock: ranks of a node write to one file.
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        size = os.fstat(handle).st_size
        torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
        data = ("\n" if torn else "").encode() + line.encode()
        # A write may be partial.
        while data:
            data = data[os.write(handle, data) :]
    finally:
        os.close(handle)  # releases the lock
