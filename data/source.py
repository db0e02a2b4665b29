"""The protocol :class:`Dataset`, which loader, statistics and training use, and samples in arrays.

Any object that reads a box of a batch is a data set: one HDF5 file (:class:`Hdf5Dataset`), several (:class:`FileSet`),
arrays of NumPy, memory maps, Zarr or h5py (:class:`ArrayDataset`), or a class of your own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..dtensor.box import Box
from .disk import DataError
from .packing import packing_of
from .structure import Field
from .targets import LabelMap, TargetRange, check_read, kept_labels

__all__ = [
    "ArrayDataset",
    "Dataset",
    "DatasetView",
    "OneSize",
    "checked_index",
    "overlap",
    "sample_shape",
]


class Dataset(Protocol):
    """Samples with inputs and targets, read by boxes. Local; every rank has its own object for the same samples.

    Attributes
    ----------
    path : Path
        Path for messages.
    fields : dict of Field
        By the name of the network's input: shape ``(*spatial, C)`` of one sample, names of channels, and whether it is
        a target. A number per sample has the shape ``(1,)``.
    groups : int64 array ``(N,)`` or None
        Group number of every sample; samples of one group are held out together. None: no groups.
    lenient : frozenset of str
        Names of fields in which NaN, infinity and targets out of range are permitted; in others they raise `DataError`.

    Notes
    -----
    A data set of samples of different size has another attribute, ``extents``: by the name of each field an int64 array
    ``(N, spatial axes)`` of the extents of every sample. The shapes of `fields` then have the largest extent of each
    axis, and :meth:`read` changes only elements of `out` that lie within their sample. None: all have one size.
    """

    path: Path
    fields: dict[str, Field]
    groups: NDArray[np.int64] | None
    lenient: frozenset[str]

    @property
    def bytes_read(self) -> int:
        """Bytes read so far [B]."""
        ...

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def read(self, name: str, indices: Sequence[int], box: Box, out: NDArray[Any]) -> tuple[slice, ...]:
        """Read a box of one of the fields of a global batch, ``(len(indices), *fields[name].shape)``. Local.

        `box` may reach outside the batch's array, where `out`, of shape ``box.shape``, is not changed. Returns the part
        of `out` that was filled.
        """
        ...

    def place(self, index: int) -> str:
        """Return the source and number of a sample, for messages."""
        ...

    def close(self) -> None:
        """Close open files; a later read opens them again."""


def overlap(box: Box, shape: Sequence[int]) -> tuple[Box, tuple[slice, ...]]:
    """Return the part of a box within an array of this shape, and its slices in an array of the box. Local.

    An array of the box has the shape of the box. The slices of an empty part are empty.
    """
    part = box & Box.of_shape(shape)
    return part, part.slices(origin=box.start) if part.size else (slice(0, 0),) * box.ndim


def checked_index(dataset: Any, index: int) -> int:
    """Return the number of a sample as an int. Raises DataError if the data set has no such sample. Local."""
    if not 0 <= index < len(dataset):
        raise DataError(f"{dataset.path}: expected a sample of 0 .. {len(dataset) - 1}, got {index}")
    return int(index)


def sample_shape(dataset: Any, name: str, index: int) -> tuple[int, ...]:
    """Return the shape ``(*spatial, C)`` of a field in one sample. Local."""
    shape: tuple[int, ...] = dataset.fields[name].shape
    extents = getattr(dataset, "extents", None)
    return shape if extents is None else (*extents[name][index].tolist(), shape[-1])


class DatasetView:
    """Base of data sets that read their samples from another one. Attributes that a view lacks are those of the other.

    Parameters
    ----------
    dataset
        The other data set, a :class:`Dataset`.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.path: Path = dataset.path
        self.groups: NDArray[np.int64] | None = dataset.groups
        # A copy, because views such as `Masked` add fields in place.
        self.fields: dict[str, Field] = dict(dataset.fields)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # not set yet, as in copy.copy(): the next line would recurse
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)

    # `__getattr__` delegates reads only: what is set on a view must reach the data set that reads.
    @property
    def lenient(self) -> frozenset[str]:
        """Names of fields in which invalid values are permitted."""
        return self.dataset.lenient

    @lenient.setter
    def lenient(self, names: frozenset[str]) -> None:
        self.dataset.lenient = names

    @property
    def labels(self) -> Mapping[str, LabelMap]:
        """Label maps by name."""
        return self.dataset.labels

    @labels.setter
    def labels(self, maps: Mapping[str, LabelMap]) -> None:
        self.dataset.labels = maps

    @property
    def weighted(self) -> Mapping[str, Sequence[str]]:
        """Names of the weights of each target."""
        return self.dataset.weighted

    @weighted.setter
    def weighted(self, names: Mapping[str, Sequence[str]]) -> None:
        self.dataset.weighted = names

    @property
    def bytes_read(self) -> int:
        """Bytes read so far [B]."""
        return self.dataset.bytes_read

    def read(self, name: str, indices: Sequence[int], box: Box, out: NDArray[Any]) -> tuple[slice, ...]:
        """Read a box as :meth:`Dataset.read` does."""
        return self.dataset.read(name, indices, box, out)

    def place(self, index: int) -> str:
        """Return the source and number of a sample, for messages."""
        return self.dataset.place(index)

    def close(self) -> None:
        """Close open files; a later read opens them again."""
        self.dataset.close()


