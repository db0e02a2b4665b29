"""Smooth maps of samples: rotation, scale, shear and elastic deformation. Pure arithmetic, apart from reading.

A map gives the position in the sample from which an element of the network's window takes its value::

    output index -> position u in the window -> u + displacement -> linear map about the center -> own map
                 -> turned, mirrored, shifted (the placement) -> position in the sample -> interpolation

A position is a number per axis, in elements of the window; element `i` is at `i`. All numbers are computed element by
element from global indices, in one order of operations, so that an element is bitwise the same in every block that
contains it. A block reads the box that contains all positions of its elements, and samples it tile by tile.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .disk import DataError

__all__ = ["Border", "Displacement", "GridMap", "Interpolation", "SmoothMap", "linear_map", "sample_block"]

Border = Literal["reflect", "nearest", "wrap", "zero"]
Interpolation = Literal["linear", "nearest", "weight"]

Array = NDArray[np.float64]
#: A user-defined map: positions in the window, an array per axis, to positions in the window.
OwnMap = Callable[[Sequence[Array]], Sequence[Array]]
Range = tuple[int, int]

_TILE = 1 << 15  # elements that are sampled together: their positions, indices and corners fit the cache
_SOURCE = 1 << 25  # bytes that are read at once for a part of a block; a rotated block lies in a larger box
_SLACK = 1e-6  # by which bounds of positions may differ from positions, relatively, because of rounding


@dataclass(frozen=True)
class Displacement:
    """Displacement of every position of a window: a cubic B-spline of random control points on a coarse grid.

    Attributes
    ----------
    points : float64 array ``(axes, *grid)``
        Displacement of the control points along each axis, in elements. A displacement lies between the smallest and
        the largest one of the ``4 ** axes`` control points around it.
    spacing
        Distance of control points, in elements; point `i` is at ``(i - 2) * spacing``.
    """

    points: Array
    spacing: float

    @classmethod
    def draw(
        cls, random: np.random.Generator, extents: Sequence[int], magnitude: float, spacing: float
    ) -> Displacement:
        """Draw control points for a window of these extents, with displacements of at most `magnitude` elements."""
        # Knots from -1, as positions of a finer field reach half a cell beyond the window; each has four points.
        grid = [math.floor(n / spacing) + 5 for n in extents]
        return cls(random.uniform(-magnitude, magnitude, (len(grid), *grid)), spacing)

    def at(self, positions: Sequence[Array]) -> list[Array]:
        """Return the displacement along each axis on the grid of `positions`, which has one vector per axis."""
        taps = [self._taps(u) for u in positions]
        values: Array = self.points[(slice(None), *(slice(int(k.min()), int(k.max()) + 4) for k, _ in taps))]
        # From the last axis to the first, so that the largest arrays are gathered by whole rows.
        for axis, (knot, weights) in reversed(list(enumerate(taps, 1))):
            shape = [-1 if k == axis else 1 for k in range(values.ndim)]
            at = knot - knot.min()
            # The sum of four terms has one order, whatever the block.
            first, *others = [np.take(values, at + tap, axis) for tap in range(4)]
            first *= weights[0].reshape(shape)
            for term, weight in zip(others, weights[1:]):
                term *= weight.reshape(shape)
                first += term
            values = first
        return list(values)

    def _taps(self, u: Array) -> tuple[NDArray[np.intp], list[Array]]:
        """Return the index of the first of the four control points around each position, and the four weights."""
        knot = np.floor(u / self.spacing)
        f = u / self.spacing - knot
        g = 1 - f
        # The uniform cubic B-spline basis; the weights add up to 1.
        weights = [g * g * g / 6, ((3 * f - 6) * f * f + 4) / 6, ((3 * g - 6) * g * g + 4) / 6, f * f * f / 6]
        # Point i is at (i - 2) * spacing, and the first of the four is one before the knot.
        return knot.astype(np.intp) + 1, weights

    def limits(self, ranges: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        """Return bounds of the displacement along each axis, for positions in these ranges."""
        knots = [self._taps(np.array(bounds))[0] for bounds in ranges]
        near = self.points[(slice(None), *(slice(int(a), int(b) + 4) for a, b in knots))]
        return [(float(component.min()), float(component.max())) for component in near]


def linear_map(
    angles: Sequence[float], factors: Sequence[float], shears: Sequence[Sequence[float]] | None = None
) -> Array:
    """Return the matrix from positions in the output to those in the sample, both relative to the center.

    Parameters
    ----------
    angles
        Angles in radians: one in 2-D, that from rows to columns; three in 3-D, about each axis; none in 1-D.
    factors
        Factor by which the contents of the sample become larger, per axis.
    shears : optional
        Displacement along the first axis per distance along the second, ``shears[first][second]``; the diagonal is not
        used.
    """
    rank = len(factors)
    matrix = np.eye(rank)
    for number, angle in enumerate(angles):
        a, b = [axis for axis in range(rank) if rank < 3 or axis != number]
        rotation = np.eye(rank)
        rotation[a, a] = rotation[b, b] = math.cos(angle)
        rotation[a, b], rotation[b, a] = -math.sin(angle), math.sin(angle)
        matrix = matrix @ rotation
    # Inverse factors, because the map goes from the output, which is enlarged, to the sample.
    matrix = matrix @ np.diag([1 / factor for factor in factors])
    if shears is not None:
        matrix = matrix @ np.where(np.eye(rank, dtype=bool), 1.0, np.array(shears, float))
    return np.asarray(matrix)


@dataclass(frozen=True)
class SmoothMap:
    """Map from positions in a window to positions in the same window.

    Attributes
    ----------
    extents
        Extents of the window.
    matrix : float64 array ``(axes, axes)``
        Linear map of positions relative to the center of the window.
    displacement : optional
        Displacement before the linear map.
    own : optional
        User-defined map after the linear map.
    """

    extents: tuple[int, ...]
    matrix: Array
    displacement: Displacement | None = None
    own: OwnMap | None = None

    @property
    def is_identity(self) -> bool:
        """Whether no position changes."""
        return self.displacement is None and self.own is None and bool((self.matrix == np.eye(len(self.matrix))).all())

    def at(self, positions: Sequence[Array]) -> list[Array]:
        """Return the mapped positions of a grid: an array per axis that broadcasts to the grid.

        The grid is given by `positions`, a vector per axis.
        """
        rank = len(positions)
        moved: list[Array] = [
            (u - (n - 1) / 2).reshape([-1 if k == axis else 1 for k in range(rank)])
            for axis, (u, n) in enumerate(zip(positions, self.extents))
        ]
        if self.displacement is not None:
            moved = [x + shift for x, shift in zip(moved, self.displacement.at(positions))]
        coordinates = []
        for row, n in zip(self.matrix, self.extents):
            value: Any = (n - 1) / 2
            # Terms of 0 are left out: without a rotation, each result stays a vector along its own axis.
            for factor, x in zip(row, moved):
                value = value + factor * x if factor else value
            coordinates.append(np.asarray(value, np.float64).reshape((1,) * rank) if np.ndim(value) == 0 else value)
        if self.own is None:
            return coordinates
        shape = tuple(map(len, positions))
        result = [np.asarray(c, np.float64) for c in self.own([np.broadcast_to(c, shape) for c in coordinates])]
        if [c.shape for c in result] != [shape] * rank:
            raise DataError(
                f"data.augment.kind: expected {rank} arrays of positions of shape {shape} from `map`, got "
                f"{', '.join(str(c.shape) for c in result) or 'none'}"
            )
        return result

    def limits(self, ranges: Sequence[tuple[float, float]]) -> list[tuple[float, float]] | None:
        """Return bounds of the mapped positions, for positions in these ranges; None if only `at` knows them."""
        if self.own is not None:
            return None
        moved = [(a - (n - 1) / 2, b - (n - 1) / 2) for (a, b), n in zip(ranges, self.extents)]
        if self.displacement is not None:
            shifts = self.displacement.limits(ranges)
            moved = [(a + low, b + high) for (a, b), (low, high) in zip(moved, shifts)]
        limits = []
        for row, n in zip(self.matrix, self.extents):
            # Interval arithmetic: the extremes of a sum of products of intervals are at their ends.
            products = [sorted((factor * a, factor * b)) for factor, (a, b) in zip(row, moved)]
            limits.append(((n - 1) / 2 + sum(p[0] for p in products), (n - 1) / 2 + sum(p[1] for p in products)))
        return limits


@dataclass(frozen=True)
class GridMap:
    """Map from the elements of a field's window to positions in the field's sample.

    Attributes
    ----------
    smooth
        Map in the window.
    axes, mirrored
        Axis of the sample for each axis of the window, and whether it is reversed.
    starts
        Start of the window, per axis of the sample, in elements of the field.
    extents
        Extents of the field's window, per axis of the window. They differ from those of `smooth` by a factor, if the
        field has another grid.
    """

    smooth: SmoothMap
    axes: tuple[int, ...]
    mirrored: tuple[bool, ...]
    starts: tuple[int, ...]
    extents: tuple[int, ...]

    def _scaled(self, axis: int, value: Any, back: bool = False) -> Any:
        """Convert a position on the field's grid to the grid of the smooth map, or `back`; element i is at i."""
        own, whole = self.extents[axis], self.smooth.extents[axis]
        if own == whole:
            return value
        # Grids have common cell boundaries, not common centers: element i has its center i + 0.5 cells from the border.
        return (value + 0.5) * (own / whole if back else whole / own) - 0.5

    def _placed(self, axis: int, value: Any) -> Any:
        start = self.starts[self.axes[axis]]
        return (start + self.extents[axis] - 1) - value if self.mirrored[axis] else start + value

    def at(self, ranges: Sequence[Range]) -> list[Array]:
        """Return the positions in the sample of a box of elements: an array per axis of the sample."""
        positions = [self._scaled(axis, np.arange(*limits, dtype=np.float64)) for axis, limits in enumerate(ranges)]
        coordinates = [
            self._placed(axis, self._scaled(axis, value, back=True))
            for axis, value in enumerate(self.smooth.at(positions))
        ]
        return [coordinates[self.axes.index(axis)] for axis in range(len(coordinates))]

    def limits(self, ranges: Sequence[Range]) -> list[Range]:
        """Return, per axis of the sample, the first and the last element that interpolation in a box may need."""
        ends = [tuple(self._scaled(axis, float(n)) for n in (a, b - 1)) for axis, (a, b) in enumerate(ranges)]
        bounds = self.smooth.limits(ends)
        if bounds is None:
            several = [[(float(c.min()), float(c.max())) for c in self.at(tile)] for tile in tiles(ranges)]
            limits = [(min(a for a, _ in ends), max(b for _, b in ends)) for ends in zip(*several)]
        else:
            placed = [
                sorted(self._placed(axis, self._scaled(axis, value, back=True)) for value in bounds[axis])
                for axis in range(len(ranges))
            ]
            limits = [(placed[k][0], placed[k][1]) for k in map(self.axes.index, range(len(ranges)))]
        if not np.isfinite(limits).all():
            raise DataError(f"data.augment.kind: expected finite positions from `map`, got {limits}")
        # Rounding of the bounds is not that of the positions.
        slack = [_SLACK * (1 + max(abs(a), abs(b))) for a, b in limits]
        return [(math.floor(a - s), math.floor(b + s) + 1) for (a, b), s in zip(limits, slack)]

    def vectors(self) -> Array:
        """Return the matrix from the components of a vector in the sample to those in the window.

        A vector is a displacement, such as the difference of two positions.
        """
        placement = np.zeros_like(self.smooth.matrix)
        for axis, (source, back) in enumerate(zip(self.axes, self.mirrored)):
            placement[source, axis] = -1 if back else 1
        # The map goes from window to sample, a vector the other way.
        return np.asarray(np.linalg.inv(placement @ self.smooth.matrix))


