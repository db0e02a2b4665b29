"""Samples in several files: numbered over files of many samples each, or each sample from several files.

Examples are one file per simulation, day or sample, and one file per modality of a patient, found by patterns of names.
"""

from __future__ import annotations

import glob
import os
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..dtensor.box import Box
from .chunks import CACHE
from .dataset import Hdf5Dataset, Names, named
from .disk import DataError, regular_size
from .formats import AND, FORMATS, Channels, FileGroup, StoredArray, StoredFile, format_of, open_stored
from .sampler import Unit
from .source import checked_index, overlap
from .structure import Field, Structure
from .targets import LabelMap

__all__ = ["FileSet", "SampleFiles", "check_same_fields", "find_files", "locate", "natural", "open_dataset"]

_WILD = "*?["
_ONE_SIZE = "set data.patches, which reads windows of samples of any size (docs/data.md, Samples of different size)"


def find_files(
    given: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], format: str | None = None
) -> list[Path]:
    """Return the files of a path, a pattern, a folder, or a list of these, in order. Local.

    A pattern (``runs/*/fields.h5``; ``**`` for any folders) and a folder give files in the :func:`natural` order of
    their names; a list keeps its order. A folder gives its files of one format: of `format`, or of the first one of
    :data:`FORMATS` that it has.

    Raises
    ------
    DataError
        A list is empty, a pattern or a folder matches no file, or a file occurs twice (also through a link).
    """
    several = [given] if isinstance(given, str | os.PathLike) else list(given)
    paths = [path for pattern in several for path in _expanded(os.fspath(pattern), format)]
    if not paths:
        raise DataError("data.path: expected a file, a pattern, a folder, or a list of these, got an empty list")
    seen: dict[Path, Path] = {}
    for path in paths:
        file = Path(os.path.realpath(path))  # samples of a file named twice could be in both training and validation
        if file in seen:
            same = "twice" if path == seen[file] else f"and {seen[file]}, which are one"
            raise DataError(f"data.path: expected every file once, got {path} {same}; name it once")
        seen[file] = path
    return paths


def natural(path: str) -> tuple[str, str]:
    """Return the sort key of a file name, by which whole numbers in the name are compared by value. Local.

    >>> sorted(["s10.h5", "s2.h5", "s1.h5", "s.h5"], key=natural)
    ['s.h5', 's1.h5', 's2.h5', 's10.h5']
    """
    # The path itself orders names that differ in leading zeros only.
    return re.sub("[0-9]+", lambda number: _by_value(number[0]), path), path


def _by_value(digits: str) -> str:
    """Return the digits without leading zeros, prefixed by their count (names have at most 255): these strings sort by
    value.
    """
    digits = digits.lstrip("0")
    return f"{len(digits):03}{digits}"


def _expanded(text: str, kind: str | None) -> list[Path]:
    if os.path.exists(text) and not _is_plain_folder(text, kind):
        return [Path(text)]  # also a file with a star in its name
    if os.path.isdir(text):
        paths, what = _in_folder(text, kind)
    elif any(sign in text for sign in _WILD):
        matches = glob.glob(text, recursive=True)
        paths, what = [path for path in matches if not _is_plain_folder(path, kind)], "a pattern"
    else:
        return [Path(text)]  # missing: opening it raises the error
    if not paths:
        raise DataError(f"data.path: expected files, got none by {text} ({what})")
    return [Path(path) for path in sorted(paths, key=natural)]


def _is_plain_folder(path: str, kind: str | None) -> bool:
    """Return whether a path is a folder with files, and not a file in a format whose files are folders (Zarr)."""
    own = format_of(path, None)
    name = kind or own
    if not os.path.isdir(path):
        return False
    # Files of Zarr are folders: one without their suffix is plain if it has such files.
    return name is None or not FORMATS[name].folder or (own != name and bool(_in_folder(path, name)[0]))


