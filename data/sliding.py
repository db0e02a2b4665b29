"""Sliding windows: all windows of a sample at regular distances, with overlap, and their weights.

::

    sample   |--------------------------|      window 8, overlap 0.5
    windows  [0     8)
                 [4     12)
                     ...
                               [18    26)      the last one ends with the sample

A sample smaller than the window has one window along that axis, which reaches beyond the sample on both sides. The
weights of a window are the product of one Gaussian per axis, so their sum over all windows is a product of sums per
axis, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halograd.errors import UserError

from .disk import DataError
from .sampler import Batch
from .source import Dataset, sample_shape
from .windows import SampleWindows

__all__ = ["KEY", "Slide", "SlidingWindows", "starts_along", "weights_along"]

KEY = "--window"
#: Smallest weight along an axis; that of the middle is 1.
SMALLEST = 1e-3
_SIGMA = 1 / 8  # of the window


def starts_along(extent: int, window: int, overlap: float, multiple: int = 1) -> list[int]:
    """Return the starts of the windows along an axis: multiples of `multiple`, as are both extents.

    >>> starts_along(26, 8, 0.5), starts_along(6, 8, 0.5)
    ([0, 4, 8, 12, 16, 18], [-1])
    """
    if extent <= window:
        return [(extent - window) // 2 // multiple * multiple]
    stride = max(1, round(window * (1 - overlap) / multiple)) * multiple
    return [*range(0, extent - window, stride), extent - window]


def weights_along(window: int) -> NDArray[np.float64]:
    """Return the weights of a window along an axis, ``(window,)``: a Gaussian of an eighth of the window.

    The largest is 1. The smallest is at least :data:`SMALLEST`, so that elements at the border of a sample, which have
    no other window, keep their accuracy.
    """
    distance = np.abs(np.arange(window) - (window - 1) / 2)
    found = np.exp(-0.5 * ((distance**2 - distance.min() ** 2) / (_SIGMA * window) ** 2))
    return np.maximum(found, SMALLEST)


@dataclass(frozen=True)
class Slide:
    """Sliding windows that a user asks for.

    Attributes
    ----------
    window
        Extents of a window, per axis.
    overlap
        Share of a window that the next one has too.
    """

    window: tuple[int, ...]
    overlap: float = 0.5

    def __post_init__(self) -> None:
        if not self.window or min(self.window) < 1:
            raise UserError(f"{KEY}: expected one extent per axis, such as 128,128,128, got {self._text!r}")
        if not 0 <= self.overlap < 1:
            raise UserError(f"--overlap: expected a number from 0 to below 1, got {self.overlap}")

    def count(self, extents: Sequence[int]) -> int:
        """Return the number of windows of a sample of these extents."""
        if len(extents) != len(self.window):
            raise UserError(f"{KEY}: expected one extent for each of {len(extents)} axes, got {self._text!r}")
        return math.prod(len(starts_along(n, window, self.overlap)) for n, window in zip(extents, self.window))

    @property
    def _text(self) -> str:
        return ",".join(map(str, self.window))


class SlidingWindows(SampleWindows):
    """Reader of all windows of the samples of a data set: `Batch.patches` has the number of the window. Local.

    Windows are numbered row-major over their starts; the longest axis of a sample is the first one.

    Parameters
    ----------
    dataset
    wanted
        Shapes of the network's inputs, as for `SampleWindows`.
    overlap
        Share of the window, in [0, 1), that the next one has too.
    multiples
        Numbers that divide the starts, per axis in elements of the first field.

    Raises
    ------
    DataError
        As `SampleWindows`; a sample is not divided by `multiples`.
    """

    def __init__(
        self, dataset: Dataset, wanted: Mapping[str, tuple[int, ...]], overlap: float, multiples: Sequence[int]
    ) -> None:
        super().__init__(dataset, wanted, key=KEY)
        self._wanted, self._overlap, self._asked = dict(wanted), overlap, tuple(multiples)
        steps = [max(1, step) for step in self._steps[self.moved[0]]]
        self._multiples = [math.lcm(step, n) // step for step, n in zip(steps, multiples)]
        wrong = np.flatnonzero((self._units % self._multiples != 0).any(axis=1))
        if len(wrong):
            index = int(wrong[0])
            raise DataError(
                f"{dataset.place(index)}: expected extents that are multiples of {list(multiples)}, those of the "
                f"coarser predictions, with {KEY}, got {self._extents(index)}; pad the samples"
            )

    def over(self, dataset: Dataset) -> SlidingWindows:
        """Return the windows of the samples of another data set."""
        return SlidingWindows(dataset, self._wanted, self._overlap, self._asked)

    @property
    def window(self) -> tuple[int, ...]:
        """Extents of a window in the first field."""
        return self.fields[self.moved[0]].shape[:-1]

    def extents_of(self, index: int) -> tuple[int, ...]:
        """Return the extents of a sample in the first field."""
        return sample_shape(self.dataset, self.moved[0], index)[:-1]

    def longest(self, index: int) -> int:
        """Return the first one of the longest axes of a sample."""
        extents = self.extents_of(index)
        return extents.index(max(extents))

    def all_starts(self, index: int) -> list[list[int]]:
        """Return the starts of the windows of a sample, per axis in elements of the first field."""
        units = self._starts_in_units(index)
        return [[n * max(1, step) for n in starts] for starts, step in zip(units, self._steps[self.moved[0]])]

    def _starts_in_units(self, index: int) -> list[list[int]]:
        units = zip(self._units_of(index), self._window, self._multiples)
        return [starts_along(extent, window, self._overlap, n) for extent, window, n in units]

    def count(self, index: int) -> int:
        """Return the number of windows of a sample."""
        return math.prod(map(len, self._starts_in_units(index)))

    def place_of(self, index: int, number: int) -> tuple[int, ...]:
        """Return the place of a window among the starts of each axis."""
        first = self.longest(index)
        counts = [len(starts) for starts in self._starts_in_units(index)]
        order = [first, *(axis for axis in range(len(counts)) if axis != first)]
        found = dict(zip(order, np.unravel_index(number, [counts[axis] for axis in order])))
        return tuple(int(found[axis]) for axis in range(len(counts)))

    def _draw(self, batch: Batch, k: int) -> tuple[int, ...]:
        index: Any = batch.indices[k]
        places = self.place_of(index, batch.patches[k])
        return tuple(starts[at] for starts, at in zip(self._starts_in_units(index), places))
