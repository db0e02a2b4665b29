"""The checkpoints of a run: one file per step, the last few kept, ``latest.h5`` pointing to the newest.

A file that turns out to be damaged when a run wants to continue from it is set aside, under a name that ends with
``.damaged``, and the one before it is taken.
"""

from __future__ import annotations

import os
from pathlib import Path

from halograd.errors import UserError
from halograd.training.checkpoint import DamagedCheckpoint, Progress, Snapshot, verify_checkpoint, write_checkpoint

__all__ = ["CheckpointFolder"]


class CheckpointFolder:
    """Writes ``step-NNNNNNNN.h5`` and the symbolic link ``latest.h5``. Local: rank 0 writes.

    Parameters
    ----------
    path
        Folder; made with the first checkpoint.
    keep
        Number of files kept up to the newest written; older ones are removed after it is complete.
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

    def newest_whole(self) -> tuple[Path | None, list[str]]:
        """The newest checkpoint that can be read to its end, and what there is to tell of newer ones.

        Reads whole files. Damaged ones are set aside.

        Raises
        ------
        UserError
            If there are checkpoints, but all are damaged; or one of another format.
        """
        told: list[str] = []
        for path in self._candidates():
            try:
                verify_checkpoint(path)
            except DamagedCheckpoint as error:
                told.append(f"{error.reason}; set aside as {self._set_aside(path).name}")
                continue
            if told:
                self._point_to(path)
                told.append(f"{path.name} is taken instead")
            return path, told
        if told:
            raise UserError(
                f"--resume: expected a checkpoint in {self.path} that can be read, all are damaged: {'; '.join(told)}; "
                "bring back a copy, or remove them to begin anew"
            )
        return None, told

    def _candidates(self) -> list[Path]:
        """Newest first, beginning with the one that ``latest.h5`` points to."""
        files, link = self._files()[::-1], self.path / "latest.h5"
        target = link.resolve().name if link.exists() else ""
        return [f for f in files if not target or f.name <= target] or files

    def _set_aside(self, path: Path) -> Path:
        aside = path.with_suffix(".damaged")
        os.replace(path, aside)
        return aside

    def write(self, snapshot: Snapshot, progress: Progress, config: str) -> Path:
        """Write one checkpoint, point ``latest.h5`` to it, and remove the oldest."""
        self.path.mkdir(parents=True, exist_ok=True)
        path = self.path / f"step-{progress.step:08d}.h5"
        write_checkpoint(path, snapshot, progress, config)
        self._point_to(path)
        # Newer ones are of a run that was taken back to an earlier step: it comes to them again.
        for old in [f for f in self._files() if f.name <= path.name][: -self.keep]:
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
