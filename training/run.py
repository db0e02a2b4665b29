"""Training, evaluation and prediction by configuration: the functions that the command line calls."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from halograd.documents import os_reason
from halograd.errors import UserError
from halograd.version import __version__

from ..comm import Communicator, boot
from ..comm.transport import TRANSPORTS
from ..data import Hdf5Dataset, find_files
from ..layers.reduction_scheme import Scheme
from ..layers.strategy import Strategy
from ..models.own import is_made, source_of
from .adapting import adapted
from .applying import check_outputs, outputs_of, write_outputs
from .checkpoint import CheckpointReader, TrainingProgress, read_header
from .checkpoints import CheckpointFolder
from .config import Config, check_config, load_config
from .directory import RunLock, checkpoint_of, make_folder
from .epochs import TrainingRun, describe, evaluate_batches
from .evaluation import Evaluation, check_predictions, write_predictions
from .log import RankLog, RunLog, rewind_log
from .metrics import check_details, write_details
from .monitors import Callback
from .root import on_root, read_config
from .session import Session, begin_entry, begin_with, data_lines, headline
from .signals import StopSignals
from .step_times import RunPlan, report_plan, report_times
from .tensorboard import TensorBoard
from .watchdog import Interruption, Watchdog

__all__ = ["Planner", "Ranker", "apply", "evaluate", "find_trained", "train"]

#: Function of configuration, communicator and whether to train that returns the plan to follow. Collective.
Planner = Callable[[Config, Communicator, bool], RunPlan]
#: Function of configuration, communicator and strategy that returns reduction schemes, the best first. Collective.
Ranker = Callable[[Config, Communicator, Strategy], Sequence[Scheme]]
SAMPLES = ("validation", "training", "all")

_log = logging.getLogger(__name__)


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
        ``section.key=value`` texts.
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
        ``steps``, ``loss`` of the last step, ``validation`` metrics, ``directory``; ``stopped``: the signal (SIGUSR1
        or SIGTERM) that stopped the run with a checkpoint, and its rank, else None; ``diverged``: a text if the loss of
        the last epoch is finite but far above the first one, else None.

    Raises
    ------
    UserError, DataError
        If the user can correct the fault; one line.
    """
    world = boot() if comm is None else comm
    config = read_config(world, config, overrides)
    directory = Path(config.output.directory)
    with StopSignals() as signals, _communicator(config, world) as ranks, ExitStack() as stack:
        lock = stack.enter_context(RunLock(directory))
        on_root(ranks.mpi, lambda: _acquire(lock, directory))
        folder = CheckpointFolder(directory / "checkpoints", config.output.keep, lock.check)
        on_root(ranks.mpi, folder.check_writable)  # check before hours of training, not after them
        if config.output.rank_logs:
            _log_each_rank(ranks, directory / "logs", stack)
        watchdog = stack.enter_context(Watchdog(ranks, config.run.stall_minutes, directory / "log.jsonl"))
        interruption = stack.enter_context(Interruption(ranks, directory / "log.jsonl", folder, watchdog))
        found, progress = _start_from(ranks, folder, resume, stack)
        session, plan = _open(config, ranks, stack, planner, progress, trainable=True)
        with ranks.agreement(), _writing(directory):
            if ranks.rank == 0:
                rewind_log(directory / "log.jsonl", progress.step if progress else 0)
            log = stack.enter_context(RunLog(directory / "log.jsonl", ranks.rank == 0, config.output.progress))
            if config.output.tensorboard and ranks.rank == 0:
                step = progress.step if progress else 0
                log.follow(stack.enter_context(TensorBoard(directory / "tensorboard", step)))
        ranked = _ranked(ranker, session)
        with ranks.agreement():
            run = TrainingRun(session, folder, log, plan is not None, signals, ranked, callbacks)
        log.say(headline(session))
        for text in data_lines(session):
            log.say(text)
        if found is None and config.training.init is not None:
            begin_with(session)
            log.say(f"initial parameters: {config.training.init}")
        if found is not None:
            run.resume(found)
            found.close()
            log.say(_resumed(run, found.path))
        log.write("begin", **begin_entry(session, run.optimizer.step, run.epochs, len(run.sampler)))
        watchdog.follow(session.executor.pulse)
        interruption.follow(session.executor.pulse)
        result = run.train()
        if result["stopped"] is None:  # after a signal, little time is left
            report_times(session, log, run.steps, directory)
            report_plan(plan, run.step_times, run.optimizer.step, log)
            log.write("finished", step=run.optimizer.step)
        on_root(ranks.mpi, lock.check)  # the result refers to log and checkpoints
    return {**result, "directory": str(directory)}


