"""Storage of an HDF5 dataset: the sources of its data are found and checked before the data are read.

HDF5 reads the fill value (usually zero) without an error if the source of a virtual dataset cannot be opened, if a
chunk was never written, and past the end of an external file. It crashes on a virtual dataset that refers to itself,
waits for ever for a named pipe, and reads any file of the machine that a dataset names. So all of this is checked once
before the first read.

A virtual dataset consists of regular selections. An axis of a selection takes `count` blocks of `block` indices, whose
starts are `stride` apart::

    start=1, stride=4, count=3, block=2       . # # . . # # . . # # .
"""

from __future__ import annotations

import logging
import math
import os
import resource
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5d, h5l, h5s, h5t, h5z

from .disk import DataError, open_file, reason_of, regular_size
from .packing import ATTRIBUTES, Packing, packing_of

__all__ = ["Hyperslab", "Storage", "check_files", "dataset_of", "hyperslabs"]

_log = logging.getLogger(__name__)

LINKS = 16
"""Largest number of soft and external links that are followed to one dataset; HDF5 follows as many."""
DEEPEST = 16
"""Largest depth of virtual datasets of virtual datasets."""
_SPARE = 64  # open files of a process in addition to its data files
_SLOW = 10**7  # number of chunks from which counting takes seconds

_Key = tuple[str, int]  # path of the file, and address in it


def check_files(path: Path, files: dict[str, int]) -> None:
    """Check that the other files that hold data of `path` exist with these sizes [B]. Local.

    Raises
    ------
    DataError
        A file is missing or has another size, or this process may not open that many files. HDF5 keeps each open after
        a read, and reads zeros instead of files that it cannot open.
    """
    for name, size in files.items():
        try:
            state: int | str = regular_size(name)
        except OSError as error:
            state = reason_of(error)
        if state != size:
            raise DataError(
                f"{path}: takes numbers from {name}, expected {size} B as when the run began, got {state}; it was "
                "replaced, or this node sees other files"
            )
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files and limit != resource.RLIM_INFINITY and len(files) + _SPARE > limit:
        raise DataError(
            f"{path}: takes numbers from {len(files)} files, this process may open {limit}; raise that limit "
            f"(ulimit -n {len(files) + 2 * _SPARE}), or copy the data into fewer files"
        )


@dataclass(frozen=True)
class _Source:
    """A part of a virtual dataset: the elements `filled`, read from the elements `taken` of a dataset in another file.

    If `taken` is None, all of that dataset is read, which must have this number of `elements`.
    """

    file: str
    dataset: str
    filled: Hyperslab
    taken: list[Hyperslab] | None
    elements: int


@dataclass(frozen=True)
class _Checked:
    """A checked dataset: file and name for messages, packing attributes, type, and the `sources` if it is virtual."""

    where: str
    attributes: dict[str, Any]
    dtype: np.dtype
    sources: dict[_Key, None] = field(default_factory=dict)  # an ordered set


