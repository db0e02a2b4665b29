"""Augmentation: random turns, mirroring, shifts and changes of the values of samples in training.

The changes of a sample depend on the seed, the epoch and the index of the sample, and not on the rank, so they are the
same for every decomposition. A rank reads the box of the file that its own box maps to: for a mirrored sample, the
mirrored box. So no rank reads more than without augmentation, and there is no communication.

::

    output index  ->  mirrored?  ->  which axis of the file (quarter turns)  ->  + window  ->  + shift, modulo extent
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field as PydanticField

from halograd.registry import Registry
from halograd.schema import Below1, NotNegative, Table, Text

from ..dtensor.box import Box
from .disk import DataError
from .sampler import Batch
from .source import Dataset
from .structure import Field

__all__ = [
    "AUGMENTATIONS",
    "AXES",
    "Augmentation",
    "AugmentationSettings",
    "Rules",
    "SamplePlacement",
    "StandardAugmentation",
]

AXES = ("depth", "height", "width")
"""Spatial axes; a sample has the last ones of them."""
_PLACE, _ALTER, _NOISE, _OWN = 3, 4, 5, 6  # separate the random streams from each other and from those of the sampler


Axis = Literal["depth", "height", "width"]


class AugmentationSettings(Table):
    """``[data.augment]``: settings of an augmentation; base of the settings of one of your own."""

    kind: Text = "standard"
    """The changes below, or an augmentation of your own."""


class Augmentation(ABC):
    """Random changes of samples in training. Local; all ranks draw the same changes.

    Changes may depend on the seed, the epoch and the number of the sample only, never on the rank or its box: draw them
    from the generator of :meth:`random`. A subclass overrides :meth:`alter`, to change values of inputs after
    normalization, or :meth:`read`, to read other elements of the file.

    Parameters
    ----------
    settings
        Settings, of the class `Settings`.
    fields
        Fields of the data set.
    wanted : mapping of shapes
        Shapes of the inputs of the network, by name.
    seed : int

    Attributes
    ----------
    fields : dict of Field
        Fields of the samples that are read: those of the data set, unless samples are cropped.
    """

    #: Name in the configuration, for registered classes.
    name: ClassVar[str] = ""
    #: Class of the settings.
    Settings: ClassVar[type[AugmentationSettings]] = AugmentationSettings

    def __init__(
        self, settings: Any, fields: Mapping[str, Field], wanted: Mapping[str, tuple[int, ...]], seed: int
    ) -> None:
        self.settings, self.seed, self.fields = settings, seed, dict(fields)

    @classmethod
    def crops(cls, settings: Any) -> bool:
        """Return whether samples may be larger than the inputs of the network."""
        return False

    @property
    def window(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Extents of the window that is read of every sample, and of the samples of the file; equal if there is no
        window.
        """
        return (), ()

    def inside(self, name: str, batch: Batch, box: Box) -> Box:
        """Return the part of a box that lies within the samples of a batch."""
        return box & Box.of_shape((len(batch.indices), *self.fields[name].shape))

    def random(self, name: str, batch: Batch, k: int) -> np.random.Generator:
        """Return the random generator of a field of sample `k` of a batch: the same on all ranks, under every cut."""
        return np.random.default_rng([self.seed, _OWN, batch.epoch, batch.indices[k], *name.encode()])

    def read(self, dataset: Dataset, name: str, batch: Batch, box: Box, out: NDArray[Any]) -> tuple[slice, ...]:
        """Read the box of a batch as :meth:`Dataset.read`, with its samples changed if ``batch.augmented``."""
        return dataset.read(name, batch.indices, box, out)

    @abstractmethod
    def alter(self, name: str, batch: Batch, box: Box, part: NDArray[Any]) -> None:
        """Change the values of a field in place, if ``batch.augmented``. Local.

        Parameters
        ----------
        name
            Name of the field; ``self.fields[name].is_target`` is whether it is a target.
        box
            Box of the batch that this rank reads, ``(samples, *spatial, channels)``; it may reach beyond the samples.
        part
            Values of the box that lie within the samples; for inputs, after normalization.
        """


#: Augmentations by name, or by ``"FILE.py:CLASS"``.
AUGMENTATIONS: Registry[Augmentation] = Registry("augmentation", Augmentation, "data.augment.kind")


