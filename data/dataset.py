"""Any HDF5 file with an input and a target dataset, of which each process reads only its own box.

Arrays of halograd are ``(N, *spatial, C)``; on disk a dataset may be that (``layout="NHWC"``) or
``(N, C, *spatial)`` (``"NCHW"``), with 1, 2 or 3 spatial axes. Targets are one of

- a value per cell, ``(N, *spatial)``, or with a channel axis, in the layout of the inputs; the grid may be coarser
  than that of the inputs by a whole factor per axis;
- a label per sample, ``(N,)``, or a vector ``(N, K)``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from ..dtensor.box import Box
from .errors import DataError
from .reading import one_line, open_file
from .storage import check_files, dataset_of
from .structure import HDF5_FAULTS, Kind, Structure, examine, find, looking_into, shape_of
from .targets import TargetRange

__all__ = ["Hdf5Dataset"]


class Hdf5Dataset:
    """Inputs and targets of one HDF5 file, read by boxes. Local; every rank opens its own.

    Parameters
    ----------
    path : path
    inputs, targets : str
        Names of the datasets; ``targets=None`` for a file without.
    layout : {"NHWC", "NCHW"}, optional
        Order of axes on disk, for any number of spatial axes. Default: the attribute ``layout`` of the inputs.
    target_range : TargetRange, optional
        Targets outside, and fractions where they are numbers of classes, are refused when they are read.
    structure : Structure, optional
        What another rank found in this file (:attr:`structure`); it is then not looked at before it is first read, and
        `inputs`, `targets` and `layout` do not count.
    allow_external : bool
        Whether virtual datasets, external links and external files may take numbers from outside the folder of the
        file (:class:`Storage`).

    Attributes
    ----------
    structure : Structure
        All there is to know of the file, as plain data.
    sample_shape, target_shape : tuple
        ``(*spatial, C)`` of one sample; a label per sample is ``(1,)``.
    channel_names : list of str
        From the attribute of that name, else ``channel 0``, ...
    groups : int64 array ``(N,)`` or None
        The dataset ``simulation``, where there is one: samples that belong together.
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
        inputs: str = "inputs",
        targets: str | None = "mask",
        layout: str | None = None,
        target_range: TargetRange | None = None,
        structure: Structure | None = None,
        allow_external: bool = False,
    ) -> None:
        self.path = Path(path)
        self.bytes_read = 0
        self.target_range = target_range
        self._scratch: dict[np.dtype[Any], NDArray[Any]] = {}
        self._opened: tuple[h5py.File, h5py.Dataset, h5py.Dataset | None] | None = None
        if structure is None:
            structure = self._examine(inputs, targets, layout, allow_external)
        self.structure = structure
        self.sample_shape, self.target_shape = self.structure.sample_shape, self.structure.target_shape
        self.channel_names, self.groups = self.structure.channel_names, self.structure.groups

    def __len__(self) -> int:
        return self.structure.shape[0]

    def __enter__(self) -> Hdf5Dataset:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; twice does no harm, and what is read afterwards opens it again."""
        if self._opened is not None:
            self._opened[0].close()
            self._opened = None

    def read(self, indices: Sequence[int], box: Box, out: NDArray[Any]) -> tuple[slice, ...]:
        """Read this rank's box of the inputs of a global batch. Local.

        Parameters
        ----------
        indices : sequence of int
            Samples of the whole (global) batch, in order.
        box : Box
            In the batch's coordinates ``(N, *spatial, C)``. May reach outside the array: what lies there is left as
            it is in `out` (margins that hold padding).
        out : array of shape ``box.shape``, host
            Filled within; float32 or float64 (others are converted), any strides; C-contiguous is fastest.

        Returns
        -------
        tuple of slices : the part of `out` that was filled.

        Raises
        ------
        DataError
            NaN or infinity in what was read; a file that cannot be read any more.
        """
        filled = self._read(self._datasets()[0], self.structure.input_kind, indices, box, out)
        self._check_finite(indices, box, out, filled)
        return filled

    def read_targets(self, indices: Sequence[int], box: Box, out: NDArray[Any]) -> tuple[slice, ...]:
        """Read this rank's box of the targets of a global batch; as :meth:`read`, over :attr:`target_shape`.

        A label per sample has the box ``(N, 1)``.
        """
        targets = self._datasets()[1]
        if targets is None:
            raise DataError(f"{self.path}: opened without targets; pass targets='name of a dataset'")
        filled = self._read(targets, self.structure.target_kind, indices, box, out)
        self._check_targets(indices, box, out, filled)
        return filled

    def _examine(self, inputs: str, targets: str | None, layout: str | None, allow_external: bool) -> Structure:
        file = open_file(self.path)
        try:
            found = examine(file, self.path, inputs, targets, layout, allow_external)
            self._opened = file, dataset_of(file, inputs), None if targets is None else dataset_of(file, targets)
        except BaseException:
            file.close()
            raise
        return found

    def _datasets(self) -> tuple[h5py.Dataset, h5py.Dataset | None]:
        """Inputs and targets; opened now, where another rank has examined the file."""
        if self._opened is None:
            file = open_file(self.path)
            try:
                check_files(self.path, self.structure.files)
                with looking_into(self.path):
                    self._opened = file, *self._find_again(file)
            except BaseException:
                file.close()
                raise
        return self._opened[1:]

    def _find_again(self, file: h5py.File) -> tuple[h5py.Dataset, h5py.Dataset | None]:
        """The datasets, no attribute of which is read."""
        wanted = self.structure
        inputs = find(file, self.path, wanted.inputs)
        targets = None if wanted.targets is None else find(file, self.path, wanted.targets)
        coarse = () if targets is None else shape_of(targets, wanted.target_kind)
        if (inputs.shape, coarse) != (wanted.shape, wanted.target_shape):
            raise DataError(
                f"{self.path}: expected inputs of shape {wanted.shape}, targets of {wanted.target_shape} as when the "
                f"run began, got {inputs.shape} and {coarse}; it was written anew, or this node sees another file"
            )
        return inputs, targets

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
        """A reused array of this shape: reading must not allocate in every step."""
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

    def _check_finite(self, indices: Sequence[int], box: Box, out: NDArray[Any], filled: tuple[slice, ...]) -> None:
        values = out[filled]
        if np.isfinite(values).all():
            return
        at = np.argwhere(~np.isfinite(values))[0] + [s.start for s in filled]
        where = [int(a + o) for a, o in zip(at, box.start)]
        name = self.channel_names[where[-1]]
        raise DataError(
            f"{self.path}: {float(out[tuple(at)])} in sample {indices[where[0]]}, channel {where[-1]} ({name}) "
            f"at {tuple(where[1:-1])}; expected finite numbers: repair or leave out that sample"
        )

    def _check_targets(self, indices: Sequence[int], box: Box, out: NDArray[Any], filled: tuple[slice, ...]) -> None:
        values = out[filled]
        low, high, whole = limits = self.target_range or TargetRange()
        # A comparison with NaN is false, so that NaN counts as wrong here.
        good = (values >= low) & (values <= high) & np.isfinite(values)
        if whole:
            good &= values == np.trunc(values)
        if good.all():
            return
        at = np.argwhere(~good)[0] + [s.start for s in filled]
        where = [int(a + o) for a, o in zip(at, box.start)]
        raise DataError(
            f"{self.path}: target {float(out[tuple(at)]):g} in sample {indices[where[0]]} at {tuple(where[1:])}; "
            f"expected {limits}: repair the data or choose another loss"
        )


def _selection(kind: Kind, index: int, where: tuple[slice, ...]) -> tuple[int | slice, ...]:
    """Slices on disk of the part `where` ``(*spatial, C)`` of one sample."""
    *spatial, channels = where
    if kind == "channels first":
        return (index, channels, *spatial)
    if kind == "no channels":
        return (index, *spatial)
    return (index, *where)


def _is_direct(source: h5py.Dataset, out: NDArray[Any]) -> bool:
    """Whether HDF5 can write straight into `out`."""
    return bool(out.flags.c_contiguous) and out.dtype.kind == "f" and source.dtype.kind != "b"
