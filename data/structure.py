"""What an HDF5 file holds, and how its axes are meant: checked before anything is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import h5py
import numpy as np
from numpy.typing import NDArray

from .errors import DataError
from .reading import BeingWritten, open_to_read

__all__ = ["Kind", "Structure", "examine", "find", "one_line", "open_file"]

Kind = Literal["channels last", "channels first", "no channels", "vector"]
"""How a dataset is stored: ``(N, *spatial, C)``, ``(N, C, *spatial)``, ``(N, *spatial)`` or ``(N, K)``."""

_LAYOUTS: dict[str, Kind] = {
    **dict.fromkeys(("NHWC", "NWC", "NDHWC"), "channels last"),
    **dict.fromkeys(("NCHW", "NCW", "NCDHW"), "channels first"),
}


@dataclass(frozen=True)
class Structure:
    """What a file holds, as plain data: one rank examines it and tells the others, who then need not.

    Attributes
    ----------
    inputs, targets : str
        Names of the datasets; None for a file that is read without targets.
    shape : tuple
        Of the inputs on disk.
    input_kind, target_kind : Kind
    sample_shape, target_shape : tuple
        ``(*spatial, C)`` of one sample.
    channel_names : list of str
    groups : int64 array ``(N,)`` or None
    """

    inputs: str
    targets: str | None
    shape: tuple[int, ...]
    input_kind: Kind
    target_kind: Kind
    sample_shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    channel_names: list[str]
    groups: NDArray[np.int64] | None


def examine(file: h5py.File, path: Path, inputs: str, targets: str | None, layout: str | None) -> Structure:
    """Look at an open file: which axes its datasets have, and whether they fit each other. Local.

    Raises
    ------
    DataError
        Dataset missing, of wrong rank or type; inputs and targets that do not fit each other.
    """
    x = find(file, path, inputs)
    kind = input_kind(x, path, layout)
    sample_shape = shape_of(x, kind)
    wanted: tuple[Kind, tuple[int, ...]] = ("vector", ())
    if targets is not None:
        y = find(file, path, targets)
        found = target_kind(y, path, x, kind)
        wanted = found, shape_of(y, found)
    names = channel_names(x, sample_shape[-1])
    return Structure(inputs, targets, x.shape, kind, wanted[0], sample_shape, wanted[1], names, groups(file, len(x)))


def open_file(path: Path) -> h5py.File:
    """Open to read.

    Raises
    ------
    DataError
        File missing, not HDF5, truncated, being written.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file; generate it (halograd generate) or correct the path")
    try:
        return open_to_read(path)
    except BeingWritten as error:
        raise DataError(
            f"{path}: cannot be opened, another process is writing to it; wait until it is complete, or end that one"
        ) from error
    except OSError as error:
        if path.stat().st_size == 0 or not h5py.is_hdf5(path):
            raise DataError(f"{path}: expected an HDF5 file, got something else; check the path") from error
        raise DataError(
            f"{path}: cannot be opened ({one_line(error)}); the file is truncated or damaged: write it again"
        ) from error


def find(file: h5py.File, path: Path, name: str) -> h5py.Dataset:
    """The dataset of this name, of numbers."""
    found = file.get(name)
    if not isinstance(found, h5py.Dataset):
        names: list[str] = []
        file.visititems(lambda n, o: names.append(n) if isinstance(o, h5py.Dataset) else None)
        there = ", ".join(f"{n} {file[n].shape}" for n in names) or "none"
        raise DataError(f"{path}: expected a dataset {name!r}, got {there}; name one of these")
    if found.dtype.kind not in "fiub":
        raise DataError(f"{path}: dataset {name!r}: expected numbers, got {found.dtype}")
    return found


def input_kind(inputs: h5py.Dataset, path: Path, layout: str | None) -> Kind:
    """Order of the axes of the inputs: as given, else by their attribute ``layout``."""
    shape = inputs.shape
    if not 3 <= len(shape) <= 5:
        raise DataError(
            f"{path}: {inputs.name!r}: expected (N, *spatial, C) or (N, C, *spatial) with 1 to 3 spatial axes, got "
            f"shape {shape}"
        )
    if 0 in shape:
        raise DataError(f"{path}: {inputs.name!r} is empty: expected samples, got shape {shape}; generate some")
    name = layout if layout is not None else inputs.attrs.get("layout")
    if name is None:
        raise DataError(
            f"{path}: {inputs.name!r} has no attribute 'layout'; pass layout='NHWC' or 'NCHW', as its shape {shape} "
            "is meant"
        )
    if name not in _LAYOUTS:
        raise DataError(f"{path}: expected layout 'NHWC' or 'NCHW', got {name!r}")
    return _LAYOUTS[name]


def target_kind(targets: h5py.Dataset, path: Path, inputs: h5py.Dataset, kind: Kind) -> Kind:
    """How the targets are stored, judged by the grid of the inputs (of that kind)."""
    shape, samples, spatial = targets.shape, inputs.shape[0], shape_of(inputs, kind)[:-1]
    if len(shape) < 1 or shape[0] != samples:
        raise DataError(
            f"{path}: inputs have {samples} samples, targets {targets.name!r} have shape {shape}; expected as many on "
            "the first axis"
        )
    if len(shape) == 1:
        return "no channels"
    if len(shape) == len(spatial) + 1 and _is_coarser(shape[1:], spatial):
        return "no channels"
    if len(shape) == len(spatial) + 2 and _is_coarser(shape_of(targets, kind)[:-1], spatial):
        return kind
    if len(shape) == 2:
        return "vector"
    raise DataError(
        f"{path}: inputs have the grid {spatial}, targets {targets.name!r} the shape {shape}; expected that grid (or "
        "one coarser by a whole factor), with or without channels, or one row per sample"
    )


def shape_of(dataset: h5py.Dataset, kind: Kind) -> tuple[int, ...]:
    """``(*spatial, C)`` of one sample."""
    shape = tuple(dataset.shape)
    if kind == "channels first":
        return (*shape[2:], shape[1])
    return (*shape[1:], 1) if kind == "no channels" else shape[1:]


def channel_names(inputs: h5py.Dataset, channels: int) -> list[str]:
    """From the attribute of that name, if it fits."""
    names = [n.decode() if isinstance(n, bytes) else str(n) for n in inputs.attrs.get("channel_names", ())]
    return names if len(names) == channels else [f"channel {k}" for k in range(channels)]


def groups(file: h5py.File, samples: int) -> NDArray[np.int64] | None:
    """The dataset ``simulation``, if there is one: samples of one simulation belong together."""
    found = file.get("simulation")
    if not isinstance(found, h5py.Dataset) or found.shape != (samples,):
        return None
    return np.asarray(found[()], dtype=np.int64)


def _is_coarser(grid: Sequence[int], fine: Sequence[int]) -> bool:
    return all(0 < g <= f and f % g == 0 for g, f in zip(grid, fine))


def one_line(error: BaseException) -> str:
    """The message of an error without its line breaks."""
    return " ".join(str(error).split())
