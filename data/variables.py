"""Variables around an input of a file: coordinates of its samples and axes, their bounds, and grid mappings."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from halograd.documents import one_line

from .disk import DataError
from .formats import StoredFile
from .hdf5 import Hdf5File, scales_of
from .storage import Storage
from .structure import HDF5_FAULTS, Field, is_text

__all__ = [
    "BOUNDS",
    "NO_VARIABLE",
    "SAMPLE",
    "Axes",
    "Hdf5Surroundings",
    "Surroundings",
    "Variable",
    "mappings_of",
    "mark",
    "surroundings_of",
]

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
        Axes of the samples that its axes correspond to.
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
    """The variables around an input of one open file. Local.

    Attributes
    ----------
    sizes
        Extents of the samples of the file, by axis.
    scales
        Names of the dimension scales of an axis; the first one names the dimension.
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
    """Return the coordinates around the array of a field: the scales of its axes, those in its attribute
    ``coordinates``, whose scales are scales of its axes too, and what the file has of each sample. Local.

    `allow_external` is that of :class:`Hdf5Dataset`.
    """
    if isinstance(file, Hdf5File):
        return Hdf5Surroundings(file.file, file.path, own, allow_external)
    array = file.find(own.dataset)
    axes, found = _axes_of(own, array.ndim), Surroundings()
    found.sizes = {axis: n for axis, n in zip(axes, array.shape) if axis is not None}
    attached = [(axis, scale) for axis, scales in zip(axes, array.scales) for scale in scales]
    found.has_scales = bool(attached)

    def add(path: str, axes: Axes) -> None:
        other = file.get(path)
        if other is None or other.dtype.kind not in "iufb":
            found.faults[posixpath.basename(path)] = "it is missing" if other is None else "it has no numbers"
            return
        name, attributes = posixpath.basename(path), _attributes(other.attrs)
        found.variables[name] = Variable(name, path, axes, other.shape, other.dtype, attributes)

    for axis, scale in attached:
        if axis is not None:
            found.scales.setdefault(axis, []).append(posixpath.basename(scale.name))
            found.dimensions[axis] = posixpath.basename(scale.name)
            add(scale.name, (axis,))
    names = array.attrs.get("coordinates")
    for name in names.split() if isinstance(names, str) else ():
        path = posixpath.join(posixpath.dirname(own.first_dataset), name)
        other = file.get(path)
        scales = [] if other is None else other.scales
        theirs = [next((axis for axis, own in attached if scales and own == scales[0]), None) for scales in scales]
        if theirs and None not in theirs and name not in found.variables:
            add(path, tuple(theirs))
    for path in file.of_samples:
        add(path, (SAMPLE, *(None for _ in file.find(path).shape[1:])))
    return found


class Hdf5Surroundings(Surroundings):
    """The variables around an input of an open HDF5 file. Local."""

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
        for of in list(self.variables.values()):
            for key in BOUNDS:
                if isinstance(of.attributes.get(key), str):
                    self._add(of.attributes[key], partial(_axes_of_bounds, of=of), of.name)
        for path in mappings_of(self.mapping):
            self._add_mapping(path)

    def _text(self, name: str) -> str:
        """Return a text attribute of the input, or else of the file."""
        return _text(self._inputs, name) or _text(self._file, name)

    def _add_scales(self, axis: int, label: str) -> None:
        """Add the scales of an axis; without scales, the dataset named by the axis label."""
        attached = [scale for own, scale in self._attached if own == axis]
        paths = [scale.name for scale in attached if not _text(scale, "NAME").startswith(NO_VARIABLE)]
        if attached or label:
            self.dimensions[axis] = posixpath.basename(attached[0].name if attached else label)
        if not attached and label and self._find(label) is not None:
            paths = [label]
        for path in paths:
            self._add(path, lambda found: self._axes_of_scale(found, axis))
        self.scales[axis] = [posixpath.basename(path) for path in paths]

    def _axes_of_scale(self, found: h5py.Dataset, axis: int) -> Axes:
        if found.shape != (self.sizes[axis],):
            raise DataError(f"its shape is {found.shape}, that of its axis ({self.sizes[axis]},)")
        return (axis,)

    def _axes_by_scale_or_shape(self, found: h5py.Dataset) -> Axes:
        """Return the axes of a dataset: by dimension scales shared with the input, else by its shape."""
        own = scales_of(found)
        if own and all(own):
            fits = [tuple(next((axis for axis, s in self._attached if s == scales[0]), None) for scales in own)]
        else:
            fits = list(_in_order(found.shape, list(zip(self._axes, self._inputs.shape))))
        if len(fits) != 1:
            raise DataError(f"its shape {found.shape} fits {'several' if fits else 'no'} axes of the samples")
        if None in fits[0]:
            raise DataError("it has an axis that predictions lack")
        return fits[0]

    def _add(self, path: str, axes_of: Callable[[h5py.Dataset], Axes], bounds_of: str = "") -> None:
        """Add the dataset at `path`, or record why it cannot be used."""
        name = posixpath.basename(path)
        if name in self.variables:
            return
        try:
            found = self._find(path)
            if found is None or not self._storage.check(self._file, found):
                raise DataError("it is missing")
            at = self._file[found]
            if at.shape is None:
                raise DataError("it is empty")
            attributes = _attributes(at.attrs)
            self.variables[name] = Variable(name, found, axes_of(at), at.shape, at.dtype, attributes, bounds_of)
        except (DataError, *HDF5_FAULTS) as error:
            self.faults[name] = one_line(error)

    def _add_mapping(self, path: str) -> None:
        name = posixpath.basename(path)
        with ExitStack() as stack:
            try:
                found = self._find(path)
                at = None if found is None else self._storage.follow(self._file, found, stack)
                if not isinstance(at, h5py.Dataset):
                    raise DataError("it is missing")
                value = _number(at)
                self.variables[name] = Variable(name, "", (), (), value.dtype, _attributes(at.attrs), "", True, value)
            except (DataError, *HDF5_FAULTS) as error:
                self.faults[name] = one_line(error)

    def _find(self, path: str) -> str | None:
        """Return the full path of a dataset that an attribute of the input names: in its group, or in a parent group.
        """
        group = posixpath.dirname(self._inputs.name)
        while True:
            there = posixpath.join(group, path)
            if _has_link(self._file, there):
                return there
            if group == "/":
                return None
            group = posixpath.dirname(group)


