"""Predictions of a trained network on data without labels, written by blocks.

::

    OUT.h5                               one dataset per output, (N, *spatial, C); on several ranks virtual;
                                         source_file, source_sample (N,): the sample of each prediction
    OUT.h5.parts/3f2a90c1/rank-00003.h5  part of rank 3: its box of every sample (:mod:`halograd.training.parts`)

Each job has a folder of its own, so an older OUT.h5 does not change until the new one replaces it; then the folders of
other jobs are removed. The attribute ``needs`` of a virtual OUT.h5 names the parts, one per line, relative to its
folder. Without them it reads as NaN, or as the largest number of the class dtype, which is no class. An interrupted job
continues after the last batch that all ranks have written, if all parts are undamaged. A rank holds at most its boxes
of three batches of an output.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import queue
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py
import numpy as np

from halograd.errors import UserError

from ..comm import Communicator
from ..data.coordinates import SOURCES, write_coordinates, write_sources
from ..data.disk import atomic_path, check_replaceable
from ..device import is_low
from ..dtensor import Blocks, Box
from ..layers.targets import Judgement
from ..lowering.views import Value
from .metrics import sigmoid, softmax
from .parts import PartArray, PartFile, part_path, writing
from .session import Session

__all__ = ["WHAT", "Output", "check_outputs", "outputs_of", "write_outputs"]

#: Forms in which an output of classes is written.
WHAT = ("logits", "probabilities", "classes")
_WRITTEN_BY = "halograd apply"
#: Dataset with the simulation of each sample, for data of several simulations.
_GROUPS = "simulation"
#: Attributes of the file that are not copied from the data.
_OWN = ("written_by", "network", "needs")

_log = logging.getLogger(__name__)

Tell = Callable[[int, int], None]


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
        Boxes of the ranks, of a batch, in the file.
    dtype
        Dtype in the file.
    of_block
        Function that converts a block to the written form.
    attributes
        Attributes of the dataset (units, names, ...).
    """

    name: str
    value: Value
    shape: tuple[int, ...]
    boxes: Blocks
    dtype: np.dtype
    of_block: Callable[[np.ndarray], np.ndarray]
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fill(self) -> float | int:
        """Number that a missing part reads as; no prediction has this value."""
        return float("nan") if self.dtype.kind == "f" else int(np.iinfo(self.dtype).max)


def check_outputs(out: Path) -> None:
    """Check, before the computation, that `out` can be written (:func:`check_replaceable`). Local."""
    check_replaceable(out, "one of an earlier job", lambda file: file.attrs.get("written_by") == _WRITTEN_BY)


