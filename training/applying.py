"""Predictions of a trained network, written by blocks; labels of the data are not read.

::

    OUT.parts/3f2a90c1/rank-00003.h5  part of rank 3: its box of every sample (:mod:`halograd.training.parts`)
            | all samples are complete
    .OUT.3f2a90c1.joined              HDF5 file with one dataset per output, (N, *spatial, C), virtual;
            |                         source_file, source_sample (N,): the sample of each prediction;
            |                         on one rank, the part itself
            | :class:`halograd.data.Writer`
    OUT                               result in a format; as HDF5 the joined file, which refers to the parts

Each job has a folder of its own, so an older OUT does not change until the new one replaces it; then the folders of
other jobs are removed. The attribute ``needs`` of a virtual file names the parts, one per line, relative to its folder.
A missing part reads as NaN, or as the largest integer of the class dtype, which is not a class. An interrupted job
continues after the last batch that all ranks have written, if all parts are undamaged. A rank holds at most its boxes
of two batches of every output.

Files whose samples differ in size become a folder with a file for each file of samples::

    OUT/case_07.h5      predictions of .../case_07.h5
    OUT/site2/x.h5      files of several folders keep their folders
    OUT/sources.json    by file of OUT: its source, the number of samples, and a mark of the job

Files of one size are computed one after another by one executor. A repeated call continues an interrupted job: it keeps
the complete files of that job, and continues the one that was in progress.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from halograd.documents import replacing, writing
from halograd.errors import UserError

from ..data import Batch, FileSet, Hdf5Dataset, Sampler
from ..data.coordinates import SOURCES, STEP, write_coordinates, write_sources
from ..data.disk import DataError, atomic_path
from ..data.source import sample_shape
from ..data.windows import SlidingWindows
from ..data.writers import WRITERS, WRITTEN_BY, Predictions, Writer
from ..dtensor import Blocks, Box
from ..layers.targets import MetricSpec
from ..lowering.views import Value
from .adapting import at_size, grid_of
from .flips import Flips
from .metrics import sigmoid, softmax
from .parts import PartArray, PartFile, part_path
from .rollout import Rollout, check_rollout, stepped
from .root import on_root
from .session import Session, open_loader
from .sliding import at_once, dtype_of, placed, predicted
from .whole import Sized, open_sized

__all__ = ["WHAT", "Output", "check_folder", "outputs_of", "write_each", "write_outputs"]

#: Forms in which an output of classes is written.
WHAT = ("logits", "probabilities", "classes")
#: Dataset with the simulation of each sample, for data of several simulations.
_GROUPS = "simulation"
#: Attributes of the file that are not copied from the data.
_OWN = ("written_by", "network", "needs")

_log = logging.getLogger(__name__)

Report = Callable[[int, int], None]
Predicted = Callable[[Sequence[Batch]], Iterator[tuple[Batch, list[np.ndarray]]]]


@dataclass(frozen=True)
class Output:
    """Output of a network and its form in the file.

    Attributes
    ----------
    name
        Name of the dataset.
    value
        Value that holds this rank's block.
    shape
        Shape ``(*spatial, C)`` of a sample in the file.
    boxes
        Boxes that the ranks hold of a batch (with sliding windows, of one sample), in the coordinates of the file.
    dtype
        Dtype in the file.
    of_block
        Function that converts a block to the written form.
    attributes
        Attributes of the dataset (units, names, ...).
    steps
        Number of time points of a rollout, the first axis of `shape`; 0: there is no such axis.
    """

    name: str
    value: Value
    shape: tuple[int, ...]
    boxes: Blocks
    dtype: np.dtype
    of_block: Callable[[np.ndarray], np.ndarray]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 0

    @property
    def fill(self) -> float | int:
        """Fill value of missing parts: a value that no prediction has."""
        return float("nan") if self.dtype.kind == "f" else int(np.iinfo(self.dtype).max)


def outputs_of(session: Session, what: str, described: Mapping[str, Mapping[str, Any]], steps: int = 0) -> list[Output]:
    """Return all outputs of the network except the loss. Local, the same on all ranks.

    Parameters
    ----------
    what
        One of :data:`WHAT`.
    described
        Attributes of the targets in the training data, by name.
    steps
        Number of time points of a rollout (:mod:`halograd.training.rollout`), the first axis of a sample; 0: no
        rollout.

    Raises
    ------
    UserError
        If `what` is unknown, probabilities or classes need channels that are cut, or an output has a reserved name.
    """
    if what not in WHAT:
        raise UserError(f"--what: expected one of {', '.join(WHAT)}, got {what!r}")
    network, values = session.network, session.executor.program.values
    loss = network.outputs["loss"]
    kept = dict.fromkeys(SOURCES, "the sample of each prediction")
    if session.samples.dataset.groups is not None:
        kept[_GROUPS] = "the simulation of each sample"
    if steps:
        check_rollout(session, steps)
        kept[STEP] = "the times of the predictions"
    for name in kept.keys() & network.outputs.keys():
        raise UserError(f"output {name!r}: expected another name, because the file uses it for {kept[name]}")
    comparisons = loss.layer.comparisons(*(n.shape for n in loss.inputs))
    # The first comparison of each prediction.
    specs = {loss.inputs[spec.prediction]: spec for spec in reversed(comparisons)}
    outputs = []
    for name, node in network.outputs.items():
        if node is loss:
            continue
        value = values[network.names[node]]
        shape, boxes = placed(session, value)
        if steps:
            shape, boxes = stepped(shape, boxes, name, steps, session.config.data.rollout)
        plain = Output(name, value, shape, boxes, dtype_of(value), np.asarray, steps=steps)
        spec = specs.get(node)
        output = plain if what == "logits" or spec is None else _of_classes(plain, spec, what)
        if spec is not None:
            description = described.get(network.names[loss.inputs[spec.target]], {})
            output = replace(output, attributes=_attributes(description, spec, what, output.shape[-1]))
            statistics = session.samples.statistics.get(network.names[loss.inputs[spec.target]])
            # A rollout restores the units itself, since it also feeds predictions back as inputs.
            if statistics is not None and not steps:
                # Statistics are those of all channels, and this rank may hold some of them.
                first = output.boxes[session.comm.rank].start[-1]
                output = replace(output, of_block=partial(statistics.restored, first_channel=first))
        outputs.append(output)
    return outputs


def _attributes(description: Mapping[str, Any], spec: MetricSpec, what: str, channels: int) -> dict[str, Any]:
    """Return the attributes of a target that apply to its prediction; for logits and probabilities of classes, only
    names and descriptions.
    """
    if spec.classes is not None and what != "classes":
        description = {key: description[key] for key in ("long_name", "description") if key in description}
    # Predicted classes have one channel, whatever the channels of the target are.
    fits = len(description.get("channel_names", ())) == channels
    return {key: value for key, value in description.items() if key != "channel_names" or fits}


def _of_classes(output: Output, spec: MetricSpec, what: str) -> Output:
    """Convert an output to probabilities or classes; an output of a regression is not changed."""
    if spec.classes is None:
        return output
    # A softmax or an argmax needs all channels of a position; a threshold needs only one.
    if len(output.boxes.axes[-1]) > 1 and spec.threshold is None:
        raise UserError(
            f"--what {what}: expected whole channels of output {output.name!r}, got cut channels; choose another cut "
            "by --set, or logits"
        )
    if what == "probabilities" and spec.probabilities:
        return output
    if what == "probabilities":
        return replace(output, of_block=softmax if spec.threshold is None else sigmoid)
    # One more than the largest class must fit: the largest number of the dtype marks missing parts, and is not a class.
    dtype = np.min_scalar_type(spec.classes)
    if spec.threshold is not None:
        threshold = spec.threshold
        return replace(output, dtype=dtype, of_block=lambda block: block > threshold)
    boxes = output.boxes.replace(-1, ((0, 1),))
    shape = (*output.shape[:-1], 1)
    return replace(
        output, dtype=dtype, shape=shape, boxes=boxes, of_block=lambda block: np.argmax(block, axis=-1)[..., None]
    )


# -- writing ---------------------------------------------------------------------------------------


def write_outputs(
    session: Session,
    outputs: Sequence[Output],
    out: Path,
    writer: Writer,
    job: dict[str, Any],
    report: Report,
    flips: Sequence[str] = (),
) -> int:
    """Compute and write the predictions for the session's data; return the number of samples that this job computed.
    Collective.

    Parameters
    ----------
    job
        Plain data that distinguish this job from others.
    report
        Function that is called with the number of complete samples and the number of all samples.
    flips
        Axes along which samples are mirrored; the outputs are means over the images (:mod:`halograd.training.flips`).

    Raises
    ------
    DataError
        If a file cannot be written; on all ranks.
    UserError
        If `flips` are given for a rollout.
    """
    comm = session.comm
    # Parts of another job do not fit: the key covers all that decides their contents.
    shapes = [[o.name, o.dtype.name, o.shape, o.boxes.axes] for o in outputs]
    whole = {**job, "samples": len(session.samples.dataset), "ranks": comm.size, "outputs": shapes}
    key = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()
    folder = out.with_name(f"{out.name}.parts") / key[:8]
    values = [output.value for output in outputs]
    steps = outputs[0].steps if outputs else 0
    if steps and flips:
        raise UserError("--rollout: expected no --flips with it, got some; the mean would not be a state of the data")
    if steps:
        names = [output.attributes.get("channel_names", ()) for output in outputs]
        with closing(Rollout(session, steps, values, names)) as rollout:
            computed = _compute(session, outputs, folder, key, report, rollout.predicted)
    elif flips:
        with closing(Flips(session, flips, values)) as mean:
            computed = _compute(session, outputs, folder, key, report, mean.predicted)
    else:
        computed = _compute(session, outputs, folder, key, report, partial(predicted, session, values))
    _finish(session, outputs, out, folder, writer)
    with comm.agreement(), writing(str(out), kind=DataError):
        if comm.rank == 0:
            # Only now: until the result is complete, an interrupted job continues with its parts.
            _clean(folder, writer.refers and comm.size > 1)
    return computed


def _compute(
    session: Session, outputs: Sequence[Output], folder: Path, key: str, report: Report, compute: Predicted
) -> int:
    """Complete the parts of all ranks in `folder`; return the number of computed samples. Collective.

    A thread writes a batch while the next one is computed. After a fault on one rank, all ranks still compute, because
    the others wait for messages of that rank.
    """
    comm, count, size = session.comm, len(session.samples.dataset), at_once(session)
    # A rank may hold nothing of an output, and HDF5 datasets of no elements have no offset.
    kept = [number for number, output in enumerate(outputs) if output.boxes[comm.rank].size]
    mine = [output for output in outputs if output.boxes[comm.rank].size]
    arrays = [PartArray(output.name, output.boxes[comm.rank], output.dtype) for output in mine]

    def describe(file: h5py.File) -> None:
        if comm.size == 1:  # it needs no joining
            _describe(file, outputs, session)

    def write(blocks: list[np.ndarray]) -> None:
        part.write([output.of_block(block) for output, block in zip(mine, blocks)])

    with comm.agreement():
        part = PartFile(part_path(folder, comm.rank), comm.rank, arrays, count, size, key, describe)
    with part:
        faults = {k: text for k, text in enumerate(comm.allgather_objects(part.fault)) if text is not None}
        if faults and comm.rank == 0:
            rank, text = next(iter(faults.items()))
            more = f"; nor are {len(faults) - 1} more" if len(faults) > 1 else ""
            path = part_path(folder, rank)
            _log.warning("%s is not continued: %s%s; all samples are computed again", path, text, more)
        # Every rank continues after the last batch that all ranks have written.
        # A rank may be ahead: a predicted batch needs all ranks.
        part.go_back(int(comm.allreduce_scalar(part.done, "min")))
        # The last batch is filled up; `PartFile` writes no sample twice.
        left = list(Sampler(np.arange(count), size, shuffle="never", remainder="fill").rest_of_epoch())[part.done :]
        fault: Exception | None = None
        pending: Future[Exception | None] | None = None
        try:
            with ThreadPoolExecutor(1, "halograd-writer") as thread:
                for number, (batch, predictions) in enumerate(compute(left), part.done):
                    blocks = [predictions[k] for k in kept]
                    if pending is not None:
                        # Wait for the batch before: at most two batches are in memory.
                        fault = fault or pending.result()
                    if fault is None:
                        pending = thread.submit(_fault_of, partial(write, blocks))
                    report(number * size + batch.valid, count)
        finally:
            # Also after an error: the next job continues after the batches that are written.
            unrecorded = _fault_of(part.record)
        comm.agree(fault or (pending and pending.result()) or unrecorded)
    return sum(batch.valid for batch in left)


def _fault_of(call: Callable[[], None]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def _finish(session: Session, outputs: Sequence[Output], out: Path, folder: Path, writer: Writer) -> None:
    """Join the parts in one file, and write the result with `writer`. Collective."""
    comm, count = session.comm, len(session.samples.dataset)
    joined = part_path(folder, 0) if comm.size == 1 else out.with_name(f".{out.name}.{folder.name}.joined")
    result = out
    with ExitStack() as stack:
        with comm.agreement(), writing(str(out), kind=DataError):
            if comm.rank == 0:
                if comm.size > 1:
                    stack.callback(joined.unlink, missing_ok=True)
                    _join(session, outputs, folder, joined)
                # A temporary path; it replaces `out` when `stack` closes, after all ranks have written.
                result = stack.enter_context(replacing(out))
        result = comm.bcast(result)
        with comm.agreement(), writing(str(out), kind=DataError):
            if comm.rank == 0:
                with _opened(joined, outputs, writer) as predictions:
                    writer.begin(predictions, result)
        # In units of 1 / size of the samples: one unit per rank, or all of them on rank 0.
        first, stop = (comm.rank, comm.rank + 1) if writer.parallel else (0, comm.size if comm.rank == 0 else 0)
        samples = range(count * first // comm.size, count * stop // comm.size)
        with comm.agreement(), writing(str(out), kind=DataError):
            if samples:
                with _opened(joined, outputs, writer) as predictions:
                    writer.write(predictions, result, samples)
        with comm.agreement(), writing(str(out), kind=DataError):
            stack.close()


def _clean(folder: Path, used: bool) -> None:
    """Remove parts of other jobs, partial files of killed ranks and, unless `used`, the parts of this job. Local."""
    for path in folder.glob(".*.partial"):
        with suppress(OSError):
            path.unlink()
    for other in folder.parent.iterdir():
        # Only folders of jobs, which are named by eight digits of a key: others may be the user's.
        if re.fullmatch("[0-9a-f]{8}", other.name) and not (used and other == folder):
            shutil.rmtree(other, ignore_errors=True)
    if not used:
        with suppress(OSError):  # the folder is not empty
            folder.parent.rmdir()


@contextmanager
def _opened(joined: Path, outputs: Sequence[Output], writer: Writer) -> Iterator[Predictions]:
    """Open the joined file; raise DataError if a part that the writer reads is missing: HDF5 does not report it."""
    with h5py.File(joined, "r", locking=False) as file:
        for name in file.attrs.get("needs", "").split("\n") if not writer.refers else ():
            if name and not (joined.parent / name).exists():
                raise DataError(f"cannot read {joined.parent / name}: no such file; all ranks need one file system")
        yield Predictions(file, {output.name: file[output.name] for output in outputs})


def _join(session: Session, outputs: Sequence[Output], folder: Path, joined: Path) -> None:
    """Write virtual datasets of the parts of all ranks. Local, on rank 0."""
    count, batch = len(session.samples.dataset), at_once(session)
    used = [r for r in range(session.comm.size) if any(output.boxes[r].size for output in outputs)]
    parts = {rank: part_path(folder, rank).relative_to(joined.parent).as_posix() for rank in used}
    with atomic_path(joined) as temporary, h5py.File(temporary, "w", locking=False) as file:
        for output in outputs:
            layout = h5py.VirtualLayout((count, *output.shape), output.dtype)
            for rank, path in parts.items():
                box = output.boxes[rank]
                source = h5py.VirtualSource(path.replace("%", "%%"), output.name, (count, *box.shape[1:]))  # no pattern
                for low, high in _runs(box, count, batch) if box.size else ():
                    layout[(slice(low, high), *box.slices()[1:])] = source[low:high]
            file.create_virtual_dataset(output.name, layout, output.fill)
        file.attrs["needs"] = "\n".join(parts.values())
        _describe(file, outputs, session)


def _runs(box: Box, count: int, batch: int) -> list[tuple[int, int]]:
    """Return the ranges of samples in the file that a rank holds: one range of all samples, or one range per batch."""
    low, high = box.ranges[0]
    if (low, high) == (0, batch):
        return [(0, count)]
    return [(first + low, min(first + high, count)) for first in range(0, count, batch) if first + low < count]


def _describe(file: h5py.File, outputs: Sequence[Output], session: Session) -> None:
    """Write attributes, coordinates and the sources of the samples into a file of predictions."""
    # A data set of the user may have no attributes.
    for name, value in getattr(session.samples.dataset, "attributes", {}).items():
        if name not in _OWN:
            file.attrs[name] = value
    file.attrs.update(written_by=WRITTEN_BY, network=session.network.name)
    for output in outputs:
        for name, value in output.attributes.items():
            file[output.name].attrs[name] = value
        if session.config.data.lag:  # the coordinate of time is that of the inputs
            lag, steps = session.config.data.lag, output.steps or session.config.data.rollout
            ahead = file[output.name].attrs["steps_ahead"] = np.arange(lag, lag * steps + 1, lag)
        if output.steps:
            if STEP not in file:
                file[STEP] = ahead
                file[STEP].attrs["long_name"] = "samples after the last input"
                file[STEP].make_scale(STEP)
            file[output.name].dims[1].attach_scale(file[STEP])
            continue
        file[output.name].attrs["layout"] = {1: "NWC", 2: "NHWC", 3: "NDHWC"}.get(len(output.shape) - 1, "NC")
    if session.samples.dataset.groups is not None:
        file[_GROUPS] = session.samples.dataset.groups
    write_sources(file, session.samples.dataset, range(len(session.samples.dataset)))
    shapes = {output.name: output.shape[1:] if output.steps else output.shape for output in outputs}
    left_out = write_coordinates(file, session.samples.dataset, shapes, session.config.data.allow_external)
    if left_out:
        _log.warning("predictions are written without these coordinates of the data: %s", "; ".join(left_out))


#: Name of the table of a folder.
TABLE = "sources.json"


def _table(out: Path) -> dict[str, Any] | None:
    """Return the table of the files in a folder of results; None if no job has written one."""
    try:
        table = json.loads((out / TABLE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    files = table.get("files") if isinstance(table, dict) and table.get("written_by") == WRITTEN_BY else None
    return files if isinstance(files, dict) else None


def check_folder(out: Path, suffix: str) -> None:
    """Raise UserError unless `out` can be a folder of results. Local."""
    if suffix and out.suffix == suffix:
        raise UserError(
            f"--out: expected a folder, because samples differ in size and every file gets one of its own, got {out}; "
            f"leave out {suffix}"
        )
    # `lexists`, because a dangling link is in the way, too.
    empty = out.is_dir() and not any(out.iterdir())
    if os.path.lexists(out) and not empty and (out.is_symlink() or _table(out) is None):
        raise DataError(
            f"cannot write {out}: expected an empty folder, or one of an earlier job, because samples differ in size, "
            "got another; give another path"
        )


def write_each(
    session: Session,
    described: Mapping[str, Mapping[str, Any]],
    what: str,
    out: Path,
    format: str,
    job: Mapping[str, Any],
    report: Report,
    flips: Sequence[str] = (),
    steps: int = 0,
) -> int:
    """Compute and write the predictions for all files; return the number of samples that this job computed. Collective.

    `out` is the folder of the results, `format` the name of their format; `job` also lists, as ``files``, the files of
    samples. Other arguments as for :func:`halograd.training.applying.outputs_of` and `write_outputs`.

    Raises
    ------
    UserError, DataError
        If the samples are those of an object or of ``data.lag``, if the network does not accept the size of a sample,
        or if a file cannot be written.
    """
    comm, dataset = session.comm, session.samples.dataset
    if not isinstance(dataset, FileSet):
        raise UserError(
            "data.path: expected samples of one size with data.lag or a data set of your own, got several; apply them "
            "one size after another"
        )
    names, grid = _names([part.path for part in dataset.parts], WRITERS.make(format).suffix), grid_of(session.network)
    slides = isinstance(session.samples.windows, SlidingWindows)  # a network of one size
    # Files whose fields have equal extents are computed by one executor.
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, part in enumerate(dataset.parts):
        shapes = [sample_shape(part, name, 0)[:-1] for name in (grid, *part.fields)]
        groups.setdefault(tuple(n for shape in shapes for n in shape), []).append(number)
    jobs = [_mark(job, part) for part in dataset.parts]
    table = on_root(comm.mpi, lambda: _table(out) or {})
    done = on_root(comm.mpi, lambda: [_complete(out / n, table.get(n), mark) for n, mark in zip(names, jobs)])
    known = {name: entry for name, entry in table.items() if name in names}
    ready = sum(len(part) for part, complete in zip(dataset.parts, done) if complete)
    computed = 0
    for numbers in groups.values():
        left = [number for number in numbers if not done[number]]
        if not left:
            continue
        extents = sample_shape(dataset.parts[left[0]], grid, 0)[:-1]
        with comm.agreement():
            most = max(len(dataset.parts[number]) for number in numbers)
            of_size = None if slides else Sized(session, at_size(session.config, extents, most, comm.size))
        with ExitStack() as stack:
            sized = session if of_size is None else open_sized(session, of_size, dataset.parts[left[0]], stack)
            for number in left:
                part, path = dataset.parts[number], out / names[number]
                with comm.agreement(), writing(str(path), kind=DataError):
                    if comm.rank == 0:
                        path.parent.mkdir(parents=True, exist_ok=True)
                with ExitStack() as own:
                    samples = replace(sized.samples, dataset=part, windows=sized.samples.windows.over(part))
                    loader, ahead = open_loader(sized.config, sized.executor, samples, own)
                    each = replace(sized, samples=samples, loader=loader, ahead=ahead)
                    outputs = outputs_of(each, what, described, steps)
                    shown = _shown(report, ready, len(dataset))
                    of_file = {**job, "files": _files(job, part)}
                    computed += write_outputs(each, outputs, path, WRITERS.make(format), of_file, shown, flips)
                # A folder may have more files than a process may have open.
                part.close()
                ready += len(part)
                known[names[number]] = {"source": str(part.path), "samples": len(part), "job": jobs[number]}
                # After the file itself: a file that is not in the table is computed again, or continued.
                with comm.agreement(), writing(str(out / TABLE), kind=DataError):
                    if comm.rank == 0:
                        _write(out, {name: known[name] for name in names if name in known})
    return computed


def _shown(report: Report, before: int, total: int) -> Callable[[int, int], None]:
    return lambda done, _: report(before + done, total)


def _write(out: Path, table: Mapping[str, Any]) -> None:
    with replacing(out / TABLE) as partial:
        partial.write_text(json.dumps({"written_by": WRITTEN_BY, "files": table}, indent=1) + "\n", encoding="utf-8")


def _files(job: Mapping[str, Any], part: Hdf5Dataset) -> list[Any]:
    """Return the entries of a job's files that concern one file of samples."""
    own = {str(part.path), *map(str, part.structure.files)}
    return [entry for entry in job["files"] if entry[0] in own]


