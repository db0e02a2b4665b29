"""Evaluation of a trained network, and prediction with it, by configuration: calls of the command line."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from halograd.errors import UserError
from halograd.user_code import check_files, checksums
from halograd.version import __version__

from ..comm import Communicator, boot
from ..comm.transport import TRANSPORTS
from ..data import Batch, Hdf5Dataset
from ..data.windows import Slide, SlidingWindows
from ..data.writers import WRITERS, check_result
from ..models.own import is_made, source_of
from .adapting import adapted
from .applying import check_folder, outputs_of, write_each, write_outputs
from .build import kept_model
from .checkpoint import CheckpointReader, TrainingProgress, read_header
from .checkpoints import CheckpointFolder
from .config import Config, check_config, load_config
from .directory import checkpoint_of
from .evaluation import Evaluation, check_predictions, describe, evaluate_parts, write_predictions
from .metrics import check_details, write_details
from .root import on_root
from .session import Session
from .step_times import RunPlan
from .whole import whole_samples

__all__ = ["Planner", "apply", "evaluate", "find_trained"]

#: Function of configuration, communicator and whether to train that returns the plan to follow. Collective.
Planner = Callable[[Config, Communicator, bool], RunPlan]
SAMPLES = ("validation", "training", "all")

_log = logging.getLogger(__name__)


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
        ``section.key=value`` strings that change the configuration of the run.
    samples
        ``"validation"`` (the held-out samples), ``"training"`` or ``"all"``.
    predictions
        HDF5 file to which rank 0 writes predictions, targets and the indices of the samples.
    comm, planner
        As for :func:`halograd.training.train`.
    details
        JSON file to which rank 0 writes results by class: confusion, scores, calibration.

    Returns
    -------
    dict
        ``loss`` and scores by name (None: undefined), ``step`` and ``checkpoint``.
    """
    if samples not in SAMPLES:
        raise UserError(f"samples: expected one of {', '.join(SAMPLES)}, got {samples!r}")
    world = boot() if comm is None else comm

    def find() -> tuple[Config, list[str], Path, TrainingProgress, bool]:
        config, checkpoint, progress, same_draw = find_trained(Path(target), overrides)
        if samples == "all":  # a single sample, of which none can be held out, is evaluated too
            config = config.model_copy(update={"data": config.data.model_copy(update={"validation": 0.0})})
        return (*adapted(config, overrides, world.size, labelled=True), checkpoint, progress, same_draw)

    config, settings, checkpoint, progress, same_draw = on_root(world, find)
    if predictions is not None:
        on_root(world, lambda: check_predictions(Path(predictions)))
    if details is not None:
        on_root(world, lambda: check_details(Path(details)))
    with _trained(config, world, planner, checkpoint, progress) as (ranks, session, _):
        # With other data, the held-out samples are others anyway.
        if samples != "all" and same_draw:
            session.samples.check_drawn(progress.drawn, 'evaluate "all" samples')
        known = session.samples
        chosen = {"validation": known.validation, "training": known.training, "all": known.everything}[samples]
        if not len(chosen):
            raise UserError(
                "data.validation: expected held-out samples, got 0; hold some out, or evaluate other samples"
            )
        metrics, statistics = config.output.metrics, session.samples.statistics
        evaluation = Evaluation(session.executor, details is not None, metrics, statistics)
        with ExitStack() as stack:
            whole = whole_samples(session, chosen)
            parts: Iterator[tuple[Session, Sequence[Batch]]] = iter([(session, session.in_order(chosen))])
            if whole is not None:
                stack.enter_context(whole)
                parts = whole.parts()
                if predictions is not None and len(whole.sizes) > 1:
                    raise UserError(
                        "--predictions: expected samples of one size, got several; use `halograd apply`, which writes "
                        "a file for each"
                    )
            result = evaluate_parts(parts, evaluation)
            assert result is not None, "it is not interrupted"
            if evaluation.lacking_text:
                _log.warning("%s samples: %s", samples, evaluation.lacking_text)
            if predictions is not None:
                # The evaluation has consumed the first iterator.
                parts = iter([(session, session.in_order(chosen))]) if whole is None else whole.parts()
                write_predictions(*next(parts), Path(predictions))
            part = session.samples.evaluated_part if whole is None else whole.text
        if details is not None:
            about = {"samples": samples, "count": len(chosen), "step": progress.step, "loss": result["loss"]}
            on_root(ranks.mpi, lambda: write_details(Path(details), about, evaluation.details()))
        if ranks.rank == 0:
            if settings:
                print(f"for these data and ranks: {' '.join(settings)}")
            if part:
                print(part)
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
    report: Callable[[int, int], None] | None = None,
    format: str = "hdf5",
    flips: Sequence[str] = (),
    window: Sequence[int] = (),
    overlap: float | None = None,
    rollout: int = 0,
) -> dict[str, Any]:
    """Write the predictions of a trained network for data, whose labels are not read, to a file or folder. Collective
    over all ranks of the job.

    Samples may be larger or smaller than those of the training, if the network allows it. Settings that the overrides
    do not contain follow from the data and the ranks: :mod:`halograd.training.adapting`. A repeated call with the same
    arguments continues an interrupted job.

    Parameters
    ----------
    target, overrides, comm, planner
        As for :func:`evaluate`.
    data
        File, pattern or folder with the inputs of the network, or a list of these; other datasets are ignored.
    out
        File or folder to write, see :mod:`halograd.training.applying`. The result of an earlier job is replaced. If
        samples differ in size, `out` is a folder with one result per file of samples.
    what
        ``"logits"``: the outputs themselves; ``"probabilities"`` or ``"classes"`` for outputs of a classification.
    report
        Function that is called on rank 0 with the number of complete samples and the number of all samples.
    format
        Format of `out`: ``"hdf5"``, or a :class:`halograd.data.Writer` of your own, ``"FILE.py:CLASS"``.
    flips
        Axes (``"depth"``, ``"height"``, ``"width"``) along which samples are mirrored, alone and together: the outputs
        are means over these images, each computed by itself.
    window
        Extents of sliding windows, one per axis, for samples that do not fit as a whole: outputs are weighted means
        over the windows of each sample (:mod:`halograd.training.sliding`). By default samples are computed whole.
    overlap
        Fraction of a window that overlaps with the next one, in [0, 1); 0.5 by default.
    rollout
        Number of time points to predict with a network that was trained with ``data.lag``: predictions become the
        inputs of the next step (:mod:`halograd.training.rollout`). 0: the network is applied once.

    Returns
    -------
    dict
        Number of ``samples``, number of samples that this job ``computed``, ``step``, ``checkpoint``, and the
        ``settings`` that were adapted to data and ranks (:func:`halograd.training.adapting.adapted`); with `window`
        also the number of all ``windows``.
    """
    world, out = boot() if comm is None else comm, Path(out)
    sources = [data] if isinstance(data, str | Path) else list(data)
    if not all(isinstance(path, str | Path) for path in sources):
        raise UserError(
            f"data: expected files, patterns or folders, got {type(data).__name__}; for arrays and data sets of a "
            "script use halograd.fit(...).apply"
        )
    paths = [str(path) for path in sources]
    if overlap is not None and not window:
        raise UserError("--overlap: expected --window with it, got none")
    slide = Slide(tuple(window), 0.5 if overlap is None else overlap) if window else None

    def find() -> tuple[Config, list[str], Path, TrainingProgress]:
        config, checkpoint, progress, _ = find_trained(Path(target), overrides)
        config = config.model_copy(update={"data": config.data.model_copy(update={"path": paths})})
        return (*adapted(config, overrides, world.size, labelled=False, slide=slide), checkpoint, progress)

    config, settings, checkpoint, progress = on_root(world, find)

    def check() -> dict[str, int | None]:
        if not out.is_dir():  # a folder is checked when it is known whether samples differ in size
            check_result(WRITERS.make(format), out)
        return checksums([format])

    own = on_root(world, check)
    trained = _trained(config, world, planner, checkpoint, progress, labelled=False, slide=slide)
    with trained as (ranks, session, identity):
        with ranks.agreement():
            # The user's file of the format must be the same on all nodes: `own` are the checksums of rank 0.
            check_files([format], own)
            outputs = outputs_of(session, what, progress.described, rollout)
            writer = WRITERS.make(format)
            several = getattr(session.samples.dataset, "extents", None) is not None
        on_root(ranks.mpi, lambda: check_folder(out, writer.suffix) if several else check_result(writer, out))
        files = on_root(ranks.mpi, lambda: _files(session))
        job = {"checkpoint": [str(checkpoint), identity], "what": what, "files": files, **_settings(session)}
        job |= {"flips": sorted(flips)} if flips else {}
        job |= {"rollout": rollout} if rollout else {}
        job |= {"window": slide.window, "overlap": slide.overlap} if slide else {}
        shown = report if report is not None and ranks.rank == 0 else lambda done, total: None
        if several and slide is None:  # each size has its own
            sizes = ("data.extents=", "model.resolution=")
            settings = [setting for setting in settings if not setting.startswith(sizes)]
        if several:
            computed = write_each(session, progress.described, what, out, format, job, shown, flips, rollout)
        else:
            computed = write_outputs(session, outputs, out, writer, job, shown, flips)
        result = {"samples": len(session.samples.dataset), "computed": computed, "step": progress.step}
        windows = session.samples.windows
        if isinstance(windows, SlidingWindows):
            result["windows"] = sum(map(windows.count, range(result["samples"])))
    return {**result, "checkpoint": str(checkpoint), "settings": settings}


