"""Any HDF5 file with datasets for the inputs of a network, of which each process reads only its own box.

Arrays of halograd are ``(N, *spatial, C)``; on disk a dataset may be that (``layout="NHWC"``) or
``(N, C, *spatial)`` (``"NCHW"``), with 1, 2 or 3 spatial axes. Targets are one of

- a value per cell, ``(N, *spatial)``, or with a channel axis, in the layout of the inputs; the grid may be coarser
  than that of the inputs by a whole factor per axis;
- a label per sample, ``(N,)``, or a vector ``(N, K)``.

Further inputs may be any of these too.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from ..dtensor.box import Box
from .disk import DataError, one_line, open_file
from .storage import check_files, dataset_of
from .structure import HDF5_FAULTS, Field, Kind, Structure, examine, find, looking_into, shape_of
from .targets import LabelMap, TargetRange, check_values

__all__ = ["Hdf5Dataset", "named"]

Names = str | Mapping[str, str] | None


def named(given: Names, alone: str) -> dict[str, str]:
    """Return datasets by the name of the network's input; a single dataset gets the name `alone`.

    >>> named("fields", "x"), named({"mask": "label"}, "target"), named(None, "target")
    ({'x': 'fields'}, {'mask': 'label'}, {})
    """
    if given is None:
        return {}
    return {alone: given} if isinstance(given, str) else dict(given)


class Hdf5Dataset:
    """Inputs and targets of one HDF5 file, read by boxes. Local; every rank opens its own file object.

    Parameters
    ----------
    path : path
    inputs, targets : str or mapping
        Names of the datasets, by the name of the network's input; a single one is ``x``, or ``target``.
        ``targets=None`` for a file without.
    layout : {"NHWC", "NCHW"}, optional
        Order of axes on disk, for any number of spatial axes. Default: the attribute ``layout`` of the first input.
    ranges : mapping of TargetRange, optional
        Ranges by name. Targets outside, and fractions in place of class indices, are refused when they are read.
    structure : Structure, optional
        Structure that another rank found in this file (:attr:`structure`). The file is then opened at the first read,
        and `inputs`, `targets` and `layout` do not count.
    allow_external : bool
        Whether virtual datasets, external links and external files may take numbers from outside the folder of the
        file (:class:`Storage`).

    Attributes
    ----------
    structure : Structure
        Content of the file, as plain data.
    fields : dict of Field
        By name, the inputs first: shapes of one sample and names of channels.
    groups : int64 array ``(N,)`` or None
        The dataset ``simulation``, where there is one: samples that belong together.
    lenient : frozenset of str
        Names of fields whose NaN, infinity and targets out of range are passed on; none at first.
    labels : mapping of LabelMap
        Label maps by name, applied before values are checked; none at first.
    bytes_read : int
        Bytes requested of the file so far, as stored.

    Raises
    ------
    DataError
        File missing, not HDF5 or truncated; dataset missing, of wrong rank or type, or never written; inputs and
        targets that do not fit each other; a source of a virtual dataset that is missing or may not be used. Reading
        raises it for NaN or infinity, and for targets out of range.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        inputs: Names = "inputs",
        targets: Names = "mask",
        layout: str | None = None,
        ranges: Mapping[str, TargetRange] | None = None,
        structure: Structure | None = None,
        allow_external: bool = False,
    ) -> None:
        self.path = Path(path)
        self.bytes_read = 0
        self.ranges = dict(ranges or {})
        self.lenient: frozenset[str] = frozenset()
        self.labels: Mapping[str, LabelMap] = {}
        self._scratch: dict[np.dtype[Any], NDArray[Any]] = {}
        self._file: h5py.File | None = None
        self._datasets: dict[str, h5py.Dataset] = {}
        if structure is None:
            structure = self._examine(named(inputs, "x"), named(targets, "target"), layout, allow_external)
        self.structure = structure
        self.fields, self.groups = structure.fields, structure.groups

    def __len__(self) -> int:
        return self.structure.samples

    def __enter__(self) -> Hdf5Dataset:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; twice does no harm, and what is read afterwards opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def read(self, name: str, indices: Sequence[int], box: Box, out: NDArray[Any]) -> tuple[slice, ...]:
        """Read this rank's box of an input of a global batch. Local.

        Parameters
        ----------
        name : str
            Key of `fields`.
        indices : sequence of int
            Samples of the whole (global) batch, in order.
        box : Box
            In the batch's coordinates ``(N, *spatial, C)``, of a label per sample ``(N, 1)``. May reach outside the
            array: what lies there is left as it is in `out` (margins that hold padding).
        out : array of shape ``box.shape``, host
            Filled within; float32 or float64 (others are converted), any strides; C-contiguous is fastest.

        Returns
        -------
        tuple of slices : the part of `out` that was filled.

        Raises
        ------
        DataError
            NaN or infinity in what was read, a target out of range; a file that cannot be read any more.
        """
        if name not in self.fields:
            raise DataError(
                f"{self.path}: expected one of {', '.join(self.fields)}, got {name!r}; open it with that too"
            )
        field = self.fields[name]
        filled = self._read(self._dataset(name), field.kind, indices, box, out)
        if name in self.labels:
            self.labels[name].apply(out[filled])
        if name in self.lenient:
            return filled
        limits = self.ranges.get(name, TargetRange()) if field.is_target else None
        origin = [low + s.start for low, s in zip(box.start, filled)]
        check_values(self.path, field, limits, out[filled], indices, origin)
        return filled

    @property
    def attributes(self) -> dict[str, Any]:
        """What the file says of itself."""
        return self.structure.attributes

    def place(self, index: int) -> str:
        """Return the place of a sample, for messages."""
        return f"{self.path}, sample {index}"

    def source(self, index: int) -> tuple[str, int]:
        """Return the path of the file of a sample, and the number of the sample in it."""
        return str(self.path), self._index(index)

    def _examine(
        self, inputs: Mapping[str, str], targets: Mapping[str, str], layout: str | None, allow_external: bool
    ) -> Structure:
        file = open_file(self.path)
        try:
            found = examine(file, self.path, inputs, targets, layout, allow_external)
            self._datasets = {name: dataset_of(file, field.dataset) for name, field in found.fields.items()}
        except BaseException:
            file.close()
            raise
        self._file = file
        return found

    def _dataset(self, name: str) -> h5py.Dataset:
        """Return one of the datasets; open it now if another rank has examined the file."""
        if self._file is None:
            file = open_file(self.path)
            try:
                check_files(self.path, self.structure.files)
                with looking_into(self.path):
                    self._datasets = {key: self._find_again(file, field) for key, field in self.fields.items()}
            except BaseException:
                file.close()
                raise
            self._file = file
        return self._datasets[name]

    def _find_again(self, file: h5py.File, field: Field) -> h5py.Dataset:
        """Find a dataset without reading its attributes."""
        found = find(file, self.path, field.dataset)
        shape = (len(found), *shape_of(found, field.kind)) if found.ndim else ()
        wanted = (self.structure.samples, *field.shape)
        if shape != wanted:
            raise DataError(
                f"{self.path}: expected {field.dataset!r} to be {wanted}, samples first and channels last, as when the "
                f"run began, got {shape}; it was written anew, or this node sees another file"
            )
        return found

    def _read(
        self, source: h5py.Dataset, kind: Kind, indices: Sequence[int], box: Box, out: NDArray[Any]
    ) -> tuple[slice, ...]:
        whole = Box.of_shape((len(indices), *shape_of(source, kind)))
        if box.ndim != whole.ndim or out.shape != box.shape:
            raise DataError(
                f"{self.path}: expected a box of {whole.ndim} axes within {whole.shape} and an array of its shape, "
                f"got {box} and {out.shape}"
            )
        part = box & whole
        filled = part.slices(origin=box.start)
        if part.size == 0:
            return tuple(slice(0, 0) for _ in filled)
        for k in range(*part.ranges[0]):
            where = _selection(kind, self._index(indices[k]), part.slices()[1:])
            self._read_sample(source, kind, where, out, (k - box.start[0], *filled[1:]))
        return filled

    def _read_sample(
        self,
        source: h5py.Dataset,
        kind: Kind,
        where: tuple[int | slice, ...],
        out: NDArray[Any],
        destination: tuple[int | slice, ...],
    ) -> None:
        extent = tuple(s.stop - s.start for s in where if isinstance(s, slice))
        self.bytes_read += math.prod(extent) * source.dtype.itemsize
        try:
            if kind in ("channels last", "vector") and _is_direct(source, out):
                source.read_direct(out, where, destination)
                return
            scratch = self._scratch_array(source, out, extent)
            source.read_direct(scratch, where)
        except HDF5_FAULTS as error:
            raise DataError(
                f"{self.path}: cannot read sample {where[0]} of {source.name!r} ({one_line(error)}); the "
                "file is damaged or was changed while it was open: write it again"
            ) from error
        if kind == "channels first":
            scratch = np.moveaxis(scratch, 0, -1)
        elif kind == "no channels":
            scratch = scratch[..., None]
        out[destination] = scratch

    def _scratch_array(self, source: h5py.Dataset, out: NDArray[Any], extent: tuple[int, ...]) -> NDArray[Any]:
        """Return a reused array of this shape: reading must not allocate in every step."""
        # HDF5 converts between numbers, but knows neither NumPy's bool nor bfloat16.
        boolean = source.dtype.kind == "b"
        dtype = source.dtype if boolean else out.dtype if out.dtype.kind == "f" else np.dtype(np.float32)
        n = math.prod(extent)
        if dtype not in self._scratch or self._scratch[dtype].size < n:
            self._scratch[dtype] = np.empty(n, dtype)
        return self._scratch[dtype][:n].reshape(extent)

    def _index(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise DataError(f"{self.path}: expected a sample of 0 .. {len(self) - 1}, got {index}")
        return int(index)


def _selection(kind: Kind, index: int, where: tuple[slice, ...]) -> tuple[int | slice, ...]:
    """Return the slices on disk of the part `where` ``(*spatial, C)`` of one sample."""
    *spatial, channels = where
    if kind == "channels first":
        return (index, channels, *spatial)
    if kind == "no channels":
        return (index, *spatial)
    return (index, *where)


def _is_direct(source: h5py.Dataset, out: NDArray[Any]) -> bool:
    """Return whether HDF5 can write straight into `out`."""
    return bool(out.flags.c_contiguous) and out.dtype.kind == "f" and source.dtype.kind != "b"