def _mark(job: Mapping[str, Any], part: Hdf5Dataset) -> str:
    """Return a string that identifies a job and a file of samples: a checksum of the data of both."""
    return hashlib.sha256(json.dumps({**job, "files": _files(job, part)}, sort_keys=True).encode()).hexdigest()


def _complete(path: Path, entry: Any, mark: str) -> bool:
    """Return whether this job has completed a file, with all parts that it refers to. Local."""
    if not isinstance(entry, dict) or entry.get("job") != mark or not path.exists():
        return False
    # Results in other formats contain all predictions, and refer to no parts.
    if not h5py.is_hdf5(path):
        return True
    try:
        with h5py.File(path, "r", locking=False) as file:
            needs = file.attrs.get("needs", "").split("\n")
    except OSError:  # a file that was cut off is written again
        return False
    return all((path.parent / name).exists() for name in needs if name)


def _names(paths: Sequence[Path], suffix: str) -> list[str]:
    """Return the name of the result of each file of samples, relative to the folder of results.

    >>> _names([Path("a/s1.h5"), Path("b/s1.h5")], ".h5")
    ['a/s1.h5', 'b/s1.h5']
    """
    parents = [path.absolute().parent for path in paths]
    common = os.path.commonpath(parents)
    names = [(Path(os.path.relpath(p, common)) / path.stem).as_posix() + suffix for p, path in zip(parents, paths)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"data: expected files that differ in more than their suffix, got two for {twice!r}")
    return names
