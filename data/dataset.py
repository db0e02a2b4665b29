"""Samples of any file with datasets for the inputs of a network. Each process reads only its own box.

Arrays of halograd are ``(N, *spatial, C)``. On disk a dataset has this order (``layout="NHWC"``) or ``(N, C,
*spatial)`` (``"NCHW"``), with 1, 2 or 3 spatial axes. A target is one of

- a value per cell, ``(N, *spatial)``, or with a channel axis, in the layout of the inputs; the grid may be coarser
  than that of the inputs by a whole factor per axis;
- a label per sample, ``(N,)``, or a vector ``(N, K)``.

Further inputs may have any of these shapes too.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halograd.documents import one_line

from ..dtensor.box import Box
from .chunks import CACHE, SLOW, Chunks
from .disk import DataError
from .formats import AND, Channels, StoredArray, StoredFile, open_stored
from .sampler import Unit, belonging_to
from .source import checked_index, overlap
from .storage import check_files
from .structure import Field, Kind, Structure, examine, looking_into, shape_of, static_shape
from .targets import LabelMap, TargetRange, check_read, kept_labels

__all__ = ["Hdf5Dataset", "Names", "named"]

#: Elements of a part of a sample; its channels are converted one after the other.
_IN_CACHE = 1 << 18

Name = str | Sequence[str]
"""A dataset, or several ones (or file names with ``{sample}``), whose channels are concatenated."""
Names = Name | Mapping[str, Name] | None


def named(names: Names, alone: str) -> dict[str, str]:
    """Return names of datasets by the name of the network's input. A single dataset is that of the input `alone`.

    >>> named("fields", "x"), named({"mask": "label"}, "target"), named(None, "target")
    ({'x': 'fields'}, {'mask': 'label'}, {})
    >>> named(["{sample}_t1.nii", "{sample}_t2.nii"], "x")
    {'x': '{sample}_t1.nii + {sample}_t2.nii'}
    """
    if names is None:
        return {}
    if not isinstance(names, Mapping):
        names = {alone: names}
    return {name: names_of if isinstance(names_of, str) else AND.join(names_of) for name, names_of in names.items()}


class Hdf5Dataset:
    """Inputs and targets of one file, read by boxes. Local; every rank opens its own file object.

    Parameters
    ----------
    path : path
    inputs, targets : str or mapping
        Names of the datasets, by the name of the network's input; a single one is ``x``, or ``target``.
        ``targets=None``: no targets.
    layout : {"NHWC", "NCHW", "NHW"}, optional
        Order of axes on disk, for any number of spatial axes; ``"NHW"`` has no channels. Default: the attribute
        ``layout`` of the first input, or ``"NHW"`` if its coordinates are time, latitude and longitude.
    ranges : mapping of TargetRange, optional
        Valid ranges of targets, by name. Reading raises an error for values outside, and for fractions in place of
        class indices.
    structure : Structure, optional
        Structure that another rank found in this file (:attr:`structure`). The file is then opened at the first read,
        and `inputs`, `targets` and `layout` are ignored.
    allow_external : bool
        Whether virtual datasets, external links and external files may read data from outside the folder of the file
        (:class:`Storage`).
    unpack : bool
        Whether attributes of packed data are applied (:class:`Packing`): ``scale_factor``, ``add_offset``,
        ``_FillValue``, ``missing_value``, ``valid_range``, ``valid_min``, ``valid_max``, ``_Unsigned``.
    format : str, optional
        Name of the :class:`Format` of the file; by default that of its suffix, HDF5 for unknown ones.

    Attributes
    ----------
    structure : Structure
        Content of the file, as plain data.
    fields : dict of Field
        Fields by name, inputs first: shapes of one sample and names of channels.
    groups : int64 array ``(N,)`` or None
        The dataset ``simulation``, if present: samples of one group belong together.
    lenient : frozenset of str
        Names of fields in which NaN, infinity and targets out of range are permitted; initially empty.
    labels : mapping of LabelMap
        Label maps by name, applied before values are checked; initially empty. A number that is mapped, or ignored by
        the loss, is a label even if the file marks it as a missing value.
    weighted : mapping of names
        Names of the weights of a target, by its name; initially empty. Where all weights are 0, no value is invalid.
    share : int
        Memory for chunks of several samples [B], :meth:`Chunks.cache`; read when a file is opened.
    bytes_read : int
        Size of the numbers read so far, without compression [B].

    Raises
    ------
    DataError
        The file is missing, of another format or truncated; a dataset is missing, has a wrong rank or type, or was
        never written; inputs and targets do not fit each other; a source of a virtual dataset is missing or not
        permitted; class indices are packed; attributes of packed data cannot be applied. Reading raises it for NaN or
        infinity, and for targets out of range.
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
        unpack: bool = True,
        format: str | None = None,
    ) -> None:
        self.path, self._location = Path(path), path  # a FileGroup opens several files, and has the path of the first
        self._format, self._allow_external = format, allow_external
        self.bytes_read = 0
        self.ranges = dict(ranges or {})
        self.lenient: frozenset[str] = frozenset()
        self.labels: Mapping[str, LabelMap] = {}
        self.weighted: Mapping[str, Sequence[str]] = {}
        self.share = CACHE
        self.fields: dict[str, Field] = {}
        self._scratch = np.empty(0, np.uint8)
        self._file: StoredFile | None = None
        self._datasets: dict[str, StoredArray] = {}
        #: The last part that was read of every field that all samples share: box, and its values.
        self._shared: dict[str, tuple[Box, NDArray[Any]]] = {}
        names = named(inputs, "x"), named(targets, "target")
        if not unpack and any(AND in name for members in names for name in members.values()):
            raise DataError(f"{self.path}: data.unpack: expected true with several datasets per input; remove it")
        if structure is None:
            self._file = self.open(checked=False)
            try:
                structure = examine(self._file, *names, layout, unpack)
            except BaseException:
                self.close()
                raise
        self.structure = structure
        self.fields, self.groups = structure.fields, structure.groups
        for name, field in self.fields.items():
            if name in self.ranges and self.ranges[name].whole and field.packing is not None and field.packing.scales:
                raise DataError(
                    f"{self.path}: {field.dataset!r} has the attribute {field.packing.names[0]!r}, expected class "
                    "indices without it; remove it, or set data.unpack = false, which reads numbers as they are stored"
                )

    def __len__(self) -> int:
        return self.structure.samples

    def __enter__(self) -> Hdf5Dataset:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self, checked: bool = True) -> StoredFile:
        """Open the file once more, and return it. `checked`: the sources of its data were checked before."""
        # Joined datasets are not in the structure with their packings: these are read again, and those of virtual
        # datasets may be those of their sources, which only an unchecked file looks up.
        checked &= not any(AND in field.dataset for field in self.fields.values())
        return open_stored(self._location, self._format, self._allow_external, checked)

    def close(self) -> None:
        """Close the file. `close` may be called twice; a later read opens it again."""
        if self._file is not None:
            self._file.close()
        self._file, self._datasets, self._shared = None, {}, {}

    def read(self, name: str, indices: Sequence[int], box: Box, out: NDArray[Any]) -> tuple[slice, ...]:
        """Read this rank's box of a field of a global batch. Local.

        Parameters
        ----------
        name : str
            Key of `fields`.
        indices : sequence of int
            Samples of the whole (global) batch, in order.
        box : Box
            In the batch's coordinates ``(N, *spatial, C)``; for a label per sample, ``(N, 1)``. It may reach outside
            the batch, where `out` is not changed (margins that hold padding).
        out : array of shape ``box.shape``, host
            Filled inside the batch; float32 or float64 (the file's dtype is converted), any strides; C-contiguous is
            fastest.

        Returns
        -------
        tuple of slices : the part of `out` that was filled.

        Raises
        ------
        DataError
            An unknown name, NaN or infinity in the box of a field that is not in `lenient`, a target out of range, or
            a file that can no longer be read.
        """
        if name not in self.fields:
            raise DataError(
                f"{self.path}: expected one of {', '.join(self.fields)}, got {name!r}; name it when you open the file"
            )
        filled = self._read(name, indices, box, out)
        if self._is_finite(name):
            return filled
        check_read(self, name, indices, box & Box.of_shape((len(indices), *self.fields[name].shape)), out[filled])
        return filled

    def _is_finite(self, name: str) -> bool:
        """Return whether all numbers of an input are finite by their type: integers that are not packed."""
        field, opened = self.fields[name], self._datasets.get(name)
        return not field.is_target and field.packing is None and opened is not None and opened.dtype.kind in "iub"

    @property
    def parts(self) -> list[Hdf5Dataset]:
        """The files of the data set: this one."""
        return [self]

    @property
    def has_folders(self) -> bool:
        """Whether samples are read from a folder (Zarr); its time of change does not show that data in it changed."""
        return any(path.is_dir() for path in (self.path, *getattr(self._location, "paths", ())))

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes of the file."""
        return self.structure.attributes

    @property
    def cached(self) -> int:
        """Memory for chunks while the file is open [B]."""
        return sum(self._memory(field.chunks) for field in self.fields.values() if field.chunks is not None)

    def _memory(self, chunks: Chunks) -> int:
        # Fields share the memory of their file.
        several = sum(field.chunks is not None for field in self.fields.values())
        return chunks.cache(self.share // several)

    def keeps(self, name: str) -> bool:
        """Return whether all chunks of a field stay in memory while the file is open."""
        chunks = self.fields[name].chunks
        return chunks is not None and self._memory(chunks) >= chunks.nbytes

    def slow_chunks(self, name: str, box: Box, shuffled: bool) -> str:
        """Return a warning if reading this box of every sample uses a small part of the chunks; else "". Local.

        `shuffled` as in :meth:`Chunks.factor`.
        """
        field = self.fields[name]
        part = box & Box.of_shape((box.stop[0], *field.shape))  # without padding
        if field.chunks is None or not part.size:
            return ""
        where = _selection(field.kind, 0, part.slices()[1:])
        ranges = [(s.start, s.stop) for s in where if isinstance(s, slice)]
        factor = field.chunks.factor(ranges, self._memory(field.chunks), shuffled)
        if factor < SLOW:
            return ""
        better = "x".join(map(str, field.chunks.better(ranges)))
        return (
            f"{self.path}: {field.dataset!r} is stored in chunks {field.chunks.shape}; a run reads (and decompresses) "
            f"{factor:.0f} x the numbers that it uses: "
            + field.chunks.remedy.format(dataset=field.dataset, path=self.path, better=better)
        )

    def place(self, index: int) -> str:
        """Return the file and number of a sample, for messages."""
        return f"{self.path}, sample {index}"

    def belonging(self, kind: Unit, name: str) -> NDArray[np.bool_]:
        """Return which samples belong to a file, a simulation or a year of this name, ``(N,)`` (:func:`held_out`)."""
        # The name of a sample of several files, else that of the file; p1.nii.gz has the stem p1.nii.
        own = getattr(self._location, "sample", self.path.stem.removesuffix(".nii"))
        return belonging_to(kind, name, [str(self.path), self.path.name, self.path.stem, own], self.structure)

    def source(self, index: int) -> tuple[str, int]:
        """Return the path of a sample's file, and the sample's number in it."""
        return str(self.path), checked_index(self, index)

    def _dataset(self, name: str) -> StoredArray:
        """Return the dataset of a field; open all datasets at the first call."""
        if not self._datasets:
            try:
                # Another rank has checked the file, or it was closed: other files that it names may have changed since.
                if self._file is None:
                    self._file = self.open()
                    check_files(self.path, self.structure.files)
                with looking_into(self.path):
                    self._datasets = {key: self._open(self._file, field) for key, field in self.fields.items()}
            except BaseException:
                self.close()
                raise
        return self._datasets[name]

    def _open(self, file: StoredFile, field: Field) -> StoredArray:
        """Open the dataset of a field, with its cache of chunks. Raises DataError if its shape has changed."""
        array = file.find(field.dataset)
        if field.static:
            same = array.ndim == len(field.static)
            shape = static_shape(array, field.static, len(field.shape) - 1) if same else tuple(array.shape)
            expected, order = field.shape, "channels last"
        else:
            shape = (len(array), *shape_of(array, field.kind)) if array.ndim else ()
            expected, order = (self.structure.samples, *field.shape), "samples first and channels last"
        if shape != expected:
            raise DataError(
                f"{self.path}: expected {field.dataset!r} to be {expected}, {order}, as when the "
                f"run began, got {shape}; it was replaced, or this node sees another file"
            )
        if field.chunks is None:
            return array
        return array.cached(self._memory(field.chunks), field.chunks)

    def _read(self, name: str, indices: Sequence[int], box: Box, out: NDArray[Any]) -> tuple[slice, ...]:
        field = self.fields[name]
        whole = Box.of_shape((len(indices), *field.shape))
        if box.ndim != whole.ndim or out.shape != box.shape:
            raise DataError(
                f"{self.path}: expected a box of {whole.ndim} axes within {whole.shape} and an array of its shape, "
                f"got {box} and {out.shape}"
            )
        part, filled = overlap(box, whole.shape)
        if part.size == 0:
            return filled
        source, kept = self._dataset(name), kept_labels(name, self.ranges, self.labels)
        if isinstance(source, Channels):
            source.kept = kept  # it unpacks each of its arrays by itself
        if field.static:
            out[filled] = self._read_shared(name, source, Box.of_ranges(part.ranges[1:]), out.dtype, kept)
            return filled
        for k in range(*part.ranges[0]):
            where = _selection(field.kind, checked_index(self, indices[k]), part.slices()[1:])
            at: Any = (k - box.start[0], *filled[1:])
            self._read_sample(source, field, where, out[at], kept)
        return filled

    def _read_shared(
        self, name: str, source: StoredArray, box: Box, dtype: np.dtype[Any], kept: Sequence[float]
    ) -> NDArray[Any]:
        """Return a box ``(*spatial, C)`` of a field that all samples share. It stays in memory for the next samples."""
        known = self._shared.get(name)
        if known is None or known[0] != box or known[1].dtype != dtype:
            # Letters of the box's axes, to find the range of each axis of the file.
            axes, order = self.fields[name].static, "N" + "DHW"[1 - box.ndim :] + "C"
            ranges = [(0, 1), *box.ranges]
            where = tuple(slice(*ranges[order.index(axis)]) for axis in axes)
            stored = np.empty([part.stop - part.start for part in where], source.dtype)
            self._read_stored(source, where, stored)
            # From the order of the file to that of halograd; `reshape` adds the axes that the file lacks.
            last = stored.transpose(sorted(range(len(axes)), key=lambda k: order.index(axes[k])))
            self._shared[name] = box, np.empty(box.shape, dtype)
            self._convert(self.fields[name], last.reshape(box.shape), self._shared[name][1], kept)
        return self._shared[name][1]

    def _read_sample(
        self,
        source: StoredArray,
        field: Field,
        where: tuple[int | slice, ...],
        out: NDArray[Any],
        kept: Sequence[float],
    ) -> None:
        """Read the part `where` of the stored array, which lies in one sample, to `out` ``(*spatial, C)``."""
        dtype, extent = source.dtype, tuple(s.stop - s.start for s in where if isinstance(s, slice))
        # Without a conversion the file is read straight into `out`.
        direct = field.kind in ("channels last", "vector") and field.packing is None
        direct &= dtype == out.dtype and bool(out.flags.c_contiguous)
        # Read in the type of the file, because HDF5 converts numbers 2 to 180 times slower than NumPy.
        stored = out if direct else self._scratch_array(dtype, extent)
        self._read_stored(source, where, stored)
        for part, target in _parts(stored, out, field.kind) if not direct else ():
            self._convert(field, part, target, kept)

    def _read_stored(self, source: StoredArray, where: tuple[int | slice, ...], stored: NDArray[Any]) -> None:
        """Read the part `where` of a dataset to `stored`, in the dtype of the dataset."""
        self.bytes_read += stored.nbytes
        try:
            source.read(where, stored)
        except Exception as error:  # each library has errors of its own
            sample = f"sample {where[0]} of " if isinstance(where[0], int) else ""
            raise DataError(
                f"{self.path}: cannot read {sample}{source.name!r} ({one_line(error)}); the "
                "file is damaged or was changed while it was open: write it again"
            ) from error

    @staticmethod
    def _convert(field: Field, stored: NDArray[Any], out: NDArray[Any], kept: Sequence[float]) -> None:
        """Write the values of stored numbers to `out`, of the same shape."""
        if field.packing is not None:
            field.packing.unpack(stored, out, kept)
            return
        with np.errstate(all="ignore"):  # a number that overflows becomes infinite, which the check finds
            np.copyto(out, stored, casting="unsafe")

    def _scratch_array(self, dtype: np.dtype[Any], extent: tuple[int, ...]) -> NDArray[Any]:
        """Return an array of shape `extent` in reused memory, so that reading does not allocate at every step."""
        nbytes = math.prod(extent) * dtype.itemsize
        if self._scratch.size < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
        return self._scratch[:nbytes].view(dtype).reshape(extent)


def _selection(kind: Kind, index: int, where: tuple[slice, ...]) -> tuple[int | slice, ...]:
    """Return the index and slices, in the stored array, of the part `where` ``(*spatial, C)`` of sample `index`."""
    *spatial, channels = where
    if kind == "channels first":
        return (index, channels, *spatial)
    if kind == "no channels":
        return (index, *spatial)
    return (index, *where)


def _parts(stored: NDArray[Any], out: NDArray[Any], kind: Kind) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Yield parts of a stored sample, each with its part of `out` ``(*spatial, C)``."""
    if kind == "no channels":
        yield stored, out[..., 0]
    elif kind != "channels first":
        yield stored, out
    else:
        # Channel by channel, because NumPy converts short rows slowly; in blocks of rows whose channels fit the cache
        # together.
        rows = max(1, _IN_CACHE * len(out) // out.size)
        for first in range(0, len(out), rows):
            for channel, values in enumerate(stored):
                yield values[first : first + rows], out[first : first + rows, ..., channel]