def tiles(ranges: Sequence[Range]) -> Iterator[list[Range]]:
    """Yield the parts of a box that are sampled one after the other: nearly cubes, because a rotation needs elements
    of all rows around each element.
    """
    edge, left = [], len(ranges)
    budget = float(_TILE)
    for n in sorted(high - low for low, high in ranges):  # short axes leave more to the others
        edge.append((n, max(1, min(n, round(budget ** (1 / left))))))
        budget, left = budget / edge[-1][1], left - 1
    steps = [next(e for n, e in edge if n == high - low) for low, high in ranges]
    starts = [range(low, high, step) for (low, high), step in zip(ranges, steps)]
    for first in itertools.product(*starts):
        yield [(a, min(a + step, high)) for a, step, (_, high) in zip(first, steps, ranges)]


@dataclass(frozen=True)
class _AxisElements:
    """Elements that are read along an axis of a sample, and where each position finds its element.

    Attributes
    ----------
    first
        Position of the first entry of `table`.
    table
        Index of the element among those read, for each position; the border gives positions outside of the sample an
        element inside.
    pieces
        Ranges in the sample that are read, each with its start among the elements read.
    """

    first: int
    table: NDArray[np.intp]
    pieces: list[tuple[Range, int]]

    @property
    def count(self) -> int:
        return sum(high - low for (low, high), _ in self.pieces)

    @classmethod
    def of(cls, low: int, high: int, extent: int, border: Border) -> _AxisElements:
        """Return the elements for the positions `low` to `high`, both included, in a sample of this extent."""
        positions = np.arange(low, high + 1)
        if border == "wrap" and len(positions) < extent:
            # Read the parts on both sides of the boundary only.
            pieces, at = list[tuple[Range, int]](), 0
            while at < len(positions):
                start = int(positions[at] % extent)
                stop = min(extent, start + len(positions) - at)
                pieces.append(((start, stop), at))
                at += stop - start
            return cls(low, np.arange(len(positions)), pieces)
        inside = _folded(positions, extent, border)
        first, last = int(inside.min()), int(inside.max())
        return cls(low, inside - first, [((first, last + 1), 0)])


