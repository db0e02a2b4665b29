"""The checkpoints of a run: one file per step, ``latest.h5`` pointing to the newest and ``best.h5`` to the best.

A file that turns out to be damaged when a run wants to continue from it is set aside, under a name that ends with
``.damaged``, and the one before it is taken.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from halograd.errors import UserError

from ..comm import Communicator
from .checkpoint import (
    CheckpointReader,
    DamagedCheckpoint,
    Snapshot,
    TrainingProgress,
    UnusableCheckpoint,
    write_checkpoint,
)
from .root import on_root

__all__ = ["CheckpointFolder"]

Result = TypeVar("Result")


class CheckpointFolder:
    """Writes ``step-NNNNNNNN.h5`` and the symbolic links ``latest.h5`` and ``best.h5``. Local: rank 0 writes.

    Parameters
    ----------
    path
        Folder; made with the first checkpoint.
    keep
        Number of files kept up to the newest written, beside the best one; older ones are removed after it is complete.
    check
        Called before anything is written; raises if the folder is not this run's any more.
    """

    def __init__(self, path: str | Path, keep: int = 3, check: Callable[[], None] | None = None) -> None:
        self.path, self.keep, self._check = Path(path), keep, check

    def path_of(self, step: int) -> Path:
        """Where the checkpoint after so many steps lies."""
        return self.path / f"step-{step:08d}.h5"

    @property
    def latest(self) -> Path | None:
        """The newest checkpoint, None if there is none."""
        link = self.path / "latest.h5"
        if link.exists():
            return link
        files = self._files()
        return files[-1] if files else None

    def newest_whole(self, comm: Communicator | None = None) -> tuple[CheckpointReader | None, list[str]]:
        """The newest checkpoint whose bytes are those that were written, and what there is to tell of newer ones.

        Collective over `comm`, local without one. All of it was read; the caller closes it. Damaged files are set aside
        by rank 0.

        Raises
        ------
        UserError
            If there are checkpoints, but no run can go on from any.
        """
        faults: list[str] = []
        damaged = True
        for path in _on_first(comm, self._candidates):
            try:
                found = CheckpointReader(path, comm, whole=True)
            except UnusableCheckpoint as error:
                faults.append(error.reason)
                damaged = damaged and isinstance(error, DamagedCheckpoint)
                if isinstance(error, DamagedCheckpoint):
                    faults[-1] += _on_first(comm, partial(self._set_aside, path))
                continue
            if faults:
                _on_first(comm, partial(self._point_back, path))
                faults.append(f"{path.name} is taken instead")
            return found, faults
        if faults:
            none = "all are damaged" if damaged else "there is none"
            raise UserError(
                f"--resume: expected a checkpoint in {self.path} that can be read, {none}: {'; '.join(faults)}; "
                "bring back a copy, or remove them to begin anew"
            )
        return None, faults

    def _candidates(self) -> list[Path]:
        """Newest first, beginning with the one that ``latest.h5`` points to."""
        files, link = self._files()[::-1], self.path / "latest.h5"
        target = link.resolve().name if link.exists() else ""
        return [f for f in files if not target or f.name <= target] or files

    def _set_aside(self, path: Path) -> str:
        aside = path.with_suffix(".damaged")
        try:
            os.replace(path, aside)
        except OSError as error:
            return f", cannot be set aside ({error.strerror})"
        return f", set aside as {aside.name}"

    def write(self, snapshot: Snapshot, progress: TrainingProgress, config: str, best: bool = False) -> Path:
        """Write one checkpoint, point ``latest.h5`` to it, if it is the best ``best.h5`` too, and remove the oldest."""
        if self._check is not None:
            self._check()
        self.path.mkdir(parents=True, exist_ok=True)
        path = self.path_of(progress.step)
        write_checkpoint(path, snapshot, progress, config)
        self._point_to(path)
        if best:
            self._point_to(path, "best")
        chosen = self.path / "best.h5"
        kept = chosen.resolve().name if chosen.exists() else ""
        # Newer ones are of a run that was taken back to an earlier step: it comes to them again.
        for old in [f for f in self._files() if f.name <= path.name][: -self.keep]:
            if old.name != kept:
                old.unlink()
        for left in self.path.glob(".step-*.partial"):
            left.unlink()
        return path

    def _point_to(self, path: Path, name: str = "latest") -> None:
        link = self.path / f".{name}.new"
        link.unlink(missing_ok=True)
        link.symlink_to(path.name)
        os.replace(link, self.path / f"{name}.h5")

    def _point_back(self, path: Path) -> None:
        with suppress(OSError):  # where it cannot be written, the file is found by its name
            self._point_to(path)

    def _files(self) -> list[Path]:
        return sorted(path for path in self.path.glob("step-*.h5") if path.is_file())


def _on_first(comm: Communicator | None, call: Callable[[], Result]) -> Result:
    """What `call` returns on rank 0, on all ranks. Collective over `comm`, local without one."""
    return call() if comm is None else on_root(comm.mpi, call)
