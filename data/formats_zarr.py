"""Zarr, versions 2 and 3: a group has arrays as an HDF5 file has datasets."""

from __future__ import annotations

import base64
import posixpath
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from .chunks import Chunks
from .formats import ChunkCache, Format, StoredArray, StoredFile, Where, library, opening

__all__ = ["Zarr"]

_REMEDY = "write {dataset} in chunks of {better}"
#: Name of the array of a file that is not a group.
ALONE = "data"


class Zarr(Format):
    """Zarr groups, versions 2 and 3, by the package zarr. Missing numbers follow xarray's conventions."""

    name: ClassVar[str] = "zarr"
    suffixes: ClassVar[tuple[str, ...]] = (".zarr",)
    folder: ClassVar[bool] = True

    def open(self, path: Path, allow_external: bool = False, checked: bool = False) -> StoredFile:
        """Open a group, or an array, which then has the name ``data``."""
        zarr = library("zarr", path)
        with opening(path, "a group of Zarr (a folder with zarr.json, or .zgroup)"):
            return _ZarrFile(path, zarr, zarr.open(str(path), mode="r"))


class _ZarrFile(StoredFile):
    def __init__(self, path: Path, zarr: Any, root: Any) -> None:
        self.path, self.files = path, {}
        self._array, self._root = zarr.Array, root  # the class, because this module does not import zarr
        self.attrs = _attributes(root.attrs)

    def get(self, name: str) -> StoredArray | None:
        """Return the array of this name, or None."""
        with opening(self.path, f"an array {name!r} of Zarr"):
            member = self._member(name.strip("/"))
        return _ZarrArray(self, member, name.strip("/")) if isinstance(member, self._array) else None

    def _member(self, name: str) -> Any:
        if isinstance(self._root, self._array):
            return self._root if name == ALONE else None
        try:
            return self._root[name] if name else None
        except KeyError:
            return None

    def names(self) -> Iterator[str]:
        """Yield the names of all arrays."""
        if isinstance(self._root, self._array):
            yield ALONE
        else:
            yield from (name for name, member in self._root.members(max_depth=None) if isinstance(member, self._array))

    def close(self) -> None:
        """Do nothing: no file stays open."""


class _ZarrArray(StoredArray):
    def __init__(self, file: _ZarrFile, stored: Any, name: str, cache: ChunkCache | None = None) -> None:
        self._of, self._stored, self._cache = file, stored, cache
        self.name, self.shape, self.dtype = name, tuple(stored.shape), np.dtype(stored.dtype)
        attributes = _attributes(stored.attrs)
        # Names of dimensions: version 3 has them in the metadata, xarray writes them as an attribute in version 2.
        self._dimensions = getattr(stored.metadata, "dimension_names", None) or attributes.pop("_ARRAY_DIMENSIONS", ())
        if stored.metadata.zarr_format == 2 and len(self._dimensions) and stored.fill_value is not None:
            attributes.setdefault("_FillValue", stored.fill_value)  # xarray stores its attribute there
        elif isinstance(attributes.get("_FillValue"), str):
            attributes["_FillValue"] = _decoded(attributes["_FillValue"])
        self.attrs = attributes

    @property
    def scales(self) -> list[list[StoredArray]]:
        """For each axis, the array ``(extent,)`` in the same group that has the name of the dimension, if there is one.
        """
        if len(self._dimensions) != self.ndim:
            return [[] for _ in self.shape]
        return [self._scale(name, n) for name, n in zip(self._dimensions, self.shape)]

    def _scale(self, dimension: Any, extent: int) -> list[StoredArray]:
        # In version 3, the name of a dimension may be null, which is None here.
        path = posixpath.join(posixpath.dirname(self.name), str(dimension))
        # A coordinate is its own scale.
        scale = self if path == self.name else self._of.get(path) if isinstance(dimension, str) else None
        return [scale] if scale is not None and scale.shape == (extent,) else []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ZarrArray) and (self.name, self._of.path) == (other.name, other._of.path)

    __hash__ = None  # type: ignore[assignment]

    def chunks(self, rows: int) -> Chunks | None:
        """Return the chunks, which are decoded as a whole, unlike the shards that contain them; None for a scalar."""
        if not self.ndim:
            return None
        return Chunks(tuple(self._stored.chunks), self.shape, min(rows, self.ndim - 1), self.dtype.itemsize, _REMEDY)

    def cached(self, nbytes: int, chunks: Chunks) -> StoredArray:
        """Return the array with a cache of `nbytes` [B] if its chunks have several samples, else the same array."""
        # No other sample uses such a chunk, so it need not be kept.
        if chunks.shape[0] == 1:
            return self
        return _ZarrArray(self._of, self._stored, self.name, ChunkCache(chunks.shape, nbytes, self._chunk))

    def _chunk(self, index: tuple[int, ...]) -> NDArray[Any]:
        return np.asarray(self._stored[tuple(slice(k * c, (k + 1) * c) for k, c in zip(index, self._stored.chunks))])

    def read(self, where: Where, out: NDArray[Any]) -> None:
        """Read a part to `out`."""
        if self._cache is not None:
            self._cache.read(where, out)
        else:
            out[...] = self._stored[where]


def _attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes of JSON as h5py returns those of HDF5: lists as arrays. Nested values are left out."""
    values = {}
    for name, value in attributes.items():
        if isinstance(value, list):
            texts = any(isinstance(text, str) for text in value)
            value = np.array(value, object if texts else None) if all(map(_is_plain, value)) else None
        if value is None or isinstance(value, np.ndarray) or _is_plain(value):
            values[name] = value
    return {name: value for name, value in values.items() if value is not None}


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float)


def _decoded(text: str) -> Any:
    """Return the fill value that xarray writes in Zarr 3 for floats, the bytes of a float64 in base64; else `text`.

    >>> _decoded("AAAAAAAA+H8="), _decoded("none")
    (nan, 'none')
    """
    try:
        return struct.unpack("<d", base64.b64decode(text, validate=True))[0]
    except (ValueError, struct.error):
        return text
