"""Masks of a run, from the predictions that `halograd evaluate --predictions` has written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np

from halograd.data import DataError, open_dataset
from halograd.data.reading import open_file
from halograd.data.storage import Storage
from halograd.data.structure import find, looking_into
from halograd.dtensor.box import Box
from halograd.errors import UserError
from halograd.report.masks import Masks, best_to_worst, iou

__all__ = ["read_masks"]


def read_masks(path: Path, data: dict[str, Any]) -> Masks | None:
    """Some samples, from the one that is predicted best to the worst; None where predictions are no masks. Local.

    One sample is in memory at a time. Of 3-D samples the middle slice is taken.

    Parameters
    ----------
    path
        With ``prediction`` and ``target`` ``(n, *spatial, C)`` and ``sample``.
    data
        Table ``[data]`` of the configuration, to show what the network sees; if the file is not there, masks alone.

    Raises
    ------
    UserError
        If it is no such file.
    """
    try:
        with open_file(path) as file, looking_into(path):
            missing = {"prediction", "target", "sample"} - set(file)
            if missing:
                raise DataError(f"{path}: got no {missing}")
            prediction, target, sample = (
                find(file, path, name, Storage(path)) for name in ("prediction", "target", "sample")
            )
            return _masks(prediction, target, sample, data)
    except DataError as error:
        raise UserError(f"expected predictions of `halograd evaluate`: {error}") from error


def _masks(prediction: h5py.Dataset, target: h5py.Dataset, sample: h5py.Dataset, data: dict[str, Any]) -> Masks | None:
    samples = sample[...]
    channels = prediction.shape[-1]
    if prediction.ndim not in (4, 5) or target.shape[:-1] != prediction.shape[:-1] or target.shape[-1] != 1:
        return None
    if channels == 1 and not _is_mask(target[0]):
        return None  # a regression
    classes = max(2, channels)

    def classes_of(k: int) -> tuple[np.ndarray, np.ndarray]:
        values = prediction[k]
        guess = values[..., 0] > 0 if channels == 1 else values.argmax(axis=-1)
        return guess, np.rint(target[k][..., 0]).astype(int)

    rows = best_to_worst(np.array([iou(*classes_of(k), classes) for k in range(len(samples))]))
    guesses, truths = zip(*(classes_of(k) for k in rows))
    image, name = _image(samples[rows], data)
    return Masks(
        samples[rows],
        np.stack([_slice(t) for t in truths]),
        {"prediction": np.stack([_slice(g) for g in guesses])},
        classes,
        "truth",
        image,
        name,
    )


def _is_mask(target: np.ndarray) -> bool:
    return bool(np.isin(target, (0, 1)).all())


def _slice(values: np.ndarray) -> np.ndarray:
    """``(H, W)``: of ``(D, H, W)`` the middle."""
    return values[len(values) // 2] if values.ndim == 3 else values


def _image(samples: np.ndarray, data: dict[str, Any]) -> tuple[np.ndarray | None, str]:
    """One channel of the inputs and its name: the density of a mesh, else the first."""
    try:
        outside = bool(data.get("allow_external", False))
        name, layout = data.get("inputs", "inputs"), data.get("layout")
        with open_dataset(data["path"], name, None, layout, allow_external=outside) as dataset:
            names = dataset.channel_names
            channel = names.index("Density") if "Density" in names else 0
            whole = Box.of_shape((len(samples), *dataset.sample_shape))
            box = Box((*whole.start[:-1], channel), (*whole.stop[:-1], channel + 1))
            values = np.empty(box.shape, np.float32)
            dataset.read([int(k) for k in samples], box, values)
    except (DataError, KeyError):
        return None, ""
    return np.stack([_slice(v[..., 0]) for v in values]), names[channel]