def _labels_of(found: h5py.Dataset) -> list[str]:
    """Return the labels of the axes; empty texts for axes without one."""
    given = found.attrs.get("DIMENSION_LABELS")
    if not isinstance(given, np.ndarray) or given.shape != (found.ndim,):
        return [""] * found.ndim
    texts = [one.decode("utf-8", "replace") if isinstance(one, bytes) else one for one in given.tolist()]
    return [one if is_text(one) else "" for one in texts]


def _number(found: h5py.Dataset) -> Any:
    """Return the number in a scalar dataset; 0 for texts, arrays and numbers stored in other files."""
    if found.shape != () or found.is_virtual or found.external or found.dtype.kind not in "iuf":
        return np.int32(0)
    return found[()]


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
        group = group[folder] if isinstance(group.get(folder, getlink=True), h5py.HardLink) else None
        if not isinstance(group, h5py.Group):
            return False
    return group.get(name, getlink=True) is not None


def _axes_of_bounds(found: h5py.Dataset, of: Variable) -> Axes:
    if found.shape[:-1] != of.shape:
        raise DataError(f"its shape is {found.shape}, that of {of.name} {of.shape}")
    return (*of.axes, None)


def _axes_of(own: Field, ndim: int) -> Axes:
    spatial = tuple(range(len(own.shape) - 1))
    if own.kind == "channels first":
        return (SAMPLE, None, *spatial)
    return (SAMPLE, *spatial, None)[:ndim]


def _in_order(shape: Sequence[int], sizes: Sequence[tuple[int | None, int]]) -> Iterator[Axes]:
    """Yield the tuples of axes, in order, that have the extents of `shape`.

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
    found = {name: _attribute(attrs, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _attribute(attrs: Mapping[str, Any], name: str) -> Any:
    """Return an attribute that is a text, numbers or texts; else None."""
    try:
        value = attrs.get(name)
    except HDF5_FAULTS:
        return None
    if isinstance(value, str | bytes):
        return value if len(value) <= _LONGEST and (is_text(value) or isinstance(value, bytes)) else None
    if not isinstance(value, np.ndarray | np.generic) or value.nbytes > _LONGEST:
        return None
    if value.dtype.kind == "O":
        return value if all(is_text(one) or isinstance(one, bytes) for one in value.ravel()) else None
    return value if value.dtype.kind in "iufbS" else None


def _text(item: h5py.HLObject, name: str) -> str:
    """Return a text attribute; "" if it is missing or not a text."""
    value = _attribute(item.attrs, name)
    value = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return value if isinstance(value, str) else ""


def mark(value: Any) -> Any:
    """Return a value that is equal for equal attributes or arrays; NaN equals NaN."""
    if isinstance(value, np.ndarray | np.generic):
        plain = value.tolist() if value.dtype.kind == "O" else value.tobytes()
        return value.dtype.str, value.shape, plain
    return value
