"""A Lagrangian mesh: nodes that move with the flow, cells that keep their mass.

Everything is local to a block of cell rows, because the path of a node depends on that node alone: a
2048 x 2048 mesh is computed a few rows at a time, and the result does not depend on the blocks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .flow import Bubble, Flow, VelocityField
from .quads import Quads
from .verdict import METRICS, scaled_jacobian

__all__ = ["CHANNELS", "UNITS", "MeshBlock"]

Array = NDArray[np.float64]

CHANNELS = ("Density", "Pressure", "VectorComp_AvgVelocity_R", "VolumeFractions_bubble", *METRICS)
"""Channels of a sample, in order; the last 14 are Verdict's."""
UNITS = tuple(
    {
        "Density": "kg/m^3", "Pressure": "Pa", "VectorComp_AvgVelocity_R": "m/s", "jacobian": "m^2",
        "largestAngle": "degree", "smallestAngle": "degree", "volume": "m^2",
    }.get(name, "1")
    for name in CHANNELS
)  # fmt: skip
"""Units of the channels."""

INITIAL_PRESSURE = 1.0
SLICE = 16384
"""Nodes that are moved together: the work arrays of one slice stay in the cache."""
SUBCELLS = 8
"""Samples per axis that measure how much of a cell is bubble."""
LEAST_AREA = 0.1
"""Least area of a cell, of its initial one, in the density: a tangled cell has none or less."""


class MeshBlock:
    """Cell rows ``[first, last)`` of a square mesh on the unit square, and their motion.

    Parameters
    ----------
    flow : Flow
    resolution : int
        Cells per axis of the whole mesh.
    first, last : int
        Rows of this block.
    dt : float
        Time step [s].
    """

    def __init__(self, flow: Flow, resolution: int, first: int, last: int, dt: float) -> None:
        self._flow, self._dt, self._resolution = flow, dt, resolution
        self._rows, self._first = last - first, first
        line = np.arange(resolution + 1) / resolution
        y, x = np.meshgrid(line[first : last + 1], line, indexing="ij")
        self._at = np.stack([x.ravel(), y.ravel()])
        n = min(SLICE, self._at.shape[1])
        self._work = np.empty((3, 2 * n))
        self._fields: dict[int, VelocityField] = {}
        self.step = 0

    @property
    def nodes(self) -> Array:
        """Positions ``(rows + 1, resolution + 1, 2)`` [m], a view."""
        return np.moveaxis(self._at.reshape(2, self._rows + 1, self._resolution + 1), 0, -1)

    def advance(self) -> None:
        """Move all nodes by one time step (RK4)."""
        frozen = [self._flow.freeze(2 * self.step + k) for k in range(3)]
        total = self._at.shape[1]
        for start in range(0, total, SLICE):
            n = min(SLICE, total - start)
            at, velocity, sums = (row[: 2 * n].reshape(2, n) for row in self._work)
            field = self._field(n)
            origin = self._at[:, start : start + n]
            at[:] = origin
            # (frozen instant, weight of this slope, distance at which the next one is taken)
            for instant, weight, ahead in ((0, 1, 0.5), (1, 2, 0.5), (1, 2, 1.0), (2, 1, 0.0)):
                field.evaluate(frozen[instant], at, velocity)
                if instant == 0:
                    sums[:] = velocity
                else:
                    np.multiply(velocity, weight, out=at)
                    sums += at
                np.multiply(velocity, ahead * self._dt, out=at)
                at += origin
            sums *= self._dt / 6
            origin += sums
        self.step += 1

    def quality(self) -> Array:
        """Scaled Jacobian ``(rows, resolution)`` against +z: negative in tangled and inverted cells."""
        return scaled_jacobian(Quads(self.nodes, normal="up"))

    def channels(self, out: NDArray[np.float32]) -> None:
        """out ``(rows, resolution, 18)`` <- the state now, see :data:`CHANNELS`."""
        quads = Quads(self.nodes)
        out[..., 0], out[..., 1] = self._density_and_pressure()
        out[..., 2] = self._average_velocity()
        out[..., 3] = self.volume_fractions()
        for k, metric in enumerate(METRICS.values()):
            out[..., 4 + k] = metric(quads)

    def volume_fractions(self) -> Array:
        """Share of bubble per cell: constant in time, because matter does not leave a Lagrangian cell."""
        return bubble_fractions(self._flow.bubble, self._resolution, self._first, self._first + self._rows)

    def _density_and_pressure(self) -> tuple[Array, Array]:
        bubble, fraction = self._flow.bubble, self.volume_fractions()
        up = Quads(self.nodes, normal="up").corner_areas
        area = 0.25 * (up[0] + up[1] + up[2] + up[3]) * self._resolution**2
        compression = 1 / np.maximum(area, LEAST_AREA)
        density = (bubble.ambient + fraction * (bubble.density - bubble.ambient)) * compression
        gamma = bubble.ambient_gamma + fraction * (bubble.gamma - bubble.ambient_gamma)
        return density, INITIAL_PRESSURE * compression**gamma

    def _average_velocity(self) -> Array:
        """Mean of the x velocity [m/s] over the four nodes of each cell."""
        frozen, total = self._flow.freeze(2 * self.step), self._at.shape[1]
        u = np.empty(total)
        for start in range(0, total, SLICE):
            n = min(SLICE, total - start)
            at, velocity = (row[: 2 * n].reshape(2, n) for row in self._work[:2])
            at[:] = self._at[:, start : start + n]
            self._field(n).evaluate(frozen, at, velocity)
            u[start : start + n] = velocity[0]
        at_nodes = u.reshape(self._rows + 1, self._resolution + 1)
        return 0.25 * (at_nodes[:-1, :-1] + at_nodes[:-1, 1:] + at_nodes[1:, 1:] + at_nodes[1:, :-1])

    def _field(self, n: int) -> VelocityField:
        if n not in self._fields:
            self._fields[n] = VelocityField(n)
        return self._fields[n]


def bubble_fractions(bubble: Bubble, resolution: int, first: int, last: int) -> Array:
    """Share of the cells of rows ``[first, last)`` that lies in the bubble, by 8 x 8 samples per cell."""
    centre = (np.arange(resolution) + 0.5) / resolution
    dx = centre[None, :] - bubble.x
    dy = centre[first:last, None] - bubble.y
    distance = np.sqrt(dx * dx + dy * dy)
    half_diagonal = np.sqrt(0.5) / resolution
    fraction = (distance < bubble.radius).astype(np.float64)
    i, j = np.nonzero(np.abs(distance - bubble.radius) <= half_diagonal)
    offsets = ((np.arange(SUBCELLS) + 0.5) / SUBCELLS - 0.5) / resolution
    x = dx[0, j][:, None, None] + offsets
    y = dy[i, 0][:, None, None] + offsets[:, None]
    fraction[i, j] = (x * x + y * y < bubble.radius**2).mean(axis=(1, 2))
    return fraction
