"""The checkpoints of a run: one file per step, the last few kept, ``latest.h5`` pointing to the newest."""

from __future__ import annotations

import os
from pathlib import Path

from halograd.training.checkpoint import Progress, Snapshot, write_checkpoint

__all__ = ["CheckpointFolder"]


class CheckpointFolder:
    """Writes ``step-NNNNNNNN.h5`` and the symbolic link ``latest.h5``. Local: rank 0 writes.

    Parameters
    ----------
    path
        Folder; made with the first checkpoint.
    keep
        Number of files kept; older ones are removed after a newer one is complete.
    """

    def __init__(self, path: str | Path, keep: int = 3) -> None:
        self.path, self.keep = Path(path), keep

    @property
    def latest(self) -> Path | None:
        """The newest checkpoint, None if there is none."""
        link = self.path / "latest.h5"
        if link.exists():
            return link
        files = self._files()
        return files[-1] if files else None

    def write(self, snapshot: Snapshot, progress: Progress, config: str) -> Path:
        """Write one checkpoint, point ``latest.h5`` to it, and remove the oldest."""
        self.path.mkdir(parents=True, exist_ok=True)
        path = self.path / f"step-{progress.step:08d}.h5"
        write_checkpoint(path, snapshot, progress, config)
        self._point_to(path)
        for old in self._files()[: -self.keep]:
            if old != path:
                old.unlink()
        for left in self.path.glob(".step-*.partial"):
            left.unlink()
        return path

    def _point_to(self, path: Path) -> None:
        link = self.path / ".latest.new"
        link.unlink(missing_ok=True)
        link.symlink_to(path.name)
        os.replace(link, self.path / "latest.h5")

    def _files(self) -> list[Path]:
        return sorted(self.path.glob("step-*.h5"))