class Rules(AugmentationSettings):
    """``[data.augment]``: random changes of samples in training, drawn by seed, epoch and number of the sample.

    All fields with spatial axes are moved together, including targets. `noise`, `brightness` and `contrast` change only
    inputs, after normalization.
    """

    flips: list[Axis] = PydanticField(default_factory=list)
    """Axes along which a sample is mirrored, each with the probability 1/2."""
    turns: bool = False
    """Whether to rotate samples by multiples of 90 degrees, in the plane of height and width."""
    shifts: list[Axis] = PydanticField(default_factory=list)
    """Axes along which a sample is shifted circularly, by any distance."""
    crop: bool = False
    """Whether samples may be larger than the input of the network: a random window is read, in evaluation the middle
    one."""
    noise: NotNegative = 0.0
    """Standard deviation of the noise that is added to every number."""
    brightness: NotNegative = 0.0
    """Maximum number that is added to a whole channel."""
    contrast: Below1 = 0.0
    """Range of the factor of a channel, ``1 - contrast`` to ``1 + contrast``."""
    vectors: list[list[Text]] = PydanticField(default_factory=list)
    """Names of channels of a dataset that are the components of a vector along the spatial axes. They change sign when
    a sample is mirrored, and are exchanged when it is rotated."""


@dataclass(frozen=True)
class SamplePlacement:
    """Map from elements of a sample to elements of the file, per axis of the sample.

    Attributes
    ----------
    axes
        The axis of the file.
    mirrored
        Whether the axis is reversed.
    starts
        Start of the window, per axis of the file and in units of `units`; the window wraps around at the end.
    """

    axes: tuple[int, ...]
    mirrored: tuple[bool, ...]
    starts: tuple[int, ...]

    def pieces(self, axis: int, low: int, high: int, extent: int, whole: int, start: int) -> Iterator[_Piece]:
        """Yield the contiguous parts in the file of an interval of the sample along an axis.

        `extent` and `whole` are the lengths of the axis in the sample and in the file; `start` is the window's start in
        the file.
        """
        if self.mirrored[axis]:
            low, high = extent - high, extent - low
        while low < high:
            first = (low + start) % whole
            count = min(high - low, whole - first)
            begin = extent - low - count if self.mirrored[axis] else low
            yield (first, first + count), (begin, begin + count)
            low += count


_Piece = tuple[tuple[int, int], tuple[int, int]]


