"""Windows of the network's size in samples of any size: drawn by seed, epoch, sample and patch, around foreground, or
sliding at regular distances.

A window is the same under every decomposition. A rank reads the part of the file that its box of the window covers.

::

    index in the window  ->  + start  ->  index in the sample  ->  (+ shift, modulo its extent)  ->  index in the file

Where a sample ends within its window, inputs have no value: they become 0 after normalization.

Windows around foreground are placed at positions that are found once, before a run: a sample keeps a bounded number of
positions of each class, drawn with equal probability, so that no labels are read to place a window.

Sliding windows overlap; a sample smaller than the window has one window along that axis, which reaches beyond the
sample on both sides. The weights of a window are the product of one Gaussian per axis, so their sum over all windows is
a product of sums per axis, too::

    sample   |--------------------------|      window 8, overlap 0.5
    windows  [0     8)
                 [4     12)
                     ...
                               [18    26)      the last one ends with the sample
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from halograd.errors import UserError

from ..dtensor.box import Box
from .disk import DataError
from .sampler import Batch
from .source import Dataset, overlap, sample_shape
from .survey import PART, read_box

__all__ = [
    "AXES",
    "KEY",
    "Foreground",
    "SampleWindows",
    "Slide",
    "SlidingWindows",
    "find_foreground",
    "most_positions",
    "starts_along",
    "weights_along",
]

AXES = ("depth", "height", "width")
"""Spatial axes; a sample has the last ones of them."""
_POSITION, _CENTER = 3, 8  # separate the random streams from others of a run

Range = tuple[int, int]


class SampleWindows:
    """Reader of windows of the samples of a data set. Local; every rank draws the same.

    Parameters
    ----------
    dataset : Dataset
    extents : mapping of shapes, optional
        Shapes ``(*spatial, C)`` of the network's inputs, by name: that of the first field with spatial axes gives the
        window. By default, samples are read whole.
    seed : int
    key : str
        Key of the configuration, for messages.

    Attributes
    ----------
    fields : dict of Field
        Fields of the data set, with the extents of the window unless samples are read whole.
    moved : list of str
        Names of the fields with spatial axes. A window has the same position in all of them, each on its own grid.
    foreground : Foreground or None
        Positions on which the windows of :attr:`Batch.centered` samples are centered, moved as far as necessary to stay
        inside of the samples.
    outside : dict of float
        Values outside of the samples, by the name of the field; NaN marks inputs without a value.

    Raises
    ------
    DataError
        Samples without spatial axes, or with different numbers of them; grids that have no common parts.
    """

    def __init__(
        self,
        dataset: Dataset,
        extents: Mapping[str, tuple[int, ...]] | None = None,
        seed: int = 0,
        key: str = "data.patches",
    ) -> None:
        self.dataset, self.seed, self.key = dataset, seed, key
        self.moved = [name for name, field in dataset.fields.items() if len(field.shape) > 1]
        self.outside = {name: 0.0 if field.is_target else math.nan for name, field in dataset.fields.items()}
        self.fields = dict(dataset.fields)
        self.cut, self.foreground = extents is not None, cast(Foreground | None, None)
        self._shifted: frozenset[int] = frozenset()
        self._before: tuple[int, ...] = ()
        self._last: tuple[Any, tuple[int, ...]] = None, ()
        self._steps: dict[str, tuple[int, ...]] = {}
        if extents is not None:
            self._find_grids(key)
            self._window = self._units_of_window(extents[self.moved[0]][:-1])
            self.fields |= {name: replace(self.fields[name], shape=self._cut_shape(name)) for name in self.moved}

    def over(self, dataset: Dataset) -> SampleWindows:
        """Return a reader of the whole samples of another data set."""
        return SampleWindows(dataset)

    # -- grids -----------------------------------------------------------------------------------------

    def _find_grids(self, key: str) -> None:
        """Find the units of all grids: windows and shifts start at boundaries that all grids have."""
        fields = self.dataset.fields
        if not self.moved:
            raise DataError(f"{key}: expected samples with spatial axes, got numbers per sample only; remove it")
        shapes = {name: fields[name].shape[:-1] for name in self.moved}
        first = shapes[self.moved[0]]
        uneven = [name for name, shape in shapes.items() if len(shape) != len(first)]
        if uneven:
            raise DataError(f"{key}: expected samples of {len(first)} spatial axes, got {uneven[0]!r} of others")
        # Units per axis: the greatest number of equal parts into which all grids can be cut. An axis of extent 1 (of
        # weights) does not count.
        divisors = [reduce(math.gcd, [n for n in axis if n > 1] or [1]) for axis in zip(*shapes.values())]
        # Elements per unit; 0 along axes on which a field has one element for all units.
        self._steps = {
            name: tuple(n // unit if n > 1 else 0 for n, unit in zip(shape, divisors)) for name, shape in shapes.items()
        }
        per_sample = getattr(self.dataset, "extents", None)
        extents = per_sample or {name: np.array([shape], np.int64) for name, shape in shapes.items()}
        #: Extents in units, per sample (or of one for all) and axis.
        self._units = np.ones((len(extents[self.moved[0]]), len(first)), np.int64)
        # The first field comes last, so its extents count where fields disagree; the check below reports these.
        for name in reversed(self.moved):
            steps = np.array(self._steps[name])
            self._units = np.where(steps, extents[name] // np.maximum(steps, 1), self._units)
        for name in self.moved:
            steps = np.array(self._steps[name])
            wrong = np.flatnonzero((np.where(steps, steps * self._units, extents[name]) != extents[name]).any(axis=1))
            if len(wrong):
                index, have = int(wrong[0]), extents[name][wrong[0]].tolist()
                raise DataError(
                    f"{self.dataset.place(index)}: expected extents of {name!r} that are multiples of "
                    f"{[max(1, n) for n in self._steps[name]]}, the same ones in all fields, got {have}; pad them"
                )

    def _units_of_window(self, window: Sequence[int]) -> tuple[int, ...]:
        first, *others = self.moved
        steps, fields = self._steps[first], self.dataset.fields
        # An axis along which the first field has one value is not cut.
        uncut = (self._units == self._units[0]).all(axis=0)
        if any(n % step if step else n != 1 or not one for n, step, one in zip(window, steps, uncut)):
            with_others = ", ".join(f"{name!r} of {fields[name].shape[:-1]}" for name in others) or "that"
            raise DataError(
                f"{self.key}: expected a window {tuple(window)} of whole parts of every grid, got {first!r} of "
                f"{fields[first].shape[:-1]} with {with_others}; choose another resolution of the network"
            )
        return tuple(n // step if step else whole for n, step, whole in zip(window, steps, self._units_of(0)))

    def _cut_shape(self, name: str) -> tuple[int, ...]:
        shape = self.dataset.fields[name].shape
        return (*(n * step if step else 1 for n, step in zip(self._window, self._steps[name])), shape[-1])

    def shift(self, axes: Collection[str], before: Sequence[int] = ()) -> None:
        """Shift samples circularly along these axes, by a random distance each. Local; for an augmentation.

        Parameters
        ----------
        axes
            Names of axes, as in :data:`AXES`.
        before
            Bounds of the whole numbers that the augmentation itself draws first from :meth:`random`.

        Raises
        ------
        DataError
            Grids as for windows; a sample is smaller than its window along one of the axes.
        """
        if not self._steps and axes:
            self._find_grids("data.augment")
            self._window = tuple(self._units[0].tolist())
        rank = len(self.dataset.fields[self.moved[0]].shape) - 1
        names = AXES[len(AXES) - rank :]
        self._shifted, self._before = frozenset(names.index(axis) for axis in axes), tuple(before)
        for axis in self._shifted:
            if (self._units[:, axis] < self._window[axis]).any():
                raise DataError(
                    f"data.augment.shifts: expected samples of at least the window's extent along {names[axis]}, got "
                    f"{self.dataset.place(int(self._units[:, axis].argmin()))} with fewer elements; remove that axis"
                )

    def pads(self, name: str) -> bool:
        """Return whether a sample may end within its window, so that this field has no value for elements outside.

        A field with an extent of 1 on the axis where samples end has one value for all elements of that axis.
        """
        if not self.cut or name not in self.moved:
            return False
        ends = (self._units < self._window).any(axis=0)
        return bool(ends.any() and np.array(self._steps[name])[ends].all())

    @property
    def size(self) -> str:
        """Extents of the window in the first field, as a string: ``"64x64"``."""
        return "x".join(map(str, self.fields[self.moved[0]].shape[:-1]))

    @property
    def sizes(self) -> tuple[list[int], list[int]]:
        """Smallest and largest extents of all samples per axis, in the first field."""
        return self._scaled(self._units.min(axis=0)), self._scaled(self._units.max(axis=0))

    @property
    def smallest(self) -> tuple[int, str]:
        """Index of the sample that fills the smallest part of its window along an axis, and the extents of this sample
        in the first field, as a string.
        """
        index = int((self._units / np.array(self._window)).min(axis=1).argmin())
        return index, "x".join(map(str, self._extents(index)))

    @property
    def share(self) -> float:
        """Fraction of the elements of all samples that one window per sample contains."""
        if not self.cut:
            return 1.0
        inside = np.minimum(self._units, self._window).prod(axis=1, dtype=np.float64)
        return float(inside.sum() / self._units.prod(axis=1, dtype=np.float64).sum())

    def _extents(self, index: int) -> list[int]:
        return self._scaled(self._units_of(index))

    def _scaled(self, units: Iterable[int]) -> list[int]:
        return [int(n) * max(1, step) for n, step in zip(units, self._steps[self.moved[0]])]

    # -- positions -------------------------------------------------------------------------------------

    def random(self, batch: Batch, k: int) -> np.random.Generator:
        """Return the random generator that draws the window of sample `k` of a batch."""
        return np.random.default_rng([self.seed, _POSITION, *batch.key(k)])

    def start(self, batch: Batch, k: int) -> tuple[int, ...]:
        """Return the start of the window in sample `k` of a batch, per axis in units of all grids.

        Samples of a batch that is not augmented have the middle window. A smaller sample is in the middle of its
        window, whose start is negative then.
        """
        # The fields of a sample are read one after the other, with the same window.
        key = (batch.augmented, batch.centered[k : k + 1], *batch.key(k))
        if self._last[0] != key:
            self._last = key, self._draw(batch, k)
        return self._last[1]

    def _draw(self, batch: Batch, k: int) -> tuple[int, ...]:
        units = self._units_of(batch.indices[k])
        free = [n - window for n, window in zip(units, self._window)]
        if not batch.augmented:
            # Negative for a sample that is smaller than the window: half of the padding is before it.
            return tuple(n // 2 for n in free)
        draw = self.random(batch, k)
        # The augmentation draws its flips and turns from an equal generator; skip these numbers.
        for bound in self._before:
            draw.integers(bound)
        starts = [int(draw.integers(n + 1)) if n >= 0 else n // 2 for n in free]
        shifts = [int(draw.integers(n)) if axis in self._shifted else 0 for axis, n in enumerate(units)]
        if self.foreground is not None and batch.centered and batch.centered[k]:
            # A generator of its own: with foreground, the other windows stay where they were.
            own = np.random.default_rng([self.seed, _CENTER, *batch.key(k)])
            for axis, at in enumerate(self._center(self.foreground, batch.indices[k], own)):
                if at is not None and free[axis] >= 0:
                    # Positions of the foreground are those of the file; the window is placed in the shifted sample.
                    first = (at - shifts[axis]) % units[axis] - self._window[axis] // 2
                    starts[axis] = min(max(first, 0), free[axis])
        return tuple(start + shift for start, shift in zip(starts, shifts))

    def _center(self, foreground: Foreground, index: int, draw: np.random.Generator) -> list[int | None]:
        """Return a random position of the foreground of a sample, per axis in units; None for axes along which the
        target has one element. Empty without foreground.
        """
        steps, position = self._steps[foreground.name], foreground.draw(index, draw)
        if position is None:
            return []
        return [at // step if step else None for at, step in zip(position, steps)]

    def _units_of(self, index: int) -> list[int]:
        units: list[int] = self._units[index if len(self._units) > 1 else 0].tolist()
        return units

    def starts(self, name: str, batch: Batch, k: int) -> tuple[int, ...]:
        """Return the start of the window in sample `k` of a batch, per axis in elements of a field."""
        if not self._steps:
            return (0,) * (len(self.fields[name].shape) - 1)
        return tuple(start * step for start, step in zip(self.start(batch, k), self._steps[name]))

    # -- reading ---------------------------------------------------------------------------------------

    def read_batch(self, name: str, batch: Batch, box: Box, out: NDArray[Any]) -> tuple[slice, ...]:
        """Read a box of the windows of a batch, as :meth:`Dataset.read` does. Local."""
        if name not in self.moved or not (self.cut or (self._shifted and batch.augmented)):
            return self.dataset.read(name, batch.indices, box, out)
        part, filled = overlap(box, (len(batch.indices), *self.fields[name].shape))
        if part.size == 0:
            return filled
        for k in range(*part.ranges[0]):
            # One by one, because each sample has a window of its own.
            at: Any = (k - box.start[0], *filled[1:])
            self.read(name, batch, k, Box.of_ranges(part.ranges[1:]), out[at])
        return filled

    def read(self, name: str, batch: Batch, k: int, box: Box, out: NDArray[Any]) -> None:
        """Read a box of sample `k` of a batch. Local.

        Parameters
        ----------
        box
            Box ``(*spatial, channels)`` in the window's coordinates. It may reach outside of the window, where the
            sample may go on; outside of the sample, `out` gets the value of :attr:`outside`.
        out : array of shape ``box.shape``
            Any strides.
        """
        index = batch.indices[k]
        shape = sample_shape(self.dataset, name, index)
        starts = self.starts(name, batch, k)
        pieces = [
            list(_pieces(low + start, high + start, n, axis in self._shifted and n > 1))
            for axis, ((low, high), start, n) in enumerate(zip(box.ranges, starts, shape[:-1]))
        ]
        # A part of the box lies outside of the sample.
        if any(sum(high - low for (low, high), _ in along) < n for along, n in zip(pieces, box.shape)):
            out[...] = self.outside[name]
        for chosen in itertools.product(*pieces):
            part = Box.of_ranges([(0, 1), *(source for source, _ in chosen), box.ranges[-1]])
            self.dataset.read(name, [index], part, out[tuple(slice(*target) for _, target in chosen)][None])


def _pieces(low: int, high: int, extent: int, periodic: bool) -> Iterator[tuple[Range, Range]]:
    """Yield the contiguous parts within a sample of an interval along an axis, with their positions in the interval."""
    if not periodic:
        first, last = max(low, 0), min(high, extent)
        if first < last:
            yield (first, last), (first - low, last - low)
        return
    at = low
    while at < high:
        first = at % extent
        count = min(high - at, extent - first)
        yield (first, first + count), (at - low, at - low + count)
        at += count


KEY = "--window"
#: Smallest weight along an axis; that of the middle is 1.
SMALLEST = 1e-3
# As in nnU-Net and MONAI (sigma_scale = 0.125).
_SIGMA = 1 / 8  # of the window


def starts_along(extent: int, window: int, overlap: float, multiple: int = 1) -> list[int]:
    """Return the starts of the windows along an axis of a sample. `extent` and `window` are multiples of `multiple`,
    and so are the starts. `overlap` is the fraction of a window that overlaps the next one.

    >>> starts_along(26, 8, 0.5), starts_along(6, 8, 0.5)
    ([0, 4, 8, 12, 16, 18], [-1])
    """
    if extent <= window:
        return [(extent - window) // 2 // multiple * multiple]
    stride = max(1, round(window * (1 - overlap) / multiple)) * multiple
    return [*range(0, extent - window, stride), extent - window]


def weights_along(window: int) -> NDArray[np.float64]:
    """Return the weights of a window along an axis, ``(window,)``: a Gaussian with window / 8 as standard deviation.

    The largest is 1. The smallest is at least :data:`SMALLEST`, so that elements at the border of a sample, which have
    no other window, keep their accuracy.
    """
    # Without the smallest distance, weights of an even window would all be below 1.
    distance = np.abs(np.arange(window) - (window - 1) / 2)
    weights = np.exp(-0.5 * ((distance**2 - distance.min() ** 2) / (_SIGMA * window) ** 2))
    return np.maximum(weights, SMALLEST)


@dataclass(frozen=True)
class Slide:
    """Settings of sliding windows.

    Attributes
    ----------
    window
        Extents of a window, per axis.
    overlap
        Fraction of a window that overlaps the next one.
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

    Windows are numbered row-major over their starts, with the longest axis of the sample as the slowest one.

    Parameters
    ----------
    dataset
    extents
        Shapes of the network's inputs, as for `SampleWindows`.
    overlap
        Fraction of a window, in [0, 1), that overlaps the next one.
    multiples
        Numbers of which the starts are multiples, per axis in elements of the first field.

    Raises
    ------
    DataError
        As for `SampleWindows`; an extent of a sample is not a multiple of its number in `multiples`.
    """

    def __init__(
        self, dataset: Dataset, extents: Mapping[str, tuple[int, ...]], overlap: float, multiples: Sequence[int]
    ) -> None:
        super().__init__(dataset, extents, key=KEY)
        self._inputs, self._overlap, self._multiple = dict(extents), overlap, tuple(multiples)
        steps = [max(1, step) for step in self._steps[self.moved[0]]]
        # In units: starts are multiples of a unit and of `multiples`.
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
        return SlidingWindows(dataset, self._inputs, self._overlap, self._multiple)

    @property
    def window(self) -> tuple[int, ...]:
        """Extents of a window in the first field."""
        return self.fields[self.moved[0]].shape[:-1]

    def extents_of(self, index: int) -> tuple[int, ...]:
        """Return the extents of a sample in the first field."""
        return sample_shape(self.dataset, self.moved[0], index)[:-1]

    def longest(self, index: int) -> int:
        """Return the number of the longest axis of a sample; of the first one if several are as long."""
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

    def position_of(self, index: int, number: int) -> tuple[int, ...]:
        """Return, for each axis, the position of window `number` of sample `index` in the list of starts."""
        first = self.longest(index)
        counts = [len(starts) for starts in self._starts_in_units(index)]
        order = [first, *(axis for axis in range(len(counts)) if axis != first)]
        numbers = dict(zip(order, np.unravel_index(number, [counts[axis] for axis in order])))
        return tuple(int(numbers[axis]) for axis in range(len(counts)))

    def _draw(self, batch: Batch, k: int) -> tuple[int, ...]:
        index: Any = batch.indices[k]
        position = self.position_of(index, batch.patches[k])
        return tuple(starts[at] for starts, at in zip(self._starts_in_units(index), position))


POSITIONS = 10_000
"""Largest number of positions of a class that a sample keeps."""
_TABLE = 1 << 26  # about the largest number of positions of all samples together
_FOREGROUND = 9  # separates the random stream from others of a run

#: Positions of each class of a sample: indices of its elements, in order.
Positions = dict[int, NDArray[Any]]


@dataclass(frozen=True)
class Foreground:
    """Positions of foreground in a target, by sample and class.

    Attributes
    ----------
    name : str
        The target whose elements they are.
    shapes : mapping of tuple
        Extents ``(*spatial,)`` of this target, by sample.
    positions : mapping of dict
        Positions by sample and class; the class 0 stands for all values above 0.
    """

    name: str
    shapes: Mapping[int, tuple[int, ...]]
    positions: Mapping[int, Positions]

    def draw(self, sample: int, draw: np.random.Generator) -> tuple[int, ...] | None:
        """Draw a class of a sample and one of its positions, each with equal probability, and return the position, per
        axis; None without positions.
        """
        classes = [own for own in self.positions.get(sample, {}).values() if len(own)]
        if not classes:
            return None
        own = classes[int(draw.integers(len(classes)))]
        at = np.unravel_index(int(own[int(draw.integers(len(own)))]), self.shapes[sample])
        return tuple(int(index) for index in at)

    @property
    def empty(self) -> list[int]:
        """Indices of the samples without foreground."""
        return [sample for sample, positions in self.positions.items() if not any(map(len, positions.values()))]


def find_foreground(
    dataset: Dataset,
    name: str,
    samples: Iterable[int],
    classes: Sequence[int] = (),
    seed: int = 0,
    most: int = POSITIONS,
    ignored: float | None = None,
) -> dict[int, Positions]:
    """Return positions of foreground in a target, by sample and class. Local; reads all `samples`, by blocks of rows.

    Parameters
    ----------
    dataset, name
        Data set, and the target.
    samples
        Indices of the samples.
    classes
        Classes whose positions are found. By default one set of positions has all values above 0, in any channel.
    seed
        Seed of the draw, if a class has more than `most` positions.
    most
        Largest number of positions of a class in a sample.
    ignored
        Value that is not a class.

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
    """Return how many positions of each class a sample keeps at most: from :data:`POSITIONS` down to 100, the fewer the
    more samples and classes there are.
    """
    return min(POSITIONS, max(100, _TABLE // max(1, samples * max(1, classes))))


def _of_sample(
    dataset: Dataset, name: str, index: int, classes: Sequence[int], seed: int, most: int, ignored: float | None
) -> Positions:
    shape = sample_shape(dataset, name, index)
    count = int(np.prod(shape[:-1]))
    # All positions stay in memory during a run: 4 B each where that suffices.
    dtype = np.uint32 if count <= 2**32 else np.int64
    # A position has a random number of its own, and those with the smallest numbers are kept: the same for all blocks.
    draws = {label: np.random.default_rng([seed, _FOREGROUND, index, label]) for label in classes}
    kept = {label: (np.empty(0, dtype), np.empty(0)) for label in classes}
    row = count // shape[0]
    rows = max(1, PART // (row * shape[-1]))
    for first in range(0, shape[0], rows):
        box = Box.of_shape((1, *shape)).replace(1, first, min(first + rows, shape[0]))
        values = read_box(dataset, name, index, box)[0]
        if ignored is not None:
            values[values == ignored] = 0
        for label in classes:
            there = (values == label if label else values > 0).any(axis=-1)
            at = (np.flatnonzero(there) + first * row).astype(dtype)
            kept[label] = _smallest(kept[label], (at, draws[label].random(len(at))), most)
    return {label: np.sort(at) for label, (at, _) in kept.items()}


def _smallest(
    kept: tuple[NDArray[Any], NDArray[Any]], more: tuple[NDArray[Any], NDArray[Any]], most: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return, of two sets of positions with random numbers, the `most` positions with the smallest numbers, and these
    numbers.
    """
    positions, numbers = (np.concatenate(pair) for pair in zip(kept, more))
    if len(positions) <= most:
        return positions, numbers
    # Equal to a uniform draw without replacement, but the number of positions need not be known before.
    chosen = np.argpartition(numbers, most - 1)[:most]
    return positions[chosen], numbers[chosen]
