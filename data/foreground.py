"""Positions of foreground in the samples, around which windows are placed. They are found once, before a run.

A sample keeps a bounded number of positions of each class, drawn with equal probability, so that no labels are read to
place a window.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..dtensor.box import Box
from .disk import DataError
from .source import Dataset, sample_shape
from .survey import PART, read_box

__all__ = ["Foreground", "find_foreground", "most_positions"]

POSITIONS = 10_000
"""Largest number of positions of a class that a sample keeps."""
_TABLE = 1 << 26  # about the largest number of positions of all samples together
_FOUND = 9  # separates the random stream from others of a run

#: Positions of each class of a sample: indices of its elements, in order.
Found = dict[int, NDArray[Any]]


@dataclass(frozen=True)
class Foreground:
    """Positions of the foreground.

    Attributes
    ----------
    name : str
        The target whose elements they are.
    shapes : mapping of tuple
        Extents ``(*spatial,)`` of this target, by sample.
    positions : mapping of dict
        Positions by sample and class; 0 stands for all classes above 0.
    """

    name: str
    shapes: Mapping[int, tuple[int, ...]]
    positions: Mapping[int, Found]

    def draw(self, sample: int, draw: np.random.Generator) -> tuple[int, ...] | None:
        """Return a position of a sample, with equal probability for its classes; None if it has none."""
        classes = [own for own in self.positions.get(sample, {}).values() if len(own)]
        if not classes:
            return None
        own = classes[int(draw.integers(len(classes)))]
        at = np.unravel_index(int(own[int(draw.integers(len(own)))]), self.shapes[sample])
        return tuple(int(index) for index in at)

    @property
    def empty(self) -> list[int]:
        """Samples without foreground."""
        return [sample for sample, found in self.positions.items() if not any(map(len, found.values()))]


def find_foreground(
    dataset: Dataset,
    name: str,
    samples: Iterable[int],
    classes: Sequence[int] = (),
    seed: int = 0,
    most: int = POSITIONS,
    ignored: float | None = None,
) -> dict[int, Found]:
    """Find positions of foreground in a target of these samples, by blocks of rows. Local; reads all of them.

    Parameters
    ----------
    dataset, name
        Data set, and the target.
    samples
        Indices of the samples.
    classes
        Classes whose positions are found. By default one set of positions has all values above 0, in any channel.
    seed
        Seed of the draw of positions where a class has more than `most`.
    most
        Largest number of positions of a class in a sample.
    ignored
        Value that is no class.

    Raises
    ------
    DataError
        As in reading; classes of a target with several channels.
    """
    if classes and dataset.fields[name].shape[-1] > 1:
        raise DataError(
            f"data.foreground_classes: expected a target of class indices, got {name!r} with "
            f"{dataset.fields[name].shape[-1]} channels; leave it empty, for all values above 0"
        )
    return {int(k): _of_sample(dataset, name, int(k), list(classes) or [0], seed, most, ignored) for k in samples}


def most_positions(samples: int, classes: int) -> int:
    """Return the number of positions that a sample keeps of each class, so that the table of all is bounded."""
    return min(POSITIONS, max(100, _TABLE // max(1, samples * max(1, classes))))


def _of_sample(
    dataset: Dataset, name: str, index: int, classes: Sequence[int], seed: int, most: int, ignored: float | None
) -> Found:
    shape = sample_shape(dataset, name, index)
    count = int(np.prod(shape[:-1]))
    dtype = np.uint32 if count <= 2**32 else np.int64
    # A position has a random number of its own, and those with the smallest numbers are kept: the same for all blocks.
    draws = {one: np.random.default_rng([seed, _FOUND, index, one]) for one in classes}
    kept = {one: (np.empty(0, dtype), np.empty(0)) for one in classes}
    row = count // shape[0]
    rows = max(1, PART // (row * shape[-1]))
    for first in range(0, shape[0], rows):
        box = Box.of_shape((1, *shape)).replace(1, first, min(first + rows, shape[0]))
        values = read_box(dataset, name, index, box)[0]
        if ignored is not None:
            values[values == ignored] = 0
        for one in classes:
            there = (values == one if one else values > 0).any(axis=-1)
            at = (np.flatnonzero(there) + first * row).astype(dtype)
            kept[one] = _smallest(kept[one], (at, draws[one].random(len(at))), most)
    return {one: np.sort(at) for one, (at, _) in kept.items()}


def _smallest(
    kept: tuple[NDArray[Any], NDArray[Any]], more: tuple[NDArray[Any], NDArray[Any]], most: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the positions with the smallest numbers, with their numbers."""
    positions, numbers = (np.concatenate(pair) for pair in zip(kept, more))
    if len(positions) <= most:
        return positions, numbers
    chosen = np.argpartition(numbers, most - 1)[:most]
    return positions[chosen], numbers[chosen]