@contextmanager
def _trained(
    config: Config,
    world: Any,
    planner: Planner | None,
    checkpoint: Path,
    progress: TrainingProgress,
    labelled: bool = True,
    slide: Slide | None = None,
) -> Iterator[tuple[Communicator, Session, Any]]:
    """Open a session with the parameters of a checkpoint; yield it with its ranks and the checkpoint's identity.

    Collective over `world`.
    """
    TRANSPORTS.make(config.backend.transport)  # its error names the key
    with Communicator(world, config.backend.transport) as ranks, ExitStack() as stack:
        reader = stack.enter_context(CheckpointReader(checkpoint, ranks))  # now, before another run removes it
        # Without a planner, `make_strategy` raises an error with the remedy.
        plan = planner(config, ranks, False) if config.strategy.auto and planner is not None else None
        strategy = None if plan is None else plan.strategy
        session = Session.open(config, ranks, stack, False, progress, strategy, labelled, slide)
        reader.restore(session.executor.store, extents=False, averaged=config.training.average > 0)
        # It keeps the bytes of the file in memory; its `identity` stays valid.
        reader.close()
        with session.memory_errors():
            yield ranks, session, reader.identity


def _files(session: Session) -> list[Any]:
    """Return plain data that change whenever a file of samples, or a file that it refers to, changes. Local."""
    data, dataset = session.config.data, session.samples.dataset
    paths_given = [data.path] if isinstance(data.path, str) else data.path
    parts = [part for part in getattr(dataset, "parts", [dataset]) if isinstance(part, Hdf5Dataset)]
    paths = [Path(path) for path in paths_given] if data.file is not None else [part.path for part in parts]
    for part in parts:
        paths += map(Path, part.structure.files)
    states = [(str(path), path.stat() if path.exists() else None) for path in paths]
    # It is unknown whether an object of a script has the same samples as in an earlier attempt.
    once = [secrets.token_hex(8)] if data.file is not None and is_made(data.file) else []
    return [[path, state and [state.st_size, state.st_mtime_ns]] for path, state in states] + once


