"""TIFF and pyramids of slides (BigTIFF, OME, SVS): a file is one sample."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from .disk import DataError
from .formats import Format, SampleArray, StoredArray, StoredFile, library, opening

__all__ = ["Tiff"]

_REMEDY = "write {path} in tiles (tifffile.imwrite(..., tile=(256, 256)))"
#: Kinds of arrays: axes of pages become the depth, or the channels.
_KINDS = ("level", "channels")


class Tiff(Format):
    """TIFF by tifffile: arrays ``level0`` (full resolution), ``level1``, ... ``(1, [D,] H, W, C)`` of the first series.

    Tiles and strips that overlap the box are decoded; data without compression in one piece are read from a memory map.
    Pages are the depth; in the arrays ``channels0``, ``channels1``, ... they are channels. Further series have the
    prefix ``series1/``.
    """

    name: ClassVar[str] = "tiff"
    suffixes: ClassVar[tuple[str, ...]] = (".tif", ".tiff", ".svs", ".ndpi", ".btf", ".tf8")

    def open(self, path: Path, allow_external: bool = False, checked: bool = False) -> StoredFile:
        """Open a file, and read the positions of its tiles."""
        tifffile = library("tifffile", path)
        library("zarr", path)  # tifffile reads tiles by it
        with opening(path, "a TIFF file"):
            return _TiffFile(path, tifffile.TiffFile(path))


class _TiffFile(StoredFile):
    main = "level0"

    def __init__(self, path: Path, file: Any) -> None:
        self.path, self.files, self._file = path, {}, file
        self._levels: dict[str, Any] = {}
        for number, series in enumerate(file.series):
            prefix = f"series{number}/" if number else ""
            for k, level in enumerate(series.levels):
                for kind in _KINDS:
                    self._levels[f"{prefix}{kind}{k}"] = (kind, number, k, level)

    def get(self, name: str) -> StoredArray | None:
        """Return the array of this name, a level of a series; None if there is none."""
        if name not in self._levels:
            return None
        kind, number, k, level = self._levels[name]
        with opening(self.path, f"a TIFF file with {name}"):
            axes, spatial = self._axes(level, kind)
            # tifffile gives the type without the file's byte order, which a memory map needs.
            shape, dtype = tuple(level.shape), np.dtype(level.dtype).newbyteorder(self._file.byteorder)
            if level.dataoffset is not None:  # only for data that are contiguous and not compressed
                return SampleArray(name, np.memmap(self.path, dtype, "r", level.dataoffset, shape), axes, spatial)
            zarr = library("zarr", self.path)
            source = zarr.open(self._file.aszarr(series=number, level=k), mode="r")
            return SampleArray(name, source, axes, spatial, {}, source.chunks, _REMEDY)

    def _axes(self, level: Any, kind: str) -> tuple[list[int | None], int]:
        """Return, for each axis of a level, its number in ``(*spatial, C)`` or None, and the number of spatial axes."""
        # Letters of tifffile: S is the samples of a pixel (RGB), C channels; all others (Z, T, I, ...) count pages.
        letters = [letter if n > 1 or letter in "YX" else None for letter, n in zip(level.axes, level.shape)]
        pages = [letter for letter in letters if letter and letter not in "YXSC"]
        of_channels = [letter for letter in letters if letter and letter in "SC"] + pages * (kind == "channels")
        depth = pages if kind == "level" else []
        if len(depth) > 1 or len(of_channels) > 1 or not {"Y", "X"} <= set(letters):
            raise DataError(
                f"{self.path}: expected an image with at most one axis of pages and one of channels, got the axes "
                f"{level.axes} of shape {tuple(level.shape)}; write one axis of each, or a file per image"
            )
        order = [*depth, "Y", "X", *of_channels]
        return [None if letter is None else order.index(letter) for letter in letters], len(depth) + 2

    def names(self) -> Iterator[str]:
        """Yield the names of the arrays, two for each level."""
        yield from self._levels

    def close(self) -> None:
        """Close the file."""
        self._file.close()