@AUGMENTATIONS.register
class StandardAugmentation(Augmentation):
    """Reader of samples with random changes. Local; every rank draws the same.

    Parameters
    ----------
    settings
        Changes that are drawn.
    fields
        Fields of the data set. Fields with spatial axes get the same turns and shifts, each on its own grid; vectors
        per sample do not.
    wanted : mapping of shapes
        Shapes of the network's inputs, by name: the size of the window if `crop` is set.
    seed : int

    Attributes
    ----------
    fields : dict of Field
        Fields after cropping.

    Raises
    ------
    DataError
        Axes that samples lack; turns of samples that are not square; grids that do not fit windows or shifts; unknown
        names of channels.
    """

    name: ClassVar[str] = "standard"
    Settings: ClassVar[type[AugmentationSettings]] = Rules

    @classmethod
    def crops(cls, settings: Rules) -> bool:
        """Return whether windows are cut out of the samples."""
        return settings.crop

    def __init__(
        self, settings: Rules, fields: Mapping[str, Field], wanted: Mapping[str, tuple[int, ...]], seed: int
    ) -> None:
        super().__init__(settings, fields, wanted, seed)
        self._files = dict(fields)
        self._moved = [name for name, field in fields.items() if len(field.shape) > 1]
        if not self._moved:
            raise DataError("data.augment: expected samples with spatial axes, got numbers per sample only; remove it")
        shapes = {name: fields[name].shape[:-1] for name in self._moved}
        self._rank = len(shapes[self._moved[0]])
        uneven = [name for name, shape in shapes.items() if len(shape) != self._rank]
        if uneven:
            raise DataError(f"data.augment: expected samples of {self._rank} spatial axes, got {uneven[0]!r} of others")
        self._names = AXES[len(AXES) - self._rank :]
        # Common divisor of all grids: windows and shifts start at boundaries that all grids have. An axis of extent 1
        # (of weights) does not count.
        self._units = tuple(reduce(math.gcd, [n for n in e if n > 1] or [1]) for e in zip(*shapes.values()))
        first = self._moved[0]
        self._window = wanted[first][:-1] if settings.crop else shapes[first]
        self.fields = {name: self._cropped(name, field) for name, field in fields.items()}
        self._check()
        self._vectors = {name: self._components(field) for name, field in fields.items()}

    # -- checks --------------------------------------------------------------------------------------

    def _cropped(self, name: str, field: Field) -> Field:
        """Return the field with the extents of the window."""
        if not self.settings.crop or name not in self._moved:
            return field
        first = self._files[self._moved[0]].shape
        spatial = []
        for n, base, window, unit in zip(field.shape, first, self._window, self._units):
            if n == 1:
                spatial.append(n)
                continue
            if window > base or (n * window) % base or (unit * window) % base:
                raise DataError(
                    f"data.augment.crop: expected a window {self._window} of whole parts of every grid, got {name!r} "
                    f"of {field.shape[:-1]} with {first[:-1]}; choose another resolution of the network"
                )
            spatial.append(n * window // base)
        return replace(field, shape=(*spatial, field.shape[-1]))

    def _check(self) -> None:
        for key in ("flips", "shifts"):
            unknown = [axis for axis in getattr(self.settings, key) if axis not in self._names]
            if unknown:
                raise DataError(f"data.augment.{key}: expected axes of {', '.join(self._names)}, got {unknown[0]!r}")
        for name in self._moved if self.settings.turns else ():
            shape = self.fields[name].shape
            if self._rank < 2 or shape[-3] != shape[-2]:
                raise DataError(f"data.augment.turns: expected as many rows as columns, got {name!r} of {shape[:-1]}")
        for vector in self.settings.vectors:
            several = [self._files[name].channel_names for name in self._moved]
            if len(vector) != self._rank or not any(set(vector) <= set(names) for names in several):
                raise DataError(
                    f"data.augment.vectors: expected {self._rank} channels of one dataset each, out of "
                    f"{'; '.join(map(', '.join, several))}, got {', '.join(vector)}"
                )

    def _components(self, field: Field) -> dict[int, tuple[int, tuple[int, ...]]]:
        """Return, for each channel that is a component of a vector, its axis and the channels of all components."""
        found: dict[int, tuple[int, tuple[int, ...]]] = {}
        for vector in self.settings.vectors:
            # A name occurs several times in fields of several time steps.
            where = [[k for k, own in enumerate(field.channel_names) if own == name] for name in vector]
            for channels in zip(*where):
                found |= {k: (axis, channels) for axis, k in enumerate(channels)}
        return found

    @property
    def window(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Extents of the window that is read of every sample, and extents of the samples in the file."""
        return tuple(self._window), tuple(self._files[self._moved[0]].shape[:-1])

    # -- random placement ----------------------------------------------------------------------------

    def placement(self, batch: Batch, index: int) -> SamplePlacement:
        """Return the placement of a sample of a batch in the file."""
        axes, free = tuple(range(self._rank)), self._free()
        if not batch.augmented:
            return SamplePlacement(axes, (False,) * self._rank, tuple(n // 2 for n in free))
        draw = np.random.default_rng([self.seed, _PLACE, batch.epoch, index])
        mirrored = [name in self.settings.flips and bool(draw.integers(2)) for name in self._names]
        if self.settings.turns:
            axes, mirrored = _turned(axes, mirrored, int(draw.integers(4)))
        starts = [int(draw.integers(n + 1)) for n in free]
        for axis, (name, unit) in enumerate(zip(self._names, self._units)):
            starts[axis] += int(draw.integers(unit)) if name in self.settings.shifts else 0
        return SamplePlacement(axes, tuple(mirrored), tuple(starts))

    def _free(self) -> list[int]:
        """Return, per axis of the file, the range of window positions, in multiples of the units of all grids."""
        whole = self._files[self._moved[0]].shape
        return [unit - unit * window // n for unit, window, n in zip(self._units, self._window, whole)]

    # -- reading -------------------------------------------------------------------------------------

    def read(self, dataset: Dataset, name: str, batch: Batch, box: Box, out: NDArray[Any]) -> tuple[slice, ...]:
        """Read a box as :meth:`Dataset.read` does, with the samples of the batch augmented."""
        if name not in self._moved or not (batch.augmented or self.settings.crop):
            return dataset.read(name, batch.indices, box, out)
        part = box & Box.of_shape((len(batch.indices), *self.fields[name].shape))
        filled = part.slices(origin=box.start)
        if part.size == 0:
            return tuple(slice(0, 0) for _ in filled)
        for k in range(*part.ranges[0]):
            index = batch.indices[k]
            placement = self.placement(batch, index)
            at: Any = (k - box.start[0], *filled[1:])
            self._read_sample(dataset, name, index, placement, part.ranges[1:], out[at])
        return filled

    def _read_sample(
        self,
        dataset: Dataset,
        name: str,
        index: int,
        placement: SamplePlacement,
        ranges: Sequence[tuple[int, int]],
        out: NDArray[Any],
    ) -> None:
        first, last = ranges[-1]
        self._copy(dataset, name, index, placement, (ranges[:-1], (first, last)), out)
        for channel, (axis, channels) in self._vectors[name].items():
            if not first <= channel < last:
                continue
            own, source = out[..., channel - first : channel - first + 1], channels[placement.axes[axis]]
            if source != channel:
                self._copy(dataset, name, index, placement, (ranges[:-1], (source, source + 1)), own)
            if placement.mirrored[axis]:
                np.negative(own, out=own)

    def _copy(
        self,
        dataset: Dataset,
        name: str,
        index: int,
        placement: SamplePlacement,
        where: tuple[Sequence[tuple[int, int]], tuple[int, int]],
        out: NDArray[Any],
    ) -> None:
        """Copy a box of a sample and of channels of the file to `out`, which has its shape."""
        ranges, channels = where
        whole, extents = self._files[name].shape, self.fields[name].shape
        pieces = []
        for axis, (low, high) in enumerate(ranges):
            source = placement.axes[axis]
            start = placement.starts[source] * (whole[source] // self._units[source])
            pieces.append(list(placement.pieces(axis, low, high, extents[axis], whole[source], start)))
        order = np.argsort(placement.axes)
        for chosen in itertools.product(*pieces):
            box = Box.of_ranges([(0, 1), *(chosen[axis][0] for axis in order), channels])
            slices = [slice(a - low, b - low) for (_, (a, b)), (low, _) in zip(chosen, ranges)]
            view = out[tuple(slices)]
            view = view[tuple(slice(None, None, -1 if back else 1) for back in placement.mirrored)]
            dataset.read(name, [index], box, view.transpose(*order, len(order))[None])

    # -- numbers -------------------------------------------------------------------------------------

    def alter(self, name: str, batch: Batch, box: Box, part: NDArray[Any]) -> None:
        """Apply noise, brightness and contrast to an input, in place; `part` lies within the samples. Local."""
        rules = self.settings
        alters = rules.noise or rules.brightness or rules.contrast
        if not alters or not batch.augmented or self._files[name].is_target:
            return
        shape, inside = self.fields[name].shape, self.inside(name, batch, box)
        for sample, k in zip(part, range(*inside.ranges[0])):
            key = [self.seed, _ALTER, batch.epoch, batch.indices[k], *name.encode()]
            factors, terms = np.random.default_rng(key).uniform(-1, 1, (2, shape[-1]))
            channels = slice(*inside.ranges[-1])
            sample *= 1 + rules.contrast * factors[channels]
            sample += rules.brightness * terms[channels]
            if rules.noise:
                self._add_noise(sample, inside.ranges[1:], shape, [self.seed, _NOISE, *key[2:]])

    def _add_noise(
        self, sample: NDArray[Any], ranges: Sequence[tuple[int, int]], shape: Sequence[int], key: Sequence[int]
    ) -> None:
        """Add noise. Every row of a sample has its own random stream, so a rank draws the same numbers for its columns.
        """
        if len(shape) == 1:
            sample, ranges, shape = sample[None], [(0, 1), *ranges], (1, *shape)
        *leading, columns, channels = ranges
        for at in itertools.product(*(range(low, high) for low, high in leading)):
            row = sample[tuple(i - low for i, (low, _) in zip(at, leading))]
            noise = np.random.default_rng([*key, *at]).standard_normal(shape[-2:], np.float32)
            row += self.settings.noise * noise[slice(*columns), slice(*channels)]


def _turned(axes: tuple[int, ...], mirrored: Sequence[bool], quarters: int) -> tuple[tuple[int, ...], list[bool]]:
    """Return axes and mirroring of a sample that is turned by quarters in its last two axes (`numpy.rot90`), then
    mirrored.

    >>> _turned((0, 1), [False, False], 1)
    ((1, 0), [True, False])
    """
    *others, rows, columns = axes
    found = list(mirrored)
    if quarters % 2:
        rows, columns = columns, rows
    # A row of the result is read backwards after one quarter and two, a column after two and three.
    found[-2] ^= quarters in (1, 2)
    found[-1] ^= quarters in (2, 3)
    return (*others, rows, columns), found