def _settings(session: Session) -> dict[str, Any]:
    """Return, as plain data, everything other than checkpoint and samples that predictions depend on. Local."""
    config = session.config
    # Files are in `_files`; how many are read ahead or kept open changes no prediction.
    tables = config.model_dump(
        mode="json",
        include={"model": True, "data": True, "training": True, "backend": {"kernels", "precision"}},
        exclude={"data": {"path", "prefetch", "open_files"}},
    )
    own = None if config.data.file is None else source_of(config.data.file)
    return {"version": __version__, "config": tables, "network": session.source, "data": own}


def find_trained(target: Path, overrides: Sequence[str]) -> tuple[Config, Path, TrainingProgress, bool]:
    """Return configuration, checkpoint and progress of a run, and whether it would hold out the same samples as its
    training did. Local.
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
        config = check_config(json.loads(text or "{}"), overrides, f"configuration in {checkpoint}")
    trained = json.loads(text or "{}")
    # The folder of the run: checkpoints are in a folder within it.
    config = kept_model(config, checkpoint.parent.parent, trained.get("model", {}))
    requested = json.loads(config.model_dump_json(exclude_unset=True))
    return config, checkpoint, progress, _drawn_by(requested) == _drawn_by(trained)


def _drawn_by(config: Mapping[str, Any]) -> list[Any]:
    """Return the settings that determine the held-out samples."""
    data = config.get("data", {})
    # The tables have only keys that were set: None is the default.
    own = [data.get(key) for key in ("path", "validation", "split", "invalid", "lag", "history", "rollout")]
    return [*own, config.get("training", {}).get("seed")]
