"""What a file of predictions says about its samples: the file and the number there that each is of."""

from __future__ import annotations

import os
from collections.abc import Iterable

import h5py
import numpy as np

from .source import Dataset

__all__ = ["SOURCES", "write_sources"]

#: Datasets of :func:`write_sources`.
SOURCES = ("source_file", "source_sample")


def write_sources(file: h5py.File, dataset: Dataset, samples: Iterable[int]) -> None:
    """Write the datasets :data:`SOURCES`: path, and number in that file (from 0), of each of these samples. Local.

    Parameters
    ----------
    file
        Open to write.
    dataset
        Has a method ``source(index)``, which returns both, or all samples are of its ``path``.
    samples
        Numbers in the data set, in the order of the predictions.
    """
    source = getattr(dataset, "source", lambda index: (str(dataset.path), index))
    found = [source(int(index)) for index in samples]
    # Bytes: a name on the disk need not be valid UTF-8.
    names = np.array([os.fsencode(name) for name, _ in found], object)
    file.create_dataset(SOURCES[0], data=names, dtype=h5py.string_dtype())
    file[SOURCES[1]] = np.array([number for _, number in found], np.int64)
