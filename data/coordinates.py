"""Coordinates in a file of predictions: the source file of each sample, and the coordinates of its axes.

Coordinates follow HDF5, netCDF and CF: dimension scales of the axes of an input (`time`, `lat`, `lon`), the datasets in
its attribute ``coordinates``, their ``bounds``, and its ``grid_mapping`` (`crs`)::

    input (N, H, W, C)                 predictions (N, H, W, K)
           |  |  |                                  |  |  |
      time-+ lat lon  + coordinates, crs  -->  time-+ lat lon  + coordinates, crs

They are copied as stored, with their attributes. Coordinates along the samples are concatenated over all files. Others
are written once if all files agree, else once per sample. Coordinates that could be wrong are left out: those of an
axis whose extent differs in the predictions, and those with other units than in the first file.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain, count, pairwise
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from halograd.documents import one_line

from .dataset import Hdf5Dataset
from .disk import DataError
from .formats import StoredFile
from .source import Dataset
from .structure import HDF5_FAULTS, Field
from .variables import BOUNDS, NO_VARIABLE, SAMPLE, Axes, Surroundings, Variable, mappings_of, mark, surroundings_of

__all__ = ["SOURCES", "STEP", "write_coordinates", "write_sources"]

#: Datasets of :func:`write_sources`.
SOURCES = ("source_file", "source_sample")
#: Scale of an axis of times that are predicted from one sample.
STEP = "step"

_AHEAD = -2  # number of the axis of STEP, beside those of `Axes`
_SPATIAL = ("depth", "height", "width")
#: Attributes that change the meaning of a number.
_MEANING = ("units", "calendar", "scale_factor", "add_offset", "_FillValue", "missing_value", "_Unsigned")


def write_sources(file: h5py.File, dataset: Dataset, samples: Iterable[int]) -> None:
    """Write the datasets :data:`SOURCES`, one entry per sample: path, and number in that file (from 0). Local.

    Parameters
    ----------
    file
        File, open for writing.
    dataset
        Data set whose method ``source(index)`` returns both; without it, all samples belong to its ``path``.
    samples
        Indices in the data set, in the order of the predictions.
    """
    source = getattr(dataset, "source", lambda index: (str(dataset.path), index))
    found = [source(int(index)) for index in samples]
    # As bytes, because a file name need not be valid UTF-8.
    names = np.array([os.fsencode(name) for name, _ in found], object)
    file.create_dataset(SOURCES[0], data=names, dtype=h5py.string_dtype())
    file[SOURCES[1]] = np.array([number for _, number in found], np.int64)


def write_coordinates(
    file: h5py.File, dataset: Dataset, outputs: Mapping[str, tuple[int, ...]], allow_external: bool = False
) -> list[str]:
    """Write the coordinates of all samples, and attach them to the predictions on the same grid. Local.

    The coordinates are those of the first input with the grid of a prediction. If its axes have dimension scales, all
    axes in `file` get one, so that netCDF programs can read it.

    Parameters
    ----------
    file
        File, open for writing. It has the datasets of predictions, and others of ``(N,)``; their first axes are
        samples.
    dataset
        Samples of HDF5 files. Others have no coordinates.
    outputs
        Shape ``(*spatial, C)`` of a sample, by the name of the dataset of predictions. In `file` it may have another
        first axis, with the scale :data:`STEP`.
    allow_external
        As in :class:`Hdf5Dataset`.

    Returns
    -------
    list of str : names of the variables left out, each with the reason.
    """
    parts = [part for part in getattr(dataset, "parts", [dataset]) if isinstance(part, Hdf5Dataset)]
    if not parts or not outputs:
        return []
    try:
        name, rows = _on_the_grid_of(parts[0].fields, outputs), getattr(dataset, "rows", None)
        joined = _JoinedVariables(parts, name, allow_external, rows)
    except (DataError, *HDF5_FAULTS) as error:
        return [f"all ({one_line(error)})"]
    _CoordinateWriter(file, joined, outputs).write()
    return [f"{name} ({why})" for name, why in joined.faults.items()]


def _on_the_grid_of(fields: Mapping[str, Field], outputs: Mapping[str, tuple[int, ...]]) -> str:
    """Return the first input with the grid of an output, else the first input."""
    inputs = [name for name, one in fields.items() if not one.is_target and not one.static]
    grids = [shape[:-1] for shape in outputs.values() if len(shape) > 1]
    return next((name for name in inputs if fields[name].shape[:-1] in grids), inputs[0])


# -- all files -------------------------------------------------------------------------------------


class _JoinedVariables:
    """Variables of an input, joined over all files. Local.

    Attributes
    ----------
    variables
        Variables by name, as in the first file, with the attributes that are equal in all files.
    values
        Values of the variables that are equal in all files, or of those with one number (or text) per sample.
    faults
        Reason why a variable is left out, by name.
    samples
        Number of samples of all files.
    """

    def __init__(
        self, parts: Sequence[Hdf5Dataset], name: str, allow_external: bool, rows: NDArray[np.int64] | None = None
    ) -> None:
        self._parts, self._input = parts, parts[0].fields[name].first_dataset
        ends = np.cumsum([0, *map(len, parts)])
        rows = np.arange(int(ends[-1])) if rows is None else rows  # the samples of all files that have predictions
        self._rows = [rows[(rows >= low) & (rows < high)] - low for low, high in pairwise(ends.tolist())]
        self.samples, self.spatial = len(rows), parts[0].fields[name].shape[:-1]
        self.values = dict[str, NDArray[Any]]()
        self._paths = dict[str, list[str]]()
        self._pieces = dict[str, list[NDArray[Any]]]()  # values of samples, by file
        for part in parts:
            with part.open() as file:
                around = surroundings_of(file, part.fields[name], allow_external)
                if part is parts[0]:
                    self._begin(around, file)
                else:
                    self._join(around, part, file)
        for name in self._pieces.keys() & self.values.keys():
            self.values[name] = np.concatenate(self._pieces[name])

    def _begin(self, first: Surroundings, file: StoredFile) -> None:
        self.variables, self.faults, self.scales = first.variables, first.faults, first.scales
        self.dimensions, self.has_scales, self.mapping = first.dimensions, first.has_scales, first.mapping
        for name, variable in list(self.variables.items()):
            self._paths[name] = [variable.path]
            if variable.axes == (SAMPLE,) or not (variable.is_of_samples or variable.mapping):
                value = self.read(name, 0, file)
                if value is not None:
                    self.values[name] = value

    def _join(self, other: Surroundings, part: Hdf5Dataset, file: StoredFile) -> None:
        for name in other.variables.keys() - self.variables.keys() - self.faults.keys():
            self.faults[name] = f"{self._parts[0].path} has none"
        self.dimensions = dict(self.dimensions.items() & other.dimensions.items())
        for name in list(self.variables):
            if name not in self.variables:
                continue  # bounds of what was left out
            mine = self.variables[name]
            theirs = other.variables.get(name)
            why = other.faults.get(name, "it is missing") if theirs is None else _difference(mine, theirs)
            if theirs is None or why:
                self.leave_out(name, f"in {part.path}: {why}")
                continue
            same = {k: v for k, v in mine.attributes.items() if mark(v) == mark(theirs.attributes.get(k))}
            dtype = mine.dtype if mine.dtype == theirs.dtype else np.result_type(mine.dtype, theirs.dtype)
            self.variables[name] = replace(mine, attributes=same, dtype=dtype)
            self._paths[name].append(theirs.path)
            if name in self.values:
                self._compare(name, file)

    def _compare(self, name: str, file: StoredFile) -> None:
        """Append the values of the next file for a variable along samples; compare the values of others."""
        value = self.read(name, len(self._paths[name]) - 1, file)
        if value is None:
            return
        if self.variables[name].is_of_samples:
            self._pieces.setdefault(name, [self.values[name]]).append(value)
        elif not _equal(self.values[name], value):
            del self.values[name]  # it differs, so it is written per sample

    def read(self, name: str, number: int, opened: StoredFile | None = None) -> NDArray[Any] | None:
        """Read a variable from the file of this number. If it cannot be read, leave it out and return None."""
        path = self._parts[number].path
        try:
            with self._parts[number].open() if opened is None else nullcontext(opened) as file:
                value = file.variable(self._input, self._paths[name][number])
                axes, rows = self.variables[name].axes, self._rows[number]
                whole = SAMPLE not in axes or len(rows) == len(self._parts[number])
                return value if whole else np.take(value, rows, axes.index(SAMPLE))
        except (DataError, *HDF5_FAULTS) as error:
            self.leave_out(name, f"in {path}: {one_line(error)}")
            return None

    def leave_out(self, name: str, why: str) -> None:
        """Remove a variable and its bounds, and record the reason."""
        self.faults[name] = why
        for gone in [name, *(other for other, one in self.variables.items() if one.bounds_of == name)]:
            del self.variables[gone]
            self.values.pop(gone, None)

    def is_per_sample(self, name: str) -> bool:
        """Return whether a variable without an axis of samples differs between files."""
        variable = self.variables[name]
        return not (name in self.values or variable.is_of_samples or variable.mapping)

    @property
    def ranges(self) -> list[slice]:
        """Range of samples of each file."""
        ends = np.cumsum([0, *map(len, self._rows)]).tolist()
        return [slice(*ends[k : k + 2]) for k in range(len(self._rows))]


def _difference(mine: Variable, theirs: Variable) -> str:
    """Return the reason why variables of two files cannot be joined; empty if they can."""
    fixed = [[n for axis, n in zip(one.axes, one.shape) if axis != SAMPLE] for one in (mine, theirs)]
    if mine.axes != theirs.axes or fixed[0] != fixed[1]:
        return f"its shape is {theirs.shape}, not {mine.shape}"
    if mine.dtype != theirs.dtype and any(one.dtype.kind not in "iuf" for one in (mine, theirs)):
        return f"its type is {theirs.dtype}, not {mine.dtype}"
    if mark(mine.value) != mark(theirs.value):
        return f"it is {theirs.value}, not {mine.value}"
    keys = {*mine.attributes, *theirs.attributes} if mine.mapping else _MEANING
    other = [key for key in keys if mark(mine.attributes.get(key)) != mark(theirs.attributes.get(key))]
    return f"it has another {min(other)!r}" if other else ""


def _equal(mine: NDArray[Any], theirs: NDArray[Any]) -> bool:
    return bool(np.array_equal(mine, theirs, equal_nan=mine.dtype.kind == "f" == theirs.dtype.kind))


def _base(path: Any) -> str:
    return posixpath.basename(path) if isinstance(path, str) else ""


# -- the file of predictions -----------------------------------------------------------------------


class _CoordinateWriter:
    """Writer of coordinates into a file of predictions. Local."""

    def __init__(self, file: h5py.File, joined: _JoinedVariables, outputs: Mapping[str, tuple[int, ...]]) -> None:
        self._file, self._joined = file, joined
        shapes = {name: getattr(one, "shape", None) for name, one in file.items() if name != STEP}
        self._of_samples = [name for name, shape in shapes.items() if shape == (joined.samples,)]
        self._axes = {name: _axes_of_output(shape, joined.spatial) for name, shape in outputs.items()}
        for name, (first, *others) in self._axes.items():
            if file[name].ndim > len(others) + 1:
                self._axes[name] = (first, _AHEAD, *others)
        self._dimensions = dict[int, str]()  # by axis: scales without coordinates

    def write(self) -> None:
        """Write all variables, then attach them."""
        self._choose()
        self._write_values()
        for name in self._axes:
            self._name_in_attributes(name)
        if self._joined.has_scales or self._scales:
            self._attach()
            return
        for name, axes in self._axes.items():
            for k, axis in enumerate(axes):
                if axis in self._joined.dimensions:
                    self._file[name].dims[k].label = self._joined.dimensions[axis]

    def _choose(self) -> None:
        """Leave out variables whose axes no prediction has, and names that are in use."""
        joined, spatial = self._joined, [self._file[name].shape[1:-1] for name in self._axes]
        for name in list(joined.variables):
            variable = joined.variables.get(name)
            if variable is None:
                continue  # bounds of what was left out
            if name in self._file:
                joined.leave_out(name, "predictions have a dataset of this name")
            elif not any(self._has(output, variable) for output in self._axes):
                joined.leave_out(name, f"samples are {joined.spatial}, predictions {_texts(spatial)}")
            elif variable.bounds_of and joined.is_per_sample(name) != joined.is_per_sample(variable.bounds_of):
                joined.leave_out(name, f"they differ between files, unlike {variable.bounds_of}")

    def _has(self, output: str, variable: Variable) -> bool:
        """Return whether an output has all axes of a variable (for a grid mapping, the whole grid)."""
        axes = range(len(self._joined.spatial)) if variable.mapping else variable.axes
        return all(axis is None or axis in self._axes[output] for axis in axes)

    def _write_values(self) -> None:
        joined, written = self._joined, list(self._joined.variables)
        for name in written:
            if name not in joined.variables:
                continue
            variable = joined.variables[name]
            shape = [joined.samples if axis == SAMPLE else n for axis, n in zip(variable.axes, variable.shape)]
            if joined.is_per_sample(name):
                shape = [joined.samples, *shape]
            made = self._file.create_dataset(name, tuple(shape), variable.dtype)
            if name in joined.values:
                made[()] = joined.values[name]
            elif variable.mapping:
                made[()] = variable.value
            else:
                self._fill(made, name)
        for name in set(written) - joined.variables.keys():
            if name in self._file:
                del self._file[name]
        for name, variable in joined.variables.items():
            for key, value in variable.attributes.items():
                if key not in BOUNDS:
                    self._file[name].attrs[key] = value
                elif _base(value) in joined.variables:
                    self._file[name].attrs[key] = _base(value)

    def _fill(self, made: h5py.Dataset, name: str) -> None:
        """Write the values of all files, one after the other."""
        joined = self._joined
        at = 0 if joined.is_per_sample(name) else joined.variables[name].axes.index(SAMPLE)
        for number, samples in enumerate(joined.ranges):
            values = joined.read(name, number)
            if values is None:
                return
            made[(slice(None),) * at + (samples,)] = values

    def _scales_of(self, axis: int | None) -> list[str]:
        """Return the written scales of an axis."""
        if axis is None or axis == _AHEAD:
            return []
        shape = (self._joined.samples if axis == SAMPLE else self._joined.spatial[axis],)
        names = [name for name in self._joined.scales.get(axis, ()) if name in self._joined.variables]
        return [name for name in names if self._file[name].shape == shape]

    @property
    def _scales(self) -> set[str]:
        return {name for axis in self._joined.scales for name in self._scales_of(axis)}

    def _name_in_attributes(self, output: str) -> None:
        """Write CF's attributes for coordinates that are not dimensions, and for the grid mapping."""
        joined, attributes = self._joined, self._file[output].attrs
        has = [name for name, one in joined.variables.items() if self._has(output, one)]
        variables = [joined.variables[name] for name in has if name not in self._scales]
        others = [one.name for one in variables if not (one.mapping or one.bounds_of)]
        if others:
            attributes["coordinates"] = " ".join(others)
        mappings = mappings_of(joined.mapping)
        if mappings and all(_base(path) in has for path in mappings):
            attributes["grid_mapping"] = " ".join(map(posixpath.basename, joined.mapping.split()))

    def _attach(self) -> None:
        """Attach a dimension scale to every axis."""
        joined, scales = self._joined, self._scales
        for name in scales:
            self._file[name].make_scale(name)
        datasets = {**self._axes, **dict.fromkeys(self._of_samples, (SAMPLE,))}
        for name, one in joined.variables.items():
            if name not in scales:
                datasets[name] = (SAMPLE, *one.axes) if joined.is_per_sample(name) else one.axes
        for name, axes in datasets.items():
            for k, axis in enumerate(axes):
                if axis == _AHEAD:  # it has its scale
                    continue
                for scale in self._scales_of(axis) or [self._dimension(name, axis, k)]:
                    self._file[name].dims[k].attach_scale(self._file[scale])

    def _dimension(self, name: str, axis: int | None, k: int) -> str:
        """Return the scale of an axis without coordinates; create it at the first use of the axis."""
        size = self._file[name].shape[k]
        last = f"{name}_channel" if k + 1 == self._file[name].ndim else f"{name}_{k}"
        if axis is None:
            names = [last]
        elif axis in self._dimensions:
            return self._dimensions[axis]
        else:
            usual = ("sample", *_SPATIAL[-len(self._joined.spatial) :])[axis + 1]
            names = [self._joined.dimensions.get(axis, usual), usual, last]
        chosen = next(one for one in chain(names, (f"{last}_{n}" for n in count(2))) if one not in self._file)
        self._file.create_dataset(chosen, (size,), ">f4").make_scale(f"{NO_VARIABLE} {size:10d}")
        if axis is not None:
            self._dimensions[axis] = chosen
        return chosen


def _axes_of_output(shape: tuple[int, ...], spatial: tuple[int, ...]) -> Axes:
    """Return the axes of predictions ``(N, *shape)``: spatial axes with the extent of the samples, else None.

    >>> _axes_of_output((64, 32, 3), (64, 64)), _axes_of_output((10,), (64, 64))
    ((-1, 0, None, None), (-1, None))
    """
    alike = len(shape) == len(spatial) + 1
    return (SAMPLE, *(k if alike and n == spatial[k] else None for k, n in enumerate(shape[:-1])), None)


def _texts(some: Sequence[object]) -> str:
    return ", ".join(dict.fromkeys(map(str, some)))
