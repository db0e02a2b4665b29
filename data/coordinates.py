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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count, pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from halograd.documents import one_line

from .dataset import Hdf5Dataset
from .disk import DataError
from .formats import StoredFile
from .hdf5 import Hdf5File, scales_of
from .source import Dataset
from .storage import Storage
from .structure import HDF5_FAULTS, Field, is_text

__all__ = [
    "BOUNDS",
    "NO_VARIABLE",
    "SAMPLE",
    "SOURCES",
    "STEP",
    "Axes",
    "Hdf5Surroundings",
    "Surroundings",
    "Variable",
    "mappings_of",
    "mark",
    "surroundings_of",
    "write_coordinates",
    "write_sources",
]

#: Datasets of :func:`write_sources`.
SOURCES = ("source_file", "source_sample")
#: Scale of an axis of times that are predicted from one sample.
STEP = "step"

_AHEAD = -2  # number of the axis of STEP, in addition to those of `Axes`
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
        Data set whose method ``source(index)`` returns both; without this method, all samples are those of the file
        ``dataset.path``.
    samples
        Indices in the data set, in the order of the predictions.
    """
    source = getattr(dataset, "source", lambda index: (str(dataset.path), index))
    sources = [source(int(index)) for index in samples]
    # As bytes, because a file name need not be valid UTF-8.
    names = np.array([os.fsencode(name) for name, _ in sources], object)
    file.create_dataset(SOURCES[0], data=names, dtype=h5py.string_dtype())
    file[SOURCES[1]] = np.array([number for _, number in sources], np.int64)


def write_coordinates(
    file: h5py.File, dataset: Dataset, outputs: Mapping[str, tuple[int, ...]], allow_external: bool = False
) -> list[str]:
    """Write the coordinates of all samples, and attach them to the predictions on the same grid. Local.

    The coordinates are those of the first input with the grid of a prediction, else of the first input. If axes of this
    input have dimension scales, all axes in `file` get one, so that netCDF programs can read the file.

    Parameters
    ----------
    file
        File, open for writing. It has the datasets of predictions, and others of ``(N,)``; their first axes are
        samples.
    dataset
        Samples of files (:class:`Hdf5Dataset`, of any format). Other data sets have no coordinates.
    outputs
        Shape ``(*spatial, C)`` of a sample, by the name of the dataset of predictions. In `file`, an axis of times with
        the scale :data:`STEP` may follow that of the samples.
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
    """Return the name of the first input with the grid of an output, else that of the first input. Inputs that all
    samples share are left out.
    """
    inputs = [name for name, field in fields.items() if not field.is_target and not field.static]
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
        Number of samples, of all files, that have predictions.
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
            # Arrays per sample may be large: they are not kept here, but copied file by file when they are written.
            if variable.axes == (SAMPLE,) or not (variable.is_of_samples or variable.mapping):
                value = self.read(name, 0, file)
                if value is not None:
                    self.values[name] = value

    def _join(self, other: Surroundings, part: Hdf5Dataset, file: StoredFile) -> None:
        for name in other.variables.keys() - self.variables.keys() - self.faults.keys():
            self.faults[name] = f"{self._parts[0].path} has none"
        # Only names of dimensions on which all files agree.
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
            # `result_type` would drop the metadata with which h5py marks a string.
            dtype = mine.dtype if mine.dtype == theirs.dtype else np.result_type(mine.dtype, theirs.dtype)
            self.variables[name] = replace(mine, attributes=same, dtype=dtype)
            self._paths[name].append(theirs.path)
            if name in self.values:
                self._compare(name, file)

    def _compare(self, name: str, file: StoredFile) -> None:
        """Append the values of a variable along samples from `file`, the next one; compare those of other variables."""
        value = self.read(name, len(self._paths[name]) - 1, file)
        if value is None:
            return
        if self.variables[name].is_of_samples:
            self._pieces.setdefault(name, [self.values[name]]).append(value)
        elif not _equal(self.values[name], value):
            del self.values[name]  # it differs, so it is written per sample

    def read(self, name: str, number: int, opened: StoredFile | None = None) -> NDArray[Any] | None:
        """Read a variable from file `number`, for the samples that have predictions. If it cannot be read, leave it out
        and return None.
        """
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
        for gone in [name, *(other for other, variable in self.variables.items() if variable.bounds_of == name)]:
            del self.variables[gone]
            self.values.pop(gone, None)

    def is_per_sample(self, name: str) -> bool:
        """Return whether a variable without an axis of samples differs between files."""
        variable = self.variables[name]
        return not (name in self.values or variable.is_of_samples or variable.mapping)

    @property
    def ranges(self) -> list[slice]:
        """Range of the samples of each file among those that have predictions."""
        ends = np.cumsum([0, *map(len, self._rows)]).tolist()
        return [slice(*ends[k : k + 2]) for k in range(len(self._rows))]


