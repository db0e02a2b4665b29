"""Predictions of a network written to HDF5."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np

from ..data import Batch, DataError
from ..data.atomic import atomic_path, check_writable
from ..data.reading import open_to_read, regular_size
from ..device import is_low
from .session import Session

__all__ = ["check_predictions", "write_predictions"]


def check_predictions(path: Path) -> None:
    """See that predictions can be written to `path`, before they are computed; makes its folder. Local.

    Raises
    ------
    DataError
        If they cannot be, or if a file is there that no evaluation has written: it is not replaced.
    """
    check_writable(path)
    try:
        if regular_size(path) == 0:
            return
        with open_to_read(path) as file:
            if set(file) == {"prediction", "target", "sample"}:
                return
    except FileNotFoundError:
        return
    except OSError:
        pass
    raise DataError(
        f"cannot write {path}: expected no file there, or older predictions, got another; give another path"
    )


def write_predictions(session: Session, batches: Sequence[Batch], path: Path) -> None:
    """Datasets ``prediction``, ``target`` ``(n, *spatial, C)`` and ``sample`` ``(n,)``. Collective; rank 0 writes.

    Predictions are what the loss reads (logits). Rank 0 holds all of them at once: for pictures and small sets.
    """
    executor, comm = session.executor, session.comm
    name = session.network.names[session.network.outputs["prediction"]]
    fault: Exception | None = None
    parts: list[tuple[np.ndarray, np.ndarray, list[int]]] = []
    for batch in session.feed(batches):
        executor.forward(training=False)
        executor.loss_value()
        prediction, target = executor.gather(name), executor.gather("target")
        if prediction is not None and target is not None:
            if is_low(prediction.dtype):
                prediction = prediction.astype(np.float32)
            parts.append((prediction[: batch.valid], target[: batch.valid], list(batch.indices[: batch.valid])))
    try:
        if comm.rank == 0:
            _write(path, parts)
    except Exception as error:  # of whatever kind, such as too little memory: the other ranks wait for the answer
        fault = error
    comm.agree(fault)


def _write(path: Path, parts: list[tuple[np.ndarray, np.ndarray, list[int]]]) -> None:
    with atomic_path(path) as partial, h5py.File(partial, "w", locking=False) as file:
        file["prediction"] = np.concatenate([p for p, _, _ in parts])
        file["target"] = np.concatenate([t for _, t, _ in parts])
        file["sample"] = np.array([i for _, _, indices in parts for i in indices], np.int64)
