"""Formats of files: named arrays of which a box is read. All other parts of reading are the same for every format."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import accumulate, pairwise, product
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from halograd.documents import one_line
from halograd.registry import Registry

from .chunks import Chunks
from .disk import DataError
from .packing import Packing, packing_of

__all__ = [
    "AND",
    "FORMATS",
    "LISTED",
    "Channels",
    "ChunkCache",
    "FileGroup",
    "Format",
    "SampleArray",
    "StoredArray",
    "StoredFile",
    "Where",
    "format_of",
    "library",
    "open_stored",
    "opening",
]

AND = " + "
"""Separator of the names of several arrays whose channels are joined into one array."""
LISTED = 20  # number of arrays that a message lists if one is missing

Where = tuple[int | slice, ...]
"""Part of an array: an index or a slice with step 1 per axis."""


class StoredArray(ABC):
    """Array in an open file. Local.

    Attributes
    ----------
    name : str
    shape : tuple of int
        With samples first, as in HDF5 files (docs/data.md); `attrs` may have the ``layout`` of the axes.
    dtype : dtype
        Type of the stored numbers: integers, floats or bool.
    attrs : mapping
        Attributes as h5py returns them: strings, numbers, arrays.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    attrs: Mapping[str, Any]

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def scales(self) -> list[list[StoredArray]]:
        """Coordinates of each axis (dimension scales)."""
        return [[] for _ in self.shape]

    def packing(self, where: str) -> Packing | None:
        """Return the packing of the stored numbers; `where` names file and array in messages."""
        return packing_of(self.attrs, self.dtype, where)

    def chunks(self, rows: int) -> Chunks | None:
        """Return the chunks that are read as a whole when samples are read along the axis `rows`, or None."""
        return None

    def cached(self, nbytes: int, chunks: Chunks) -> StoredArray:
        """Return the array with a cache of `nbytes` [B] for its `chunks`; the same array if parts need no cache."""
        return self

    @abstractmethod
    def read(self, where: Where, out: NDArray[Any]) -> None:
        """Read a part of the array to `out`, contiguous, of the shape of the part and of :attr:`dtype`."""

    def numbers(self) -> NDArray[Any]:
        """Return the whole array as it is stored."""
        out = np.empty(self.shape, self.dtype)
        self.read(tuple(slice(0, n) for n in self.shape), out)
        return out


_File = TypeVar("_File", bound="StoredFile")


