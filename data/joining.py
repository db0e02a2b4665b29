"""Files of predictions in one piece: the numbers of virtual datasets, in the parts of the ranks, are copied."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import h5py

from .disk import DataError, atomic_path, open_to_read

__all__ = ["copy_whole", "join"]

#: Bytes that are copied at once.
SLAB = 1 << 25
#: Attributes that HDF5 keeps for dimension scales.
_SCALES = ("DIMENSION_LIST", "DIMENSION_LABELS", "REFERENCE_LIST")


def join(out: Path) -> bool:
    """Make a file of predictions hold all its numbers, and remove the parts. Local. Return whether it had parts.

    Raises
    ------
    DataError
        If it is no such file, or parts of it are missing.
    """
    with open_to_read(out) as file:
        if "needs" not in file.attrs:
            return False
    with atomic_path(out) as partial:
        copy_whole(out, partial)
    parts = out.with_name(f"{out.name}.parts")
    if not parts.is_symlink():
        shutil.rmtree(parts, ignore_errors=True)
    return True


def copy_whole(source: Path, path: Path) -> None:
    """Copy a file of predictions to `path`, with the numbers of its virtual datasets. Local.

    Holds :data:`SLAB` bytes at once, or a row of a sample.

    Raises
    ------
    DataError
        If a part is missing, which HDF5 does not report.
    """
    shutil.copyfile(source, path)
    with h5py.File(source, "r", locking=False) as old, h5py.File(path, "r+", locking=False) as new:
        for name in filter(None, old.attrs.get("needs", "").split("\n")):
            if not (source.parent / name).exists():
                raise DataError(f"cannot read {source.parent / name}, a part of {source}: no such file; apply again")
        for name in [name for name, one in new.items() if isinstance(one, h5py.Dataset) and one.is_virtual]:
            before, made = new[name], new.create_dataset(f"{name} joined", old[name].shape, old[name].dtype)
            for key in before.attrs.keys() - set(_SCALES):
                made.attrs[key] = before.attrs[key]
            for slab in _slabs(made):
                made[slab] = old[name][slab]
            for own, axis in zip(made.dims, before.dims):
                own.label = axis.label
                for scale in axis.values():
                    axis.detach_scale(scale)
                    own.attach_scale(scale)
            del new[name]
            new.move(made.name, name)
        new.attrs.pop("needs", None)


def _slabs(dataset: h5py.Dataset) -> Iterator[tuple[slice, ...]]:
    """Yield parts of the first two axes that have at most `SLAB` bytes, if a row has not more."""
    count, *shape = dataset.shape
    row = max(1, math.prod(shape[1:]) * dataset.dtype.itemsize)
    rows = max(1, SLAB // row)
    high = shape[0] if shape else 1
    for sample in range(count):
        for first in range(0, high, rows):
            yield (slice(sample, sample + 1), slice(first, first + rows)) if shape else (slice(sample, sample + 1),)
