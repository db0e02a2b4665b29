"""When a run writes a checkpoint, and what becomes of one that cannot be written."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from ..comm.errors import mark_agreed
from ..data.disk import DataError
from ..data.sampler import Sampler
from .checkpoint import Snapshot, TrainingProgress
from .convergence import BestScore
from .folder import CheckpointFolder
from .log import RunLog
from .optimizers import Optimizer
from .pass_loss import CHECKPOINT
from .reduction.auto import AutoReduction
from .session import Session

__all__ = ["Checkpoints"]

_log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of a run, by step, epoch and time. Collective over its communicator.

    Time is that of rank 0, whose vote travels with the loss: all ranks find a checkpoint due after the same step.

    Parameters
    ----------
    session, folder, log
        Of the run.
    optimizer, sampler, best, auto
        What a checkpoint holds beside the parameters.
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
    ) -> None:
        self._session, self._log = session, log
        self.folder = folder
        self._optimizer, self._sampler, self._best, self._auto = optimizer, sampler, best, auto
        config = session.config
        self._settings = config.output
        self._config_text = config.model_dump_json(exclude_unset=True)
        self._at = 0
        self._last = time.monotonic()

    def resumed(self, unvalidated: bool) -> None:
        """The present state is that of a checkpoint; an unvalidated one is to be written again. Local."""
        self._at = -1 if unvalidated else self._optimizer.step

    def vote(self) -> None:
        """Say with the next pass whether it is time. Local."""
        minutes, comm = self._settings.checkpoint_minutes, self._session.comm
        late = comm.rank == 0 and minutes > 0 and time.monotonic() - self._last >= 60 * minutes
        self._session.executor.votes[CHECKPOINT] = late

    @property
    def due(self) -> bool:
        """Whether the step that was just done is one to be kept, by its number or by time; alike on all ranks."""
        every, counted = self._settings.checkpoint_steps, self._session.executor.counted
        return counted[CHECKPOINT] > 0 or bool(every and self._optimizer.step % every == 0)

    def due_after(self, epoch: int) -> bool:
        """Whether this epoch, counted from 0, is one to be kept; alike on all ranks."""
        every = self._settings.checkpoint_epochs
        return bool(every and (epoch + 1) % every == 0)

    def write(self, needed: bool = False, unvalidated: bool = False, best: bool = False) -> Path | None:
        """Write a checkpoint of the present state, unless there is one: rank 0 does. Collective.

        The updates of all parameters are done.

        Parameters
        ----------
        needed
            Whether the run may not go on without. Otherwise a disk that takes no more is reported, and the next
            checkpoint tried when it is due.
        unvalidated
            See :class:`TrainingProgress`.
        best
            Whether its validation is the best so far.

        Returns
        -------
        The file; None if there was one already, or it could not be written.

        Raises
        ------
        DataError, OSError
            If it cannot be written and is `needed`; on all ranks. Older ones are as they were.
        """
        if self._optimizer.step == self._at:
            return None
        written = None
        self._session.executor.pulse.at("checkpoint", "")
        try:
            self._session.comm.agree(self._try(unvalidated, best))
            self._at = self._optimizer.step
            written = self.folder.path_of(self._at)
        except (DataError, OSError) as error:
            if needed:
                raise self._with_last(error) from error
            self._log.write("checkpoint_failed", step=self._optimizer.step, reason=str(error))
            if self._session.comm.rank == 0:
                _log.warning("step %d: %s; training goes on", self._optimizer.step, error)
        self._last = time.monotonic()
        self._session.executor.counted[CHECKPOINT] = 0  # answered: a device counts the next one a step late
        return written

    def _try(self, unvalidated: bool, best: bool) -> Exception | None:
        """Write on rank 0; what went wrong. Collective where parameters are cut."""
        session, statistics = self._session, self._session.samples.statistics
        scaling = session.executor.store.loss_scale
        progress = TrainingProgress(
            self._optimizer.step,
            session.config.training.seed,
            self._sampler.state_dict(),
            {name: found.state_dict() for name, found in statistics.items()},
            unvalidated,
            None if self._auto is None else self._auto.state_dict(),
            None if scaling is None else scaling.state_dict(),
            session.samples.drawn,
            session.source,
            self._best.state_dict(),
            session.samples.class_counts,
            session.samples.described,
        )
        snapshot = Snapshot.of(session.executor.store, self._optimizer, session.comm)
        if snapshot is None:
            return None
        try:
            path = self.folder.write(snapshot, progress, self._config_text, best)
            self._log.write("checkpoint", step=self._optimizer.step, path=str(path), best=best)
        except Exception as fault:
            return fault
        return None

    def last(self) -> str:
        """Which checkpoint a run can go on from, in words. Collective."""
        latest = self._session.comm.bcast(self.folder.latest)
        return f"the last good checkpoint is {latest.resolve()}" if latest else "no checkpoint was written yet"

    def _with_last(self, error: Exception) -> Exception:
        """The same error, which names the checkpoint before. Collective."""
        fault = DataError(f"{error}; {self.last()}")
        mark_agreed(fault, getattr(error, "arose_here", True), self._session.comm.size)
        return fault
