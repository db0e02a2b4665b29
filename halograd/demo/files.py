"""The folder of a demonstration. Only what the demonstration itself has written there is ever replaced."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from halograd.errors import UserError
from halograd.training.directory import RunLock

__all__ = ["Files", "clear_run", "prepare", "replace_run"]

#: What a training run writes, and nothing else.
RUN_FILES = (
    "log.jsonl",
    "run.lock",
    "run.lock.*",
    "timeline.json",
    "timeline.json.new",
    "timeline.json.rank*",
    "checkpoints/step-*.h5",
    "checkpoints/latest.h5",
    "checkpoints/.latest.new",
    "checkpoints/.step-*.partial",
)


@dataclass(frozen=True)
class Files:
    """Where things are below `out`."""

    out: Path

    @property
    def data(self) -> Path:
        return self.out / "mesh.h5"

    @property
    def config(self) -> Path:
        return self.out / "config.toml"

    @property
    def run(self) -> Path:
        """The finished run."""
        return self.out / "run"

    @property
    def new_run(self) -> Path:
        """The run while it trains; it becomes :attr:`run` when it is finished."""
        return self.out / "run.new"

    @property
    def predictions(self) -> Path:
        return self.out / "predictions.h5"

    @property
    def report(self) -> Path:
        return self.out / "report.md"

    @property
    def page(self) -> Path:
        return self.out / "report.html"


def prepare(files: Files) -> None:
    """Make the folder, and remove what an interrupted demonstration has left. Local.

    Raises
    ------
    UserError
        If `out` is no folder or cannot be written to, or another demonstration trains there.
    """
    try:
        files.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: expected a folder that can be made, got {files.out}: {error.strerror}") from error
    if not os.access(files.out, os.W_OK):
        raise UserError(f"--out: expected a folder that can be written to, got {files.out}; choose another one")
    if files.new_run.exists():
        with RunLock(files.new_run) as lock:
            lock.acquire()
            clear_run(files.new_run)


def clear_run(folder: Path) -> None:
    """Remove the files of a training run, then its folders as far as they are empty. Local."""
    for path in _own_files(folder):
        path.unlink()
    for path in (folder / "checkpoints", folder):
        with suppress(OSError):  # does not exist, or holds something that is not ours
            path.rmdir()


def replace_run(new: Path, old: Path) -> None:
    """Move the files of run `new` to `old`, whose own files go; unknown files stay where they are. Local."""
    clear_run(old)
    for path in _own_files(new):
        target = old / path.relative_to(new)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, target)
    clear_run(new)


def _own_files(folder: Path) -> list[Path]:
    """Those of `RUN_FILES` that are there. Links too whose file is gone: a pattern without a star misses these."""
    there = [*folder.glob("*"), *folder.glob("checkpoints/*")]
    return [p for p in there if any(p.relative_to(folder).match(pattern) for pattern in RUN_FILES)]