def _difference(mine: Variable, theirs: Variable) -> str:
    """Return the reason why variables of two files cannot be joined; empty if they can."""
    fixed = [[n for axis, n in zip(variable.axes, variable.shape) if axis != SAMPLE] for variable in (mine, theirs)]
    if mine.axes != theirs.axes or fixed[0] != fixed[1]:
        return f"its shape is {theirs.shape}, not {mine.shape}"
    if mine.dtype != theirs.dtype and any(variable.dtype.kind not in "iuf" for variable in (mine, theirs)):
        return f"its type is {theirs.dtype}, not {mine.dtype}"
    if mark(mine.value) != mark(theirs.value):
        return f"it is {theirs.value}, not {mine.value}"
    # Of a grid mapping all attributes must agree, because it has no other contents.
    keys = {*mine.attributes, *theirs.attributes} if mine.mapping else _MEANING
    other = [key for key in keys if mark(mine.attributes.get(key)) != mark(theirs.attributes.get(key))]
    return f"it has another {min(other)!r}" if other else ""


def _equal(mine: NDArray[Any], theirs: NDArray[Any]) -> bool:
    # Only for floats: `equal_nan` raises TypeError for strings.
    return bool(np.array_equal(mine, theirs, equal_nan=mine.dtype.kind == "f" == theirs.dtype.kind))


def _base(path: Any) -> str:
    return posixpath.basename(path) if isinstance(path, str) else ""


# -- the file of predictions -----------------------------------------------------------------------