def evaluate(
    target: str | Path,
    overrides: Sequence[str] = (),
    samples: str = "validation",
    predictions: str | Path | None = None,
    comm: Any = None,
    planner: Planner | None = None,
    details: str | Path | None = None,
) -> dict[str, Any]:
    """Compute loss and metrics of a trained network. Collective over all ranks of the job.

    Other data (``data.path``) may have larger or smaller samples, as for :func:`apply`.

    Parameters
    ----------
    target
        Directory of a run, one of its checkpoints, or its configuration.
    overrides
        ``section.key=value`` texts that change the configuration of the run.
    samples
        ``"validation"`` (the held-out samples), ``"training"`` or ``"all"``.
    predictions
        HDF5 file to which rank 0 writes predictions, targets and sample numbers.
    comm, planner
        As for :func:`train`.
    details
        JSON file to which rank 0 writes results by class: confusion, scores, calibration.
    """
    if samples not in SAMPLES:
        raise UserError(f"samples: expected one of {', '.join(SAMPLES)}, got {samples!r}")
    world = boot() if comm is None else comm

    def find() -> tuple[Config, list[str], Path, TrainingProgress, bool]:
        config, checkpoint, progress, drawn_alike = find_trained(Path(target), overrides)
        return (*adapted(config, overrides, world.size, labelled=True), checkpoint, progress, drawn_alike)

    config, settings, checkpoint, progress, drawn_alike = on_root(world, find)
    if predictions is not None:
        on_root(world, lambda: check_predictions(Path(predictions)))
    if details is not None:
        on_root(world, lambda: check_details(Path(details)))
    with _trained(config, world, planner, checkpoint, progress) as (ranks, session, _):
        if samples != "all" and drawn_alike:
            session.samples.check_drawn(progress.drawn, 'evaluate "all" samples')
        chosen = _chosen(session, samples)
        batches = session.in_order(chosen)
        evaluation = Evaluation(session.executor, details is not None, config.output.metrics)
        result = evaluate_batches(session, evaluation, batches)
        assert result is not None, "it is not interrupted"
        if evaluation.lacking_text:
            _log.warning("%s samples: %s", samples, evaluation.lacking_text)
        if predictions is not None:
            write_predictions(session, batches, Path(predictions))
        if details is not None:
            about = {"samples": samples, "count": len(chosen), "step": progress.step, "loss": result["loss"]}
            on_root(ranks.mpi, lambda: write_details(Path(details), about, evaluation.details()))
        if ranks.rank == 0:
            if settings:
                print(f"for these data and ranks: {' '.join(settings)}")
            if session.samples.evaluated_part:
                print(session.samples.evaluated_part)
            count = f"{len(chosen)} of {len(session.samples.dataset)} samples"
            print(f"{samples}: {count}, step {progress.step}: {describe(result)}")
    return {**result, "step": progress.step, "checkpoint": str(checkpoint)}


