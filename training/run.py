"""Training by a configuration: set-up, and the loop over epochs and steps with validation, log and checkpoints."""

from __future__ import annotations

import json
import logging
import math
import platform
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, SupportsFloat

import numpy as np

from halograd.documents import bytes_text, score_text, writing
from halograd.errors import UserError

from ..comm import Communicator, boot
from ..comm.transport import TRANSPORTS
from ..data import Batch
from ..layers.reduction_scheme import Scheme
from ..layers.strategy import Strategy
from .auto_reduction import Tuning, pinned
from .build import keep_model, kept_model, make_optimizer
from .checkpoint import CheckpointReader, TrainingProgress
from .checkpoints import CheckpointFolder, Checkpoints
from .config import Config
from .directory import RunLock, checkpoint_of, make_folder
from .evaluation import Evaluation, describe, evaluate_parts, gather_samples
from .log import Entry, RankLog, RunLog, TensorBoard, read_log, rewind_log
from .monitors import BestScore, Callback, LossWatch, SamplePredictions, is_defined
from .pass_loss import STOP
from .root import on_root, read_config
from .schedules import SCHEDULES, make_schedule
from .session import Session, begin_entry, begin_with, data_lines, headline
from .signals import CHECKPOINTED, StopSignals
from .small import plan_of
from .step_times import RunPlan, StepTimes
from .timeline import write_trace
from .trained import Planner
from .trainer import Diverged, Trainer
from .watchdog import Watchdog
from .whole import WholeSamples, whole_samples

__all__ = ["Ranker", "TrainingRun", "train"]

#: Function of configuration, communicator and strategy that returns reduction schemes, the best first. Collective.
Ranker = Callable[[Config, Communicator, Strategy], Sequence[Scheme]]

_log = logging.getLogger(__name__)

_REMEDY = "hold out other samples (data.validation, data.split, training.seed), or choose another score (output.best)"