class OneSize(DatasetView):
    """View of a data set, to read the samples that have the size of sample `index`; samples keep their numbers. Local.
    """

    extents = None  # hides those of the other data set

    def __init__(self, dataset: Any, index: int) -> None:
        super().__init__(dataset)
        self.fields = {
            name: replace(field, shape=sample_shape(dataset, name, index)) for name, field in dataset.fields.items()
        }


class ArrayDataset:
    """A :class:`Dataset` of inputs and targets in arrays. Each process reads only its own box. Local.

    Parameters
    ----------
    arrays : mapping
        Arrays by the name of the network's input: ``(N, *spatial, C)``, or ``(N,)`` for a number per sample. An array
        has ``shape`` and ``dtype``; the reading thread reads it as ``array[index, a:b, c:d, ...]``. Packed data
        (:class:`Packing`) are unpacked if ``attrs`` of the array describe them, as in h5py and Zarr.
    targets : collection of str
        Names of the arrays that predictions are compared with, and of weights.
    channel_names : mapping, optional
        Names of the channels, by the name of the array.
    groups : int array ``(N,)``, optional
        Group number of every sample; samples of one group belong together.
    path : path
        Path for messages.

    Notes
    -----
    Attributes are those of :class:`Dataset`, and `ranges`, `labels` and `weighted` as in :class:`Hdf5Dataset`.

    Raises
    ------
    DataError
        Arrays of different lengths, or of other than real numbers; unknown names; in reading as in
        :class:`Hdf5Dataset`.
    """

    def __init__(
        self,
        arrays: Mapping[str, Any],
        targets: Collection[str] = ("target",),
        *,
        channel_names: Mapping[str, Sequence[str]] | None = None,
        groups: ArrayLike | None = None,
        path: str | Path = "arrays",
    ) -> None:
        for name, array in arrays.items():
            try:
                # Only for the errors of objects that lack them.
                np.dtype(array.dtype), array.shape[0]
            except (AttributeError, TypeError, IndexError):  # a list, a tensor (of a dtype unknown to NumPy), a scalar
                raise DataError(
                    f"{path}: {name!r}: expected an array of NumPy, h5py or Zarr with an axis of samples, got "
                    f"{type(array).__name__}; numpy.asarray converts lists and tensors"
                ) from None
        lengths = {name: array.shape[0] for name, array in arrays.items()}
        if not arrays or len(set(lengths.values())) > 1:
            raise DataError(f"{path}: expected arrays of as many samples each, got {lengths}")
        for what, keys in (("targets", targets), ("channel_names", channel_names or ())):
            unknown = sorted(set(keys) - set(arrays))
            if unknown:
                example = f"name them: ArrayDataset(arrays, [{list(arrays)[-1]!r}])"
                way = example if what == "targets" else "correct the name"
                raise DataError(f"{path}: expected {what} out of {', '.join(arrays)}, got {unknown[0]!r}; {way}")
        self.path, self.arrays = Path(path), dict(arrays)
        self.groups: NDArray[np.int64] | None = None if groups is None else np.asarray(groups, np.int64)
        if self.groups is not None and self.groups.shape != (len(self),):
            raise DataError(f"{path}: expected a group per sample, ({len(self)},), got {self.groups.shape}")
        self.lenient: frozenset[str] = frozenset()
        self.labels: Mapping[str, LabelMap] = {}
        self.weighted: Mapping[str, Sequence[str]] = {}
        self.ranges: dict[str, TargetRange] = {}
        self.bytes_read = 0
        names = channel_names or {}
        # Inputs first, as in files (`Structure.fields`).
        first = [name for name in arrays if name not in targets]
        ordered = [*first, *(name for name in arrays if name in targets)]
        self.fields = {name: self._field(name, names.get(name), name in targets) for name in ordered}

    def _field(self, name: str, channels: Sequence[str] | None, is_target: bool) -> Field:
        dtype = np.dtype(self.arrays[name].dtype)
        if dtype.kind in "cSUmM":  # others may be types of extensions, such as bfloat16
            raise DataError(
                f"{self.path}: {name!r}: expected an array of real numbers, got one of {dtype}; convert it, a complex "
                "number to two channels"
            )
        shape = self.arrays[name].shape[1:] or (1,)
        names = [f"channel {k}" for k in range(shape[-1])] if channels is None else list(channels)
        if len(names) != shape[-1]:
            raise DataError(f"{self.path}: expected {shape[-1]} names of channels of {name!r}, got {len(names)}")
        attributes, where = getattr(self.arrays[name], "attrs", {}), f"{self.path}: {name!r}"
        packing = packing_of(attributes, dtype, where) if attributes else None
        return Field(name, "channels last", tuple(shape), names, is_target, packing=packing)

    def __len__(self) -> int:
        return int(next(iter(self.arrays.values())).shape[0])

    def place(self, index: int) -> str:
        """Return the path and number of a sample, for messages."""
        return f"{self.path}, sample {index}"

    def read(self, name: str, indices: Sequence[int], box: Box, out: NDArray[Any]) -> tuple[slice, ...]:
        """Read a box of an array, as in :meth:`Dataset.read`."""
        array, field = self.arrays[name], self.fields[name]
        part, filled = overlap(box, (len(indices), *field.shape))
        if part.size == 0:
            return filled
        # An array (N,) has no axis for its single channel.
        where: tuple[slice, ...] = part.slices()[1:] if len(array.shape) > 1 else ()
        for k in range(*part.ranges[0]):
            # Arrays of NumPy would count a negative number from the end.
            values = array[(checked_index(self, indices[k]), *where)]
            stored = np.asarray(values)
            at: Any = (k - box.start[0], *filled[1:])
            self.bytes_read += stored.nbytes
            self._write(name, stored.reshape(out[at].shape), np.ma.getmask(values), out[at])
        check_read(self, name, indices, part, out[filled])
        return filled

    def _write(self, name: str, stored: NDArray[Any], masked: Any, out: NDArray[Any]) -> None:
        """Write the values of stored data to `out`. `masked` elements (netCDF4) become NaN, unless they are labels."""
        packing, kept = self.fields[name].packing, kept_labels(name, self.ranges, self.labels)
        if packing is None:
            np.copyto(out, stored, casting="unsafe")
        else:
            packing.unpack(stored, out, kept)
        if np.any(masked):
            out[masked.reshape(out.shape) & ~np.isin(stored, kept)] = np.nan

    def close(self) -> None:
        """Do nothing: no file is open."""