def _in_folder(folder: str, kind: str | None) -> tuple[list[str], str]:
    """Return the files of a format in a folder, and a description of the expected files if there are none, else ""."""
    # Hidden files, as macOS adds them to archives (._a.nii), are not samples; patterns do not match them either.
    paths = [entry.path for entry in os.scandir(folder) if not entry.name.startswith(".")]
    formats = [kind] if kind else list(FORMATS.names)
    for name in formats:
        files = [path for path in paths if path.lower().endswith(FORMATS[name].suffixes)]
        if files:
            return files, ""
    endings = "; ".join(f"{name}: {', '.join(FORMATS[name].suffixes)}" for name in formats)
    return [], f"a folder with files of {endings}"


def check_same_fields(paths: Sequence[Path], structures: Sequence[Structure], several_sizes: bool = False) -> None:
    """Check that the samples of all files have the same fields. Local.

    With `several_sizes`, their extents may differ, but not the factors between the grids of the fields.

    Raises
    ------
    DataError
        Shapes, factors or channels differ from those of the first file; the message names the file.
    """
    first = structures[0].fields
    reference = next(iter(first))
    for path, other in zip(paths, structures):
        for name, field in first.items():
            same = other.fields[name]
            pairs = field.shape, first[reference].shape, same.shape, other.fields[reference].shape
            expected, got, change = _shapes_text(*pairs, first[reference].dataset, several_sizes)
            if not expected and field.channel_names != same.channel_names:
                expected, got = f"the channels {field.channel_names}", f"{same.channel_names}"
                change = "correct its attribute 'channel_names'"
            if expected:
                raise DataError(
                    f"{path}: {field.dataset!r}: expected {expected} as in {paths[0]}, got {got}; {change}, or leave "
                    "that file out"
                )


def _shapes_text(
    mine: tuple[int, ...],
    my_reference: tuple[int, ...],
    theirs: tuple[int, ...],
    reference: tuple[int, ...],
    name: str,
    several_sizes: bool,
) -> tuple[str, str, str]:
    """Return the expected shape of a field, its shape, and the remedy, as strings; empty ones if the shapes agree.

    `mine` is the shape of the field in the first file, `theirs` that in another one; `my_reference` and `reference` are
    those of the reference field, whose dataset is `name`. With `several_sizes` the extents of `theirs` may differ from
    `mine`, but not their ratios to those of the reference field.
    """
    change = "write it so"
    if len(mine) != len(theirs):
        return f"samples with {len(mine) - 1} spatial axes", f"{len(theirs) - 1}", change
    if mine[-1] != theirs[-1]:
        return f"samples with {mine[-1]} channel(s)", f"{theirs[-1]}", change
    if not several_sizes:
        return (f"samples of shape {mine}", f"{theirs}", _ONE_SIZE) if mine != theirs else ("", "", "")
    if len(mine) != len(my_reference):  # a vector per sample
        factors_agree = mine == theirs
    else:
        grids = zip(mine[:-1], theirs[:-1], my_reference[:-1], reference[:-1])
        # Cross-multiplied, so that no ratio is rounded. An axis of extent 1 in both files fits any reference.
        factors_agree = all(n == m == 1 or n * base == m * own for n, m, own, base in grids)
    if factors_agree:
        return "", "", ""
    texts = (f"{own[:-1]} for {base[:-1]} of {name!r}" for own, base in ((mine, my_reference), (theirs, reference)))
    return f"extents with the factors of {next(texts)}", next(texts), change


