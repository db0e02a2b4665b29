"""Predictions of a network written to HDF5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import h5py
import numpy as np

from ..data import Batch
from ..data.disk import atomic_path, check_replaceable
from ..device import is_low
from .gather import Gather
from .metrics import judged
from .session import Session

__all__ = ["check_predictions", "write_predictions"]


def check_predictions(path: Path) -> None:
    """See that predictions can be written, before they are computed; see :func:`check_replaceable`. Local."""
    check_replaceable(path, "older predictions", _is_ours)


def _is_ours(file: h5py.File) -> bool:
    names = {"prediction", "target"}
    others = [file[name] for name in file if name not in names | {"sample"}]
    return names | {"sample"} <= set(file) and all(isinstance(one, h5py.Group) and set(one) == names for one in others)


def write_predictions(session: Session, batches: Sequence[Batch], path: Path) -> None:
    """Datasets ``prediction``, ``target`` ``(n, *spatial, C)`` and ``sample`` ``(n,)``. Collective; rank 0 writes.

    Of a second prediction that the loss judges, and of others, ``NAME/prediction`` and ``NAME/target``. Predictions are
    what the loss reads (logits). Rank 0 holds all of them at once: for pictures and small sets.
    """
    executor, comm = session.executor, session.comm
    names: dict[str, str] = {}
    for number, one in enumerate(judged(executor)):
        folder = f"{one.name}/" if number else ""
        names |= {f"{folder}prediction": one.nodes[0], f"{folder}target": one.nodes[1]}
    parts: dict[str, list[np.ndarray]] = {key: [] for key in names}
    samples: list[int] = []
    fault: Exception | None = None
    with closing(Gather(executor, list(names.values()))) as way:
        for batch in session.feed(batches):
            executor.forward(training=False)
            executor.loss_value()
            for key, whole in zip(names, way.run()):
                if whole is not None:
                    valid = whole[: batch.valid]
                    parts[key].append(valid.astype(np.float32) if is_low(valid.dtype) else valid.copy())
            samples += batch.indices[: batch.valid]
    try:
        if comm.rank == 0:
            _write(path, parts, samples)
    except Exception as error:  # of whatever kind, such as too little memory: the other ranks wait for the answer
        fault = error
    comm.agree(fault)


def _write(path: Path, parts: Mapping[str, list[np.ndarray]], samples: list[int]) -> None:
    with atomic_path(path) as partial, h5py.File(partial, "w", locking=False) as file:
        for key, arrays in parts.items():
            file[key] = np.concatenate(arrays)
        file["sample"] = np.array(samples, np.int64)
