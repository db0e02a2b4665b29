"""Samples of several files each, for example one per modality of a patient, found by patterns of their names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .dataset import Hdf5Dataset, Names, named
from .disk import DataError, regular_size
from .files import FileSet, check_alike, find_files, natural
from .formats import AND, Channels, FileGroup, StoredArray, StoredFile, open_stored

__all__ = ["SampleFiles", "locate", "open_dataset"]

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
        """Open all files, each with a check where its data are stored."""
        with ExitStack() as stack:
            files = {path: stack.enter_context(open_stored(path, kind, allow_external)) for path in self.paths}
            opened = _SampleFile(self, files)
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
        Names of the datasets, by the name of the network's input. With ``{sample}`` each is a file name, below the
        folder, as ``"{sample}_t1.nii.gz"``, with ``":NAME"`` for one of several arrays; several are joined by
        :data:`AND`.
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
    found: list[Path | SampleFiles] = []
    for folder in folders:
        found += _samples(Path(folder), datasets, others or {})
    return found


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

    With `several_sizes`, files may have samples of different size (:func:`check_alike`). Other arguments are those of
    :class:`Hdf5Dataset`.

    Raises
    ------
    DataError
        As in :func:`locate`, :class:`Hdf5Dataset` and :func:`check_alike`.
    """
    options["format"] = format
    paths = locate(given, format, {**named(inputs, "x"), **named(targets, "target")})
    parts = [Hdf5Dataset(path, inputs, targets, *arguments, **options) for path in paths]
    if len(parts) == 1:
        return parts[0]
    for part in parts:
        part.close()
    check_alike([part.path for part in parts], [part.structure for part in parts], several_sizes)
    return FileSet(parts)


def _samples(folder: Path, datasets: Mapping[str, str], others: Mapping[str, str]) -> list[SampleFiles]:
    """Return the samples in a folder, in the natural order of their names."""
    if not folder.is_dir():
        raise DataError(f"data.path: expected a folder with the files of the samples, got {folder}; correct it")
    needed = dict.fromkeys(pattern for name in datasets.values() for pattern in name.split(AND))
    optional = [pattern for name in others.values() if SAMPLE in name for pattern in name.split(AND)]
    # A file belongs to the pattern that leaves the shortest name: p1_seg.nii is the mask of p1, no image of p1_seg.
    best: dict[str, str] = {}
    own = set[str]()
    for pattern in (*needed, *optional):
        for file, sample in _matches(folder, _split(pattern)[0]):
            if file not in best or len(sample) < len(best[file]):
                best[file] = sample
                (own.add if pattern in needed else own.discard)(file)
    names = sorted({best[file] for file in own}, key=natural)
    if not names:
        raise DataError(f"data.path: expected files {next(iter(needed))} in {folder}, got none; correct the pattern")
    lacking = {}
    for sample in names:
        files = [_split(pattern)[0].replace(SAMPLE, sample) for pattern in needed]
        missing = [file for file in files if best.get(file) != sample]
        if missing:
            lacking[sample] = missing[0]
    if lacking:
        some = ", ".join(f"{sample} (no {file})" for sample, file in list(lacking.items())[:_NAMED])
        more = f", and {len(lacking) - _NAMED} more" if len(lacking) > _NAMED else ""
        raise DataError(
            f"data.path: expected {len(needed)} files of each of the {len(names)} samples in {folder}, got fewer of "
            f"{some}{more}; add the files, or move these samples away"
        )
    return [SampleFiles(sample, {name: _parts(folder, name, sample) for name in datasets.values()}) for sample in names]


def _matches(folder: Path, pattern: str) -> Iterator[tuple[str, str]]:
    """Yield the files below a folder that match a pattern, relative to it, and the names of their samples."""
    first, *others = [re.escape(text) for text in pattern.split(SAMPLE)]
    expression = re.compile(f"{first}(?P<sample>[^/]+)" + "(?P=sample)".join(others))
    for path in folder.glob("/".join("*" if SAMPLE in word else word for word in pattern.split("/"))):
        file = path.relative_to(folder).as_posix()
        match = expression.fullmatch(file)
        if match is not None:
            yield file, match["sample"]


def _split(pattern: str) -> tuple[str, str]:
    """Return the file name and the array of a pattern.

    >>> _split("{sample}.h5:fields/t1"), _split("{sample}.nii")
    (('{sample}.h5', 'fields/t1'), ('{sample}.nii', ''))
    """
    file, _, array = pattern.partition(":")
    return file, array


def _parts(folder: Path, name: str, sample: str) -> list[tuple[Path, str, str]]:
    found = []
    for pattern in name.split(AND):
        file, array = _split(pattern)
        stem = file.rpartition("/")[2].split(".")[0]
        found.append((folder / file.replace(SAMPLE, sample), array, stem.replace(SAMPLE, "").strip("_-. ")))
    return found


class _SampleFile(StoredFile):
    """The files of a sample, open."""

    def __init__(self, location: SampleFiles, files: Mapping[Path, StoredFile]) -> None:
        self.path, self._location, self._files = location.paths[0], location, dict(files)
        self._first = self._files[self.path]
        self.attrs, self.of_samples = self._first.attrs, self._first.of_samples
        own = {os.path.realpath(path): regular_size(path) for path in location.paths[1:] if path.is_file()}
        self.files = {name: size for file in files.values() for name, size in file.files.items()} | own

    def get(self, name: str) -> StoredArray | None:
        """Return the array of a dataset, or one that describes the sample."""
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
                f"{file.path}: expected one array, or its name behind the file name, as in "
                f'"{SAMPLE}{file.path.suffix}:{names[0]}", got {", ".join(names)}'
            )
        return file.find(names[0] if names else "data")

    def names(self) -> Iterator[str]:
        """Yield the names of the datasets."""
        yield from self._location.parts

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()
