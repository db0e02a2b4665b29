"""Checkpoints of a run: one file for each, the times at which files are written, and the file from which a run
continues.

``latest.h5`` names the newest file and ``best.h5`` the best, as text. When a run is resumed, a damaged file is renamed
to a name that ends with ``.damaged``, and the file before it is used.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from halograd.documents import os_reason, replacing
from halograd.errors import UserError

from ..comm import Communicator
from ..comm.errors import mark_agreed
from ..data.disk import DataError, check_writable
from .checkpoint import (
    CheckpointReader,
    DamagedCheckpoint,
    Snapshot,
    TrainingProgress,
    UnusableCheckpoint,
    write_checkpoint,
)
from .directory import checkpoint_of
from .pass_loss import CHECKPOINT
from .root import on_root

if TYPE_CHECKING:
    from ..data.sampler import Sampler
    from .auto_reduction import AutoReduction
    from .log import RunLog
    from .monitors import BestScore
    from .optimizers import Optimizer
    from .schedules import Schedule
    from .session import Session

__all__ = ["CheckpointFolder", "Checkpoints"]

class CheckpointFolder:
    """Folder of files ``step-NNNNNNNN.h5``, and ``latest.h5`` and ``best.h5``, which each name one of them. Local: rank
    0 writes.

    Parameters
    ----------
    path
        Folder; created with the first checkpoint.
    keep
        Number of files to keep, in addition to the best one; older files are removed when a new one is complete.
    check
        Function that is called before each write; it raises if the folder now belongs to another run.
    """

    def __init__(self, path: str | Path, keep: int = 3, check: Callable[[], None] | None = None) -> None:
        self.path, self.keep, self._check = Path(path), keep, check
        self._unnamed: dict[str, str] = {}  # checkpoints that latest.h5 or best.h5 do not name yet
        self._warned: set[str] = set()

    def path_of(self, step: int) -> Path:
        """Return the path of the checkpoint after `step` updates."""
        return self.path / f"step-{step:08d}.h5"

    @property
    def latest(self) -> Path | None:
        """Path of the newest checkpoint; None if there is none."""
        # latest.h5 may be missing: its write may have failed.
        return self._named("latest") or next(reversed(self._files()), None)

    def check_writable(self) -> None:
        """Check early that checkpoints can be written; raise UserError if not. The check leaves no file."""
        try:
            check_writable(self.path_of(0))
        except DataError as error:
            raise UserError(
                f"output.directory: expected {self.path} to be a folder that checkpoints can be written to, got an "
                f"error ({error}); remove or repair it, or choose another directory"
            ) from error

    def newest_whole(self, comm: Communicator | None = None) -> tuple[CheckpointReader | None, list[str]]:
        """Open the newest undamaged checkpoint; return it (or None) with messages about newer files that are unusable.

        Collective over `comm`, local without one. The whole file is verified; the caller closes it. Rank 0 renames
        damaged files.

        Raises
        ------
        UserError
            If there are checkpoints, but no run can continue from any of them.
        """
        world = None if comm is None else comm.mpi
        faults: list[str] = []
        damaged = True
        for path in on_root(world, self._candidates):
            try:
                reader = CheckpointReader(path, comm, whole=True)
            except UnusableCheckpoint as error:
                # Without the remedy: another file is tried.
                faults.append(str(error).partition(";")[0])
                damaged = damaged and isinstance(error, DamagedCheckpoint)
                if isinstance(error, DamagedCheckpoint):
                    faults[-1] += on_root(world, partial(self._set_aside, path))
                continue
            if faults:
                # Other commands must find the file that is used, not the damaged one.
                on_root(world, partial(self._write_name, "latest", path.name))
                faults.append(f"{path.name} is used instead")
            return reader, faults
        if faults:
            none = "all are damaged" if damaged else "there is none"
            raise UserError(
                f"--resume: expected a checkpoint in {self.path} that can be read, {none}: {'; '.join(faults)}; "
                "restore a copy, or remove them to start from the beginning"
            )
        return None, faults

    def _candidates(self) -> list[Path]:
        """List the files, newest first, starting with the one that ``latest.h5`` names, if it names one."""
        files, newest = self._files()[::-1], self._named("latest")
        # Files after the one that latest.h5 names are those of a run that was set back to an earlier step.
        return [f for f in files if newest is None or f.name <= newest.name] or files

    def _set_aside(self, path: Path) -> str:
        aside = path.with_suffix(".damaged")
        try:
            os.replace(path, aside)
        except OSError as error:
            return f", cannot be set aside ({error.strerror})"
        return f", set aside as {aside.name}"

    def write(self, snapshot: Snapshot, progress: TrainingProgress, config: str, best: bool = False) -> Path:
        """Write a checkpoint, name it in ``latest.h5`` (if `best`, in ``best.h5`` too), and remove those beyond `keep`;
        return its path. `config` is the text of the configuration.

        A failure after the checkpoint is complete is reported once, and the action is tried again with the next
        checkpoint.
        """
        if self._check is not None:
            self._check()
        self.path.mkdir(parents=True, exist_ok=True)
        path = self.path_of(progress.step)
        write_checkpoint(path, snapshot, progress, config)
        for name, target in {**self._unnamed, "latest": path.name, **({"best": path.name} if best else {})}.items():
            self._write_name(name, target)
        chosen = self._named("best")
        # Also files that best.h5 is yet to name.
        kept = {*self._unnamed.values(), *([] if chosen is None else [chosen.name])}
        # Newer files belong to a run that was set back to an earlier step; it will write them again.
        old = [f for f in self._files() if f.name <= path.name][: -self.keep]
        self._remove([f for f in old if f.name not in kept])
        # Left by a job that was killed while it wrote a checkpoint.
        self._remove(self.path.glob(".*.partial"))
        return path

    def _remove(self, paths: Iterable[Path]) -> None:
        for path in paths:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                self._warn("removed", path, error, "it stays, and is ignored; the next checkpoint tries again")

    def _write_name(self, name: str, target: str) -> None:
        """Write the name `target` of a checkpoint into ``latest.h5`` or ``best.h5``; after a failure, remove that file,
        which may have a wrong name.
        """
        path = self.path / f"{name}.h5"
        try:
            with replacing(path) as partial:
                partial.write_text(f"{target}\n", encoding="ascii")
            self._unnamed.pop(name, None)
        except OSError as error:
            self._unnamed[name] = target  # the next checkpoint tries again
            with suppress(OSError):
                path.unlink(missing_ok=True)
            self._warn("written", path, error, f"{target} is complete, and is found by its name")

    def _warn(self, what: str, path: Path, error: OSError, effect: str) -> None:
        """Warn of a fault that does not end the run, once per kind."""
        if what not in self._warned:
            _log.warning("%s cannot be %s: %s; %s", path, what, os_reason(error) or error.strerror, effect)
        self._warned.add(what)

    def _named(self, name: str) -> Path | None:
        """Return the file that ``latest.h5`` or ``best.h5`` names, None if there is none."""
        path = self.path / f"{name}.h5"
        checkpoint = checkpoint_of(path)
        # Without a name in it, `checkpoint_of` returns the path itself.
        return checkpoint if os.path.isfile(checkpoint) and checkpoint.name != path.name else None

    def _files(self) -> list[Path]:
        return sorted(path for path in self.path.glob("step-*.h5") if path.is_file())


_log = logging.getLogger(__name__)


class Checkpoints:
    """Writer of the checkpoints of a run, by step, epoch and time. Collective over the session's communicator.

    Rank 0 measures time and votes through the loss reduction, so a checkpoint is due after the same step on all ranks.

    Parameters
    ----------
    session, folder, log
        Session, folder and log of the run.
    optimizer, sampler, best, auto, schedule
        Objects whose state a checkpoint holds in addition to the parameters.
    """

    def __init__(
        self,
        session: Session,
        folder: CheckpointFolder,
        log: RunLog,
        optimizer: Optimizer,
        sampler: Sampler,
        best: BestScore,
        auto: AutoReduction | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        self._schedule = schedule
        self._session, self._log = session, log
        self.folder = folder
        self._optimizer, self._sampler, self._best, self._auto = optimizer, sampler, best, auto
        config = session.config
        self._settings = config.output
        self._config_text = config.model_dump_json(exclude_unset=True)
        # Step of the state that has a checkpoint; a state without updates needs none.
        self._at = 0
        self._written = False
        self._last = time.monotonic()

    def resumed(self, unvalidated: bool) -> None:
        """Record that the current state is that of a checkpoint; if `unvalidated`, it is written again. Local."""
        self._at, self._written = -1 if unvalidated else self._optimizer.step, True

    def vote(self) -> None:
        """Vote with the next pass whether a checkpoint is due by time. Local."""
        minutes, comm = self._settings.checkpoint_minutes, self._session.comm
        late = comm.rank == 0 and minutes > 0 and time.monotonic() - self._last >= 60 * minutes
        self._session.executor.pass_loss.votes[CHECKPOINT] = late

    @property
    def due(self) -> bool:
        """Whether a checkpoint is due after this step, by its number or by time; the same on all ranks."""
        every, counted = self._settings.checkpoint_steps, self._session.executor.pass_loss.counted
        return counted[CHECKPOINT] > 0 or bool(every and self._optimizer.step % every == 0)

    def due_after(self, epoch: int) -> bool:
        """Return whether a checkpoint is due after this epoch, counted from 0; the same on all ranks."""
        every = self._settings.checkpoint_epochs
        return bool(every and (epoch + 1) % every == 0)

    def write(self, needed: bool = False, unvalidated: bool = False, best: bool = False) -> Path | None:
        """Write a checkpoint of the current state on rank 0, unless this state has one already. Collective.

        The updates of all parameters must be done.

        Parameters
        ----------
        needed
            Whether an error ends the run. Otherwise an error, such as a full disk, is reported, and the run continues.
        unvalidated
            See :class:`TrainingProgress`.
        best
            Whether the validation of this state is the best so far.

        Returns
        -------
        Path of the checkpoint; None if the state has a checkpoint already, or if it could not be written.

        Raises
        ------
        DataError
            If the checkpoint cannot be written and is `needed`; on all ranks. Older checkpoints are not changed.
        UserError
            If another run has taken the directory over.
        """
        step, comm, path = self._optimizer.step, self._session.comm, None
        if step == self._at:
            return None
        self._session.executor.heartbeat.at("checkpoint", "")
        snapshot = Snapshot.of(self._session.executor.store, self._optimizer, comm)
        try:
            with comm.agreement():
                if snapshot is not None:
                    written = self.folder.write(snapshot, self._progress(unvalidated), self._config_text, best)
                    self._log.write("checkpoint", step=step, path=str(written), best=best)
            self._at, self._written, path = step, True, self.folder.path_of(step)
        except (DataError, OSError) as error:
            if needed:
                fault = DataError(f"{error}; {self.last()}")
                mark_agreed(fault, getattr(error, "arose_here", True), comm.size)
                raise fault from error
            self._log.write("checkpoint_failed", step=step, reason=str(error))
            if comm.rank == 0:
                _log.warning("step %d: %s; training continues", step, error)
        # Also after a failure: the next attempt follows an interval later, not after the next step.
        self._last = time.monotonic()
        self._session.executor.pass_loss.counted[CHECKPOINT] = 0  # reset: a device counts the next vote one step late
        return path

    def _progress(self, unvalidated: bool) -> TrainingProgress:
        samples, scaling = self._session.samples, self._session.executor.store.loss_scale
        return TrainingProgress(
            step=self._optimizer.step,
            seed=self._session.config.training.seed,
            sampler=self._sampler.state_dict(),
            normalization={name: statistics.state_dict() for name, statistics in samples.statistics.items()},
            unvalidated=unvalidated,
            reduction=None if self._auto is None else self._auto.state_dict(),
            loss_scale=None if scaling is None else scaling.state_dict(),
            drawn=samples.drawn,
            source=self._session.source,
            best=self._best.state_dict(),
            class_counts=samples.class_counts,
            described=samples.described,
            schedule={} if self._schedule is None else self._schedule.state_dict(),
        )

    def last(self) -> str:
        """Return a string that names the checkpoint from which a run can continue, if there is one. Collective."""
        return on_root(self._session.comm.mpi, self._last_text)

    def _last_text(self) -> str:
        try:
            latest = self.folder.latest
        except OSError as error:
            return f"whether {self.folder.path} has a good checkpoint is unknown ({error.strerror})"
        if latest is not None:
            return f"the last good checkpoint is {os.path.realpath(latest)}"
        if not self._written:
            return "no checkpoint was written yet"
        return f"the checkpoints that were written are no longer in {self.folder.path}"