class StoredFile(ABC):
    """File, open for reading. Local.

    Attributes
    ----------
    path : Path
    attrs : mapping
        Attributes of the file, as h5py returns them.
    files : dict
        Other files that hold data of the arrays, with their sizes [B].
    main : str
        Name of the array that is meant where none is named; empty: the only one.
    of_samples : tuple of str
        Names of arrays ``(N, ...)`` that describe the samples, and are copied to files of predictions.
    """

    path: Path
    attrs: Mapping[str, Any] = {}
    files: dict[str, int]
    main: str = ""
    of_samples: tuple[str, ...] = ()

    @abstractmethod
    def get(self, name: str) -> StoredArray | None:
        """Return the array of this name, or None."""

    @abstractmethod
    def names(self) -> Iterator[str]:
        """Yield the names of all arrays."""

    @abstractmethod
    def close(self) -> None:
        """Close the file; `close` may be called twice."""

    def find(self, name: str) -> StoredArray:
        """Return the array of this name, or the joined one of several names (:data:`AND`). Raises DataError if there is
        no such array, with the names of those that exist, or if the array has no numbers.
        """
        array = self.get(name)  # the whole name first, because a name may contain the separator
        if array is None and AND in name:
            names = name.split(AND)
            parts, titles = [self.find(part) for part in names], [part.split("/")[-1] for part in names]
            return Channels(name, self.path, parts, titles)
        if array is None:
            raise DataError(f"{self.path}: expected a dataset {name!r}, got {self._listed()}; name one of these")
        if array.dtype.kind not in "fiub":
            raise DataError(f"{self.path}: {name!r}: expected numbers, got {array.dtype}; name others")
        return array

    def variable(self, dataset: str, path: str) -> NDArray[Any]:
        """Return the numbers, as stored, of the array at `path`, which an attribute of `dataset` names."""
        return self.find(path).numbers()

    def _listed(self) -> str:
        names: list[str] = []
        for name in self.names():
            if len(names) == LISTED:
                names.append("...")
                break
            array = self.get(name)
            names.append(f"{name} {array.shape}" if array is not None else name)
        return ", ".join(names) or "none"

    def __enter__(self: _File) -> _File:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Channels(StoredArray):
    """Arrays ``(N, *spatial, C)`` or ``(N, *spatial)`` as one array, whose channels are those of all of them, in order.

    Parameters
    ----------
    name, path
        Name of the array, and file, for messages.
    arrays
        Arrays on one grid. Those whose attribute ``layout`` does not end with ``C`` have no channels.
    texts
        Names of the channels, by array.

    Attributes
    ----------
    kept
        Stored numbers that have a value even if an array marks them as missing.
    """

    def __init__(self, name: str, path: Path, arrays: Sequence[StoredArray], texts: Sequence[str]) -> None:
        self.name, self._arrays = name, list(arrays)
        self.kept: Sequence[float] = ()
        layouts = [array.attrs.get("layout", "") for array in arrays]
        layouts = [layout.decode("utf-8", "replace") if isinstance(layout, bytes) else layout for layout in layouts]
        self._last = [isinstance(layout, str) and layout.endswith("C") for layout in layouts]
        grids = [array.shape[:-1] if last else array.shape for array, last in zip(arrays, self._last)]
        # Channels first: `read` joins arrays along their last axis only.
        first = any(isinstance(layout, str) and layout.startswith("NC") for layout in layouts)
        if len(set(grids)) > 1 or not 2 <= len(grids[0]) <= 4 or first:
            raise DataError(
                f"{path}: {name!r}: expected arrays on one grid, (N, *spatial) or (N, *spatial, C) with the layout "
                f"'NHWC', got the shapes {', '.join(str(array.shape) for array in arrays)} and layouts {layouts}"
            )
        counts = [array.shape[-1] if last else 1 for array, last in zip(arrays, self._last)]
        ends = list(accumulate(counts, initial=0))
        self._ranges = list(pairwise(ends))
        self.shape = (*grids[0], ends[-1])
        # Arrays may have different packings, so `read` returns values, and `attrs` have no packing.
        self._packings = [array.packing(f"{path}: {array.name!r}") for array in arrays]
        # Unpacked numbers are floats, in the precision in which `Packing` computes them.
        dtypes = [np.dtype(np.float64) if packing else array.dtype for packing, array in zip(self._packings, arrays)]
        self.dtype = np.result_type(*dtypes)
        names = [f"{text} {k}" if n > 1 else text for text, n in zip(texts, counts) for k in range(n)]
        # All arrays are on one grid, which the first one describes.
        same = {key: arrays[0].attrs[key] for key in ("coordinates", "grid_mapping") if key in arrays[0].attrs}
        order = {3: "NWC", 4: "NHWC", 5: "NDHWC"}[self.ndim]
        attrs: dict[str, Any] = {"layout": order, "channel_names": np.array(names, object), **same}
        # CF: "1" is dimensionless, for arrays without units among others.
        units = [", ".join(map(str, np.ravel(array.attrs.get("units", "1")))) for array in arrays]
        if any("units" in array.attrs for array in arrays):
            attrs["units"] = units[0] if len(set(units)) == 1 else ", ".join(units)
        self.attrs = attrs

    @property
    def scales(self) -> list[list[StoredArray]]:
        """Coordinates of each axis: those of the first array."""
        return [*self._arrays[0].scales[: self.ndim - 1], []]

    def chunks(self, rows: int) -> Chunks | None:
        """Return chunks that have, per axis, the largest extent of the arrays' chunks; None if no array has chunks."""
        chunked = [chunks for array in self._arrays if (chunks := array.chunks(rows)) is not None]
        if not chunked:
            return None
        shape = tuple(max(extents) for extents in zip(*(chunks.shape[: self.ndim - 1] for chunks in chunked)))
        channels = max(chunks.shape[-1] if len(chunks.shape) == self.ndim else 1 for chunks in chunked)
        itemsize = max(chunks.itemsize for chunks in chunked)
        return Chunks((*shape, channels), self.shape, chunked[0].rows, itemsize, chunked[0].remedy)

    def cached(self, nbytes: int, chunks: Chunks) -> StoredArray:
        """Divide the memory equally among the arrays, and return this array."""
        for k, array in enumerate(self._arrays):
            own = array.chunks(chunks.rows)
            self._arrays[k] = array if own is None else array.cached(nbytes // len(self._arrays), own)
        return self

    def read(self, where: Where, out: NDArray[Any]) -> None:
        """Read a part, array by array, and unpack the numbers of each."""
        channels = where[-1]
        assert isinstance(channels, slice)
        for array, packing, (low, high), last in zip(self._arrays, self._packings, self._ranges, self._last):
            start, stop = max(low, channels.start), min(high, channels.stop)
            if start >= stop:
                continue
            target = out[..., start - channels.start : stop - channels.start]
            stored = np.empty(target.shape, array.dtype)
            if last:
                array.read((*where[:-1], slice(start - low, stop - low)), stored)
            else:
                array.read(where[:-1], stored[..., 0])
            if packing is None:
                target[...] = stored
            else:
                packing.unpack(stored, target, self.kept)


class Format(ABC):
    """Base class of formats of files of samples, chosen by ``data.format`` or, without that key, by a file's suffix."""

    #: Name in the configuration, for registered classes.
    name: ClassVar[str] = ""
    #: Endings of the names of files, in lower case.
    suffixes: ClassVar[tuple[str, ...]] = ()
    #: Whether a file is a folder (Zarr).
    folder: ClassVar[bool] = False

    @abstractmethod
    def open(self, path: Path, allow_external: bool = False, checked: bool = False) -> StoredFile:
        """Open a file for reading. Local.

        Parameters
        ----------
        allow_external
            Whether data may come from files outside of the folder of the file.
        checked
            Whether another rank has checked already where the data are stored.

        Raises
        ------
        DataError
            The file is missing, damaged, or of another format.
        """


FORMATS: Registry[Format] = Registry("format", Format, "data.format")
# In the order in which formats are looked for in a folder. Their modules import this one.
FORMATS.register_later("hdf5", lambda: import_module(".hdf5", __package__).Hdf5Format)
FORMATS.register_later("zarr", lambda: import_module(".formats_zarr", __package__).Zarr)
FORMATS.register_later("nifti", lambda: import_module(".formats_nifti", __package__).Nifti)
FORMATS.register_later("tiff", lambda: import_module(".formats_tiff", __package__).Tiff)


class FileGroup(os.PathLike[str], ABC):
    """Location of several files that are read as one; in messages it has the path of the first one."""

    @abstractmethod
    def open(self, kind: str | None, allow_external: bool, checked: bool) -> StoredFile:
        """Open the files, as :meth:`Format.open` does; they have the format `kind`, or that of their suffix."""


def format_of(path: str | os.PathLike[str], default: str | None = "hdf5") -> str | None:
    """Return the name of the format that has the suffix of this path; else `default`. Local."""
    text = os.fspath(path).rstrip("/").lower()
    return next((name for name in FORMATS.names if text.endswith(FORMATS[name].suffixes or ("\0",))), default)


def open_stored(
    path: str | os.PathLike[str], kind: str | None = None, allow_external: bool = False, checked: bool = False
) -> StoredFile:
    """Open a file for reading, in the format `kind`, or in that of its suffix (HDF5 for unknown ones). Local.

    Arguments and errors are those of :meth:`Format.open`.
    """
    if isinstance(path, FileGroup):
        return path.open(kind, allow_external, checked)
    return FORMATS.make(kind or format_of(path) or "hdf5").open(Path(path), allow_external, checked)


def library(name: str, path: Path) -> Any:
    """Import the library `name`, to read `path`. Raises DataError with the command that installs the library."""
    try:
        return import_module(name)
    except ImportError as error:
        raise DataError(
            f"{path}: expected the package {name} to read it, got {one_line(error)}; pip install 'halograd[formats]'"
        ) from error


@contextmanager
def opening(path: Path, what: str) -> Iterator[None]:
    """Convert every error of a library into a DataError of one line; `what` names the format."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file, or a part of it is missing; correct the path (data.path)") from error
    except PermissionError as error:
        raise DataError(f"{path}: cannot be opened, permission denied; make it readable") from error
    except Exception as error:  # each library has errors of its own
        raise DataError(
            f"{path}: expected {what}, cannot read it ({one_line(error)}); check the path, or "
            "write the file again"
        ) from error


class ChunkCache:
    """Cache of decoded chunks of an array, which keeps those that were used last. Local.

    It is for libraries that decode a chunk at every read of a part of it: a chunk of many samples would be decoded once
    per sample.

    Parameters
    ----------
    shape
        Shape of a chunk.
    nbytes
        Memory for chunks [B]; at least one chunk is kept.
    fetch
        Function that returns the chunk of an index, cut at the end of the array.
    """

    def __init__(self, shape: Sequence[int], nbytes: int, fetch: Callable[[tuple[int, ...]], NDArray[Any]]) -> None:
        self._shape, self._fetch, self._left = tuple(shape), fetch, nbytes
        self._chunks: OrderedDict[tuple[int, ...], NDArray[Any]] = OrderedDict()

    def read(self, where: Where, out: NDArray[Any]) -> None:
        """Read a part of the array to `out`, chunk by chunk."""
        # An index becomes a range of one, so that all axes are treated in the same way.
        ranges = [(index, index + 1) if isinstance(index, int) else (index.start, index.stop) for index in where]
        target = out.reshape([high - low for low, high in ranges])
        for index in product(*(range(low // c, -(-high // c)) for (low, high), c in zip(ranges, self._shape))):
            chunk, own, at = self._chunk(index), [], []
            for k, c, n, (low, high) in zip(index, self._shape, chunk.shape, ranges):
                # The common elements, relative to the chunk and to `out`.
                first, last = max(low, k * c), min(high, k * c + n)
                own.append(slice(first - k * c, last - k * c))
                at.append(slice(first - low, last - low))
            target[tuple(at)] = chunk[tuple(own)]

    def _chunk(self, index: tuple[int, ...]) -> NDArray[Any]:
        if index not in self._chunks:
            chunk = self._fetch(index)
            self._left -= chunk.nbytes
            # The new chunk is kept in any case, even if it is larger than the memory.
            while self._left < 0 and self._chunks:
                self._left += self._chunks.popitem(last=False)[1].nbytes
            self._chunks[index] = chunk
        self._chunks.move_to_end(index)
        return self._chunks[index]


class SampleArray(StoredArray):
    """An array with the axes of one sample, in any order, as an array ``(1, *spatial, C)``. Local.

    Parameters
    ----------
    source
        Object with `shape` and `dtype`, read by slices: an array, a memory map, an array of Zarr.
    axes
        For each axis of `source`, its number in ``(*spatial, C)``; None: an axis of extent 1 that is left out.
    spatial
        Number of spatial axes. Without an axis of channels there is one channel.
    chunk
        Shape of a chunk of `source` that is read as a whole; None: parts are read without their chunks.
    remedy
        Remedy for slow chunks (:class:`Chunks`).
    """

    def __init__(
        self,
        name: str,
        source: Any,
        axes: Sequence[int | None],
        spatial: int,
        attrs: Mapping[str, Any] | None = None,
        chunk: Sequence[int] | None = None,
        remedy: str = "",
    ) -> None:
        self.name, self._source, self._axes, self._remedy = name, source, tuple(axes), remedy
        self._spatial, self.dtype = spatial, np.dtype(source.dtype)
        self.attrs = {"layout": "NHWC", **(attrs or {})}
        self.shape = self._ordered(source.shape)
        self._chunk = None if chunk is None else self._ordered(chunk)

    def _ordered(self, extents: Sequence[int]) -> tuple[int, ...]:
        known = {axis: n for axis, n in zip(self._axes, extents) if axis is not None}
        return (1, *(known.get(axis, 1) for axis in range(self._spatial + 1)))

    def chunks(self, rows: int) -> Chunks | None:
        """Return the chunks of the source with the axes of this array; None if the source has no chunks or is empty."""
        if self._chunk is None or not math.prod(self.shape):
            return None
        return Chunks(self._chunk, self.shape, min(rows, self.ndim - 1), self.dtype.itemsize, self._remedy)

    def read(self, where: Where, out: NDArray[Any]) -> None:
        """Read a part of the sample to `out`."""
        own = [slice(index, index + 1) if isinstance(index, int) else index for index in where[1:]]
        # An index instead of a slice drops the axes that are left out.
        values = np.asarray(self._source[tuple(0 if axis is None else own[axis] for axis in self._axes)])
        kept = [axis for axis in self._axes if axis is not None]
        # `values` has the axes `kept`, in the order of the source.
        ordered = values.transpose(sorted(range(len(kept)), key=kept.__getitem__))
        target = out.reshape([index.stop - index.start for index in own])
        np.copyto(target, ordered.reshape(target.shape))
