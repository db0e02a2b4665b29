"""How often each class occurs in the targets of some samples."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ..dtensor.box import Box
from .errors import DataError
from .source import Dataset
from .targets import TargetReduction

__all__ = ["count_classes"]

#: Elements that are read at a time, but for a single row that has more.
_PART = 1 << 20


def count_classes(
    dataset: Dataset, name: str, classes: int, samples: Iterable[int], reduction: TargetReduction | None = None
) -> NDArray[np.int64]:
    """Positions of each class in a target of these samples, by blocks of rows. Local; reads all of them.

    Parameters
    ----------
    dataset, name
        What is read; class indices, those outside ``0 .. classes - 1`` (ignored ones) do not count.
    classes
        How many there are.
    samples
        Their numbers.
    reduction
        How patches are made of cells, of which then the patches count.

    Raises
    ------
    DataError
        As in reading; a target that is between two classes.
    """
    counts, fine = np.zeros(classes, np.int64), dataset.fields[name].shape
    shape = fine if reduction is None else reduction.coarse_shape(fine)
    rows = max(1, _PART * shape[0] // math.prod(fine))
    for sample in samples:
        for first in range(0, shape[0], rows):
            box = Box.of_shape((1, *shape)).replace(1, first, min(first + rows, shape[0]))
            labels = _read(dataset, name, int(sample), box, reduction).reshape(-1)
            labels = labels[(labels >= 0) & (labels < classes)]
            if np.any(labels != np.rint(labels)):
                raise DataError(
                    f"{dataset.path}: sample {sample}: expected numbers of classes in {name!r}, which are counted, got "
                    f"{labels[labels != np.rint(labels)][0]:g}; give the weights as numbers"
                )
            counts += np.bincount(labels.astype(np.int64), minlength=classes)
    return counts


def _read(dataset: Dataset, name: str, sample: int, box: Box, reduction: TargetReduction | None) -> NDArray[np.float32]:
    out = np.empty(box.shape, np.float32)
    if reduction is None:
        dataset.read(name, [sample], box, out)
        return out
    fine = reduction.fine_box(box)
    cells = np.empty(fine.shape, np.float32)
    dataset.read(name, [sample], fine, cells)
    reduction.apply(cells, out)
    return out