class _CoordinateWriter:
    """Writer of coordinates into a file of predictions. Local."""

    def __init__(self, file: h5py.File, joined: _JoinedVariables, outputs: Mapping[str, tuple[int, ...]]) -> None:
        self._file, self._joined = file, joined
        shapes = {name: getattr(item, "shape", None) for name, item in file.items() if name != STEP}
        self._of_samples = [name for name, shape in shapes.items() if shape == (joined.samples,)]
        self._axes = {name: _axes_of_output(shape, joined.spatial) for name, shape in outputs.items()}
        for name, (first, *others) in self._axes.items():
            if file[name].ndim > len(others) + 1:
                # Several times per sample, from a rollout: one more axis after that of the samples.
                self._axes[name] = (first, _AHEAD, *others)
        self._dimensions = dict[int, str]()  # by axis: scales without coordinates

    def write(self) -> None:
        """Write all variables, then attach them."""
        self._choose()
        self._write_values()
        for name in self._axes:
            self._name_in_attributes(name)
        # NetCDF programs need a scale on every axis; without any scale, labels name the dimensions.
        if self._joined.has_scales or self._scales:
            self._attach()
            return
        for name, axes in self._axes.items():
            for k, axis in enumerate(axes):
                if axis in self._joined.dimensions:
                    self._file[name].dims[k].label = self._joined.dimensions[axis]

    def _choose(self) -> None:
        """Leave out variables whose axes no prediction has or whose name is in use, and bounds that are per sample
        where their coordinate is not, or the reverse.
        """
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
            dataset = self._file.create_dataset(name, tuple(shape), variable.dtype)
            if name in joined.values:
                dataset[()] = joined.values[name]
            elif variable.mapping:
                dataset[()] = variable.value
            else:
                self._fill(dataset, name)
        # Left out by `_fill`, because a file could not be read; or bounds of such a variable.
        for name in set(written) - joined.variables.keys():
            if name in self._file:
                del self._file[name]
        for name, variable in joined.variables.items():
            for key, value in variable.attributes.items():
                if key not in BOUNDS:
                    self._file[name].attrs[key] = value
                # Bounds are written next to their coordinate, and may have been left out.
                elif _base(value) in joined.variables:
                    self._file[name].attrs[key] = _base(value)

    def _fill(self, dataset: h5py.Dataset, name: str) -> None:
        """Write the values of a variable to `dataset`, one file after the other."""
        joined = self._joined
        # A variable that differs between files has a new first axis, that of the samples.
        at = 0 if joined.is_per_sample(name) else joined.variables[name].axes.index(SAMPLE)
        for number, samples in enumerate(joined.ranges):
            values = joined.read(name, number)
            if values is None:
                return
            dataset[(slice(None),) * at + (samples,)] = values

    def _scales_of(self, axis: int | None) -> list[str]:
        """Return the names of the written scales of an axis."""
        if axis is None or axis == _AHEAD:
            return []
        shape = (self._joined.samples if axis == SAMPLE else self._joined.spatial[axis],)
        names = [name for name in self._joined.scales.get(axis, ()) if name in self._joined.variables]
        # A scale that differs between files was written per sample, with two axes, and cannot be attached.
        return [name for name in names if self._file[name].shape == shape]

    @property
    def _scales(self) -> set[str]:
        return {name for axis in self._joined.scales for name in self._scales_of(axis)}

    def _name_in_attributes(self, output: str) -> None:
        """Write the CF attributes that name the grid mapping, and the coordinates that are not dimension scales."""
        joined, attributes = self._joined, self._file[output].attrs
        has = [name for name, variable in joined.variables.items() if self._has(output, variable)]
        variables = [joined.variables[name] for name in has if name not in self._scales]
        others = [variable.name for variable in variables if not (variable.mapping or variable.bounds_of)]
        if others:
            attributes["coordinates"] = " ".join(others)
        mappings = mappings_of(joined.mapping)
        # Names without folders: the variables of all groups are written to the root group.
        if mappings and all(_base(path) in has for path in mappings):
            attributes["grid_mapping"] = " ".join(map(posixpath.basename, joined.mapping.split()))

    def _attach(self) -> None:
        """Attach a dimension scale to every axis."""
        joined, scales = self._joined, self._scales
        for name in scales:
            self._file[name].make_scale(name)
        # Every dataset of the file: predictions, numbers per sample such as the sources, and the other variables.
        datasets = {**self._axes, **dict.fromkeys(self._of_samples, (SAMPLE,))}
        for name, variable in joined.variables.items():
            if name not in scales:
                datasets[name] = (SAMPLE, *variable.axes) if joined.is_per_sample(name) else variable.axes
        for name, axes in datasets.items():
            for k, axis in enumerate(axes):
                if axis == _AHEAD:  # it has its scale
                    continue
                for scale in self._scales_of(axis) or [self._dimension(name, axis, k)]:
                    self._file[name].dims[k].attach_scale(self._file[scale])

    def _dimension(self, name: str, axis: int | None, k: int) -> str:
        """Return the name of the dimension scale of an axis without coordinates; create the scale at the first use of
        the axis.

        The axis is axis `k` of the dataset `name`.
        """
        size = self._file[name].shape[k]
        last = f"{name}_channel" if k + 1 == self._file[name].ndim else f"{name}_{k}"
        if axis is None:
            names = [last]
        elif axis in self._dimensions:
            return self._dimensions[axis]
        else:
            # SAMPLE is -1, so `axis + 1` counts from the samples.
            usual = ("sample", *_SPATIAL[-len(self._joined.spatial) :])[axis + 1]
            names = [self._joined.dimensions.get(axis, usual), usual, last]
        chosen = next(name for name in chain(names, (f"{last}_{n}" for n in count(2))) if name not in self._file)
        # As the netCDF-4 library writes a dimension without a variable: a big-endian float and this name.
        self._file.create_dataset(chosen, (size,), ">f4").make_scale(f"{NO_VARIABLE} {size:10d}")
        if axis is not None:
            self._dimensions[axis] = chosen
        return chosen


