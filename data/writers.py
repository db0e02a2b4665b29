"""Formats of predictions: the base class :class:`Writer`, and its classes by name.

Each rank writes its blocks to its own part, in every format (:mod:`halograd.training.applying`). When all samples are
complete, the parts are joined in one HDF5 file. A writer makes the result from this file. It reads samples by slices,
and does not depend on the cut.

If the joined file must not refer to the parts, the values of its virtual datasets are copied from them.
"""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import h5py

from halograd.registry import Registry
from halograd.schema import STRICT
from halograd.signatures import check_methods

from .disk import DataError, atomic_path, check_replaceable, open_file, open_to_read
from .repack import slabs

__all__ = ["WRITERS", "WRITTEN_BY", "Hdf5", "Predictions", "Writer", "check_result", "copy_whole", "join"]

#: Attribute ``written_by`` of a file of predictions.
WRITTEN_BY = "halograd apply"


@dataclass(frozen=True)
class Predictions:
    """All predictions of a job.

    Attributes
    ----------
    file
        HDF5 file, open to read: predictions, the source of each sample (``source_file``, ``source_sample``), and the
        attributes and coordinates of the data.
    outputs
        Datasets of predictions ``(N, *spatial, C)`` in `file`, by the name of the output.
    """

    file: h5py.File
    outputs: Mapping[str, h5py.Dataset]


class Writer(ABC):
    """Base class of formats of predictions, named by ``halograd apply --format``.

    The result is one file or one folder. A writer writes it at a temporary path, which takes the name of the result
    when all ranks have written. An error of a writer loses no prediction: the job continues with :meth:`begin` when it
    is started again. Fields of a writer that is a dataclass are settings: ``"npy.py:Npy:digits=3"``.
    """

    #: Name on the command line, for registered classes.
    name: ClassVar[str] = ""
    #: Suffix of the files in a folder of results, which has one result for each file of samples.
    suffix: ClassVar[str] = ""
    #: Whether ranks may write different samples at the same time; otherwise rank 0 writes all of them.
    parallel: ClassVar[bool] = False
    #: Whether the result of several ranks refers to the parts, which then remain.
    refers: ClassVar[bool] = False
    __pydantic_config__ = STRICT

    def begin(self, predictions: Predictions, path: Path) -> None:  # noqa: B027  (not all formats need it)
        """Begin the result at `path`, where nothing exists. Local, on rank 0, before any :meth:`write`."""

    @abstractmethod
    def write(self, predictions: Predictions, path: Path, samples: range) -> None:
        """Write these samples of all outputs to the result at `path`. Local; every sample is written by one call."""

    def is_own(self, path: Path) -> bool:
        """Return whether an existing file or folder is a result of this writer, which a new one may replace. Local."""
        return False


#: Writers by name, or by ``"FILE.py:CLASS"``.
WRITERS: Registry[Writer] = Registry("writer", Writer, "--format")


@WRITERS.register
@dataclass(frozen=True)
class Hdf5(Writer):
    """HDF5 file. One rank writes all data; several ranks write parts, which virtual datasets join."""

    name: ClassVar[str] = "hdf5"
    suffix: ClassVar[str] = ".h5"
    refers: ClassVar[bool] = True

    def write(self, predictions: Predictions, path: Path, samples: range) -> None:
        """Make `path` a hard link to the joined file, or a copy of it if the file system has no hard links."""
        try:
            os.link(predictions.file.filename, path)
        except OSError:
            shutil.copyfile(predictions.file.filename, path)

    def is_own(self, path: Path) -> bool:
        with open_to_read(path) as file:
            return bool(file.attrs.get("written_by") == WRITTEN_BY)


@WRITERS.register
@dataclass(frozen=True)
class WholeHdf5(Hdf5):
    """One HDF5 file that holds all data: with several ranks, rank 0 copies their parts into it."""

    name: ClassVar[str] = "hdf5-whole"
    refers: ClassVar[bool] = False

    def write(self, predictions: Predictions, path: Path, samples: range) -> None:
        """Copy the joined file to `path`, with the numbers of the parts."""
        copy_whole(Path(predictions.file.filename), path)


def check_result(writer: Writer, out: Path) -> None:
    """Check the methods of a writer, and that `out` can be written, before anything is computed. Local.

    Raises
    ------
    UserError, DataError
        A method has the wrong signature, the path cannot be written, or another program's file exists there.
    """
    check_methods(writer)
    check_replaceable(out, "one of an earlier job", writer.is_own)


#: Attributes that HDF5 keeps for dimension scales.
_SCALES = ("DIMENSION_LIST", "DIMENSION_LABELS", "REFERENCE_LIST")


def join(out: Path) -> bool:
    """Copy the parts of a file of predictions into the file, and remove them. Return whether there were parts. Local.

    Raises
    ------
    DataError
        If `out` is not an HDF5 file, or parts of it are missing.
    """
    with open_file(out) as file:
        # `needs` lists the parts to which a file of predictions refers.
        if "needs" not in file.attrs:
            return False
    with atomic_path(out) as partial:
        copy_whole(out, partial)
    parts = out.with_name(f"{out.name}.parts")
    if not parts.is_symlink():
        shutil.rmtree(parts, ignore_errors=True)
    return True


def copy_whole(source: Path, path: Path) -> None:
    """Copy a file of predictions to `path`, with the numbers of its virtual datasets. Local.

    The copy takes 32 MiB of memory, or that of one row of a sample if it is larger.

    Raises
    ------
    DataError
        If a part is missing, which HDF5 does not report.
    """
    shutil.copyfile(source, path)
    # Numbers come from `source`: HDF5 looks for the parts relative to the folder of the file that names them.
    with h5py.File(source, "r", locking=False) as old, h5py.File(path, "r+", locking=False) as new:
        for name in filter(None, old.attrs.get("needs", "").split("\n")):
            if not (source.parent / name).exists():
                raise DataError(f"cannot read {source.parent / name}, a part of {source}: no such file; apply again")
        for name in [name for name, dataset in new.items() if isinstance(dataset, h5py.Dataset) and dataset.is_virtual]:
            before, joined = new[name], new.create_dataset(f"{name} joined", old[name].shape, old[name].dtype)
            for key in before.attrs.keys() - set(_SCALES):
                joined.attrs[key] = before.attrs[key]
            for slab in slabs(joined.shape, 1, 1, joined.dtype.itemsize):
                joined[slab] = old[name][slab]
            for own, axis in zip(joined.dims, before.dims):
                own.label = axis.label
                for scale in axis.values():
                    axis.detach_scale(scale)  # or the scale would keep a reference to the deleted dataset
                    own.attach_scale(scale)
            # A dataset cannot change its storage: the new one takes the name of the virtual one.
            del new[name]
            new.move(joined.name, name)
        new.attrs.pop("needs", None)
