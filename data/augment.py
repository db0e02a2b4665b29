"""Augmentation: random maps of samples (turns, rotation, scale, elastic deformation, ...) and changes of their values.

The changes of a sample depend on the seed, the epoch and the index of the sample, and not on the rank, so they are the
same for every decomposition. A rank reads the box of the file that its own box maps to: for a mirrored sample, the
mirrored box; for a rotated one, the box that contains all positions of its elements (:mod:`halograd.data.warp`).
There is no communication.

::

    output index  ->  smooth map?  ->  mirrored?  ->  which axis of the sample (quarter turns)
                  ->  window (:mod:`halograd.data.windows`)
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field as PydanticField
from pydantic import model_validator

from halograd.registry import Registry
from halograd.schema import Below1, NotNegative, Table, Text

from ..dtensor.box import Box
from .disk import DataError
from .sampler import Batch
from .source import overlap, sample_shape
from .structure import Field
from .targets import TargetRange
from .warp import Border, Displacement, GridMap, Interpolation, SmoothMap, linear_map, sample_block
from .windows import AXES, SampleWindows

__all__ = [
    "AUGMENTATIONS",
    "Augmentation",
    "AugmentationSettings",
    "Elastic",
    "Rules",
    "SamplePlacement",
    "StandardAugmentation",
]

# Separate the random streams from each other and from others of a run (1, 2: sampler.py; 3, 8, 9: windows.py).
_ALTER, _NOISE, _OWN, _SMOOTH = 4, 5, 6, 7
#: Changes, each with a random stream of its own. A stream depends on the position in this tuple.
_CHANGES = ("rotate", "scale", "stretch", "shear", "elastic", "gamma", "blur", "noise", "brightness", "contrast")
_FOLDS = 0.4  # share of the spacing of control points from which on an elastic deformation may fold


Axis = Literal["depth", "height", "width"]


class AugmentationSettings(Table):
    """``[data.augment]``: settings of an augmentation; base class of those of an augmentation of your own."""

    kind: Text = "standard"
    """The changes below, or an augmentation of your own."""


class Augmentation(ABC):
    """Random changes of samples in training. Local; all ranks draw the same changes.

    Changes may depend on the seed, the epoch and the numbers of the sample and its patch only, never on the rank or its
    box: draw them from the generator of :meth:`random`. A subclass overrides :meth:`alter`, to change values of inputs
    after normalization, or :meth:`read`, to read other elements of the file. To move elements, override
    :meth:`StandardAugmentation.map`.

    Parameters
    ----------
    settings
        Settings, of the class `Settings`.
    windows : SampleWindows
        Reader of the samples.
    seed : int

    Attributes
    ----------
    fields : dict of Field
        Fields of the samples that are read: those of the data set, or windows of them.
    """

    #: Name in the configuration, for registered classes.
    name: ClassVar[str] = ""
    #: Class of the settings.
    Settings: ClassVar[type[AugmentationSettings]] = AugmentationSettings

    def __init__(self, settings: Any, windows: SampleWindows, seed: int) -> None:
        self.settings, self.windows, self.seed, self.fields = settings, windows, seed, windows.fields

    @classmethod
    def crops(cls, settings: Any) -> bool:
        """Return whether samples may be larger than the inputs of the network."""
        return False

    def inside(self, name: str, batch: Batch, box: Box) -> Box:
        """Return the part of a box that lies within the samples of a batch."""
        return box & Box.of_shape((len(batch.indices), *self.fields[name].shape))

    def prepare(self, ranges: Mapping[str, TargetRange], weighted: Mapping[str, Sequence[str]]) -> None:  # noqa: B027
        """Take the valid ranges of targets and the names of their weights, by target, before the first read. Local."""

    def margin(self, name: str) -> int:
        """Return how many elements :meth:`alter` needs on each side of a box along spatial axes, for a filter."""
        return 0

    def leaves_gaps(self, name: str) -> bool:
        """Return whether :meth:`read` may write NaN for elements of an input that have no value.

        Such elements become 0 after normalization.
        """
        return False

    def random(self, name: str, batch: Batch, k: int) -> np.random.Generator:
        """Return the random generator of a field of sample `k` of a batch: the same on all ranks, under every cut."""
        return np.random.default_rng([self.seed, _OWN, *batch.key(k), *name.encode()])

    def read(self, name: str, batch: Batch, box: Box, out: NDArray[Any]) -> tuple[slice, ...]:
        """Read a box as :meth:`SampleWindows.read_batch` does. A subclass may change samples if ``batch.augmented``."""
        return self.windows.read_batch(name, batch, box, out)

    @abstractmethod
    def alter(self, name: str, batch: Batch, box: Box, part: NDArray[Any]) -> None:
        """Change the values of a field in place, if ``batch.augmented``. Local.

        Parameters
        ----------
        name
            Name of the field; ``self.fields[name].is_target`` is whether it is a target.
        box
            Box of the batch that this rank reads, ``(samples, *spatial, channels)``; it may reach beyond the samples.
            On each spatial side it has :meth:`margin` elements more than this rank needs, where any values may remain.
        part
            Values of the box that lie within the samples; for inputs, after normalization.
        """


#: Augmentations by name, or by ``"FILE.py:CLASS"``.
AUGMENTATIONS: Registry[Augmentation] = Registry("augmentation", Augmentation, "data.augment.kind")


class Elastic(Table):
    """``[data.augment.elastic]``: a random displacement of control points, with cubic B-splines between them."""

    magnitude: NotNegative
    """Maximum displacement along each axis, in elements: at most 0.4 x `spacing`, because the image folds beyond."""
    spacing: Annotated[float, PydanticField(ge=2, le=1e6)]
    """Distance of the control points, in elements."""

    @model_validator(mode="after")
    def _not_folded(self) -> Elastic:
        # Choi and Lee (2000), "Injectivity conditions of 2D and 3D uniform cubic B-spline functions": 1/2.48 in 3-D.
        if self.magnitude > _FOLDS * self.spacing:
            raise ValueError(
                f"magnitude: expected at most {_FOLDS} x spacing = {_FOLDS * self.spacing:g}, got {self.magnitude:g}"
            )
        return self


#: A factor or an exponent, and the width of a filter in elements.
Factor = Annotated[float, PydanticField(ge=0.01, le=100)]
Width = Annotated[float, PydanticField(gt=0, le=32)]
Angle = Annotated[float, PydanticField(ge=0, le=180)]
Probability = Annotated[float, PydanticField(ge=0, le=1)]


class Rules(AugmentationSettings):
    """``[data.augment]``: random changes of samples in training, drawn by seed, epoch and number of the sample.

    All fields with spatial axes are moved together, including targets. `noise`, `brightness`, `contrast`, `gamma` and
    `blur` change only inputs, after normalization.
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
    a sample is mirrored, are exchanged when it is turned, and change by the matrix of `rotate`, `scale`, `stretch` and
    `shear`."""
    rotate: Angle | list[Angle] = 0.0
    """Maximum angle of a rotation about the centre, in degrees, in both directions; in 3-D for each axis, or a list of
    one per axis about which is rotated."""
    scale: tuple[Factor, Factor] | None = None
    """Bounds of a factor by which the contents of a sample are enlarged: ``[0.7, 1.4]``."""
    stretch: tuple[Factor, Factor] | None = None
    """Bounds of a factor of each axis, which multiplies `scale`."""
    shear: Below1 = 0.0
    """Maximum displacement along one axis per distance along another."""
    elastic: Elastic | None = None
    """Smooth random displacement: ``{magnitude = 6, spacing = 32}``."""
    border: Border | list[Border] = "reflect"
    """Values outside of the samples, for `rotate`, `scale`, `stretch`, `shear` and `elastic`; or a list of one per
    axis. ``"reflect"``: mirrored; ``"nearest"``: those of the nearest element; ``"wrap"``: those of the other end, for
    periodic data (always along the axes of `shifts`); ``"zero"``: inputs are 0 after normalization, weights are 0,
    classes are those that the loss ignores. It is ``"zero"`` if there are samples smaller than the network's input."""
    gamma: tuple[Factor, Factor] | None = None
    """Bounds of an exponent for each channel of an input: ``[0.7, 1.5]``. It acts on values between the bounds of
    `gamma_range`, which do not change."""
    gamma_range: tuple[float, float] = (-3.0, 3.0)
    """Range of values for `gamma`, after normalization. Beyond it the exponent acts on the distance from its lower end,
    with the sign of this distance."""
    blur: tuple[Width, Width] | None = None
    """Bounds of the standard deviation of a Gaussian filter of inputs, in elements."""
    probability: Probability | dict[Text, Probability] = 1.0
    """Probability of each change for a sample, but `flips`, `turns`, `shifts` and `crop`; or a table of probabilities
    by name, ``{rotate = 0.2, noise = 0.1}``, where others have the probability 1."""

    @model_validator(mode="after")
    def _ordered(self) -> Rules:
        for key in ("scale", "stretch", "gamma", "gamma_range", "blur"):
            bounds = getattr(self, key)
            if bounds is not None and (bounds[0] > bounds[1] or (key == "gamma_range" and bounds[0] == bounds[1])):
                raise ValueError(f"{key}: expected the lower bound first, got {list(bounds)}")
        unknown = [key for key in self.probability if key not in _CHANGES] if isinstance(self.probability, dict) else []
        if unknown:
            raise ValueError(f"probability: expected names out of {', '.join(_CHANGES)}, got {unknown[0]!r}")
        return self

    def probability_of(self, change: str) -> float:
        """Return the probability of a change for a sample; 0 if the change is not set."""
        # A list of angles is true even if all of them are 0.
        if not (np.any(getattr(self, change)) if change == "rotate" else getattr(self, change)):
            return 0.0
        return self.probability.get(change, 1.0) if isinstance(self.probability, dict) else self.probability

    @property
    def smooth(self) -> list[str]:
        """Names of the changes that move elements by fractions of an element."""
        return [change for change in _CHANGES[:5] if self.probability_of(change)]