def outputs_of(session: Session, what: str, described: Mapping[str, Mapping[str, Any]]) -> list[Output]:
    """Return all outputs of the network except the loss. Local, the same on all ranks.

    Parameters
    ----------
    what
        One of :data:`WHAT`.
    described
        Attributes of the targets in the training data, by name.

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
    for name in kept.keys() & network.outputs.keys():
        raise UserError(f"output {name!r}: expected another name, because the file uses it for {kept[name]}")
    judgements = loss.layer.judgements(*(n.shape for n in loss.inputs))
    judged = {loss.inputs[one.prediction]: one for one in reversed(judgements)}  # use the first one of each prediction
    found = []
    for name, node in network.outputs.items():
        if node is loss:
            continue
        value = values[network.names[node]]
        dtype = np.dtype(np.float32) if is_low(value.dtype) else value.dtype
        plain = Output(name, value, node.shape, value.layout.boxes, dtype, _as_it_is)
        judgement = judged.get(node)
        made = plain if what == "logits" or judgement is None else _of_classes(plain, judgement, what)
        if judgement is not None:
            said = described.get(network.names[loss.inputs[judgement.target]], {})
            made = replace(made, attributes=_attributes(said, judgement, what, made.shape[-1]))
        found.append(made)
    return found


def _attributes(said: Mapping[str, Any], judgement: Judgement, what: str, channels: int) -> dict[str, Any]:
    """Select the attributes of a target that are valid for its prediction: for logits and probabilities, only names."""
    if judgement.classes is not None and what != "classes":
        said = {key: said[key] for key in ("long_name", "description") if key in said}
    fits = len(said.get("channel_names", ())) == channels
    return {key: value for key, value in said.items() if key != "channel_names" or fits}


def _of_classes(output: Output, judgement: Judgement, what: str) -> Output:
    """Convert an output to probabilities or classes; an output of a regression is not changed."""
    if judgement.classes is None:
        return output
    if len(output.boxes.axes[-1]) > 1 and judgement.threshold is None:
        raise UserError(
            f"--what {what}: expected whole channels of output {output.name!r}, got cut channels; choose another cut "
            "by --set, or logits"
        )
    if what == "probabilities" and judgement.probabilities:
        return output
    if what == "probabilities":
        return replace(output, of_block=softmax if judgement.threshold is None else sigmoid)
    dtype = np.min_scalar_type(judgement.classes)  # its largest number is no class
    if judgement.threshold is not None:
        threshold = judgement.threshold
        return replace(output, dtype=dtype, of_block=lambda block: block > threshold)
    boxes = output.boxes.replace(-1, ((0, 1),))
    shape = (*output.shape[:-1], 1)
    return replace(output, dtype=dtype, shape=shape, boxes=boxes, of_block=_largest)


def _as_it_is(block: np.ndarray) -> np.ndarray:
    return block


def _largest(block: np.ndarray) -> np.ndarray:
    return np.argmax(block, axis=-1)[..., None]


# -- writing ---------------------------------------------------------------------------------------


def write_outputs(session: Session, outputs: Sequence[Output], out: Path, job: dict[str, Any], tell: Tell) -> int:
    """Compute and write all samples of the session's data; return the number that this job computed. Collective.

    Parameters
    ----------
    job
        Plain data that distinguish this job from others.
    tell
        Function that is called with the number of complete samples and the number of all samples.

    Raises
    ------
    DataError
        If a file cannot be written; on all ranks.
    """
    comm, count, size = session.comm, len(session.samples.dataset), session.config.training.at_once
    batches = list(session.in_order(np.arange(count)))
    folder, key = _folder(out, {**job, "samples": count, "ranks": comm.size}, outputs)
    mine = [output for output in outputs if output.boxes[comm.rank].size]
    arrays = [PartArray(output.name, output.boxes[comm.rank], output.dtype) for output in mine]

    def describe(file: h5py.File) -> None:
        if comm.size == 1:  # it becomes `out`
            _describe(file, outputs, session)

    with comm.agreement():
        part = PartFile(part_path(folder, comm.rank), comm.rank, arrays, count, size, key, describe)
    with part:
        _warn_of_damage(comm, folder, part.fault)
        part.go_back(int(comm.allreduce_scalar(part.done, "min")))
        left = batches[part.done :]
        with _Writer(part, mine) as writer:
            for number, batch in enumerate(session.feed(left), part.done):
                session.executor.forward(training=False)
                writer.put([session.executor.device.to_host(_view(session, output)) for output in mine])
                tell(number * size + batch.valid, count)
        comm.agree(writer.fault)
    fault: Exception | None = None
    try:
        if comm.rank == 0:
            _finish(out, folder, outputs, count, size, comm.size, session)
    except Exception as error:
        fault = error
    comm.agree(fault)
    return sum(batch.valid for batch in left)


def _warn_of_damage(comm: Communicator, folder: Path, fault: str | None) -> None:
    """Log, in one line, the parts of an earlier attempt that are not continued, and the reason. Collective."""
    faults = {rank: text for rank, text in enumerate(comm.allgather_objects(fault)) if text is not None}
    if faults and comm.rank == 0:
        rank, text = next(iter(faults.items()))
        more = f"; nor are {len(faults) - 1} more" if len(faults) > 1 else ""
        _log.warning("%s is not continued: %s%s; all samples are computed again", part_path(folder, rank), text, more)


def _folder(out: Path, job: dict[str, Any], outputs: Sequence[Output]) -> tuple[Path, str]:
    """Return the folder of the parts of a job, and the key of the job. Local, the same on all ranks."""
    shapes = [[o.name, o.dtype.name, o.shape, o.boxes.axes] for o in outputs]
    key = hashlib.sha256(json.dumps({**job, "outputs": shapes}, sort_keys=True).encode()).hexdigest()
    return _parts(out) / key[:8], key


def _view(session: Session, output: Output) -> Any:
    return session.executor.array(output.value)


class _Writer:
    """Thread that writes a batch while the next one is computed. It keeps an exception until all ranks agree on it."""

    def __init__(self, part: PartFile, outputs: Sequence[Output]) -> None:
        self._part, self._outputs = part, outputs
        self._given: queue.Queue[list[np.ndarray] | None] = queue.Queue(1)
        self._thread = threading.Thread(target=self._run, name="halograd-writer", daemon=True)
        self.fault: Exception | None = None

    def put(self, blocks: list[np.ndarray]) -> None:
        """Queue a batch; its blocks are copied (16 bits to float32), because the next one overwrites them."""
        self._given.put([np.array(block, np.float32 if is_low(block.dtype) else None) for block in blocks])

    def _run(self) -> None:
        while (given := self._given.get()) is not None:
            if self.fault is None:  # after a fault all ranks still compute this batch, and wait for this rank
                self._try(lambda: self._part.write([o.of_block(b) for o, b in zip(self._outputs, given)]))
        self._try(self._part.record)

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self.fault = self.fault or error

    def __enter__(self) -> _Writer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._given.put(None)
        self._thread.join()


def _parts(out: Path) -> Path:
    return out.with_name(f"{out.name}.parts")


def _finish(
    out: Path, folder: Path, outputs: Sequence[Output], count: int, batch: int, ranks: int, session: Session
) -> None:
    """Join all parts in one file: the only part, or virtual datasets. Local, on rank 0."""
    with writing(out):
        if ranks == 1:
            os.replace(part_path(folder, 0), out)
        else:
            with atomic_path(out) as partial, h5py.File(partial, "w", locking=False) as file:
                for output in outputs:
                    file.create_virtual_dataset(output.name, _joined(folder, output, count, batch, ranks), output.fill)
                used = [rank for rank in range(ranks) if any(output.boxes[rank].size for output in outputs)]
                parts = [part_path(folder, rank).relative_to(out.parent).as_posix() for rank in used]
                file.attrs["needs"] = "\n".join(parts)
                _describe(file, outputs, session)
        _remove_others(_parts(out), folder if ranks > 1 else None)


def _remove_others(parts: Path, used: Path | None) -> None:
    """Remove parts of other jobs, to which no file refers, and partial files of killed ranks. Local."""
    for path in () if used is None else used.glob(".*.partial"):
        with suppress(OSError):
            path.unlink()
    for folder in parts.iterdir():
        if folder != used and re.fullmatch("[0-9a-f]{8}", folder.name):
            shutil.rmtree(folder, ignore_errors=True)
    if used is None:
        with suppress(OSError):  # the folder is not empty
            parts.rmdir()


def _joined(folder: Path, output: Output, count: int, batch: int, ranks: int) -> h5py.VirtualLayout:
    layout = h5py.VirtualLayout((count, *output.shape), output.dtype)
    for rank in range(ranks):
        box: Box = output.boxes[rank]
        if not box.size:
            continue
        path = part_path(folder, rank).relative_to(folder.parent.parent).as_posix().replace("%", "%%")  # no pattern
        source = h5py.VirtualSource(path, output.name, (count, *box.shape[1:]))
        for low, high in _runs(box, count, batch):
            layout[(slice(low, high), *box.slices()[1:])] = source[low:high]
    return layout


def _runs(box: Box, count: int, batch: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of the file's samples that a rank has: all of them, or some of every batch."""
    low, high = box.ranges[0]
    if (low, high) == (0, batch):
        yield 0, count
        return
    for first in range(0, count, batch):
        if first + low < count:
            yield first + low, min(first + high, count)


def _describe(file: h5py.File, outputs: Sequence[Output], session: Session) -> None:
    """Write the attributes that readers need."""
    for name, value in getattr(session.samples.dataset, "attributes", {}).items():
        if name not in _OWN:
            file.attrs[name] = value
    file.attrs.update(written_by=_WRITTEN_BY, network=session.network.name)
    for output in outputs:
        for name, value in output.attributes.items():
            file[output.name].attrs[name] = value
        file[output.name].attrs["layout"] = {1: "NWC", 2: "NHWC", 3: "NDHWC"}.get(len(output.shape) - 1, "NC")
    if session.samples.dataset.groups is not None:
        file[_GROUPS] = session.samples.dataset.groups
    write_sources(file, session.samples.dataset, range(len(session.samples.dataset)))
    shapes = {output.name: output.shape for output in outputs}
    left_out = write_coordinates(file, session.samples.dataset, shapes, session.config.data.allow_external)
    if left_out:
        _log.warning("predictions are written without these coordinates of the data: %s", "; ".join(left_out))
