"""A run: epochs of training steps with validation, log, checkpoints and resumption."""

from __future__ import annotations

import logging
import math
import platform
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, SupportsFloat

import numpy as np

from halograd.documents import bytes_text
from halograd.errors import UserError

from ..data import Batch
from ..layers.reduction_scheme import Scheme
from .auto_reduction import Tuning, report_to
from .build import make_optimizer
from .checkpoint import CheckpointReader
from .checkpoints import CheckpointFolder, Checkpoints
from .config import Config
from .evaluation import Evaluation
from .log import Entry, RunLog, read_log
from .monitors import BestScore, Callback, LossWatch, is_defined
from .pass_loss import STOP
from .schedules import SCHEDULES, make_schedule
from .session import Session
from .signals import CHECKPOINTED, StopSignals
from .step_times import StepTimes
from .trainer import Diverged, Trainer

__all__ = ["TrainingRun", "evaluate_batches"]

_log = logging.getLogger(__name__)

_REMEDY = "hold out other samples (data.validation, data.split, training.seed), or choose another score (output.best)"


class TrainingRun:
    """Training of a session to its last epoch. Collective over its communicator.

    The results depend only on the configuration and the step, so a run that is killed and resumed, on any number of
    ranks, makes the same steps.

    With `measures`, a few steps in the middle are measured layer by layer (`step_times`). With `signals`, the run stops
    with a checkpoint after the step in which any rank receives a signal; `stopped_by` then names it. If gradient
    reduction is ``"auto"``, the `ranked` schemes are tried first. `steps` counts the steps of this job. `callbacks` are
    called in order.
    """

    def __init__(
        self,
        session: Session,
        folder: CheckpointFolder,
        log: RunLog,
        measures: bool = False,
        signals: StopSignals | None = None,
        ranked: Sequence[Scheme] = (),
        callbacks: Sequence[Callback] = (),
    ) -> None:
        config = session.config
        self.session, self.log, self.measures = session, log, measures
        self.signals = signals or StopSignals()
        self.stopped_by: str | None = None
        self.callbacks = tuple(callbacks)
        self.sampler = session.sampler()
        self.epochs = config.training.epochs
        executor = session.executor
        self.optimizer = make_optimizer(config, executor.store)
        schedule = make_schedule(config.schedule, self.epochs, len(self.sampler))
        table = config.reduction
        tuning = Tuning(table.interval, table.step, table.range)
        self.trainer = Trainer(executor, self.optimizer, schedule, config.training.clip_norm, ranked, tuning)
        if self.trainer.auto is not None:
            report_to(log, self.trainer.auto, lambda: self.optimizer.step)
        self.evaluation = Evaluation(executor, metrics=config.output.metrics)
        self.watch = LossWatch(session.samples.target_scale if self.evaluation.of_numbers else 0.0)
        self._held_out: Sequence[Batch] = (
            session.in_order(session.samples.validation) if len(session.samples.validation) else []
        )
        names = self.evaluation.names if self._held_out else {}
        self.best = BestScore(_score(config), names, config.training.patience)
        self._unvalidated = self._warned = False
        self.checkpoints = Checkpoints(session, folder, log, self.optimizer, self.sampler, self.best, self.trainer.auto)
        self.step_times: StepTimes | None = None
        self.steps = 0
        self.validation: dict[str, Any] = {}

    def resume(self, checkpoint: CheckpointReader) -> None:
        """Continue from a checkpoint of any decomposition, open on the ranks of the run. Collective."""
        comm = self.session.comm
        progress = checkpoint.restore(self.session.executor.store, self.optimizer)
        with comm.agreement():
            self.sampler.load_state_dict(progress.sampler)
            self.session.samples.check_drawn(progress.drawn, "start anew")
            self.session.warn_of_changes(progress.source)
            entries = read_log(self.log.path) if comm.rank == 0 else []
            judged = self._judged_before(entries)
            self._warn_of_schedule(entries)
        self.watch.first, self.watch.diverged = comm.bcast(judged)
        if self.trainer.auto is not None and progress.reduction is not None:
            self.trainer.auto.load_state_dict(progress.reduction)
        if progress.best is not None:
            self.best.load_state_dict(progress.best)
        self._unvalidated = progress.unvalidated
        self.checkpoints.resumed(progress.unvalidated)

    def _judged_before(self, entries: Sequence[Entry]) -> tuple[float, str | None]:
        """Return the first logged loss, and the divergence that was logged when the checkpoint was written."""
        first = next((entry["loss"] for entry in entries if entry["event"] == "step"), math.nan)
        last = {entry["step"]: entry["reason"] for entry in entries if entry["event"] == "diverged"}
        return first, last.get(self.optimizer.step)

    def _warn_of_schedule(self, entries: Sequence[Entry]) -> None:
        """Warn if the learning rate jumps because the resumed run has another schedule or number of epochs."""
        before = next((entry for entry in reversed(entries) if entry["event"] == "begin"), None)
        if before is None:
            return
        step, now = self.optimizer.step, self.trainer.learning_rate
        try:
            table = before["config"]["schedule"]
            schedule = SCHEDULES.settings(table["kind"], table)
        except (KeyError, UserError):  # a log of another version
            return
        was = make_schedule(schedule, before["epochs"], before["steps_per_epoch"])(step)
        if not math.isclose(was, now, rel_tol=1e-9):
            _log.warning(
                "the schedule has changed (%d epochs before, %d now): the learning rate of step %d is %.3g, "
                "it would have been %.3g",
                before["epochs"],
                self.epochs,
                step + 1,
                now,
                was,
            )

    def train(self) -> dict[str, Any]:
        """Train to the last epoch, or until a stop signal.

        Returns
        -------
        dict
            Number of ``steps``, last ``loss``, ``validation``, the ``best`` one (:meth:`BestScore.state_dict`);
            ``stopped``: the signal that stopped the run before its end, else None; ``diverged``: a text if a loss of
            the last epoch was far above the first one (:class:`LossWatch`), else None.

        Raises
        ------
        Diverged
            On all ranks, if the loss or a parameter is no longer finite.
        """
        result: dict[str, Any] = {"loss": None}
        if self.measures and self.session.timeline is not None:
            last = self.epochs * len(self.sampler)
            self.step_times = StepTimes(self.session.executor, self.session.timeline, self.optimizer.step, last)
        try:
            # The run reports an overflow in one line, instead of NumPy's warnings on every rank.
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                self._begin()
                while self.sampler.epoch < self.epochs and self.stopped_by is None and not self.best.exhausted:
                    result["loss"] = self._epoch()
        except Diverged as error:
            raise self._diverged(error) from None
        if self.stopped_by is not None:
            self.log.write("stopped", step=self.optimizer.step, reason=self.stopped_by, code=CHECKPOINTED)
        elif self.sampler.epoch == self.epochs:
            self._report_missing()
        result |= {"steps": self.optimizer.step, "validation": self.validation, "best": self.best.state_dict()}
        return {**result, "stopped": self.stopped_by, "diverged": self.watch.diverged}

    def _begin(self) -> None:
        """Stop at once if a signal arrived during set-up; else do a validation that the last job left out."""
        asked = self.session.comm.allreduce_scalar(self.signals.vote, "max")
        if asked and (self._unvalidated or self.sampler.epoch < self.epochs):  # otherwise the run is complete
            self._stop(self._unvalidated)
        elif self._unvalidated:
            self._end_epoch(self.sampler.epoch - 1)

    def _epoch(self) -> float:
        epoch = self.sampler.epoch
        loss: SupportsFloat = math.nan
        begin = asked = time.perf_counter()
        count = self.session.executor.parts
        parts = (part for batch in self.sampler.rest_of_epoch() for part in batch.parts(count))
        for number, _ in enumerate(self.session.feed(parts), 1):
            self.session.executor.pulse.step = self.optimizer.step
            self._vote()
            if number % count:
                self.trainer.add()
                asked = time.perf_counter()
                continue
            rate = self.trainer.learning_rate
            loss = self._step(asked)
            self.watch.add(loss)
            self.steps += 1
            self.sampler.advance()
            end = time.perf_counter()
            self._log_step(epoch, loss, rate, end - begin)
            for callback in self.callbacks:
                callback.on_step(self.optimizer.step, loss, rate)
            begin = asked = end
            ended = self.sampler.epoch != epoch
            through = ended and self.sampler.epoch == self.epochs and not self._held_out
            if self._asked_to_stop and not through:
                self._stop(ended and bool(self._held_out))
                return float(loss)
            if self.checkpoints.due and not ended:  # at the end of an epoch, it is written after the validation
                self._checkpoint()
                begin = asked = time.perf_counter()
        self._end_epoch(epoch)
        return float(loss)

    def _step(self, asked: float) -> SupportsFloat:
        """Make a training step, or its last part, and measure it if due. `asked` is the time at which samples were
        requested.
        """
        if self.step_times is None:
            return self.trainer.step()
        number, ready = self.optimizer.step, time.perf_counter()
        self.step_times.begin(number)
        loss = self.trainer.step()
        self.step_times.end(number, time.perf_counter() - ready, ready - asked)
        return loss

    def _log_step(self, epoch: int, loss: SupportsFloat, rate: float, seconds: float) -> None:
        step, every = self.optimizer.step, self.session.config.output.log_steps
        total = self.epochs * len(self.sampler)
        self.log.move(step, total, f"epoch {epoch + 1}/{self.epochs}  mean loss {self.watch.mean:.4f}")
        if step % every and step not in (1, total):  # later losses are compared with the first one
            return
        values: dict[str, Any] = {"epoch": epoch, "step": step, "loss": float(loss), "learning_rate": rate}
        if self.trainer.gradient_norm is not None:
            values["gradient_norm"] = float(self.trainer.gradient_norm)
        if self.trainer.loss_scale is not None:
            values["loss_scale"] = self.trainer.loss_scale
        values |= {"seconds": seconds, "samples_per_second": self.session.config.training.batch / seconds}
        self.log.write("step", **values)

    def _vote(self) -> None:
        """Set the votes of this rank for the loss reduction of the next pass."""
        self.session.executor.votes[STOP] = self.signals.vote
        self.checkpoints.vote()

    @property
    def _asked_to_stop(self) -> bool:
        """Whether a rank had received a signal before the last pass; the same on all ranks."""
        return bool(self.session.executor.counted[STOP] > 0)

    def _checkpoint(self, needed: bool = False, unvalidated: bool = False, best: bool = False) -> None:
        """Write a checkpoint (:class:`Checkpoints`). Collective."""
        self.trainer.settle()
        path = self.checkpoints.write(needed, unvalidated, best)
        if path is not None:
            for callback in self.callbacks:
                callback.on_checkpoint(self.optimizer.step, path, best)

    def _stop(self, unvalidated: bool) -> None:
        """Write a checkpoint, and record the signal of the first rank that received one. Collective."""
        self._checkpoint(needed=True, unvalidated=unvalidated)
        votes = self.session.comm.allgather_objects(self.signals.vote)
        rank = next(rank for rank, vote in enumerate(votes) if vote)
        self.stopped_by = f"{signal.Signals(votes[rank]).name} to rank {rank} of {len(votes)}"

    def _end_epoch(self, epoch: int) -> None:
        """Validate, and write a checkpoint if due; stop if a signal arrives in that time. Collective."""
        self.trainer.settle()
        mean = self.watch.end_epoch()
        text = f"epoch {epoch + 1}/{self.epochs}: " + ("resumed" if math.isnan(mean) else f"mean loss {mean:.5f}")
        due, better = self.checkpoints.due, False
        if self._held_out:
            found = self.validate()
            if found is None:
                self._stop(unvalidated=True)
                return  # the scores of part of the samples are no validation
            self.validation, better = found, self._is_best(found, epoch)
            self.log.write("validation", epoch=epoch, step=self.optimizer.step, **self.validation)
            text += ", validation " + describe(self.validation) + (" (best)" if better and epoch else "")
        self.log.say(text)
        self._judge(epoch)
        for callback in self.callbacks:
            callback.on_epoch(epoch, self.validation)
        self._log_phases()
        last = epoch + 1 == self.epochs or self.best.exhausted
        if self._unvalidated or last or due or better or self.checkpoints.due_after(epoch):
            self._checkpoint(needed=last, best=better)
        if self.best.exhausted:
            self._give_up()
        self._unvalidated = False

    def _is_best(self, found: dict[str, Any], epoch: int) -> bool:
        """Return whether a validation is the best so far; warn once if its score is undefined. Local.

        If all targets have one class, a model that always predicts it has the best loss. Such a validation counts only
        if `output.best` names the score.
        """
        best, lacking = self.best, self.evaluation.lacking_text
        judged = {} if self.evaluation.blind and self.session.config.output.best is None else found
        undefined = best.name != "none" and not is_defined(judged.get(best.name))
        if (lacking or undefined) and not self._warned:
            self._warned = True
            no = ": it is no candidate for best.h5, and training.patience does not count it" if undefined else ""
            cause = lacking or f"{best.name} is undefined"
            _log.warning("validation after epoch %d: %s%s; %s", epoch + 1, cause, no, _REMEDY)
        return best.judge(judged, self.optimizer.step)

    def _report_missing(self) -> None:
        """Report at the end that no validation had a defined score. Local."""
        if self.validation and self.best.name != "none" and not self.best.step:
            cause = self.evaluation.lacking_text or f"{self.best.name} was undefined in every validation"
            self.log.write("no_best", step=self.optimizer.step, reason=cause)
            _log.warning("there is no best.h5: %s; %s", cause, _REMEDY)

    def _give_up(self) -> None:
        """Report that the run ends before its last epoch. Local."""
        best = self.best
        reason = f"no better {best.name} in {best.waited} validations; {best.describe()}"
        self.log.write("early_stop", step=self.optimizer.step, reason=reason)
        self.log.say(f"training ends here: {reason}")

    def _judge(self, epoch: int) -> None:
        """Warn that the loss has diverged, once until it recovers; log it after every such epoch. Local."""
        before = self.watch.diverged
        found = self.watch.judge(self.validation.get("loss"))
        if found is None:
            return
        reason = f"the loss has diverged: {found}; lower schedule.learning_rate, or set training.clip_norm"
        self.log.write("diverged", epoch=epoch, step=self.optimizer.step, reason=found)
        if before is None:
            _log.warning("epoch %d: %s", epoch + 1, reason)

    def _log_phases(self) -> None:
        """Log times of phases and their overlap, if measured, and the reads of this rank."""
        session, step = self.session, self.optimizer.step
        waited, read = session.loader.seconds_waited, session.samples.dataset.bytes_read
        _log.info("step %d: waited %.3f s for data so far; %s read", step, waited, bytes_text(read))
        timeline = session.timeline
        if timeline is None or not session.config.output.timeline or not self.steps:
            return
        session.executor.finish_spans()
        phases = timeline.summary()
        self.log.write("phases", step=step, steps=self.steps, overlap=timeline.overlap(), phases=phases)
        for name, phase in phases.items():
            _log.info("step %d: %s %s", step, name, {k: v if v is None else round(v, 3) for k, v in phase.items()})

    def validate(self) -> dict[str, Any] | None:
        """Compute loss and scores of the held-out samples; None if a stop signal arrives in that time. Collective."""
        timeline = self.session.timeline
        paused = timeline is not None and timeline.paused
        if timeline is not None:
            timeline.paused = True
        try:
            with self.trainer.averaged():
                return evaluate_batches(self.session, self.evaluation, self._held_out, self._interrupted)
        finally:
            if timeline is not None:
                timeline.paused = paused

    def _interrupted(self) -> bool:
        """Return whether to leave the validation in progress; the same on all ranks."""
        self._vote()
        return self._asked_to_stop

    def _diverged(self, error: Diverged) -> Diverged:
        """Return the same error with the rank of its origin, if known, and the last checkpoint."""
        executor, comm = self.session.executor, self.session.comm
        own = executor.loss
        sound = own is None or not executor.device.is_host or math.isfinite(own[0])  # a value on a GPU is not read
        sound = sound and all(np.isfinite(array).all() for array in executor.store.params.values())
        states = comm.allgather_objects((sound, platform.node()))
        found = [(rank, host) for rank, (fine, host) in enumerate(states) if not fine]
        where = ""
        if found:
            others = f", and on {len(found) - 1} more" if len(found) > 1 else ""
            where = f" (on rank {found[0][0]} of {comm.size} on {found[0][1]}{others})"
        self.log.write("stopped", step=self.optimizer.step, reason=str(error))
        return Diverged(f"{error}{where}; {self.checkpoints.last()}")


def _score(config: Config) -> str:
    """Return the score of the best validation; the default has a score only if that needs no further checkpoints."""
    given, patience = config.output.best, config.training.patience
    return given or ("loss" if config.output.checkpoint_epochs == 1 or patience else "none")


def evaluate_batches(
    session: Session, evaluation: Evaluation, batches: Sequence[Batch], interrupted: Callable[[], bool] | None = None
) -> dict[str, Any] | None:
    """Compute loss and scores of batches. Collective.

    `interrupted` is called after every batch, and is the same on all ranks. Returns None if it returns True.
    """
    evaluation.begin()
    for _ in session.feed(batches):
        session.executor.forward(training=False)
        evaluation.add()
        if interrupted is not None and interrupted():
            return None
    return evaluation.finish()


def describe(metrics: dict[str, Any]) -> str:
    """Return a text of metrics in one line."""
    return ", ".join(f"{name} {'undefined' if value is None else f'{value:.4f}'}" for name, value in metrics.items())