def apply(
    target: str | Path,
    data: str | Path | Sequence[str | Path],
    out: str | Path,
    overrides: Sequence[str] = (),
    what: str = "logits",
    comm: Any = None,
    planner: Planner | None = None,
    tell: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Predict data without labels by a trained network. Collective over all ranks of the job.

    Samples may be larger or smaller than those of the training, if the network allows it. Settings that the overrides
    do not contain follow from the data and the ranks: :mod:`halograd.training.adapting`. An interrupted job continues
    when it is started again.

    Parameters
    ----------
    target, overrides, comm, planner
        As for :func:`evaluate`.
    data
        File, pattern or folder with the inputs of the network, or a list of these; other datasets are ignored.
    out
        File to write, see :mod:`halograd.training.applying`. A file of an earlier job is replaced.
    what
        ``"logits"``: the outputs themselves; ``"probabilities"`` or ``"classes"`` for outputs of a classification.
    tell
        Function that is called on rank 0 with the number of complete samples and the number of all samples.

    Returns
    -------
    dict
        Number of ``samples``, number of samples that this job ``computed``, ``step``, ``checkpoint``, and the
        ``settings`` that were adapted to data and ranks (:func:`halograd.training.adapting.adapted`).
    """
    world, out = boot() if comm is None else comm, Path(out)
    given = [data] if isinstance(data, str | Path) else list(data)
    if not all(isinstance(path, str | Path) for path in given):
        raise UserError(
            f"data: expected files, patterns or folders, got {type(data).__name__}; for arrays and data sets of a "
            "script use halograd.fit(...).apply"
        )
    paths = [str(path) for path in given]

    def find() -> tuple[Config, list[str], Path, TrainingProgress]:
        config, checkpoint, progress, _ = find_trained(Path(target), overrides)
        config = config.model_copy(update={"data": config.data.model_copy(update={"path": paths})})
        return (*adapted(config, overrides, world.size, labelled=False), checkpoint, progress)

    config, settings, checkpoint, progress = on_root(world, find)
    on_root(world, lambda: check_outputs(out))
    with _trained(config, world, planner, checkpoint, progress, labelled=False) as (ranks, session, identity):
        with ranks.agreement():
            outputs = outputs_of(session, what, progress.described)
        files = on_root(ranks.mpi, lambda: _files(session))
        job = {"checkpoint": [str(checkpoint), identity], "what": what, "files": files, **_settings(session)}
        shown = tell if tell is not None and ranks.rank == 0 else lambda done, total: None
        computed = write_outputs(session, outputs, out, job, shown)
        found = {"samples": len(session.samples.dataset), "computed": computed, "step": progress.step}
    return {**found, "checkpoint": str(checkpoint), "settings": settings}


@contextmanager
def _communicator(config: Config, world: Any) -> Iterator[Communicator]:
    """Open a communicator of these ranks with the transport of the configuration."""
    TRANSPORTS.make(config.backend.transport)
    with Communicator(world, config.backend.transport) as ranks:
        yield ranks


def _open(
    config: Config,
    ranks: Communicator,
    stack: ExitStack,
    planner: Planner | None,
    progress: TrainingProgress | None,
    trainable: bool,
    labelled: bool = True,
) -> tuple[Session, RunPlan | None]:
    """Open the session of a configuration, planned if it is to be, with the data statistics of a run. Collective."""
    start, plan = TrainingProgress() if progress is None else progress, None
    if config.strategy.auto and planner is not None:  # without one, `make_strategy` raises an error with the remedy
        plan = planner(config, ranks, trainable)
    known: dict[str, Any] = {"normalization": start.normalization, "class_counts": start.class_counts}
    strategy = None if plan is None else plan.strategy
    return Session.open(config, ranks, stack, trainable, strategy=strategy, labelled=labelled, **known), plan


@contextmanager
def _trained(
    config: Config,
    world: Any,
    planner: Planner | None,
    checkpoint: Path,
    progress: TrainingProgress,
    labelled: bool = True,
) -> Iterator[tuple[Communicator, Session, Any]]:
    """Open a session with the parameters of a checkpoint; yield it with its ranks and the checkpoint's identity.

    Collective over `world`.
    """
    with _communicator(config, world) as ranks, ExitStack() as stack:
        reader = stack.enter_context(CheckpointReader(checkpoint, ranks))  # now, before another run removes it
        session, _ = _open(config, ranks, stack, planner, progress, trainable=False, labelled=labelled)
        reader.restore(session.executor.store, extents=False, averaged=config.training.average > 0)
        reader.close()
        yield ranks, session, reader.identity


def _files(session: Session) -> list[Any]:
    """Return data that change when a file with samples, or a file that it refers to, changes. Local."""
    data, dataset = session.config.data, session.samples.dataset
    given = [data.path] if isinstance(data.path, str) else data.path
    paths = [Path(path) for path in given] if data.file is not None else find_files(given)
    for part in getattr(dataset, "parts", [dataset]):
        paths += map(Path, part.structure.files if isinstance(part, Hdf5Dataset) else ())
    found = [(str(path), path.stat() if path.exists() else None) for path in paths]
    # It is unknown whether an object of a script has the same samples as in an earlier attempt.
    once = [secrets.token_hex(8)] if data.file is not None and is_made(data.file) else []
    return [[path, state and [state.st_size, state.st_mtime_ns]] for path, state in found] + once


def _settings(session: Session) -> dict[str, Any]:
    """Return the plain data, in addition to checkpoint and samples, on which predictions depend. Local."""
    config = session.config
    tables = config.model_dump(
        mode="json",
        include={"model": True, "data": True, "training": True, "backend": {"kernels", "precision"}},
        exclude={"data": {"path", "prefetch", "open_files"}},
    )
    own = None if config.data.file is None else source_of(config.data.file)
    return {"version": __version__, "config": tables, "network": session.source, "data": own}


def _resumed(run: TrainingRun, path: Path) -> str:
    """Return a text on where a run continues, or that no epochs are left. Local."""
    step, path = run.optimizer.step, path.resolve()
    if run.sampler.epoch < run.epochs:
        return f"resumed at step {step}, epoch {run.sampler.epoch + 1}, from {path}"
    return (
        f"complete: {run.sampler.epoch} of {run.epochs} epochs are done, at step {step}, in {path}; increase "
        "training.epochs to continue"
    )


def _acquire(lock: RunLock, directory: Path) -> None:
    with _writing(directory):
        lock.acquire()


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn an OSError into a UserError about the directory of the run."""
    try:
        yield
    except OSError as error:
        path = error.filename if isinstance(error.filename, str | Path) else folder  # not a descriptor
        reason = os_reason(error) or error.strerror or error
        raise UserError(f"output.directory: expected files that can be written, got {path}: {reason}") from error


def _log_each_rank(ranks: Communicator, folder: Path, stack: ExitStack) -> None:
    """Open a log on every rank, in a folder that rank 0 makes. Collective."""
    with ranks.agreement():
        if ranks.rank == 0:
            make_folder(folder)
    with ranks.agreement(), _writing(folder):
        stack.enter_context(RankLog(folder, ranks.rank, ranks.size))


def _ranked(ranker: Ranker | None, session: Session) -> Sequence[Scheme]:
    """Return the schemes to try first if gradient reduction is ``"auto"``. Collective."""
    strategy = session.executor.strategy
    if not strategy.reduction.kind.searches or ranker is None:
        return ()
    return ranker(session.config, session.comm, strategy)


def _start_from(
    ranks: Communicator, folder: CheckpointFolder, resume: bool, stack: ExitStack
) -> tuple[CheckpointReader | None, TrainingProgress | None]:
    """Open and verify the checkpoint to continue from; None to start from the beginning. Collective."""
    if not resume:
        if ranks.bcast(folder.latest) is not None:
            raise UserError(
                f"output.directory: expected one without checkpoints, got those of another run in {folder.path}; "
                "continue it with --resume, or choose another directory"
            )
        return None, None
    found, faults = folder.newest_whole(ranks)
    if found is None:
        faults = [f"no checkpoint in {folder.path} yet: starting from the beginning"]
    if faults and ranks.rank == 0:
        _log.warning("; ".join(faults))
    if found is None:
        return None, None
    return stack.enter_context(found), found.header()[0]


def find_trained(target: Path, overrides: Sequence[str]) -> tuple[Config, Path, TrainingProgress, bool]:
    """Return configuration, checkpoint and progress of a trained run, and whether the same samples are held out. Local.
    """
    if target.suffix == ".toml":
        config = load_config(target, overrides)
        checkpoint = CheckpointFolder(Path(config.output.directory) / "checkpoints").latest
    else:
        config = None
        checkpoint = target if target.is_file() else CheckpointFolder(target / "checkpoints").latest
    if checkpoint is None:
        raise UserError(f"{target}: expected a trained run (its configuration, directory or a checkpoint), got none")
    checkpoint = checkpoint_of(checkpoint)  # latest.h5 may soon name another file
    progress, text = read_header(checkpoint)
    if config is None:
        config = check_config(json.loads(text), overrides, f"configuration in {checkpoint}")
    asked = json.loads(config.model_dump_json(exclude_unset=True))
    return config, checkpoint, progress, _drawn_by(asked) == _drawn_by(json.loads(text or "{}"))


def _drawn_by(config: Mapping[str, Any]) -> list[Any]:
    """Return the settings that determine the held-out samples."""
    data = config.get("data", {})
    own = [data.get(key) for key in ("path", "validation", "split", "invalid")]
    return [*own, config.get("training", {}).get("seed")]


def _chosen(session: Session, samples: str) -> np.ndarray:
    chosen = {
        "validation": session.samples.validation,
        "training": session.samples.training,
        "all": session.samples.everything,
    }[samples]
    if not len(chosen):
        raise UserError("data.validation: expected held-out samples, got 0; hold some out, or evaluate other samples")
    return chosen
