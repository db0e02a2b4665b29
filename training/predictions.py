"""Predictions of a network written to HDF5."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np

from halograd.data import Batch
from halograd.data.atomic import atomic_path
from halograd.device import is_low
from halograd.training.session import Session

__all__ = ["write_predictions"]


def write_predictions(session: Session, batches: list[Batch], path: Path) -> None:
    """Datasets ``prediction``, ``target`` ``(n, *spatial, C)`` and ``sample`` ``(n,)``. Collective; rank 0 writes.

    Predictions are what the loss reads (logits). Rank 0 holds all of them at once: for pictures and small sets.
    """
    executor, comm = session.executor, session.comm
    name = session.network.names[session.network.outputs["prediction"]]
    fault: Exception | None = None
    try:
        if comm.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fault = error
    comm.agree(fault)
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
    except (OSError, ValueError) as error:
        fault = error
    comm.agree(fault)


def _write(path: Path, parts: list[tuple[np.ndarray, np.ndarray, list[int]]]) -> None:
    with atomic_path(path) as partial, h5py.File(partial, "w", locking=False) as file:
        file["prediction"] = np.concatenate([p for p, _, _ in parts])
        file["target"] = np.concatenate([t for _, t, _ in parts])
        file["sample"] = np.array([i for _, _, indices in parts for i in indices], np.int64)