def train(
    config: str | Path | Config,
    overrides: Sequence[str] = (),
    resume: bool = False,
    comm: Any = None,
    planner: Planner | None = None,
    ranker: Ranker | None = None,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Train by a configuration. Collective over all ranks of the job.

    Parameters
    ----------
    config
        TOML file (:mod:`halograd.training.config`), or a configuration, the same on all ranks.
    overrides
        ``section.key=value`` strings.
    resume
        Whether to continue from the newest undamaged checkpoint of the run, on any number of ranks; without one, the
        run starts from the beginning.
    comm
        An MPI communicator to clone; by default all ranks of the job, after :func:`halograd.comm.boot`.
    planner
        Function that plans ``strategy = "auto"``: :func:`halograd.auto.plan_run`, collective. At the end the run
        compares the predictions of the plan with measurements.
    ranker
        Function that ranks schemes for ``reduction.name = "auto"``: :func:`halograd.auto.rank_schemes_of`, collective.
        Without it, a few typical schemes are tried.
    callbacks
        Callbacks that are called after every step, epoch and checkpoint.

    Returns
    -------
    dict
        Number of ``steps`` of the run, ``loss`` of the last one, scores of the last ``validation``, the ``best``
        validation, ``directory``; ``stopped``: the signal (SIGUSR1 or SIGTERM) that stopped the run with a checkpoint,
        and its rank, else None; ``diverged``: a message if a loss of the last epoch is finite but far above the first
        one, else None.

    Raises
    ------
    UserError, DataError
        If the user can correct the fault; the message is one line.
    """
    world = boot() if comm is None else comm
    config = read_config(world, config, overrides)
    directory = Path(config.output.directory)
    with StopSignals() as signals, ExitStack() as stack:
        TRANSPORTS.make(config.backend.transport)  # its error names the key
        ranks = stack.enter_context(Communicator(world, config.backend.transport))
        # Before anything is written: another run may use the directory.
        lock = stack.enter_context(RunLock(directory))
        on_root(ranks.mpi, writing(f"output.directory {directory}")(lock.acquire))
        folder = CheckpointFolder(directory / "checkpoints", config.output.keep, lock.check)
        on_root(ranks.mpi, folder.check_writable)  # check before hours of training, not after them
        if config.output.rank_logs:
            _log_each_rank(ranks, directory / "logs", stack)
        minutes, own_log = config.run.stall_minutes, directory / "log.jsonl"
        watchdog = stack.enter_context(Watchdog(ranks, minutes, own_log, lambda: folder.latest))
        checkpoint = _checkpoint_of(ranks, folder, resume, stack)
        if checkpoint is None:
            config = on_root(ranks.mpi, partial(keep_model, config, directory))
        else:
            trained = json.loads(checkpoint.config or "{}").get("model", {})
            config = on_root(ranks.mpi, partial(kept_model, config, directory, trained))
        progress = TrainingProgress() if checkpoint is None else checkpoint.progress
        # Without a planner, `make_strategy` raises an error with the remedy.
        plan = planner(config, ranks, True) if config.strategy.auto and planner is not None else None
        session = Session.open(config, ranks, stack, True, progress, None if plan is None else plan.strategy)
        with ranks.agreement(), writing(f"output.directory {directory}"):
            if ranks.rank == 0:
                # A killed job has logged steps after its last checkpoint; this job makes and logs them again.
                rewind_log(directory / "log.jsonl", progress.step)
                if session.small is not None:
                    plan_of(config, session.network, session.small).save(directory / "small.json")
            log = stack.enter_context(RunLog(directory / "log.jsonl", ranks.rank == 0, config.output.progress))
            if config.output.tensorboard and ranks.rank == 0:
                log.follow(stack.enter_context(TensorBoard(directory / "tensorboard", progress.step)))
        strategy, ranked = session.executor.strategy, list[Scheme]()
        if strategy.reduction.kind.searches and ranker is not None:
            ranked += ranker(config, ranks, strategy)
        with ranks.agreement(), session.memory_errors():
            run = TrainingRun(session, folder, log, plan is not None, signals, ranked, callbacks)
        run.whole = whole_samples(session, session.samples.validation)
        if run.whole is not None:
            stack.enter_context(run.whole)
        part = session.samples.evaluated_part if len(session.samples.validation) else ""
        for text in (headline(session), *data_lines(session), run.whole.text if run.whole is not None else part):
            if text:
                log.print(text)
        if checkpoint is not None:
            run.resume(checkpoint)
        elif config.training.init is not None:
            begin_with(session)
            log.print(f"initial parameters: {config.training.init}")
        elif config.training.init_from is not None:
            run.begin_from(Path(config.training.init_from))
        log.write("begin", **begin_entry(session, run.optimizer.step, run.epochs, run.sampler))
        # Not earlier: set-up, such as planning or reading all samples, may take longer than the limit.
        watchdog.follow(session.executor.heartbeat)
        with session.memory_errors():
            result = run.train()
        if result["stopped"] is None:  # after a signal, little time is left
            run.report(plan, directory)
        on_root(ranks.mpi, lock.check)  # the result refers to log and checkpoints
    return {**result, "directory": str(directory)}


def _log_each_rank(ranks: Communicator, folder: Path, stack: ExitStack) -> None:
    """Open a log on every rank, in a folder that rank 0 makes. Collective."""
    with ranks.agreement():
        if ranks.rank == 0:
            make_folder(folder)
    with ranks.agreement(), writing(f"output.directory {folder}"):
        stack.enter_context(RankLog(folder, ranks.rank, ranks.size))


def _checkpoint_of(
    ranks: Communicator, folder: CheckpointFolder, resume: bool, stack: ExitStack
) -> CheckpointReader | None:
    """Open and verify the checkpoint to continue from; None to start from the beginning. Collective."""
    if not resume:
        # What rank 0 finds, so that all ranks raise the error or none does.
        if ranks.bcast(folder.latest) is not None:
            raise UserError(
                f"output.directory: expected one without checkpoints, got those of another run in {folder.path}; "
                "continue it with --resume, or choose another directory"
            )
        return None
    reader, faults = folder.newest_whole(ranks)
    if reader is None:
        faults = [f"no checkpoint in {folder.path} yet: starting from the beginning"]
    if faults and ranks.rank == 0:
        _log.warning("; ".join(faults))
    return None if reader is None else stack.enter_context(reader)


class TrainingRun:
    """Training of a session to its last epoch. Collective over the session's communicator.

    Up to rounding, the results depend only on the configuration and the step, so a run that is killed and resumed, on
    any number of ranks, makes the same steps.

    With `measures`, a few steps in the middle are measured layer by layer (`step_times`). With `signals`, the run stops
    with a checkpoint after the step in which any rank receives a signal; `stopped_by` then names it. If gradient
    reduction is ``"auto"``, the `ranked` schemes are tried first. `steps` counts the steps of this job. `callbacks` are
    called in order. If `whole` is set, whole samples are validated instead of the windows of the session.
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
        config, executor = session.config, session.executor
        self.session, self.log, self.measures = session, log, measures
        self.signals = signals or StopSignals()
        self.stopped_by: str | None = None
        self.whole: WholeSamples | None = None
        self.callbacks = tuple(callbacks)
        self._check_samples()
        self.sampler = session.sampler()
        self.epochs = config.training.epochs
        self.optimizer = make_optimizer(config, executor.store)
        schedule = make_schedule(config.schedule, self.epochs, len(self.sampler))
        tuning = Tuning(config.reduction.interval, config.reduction.step, config.reduction.range)
        self.trainer = Trainer(executor, self.optimizer, schedule, config.training.clip_norm, ranked, tuning)
        if self.trainer.auto is not None:
            self.trainer.auto.on_measured = self._log_scheme
        statistics = session.samples.statistics
        self.evaluation = Evaluation(executor, metrics=config.output.metrics, statistics=statistics)
        self.watch = LossWatch(session.samples.target_scale if self.evaluation.of_numbers else 0.0)
        self._held_out: Sequence[Batch] = (
            session.in_order(session.samples.validation) if len(session.samples.validation) else []
        )
        # By default there is a best validation only if that needs no further checkpoints.
        default = "loss" if config.output.checkpoint_epochs == 1 or config.training.patience else "none"
        names = self.evaluation.names if self._held_out else {}
        self.best = BestScore(config.output.best or default, names, config.training.patience)
        schedule.follow(names)
        self._unvalidated = self._warned = False
        states = self.optimizer, self.sampler, self.best, self.trainer.auto, schedule
        self.checkpoints = Checkpoints(session, folder, log, *states)
        self.step_times: StepTimes | None = None
        self.steps = 0
        self.validation: dict[str, Any] = {}
        self._validated = -1  # epoch of this validation

    def resume(self, checkpoint: CheckpointReader) -> None:
        """Continue from a checkpoint of any decomposition, open on the ranks of the run, and close it. Collective."""
        comm = self.session.comm
        progress = checkpoint.restore(self.session.executor.store, self.optimizer)
        with comm.agreement():
            self.sampler.load_state_dict(progress.sampler)
            before = progress.sampler["batch"]
            # With another batch the same samples are another number of steps, and the schedule follows the samples.
            self.trainer.ahead = round(self.sampler.done) - self.optimizer.step
            self.session.samples.check_drawn(progress.drawn, "start anew")
            self.session.warn_of_changes(progress.source)
            entries = read_log(self.log.path) if comm.rank == 0 else []
            # The watch compares later losses with the first one of the run, not of this job.
            first = next((entry["loss"] for entry in entries if entry["event"] == "step"), math.nan)
            diverged = {entry["step"]: entry["reason"] for entry in entries if entry["event"] == "diverged"}
            self.trainer.schedule.load_state_dict(progress.schedule)
            # With another batch, the numbers of steps are not comparable.
            if before == self.sampler.batch:
                self._warn_of_schedule(entries, progress.schedule)
        # Only rank 0 has read the log.
        self.watch.first, self.watch.diverged = comm.bcast((first, diverged.get(self.optimizer.step)))
        if self.trainer.auto is not None and progress.reduction is not None:
            self.trainer.auto.load_state_dict(progress.reduction)
        if progress.best is not None:
            self.best.load_state_dict(progress.best)
        # An epoch whose last samples do not fill a batch of another size ends here.
        self._unvalidated = progress.unvalidated or self.sampler.epoch != progress.sampler["epoch"]
        self.checkpoints.resumed(self._unvalidated)
        checkpoint.close()
        step, path = self.optimizer.step, checkpoint.path.resolve()
        if self.sampler.epoch < self.epochs:
            self.log.print(f"resumed at step {step}, epoch {self.sampler.epoch + 1}, from {path}")
            if before != self.sampler.batch:
                self.log.print(
                    f"batches of {self.sampler.batch} samples, before of {before}: the run goes on after "
                    f"{self.sampler.skipped} samples of the epoch; the schedule is at step {step + self.trainer.ahead}"
                )
        else:
            self.log.print(
                f"complete: {self.sampler.epoch} of {self.epochs} epochs are done, at step {step}, in {path}; increase "
                "training.epochs to continue"
            )

    def begin_from(self, source: Path) -> None:
        """Begin with the parameters and the optimizer's state of another run, or checkpoint. Collective."""
        comm = self.session.comm

        def find() -> Path:
            path = source if source.is_file() else CheckpointFolder(source / "checkpoints").latest
            if path is None:
                raise UserError(f"training.init_from: expected a run with checkpoints, or a checkpoint, got {source}")
            return checkpoint_of(path)  # latest.h5 may soon name another file

        with closing(CheckpointReader(on_root(comm.mpi, find), comm)) as checkpoint:
            # The other run may have had samples of another size.
            checkpoint.restore(self.session.executor.store, self.optimizer, extents=False)
        # The schedule begins anew, while the corrections of Adam continue from the step of the other run.
        self.trainer.ahead = -self.optimizer.step
        self.log.print(f"initial parameters and optimizer: {checkpoint.path}, after {self.optimizer.step} steps")

    def _warn_of_schedule(self, entries: Sequence[Entry], state: Mapping[str, Any]) -> None:
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
        earlier = make_schedule(schedule, before["epochs"], before["steps_per_epoch"])
        earlier.load_state_dict(state)
        was = earlier(step + self.trainer.ahead)
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
            Number of ``steps`` of the run, last ``loss``, scores of the last ``validation``, the ``best`` validation
            (:meth:`BestScore.state_dict`);
            ``stopped``: the signal that stopped the run before its end, else None; ``diverged``: a message if a loss of
            the last epoch was far above the first one (:class:`LossWatch`), else None.

        Raises
        ------
        Diverged
            On all ranks, if the loss or a parameter is no longer finite.
        """
        result: dict[str, Any] = {"loss": None}
        if self.measures and self.session.timeline is not None:
            last = self.optimizer.step + self.sampler.left(self.epochs)
            self.step_times = StepTimes(self.session.executor, self.session.timeline, self.optimizer.step, last)
        try:
            # The run reports an overflow in one line, instead of NumPy's warnings on every rank.
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                self._begin()
                while self.sampler.epoch < self.epochs and self.stopped_by is None and not self.best.exhausted:
                    result["loss"] = self._stretch()
        except Diverged as error:
            raise self._diverged(error) from None
        if self.stopped_by is not None:
            self.log.write("stopped", step=self.optimizer.step, reason=self.stopped_by, code=CHECKPOINTED)
        elif self.sampler.epoch == self.epochs and self.validation and self.best.name != "none" and not self.best.step:
            cause = self.evaluation.lacking_text or f"{self.best.name} was undefined in every validation"
            self.log.write("no_best", step=self.optimizer.step, reason=cause)
            _log.warning("there is no best.h5: %s; %s", cause, _REMEDY)
        result |= {"steps": self.optimizer.step, "validation": self.validation, "best": self.best.state_dict()}
        return {**result, "stopped": self.stopped_by, "diverged": self.watch.diverged}

    def report(self, plan: RunPlan | None, directory: Path) -> None:
        """Write the timeline, print the times of phases and their comparison with the plan, log the end. Collective."""
        timeline, step = self.session.timeline, self.optimizer.step
        if timeline is not None and self.steps and self.session.config.output.timeline:
            self.session.executor.spans.finish()
            try:
                write_trace(timeline, self.session.comm, directory / "timeline.json")
            except UserError as error:  # on all ranks; the run is complete, and its checkpoints are written
                if self.session.comm.rank == 0:
                    _log.warning("%s; the run is complete without it", error)
            self.log.print(timeline.table(self.steps))
        measured = None if plan is None or self.step_times is None else self.step_times.result()
        if plan is not None and measured is not None:
            self.log.print(plan.compare(measured))
            self.log.write("prediction", step=step, **plan.record(measured))
        self.log.write("finished", step=step)

    def _begin(self) -> None:
        """Stop if a signal arrived during set-up; else do the validation that the last job left out. Collective."""
        # Votes travel with the loss of a pass, but no pass has run yet.
        vote = self.session.comm.allreduce_scalar(self.signals.vote, "max")
        if vote and (self._unvalidated or self.sampler.epoch < self.epochs):  # otherwise the run is complete
            self._stop(self._unvalidated)
        elif self._unvalidated:
            ended = not (self.sampler.position or self.sampler.skipped)
            # At the start of an epoch, the validation that is missing belongs to the epoch before.
            self._end_stretch(self.sampler.epoch - ended, ended)

    def _stretch(self) -> float:
        """Train to the next validation, or to the end of the epoch; return the last loss. Collective."""
        epoch, every = self.sampler.epoch, self.session.config.training.validate_every
        batches: Sequence[Batch] = self.sampler.rest_of_epoch()
        if every:
            # Up to a multiple of `every`, so that a resumed run validates after the same steps.
            batches = batches[: every - self.optimizer.step % every]
        loss: SupportsFloat = math.nan
        begin = requested = time.perf_counter()  # `requested`: time of the request of samples
        executor, part = self.session.executor, 0
        parts = (part for batch in batches for part in self._parts_of(batch))
        for loaded in self.session.feed(parts):
            executor.heartbeat.step = self.optimizer.step
            # Only targets and weights of a part are loaded, to be counted before the first part.
            if loaded.only is not None:
                executor.count()
                continue
            self._vote()
            part += 1
            if part % executor.parts:
                self.trainer.add()
                requested = time.perf_counter()
                continue
            rate, number, ready = self.trainer.learning_rate, self.optimizer.step, time.perf_counter()
            if self.step_times is not None:
                self.step_times.begin(number)
            loss = self.trainer.step()
            if self.step_times is not None:
                self.step_times.end(number, time.perf_counter() - ready, ready - requested)
            self.watch.add(loss)
            self.steps += 1
            self.sampler.advance()
            end = time.perf_counter()
            self._log_step(epoch, loss, rate, end - begin)
            for callback in self.callbacks:
                callback.on_step(self.optimizer.step, loss, rate)
            begin = requested = end
            ended = self.sampler.epoch != epoch
            validates = self._validates(ended)
            # After the last step of the run nothing is left to continue: it ends as usual.
            through = ended and self.sampler.epoch == self.epochs and not validates
            if self._is_interrupted and not through:
                self._stop(ended or validates)
                return float(loss)
            if self.checkpoints.due and not (ended or validates):  # otherwise, it is written after the validation
                self._checkpoint()
                # The time of the checkpoint belongs to no step.
                begin = requested = time.perf_counter()
        ended = self.sampler.epoch != epoch
        if ended or self._validates(ended):
            self._end_stretch(epoch, ended)
        return float(loss)

    def _validates(self, ended: bool) -> bool:
        """Return whether a validation follows the last step; `ended`: it was the last one of its epoch. Local."""
        every = self.session.config.training.validate_every
        last = self.sampler.epoch == self.epochs
        return bool(self._held_out) and (ended if not every else last or self.optimizer.step % every == 0)

    def _parts_of(self, batch: Batch) -> Iterator[Batch]:
        """Yield the parts of a batch; if a loss is divided by its weights, before that the parts with only the inputs
        to count (`Executor.counted`).
        """
        executor = self.session.executor
        if executor.counted:
            yield from (replace(part, only=executor.counted) for part in batch.parts(executor.parts))
        yield from batch.parts(executor.parts)

    def _log_step(self, epoch: int, loss: SupportsFloat, rate: float, seconds: float) -> None:
        step, every = self.optimizer.step, self.session.config.output.log_steps
        total = step + self.sampler.left(self.epochs)
        self.log.move(step, total, f"epoch {epoch + 1}/{self.epochs}  mean loss {score_text(self.watch.mean)}")
        first = step + self.trainer.ahead == 1  # later losses are compared with it
        if step % every and step != total and not first:
            return
        # On a device, float() waits for this step: only steps that are logged read the loss.
        values: dict[str, Any] = {"epoch": epoch, "step": step, "loss": float(loss), "learning_rate": rate}
        if self.trainer.gradient_norm is not None:
            values["gradient_norm"] = float(self.trainer.gradient_norm)
        if self.trainer.loss_scale is not None:
            values["loss_scale"] = self.trainer.loss_scale
        values |= {"seconds": seconds, "samples_per_second": self.session.config.training.batch / seconds}
        self.log.write("step", **values)

    def _log_scheme(self, scheme: Scheme, seconds: float, last: bool) -> None:
        """Log a measured scheme of gradient reduction; after the last one, log and print the choice. Local."""
        auto, step = self.trainer.auto, self.optimizer.step
        self.log.write("reduction", step=step, scheme=str(scheme), seconds=seconds, chosen=False)
        best = None if auto is None else auto.tuner.best
        if last and auto is not None and best is not None:
            values = {"scheme": str(best.scheme), "seconds": best.seconds, "chosen": True, "table": asdict(best.scheme)}
            self.log.write("reduction", step=step, **values)
            self.log.print(
                f"gradient reduction: {best.scheme}, {1e3 * best.seconds:.2f} ms/step, the best of "
                f"{len(auto.tuner.trials)}; to pin it: {pinned(best.scheme)}"
            )

    def _vote(self) -> None:
        """Set the votes of this rank for the loss reduction of the next pass."""
        self.session.executor.pass_loss.votes[STOP] = self.signals.vote
        self.checkpoints.vote()

    @property
    def _is_interrupted(self) -> bool:
        """Whether any rank received a signal before the last pass; the same on all ranks."""
        return bool(self.session.executor.pass_loss.counted[STOP] > 0)

    def _checkpoint(self, needed: bool = False, unvalidated: bool = False, best: bool = False) -> bool:
        """Write a checkpoint (:class:`Checkpoints`); return whether one was written. Collective."""
        self.trainer.synchronize()
        path = self.checkpoints.write(needed, unvalidated, best)
        if path is not None:
            for callback in self.callbacks:
                callback.on_checkpoint(self.optimizer.step, path, best)
        return path is not None

    def _stop(self, unvalidated: bool) -> None:
        """Write a checkpoint, and record the signal of the lowest rank that received one. Collective."""
        self._checkpoint(needed=True, unvalidated=unvalidated)
        # The sum of votes in the loss shows only that some rank has received a signal.
        votes = self.session.comm.allgather_objects(self.signals.vote)
        rank = next(rank for rank, vote in enumerate(votes) if vote)
        self.stopped_by = f"{signal.Signals(votes[rank]).name} to rank {rank} of {len(votes)}"

    def _end_stretch(self, epoch: int, ended: bool) -> None:
        """Validate if due, end the epoch if it `ended`, and write a checkpoint if due. Collective.

        Stops if a signal arrives during the validation.
        """
        self.trainer.synchronize()
        before = self.best.state_dict()
        due, better = self.checkpoints.due, False  # now: passes of the validation replace the votes of the last step
        text = f"epoch {epoch + 1}/{self.epochs}, step {self.optimizer.step}"
        if ended:
            mean = self.watch.end_epoch()
            begun = "resumed" if math.isnan(mean) else f"mean loss {score_text(mean, 5)}"
            text = f"epoch {epoch + 1}/{self.epochs}: {begun}"
        if self._validates(ended):
            scores = self.validate()
            if scores is None:
                self._stop(unvalidated=True)
                return  # the scores of part of the samples are not a validation
            self.validation, self._validated = scores, epoch
            better = self._is_best(scores, epoch, ended)
            self.trainer.schedule.validated(scores)
            self.log.write("validation", epoch=epoch, step=self.optimizer.step, **self.validation)
            text += f"{',' if ended else ':'} validation {describe(self.validation)}"
            # The first of all validations is the best without comparison.
            text += " (best)" if better and (epoch or not ended) else ""
        self.log.print(text)
        if ended:
            self._warn_of_divergence(epoch)
            for callback in self.callbacks:
                callback.on_epoch(epoch, self.validation)
            self._show_predictions(epoch)
            self._log_phases()
        last = self.sampler.epoch == self.epochs or self.best.exhausted
        due = due or (ended and self.checkpoints.due_after(epoch))
        # `_unvalidated`: the checkpoint of this step records that its validation is missing, and is replaced.
        if self._unvalidated or last or due or better:
            written = self._checkpoint(needed=last, best=better)
            if better and not written:  # full disk: later validations must beat what best.h5 names, to replace it
                self.best.load_state_dict({**before, "waited": 0})
        if self.best.exhausted:
            best = self.best
            reason = f"no better {best.name} in {best.waited} validations; {best.describe()}"
            self.log.write("early_stop", step=self.optimizer.step, reason=reason)
            self.log.print(f"training ends here: {reason}")
        self._unvalidated = False

    def _is_best(self, validation: dict[str, Any], epoch: int, ended: bool) -> bool:
        """Return whether a validation is the best so far; warn once if its score is undefined, or if the targets cannot
        distinguish good from bad predictions. Local.

        If all targets have one class, a model that always predicts it has the best loss. Such a validation counts only
        if `output.best` names the score.
        """
        best, lacking = self.best, self.evaluation.lacking_text
        scores = {} if self.evaluation.blind and self.session.config.output.best is None else validation
        undefined = best.name != "none" and not is_defined(scores.get(best.name))
        if (lacking or undefined) and not self._warned:
            self._warned = True
            no = ": it is no candidate for best.h5, and training.patience does not count it" if undefined else ""
            cause = lacking or f"{best.name} is undefined"
            where = f"epoch {epoch + 1}" if ended else f"step {self.optimizer.step}"
            _log.warning("validation after %s: %s%s; %s", where, cause, no, _REMEDY)
        return best.update(scores, self.optimizer.step)

    def _warn_of_divergence(self, epoch: int) -> None:
        """Warn of a diverged loss, again only after it has recovered; log it after every such epoch. Local."""
        before = self.watch.diverged
        divergence = self.watch.check_epoch(self.validation.get("loss") if self._validated == epoch else None)
        if divergence is None:
            return
        reason = f"the loss has diverged: {divergence}; lower schedule.learning_rate, or set training.clip_norm"
        self.log.write("diverged", epoch=epoch, step=self.optimizer.step, reason=divergence)
        if before is None:
            _log.warning("epoch %d: %s", epoch + 1, reason)

    def _log_phases(self) -> None:
        """Log this rank's waits for data and bytes read; if measured, also the times of phases and their overlap."""
        session, step = self.session, self.optimizer.step
        waited, read = session.loader.seconds_waited, session.samples.dataset.bytes_read
        _log.info("step %d: waited %.3f s for data so far; %s read", step, waited, bytes_text(read))
        timeline = session.timeline
        if timeline is None or not session.config.output.timeline or not self.steps:
            return
        session.executor.spans.finish()
        phases = timeline.summary()
        self.log.write("phases", step=step, steps=self.steps, overlap=timeline.overlap(), phases=phases)
        for name, phase in phases.items():
            _log.info("step %d: %s %s", step, name, {k: v if v is None else round(v, 3) for k, v in phase.items()})

    def _check_samples(self) -> None:
        """Check the samples whose predictions callbacks get. Raises UserError, on all ranks. Collective."""
        requests = [([*map(int, one.samples)], int(one.every)) for one in self.callbacks if len(one.samples)]
        samples = self.session.samples
        count, left_out = len(samples.dataset), samples.invalid if self.session.config.data.invalid == "skip" else {}
        # Also without callbacks: another rank may have some, such as a logger on rank 0 only.
        others = [theirs for theirs in self.session.comm.allgather_objects(requests) if theirs != requests]
        if others:
            raise UserError(f"callbacks: expected the same samples on all ranks, got {requests} and {others[0]}")
        for numbers, every in requests:
            if every < 1 or not all(0 <= n < count for n in numbers):
                raise UserError(
                    f"callbacks: expected samples from 0 to {count - 1} and every >= 1, got {numbers}, {every}"
                )
            invalid = [n for n in numbers if n in left_out]
            if invalid:
                raise UserError(
                    f'callbacks: expected samples that data.invalid = "skip" does not leave out, got {invalid[0]}'
                )

    def _show_predictions(self, epoch: int) -> None:
        """Call the callbacks whose predictions are due after an epoch, with these predictions. Collective."""
        network, last = self.session.network, epoch + 1 == self.epochs or self.best.exhausted
        requested = [callback for callback in self.callbacks if len(callback.samples)]
        due = [callback for callback in requested if last or (epoch + 1) % callback.every == 0]
        nodes = {name: network.names[node] for name, node in network.outputs.items() if name != "loss"}
        names = {("output", name): node for name, node in nodes.items()} | {("input", n): n for n in network.inputs}
        for callback in due:
            with self._with_averages():
                # A signal that has arrived is counted in the passes of the predictions, too.
                self._vote()
                batches = self.session.in_order(np.array(callback.samples, np.int64))
                samples, arrays = gather_samples(self.session, batches, names)
            kinds = ({name: a for (kind, name), a in arrays.items() if kind == own} for own in ("output", "input"))
            callback.on_predictions(epoch, SamplePredictions(tuple(samples), *kinds))

    @contextmanager
    def _with_averages(self) -> Iterator[None]:
        """Use averaged parameters, if there are any, and record no times in the ``with`` block."""
        timeline = self.session.timeline
        # It may be paused already, between the steps that are compared with a plan.
        paused = timeline is not None and timeline.paused
        if timeline is not None:
            timeline.paused = True
        try:
            with self.trainer.averaged():
                yield
        finally:
            if timeline is not None:
                timeline.paused = paused

    def validate(self) -> dict[str, Any] | None:
        """Compute loss and scores of the held-out samples; None if a stop signal arrives meanwhile. Collective."""
        with self._with_averages():
            parts = [(self.session, self._held_out)] if self.whole is None else self.whole.parts()
            return evaluate_parts(parts, self.evaluation, self._interrupted)

    def _interrupted(self) -> bool:
        """Return whether to end the validation in progress because of a signal; the same on all ranks."""
        self._vote()
        return self._is_interrupted

    def _diverged(self, error: Diverged) -> Diverged:
        """Return the error, extended by the rank of its origin, if known, and the last checkpoint. Collective."""
        executor, comm = self.session.executor, self.session.comm
        own = executor.loss
        sound = own is None or not executor.device.is_host or math.isfinite(own[0])  # a value on a GPU is not read
        sound = sound and all(np.isfinite(array).all() for array in executor.store.params.values())
        states = comm.allgather_objects((sound, platform.node()))
        diverged = [(rank, host) for rank, (fine, host) in enumerate(states) if not fine]
        where = ""
        if diverged:
            others = f", and on {len(diverged) - 1} more" if len(diverged) > 1 else ""
            where = f" (on rank {diverged[0][0]} of {comm.size} on {diverged[0][1]}{others})"
        self.log.write("stopped", step=self.optimizer.step, reason=str(error))
        return Diverged(f"{error}{where}; {self.checkpoints.last()}")