def _axes_of_output(shape: tuple[int, ...], spatial: tuple[int, ...]) -> Axes:
    """Return the axes of predictions ``(N, *shape)``: that of the samples, spatial axes with the extent of the samples,
    and None for others.

    >>> _axes_of_output((64, 32, 3), (64, 64)), _axes_of_output((10,), (64, 64))
    ((-1, 0, None, None), (-1, None))
    """
    same_rank = len(shape) == len(spatial) + 1
    return (SAMPLE, *(k if same_rank and n == spatial[k] else None for k, n in enumerate(shape[:-1])), None)


def _texts(items: Sequence[object]) -> str:
    return ", ".join(dict.fromkeys(map(str, items)))


SAMPLE = -1
"""The axis of samples; spatial axes have the numbers 0, 1, 2, other axes None."""
Axes = tuple[int | None, ...]

NO_VARIABLE = "This is a netCDF dimension but not a netCDF variable."
"""Beginning of the name of a dimension scale that has no numbers."""
BOUNDS = ("bounds", "climatology")
"""Attributes of a coordinate that name the bounds of its cells."""
#: Internal attributes of libraries, and attributes that name datasets which are not copied.
_INTERNAL = (
    *("CLASS", "NAME", "REFERENCE_LIST", "DIMENSION_LIST", "DIMENSION_LABELS", "_Netcdf4Dimid", "_Netcdf4Coordinates"),
    *("_NCProperties", "_nc3_strict", "coordinates", "formula_terms", "ancillary_variables"),
)
_MOST, _LONGEST = 64, 60_000  # limits: attributes of a dataset, and bytes of an attribute


@dataclass(frozen=True)
class Variable:
    """A dataset that belongs to an input, such as a coordinate.

    Attributes
    ----------
    name
        Name in the file of predictions.
    path
        Name in its own file.
    axes
        Axes of the samples to which its axes correspond.
    shape, dtype
        Shape and dtype, as stored.
    attributes
        All attributes that other programs read.
    bounds_of
        Name of the coordinate of which this is the bounds; else empty.
    mapping
        Whether it is a grid mapping, in which only the attributes matter.
    value
        Number stored in a grid mapping.
    """

    name: str
    path: str
    axes: Axes
    shape: tuple[int, ...]
    dtype: np.dtype
    attributes: dict[str, Any] = field(default_factory=dict)
    bounds_of: str = ""
    mapping: bool = False
    value: Any = 0

    @property
    def is_of_samples(self) -> bool:
        """Whether one of its axes is the sample axis."""
        return SAMPLE in self.axes


@dataclass
class Surroundings:
    """The variables that describe an input of one open file: coordinates, bounds, grid mapping. Local.

    Attributes
    ----------
    sizes
        Extents of the samples of the file, by axis.
    scales
        Names of the dimension scales, by axis; the first one of an axis names the dimension.
    dimensions
        Names of dimensions, by axis.
    variables, faults
        By name: the variables, and the reasons why others cannot be used.
    mapping
        Attribute ``grid_mapping`` of the input.
    has_scales
        Whether some axis has a dimension scale.
    """

    sizes: dict[int, int] = field(default_factory=dict)
    scales: dict[int, list[str]] = field(default_factory=dict)
    dimensions: dict[int, str] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    mapping: str = ""
    has_scales: bool = False