class Storage:
    """Checker of the sources of the datasets of one open file. Local.

    Legal but suspicious storage (some chunks never written) is logged as a warning.

    Parameters
    ----------
    path : Path
        The file.
    allow_external : bool
        Whether data may come from outside the folder of that file.
    texts : bool
        Whether datasets of strings are permitted too.

    Attributes
    ----------
    files : dict
        Other files that hold data, ``{absolute path: size [B]}``.
    """

    def __init__(self, path: Path, allow_external: bool = False, texts: bool = False) -> None:
        self._path, self._allow_external, self._texts = path, allow_external, texts
        # The path may be a symbolic link into another folder, which then contains the other files.
        self._folders = {Path(os.path.realpath(path)).parent, Path(os.path.realpath(path.parent))}
        self.files: dict[str, int] = {}
        self._under_way: list[_Key] = []
        self._checked: dict[_Key, _Checked] = {}
        self._packings: dict[tuple[_Key, np.dtype], Packing | None] = {}

    def check(self, file: h5py.File, name: str) -> bool:
        """Check the sources of a dataset; return False if there is no dataset of this name.

        Raises
        ------
        DataError
            A loop of links or of virtual datasets; a source that is missing, too small, not a regular file, or outside
            the folder without permission; a dataset of a type that is not permitted, or that was never written.
        """
        with ExitStack() as stack:
            member = self.follow(file, name, stack)
            if isinstance(member, h5py.Dataset):
                self._check_storage(member)
            return isinstance(member, h5py.Dataset)

    def packing(self, dataset: h5py.Dataset) -> Packing | None:
        """Return the packing of a checked dataset. A virtual dataset without attributes has the packing of its sources.

        Raises
        ------
        DataError
            The attributes cannot be applied, or the sources of a virtual dataset are packed in several ways, or in
            another way than its own attributes.
        """
        return self._packing(_key(dataset), dataset.dtype)

    def _packing(self, key: _Key, dtype: np.dtype) -> Packing | None:
        """Return the packing of a dataset whose values HDF5 converts to `dtype`."""
        if (key, dtype) not in self._packings:
            self._packings[key, dtype] = self._find_packing(self._checked[key], dtype)
        return self._packings[key, dtype]

    def _find_packing(self, checked: _Checked, dtype: np.dtype) -> Packing | None:
        own = packing_of(checked.attributes, dtype, checked.where)
        # Without the byte order, whose conversion changes no number.
        if (dtype.kind, dtype.itemsize) != (checked.dtype.kind, checked.dtype.itemsize):
            stored = packing_of(checked.attributes, checked.dtype, checked.where)
            if stored is not None and np.dtype(stored.dtype) != checked.dtype:
                raise DataError(
                    f"{checked.where}: attribute '_Unsigned': expected virtual datasets of its type {checked.dtype}, "
                    f"got one of {dtype}, to which HDF5 converts its numbers with their signs; make it of that type, "
                    "or set data.unpack = false, which reads numbers as they are stored"
                )
        packings = dict.fromkeys(self._packing(source, dtype) for source in checked.sources)
        # One packing of all sources holds for the virtual dataset, if it has no attributes of its own.
        if own is None and len(packings) == 1:
            return next(iter(packings))
        others = [packing for packing in packings if packing not in (None, own)]
        if others:
            names = dict.fromkeys(name for packing in others for name in packing.names)
            raise DataError(
                f"{checked.where} takes numbers from datasets that are packed in several ways, or not as its own "
                f"attributes ({', '.join(names)}); take each part from its own file (data.path), write the values, or "
                "set data.unpack = false, which reads numbers as they are stored"
            )
        return own

    def follow(self, file: h5py.File, name: str, stack: ExitStack) -> h5py.HLObject | None:
        """Return the object at the end of a chain of links, or None; `stack` keeps files of external links open."""
        ahead, member, links = deque(name.split("/")), file["/"], 0
        while ahead:
            word = ahead.popleft()
            if word in ("", "."):
                continue
            link = _link(member, word) if isinstance(member, h5py.Group) else None
            if link is None:
                return None
            if isinstance(link, h5py.HardLink):
                member = member[word]
                continue
            links += 1
            if links > LINKS:
                raise DataError(
                    f"{self._path}: {name!r} is a loop of links, or more than {LINKS}; name the dataset itself"
                )
            if isinstance(link, h5py.ExternalLink):
                what = f"{name!r} is a link into"
                member = stack.enter_context(self._open(member.file, link.filename, "HDF5_EXT_PREFIX", what))["/"]
            elif link.path.startswith("/"):
                member = member.file["/"]
            # Other soft links are relative to the group that has them.
            ahead.extendleft(reversed(link.path.split("/")))
        return member

    def _check_storage(self, dataset: h5py.Dataset) -> None:
        """Check one dataset and its sources, each once."""
        key = _key(dataset)
        if key in self._checked:
            return
        if not (_is_of_numbers(dataset) or (self._texts and h5t.check_string_dtype(dataset.dtype) is not None)):
            kind = _type_of(dataset)
            raise DataError(f"{self._where(dataset)}: expected numbers, got {kind}; write numbers, or name others")
        attributes = {name: dataset.attrs[name] for name in ATTRIBUTES if name in dataset.attrs}
        checked = _Checked(self._where(dataset), attributes, dataset.dtype)
        if not dataset.size:  # no elements, or no dataspace
            self._checked[key] = checked
            return
        if key in self._under_way or len(self._under_way) == DEEPEST:
            raise DataError(
                f"{self._where(dataset)} is a virtual dataset of itself, or of more than {DEEPEST} others in a row; "
                "write the numbers themselves"
            )
        self._under_way.append(key)
        try:
            if dataset.is_virtual:
                self._check_virtual(dataset, checked)
            elif dataset.external:
                self._check_external(dataset)
            else:
                self._check_written(dataset)
        finally:  # callers leave out coordinates that raise, and check others
            self._under_way.pop()
        self._checked[key] = checked

    def _check_written(self, dataset: h5py.Dataset) -> None:
        self._check_filters(dataset)
        if dataset.chunks is None:
            # By default, HDF5 allocates contiguous data when they are first written.
            self._report_gap(dataset, dataset.id.get_storage_size() == 0, True, "it was never written")
            return
        chunks = math.prod(-(-n // c) for n, c in zip(dataset.shape, dataset.chunks))
        # Counting takes time for chunks that exist, of which a small file has few.
        if chunks > _SLOW and os.path.getsize(dataset.file.filename) > _SLOW:
            _log.warning("%s: counting which of its %s chunks were written", self._where(dataset), f"{chunks:,}")
        missing = chunks - dataset.id.get_num_chunks()
        gap = f"{missing:,} of its {chunks:,} chunks were never written"
        self._report_gap(dataset, missing, missing == chunks, gap)

    def _check_filters(self, dataset: h5py.Dataset) -> None:
        properties = dataset.id.get_create_plist()
        for number, _, _, name in (properties.get_filter(k) for k in range(properties.get_nfilters())):
            if not h5z.filter_avail(number):
                raise DataError(
                    f"{self._where(dataset)} is stored with the filter {number} ({name.decode(errors='replace')}), "
                    "which is not installed; install its plugin (HDF5_PLUGIN_PATH), or write the data with gzip"
                )

    def _report_gap(self, dataset: h5py.Dataset, missing: int, all_of_it: bool, gap: str) -> None:
        """Raise DataError if nothing of a dataset was written, unless it has its own fill value; warn of other gaps.

        `missing` is the number of missing parts, `gap` a description of them for the message.
        """
        if missing <= 0:
            return
        # A fill value of its own shows that missing chunks are intended; HDF5's default is zero.
        chosen = dataset.id.get_create_plist().fill_value_defined() == h5d.FILL_VALUE_USER_DEFINED
        if all_of_it and not chosen:
            raise DataError(f"{self._where(dataset)}: expected numbers, but {gap}; it reads as zero: write the numbers")
        value = f"its fill value {dataset.fillvalue}" if chosen else "zero"
        where = self._where(dataset)
        _log.warning("%s: %s; missing numbers read as %s: write them, unless this is intended", where, gap, value)

    def _check_virtual(self, dataset: h5py.Dataset, checked: _Checked) -> None:
        mapped = h5s.create_simple(dataset.shape)
        # A new dataspace selects everything; the parts are added to an empty selection, which counts overlaps once.
        mapped.select_none()
        # Sources that follow one another in one file are checked with one opening.
        for name, parts in groupby(self._sources(dataset), key=lambda source: source.file):
            with self._source_file(dataset, name) as other:
                for part in parts:
                    checked.sources[self._check_source(dataset, other, part)] = None
                    if part.filled.size(dataset.shape):
                        inside = part.filled.within(dataset.shape)
                        mapped.select_hyperslab(inside.start, inside.count, inside.stride, inside.block, h5s.SELECT_OR)
        # Count only the part of a block inside the dataset.
        ones = (1,) * dataset.ndim
        mapped.select_hyperslab((0,) * dataset.ndim, ones, ones, dataset.shape, h5s.SELECT_AND)
        size = math.prod(dataset.shape)
        missing = size - mapped.get_select_npoints()
        self._report_gap(dataset, missing, missing == size, f"{missing:,} of its {size:,} elements have no source")

    def _sources(self, dataset: h5py.Dataset) -> Iterator[_Source]:
        """Yield the parts of a virtual dataset; a pattern like ``part-%b.h5`` yields one for each existing block."""
        for entry in dataset.virtual_sources():
            # A whole source may have any shape: it need only have as many elements.
            whole = entry.src_space.get_select_type() == h5s.SEL_ALL
            # The shape is needed only for a selection of everything, which is excluded here.
            slabs = None if whole else hyperslabs(entry.src_space, ())
            filled = hyperslabs(entry.vspace, dataset.shape)
            elements = sum(slab.block_size for slab in filled)
            for slab in filled:
                axis, names = slab.growing, (entry.file_name, entry.dset_name)
                if axis is None or not any("%b" in name.replace("%%", "") for name in names):
                    yield _Source(_numbered(names[0]), _numbered(names[1]), slab, slabs, elements)
                    continue
                for k in range(slab.within(dataset.shape).count[axis]):
                    yield _Source(_numbered(names[0], k), _numbered(names[1], k), slab.part(axis, k), slabs, elements)

    @contextmanager
    def _source_file(self, dataset: h5py.Dataset, name: str) -> Iterator[h5py.File]:
        if name == ".":
            yield dataset.file
        else:
            with self._open(dataset.file, name, "HDF5_VDS_PREFIX", f"{dataset.name!r} takes numbers from") as other:
                yield other

    def _check_source(self, dataset: h5py.Dataset, other: h5py.File, part: _Source) -> _Key:
        """Check that a source has all elements that the virtual dataset takes from it; return the key of the source."""
        what = f"{self._where(dataset)}: its source {part.dataset!r} in {other.filename}"
        with ExitStack() as stack:
            member = self.follow(other, part.dataset, stack)
            if not isinstance(member, h5py.Dataset) or member.shape is None:
                raise DataError(f"{what} is missing, HDF5 would read zeros; restore it, or write the data again")
            shape = tuple(member.shape)
            if part.taken is None:
                fits = math.prod(shape) == part.elements
            else:
                fits = all(_holds(shape, slab, part.filled, dataset.shape) for slab in part.taken)
            if not fits:
                raise DataError(
                    f"{what} has the shape {shape}, which does not fit the part that it maps; write the data again"
                )
            self._check_storage(member)
            return _key(member)

    def _check_external(self, dataset: h5py.Dataset) -> None:
        """Check that external files contain all elements of the dataset, because HDF5 reads zeros past their end."""
        needed = dataset.size * dataset.id.get_type().get_size()
        for name, offset, size in dataset.external:
            own = os.path.dirname(os.path.abspath(dataset.file.filename))
            prefix = os.environ.get("HDF5_EXTFILE_PREFIX", "").replace("${ORIGIN}", own)
            path = os.path.abspath(os.path.join(prefix, name))  # relative to the working directory
            held = self._admit(path, f"{self._where(dataset)} takes numbers from {name}, which")
            # A file without a size limit has the largest integer as `size` (h5f.UNLIMITED).
            here = min(size, needed)
            if held < offset + here:
                raise DataError(
                    f"{self._where(dataset)}: expected {offset + here} B in its external file {path}, got {held} B; "
                    "after them HDF5 would read zeros: restore the whole file"
                )
            needed -= here

    def _open(self, file: h5py.File, name: str, variable: str, what: str) -> h5py.File:
        """Open another file that `file` refers to, found as HDF5 finds it."""
        candidates = list(_candidates(file.filename, name, variable))
        path = next(filter(os.path.exists, candidates), candidates[0])
        self._admit(path, f"{file.filename}: {what} {name}, which")
        return open_file(Path(path))

    def _admit(self, path: str, what: str) -> int:
        """Check and record another file that holds data, and return its size [B]. Raises DataError if the file cannot
        be read or is outside of the permitted folders.
        """
        try:
            size = regular_size(path)
        except OSError as error:
            raise DataError(
                f"{what} cannot be read at {path} ({reason_of(error)}); restore it, or write the data again"
            ) from error
        real = Path(os.path.realpath(path))
        if not self._allow_external and not any(real.is_relative_to(folder) for folder in self._folders):
            remedy = "if this is intended, set data.allow_external = true"
            raise DataError(f"{what} is at {real}, outside the folder of {self._path}; {remedy}")
        self.files[str(real)] = size
        return size

    def _where(self, dataset: h5py.Dataset) -> str:
        return f"{dataset.file.filename}: {dataset.name!r}"


def _link(group: h5py.Group, word: str) -> h5py.HardLink | h5py.SoftLink | h5py.ExternalLink | None:
    """Return the link of this name in a group, or None.

    ``group.get(word, getlink=True)`` would open external files.
    """
    links, key = group.id.links, word.encode("utf-8", "surrogateescape")
    if not links.exists(key):
        return None
    kind = links.get_info(key).type
    if kind == h5l.TYPE_SOFT:
        return h5py.SoftLink(links.get_val(key).decode("utf-8", "surrogateescape"))
    if kind == h5l.TYPE_EXTERNAL:
        file, name = links.get_val(key)
        return h5py.ExternalLink(os.fsdecode(file), name.decode("utf-8", "surrogateescape"))
    return h5py.HardLink() if kind == h5l.TYPE_HARD else None


def _key(dataset: h5py.Dataset) -> _Key:
    # A dataset may have several names, by links, but has one address.
    return os.path.realpath(dataset.file.filename), h5py.h5o.get_info(dataset.id).addr


def _holds(shape: tuple[int, ...], slab: Hyperslab, filled: Hyperslab, whole: tuple[int, ...]) -> bool:
    """Return whether a source of this shape holds all elements of `slab` that fill the part `filled` of a dataset
    of shape `whole`.
    """
    if len(shape) != len(slab.start):
        return False
    axis, grows = slab.growing, filled.growing
    # Along unlimited axes, the source must have as many indices as the dataset takes.
    if axis is not None and grows is not None and slab.selected(shape)[axis] < filled.selected(whole)[grows]:
        return False
    return all(end is None or end <= n for end, n in zip(slab.stop, shape))


def _is_of_numbers(dataset: h5py.Dataset) -> bool:
    numbers = (h5t.INTEGER, h5t.FLOAT, h5t.ENUM)  # h5py stores bool as an enumeration
    return dataset.id.get_type().get_class() in numbers and dataset.dtype.kind in "fiub"


def _type_of(dataset: h5py.Dataset) -> str:
    try:
        return str(dataset.dtype)
    except TypeError:
        return "a type that NumPy does not have"


def _numbered(pattern: str, block: int | None = None) -> str:
    """Return the name of a source by a pattern: ``%%`` becomes a percent sign, and ``%b`` the number `block`, if given.
    """
    number = "%b" if block is None else str(block)
    return "%".join(part.replace("%b", number) for part in pattern.split("%%"))


def _candidates(own: str, name: str, variable: str) -> Iterator[str]:
    """Yield, in order, the paths at which HDF5 looks for the file `name` that the file `own` names; the environment
    variable `variable` may add folders.
    """
    if os.path.isabs(name):
        yield name
        name = os.path.basename(name)
    folder = os.path.dirname(os.path.abspath(own))
    # The order of HDF5: prefixes of the environment, the folder of the file, the working directory, the real folder.
    for prefix in filter(None, os.environ.get(variable, "").split(":")):
        yield os.path.join(prefix.replace("${ORIGIN}", folder), name)
    yield os.path.join(folder, name)
    yield os.path.abspath(name)
    yield os.path.join(os.path.dirname(os.path.realpath(own)), name)


def dataset_of(file: h5py.File, name: str) -> h5py.Dataset:
    """Return the dataset of this name, which must exist. Local."""
    member = file[name]
    assert isinstance(member, h5py.Dataset), f"{name!r} is no dataset"
    return member


Indices = tuple[int, ...]


@dataclass(frozen=True)
class Hyperslab:
    """A regular selection, with one start, stride, count and block per axis; the count of one axis may be
    ``h5s.UNLIMITED``.

    >>> rows = Hyperslab((1, 0), (4, 1), (h5s.UNLIMITED, 1), (2, 3))
    >>> rows.within((8, 3))
    Hyperslab(start=(1, 0), stride=(4, 1), count=(2, 1), block=(2, 3))
    >>> rows.selected((6, 3)), rows.stop, rows.growing
    ((3, 3), (None, 3), 0)
    """

    start: Indices
    stride: Indices
    count: Indices
    block: Indices

    @property
    def growing(self) -> int | None:
        """The axis whose count is unlimited; None if there is none."""
        return next((axis for axis, n in enumerate(self.count) if n == h5s.UNLIMITED), None)

    @property
    def stop(self) -> tuple[int | None, ...]:
        """One past the last index, per axis; None where the axis has no end."""
        ends = (a + (n - 1) * s + b for a, s, n, b in zip(self.start, self.stride, self.count, self.block))
        return tuple(None if n == h5s.UNLIMITED else end for n, end in zip(self.count, ends))

    @property
    def block_size(self) -> int:
        """Number of selected elements; an unlimited axis counts one block."""
        counts = (1 if n == h5s.UNLIMITED else n for n in self.count)
        return math.prod(n * b for n, b in zip(counts, self.block))

    def within(self, shape: Indices) -> Hyperslab:
        """Return this selection without the blocks that begin outside an array of this shape."""
        # The largest count per axis; UNLIMITED exceeds any.
        begins = (max(0, -(-(n - a) // s)) for n, a, s in zip(shape, self.start, self.stride))
        return replace(self, count=tuple(min(n, most) for n, most in zip(self.count, begins)))

    def selected(self, shape: Indices) -> Indices:
        """Return the number of selected indices within an array of this shape, per axis."""
        inside = self.within(shape)
        full = (n * b for n, b in zip(inside.count, self.block))
        beyond = (max(0, end - n) if end is not None else 0 for end, n in zip(inside.stop, shape))
        return tuple(max(0, n - out) for n, out in zip(full, beyond))

    def part(self, axis: int, number: int) -> Hyperslab:
        """Return the selection of block `number` alone along an axis."""
        start = self.start[axis] + number * self.stride[axis]
        return replace(
            self,
            start=(*self.start[:axis], start, *self.start[axis + 1 :]),
            count=(*self.count[:axis], 1, *self.count[axis + 1 :]),
        )

    def size(self, shape: Indices) -> int:
        """Return the number of selected elements within an array of this shape."""
        return math.prod(self.selected(shape))


def hyperslabs(space: h5s.SpaceID, shape: Indices) -> list[Hyperslab]:
    """Return a selection as a list of regular ones; an irregular one becomes one per block.

    `shape` is the shape of the array, for a selection of all of it.

    Raises
    ------
    ValueError
        If it is a selection of points.
    """
    ones = (1,) * len(shape)
    kind = space.get_select_type()
    if kind == h5s.SEL_NONE:
        return []
    if kind == h5s.SEL_ALL:
        return [Hyperslab((0,) * len(shape), ones, ones, shape)]
    if kind != h5s.SEL_HYPERSLABS:
        raise ValueError("a selection of points, which virtual datasets do not have")
    if space.is_regular_hyperslab():
        return [Hyperslab(*(tuple(map(int, numbers)) for numbers in space.get_regular_hyperslab()))]
    slabs = []
    for low, high in space.get_select_hyper_blocklist().tolist():  # opposite corners, both included
        slabs.append(Hyperslab(tuple(low), ones, ones, tuple(b - a + 1 for a, b in zip(low, high))))
    return slabs
