"""Copies of HDF5 files with other chunks, for data sets whose chunks are slow to read by blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import h5py
import numpy as np

from .disk import DataError, atomic_path, open_file
from .storage import Storage
from .structure import looking_into

__all__ = ["SLAB", "repack", "slabs"]

SLAB = 1 << 25
"""Size of the parts that are copied one after the other [B]; a single row of chunks may have more."""
_CACHE = 1 << 28  # for chunks that are read: each is inflated once
#: Attributes with references, which HDF5 writes again when scales are attached.
_REFERENCES = ("DIMENSION_LIST", "REFERENCE_LIST")


def repack(source: Path, path: Path, chunks: Mapping[str, Sequence[int]]) -> None:
    """Copy a file to the new file `path`, with other chunks of some datasets, and all else as it is. Local.

    Filters (compression), types, attributes, dimension scales, links and their order are kept. A dataset in `chunks`
    that is virtual, or whose data are in external files, becomes one with all of its data in the new file.

    Parameters
    ----------
    chunks
        Shape of the chunks, by the name of the dataset.

    Raises
    ------
    DataError
        `path` exists, a dataset is missing, a chunk does not fit it, or a file cannot be read or written.
    """
    if path.exists():
        raise DataError(f"cannot write {path}: it exists; give another name")
    open_file(source).close()  # its errors name the reason
    with looking_into(source), h5py.File(source, "r", locking=False, rdcc_nbytes=_CACHE) as old:
        chunks_by_place = {}
        for name, shape in chunks.items():
            dataset = old.get(name)
            if not isinstance(dataset, h5py.Dataset):
                raise DataError(f"{source}: expected a dataset {name!r}, got none; it has {', '.join(old)}")
            if dataset.file != old:
                raise DataError(
                    f"{source}: expected a dataset {name!r} of this file, got a link into {dataset.file.filename}; "
                    "repack that one"
                )
            if len(shape) != dataset.ndim or any(not 0 < c <= n for c, n in zip(shape, dataset.shape)):
                raise DataError(
                    f"{source}: {name!r}: expected a chunk within {'x'.join(map(str, dataset.shape))}, got "
                    f"{'x'.join(map(str, shape))}"
                )
            if dataset.is_virtual or dataset.external:  # HDF5 would read zeros for sources that are missing
                Storage(source, allow_external=True, texts=True).check(old, name)
            chunks_by_place[_place(dataset)] = tuple(shape)
        ordered = _is_ordered(old["/"])
        with atomic_path(path) as partial, h5py.File(partial, "w", locking=False, track_order=ordered) as new:
            _copy(old, new, chunks_by_place, {_place(old["/"]): "/"})
            _attach(old, new)


def _place(member: h5py.HLObject) -> int:
    """Return the address of an object, which may have several names."""
    return int(h5py.h5o.get_info(member.id).addr)


def _is_ordered(group: h5py.Group) -> bool:
    """Return whether a group keeps the order in which its members were created, as netCDF requires."""
    return bool(group.id.get_create_plist().get_link_creation_order() & h5py.h5p.CRT_ORDER_TRACKED)


def _copy(old: h5py.Group, new: h5py.Group, chunks: Mapping[int, tuple[int, ...]], copied: dict[int, str]) -> None:
    """Copy the members of a group to `new`. `chunks` has the new chunks of some datasets, by address; `copied` has the
    new names of the objects copied so far, by their old address.
    """
    for key, value in old.attrs.items():
        new.attrs[key] = value
    for name in old:
        link = old.get(name, getlink=True)
        if not isinstance(link, h5py.HardLink):
            new[name] = link
            continue
        member, place = old[name], _place(old[name])
        if place in copied:  # a further name, which may be that of a group around it
            new[name] = new.file[copied[place]]
            continue
        copied[place] = f"{new.name.rstrip('/')}/{name}"
        if isinstance(member, h5py.Group):
            _copy(member, new.create_group(name, track_order=_is_ordered(member)), chunks, copied)
        elif place in chunks:
            _rechunk(member, new, name, chunks[place])
        else:
            # HDF5 copies stored chunks as they are, without inflating them.
            old.copy(name, new)


def _rechunk(old: h5py.Dataset, group: h5py.Group, name: str, chunk: tuple[int, ...]) -> None:
    elsewhere = old.is_virtual or old.external
    # The properties of data elsewhere name their sources, and would make the new dataset virtual or external, too.
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE) if elsewhere else old.id.get_create_plist().copy()
    plist.set_chunk(chunk)
    # The low-level call takes type, filters and all other properties as the file has them.
    new = h5py.Dataset(h5py.h5d.create(group.id, name.encode(), old.id.get_type(), old.id.get_space(), dcpl=plist))
    for key in old.attrs.keys() - set(_REFERENCES):
        new.attrs[key] = old.attrs[key]
    # Whole chunks of both files, so that few of them are inflated or compressed twice.
    samples = max(chunk[0], old.chunks[0] if old.chunks else 1)
    for slab in slabs(old.shape, samples, chunk[1] if len(chunk) > 1 else 1, old.dtype.itemsize):
        new[slab] = old[slab]


def slabs(shape: Sequence[int], samples: int, rows: int, itemsize: int) -> Iterator[tuple[slice, ...]]:
    """Yield slabs of an array of this shape, of `samples` samples (axis 0) and a multiple of `rows` rows (axis 1) each,
    with about :data:`SLAB` bytes. Local.
    """
    height = shape[1] if len(shape) > 1 else 1
    most = max(1, SLAB // max(1, samples * math.prod(shape[2:]) * itemsize) // rows) * rows
    for first in range(0, shape[0], samples):
        for row in range(0, height, most):
            yield (slice(first, first + samples), slice(row, row + most))[: len(shape)]


def _attach(old: h5py.File, new: h5py.File) -> None:
    """Attach the dimension scales of all datasets again, because references do not outlive a copy."""
    names = list[str]()
    old.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
    there = [name for name in names if isinstance(new.get(name), h5py.Dataset)]
    # All old references first: attaching a scale writes references to both datasets.
    for name in there:
        for key in _REFERENCES:
            if key in new[name].attrs:
                del new[name].attrs[key]
    for name in there:
        for before, after in zip(old[name].dims, new[name].dims):
            for scale in before.values():
                if np.ndim(scale) and scale.name in new:
                    after.attach_scale(new[scale.name])
