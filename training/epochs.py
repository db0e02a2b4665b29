"""A run: epochs of training steps with validation, log, checkpoints and resumption."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, SupportsFloat

import numpy as np

from halograd.data import Batch
from halograd.training.build import make_optimizer, make_schedule
from halograd.training.checkpoint import Progress, Snapshot, read_checkpoint
from halograd.training.folder import CheckpointFolder
from halograd.training.log import RunLog
from halograd.training.metrics import Evaluation
from halograd.training.session import Session
from halograd.training.step_times import StepTimes
from halograd.training.trainer import Diverged, Trainer

__all__ = ["Run", "evaluate_batches"]


class Run:
    """Trains a session to its last epoch. Collective over its communicator.

    Everything that decides the result is a function of the configuration and the step, so a run that is
    killed and resumed, on any number of ranks, goes through the same steps.

    With `measures`, a few steps in the middle are measured layer by layer (`step_times`).
    """

    def __init__(self, session: Session, folder: CheckpointFolder, log: RunLog, measures: bool = False) -> None:
        config = session.config
        self.session, self.folder, self.log, self.measures = session, folder, log, measures
        self.sampler = session.sampler()
        self.epochs = config.training.epochs
        executor = session.executor
        self.optimizer = make_optimizer(config.optimizer, executor.store)
        schedule = make_schedule(config.schedule, self.epochs, len(self.sampler))
        self.trainer = Trainer(executor, self.optimizer, schedule, config.training.clip_norm)
        self.evaluation = Evaluation(executor)
        self._held_out = session.in_order(session.validation) if len(session.validation) else []
        self._config_text = config.model_dump_json(exclude_unset=True)
        self._checkpoint_at = -1
        self.step_times: StepTimes | None = None
        self.validation: dict[str, Any] = {}

    def resume(self, path: Path) -> None:
        """Continue from a checkpoint, of whatever decomposition. Collective; every rank reads the file."""
        comm = self.session.comm
        with comm.agreement():
            progress = read_checkpoint(path, self.session.executor.store, self.optimizer)
            self.sampler.load_state_dict(progress.sampler)
        self._checkpoint_at = self.optimizer.step

    def train(self) -> dict[str, Any]:
        """Train to the last epoch; steps done, last loss and validation.

        Raises
        ------
        Diverged
            On all ranks, if the loss or a parameter is not finite any more.
        """
        result: dict[str, Any] = {"loss": None}
        if self.measures and self.session.timeline is not None:
            last = self.epochs * len(self.sampler)
            self.step_times = StepTimes(self.session.executor, self.session.timeline, self.optimizer.step, last)
        try:
            # A loss that overflows is told in one line, not by warnings of the arithmetic on every rank.
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                while self.sampler.epoch < self.epochs:
                    result["loss"] = self._epoch()
        except Diverged as error:
            raise self._stopped(error) from None
        return {**result, "steps": self.optimizer.step, "validation": self.validation}

    def _epoch(self) -> float:
        epoch, settings, loss = self.sampler.epoch, self.session.config.output, float("nan")
        begin = time.perf_counter()
        for batch in self.session.feed(self.sampler.rest_of_epoch()):
            rate = self.trainer.learning_rate
            loss = self._step(begin)
            self.sampler.advance()
            end = time.perf_counter()
            self._tell(epoch, batch, loss, rate, end - begin)
            begin = end
            due = settings.checkpoint_steps and self.optimizer.step % settings.checkpoint_steps == 0
            if due and self.sampler.epoch == epoch:  # at the end of an epoch it is written after the validation
                self.checkpoint()
                begin = time.perf_counter()
        self._end_epoch(epoch, float(loss))
        return float(loss)

    def _step(self, begin: float) -> SupportsFloat:
        """One training step, measured if it is its turn; `begin`: when its batch was asked for."""
        if self.step_times is None:
            return self.trainer.step()
        number, ready = self.optimizer.step, time.perf_counter()
        self.step_times.begin(number)
        loss = self.trainer.step()
        self.step_times.end(number, time.perf_counter() - ready, ready - begin)
        return loss

    def _tell(self, epoch: int, batch: Batch, loss: SupportsFloat, rate: float, seconds: float) -> None:
        step, every = self.optimizer.step, self.session.config.output.log_steps
        total = self.epochs * len(self.sampler)
        self.log.move(step, total, f"epoch {epoch + 1}/{self.epochs}  loss {self.trainer.known_loss:.4f}")
        if step % every and step != total:
            return
        values: dict[str, Any] = {"epoch": epoch, "step": step, "loss": float(loss), "learning_rate": rate}
        if self.trainer.gradient_norm is not None:
            values["gradient_norm"] = float(self.trainer.gradient_norm)
        values |= {"seconds": seconds, "samples_per_second": batch.valid / seconds}
        self.log.write("step", **values)

    def _end_epoch(self, epoch: int, loss: float) -> None:
        self.trainer.settle()
        text = f"epoch {epoch + 1}/{self.epochs}: loss {loss:.5f}"
        if self._held_out:
            self.validation = self.validate()
            self.log.write("validation", epoch=epoch, step=self.optimizer.step, **self.validation)
            text += ", validation " + describe(self.validation)
        self.log.say(text)
        settings = self.session.config.output
        by_epoch = settings.checkpoint_epochs and (epoch + 1) % settings.checkpoint_epochs == 0
        by_step = settings.checkpoint_steps and self.optimizer.step % settings.checkpoint_steps == 0
        if by_epoch or by_step or epoch + 1 == self.epochs:
            self.checkpoint()

    def validate(self) -> dict[str, Any]:
        """Loss and metrics of the held-out samples. Collective."""
        timeline = self.session.timeline
        paused = timeline is not None and timeline.paused
        if timeline is not None:
            timeline.paused = True
        try:
            return evaluate_batches(self.session, self.evaluation, self._held_out)
        finally:
            if timeline is not None:
                timeline.paused = paused

    def checkpoint(self) -> None:
        """Write a checkpoint: rank 0 does. Collective; a fault is raised on all ranks."""
        self.trainer.settle()
        if self.optimizer.step == self._checkpoint_at:
            return
        session, fault = self.session, None
        statistics = session.statistics
        progress = Progress(
            self.optimizer.step,
            session.config.training.seed,
            self.sampler.state_dict(),
            None if statistics is None else statistics.state_dict(),
        )
        snapshot = Snapshot.of(session.executor.store, self.optimizer, session.comm)
        if snapshot is not None:
            try:
                path = self.folder.write(snapshot, progress, self._config_text)
                self.log.write("checkpoint", step=self.optimizer.step, path=str(path))
            except Exception as error:
                fault = error
        session.comm.agree(fault)
        self._checkpoint_at = self.optimizer.step

    def _stopped(self, error: Diverged) -> Diverged:
        latest = self.session.comm.bcast(self.folder.latest)
        where = f"the last good checkpoint is {latest.resolve()}" if latest else "no checkpoint was written yet"
        self.log.write("stopped", step=self.optimizer.step, reason=str(error))
        return Diverged(f"{error}; {where}")


def evaluate_batches(session: Session, evaluation: Evaluation, batches: list[Batch]) -> dict[str, Any]:
    """Loss and metrics of these batches. Collective."""
    evaluation.begin()
    for _ in session.feed(batches):
        session.executor.forward(training=False)
        evaluation.add()
    return evaluation.finish()


def describe(metrics: dict[str, Any]) -> str:
    """Metrics in a line."""
    return ", ".join(f"{name} {'undefined' if value is None else f'{value:.4f}'}" for name, value in metrics.items())