@dataclass(frozen=True)
class SamplePlacement:
    """Map from elements of a window to elements of its sample, per axis of the window.

    Attributes
    ----------
    axes
        Axis of the sample, for each axis of the window.
    mirrored
        Whether elements are reversed, for each axis of the window.
    """

    axes: tuple[int, ...]
    mirrored: tuple[bool, ...]


@AUGMENTATIONS.register
class StandardAugmentation(Augmentation):
    """Reader of samples with random changes. Local; every rank draws the same changes.

    Parameters
    ----------
    settings
        Changes that are drawn.
    windows : SampleWindows
        Reader of the samples. Fields with spatial axes are moved together, each on its own grid; vectors per sample are
        not moved.
    seed : int

    Raises
    ------
    DataError
        Axes that samples lack; turns of samples that are not square; grids that do not fit shifts; unknown names of
        channels.
    """

    name: ClassVar[str] = "standard"
    Settings: ClassVar[type[AugmentationSettings]] = Rules

    @classmethod
    def crops(cls, settings: Rules) -> bool:
        """Return whether windows are cut out of the samples, by the setting `crop`."""
        return settings.crop

    def __init__(self, settings: Rules, windows: SampleWindows, seed: int) -> None:
        super().__init__(settings, windows, seed)
        self._moved = windows.moved
        if not self._moved:
            raise DataError("data.augment: expected samples with spatial axes, got numbers per sample only; remove it")
        shapes = {name: self.fields[name].shape[:-1] for name in self._moved}
        self._rank = len(shapes[self._moved[0]])
        uneven = [name for name, shape in shapes.items() if len(shape) != self._rank]
        if uneven:
            raise DataError(f"data.augment: expected samples of {self._rank} spatial axes, got {uneven[0]!r} of others")
        self._names = AXES[len(AXES) - self._rank :]
        self._window = shapes[self._moved[0]]
        # A subclass with a map of its own moves samples even if no change is set.
        self._own = type(self).map is not StandardAugmentation.map
        self._warps = bool(settings.smooth) or self._own
        self._check()
        self._borders = self._choose_borders()
        # Bounds in the order in which `placement` draws: a flip per axis, then the turns.
        windows.shift(settings.shifts, [2] * sum(name in settings.flips for name in self._names) + [4] * settings.turns)
        self._vectors = {name: self._components(field) for name, field in self.fields.items()}
        # Interpolation, and value outside of the sample; `prepare` replaces those of targets.
        self._ways: dict[str, tuple[Interpolation, float | None]] = {
            name: ("nearest", None) if field.is_target else ("linear", math.nan) for name, field in self.fields.items()
        }
        self._drawn: tuple[tuple[Any, ...], SmoothMap | None] | None = None

    # -- checks --------------------------------------------------------------------------------------

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
            several = [self.fields[name].channel_names for name in self._moved]
            if len(vector) != self._rank or not any(set(vector) <= set(names) for names in several):
                raise DataError(
                    f"data.augment.vectors: expected {self._rank} channels of one dataset each, out of "
                    f"{'; '.join(map(', '.join, several))}, got {', '.join(vector)}"
                )
        if self._warps:
            self._check_smooth()

    def _check_smooth(self) -> None:
        rules = self.settings
        angles = 3 if self._rank == 3 else 1
        if isinstance(rules.rotate, list) and len(rules.rotate) != angles:
            raise DataError(
                f"data.augment.rotate: expected {angles} angle{'s' if angles > 1 else ''} for samples of {self._rank} "
                f"axes, got {len(rules.rotate)}"
            )
        for key in ("rotate", "shear"):
            if self._rank == 1 and rules.probability_of(key):
                raise DataError(f"data.augment.{key}: expected samples of two or more axes, got {self._names}")
        # The components of a vector change by one matrix per sample, which only a linear map has.
        if rules.vectors and (rules.elastic is not None or self._own):
            what = "elastic" if rules.elastic is not None else "kind"
            raise DataError(
                f"data.augment.{what}: expected no data.augment.vectors with a map that is not linear, got "
                f"{', '.join(rules.vectors[0])}; remove one of them"
            )
        for name in self._moved:
            shape, whole = (self.windows.dataset.fields[field].shape[:-1] for field in (name, self._moved[0]))
            if max(shape) > 1 and any(n == 1 < m for n, m in zip(shape, whole)):
                raise DataError(
                    f"data.augment: expected {name!r} on the whole grid, to be moved by "
                    f"{', '.join(rules.smooth) or 'a map of your own'}, got {shape} for {whole}; write its values for "
                    "all elements"
                )

    def _choose_borders(self) -> list[Border]:
        """Return the border of each spatial axis of the samples; an axis along which samples are shifted is periodic.

        If a sample may end within its window, the border of all other axes is ``"zero"``: elements outside of the
        sample are padding, as they are without a map.
        """
        border = self.settings.border
        if isinstance(border, list) and len(border) != self._rank:
            raise DataError(f"data.augment.border: expected one per axis of {', '.join(self._names)}, got {border}")
        borders = border if isinstance(border, list) else [border] * self._rank
        if any(self.windows.pads(name) for name in self._moved):
            borders = ["zero"] * self._rank
        return ["wrap" if name in self.settings.shifts else border for name, border in zip(self._names, borders)]

    def prepare(self, ranges: Mapping[str, TargetRange], weighted: Mapping[str, Sequence[str]]) -> None:
        """Choose the interpolation of every target with spatial axes, and its value outside of the sample.

        Raises
        ------
        DataError
            A map moves elements, the border is ``"zero"``, and a target has neither weights nor a value that the loss
            ignores.
        """
        weights = {weight for names in weighted.values() for weight in names}
        for name in self._moved:
            limits = ranges.get(name, TargetRange())
            if name in weights:
                self._ways[name] = "weight", 0.0
            elif self.fields[name].is_target:
                # Interpolated class indices or probabilities would be values that no element has.
                self._ways[name] = "nearest" if limits.whole or limits.bounded else "linear", limits.ignored
                if self._warps and "zero" in self._borders and limits.ignored is None and not weighted.get(name):
                    raise DataError(
                        f'data.augment.border: expected a loss that ignores targets {name!r} outside of the sample '
                        '("zero"), by weights or ignore_index, got none; choose "reflect" or "nearest"'
                    )

    def _components(self, field: Field) -> dict[int, tuple[int, tuple[int, ...]]]:
        """Return, for each channel that is a component of a vector, its axis and the channels of all components."""
        components: dict[int, tuple[int, tuple[int, ...]]] = {}
        for vector in self.settings.vectors:
            # A name occurs several times in fields of several time steps.
            where = [[k for k, own in enumerate(field.channel_names) if own == name] for name in vector]
            for channels in zip(*where):
                components |= {k: (axis, channels) for axis, k in enumerate(channels)}
        return components

    # -- random placement ----------------------------------------------------------------------------

    def placement(self, batch: Batch, k: int) -> SamplePlacement:
        """Return the random flips and turns of sample `k` of a batch; none if the batch is not augmented."""
        axes = tuple(range(self._rank))
        if not batch.augmented:
            return SamplePlacement(axes, (False,) * self._rank)
        # An equal generator draws the start of the window, and skips the numbers drawn here (`SampleWindows.shift`).
        draw = self.windows.random(batch, k)
        mirrored = [name in self.settings.flips and bool(draw.integers(2)) for name in self._names]
        if self.settings.turns:
            axes, mirrored = _turned(axes, mirrored, int(draw.integers(4)))
        return SamplePlacement(axes, tuple(mirrored))

    # -- smooth maps ---------------------------------------------------------------------------------

    def map(self, batch: Batch, k: int, positions: Sequence[NDArray[np.float64]]) -> Sequence[NDArray[np.float64]]:
        """Return the positions from which elements of sample `k` of a batch take their values; here `positions`.

        A subclass overrides this method. Of the changes of the settings, rotation, scale, stretch, shear and elastic
        deformation come before it, and turns, flips, crops and shifts after it.
        To be independent of the cut, each result may depend only on the position that it replaces. Local.

        Parameters
        ----------
        positions
            Position in the window along each spatial axis, float64 arrays of one shape, in elements of the first field
            with spatial axes; element i is at i. Not to be modified.
        """
        return positions

    def _stream(self, change: str, batch: Batch, k: int, name: str = "") -> np.random.Generator | None:
        """Return the random generator of a change of sample `k`, or of its field `name`; None if the sample is drawn
        to be without this change.
        """
        probability = self.settings.probability_of(change)
        if not probability or not batch.augmented:
            return None
        key = [self.seed, _SMOOTH, *batch.key(k), _CHANGES.index(change)]
        # The probability has a stream of its own, so that a change is the same whatever its probability.
        if np.random.default_rng(key).random() >= probability:
            return None
        return np.random.default_rng([*key, 1, *name.encode()])

    def _smooth(self, batch: Batch, k: int) -> SmoothMap | None:
        """Return the smooth map of sample `k` of a batch; None if it moves nothing."""
        if not self._warps or not batch.augmented:
            return None
        # If this rank reads one sample of a batch, all fields share the map, whose displacement is costly to draw.
        key = tuple(batch.key(k))
        if self._drawn is None or self._drawn[0] != key:
            drawn = self._draw(batch, k)
            self._drawn = key, None if drawn.is_identity else drawn
        return self._drawn[1]

    def _draw(self, batch: Batch, k: int) -> SmoothMap:
        rules, rank = self.settings, self._rank
        # As many planes of rotation as pairs of axes: none in 1-D, one in 2-D, three in 3-D.
        angles, factors = [0.0] * (rank if rank == 3 else rank - 1), np.ones(rank)
        shears, displacement = np.zeros((rank, rank)), None
        draw = self._stream("rotate", batch, k)
        if draw is not None:
            angles = [math.radians(a) for a in draw.uniform(-1, 1, len(angles)) * np.array(rules.rotate)]
        for change, count in (("scale", 1), ("stretch", rank)):
            draw = self._stream(change, batch, k)
            if draw is not None:
                factors = factors * _between(draw, getattr(rules, change), count)
        draw = self._stream("shear", batch, k)
        if draw is not None:
            shears = draw.uniform(-rules.shear, rules.shear, (rank, rank))
        draw = self._stream("elastic", batch, k)
        if draw is not None:
            assert rules.elastic is not None
            displacement = Displacement.draw(draw, self._window, rules.elastic.magnitude, rules.elastic.spacing)
        matrix = linear_map(angles, factors.tolist(), shears.tolist())
        own = (lambda positions: self.map(batch, k, positions)) if self._own else None
        return SmoothMap(self._window, matrix, displacement, own)

    def leaves_gaps(self, name: str) -> bool:
        """Return whether elements outside of the samples become NaN: those of inputs that a map with the border
        ``"zero"`` moves.
        """
        return self._warps and "zero" in self._borders and name in self._moved and not self.fields[name].is_target

    def _read_warped(
        self, name: str, batch: Batch, k: int, smooth: SmoothMap, box: Sequence[tuple[int, int]], out: NDArray[Any]
    ) -> None:
        """Read a box ``(*spatial, channels)`` of sample `k` of a batch, moved by a smooth map."""
        dataset, index, placement = self.windows.dataset, batch.indices[k], self.placement(batch, k)
        starts, window = self.windows.starts(name, batch, k), self.fields[name].shape[:-1]
        grid = GridMap(smooth, placement.axes, placement.mirrored, starts, window)

        def read(ranges: Sequence[tuple[int, int]], channels: tuple[int, int], part: NDArray[Any]) -> None:
            # Ranges in the whole sample: `grid` has added the start of the window.
            dataset.read(name, [index], Box.of_ranges([(0, 1), *ranges, channels]), part[None])

        interpolation, outside = self._ways[name]
        sample_block(
            read, grid, box, out,
            extents=sample_shape(dataset, name, index)[:-1], borders=self._borders, interpolation=interpolation,
            outside=outside, vectors=self._vectors[name],
        )  # fmt: skip

    # -- reading -------------------------------------------------------------------------------------

    def read(self, name: str, batch: Batch, box: Box, out: NDArray[Any]) -> tuple[slice, ...]:
        """Read a box as :meth:`SampleWindows.read_batch` does; samples are moved if ``batch.augmented``."""
        if name not in self._moved or not batch.augmented:
            return self.windows.read_batch(name, batch, box, out)
        part, filled = overlap(box, (len(batch.indices), *self.fields[name].shape))
        if part.size == 0:
            return filled
        for k in range(*part.ranges[0]):
            at: Any = (k - box.start[0], *filled[1:])
            # A field with one element per sample has nothing to interpolate.
            smooth = self._smooth(batch, k) if max(self.fields[name].shape[:-1]) > 1 else None
            if smooth is None:
                self._read_sample(name, batch, k, part.ranges[1:], out[at])
            else:
                self._read_warped(name, batch, k, smooth, part.ranges[1:], out[at])
        return filled

    def _read_sample(
        self, name: str, batch: Batch, k: int, ranges: Sequence[tuple[int, int]], out: NDArray[Any]
    ) -> None:
        placement = self.placement(batch, k)
        first, last = ranges[-1]
        self._copy(name, batch, k, placement, ranges, out)
        for channel, (axis, channels) in self._vectors[name].items():
            if not first <= channel < last:
                continue
            own, source = out[..., channel - first : channel - first + 1], channels[placement.axes[axis]]
            # A turn exchanges axes, and so the components along them.
            if source != channel:
                self._copy(name, batch, k, placement, [*ranges[:-1], (source, source + 1)], own)
            # A mirrored axis reverses the component along it.
            if placement.mirrored[axis]:
                np.negative(own, out=own)

    def _copy(
        self,
        name: str,
        batch: Batch,
        k: int,
        placement: SamplePlacement,
        ranges: Sequence[tuple[int, int]],
        out: NDArray[Any],
    ) -> None:
        """Copy a box ``(*spatial, channels)`` of a turned and mirrored sample to `out`, of the shape of the box."""
        extents = self.fields[name].shape
        # Along a mirrored axis of extent n, element i is element n - 1 - i of the window that is read.
        own = [
            (extents[axis] - high, extents[axis] - low) if back else (low, high)
            for axis, ((low, high), back) in enumerate(zip(ranges, placement.mirrored))
        ]
        # From axes of the window to axes of the sample: the view is transposed back while it is filled.
        order = np.argsort(placement.axes)
        box = Box.of_ranges([*(own[axis] for axis in order), ranges[-1]])
        view = out[tuple(slice(None, None, -1 if back else 1) for back in placement.mirrored)]
        self.windows.read(name, batch, k, box, view.transpose(*order, len(order)))

    # -- numbers -------------------------------------------------------------------------------------

    def margin(self, name: str) -> int:
        """Return the radius of the widest filter of an input, in elements; 0 for targets and without `blur`."""
        bounds = self.settings.blur if self.settings.probability_of("blur") and name in self._moved else None
        return 0 if bounds is None or self.fields[name].is_target else _radius(bounds[1])

    def alter(self, name: str, batch: Batch, box: Box, part: NDArray[Any]) -> None:
        """Apply blur, gamma, contrast, brightness and noise to an input of an augmented batch, in place. Local."""
        rules = self.settings
        if not batch.augmented or self.fields[name].is_target:
            return
        shape, inside = self.fields[name].shape, self.inside(name, batch, box)
        for sample, k in zip(part, range(*inside.ranges[0])):
            # Without a field: all inputs of a sample are blurred by the same width.
            draw = self._stream("blur", batch, k) if name in self._moved else None
            if draw is not None:
                _blur(sample, float(_between(draw, rules.blur, 1)[0]))
            draw = self._stream("gamma", batch, k, name)
            if draw is not None:
                exponents = _between(draw, rules.gamma, shape[-1])[slice(*inside.ranges[-1])]
                _apply_gamma(sample, exponents, rules.gamma_range)
        for sample, k in zip(part, range(*inside.ranges[0])):
            noise, brightness, contrast = (
                0.0 if self._stream(change, batch, k) is None else getattr(rules, change) for change in _CHANGES[-3:]
            )
            if not (noise or brightness or contrast):
                continue
            key = [self.seed, _ALTER, *batch.key(k), *name.encode()]
            # For all channels of the sample, so that a rank with some of them draws the same.
            factors, terms = np.random.default_rng(key).uniform(-1, 1, (2, shape[-1]))
            channels = slice(*inside.ranges[-1])
            sample *= 1 + contrast * factors[channels]
            sample += brightness * terms[channels]
            if noise:
                self._add_noise(sample, inside.ranges[1:], shape, [self.seed, _NOISE, *key[2:]])

    def _add_noise(
        self, sample: NDArray[Any], ranges: Sequence[tuple[int, int]], shape: Sequence[int], key: Sequence[int]
    ) -> None:
        """Add noise to a box of a sample, in place. Every row of the sample has its own random stream, so the noise of
        an element does not depend on the box.
        """
        if len(shape) == 1:  # numbers per sample: one row of one column
            sample, ranges, shape = sample[None], [(0, 1), *ranges], (1, *shape)
        *leading, columns, channels = ranges
        for at in itertools.product(*(range(low, high) for low, high in leading)):
            row = sample[tuple(i - low for i, (low, _) in zip(at, leading))]
            # Drawn for all columns and channels of the row; those of the box are used.
            noise = np.random.default_rng([*key, *at]).standard_normal(shape[-2:], np.float32)
            row += self.settings.noise * noise[slice(*columns), slice(*channels)]


