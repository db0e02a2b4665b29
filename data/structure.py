"""Structure of a file: datasets, the meaning of their axes, and attributes. It is checked before data are read."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from dataclasses import field as attribute
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from halograd.documents import one_line, shown

from .chunks import Chunks
from .disk import DataError
from .formats import AND, Channels, StoredArray, StoredFile
from .packing import Packing
from .storage import check_files

__all__ = [
    "HDF5_FAULTS",
    "OF_NUMBERS",
    "Field",
    "Kind",
    "Structure",
    "examine",
    "is_text",
    "looking_into",
    "plain_attributes",
]

_log = logging.getLogger(__name__)

HDF5_FAULTS = (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError, MemoryError)
"""Errors of h5py for files that are damaged, or hold types that NumPy does not have."""

#: Attributes that describe the numbers of a dataset. Those of a target also hold for its prediction.
OF_NUMBERS = (
    *("units", "long_name", "standard_name", "description", "comment"),
    *("channel_names", "flag_values", "flag_meanings"),
)
#: Largest numbers of attributes of a file, of characters of a string and of elements of a list: more are data.
_MOST, _LONGEST, _ITEMS = 64, 8192, 256

Kind = Literal["channels last", "channels first", "no channels", "vector"]
"""Storage order of a dataset: ``(N, *spatial, C)``, ``(N, C, *spatial)``, ``(N, *spatial)`` or ``(N, K)``."""

_LAYOUTS: dict[str, Kind] = {
    **dict.fromkeys(("NHWC", "NWC", "NDHWC"), "channels last"),
    **dict.fromkeys(("NCHW", "NCW", "NCDHW"), "channels first"),
    **dict.fromkeys(("NHW", "NW", "NDHW"), "no channels"),
}
#: Names, and beginnings of units, of the last two axes of a field on the globe or on a map (CF conventions).
_MAP_AXES = (
    ("Y", ("lat", "latitude", "nlat", "y", "yc", "rlat", "nj", "j"), "degrees_n"),
    ("X", ("lon", "longitude", "nlon", "x", "xc", "rlon", "ni", "i"), "degrees_e"),
)


@dataclass(frozen=True)
class Field:
    """A dataset that becomes one input of a network.

    Attributes
    ----------
    dataset : str
        Name in the file; several names joined by :data:`AND`.
    kind : Kind
        Storage order.
    shape : tuple
        ``(*spatial, C)`` of one sample; a number per sample is ``(1,)``.
    channel_names : list of str
        Names from the attribute ``channel_names``, else ``channel 0``, ...
    is_target : bool
        Whether predictions are compared with it.
    attributes : dict
        Attributes that describe the values: units, long_name, ...
    packing : Packing or None
        Packing of the stored data; None: not packed.
    chunks : Chunks or None
        Chunks that are read as a whole; None: parts are read without their chunks.
    static : str
        Axes in the file of a field that all samples share, out of ``D H W C``: ``"HW"``, or ``"NHW"`` if it has one
        sample. Missing axes have the extent 1, and `kind` has no meaning. Empty: every sample has its own values.
    """

    dataset: str
    kind: Kind
    shape: tuple[int, ...]
    channel_names: list[str]
    is_target: bool = False
    attributes: dict[str, Any] = attribute(default_factory=dict)
    packing: Packing | None = None
    chunks: Chunks | None = None
    static: str = ""

    @property
    def first_dataset(self) -> str:
        """Name of the dataset in the file; of the first one if several are joined."""
        return self.dataset.split(AND)[0]

    def channel(self, k: int) -> str:
        """Return number and name of a channel, for messages."""
        name = self.channel_names[k]
        return name if name == f"channel {k}" else f"channel {k} ({name})"


@dataclass(frozen=True)
class Structure:
    """Content of a file as plain data: one rank examines the file and sends this to the others.

    Attributes
    ----------
    fields : dict
        :class:`Field` by the name of the network's input; targets come last.
    samples : int
    groups : int64 array ``(N,)`` or None
    files : dict
        Other files that hold data of the datasets, with their sizes [B].
    attributes : dict
        Attributes of the file: title, history, ...
    times : float64 array ``(N,)`` or None
        Coordinate of time of the samples, if the first input has one as a dimension scale.
    time_units, calendar : str
        Attributes of that coordinate, as in CF.
    """

    fields: dict[str, Field]
    samples: int
    groups: NDArray[np.int64] | None
    files: dict[str, int]
    attributes: dict[str, Any] = attribute(default_factory=dict)
    times: NDArray[np.float64] | None = None
    time_units: str = ""
    calendar: str = "standard"


def examine(
    file: StoredFile,
    inputs: Mapping[str, str],
    targets: Mapping[str, str],
    layout: str | None,
    unpack: bool = True,
) -> Structure:
    """Examine an open file: axes of its datasets, whether they fit each other, and where they are stored. Local.

    Without `unpack` no field has a packing. The grid of the first input is the reference for other inputs and targets.

    Raises
    ------
    DataError
        A dataset is missing or has a wrong rank or type; inputs and targets do not fit each other; data are missing, or
        outside the folder of the file without permission (:class:`Storage`); the file is damaged.
    """
    path = file.path
    with looking_into(path):
        arrays = {name: file.find(dataset) for name, dataset in {**inputs, **targets}.items()}
        first = arrays[next(iter(inputs))]
        kind = input_kind(first, path, layout)
        fields = {}
        for name, dataset in arrays.items():
            static = "" if dataset is first else static_axes(dataset, first, kind)
            own = kind if dataset is first or static else field_kind(dataset, path, first, kind)
            shape = static_shape(dataset, static, len(shape_of(first, kind)) - 1) if static else shape_of(dataset, own)
            names = channel_names(dataset, path, shape[-1]) if name in inputs else numbered(shape[-1])
            attributes = plain_attributes(dataset.attrs, OF_NUMBERS)
            packing = dataset.packing(f"{path}: {dataset.name!r}") if unpack else None
            # `rows` is the first spatial axis in the file.
            source, rows = {**inputs, **targets}[name], 2 if own == "channels first" else 1
            chunks = None if static else dataset.chunks(rows)
            fields[name] = Field(source, own, shape, names, name in targets, attributes, packing, chunks, static)
        together, times = groups(file, path, len(first)), _times_of(file, first)
        # Last, because finding the arrays has recorded the files that hold their data.
        check_files(path, file.files)
    return Structure(fields, len(first), together, file.files, plain_attributes(file.attrs), *times)


@contextmanager
def looking_into(path: Path) -> Iterator[None]:
    """Convert every error of HDF5 into a DataError of one line."""
    try:
        yield
    except DataError:
        raise
    except HDF5_FAULTS as error:
        raise DataError(
            f"{path}: cannot be examined ({one_line(error)}); the file is damaged, or of types "
            "that NumPy does not have: write it again"
        ) from error


def input_kind(inputs: StoredArray, path: Path, layout: str | None) -> Kind:
    """Return the storage order of the first input: by `layout`, else its attribute ``layout``, else its coordinates.

    Datasets joined by :data:`AND` have the order of :class:`Channels`, whatever `layout` is.
    """
    shape = inputs.shape
    own = layout is None or isinstance(inputs, Channels)
    name = _text(inputs.attrs.get("layout")) if own else layout
    # Each time of a map is a sample, without channels.
    if name is None and _is_map_in_time(inputs):
        name = "NHW"
    # Axes that are not spatial: samples, and channels.
    axes = 1 if isinstance(name, str) and _LAYOUTS.get(name) == "no channels" else 2
    if not axes + 1 <= len(shape) <= axes + 3:
        expected = "(N, *spatial)" if axes == 1 else "(N, *spatial, C) or (N, C, *spatial)"
        raise DataError(f"{path}: {inputs.name!r}: expected {expected} with 1 to 3 spatial axes, got shape {shape}")
    if 0 in shape:
        raise DataError(f"{path}: {inputs.name!r} is empty: expected samples, got shape {shape}; generate some")
    if name is None:
        raise DataError(
            f"{path}: {inputs.name!r} has no attribute 'layout'; set data.layout (in Python: layout=) to 'NHWC' or "
            f"'NCHW', or to 'NHW' without channels: the order of its axes {shape}"
        )
    if not isinstance(name, str) or name not in _LAYOUTS:
        got = one_line(shown(name))
        raise DataError(
            f"{path}: {inputs.name!r}: expected layout 'NHWC' or 'NCHW' ('NHW' without channels), got {got}; correct it"
        )
    return _LAYOUTS[name]


def _is_map_in_time(inputs: StoredArray) -> bool:
    """Return whether the axes are time, latitude and longitude (or y and x) by their coordinates, as in CF."""
    scales = inputs.scales
    if len(scales) != 3 or not all(scales):
        return False
    since = _text(scales[0][0].attrs.get("units"))
    if not (isinstance(since, str) and " since " in since):
        return False
    for (axis, names, degrees), (scale, *_) in zip(_MAP_AXES, scales[1:]):
        units, marked = (_text(scale.attrs.get(key)) for key in ("units", "axis"))
        by_units = isinstance(units, str) and units.lower().startswith(degrees)
        if not (by_units or marked == axis or scale.name.rsplit("/", 1)[-1].lower() in names):
            return False
    return True


def field_kind(dataset: StoredArray, path: Path, inputs: StoredArray, kind: Kind) -> Kind:
    """Return the storage order of a dataset other than the first input: by its attribute ``layout``, else by the grid.
    """
    shape, samples, spatial = dataset.shape, inputs.shape[0], shape_of(inputs, kind)[:-1]
    if len(shape) < 1 or shape[0] != samples:
        raise DataError(
            f"{path}: {inputs.name!r} has {samples} samples, {dataset.name!r} the shape {shape}; expected as many on "
            "the first axis, or a field that all samples share: on the same grid, or with an attribute 'layout' of its "
            "axes ('HW', 'H') or dimension scales (docs/data.md, Fields that all samples share)"
        )
    stated = _text(dataset.attrs.get("layout"))
    if isinstance(stated, str) and stated in _LAYOUTS and len(stated) == len(shape):
        return _LAYOUTS[stated]
    # A number per sample: `shape_of` makes it (1,).
    if len(shape) == 1:
        return "no channels"
    # Before "vector": with one spatial axis, (N, K) is a grid if K divides its extent.
    if len(shape) == len(spatial) + 1 and _is_coarser(shape[1:], spatial):
        return "no channels"
    # If the inputs have no channels, their order does not show that of a target with channels.
    orders: tuple[Kind, ...] = ("channels last", "channels first") if kind == "no channels" else (kind,)
    for order in orders:
        if len(shape) == len(spatial) + 2 and _is_coarser(shape_of(dataset, order)[:-1], spatial):
            return order
    if len(shape) == 2:
        return "vector"
    raise DataError(
        f"{path}: {inputs.name!r} has the grid {spatial}, {dataset.name!r} the shape {shape}; expected that grid (or "
        "one coarser by a whole factor), with or without channels, one row per sample, or an attribute 'layout'"
    )


def static_axes(dataset: StoredArray, inputs: StoredArray, kind: Kind) -> str:
    """Return the axes of a dataset without an axis of samples, a field that all samples share; "" for others.

    The axes follow from its attribute ``layout`` (``"HW"``, ``"HWC"``; ``"H"``, a number per row), else from dimension
    scales that it has in common with the inputs, else from its shape, if its first axis has another extent than that of
    the samples.
    """
    grid = shape_of(inputs, kind)[:-1]
    spatial = "DHW"[-len(grid) :]
    stated = _text(dataset.attrs.get("layout"))
    if isinstance(stated, str) and len(stated) == dataset.ndim and stated and set(stated) <= {*spatial, "C"}:
        return stated if len(set(stated)) == len(stated) else ""
    letters = f"NC{spatial}" if kind == "channels first" else f"N{spatial}C"
    theirs, own = inputs.scales, dataset.scales
    # Only if the samples have a scale: otherwise an axis of samples would not be recognized.
    if own and all(own) and theirs[0]:
        by_scale = [next((a for a, labels in zip(letters, theirs) if scales[0] in labels), "") for scales in own]
        return "".join(by_scale) if all(by_scale) and "N" not in by_scale and dataset.ndim else ""
    if dataset.ndim == 0 or len(dataset) == len(inputs):
        return ""
    shape, axes = dataset.shape, letters[1:]
    letters_by_shape = _axes_by_shape(shape, axes, grid)
    # A whole grid after an extent of 1 is one sample, not one row with channels.
    if shape[0] == 1 and len(shape) > 1 and (not letters_by_shape or tuple(shape[1:]) == tuple(grid)):
        rest = _axes_by_shape(shape[1:], axes, grid)
        return f"N{rest}" if rest else ""
    return letters_by_shape


def _axes_by_shape(shape: Sequence[int], axes: str, grid: Sequence[int]) -> str:
    """Return the axes of a shape that is a grid, with or without channels; "" for others."""
    if _is_grid(shape, grid):
        return axes.replace("C", "")
    where = [n for n, axis in zip(shape, axes) if axis != "C"]
    return axes if len(shape) == len(axes) and _is_grid(where, grid) else ""


def _is_grid(shape: Sequence[int], grid: Sequence[int]) -> bool:
    """Return whether a shape is `grid`, or is coarser by a whole factor on some axes (down to an extent of 1)."""
    return len(shape) == len(grid) and _is_coarser(shape, grid)


def static_shape(dataset: StoredArray, axes: str, rank: int) -> tuple[int, ...]:
    """Return ``(*spatial, C)``, with `rank` spatial axes, of a field that all samples share and whose axes in the file
    are `axes`. Axes that the file lacks have the extent 1.
    """
    extents = dict(zip(axes, dataset.shape))
    return tuple(extents.get(axis, 1) for axis in ("DHW"[-rank:] if rank else "") + "C")


def shape_of(dataset: StoredArray, kind: Kind) -> tuple[int, ...]:
    """Return ``(*spatial, C)`` of one sample of a dataset in this storage order."""
    shape = tuple(dataset.shape)
    if kind == "channels first":
        return (*shape[2:], shape[1])
    return (*shape[1:], 1) if kind == "no channels" else shape[1:]


def channel_names(inputs: StoredArray, path: Path, channels: int) -> list[str]:
    """Return the names of channels from the attribute ``channel_names``, else numbered names."""
    stored = inputs.attrs.get("channel_names")
    if stored is None:
        return numbered(channels)
    names = [_text(n) for n in stored] if isinstance(stored, np.ndarray) and stored.ndim == 1 else []
    if len(names) != channels or not all(isinstance(n, str) for n in names):
        raise DataError(
            f"{path}: {inputs.name!r}: expected {channels} texts as attribute 'channel_names', one per channel, got "
            f"{one_line(shown(stored))}; correct or remove it"
        )
    return names


def numbered(channels: int) -> list[str]:
    """Return the names ``channel 0``, ``channel 1``, ... for this number of channels."""
    return [f"channel {k}" for k in range(channels)]


def groups(file: StoredFile, path: Path, samples: int) -> NDArray[np.int64] | None:
    """Return the numbers in the dataset ``simulation``, ``(N,)``; None without one of this shape. Raises DataError if a
    number is missing or not whole.

    Samples of one simulation belong together.
    """
    dataset = file.get("simulation")
    if dataset is None:
        return None
    if dataset.shape != (samples,):
        _log.warning(
            "%s: dataset 'simulation' is not used, its shape is %s and not (%d,); samples are split one by one",
            path, dataset.shape, samples,
        )  # fmt: skip
        return None
    packing, numbers = dataset.packing(f"{path}: 'simulation'"), dataset.numbers()
    if packing is not None:
        # A view, because `_Unsigned` reads the same bits with the other signedness.
        absent = packing.absent(numbers.view(packing.dtype))
        if packing.scales or absent.any():
            what = "scale_factor or add_offset" if packing.scales else f"a missing value for sample {absent.argmax()}"
            raise DataError(
                f"{path}: dataset 'simulation': expected a whole number per sample, got {what}; correct it, or give it "
                "another name"
            )
        numbers = numbers.view(packing.dtype)
    # From 2**53 on, float64 does not distinguish neighboring integers.
    if numbers.dtype.kind == "f" and not np.all((numbers % 1 == 0) & (np.abs(numbers) < 2.0**53)):
        raise DataError(
            f"{path}: dataset 'simulation': expected a whole number per sample, got others; correct them, or give it "
            "another name"
        )
    return np.asarray(numbers, dtype=np.int64)


def _times_of(file: StoredFile, inputs: StoredArray) -> tuple[NDArray[np.float64] | None, str, str]:
    """Return the scale of the first axis that is a coordinate of time, as in CF (units "hours since ..."), with its
    units and calendar; ``None, "", "standard"`` if there is none.
    """
    for scale in inputs.scales[0]:
        units = _text(scale.attrs.get("units"))
        is_time = isinstance(units, str) and " since " in units and scale.dtype.kind in "iuf"
        with suppress(DataError):  # without its numbers, the order of the samples is that of time
            # By name, because `get` checks the sources of its data, which `scales` does not.
            checked = file.get(scale.name) if is_time and scale.shape == (len(inputs),) else None
            if checked is not None:
                calendar = _text(scale.attrs.get("calendar"))
                return np.asarray(checked.numbers(), np.float64), units, str(calendar or "standard")
    return None, "", "standard"


def _text(value: Any) -> Any:
    """Return a string attribute as a str; other values unchanged."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _is_coarser(grid: Sequence[int], fine: Sequence[int]) -> bool:
    return all(0 < g <= f and f % g == 0 for g, f in zip(grid, fine))