def surroundings_of(file: StoredFile, own: Field, allow_external: bool) -> Surroundings:
    """Return the coordinates of the array of a field. Local.

    Those of HDF5 files are :class:`Hdf5Surroundings`. In other formats they are the scales of the array's axes, the
    arrays that its attribute ``coordinates`` names (if their scales are among those of the axes), and the arrays of the
    file that describe samples (`StoredFile.of_samples`).

    `allow_external` is that of :class:`Hdf5Dataset`.
    """
    if isinstance(file, Hdf5File):
        return Hdf5Surroundings(file.file, file.path, own, allow_external)
    array = file.find(own.dataset)
    axes, surroundings = _axes_of(own, array.ndim), Surroundings()
    surroundings.sizes = {axis: n for axis, n in zip(axes, array.shape) if axis is not None}
    attached = [(axis, scale) for axis, scales in zip(axes, array.scales) for scale in scales]
    surroundings.has_scales = bool(attached)

    def add(path: str, axes: Axes) -> None:
        other = file.get(path)
        if other is None or other.dtype.kind not in "iufb":
            surroundings.faults[posixpath.basename(path)] = "it is missing" if other is None else "it has no numbers"
            return
        name, attributes = posixpath.basename(path), _attributes(other.attrs)
        surroundings.variables[name] = Variable(name, path, axes, other.shape, other.dtype, attributes)

    for axis, scale in attached:
        if axis is not None:
            surroundings.scales.setdefault(axis, []).append(posixpath.basename(scale.name))
            surroundings.dimensions[axis] = posixpath.basename(scale.name)
            add(scale.name, (axis,))
    names = array.attrs.get("coordinates")
    for name in names.split() if isinstance(names, str) else ():
        path = posixpath.join(posixpath.dirname(own.first_dataset), name)
        other = file.get(path)
        scales = [] if other is None else other.scales
        # The first scale of each axis names the dimension.
        theirs = [next((axis for axis, own in attached if scales and own == scales[0]), None) for scales in scales]
        if theirs and None not in theirs and name not in surroundings.variables:
            add(path, tuple(theirs))
    for path in file.of_samples:
        add(path, (SAMPLE, *(None for _ in file.find(path).shape[1:])))
    return surroundings