class FileSet:
    """Samples of several files, one file after the other; a :class:`Dataset`. Local.

    Parameters
    ----------
    parts
        The files, opened or not. Their samples have the same fields (:func:`check_same_fields`).
    most_open
        Largest number of files that this process keeps open; the least recently read one is closed.

    Attributes
    ----------
    path
        Path of the first file, and the number of further files.
    groups
        Groups of the files, renumbered so that no two files share a group. Each sample of a file without groups is its
        own group. None if no file has groups.
    file_of : int64 array ``(N,)``
        Number of the file of every sample.
    fields : dict of Field
        Fields of the first file; of samples of different size, with the largest extent of each axis.
    extents : dict of int64 array ``(N, spatial axes)``, or None
        Extents of every sample by the name of the field, if the files have samples of different size.
    """

    def __init__(self, parts: Sequence[Hdf5Dataset], most_open: int = 64) -> None:
        self.parts = list(parts)
        first = self.parts[0]
        more = f" (and {len(parts) - 1} more files)" if len(parts) > 1 else ""
        self.path = Path(f"{first.path}{more}")
        lengths = np.array([len(part) for part in self.parts], np.int64)
        self.fields, self.extents = _sizes(self.parts, lengths)
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        self.file_of = np.repeat(np.arange(len(self.parts), dtype=np.int64), lengths)
        self.groups = _groups(self.parts)
        self._open: OrderedDict[int, None] = OrderedDict()
        # All open files share the memory for chunks.
        self._most_open = max(1, most_open)
        for part in self.parts:
            # At most so many files are open at once.
            part.share = CACHE // min(self._most_open, len(self.parts))
        # A file may need more than its share, for one sample: then fewer files stay open.
        needed = max(part.cached for part in self.parts)
        if needed:
            self._most_open = min(self._most_open, max(1, CACHE // needed))

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __enter__(self) -> FileSet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def names(self) -> list[str]:
        """Names of the files, for messages: the part of the path that differs, and the number of samples."""
        paths = [part.path.parts for part in self.parts]
        common = sum(1 for _ in takewhile(lambda level: len(set(level)) == 1, zip(*paths)))
        return [f"{'/'.join(path[common:])} {len(part)}" for path, part in zip(paths, self.parts)]

    @property
    def lenient(self) -> frozenset[str]:
        """Names of the fields in which invalid values are permitted (:class:`Hdf5Dataset`), the same for all files."""
        return self.parts[0].lenient

    @lenient.setter
    def lenient(self, names: frozenset[str]) -> None:
        for part in self.parts:
            part.lenient = names

    @property
    def labels(self) -> Mapping[str, LabelMap]:
        """Label maps by the name of the field (:class:`Hdf5Dataset`), the same for all files."""
        return self.parts[0].labels

    @labels.setter
    def labels(self, maps: Mapping[str, LabelMap]) -> None:
        for part in self.parts:
            part.labels = maps

    @property
    def weighted(self) -> Mapping[str, Sequence[str]]:
        """Names of the weights of each target (:class:`Hdf5Dataset`), the same for all files."""
        return self.parts[0].weighted

    @weighted.setter
    def weighted(self, names: Mapping[str, Sequence[str]]) -> None:
        for part in self.parts:
            part.weighted = names

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes that are equal in all files."""
        first, *others = [part.attributes for part in self.parts]
        return {name: v for name, v in first.items() if all(other.get(name) == v for other in others)}

    def slow_chunks(self, name: str, box: Box, shuffled: bool) -> str:
        """Return the warning of :meth:`Hdf5Dataset.slow_chunks` for the first file that has one, with the number of
        further files that have one; "" if none has.

        If all files stay open, files that keep all chunks of the field in memory need no warning: they are read once in
        a run.
        """
        closed = len(self.parts) > self._most_open
        slow = [part for part in self.parts if closed or not part.keeps(name)]
        texts = [text for part in slow if (text := part.slow_chunks(name, box, shuffled))]
        more = f"; and of {len(texts) - 1} more files" if len(texts) > 1 else ""
        return texts[0] + more if texts else ""

    def place(self, index: int) -> str:
        """Return the file and number of a sample, for messages."""
        file, local = self._locate(index)
        return self.parts[file].place(local)

    def belonging(self, kind: Unit, name: str) -> NDArray[np.bool_]:
        """Return which samples belong to a file, a simulation or a year of this name, ``(N,)`` (:func:`held_out`)."""
        return np.concatenate([part.belonging(kind, name) for part in self.parts])

    def source(self, index: int) -> tuple[str, int]:
        """Return the path of a sample's file, and the sample's number in it."""
        file, local = self._locate(index)
        return self.parts[file].source(local)

    @property
    def bytes_read(self) -> int:
        """Size of the numbers read from all files so far, without compression [B]."""
        return sum(part.bytes_read for part in self.parts)

    def close(self) -> None:
        """Close all files; a later read opens them again."""
        for part in self.parts:
            part.close()
        self._open.clear()

    def read(self, name: str, indices: Sequence[int], box: Box, out: NDArray[Any]) -> tuple[slice, ...]:
        """Read as :meth:`Hdf5Dataset.read` does, within each sample; messages name the file and the sample in it."""
        shape = self.fields[name].shape
        if box.ndim != len(shape) + 1 or out.shape != box.shape:
            raise DataError(
                f"{self.path}: expected a box of {len(shape) + 1} axes and an array of its shape, got {box} and "
                f"{out.shape}"
            )
        part, filled = overlap(box, (len(indices), *shape))
        if part.size == 0:
            return filled
        first, last = part.ranges[0]
        # One by one, because the samples of a batch lie in any of the files.
        for k in range(first, last):
            file, local = self._locate(int(indices[k]))
            at = k - box.start[0]
            self._opened(file).read(name, [local], box.replace(0, 0, 1), out[at : at + 1])
        return filled

    def _locate(self, index: int) -> tuple[int, int]:
        """Return the number of the file of a sample, and the sample's index in it."""
        file = int(self.file_of[checked_index(self, index)])
        return file, index - int(self._starts[file])

    def _opened(self, file: int) -> Hdf5Dataset:
        self._open[file] = None  # an ordered set: least recently read first
        self._open.move_to_end(file)
        while len(self._open) > self._most_open:
            self.parts[self._open.popitem(last=False)[0]].close()
        return self.parts[file]


def _sizes(
    parts: Sequence[Hdf5Dataset], lengths: NDArray[np.int64]
) -> tuple[dict[str, Field], dict[str, NDArray[np.int64]] | None]:
    """Return the fields of all files with their largest extents, and the extents of every sample if they differ."""
    fields = parts[0].fields
    if all(part.fields[name].shape == fields[name].shape for part in parts for name in fields):
        return fields, None
    own = {name: np.array([part.fields[name].shape[:-1] for part in parts], np.int64) for name in fields}
    largest = {
        name: replace(field, shape=(*own[name].max(axis=0).tolist(), field.shape[-1])) for name, field in fields.items()
    }
    return largest, {name: np.repeat(sizes, lengths, axis=0) for name, sizes in own.items()}


def _groups(parts: Sequence[Hdf5Dataset]) -> NDArray[np.int64] | None:
    if all(part.groups is None for part in parts):
        return None
    groups, first = [], 0
    for part in parts:
        # Consecutive numbers, so that adding `first` makes them unique over the files.
        own = np.arange(len(part)) if part.groups is None else np.unique(part.groups, return_inverse=True)[1]
        groups.append(first + own.reshape(-1).astype(np.int64))
        first += int(own.max()) + 1
    return np.concatenate(groups)


SAMPLE = "{sample}"
_NAMED = 3  # samples that a message names


@dataclass(frozen=True)
class SampleFiles(FileGroup):
    """Files of one sample.

    Attributes
    ----------
    sample : str
        Name of the sample, which replaces ``{sample}`` in the patterns.
    parts : dict
        For each dataset, its files in the order of the channels: path, name of the array (empty: the main one), and
        name of the channels.
    """

    sample: str
    parts: Mapping[str, Sequence[tuple[Path, str, str]]]

    def __fspath__(self) -> str:
        return str(self.paths[0])

    @property
    def paths(self) -> list[Path]:
        """All files, the first one of the first input first."""
        return list(dict.fromkeys(path for parts in self.parts.values() for path, _, _ in parts))

    def open(self, kind: str | None, allow_external: bool, checked: bool) -> StoredFile:
        """Open all files, each with a check of the sources of its data, also if they are `checked`."""
        with ExitStack() as stack:
            files = {path: stack.enter_context(open_stored(path, kind, allow_external)) for path in self.paths}
            opened = _SampleFile(self, files)
            # All are open: from here on the result closes them.
            stack.pop_all()
            return opened


def locate(
    given: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    format: str | None,
    datasets: Mapping[str, str],
    others: Mapping[str, str] | None = None,
) -> list[Path | SampleFiles]:
    """Return the files of a data set in order; with ``{sample}`` in names of datasets, the files of each sample. Local.

    Parameters
    ----------
    given, format
        As for :func:`find_files`; with ``{sample}``, a folder or several.
    datasets
        Names of the datasets, by the name of the network's input. With ``{sample}`` each is a file name relative to the
        folder, such as ``"{sample}_t1.nii.gz"``, followed by ``":NAME"`` for one of several arrays; several file names
        are joined by :data:`AND`.
    others
        Datasets that are not read: their files belong to a sample, but may be missing.

    Raises
    ------
    DataError
        As in :func:`find_files`; a sample lacks a file.
    """
    if not any(SAMPLE in name for name in datasets.values()):
        return list(find_files(given, format))
    for name in datasets.values():
        if not all(SAMPLE in pattern for pattern in name.split(AND)):
            raise DataError(f"data.inputs: expected {SAMPLE} in all names of datasets or in none, got {name!r}")
    folders = [given] if isinstance(given, str | os.PathLike) else list(given)
    files: list[Path | SampleFiles] = []
    for folder in folders:
        files += _samples(Path(folder), datasets, others or {})
    return files


def open_dataset(
    given: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    inputs: Names = "inputs",
    targets: Names = "mask",
    *arguments: Any,
    several_sizes: bool = False,
    format: str | None = None,
    **options: Any,
) -> Hdf5Dataset | FileSet:
    """Open the samples of all files of `given`, and check each file. Local.

    With `several_sizes`, files may have samples of different size (:func:`check_same_fields`). Other arguments are
    those of :class:`Hdf5Dataset`.

    Raises
    ------
    DataError
        As in :func:`locate`, :class:`Hdf5Dataset` and :func:`check_same_fields`.
    """
    options["format"] = format
    paths = locate(given, format, {**named(inputs, "x"), **named(targets, "target")})
    parts = []
    for path in paths:
        parts.append(Hdf5Dataset(path, inputs, targets, *arguments, **options))
        if len(paths) > 1:
            parts[-1].close()  # one by one: a process may open fewer files than there are
    if len(parts) == 1:
        return parts[0]
    check_same_fields([part.path for part in parts], [part.structure for part in parts], several_sizes)
    return FileSet(parts)


def _samples(folder: Path, datasets: Mapping[str, str], others: Mapping[str, str]) -> list[SampleFiles]:
    """Return the samples in a folder, in the natural order of their names."""
    if not folder.is_dir():
        raise DataError(f"data.path: expected a folder with the files of the samples, got {folder}; correct it")
    needed = dict.fromkeys(pattern for name in datasets.values() for pattern in name.split(AND))
    optional = [pattern for name in others.values() if SAMPLE in name for pattern in name.split(AND)]
    # A file belongs to the pattern that leaves the shortest name: with "{sample}.nii" and "{sample}_seg.nii",
    # p1_seg.nii is the mask of p1, not the image of a sample p1_seg.
    best: dict[str, str] = {}
    own = set[str]()
    for pattern in (*needed, *optional):
        for file, sample in _matches(folder, _split(pattern)[0]):
            if file not in best or len(sample) < len(best[file]):
                best[file] = sample
                # A file of a dataset that is not read does not make a sample of its own.
                (own.add if pattern in needed else own.discard)(file)
    names = sorted({best[file] for file in own}, key=natural)
    if not names:
        name, pattern = next(iter(datasets)), next(iter(needed))
        raise DataError(
            f"data.path: expected files {pattern} in {folder}, got none; give the folder that they are in, or correct "
            f"the pattern, data.inputs.{name}"
        )
    lacking = {}
    for sample in names:
        files = [_split(pattern)[0].replace(SAMPLE, sample) for pattern in needed]
        missing = [file for file in files if best.get(file) != sample]
        if missing:
            lacking[sample] = missing[0]
    if lacking:
        listed = ", ".join(f"{sample} (no {file})" for sample, file in list(lacking.items())[:_NAMED])
        more = f", and {len(lacking) - _NAMED} more" if len(lacking) > _NAMED else ""
        raise DataError(
            f"data.path: expected {len(needed)} files of each of the {len(names)} samples in {folder}, got fewer of "
            f"{listed}{more}; add the files, or move these samples away"
        )
    return [SampleFiles(sample, {name: _parts(folder, name, sample) for name in datasets.values()}) for sample in names]


def _matches(folder: Path, pattern: str) -> Iterator[tuple[str, str]]:
    """Yield the files below a folder that match a pattern, relative to it, and the names of their samples."""
    first, *others = [re.escape(text) for text in pattern.split(SAMPLE)]
    # A second {sample} in the pattern must match the same name.
    expression = re.compile(f"{first}(?P<sample>[^/]+)" + "(?P=sample)".join(others))
    # The glob finds candidates; the expression checks that every {sample} is the same name.
    for path in folder.glob("/".join("*" if SAMPLE in word else glob.escape(word) for word in pattern.split("/"))):
        file = path.relative_to(folder).as_posix()
        match = expression.fullmatch(file)
        if match is not None and not match["sample"].startswith("."):  # hidden files are not samples
            yield file, match["sample"]


def _split(pattern: str) -> tuple[str, str]:
    """Return the file name and the array of a pattern.

    >>> _split("{sample}.h5:fields/t1"), _split("{sample}.nii")
    (('{sample}.h5', 'fields/t1'), ('{sample}.nii', ''))
    """
    file, _, array = pattern.partition(":")
    return file, array


def _parts(folder: Path, name: str, sample: str) -> list[tuple[Path, str, str]]:
    parts = []
    for pattern in name.split(AND):
        file, array = _split(pattern)
        # Up to the first dot, because an ending may have two parts (.nii.gz).
        stem = file.rpartition("/")[2].split(".")[0]
        parts.append((folder / file.replace(SAMPLE, sample), array, stem.replace(SAMPLE, "").strip("_-. ")))
    return parts


class _SampleFile(StoredFile):
    """The files of a sample, open."""

    def __init__(self, location: SampleFiles, files: Mapping[Path, StoredFile]) -> None:
        self.path, self._location, self._files = location.paths[0], location, dict(files)
        self._first = self._files[self.path]
        self.attrs, self.of_samples = self._first.attrs, self._first.of_samples
        # With their sizes, so that a later check finds a file that was replaced.
        own = {os.path.realpath(path): regular_size(path) for path in location.paths[1:] if path.is_file()}
        self.files = {name: size for file in files.values() for name, size in file.files.items()} | own

    def get(self, name: str) -> StoredArray | None:
        """Return the array of a dataset, or one that describes the sample; None if there is none of this name."""
        if name not in self._location.parts:
            return self._first.get(name) if name in self.of_samples else None
        parts = self._location.parts[name]
        arrays = [self._array(self._files[path], array) for path, array, _ in parts]
        return arrays[0] if len(arrays) == 1 else Channels(name, self.path, arrays, [text for _, _, text in parts])

    @staticmethod
    def _array(file: StoredFile, name: str) -> StoredArray:
        names = [name] if name else [file.main] if file.main else list(file.names())
        if len(names) > 1:
            raise DataError(
                f"{file.path}: expected one array, or its name after the file name, as in "
                f'"{SAMPLE}{file.path.suffix}:{names[0]}", got {", ".join(names)}'
            )
        return file.find(names[0] if names else "data")  # without arrays, `find` raises the error

    def names(self) -> Iterator[str]:
        """Yield the names of the datasets."""
        yield from self._location.parts

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()
