"""NIfTI, the format of medical volumes: a file is one sample."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from .disk import DataError
from .formats import Format, SampleArray, StoredArray, StoredFile, library, opening

__all__ = ["Nifti"]

_REMEDY = "the whole file is inflated for a part of it: write it without compression, `gunzip {path}`"
_SPATIAL = 3


class Nifti(Format):
    """NIfTI by nibabel: an array ``data`` ``(1, X, Y, Z, C)`` in the order of nibabel, ``affine`` and ``spacing``.

    Parts of ``.nii`` are read from a memory map. A file ``.nii.gz`` is inflated at the first read of a part, and stays
    in memory as long as it is open.
    """

    name: ClassVar[str] = "nifti"
    suffixes: ClassVar[tuple[str, ...]] = (".nii", ".nii.gz")

    def open(self, path: Path, allow_external: bool = False, checked: bool = False) -> StoredFile:
        """Open a file, and read its header."""
        nibabel = library("nibabel", path)
        with opening(path, "a file of NIfTI"):
            return _NiftiFile(path, nibabel.load(path))


class _NiftiFile(StoredFile):
    main, of_samples = "data", ("affine", "spacing")

    def __init__(self, path: Path, image: Any) -> None:
        self.path, self.files = path, {}
        proxy, header = image.dataobj, image.header
        shape, rest = tuple(proxy.shape), [k for k, n in enumerate(proxy.shape) if k >= _SPATIAL and n > 1]
        # NIfTI has further axes for time, channels, ...: one of them may have several elements, which become channels.
        if len(rest) > 1:
            raise DataError(f"{path}: expected (X, Y, Z) or (X, Y, Z, C), got {shape}; write one axis of channels")
        spatial = min(len(shape), _SPATIAL)
        axes = [k if k < spatial else spatial if k in rest else None for k in range(len(shape))]
        # Slope and intercept as those of packed data, so that all formats are unpacked in one way.
        factors = {"scale_factor": float(proxy.slope), "add_offset": float(proxy.inter)}
        attrs = factors if factors != {"scale_factor": 1.0, "add_offset": 0.0} else {}
        inflated = str(path).lower().endswith(".gz")
        # "F": NIfTI stores the first axis contiguously.
        source = _Inflated(proxy) if inflated else np.memmap(path, proxy.dtype, "r", proxy.offset, shape, "F")
        chunk = shape if inflated else None  # any part of a compressed file needs all of it
        spacing = np.asarray(header.get_zooms()[:_SPATIAL], np.float64)
        self._arrays = {
            "data": SampleArray("data", source, axes, spatial, attrs, chunk, _REMEDY),
            "affine": _HeaderArray("affine", np.asarray(image.affine, np.float64), "from voxels to positions"),
            "spacing": _HeaderArray("spacing", spacing, "distance of voxels on each axis"),
        }

    def get(self, name: str) -> StoredArray | None:
        """Return the array of this name, or None."""
        return self._arrays.get(name)

    def names(self) -> Iterator[str]:
        """Yield the names of the arrays."""
        yield from self._arrays

    def close(self) -> None:
        """Drop the memory map, or the inflated volume."""
        self._arrays.clear()


class _Inflated:
    """Volume of a compressed file, inflated at the first read."""

    def __init__(self, proxy: Any) -> None:
        self._proxy, self.shape, self.dtype = proxy, proxy.shape, proxy.dtype

    @cached_property
    def _values(self) -> NDArray[Any]:
        return np.asanyarray(self._proxy.get_unscaled())  # slope and intercept are applied later, to parts

    def __getitem__(self, where: Any) -> NDArray[Any]:
        return self._values[where]


class _HeaderArray(StoredArray):
    """Numbers of the header, as an array of one sample: ``(1, ...)``."""

    def __init__(self, name: str, values: NDArray[Any], meaning: str) -> None:
        self._values = values[None]
        self.name, self.shape, self.dtype = name, self._values.shape, values.dtype
        self.attrs = {"long_name": meaning}

    def read(self, where: Any, out: NDArray[Any]) -> None:
        """Read a part."""
        out[...] = self._values[where]