class Hdf5Surroundings(Surroundings):
    """The variables that describe an input of an open HDF5 file. Local."""

    def __init__(self, file: h5py.File, source: Path, own: Field, allow_external: bool) -> None:
        super().__init__()
        self._inputs = file[own.first_dataset]
        self._file = self._inputs.file  # another file, if the input is a link into it
        self._storage = Storage(source, allow_external, texts=True)
        self._axes = _axes_of(own, self._inputs.ndim)
        self.sizes = {axis: n for axis, n in zip(self._axes, self._inputs.shape) if axis is not None}
        self._attached = [(axis, s) for axis, scales in zip(self._axes, scales_of(self._inputs)) for s in scales]
        self.has_scales = bool(self._attached)
        self.mapping = self._text("grid_mapping")
        for axis, label in zip(self._axes, _labels_of(self._inputs)):
            if axis is not None:  # predictions have other channels than the input
                self._add_scales(axis, label)
        for path in self._text("coordinates").split():
            self._add(path, self._axes_by_scale_or_shape)
        # After the coordinates, because bounds have the axes of their coordinate.
        for of in list(self.variables.values()):
            for key in BOUNDS:
                if isinstance(of.attributes.get(key), str):
                    self._add(of.attributes[key], partial(_axes_of_bounds, of=of), of.name)
        for path in mappings_of(self.mapping):
            self._add_mapping(path)

    def _text(self, name: str) -> str:
        """Return a string attribute of the input, else of the file; "" if neither has it."""
        return _text(self._inputs, name) or _text(self._file, name)

    def _add_scales(self, axis: int, label: str) -> None:
        """Add the scales of an axis; without scales, the dataset named by the axis label."""
        attached = [scale for own, scale in self._attached if own == axis]
        # A dimension of netCDF without a variable has a name, but no numbers.
        paths = [scale.name for scale in attached if not _text(scale, "NAME").startswith(NO_VARIABLE)]
        if attached or label:
            self.dimensions[axis] = posixpath.basename(attached[0].name if attached else label)
        if not attached and label and self._find(label) is not None:
            paths = [label]
        for path in paths:
            self._add(path, lambda scale: self._axes_of_scale(scale, axis))
        self.scales[axis] = [posixpath.basename(path) for path in paths]

    def _axes_of_scale(self, scale: h5py.Dataset, axis: int) -> Axes:
        if scale.shape != (self.sizes[axis],):
            raise DataError(f"its shape is {scale.shape}, that of its axis ({self.sizes[axis]},)")
        return (axis,)

    def _axes_by_scale_or_shape(self, dataset: h5py.Dataset) -> Axes:
        """Return the axes of a dataset: by dimension scales shared with the input, else by its shape."""
        own = scales_of(dataset)
        if own and all(own):
            fits = [tuple(next((axis for axis, s in self._attached if s == scales[0]), None) for scales in own)]
        else:
            fits = list(_in_order(dataset.shape, list(zip(self._axes, self._inputs.shape))))
        if len(fits) != 1:
            raise DataError(f"its shape {dataset.shape} fits {'several' if fits else 'no'} axes of the samples")
        if None in fits[0]:
            raise DataError("it has an axis that predictions lack")
        return fits[0]

    def _add(self, path: str, axes_of: Callable[[h5py.Dataset], Axes], bounds_of: str = "") -> None:
        """Add the dataset at `path`, whose axes `axes_of` returns, or record why it cannot be used."""
        name = posixpath.basename(path)
        if name in self.variables:
            return
        try:
            source = self._find(path)
            if source is None or not self._storage.check(self._file, source):
                raise DataError("it is missing")
            at = self._file[source]
            if at.shape is None:
                raise DataError("it is empty")
            attributes = _attributes(at.attrs)
            self.variables[name] = Variable(name, source, axes_of(at), at.shape, at.dtype, attributes, bounds_of)
        except (DataError, *HDF5_FAULTS) as error:
            self.faults[name] = one_line(error)

    def _add_mapping(self, path: str) -> None:
        name = posixpath.basename(path)
        with ExitStack() as stack:
            try:
                mapping = self._find(path)
                # Not `_storage.check`: a grid mapping may have any type, and its attributes suffice.
                at = None if mapping is None else self._storage.follow(self._file, mapping, stack)
                if not isinstance(at, h5py.Dataset):
                    raise DataError("it is missing")
                value = _number(at)
                self.variables[name] = Variable(name, "", (), (), value.dtype, _attributes(at.attrs), "", True, value)
            except (DataError, *HDF5_FAULTS) as error:
                self.faults[name] = one_line(error)

    def _find(self, path: str) -> str | None:
        """Return the full path of a dataset that an attribute of the input names, in the group of the input or in a
        parent group; None if there is none.
        """
        group = posixpath.dirname(self._inputs.name)
        while True:
            there = posixpath.join(group, path)
            if _has_link(self._file, there):
                return there
            if group == "/":
                return None
            group = posixpath.dirname(group)


def _labels_of(dataset: h5py.Dataset) -> list[str]:
    """Return the labels of the axes; empty strings for axes without one."""
    labels = dataset.attrs.get("DIMENSION_LABELS")
    if not isinstance(labels, np.ndarray) or labels.shape != (dataset.ndim,):
        return [""] * dataset.ndim
    texts = [label.decode("utf-8", "replace") if isinstance(label, bytes) else label for label in labels.tolist()]
    return [text if is_text(text) else "" for text in texts]