def _folded(positions: NDArray[np.intp], extent: int, border: Border) -> NDArray[np.intp]:
    """Map positions along an axis of a sample to elements: those outside by the rule of the border (``"zero"``: as
    ``"nearest"``), others unchanged.
    """
    if border == "wrap":
        return positions % extent
    if border == "reflect":
        # Mirrored at the boundary of the last cell, so the last element occurs twice: period 2 n.
        inside = positions % (2 * extent)
        return np.where(inside < extent, inside, 2 * extent - 1 - inside)
    return np.clip(positions, 0, extent - 1)


#: ``read(ranges, channels, out)`` reads a box of a sample, ``(*spatial, channels)``.
Reader = Callable[[Sequence[Range], Range, NDArray[Any]], object]


def sample_block(
    read: Reader,
    grid: GridMap,
    box: Sequence[Range],
    out: NDArray[Any],
    *,
    extents: Sequence[int],
    borders: Sequence[Border],
    interpolation: Interpolation = "linear",
    outside: float | None = None,
    vectors: dict[int, tuple[int, tuple[int, ...]]] | None = None,
) -> None:
    """Fill `out` with a box of a window, whose elements are sampled through a map. Local.

    At most 32 MiB of the sample are read at once: for the whole box, or for its halves, quarters, and so on. A part of
    at most 32,768 elements is not divided, whatever is read for it.

    Parameters
    ----------
    read
        Function that reads a box of the sample (:data:`Reader`).
    grid
        Map from the elements of the window to positions in the sample.
    box
        Ranges in the window, and of the channels.
    out
        Array of the shape of `box`.
    extents
        Extents of the sample.
    borders
        Elements that stand for those outside of the sample, per axis of the sample.
    interpolation
        ``"linear"`` between the neighbors; ``"nearest"`` for classes; ``"weight"``: linear, but 0 where one of the
        neighbors that contribute is 0, so that a target with a positive weight is interpolated from such targets only.
    outside : optional
        Value of elements outside of the sample along axes with the border ``"zero"``; None: as ``"nearest"``.
    vectors : optional
        Components of vectors: for a channel, its axis and the channels of all components.
    """
    *spatial, (first, last) = box
    vectors = {k: v for k, v in (vectors or {}).items() if first <= k < last}
    needed = [*range(first, last), *(k for _, channels in vectors.values() for k in channels)]
    # Channels are read as one range, which may contain others than those needed.
    lowest, highest = min(needed), max(needed) + 1
    matrix = grid.vectors() if vectors else None

    def channels_of(channel: Callable[[int], NDArray[Any]], part: NDArray[Any]) -> None:
        values: dict[int, NDArray[Any]] = {}  # each component is sampled once, and used for all channels of its vector
        for k in range(first, last):
            if k not in vectors or matrix is None:
                part[..., k - first] = channel(k - lowest)
                continue
            total: Any = 0
            for factor, component in zip(matrix[vectors[k][0]], vectors[k][1]):
                if component not in values:
                    values[component] = channel(component - lowest)
                total = total + out.dtype.type(factor) * values[component]
            part[..., k - first] = total

    for ranges, axes in _readable(grid, spatial, extents, borders, (highest - lowest) * out.itemsize):
        source = np.empty((*(axis.count for axis in axes), highest - lowest), out.dtype)
        for pieces in itertools.product(*(axis.pieces for axis in axes)):
            where = tuple(slice(at, at + high - low) for (low, high), at in pieces)
            read([piece for piece, _ in pieces], (lowest, highest), source[where])
        # Offsets in elements, so that the sum over the axes is an index into the flat array.
        tables = [axis.table * (step // source.itemsize) for axis, step in zip(axes, source.strides)]
        flat = source.reshape(-1)
        for tile in tiles(ranges):
            part = out[tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(tile, spatial))]
            positions = grid.at(tile)
            with np.errstate(invalid="ignore", over="ignore"):
                channels_of(_sampler(flat, axes, tables, positions, part.shape[:-1], interpolation), part)
            if outside is not None and "zero" in borders:
                part[_outside(positions, extents, borders, part.shape[:-1])] = outside


def _readable(
    grid: GridMap, box: Sequence[Range], extents: Sequence[int], borders: Sequence[Border], nbytes: int
) -> Iterator[tuple[Sequence[Range], list[_AxisElements]]]:
    """Yield parts of a box, each with the elements that are read for it, per axis; an element has `nbytes` [B]."""
    axes = [_AxisElements.of(*ends, n, border) for ends, n, border in zip(grid.limits(box), extents, borders)]
    lengths = [high - low for low, high in box]
    if math.prod(axis.count for axis in axes) * nbytes <= _SOURCE or math.prod(lengths) <= _TILE:
        yield box, axes
        return
    # Halves of the longest axis: the box around a rotated part grows with its longest side.
    longest = lengths.index(max(lengths))
    low, high = box[longest]
    for half in ((low, (low + high) // 2), ((low + high) // 2, high)):
        yield from _readable(grid, [*box[:longest], half, *box[longest + 1 :]], extents, borders, nbytes)


def _outside(
    positions: Sequence[Array], extents: Sequence[int], borders: Sequence[Border], shape: tuple[int, ...]
) -> NDArray[np.bool_]:
    """Return which positions lie outside of all cells of the sample, along axes with the border ``"zero"``."""
    outside = np.zeros(shape, np.bool_)
    for x, n, border in zip(positions, extents, borders):
        if border == "zero":
            outside |= (x < -0.5) | (x >= n - 0.5)
    return outside


def _sampler(
    flat: NDArray[Any],
    axes: Sequence[_AxisElements],
    tables: Sequence[NDArray[np.intp]],
    positions: Sequence[Array],
    shape: tuple[int, ...],
    interpolation: Interpolation,
) -> Callable[[int], NDArray[Any]]:
    """Return a function that samples a channel at the positions of a tile; it takes the channel's index in `flat`."""
    if interpolation == "nearest":
        index: Any = 0
        for x, axis, table in zip(positions, axes, tables):
            index = index + table.take(np.floor(x + 0.5).astype(np.intp) - axis.first)
        index = np.broadcast_to(index, shape)
        return lambda channel: flat[channel:].take(index)
    corners: list[Any] = [0]
    fractions = []
    for x, axis, table in zip(positions, axes, tables):
        low = np.floor(x)
        f = x - low
        at = low.astype(np.intp)
        at -= axis.first
        lower = table.take(at)
        # Where a fraction is 0 the upper neighbor does not count, not even if it is NaN.
        at += f > 0
        upper = table.take(at)
        corners = [corner + end for corner in corners for end in (lower, upper)]
        fractions.append(f.astype(flat.dtype))
    corners = [np.broadcast_to(corner, shape) for corner in corners]

    def channel(number: int) -> NDArray[Any]:
        view = flat[number:]  # the channel is the last axis of what was read
        values = [view.take(corner) for corner in corners]
        absent = np.any([value == 0 for value in values], axis=0) if interpolation == "weight" else None
        # Corners are in binary order, the last axis fastest: each pass joins pairs along one axis, the last one first.
        for f in reversed(fractions):
            for low, high in zip(values[::2], values[1::2]):
                high -= low
                high *= f
                high += low
            values = values[1::2]
        if absent is not None:
            values[0][absent] = 0
        return values[0]

    return channel