def _turned(axes: tuple[int, ...], mirrored: Sequence[bool], quarters: int) -> tuple[tuple[int, ...], list[bool]]:
    """Return axes and mirroring of a sample that is turned by `quarters` quarter turns in its last two axes
    (`numpy.rot90`), then mirrored.

    >>> _turned((0, 1), [False, False], 1)
    ((1, 0), [True, False])
    """
    *others, rows, columns = axes
    flips = list(mirrored)
    if quarters % 2:
        rows, columns = columns, rows
    # A row of the result is read backwards after one quarter and two, a column after two and three.
    flips[-2] ^= quarters in (1, 2)
    flips[-1] ^= quarters in (2, 3)
    return (*others, rows, columns), flips


def _between(draw: np.random.Generator, bounds: tuple[float, float], count: int) -> NDArray[np.float64]:
    """Draw `count` numbers between two bounds, uniformly in the logarithm, so that a factor is as likely as
    its inverse where both lie within the bounds.
    """
    low, high = (math.log(bound) for bound in bounds)
    return np.exp(draw.uniform(low, high, count))


def _radius(deviation: float) -> int:
    """Return the radius of a Gaussian filter of this standard deviation, both in elements; weights beyond the radius
    are below 0.0004 of the largest.
    """
    return max(1, round(4 * deviation))


