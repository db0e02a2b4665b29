"""HDF5 files, netCDF-4 included, as files with named arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import h5py
import numpy as np
from h5py import h5s
from numpy.typing import NDArray

from .chunks import Chunks, chunks_of, open_cached
from .disk import DataError, open_file
from .formats import LISTED, Format, StoredArray, StoredFile, Where
from .packing import Packing
from .storage import Storage
from .structure import HDF5_FAULTS, is_text

__all__ = ["Hdf5Array", "Hdf5File", "Hdf5Format", "scales_of"]


class Hdf5Format(Format):
    """HDF5 and netCDF-4, by h5py."""

    name: ClassVar[str] = "hdf5"
    suffixes: ClassVar[tuple[str, ...]] = (".h5", ".hdf5", ".hdf", ".he5", ".nc", ".nc4")

    def open(self, path: Path, allow_external: bool = False, checked: bool = False) -> StoredFile:
        """Open a file, with a check of the sources of its data (:class:`Storage`) unless they are `checked`."""
        return Hdf5File(path, None if checked else Storage(path, allow_external))


class Hdf5File(StoredFile):
    """Open HDF5 file. `storage` checks the sources of its data; None if they were checked before."""

    def __init__(self, path: Path, storage: Storage | None) -> None:
        self.path, self._storage = path, storage
        self.file = open_file(path)
        self.attrs: Mapping[str, Any] = _Attributes(self.file.attrs)

    @property
    def files(self) -> dict[str, int]:  # type: ignore[override]
        """Other files that hold data of the checked datasets, with their sizes [B]; empty without `storage`."""
        return {} if self._storage is None else self._storage.files

    def get(self, name: str) -> StoredArray | None:
        """Return the dataset of this name, or None; with `storage`, check its type and the sources of its data."""
        storage = self._storage
        # Checked before it is opened: HDF5 may crash or wait for ever on what the check refuses.
        there = self.file.get(name) if storage is None else self.file[name] if storage.check(self.file, name) else None
        return Hdf5Array(self, there, name) if isinstance(there, h5py.Dataset) else None

    def find(self, name: str) -> StoredArray:
        """Return the array as :meth:`StoredFile.find` does. Raises DataError also for a null dataspace."""
        array = super().find(name)
        if isinstance(array, Hdf5Array) and array.stored.shape is None:
            raise DataError(f"{self.path}: dataset {name!r}: expected an array, got a null dataspace; write it again")
        return array

    def dataset(self, name: str) -> h5py.Dataset:
        """Return the h5py dataset of this name; errors are those of :meth:`find`."""
        array = self.find(name)
        assert isinstance(array, Hdf5Array)
        return array.stored

    def packing(self, dataset: h5py.Dataset) -> Packing | None:
        """Return the packing of a checked dataset; it may be that of the sources of its data."""
        assert self._storage is not None, "the sources are not known"
        return self._storage.packing(dataset)

    def names(self) -> Iterator[str]:
        """Yield the names of all datasets."""
        yield from self._shapes()

    def _listed(self) -> str:
        """Return names and shapes of the first datasets as a string, without a check of their data."""
        # One more than are listed, to see whether there are more.
        listed = [f"{name} {shape}" for name, shape in self._shapes(LISTED + 1).items()]
        return ", ".join(listed[:LISTED] + ["..."] * (len(listed) > LISTED)) or "none"

    def _shapes(self, most: int | None = None) -> dict[str, tuple[int, ...] | None]:
        shapes: dict[str, tuple[int, ...] | None] = {}

        def note(name: str, item: Any) -> bool | None:
            if isinstance(item, h5py.Dataset):
                shapes[name] = item.shape
            return True if most is not None and len(shapes) >= most else None  # True ends `visititems`

        # It visits every object once, and follows neither soft nor external links.
        self.file.visititems(note)
        return shapes

    def variable(self, dataset: str, path: str) -> NDArray[Any]:
        """Return the values of the dataset at `path` in the file of `dataset`, a name that may link to another file."""
        return np.asarray(self.file[dataset].file[path][()])

    def close(self) -> None:
        """Close the file."""
        self.file.close()


class _Attributes(Mapping[str, Any]):
    """Attributes of a file or dataset, with a str for each string: h5py returns bytes for those of a fixed length."""

    def __init__(self, stored: h5py.AttributeManager) -> None:
        self._stored = stored

    def __getitem__(self, name: str) -> Any:
        value = self._stored[name]
        # Arrays of strings: of fixed length (S), or of variable length, which are objects (O).
        if isinstance(value, np.ndarray) and value.dtype.kind in "SO":
            decoded = np.empty(value.shape, object)
            for i, item in np.ndenumerate(value):
                decoded[i] = _decoded(item)
            return decoded
        return _decoded(value)

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def _decoded(value: Any) -> Any:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


class Hdf5Array(StoredArray):
    """Dataset of an HDF5 file."""

    def __init__(self, file: Hdf5File, stored: h5py.Dataset, path: str) -> None:
        self._of, self.stored, self._path = file, stored, path  # the path may lead through links to other files
        # A null dataspace has the shape None; `Hdf5File.find` refuses it.
        self.name, self.shape = stored.name, tuple(stored.shape or ())
        self.attrs: Mapping[str, Any] = _Attributes(stored.attrs)

    @cached_property
    def dtype(self) -> np.dtype[Any]:  # type: ignore[override]
        """Type of the stored numbers. Raises TypeError for types that NumPy does not have."""
        return self.stored.dtype

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hdf5Array) and self.stored == other.stored

    __hash__ = None  # type: ignore[assignment]

    @property
    def scales(self) -> list[list[StoredArray]]:
        """Dimension scales of each axis."""
        return [[Hdf5Array(self._of, scale, scale.name) for scale in row] for row in scales_of(self.stored)]

    def packing(self, where: str) -> Packing | None:
        """Return the packing of a checked dataset."""
        return self._of.packing(self.stored)

    def chunks(self, rows: int) -> Chunks | None:
        """Return the chunks of the dataset as :func:`chunks_of` does."""
        return chunks_of(self.stored, rows)

    def cached(self, nbytes: int, chunks: Chunks) -> StoredArray:
        """Close the dataset, and return it with a cache of `nbytes` [B]: an open dataset would keep its old cache."""
        self.stored.id.close()
        return Hdf5Array(self._of, open_cached(self._of.file, self._path, nbytes, chunks), self._path)

    def read(self, where: Where, out: NDArray[Any]) -> None:
        """Read a part to `out`, in the dtype in which it is stored."""
        if not out.size or not where:  # an empty part or a scalar, which have no hyperslab
            self.stored.read_direct(out, where)
            return
        space = self.stored.id.get_space()
        starts = tuple(index if isinstance(index, int) else index.start for index in where)
        space.select_hyperslab(starts, tuple(1 if isinstance(at, int) else at.stop - at.start for at in where))
        self.stored.id.read(h5s.create_simple(out.shape), space, out)  # read_direct() takes twice as long to begin


def scales_of(dataset: h5py.Dataset) -> list[list[h5py.Dataset]]:
    """Return the dimension scales of each axis, without deleted scales.

    They are read from the attribute, because HDF5's own function frees memory twice for damaged files.
    """
    references = dataset.attrs.get("DIMENSION_LIST")
    if not isinstance(references, np.ndarray) or references.shape != (dataset.ndim,) or references.dtype.kind != "O":
        return [[] for _ in dataset.shape]
    targets = [[_target(dataset.file, reference) for reference in row] for row in references]
    return [[target for target in row if isinstance(target, h5py.Dataset) and is_text(target.name)] for row in targets]


def _target(file: h5py.File, reference: Any) -> h5py.HLObject | None:
    try:
        # A null reference is false; that of a deleted scale raises an error.
        return file[reference] if isinstance(reference, h5py.Reference) and reference else None
    except HDF5_FAULTS:
        return None