def _number(dataset: h5py.Dataset) -> Any:
    """Return the number in a scalar dataset; 0 for strings, arrays and numbers stored in other files."""
    # The attributes make a grid mapping: its number is copied only if it is a plain scalar in this file.
    if dataset.shape != () or dataset.is_virtual or dataset.external or dataset.dtype.kind not in "iuf":
        return np.int32(0)
    return dataset[()]


def mappings_of(text: str) -> list[str]:
    """Return the names in an attribute ``grid_mapping``, which may list the coordinates of each mapping.

    >>> mappings_of("crs"), mappings_of("utm: x y wgs84: lat lon")
    (['crs'], ['utm', 'wgs84'])
    """
    words = text.split()
    return [word[:-1] for word in words if word.endswith(":")] or words


def _has_link(file: h5py.File, path: str) -> bool:
    """Return whether a file has a link of this full name. Opens no other file."""
    group: Any = file["/"]
    *folders, name = path.strip("/").split("/")
    for folder in folders:
        # Soft and external links are not followed: they may lead into another file.
        group = group[folder] if isinstance(group.get(folder, getlink=True), h5py.HardLink) else None
        if not isinstance(group, h5py.Group):
            return False
    return group.get(name, getlink=True) is not None


def _axes_of_bounds(bounds: h5py.Dataset, of: Variable) -> Axes:
    if bounds.shape[:-1] != of.shape:
        raise DataError(f"its shape is {bounds.shape}, that of {of.name} {of.shape}")
    return (*of.axes, None)


def _axes_of(own: Field, ndim: int) -> Axes:
    spatial = tuple(range(len(own.shape) - 1))
    if own.kind == "channels first":
        return (SAMPLE, None, *spatial)
    # Without an axis of channels, the last one is cut off.
    return (SAMPLE, *spatial, None)[:ndim]


def _in_order(shape: Sequence[int], sizes: Sequence[tuple[int | None, int]]) -> Iterator[Axes]:
    """Yield the tuples of axes, in order, that have the extents of `shape`; `sizes` are the axes with their extents.

    >>> list(_in_order((4, 6), [(-1, 9), (0, 4), (1, 6)])), list(_in_order((4,), [(0, 4), (1, 4)]))
    ([(0, 1)], [(0,), (1,)])
    """
    if not shape:
        yield ()
    for k, (axis, size) in enumerate(sizes if shape else ()):
        if size == shape[0]:
            yield from ((axis, *rest) for rest in _in_order(shape[1:], sizes[k + 1 :]))


def _attributes(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes that other programs read, as stored, except those of unusual types."""
    names = [name for name in attrs if name not in _INTERNAL and is_text(name)][:_MOST]
    values = {name: _attribute(attrs, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _attribute(attrs: Mapping[str, Any], name: str) -> Any:
    """Return an attribute if it is a string, numbers or strings, and not too long; otherwise None."""
    try:
        value = attrs.get(name)
    except HDF5_FAULTS:
        return None
    if isinstance(value, str | bytes):
        return value if len(value) <= _LONGEST and (is_text(value) or isinstance(value, bytes)) else None
    if not isinstance(value, np.ndarray | np.generic) or value.nbytes > _LONGEST:
        return None
    if value.dtype.kind == "O":
        return value if all(is_text(text) or isinstance(text, bytes) for text in value.ravel()) else None
    return value if value.dtype.kind in "iufbS" else None


def _text(item: h5py.HLObject, name: str) -> str:
    """Return an attribute that is a string; "" if it is missing or of another type."""
    value = _attribute(item.attrs, name)
    value = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return value if isinstance(value, str) else ""


def mark(value: Any) -> Any:
    """Return a value that is equal for equal attributes or arrays; NaN equals NaN."""
    if isinstance(value, np.ndarray | np.generic):
        # Bytes, because NaN differs from itself; those of an object array are only addresses.
        plain = value.tolist() if value.dtype.kind == "O" else value.tobytes()
        return value.dtype.str, value.shape, plain
    return value