def _blur(sample: NDArray[Any], deviation: float) -> None:
    """Apply a Gaussian filter of standard deviation `deviation` [elements] to a box ``(*spatial, C)``, in place; beyond
    the ends of the box, its nearest elements are used.
    """
    radius = _radius(deviation)
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / deviation) ** 2)
    weights = (weights / weights.sum()).astype(sample.dtype)
    for axis in range(sample.ndim - 1):
        source, n = sample.copy(), sample.shape[axis]
        sample[...] = 0
        # Summed by weight, so that the order, and with it the rounding, does not depend on the box.
        for shift, weight in zip(range(-radius, radius + 1), weights):
            sample += weight * source.take(np.arange(shift, shift + n), axis, mode="clip")


def _apply_gamma(sample: NDArray[Any], exponents: NDArray[np.float64], limits: tuple[float, float]) -> None:
    """Raise each channel of `sample` ``(*spatial, C)`` to a power, in place. A linear map takes `limits` to 0 and 1
    before, and back afterwards.
    """
    low, high = limits
    for k, exponent in enumerate(exponents):
        share = (sample[..., k] - low) / (high - low)
        # A negative number has no real power: below the lower limit, its distance is raised and keeps its sign.
        power = np.power(np.abs(share), sample.dtype.type(exponent))
        sample[..., k] = np.copysign(power, share) * (high - low) + low