def plain_attributes(attrs: Mapping[str, Any], kept: Collection[str] | None = None) -> dict[str, Any]:
    """Return the attributes of a file or dataset that are strings, numbers or lists of them. Local.

    Parameters
    ----------
    kept
        Names of the attributes; None: all that do not begin with an underscore, as those of libraries do
        (``_NCProperties``).
    """
    try:
        texts = [name for name in attrs if is_text(name)]
        names = [name for name in texts if (name in kept if kept is not None else not name.startswith("_"))]
    except (OSError, RuntimeError, KeyError):
        return {}
    attributes = {name: _attribute(attrs, name) for name in names[:_MOST]}
    return {name: value for name, value in attributes.items() if value is not None}


def _attribute(attrs: Mapping[str, Any], name: str) -> Any:
    """Return an attribute as plain data; None if it has another type or cannot be read.

    An unreadable attribute is no reason to reject the data.
    """
    try:
        value = attrs[name]
    except HDF5_FAULTS:
        return None
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or not 0 < value.size <= _ITEMS:
            return None
        items = [_plain(item) for item in value]
        return None if any(item is None for item in items) else items
    return _plain(value)


def is_text(value: Any) -> bool:
    """Return whether a value is a string that HDF5 can store. Local.

    h5py reads invalid UTF-8 as surrogates, and cannot write them.
    """
    return isinstance(value, str) and "\0" not in value and not any("\ud800" <= sign <= "\udfff" for sign in value)


def _plain(value: Any) -> str | int | float | None:
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, str):
        return value if len(value) <= _LONGEST and is_text(value) else None
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool | int):
        return int(value) if abs(value) < 2**63 else None
    return value if isinstance(value, float) and math.isfinite(value) else None
