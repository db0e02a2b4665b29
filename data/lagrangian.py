"""The Lagrangian mesh of a mesh-tangling simulation, and the flow that moves it.

Nodes move with the flow, and cells keep their mass. The path of a node depends on that node alone, so a block of cell
rows is computed by itself: a 2048 x 2048 mesh takes a few rows at a time, and the result does not depend on the blocks.

The flow is analytic, unsteady and confined to the unit square. Its velocity is the sum of three parts, drawn at random
per simulation:

- *cells*: standing vortices of the stream function ``a(t) sin(m pi x) sin(n pi y)``, whose strength
  swings with time, so that particle paths are chaotic and stretch the mesh into folds;
- *bubble*: two vortices of opposite sign at the flanks of the bubble, as a shock leaves behind when it
  runs through matter of another density (baroclinic vorticity); strength proportional to the Atwood
  number. Their centers drift with the cells and the sound;
- *sound*: a mild compression with the velocity potential ``b(t) cos(m pi x) cos(n pi y)``, which changes the density.

Cells and bubble are free of divergence, and the velocity of no part crosses the walls.

Reference
---------
Stream functions of this kind: S. H. Strogatz, *Nonlinear Dynamics and Chaos*; T. H. Solomon and J. P. Gollub,
*Chaotic particle transport in time-dependent Rayleigh-Benard convection*, Phys. Rev. A 38 (1988).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .verdict import METRICS, Quads, scaled_jacobian

__all__ = [
    "CHANNELS",
    "UNITS",
    "Bubble",
    "Flow",
    "MeshBlock",
    "VelocityField",
]

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
"""Nodes that are moved together, so that the work arrays of one slice stay in the cache."""
SUBCELLS = 8
"""Sample points per axis of a cell for its share of the bubble."""
LEAST_AREA = 0.1
"""Least area of a cell for the density, relative to its initial area: a tangled cell has no area or a negative one."""
HIGHEST_WAVE = 7  # of the wave numbers m and n
CELLS = 8  # number of standing vortices
SOUNDS = 2  # number of compressions


@dataclass(frozen=True)
class Bubble:
    """A disc of different density in the initial mesh.

    Attributes
    ----------
    x, y, radius : float
        Center and radius [m].
    density, ambient : float
        Initial density inside and outside [kg/m^3].
    gamma, ambient_gamma : float
        Adiabatic exponents inside and outside.
    """

    x: float
    y: float
    radius: float
    density: float
    ambient: float = 1.0
    gamma: float = 1.67
    ambient_gamma: float = 1.4

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Bubble:
        """Draw a bubble 2 to 8 times lighter or heavier than its surroundings."""
        x, y = rng.uniform(0.3, 0.7, 2)
        # Logarithm of the density ratio: its sign decides whether the bubble is heavier or lighter.
        ratio = float(rng.choice([-1, 1])) * rng.uniform(np.log(2.0), np.log(8.0))
        return cls(float(x), float(y), float(rng.uniform(0.12, 0.24)), float(np.exp(ratio)))

    @property
    def atwood(self) -> float:
        """Atwood number, the contrast of the densities, in (-1, 1)."""
        return (self.density - self.ambient) / (self.density + self.ambient)


@dataclass(frozen=True)
class Waves:
    """Amplitudes ``mean + swing cos(omega t + phase)`` of the waves ``(m, n)``."""

    m: NDArray[np.int64]
    n: NDArray[np.int64]
    mean: Array
    swing: Array
    omega: Array
    phase: Array

    def amplitude(self, t: float) -> Array:
        return self.mean + self.swing * np.cos(self.omega * t + self.phase)


class Flow:
    """One random flow; :meth:`freeze` gives the velocity field at one instant.

    Parameters
    ----------
    rng : numpy.random.Generator
        Random generator; its state determines the flow.
    bubble : Bubble
    dt, steps : float, int
        Time step [s] and number of steps of the Runge-Kutta scheme that will use the flow: the vortex
        centers are integrated here, once, for the instants ``k dt / 2`` with ``k <= 2 steps``.
    """

    def __init__(self, rng: np.random.Generator, bubble: Bubble, dt: float, steps: int) -> None:
        self.bubble = bubble
        self._half = dt / 2
        self._cells = _draw_cells(rng)
        self._sounds = _draw_sounds(rng)
        self.width = bubble.radius * float(rng.uniform(0.35, 0.6))
        angle = float(rng.uniform(0, 2 * np.pi))
        speed = bubble.atwood * float(rng.uniform(0.3, 0.6))
        # A Gaussian vortex of stream function g exp(-r^2 / 2 s^2) turns fastest at r = s, at 0.607 g / s.
        self.strength = np.array([1.0, -1.0]) * speed * self.width / 0.607
        offset = 0.8 * bubble.radius * np.array([np.cos(angle), np.sin(angle)])
        start = np.array([[bubble.x, bubble.y]]) + np.array([[1.0], [-1.0]]) * offset
        self._tracks = self._track(start, 2 * steps)

    def freeze(self, half_step: int) -> FrozenFlow:
        """Return the flow at time ``half_step * dt / 2``."""
        weights = self._weights(half_step * self._half)
        return FrozenFlow(*weights, self._tracks[half_step], self.strength, self.width)

    def _weights(self, t: float) -> tuple[Array, Array]:
        """Compute coefficients of ``S_m(x) C_n(y)`` in u and of ``C_m(x) S_n(y)`` in v, ``(M + 1, M + 1)`` each.

        ``S_m(x) = sin(m pi x)``, ``C_m(x) = cos(m pi x)``, and M is the highest wave number.
        """
        # Cells: u = d psi / dy, v = -d psi / dx of psi = a S_m(x) S_n(y). Sound: the gradient of b C_m(x) C_n(y).
        u = np.zeros((HIGHEST_WAVE + 1, HIGHEST_WAVE + 1))
        v = np.zeros_like(u)
        c, s = self._cells, self._sounds
        np.add.at(u, (c.m, c.n), np.pi * c.n * c.amplitude(t))
        np.add.at(v, (c.m, c.n), -np.pi * c.m * c.amplitude(t))
        np.add.at(u, (s.m, s.n), -np.pi * s.m * s.amplitude(t))
        np.add.at(v, (s.m, s.n), -np.pi * s.n * s.amplitude(t))
        return u, v

    def _track(self, start: Array, half_steps: int) -> Array:
        """Compute the vortex centers (instants, vortices, axes) ``(half_steps + 1, 2, 2)`` from `start` ``(2, 2)`` on.

        They are moved by the cells and the sound, and integrated by the classical Runge-Kutta scheme (RK4).
        """
        field = VelocityField(len(start))
        empty = np.zeros(0)

        def velocity(at: Array, t: float) -> Array:
            out = np.empty((2, len(at)))
            still = FrozenFlow(*self._weights(t), np.zeros((0, 2)), empty, self.width)
            field.evaluate(still, np.ascontiguousarray(at.T), out)
            return out.T

        # Steps of dt / 2, because RK4 of the mesh needs the flow in the middle of its steps, too.
        h, tracks = self._half, [start]
        for k in range(half_steps):
            at, t = tracks[-1], k * self._half
            k1 = velocity(at, t)
            k2 = velocity(at + h / 2 * k1, t + h / 2)
            k3 = velocity(at + h / 2 * k2, t + h / 2)
            k4 = velocity(at + h * k3, t + h)
            tracks.append(at + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4))
        return np.stack(tracks)


@dataclass(frozen=True)
class FrozenFlow:
    """A flow at one instant: wave coefficients ``(M + 1, M + 1)``, vortex centers ``(V, 2)``, strengths, width."""

    u: Array
    v: Array
    centres: Array
    strength: Array
    width: float


class VelocityField:
    """Evaluator of frozen flows at `n` points, in work arrays that every call reuses; one per thread."""

    def __init__(self, n: int) -> None:
        shape = (HIGHEST_WAVE + 1, n)
        self._sx, self._cx, self._sy, self._cy = (np.empty(shape) for _ in range(4))
        self._work = np.empty((6, n))

    def evaluate(self, flow: FrozenFlow, at: Array, out: Array) -> None:
        """Write the velocity [m/s] at the points `at` [m] to `out`; both ``(2, n)`` with contiguous rows. Local."""
        self._harmonics(at[0], self._sx, self._cx)
        self._harmonics(at[1], self._sy, self._cy)
        out[:] = 0.0
        term = self._work[0]
        # Only the few waves that were drawn have a weight.
        for m, n in np.argwhere((flow.u != 0) | (flow.v != 0)):
            for weight, x, y, row in (
                (flow.u[m, n], self._sx[m], self._cy[n], out[0]),
                (flow.v[m, n], self._cx[m], self._sy[n], out[1]),
            ):
                np.multiply(x, weight, out=term)
                term *= y
                row += term
        for (cx, cy), strength in zip(flow.centres, flow.strength):
            self._add_vortex(at, out, cx, cy, strength, flow.width)

    def _harmonics(self, x: Array, s: Array, c: Array) -> None:
        """Compute ``sin(m pi x)`` and ``cos(m pi x)`` for all m, by the addition theorem: two trigonometric calls."""
        term = self._work[0]
        s[0], c[0] = 0.0, 1.0
        np.multiply(x, np.pi, out=term)
        np.sin(term, out=s[1])
        np.cos(term, out=c[1])
        for m in range(1, HIGHEST_WAVE):
            np.multiply(s[m], c[1], out=s[m + 1])
            np.multiply(c[m], s[1], out=term)
            s[m + 1] += term
            np.multiply(c[m], c[1], out=c[m + 1])
            np.multiply(s[m], s[1], out=term)
            c[m + 1] -= term

    def _add_vortex(self, at: Array, out: Array, cx: float, cy: float, strength: float, width: float) -> None:
        """Add the velocity of a vortex at ``(cx, cy)`` with the stream function ``strength exp(-r^2 / 2 s^2) sin(pi x)
        sin(pi y)``, where r is the distance from the center and s is `width`.

        The sines make the normal velocity vanish at the walls. :meth:`evaluate` has computed them, as first harmonics.
        """
        dx, dy, gauss, wall, term = self._work[1], self._work[2], self._work[3], self._work[4], self._work[5]
        np.subtract(at[0], cx, out=dx)
        np.subtract(at[1], cy, out=dy)
        np.multiply(dx, dx, out=gauss)
        np.multiply(dy, dy, out=term)
        gauss += term
        gauss *= -0.5 / width**2
        np.exp(gauss, out=gauss)
        gauss *= strength
        np.multiply(self._sx[1], self._sy[1], out=wall)
        wall *= -1.0 / width**2
        # u = d psi / dy = gauss * (-dy / s^2 * wall + pi sin(pi x) cos(pi y)); v = -d psi / dx in the same way.
        for distance, s, c, row, sign in (
            (dy, self._sx[1], self._cy[1], out[0], 1.0),
            (dx, self._sy[1], self._cx[1], out[1], -1.0),
        ):
            distance *= wall
            np.multiply(s, c, out=term)
            term *= np.pi
            distance += term
            distance *= gauss
            distance *= sign
            row += distance


def _draw_cells(rng: np.random.Generator) -> Waves:
    """Draw standing vortices; the root-mean-square velocity of their mean amplitudes is 0.2 to 0.3 m/s in total."""
    pairs = [(m, n) for m in range(1, HIGHEST_WAVE + 1) for n in range(1, HIGHEST_WAVE + 1) if 4 <= np.hypot(m, n) <= 7]
    chosen = rng.choice(len(pairs), CELLS, replace=False)
    m, n = np.array([pairs[k] for k in chosen]).T
    size = rng.normal(0, 1, CELLS) / np.hypot(m, n) ** 1.5
    # Mean square of the velocity of one cell of amplitude a: a^2 pi^2 (m^2 + n^2) / 4.
    rms = np.sqrt(np.sum(size**2 * np.pi**2 * (m**2 + n**2) / 4))
    size *= rng.uniform(0.2, 0.3) / rms
    return Waves(
        m, n, size, size * rng.uniform(0.2, 0.8, CELLS), rng.uniform(0.5, 2.5, CELLS), rng.uniform(0, 2 * np.pi, CELLS)
    )


def _draw_sounds(rng: np.random.Generator) -> Waves:
    """Draw compressions that change the density of matter at rest with an amplitude of 5 to 15 % each."""
    # The density changes at the rate div v = b pi^2 (m^2 + n^2) cos(omega t): its integral has the factor 1 / omega.
    pairs = [(1, 0), (0, 1), (1, 1), (2, 1), (1, 2), (2, 2)]
    m, n = np.array([pairs[k] for k in rng.choice(len(pairs), SOUNDS, replace=False)]).T
    omega = rng.uniform(3.0, 6.0, SOUNDS)
    size = rng.uniform(0.05, 0.15, SOUNDS) * omega / (np.pi**2 * (m**2 + n**2))
    return Waves(m, n, np.zeros(SOUNDS), size, omega, rng.uniform(0, 2 * np.pi, SOUNDS))


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
        self._work = np.empty((3, 2 * n))  # of a slice: positions, velocities, and the weighted sum of the slopes
        self._fields: dict[int, VelocityField] = {}
        self.step = 0

    @property
    def nodes(self) -> Array:
        """Positions ``(rows + 1, resolution + 1, 2)`` [m], a view."""
        return np.moveaxis(self._at.reshape(2, self._rows + 1, self._resolution + 1), 0, -1)

    def advance(self) -> None:
        """Move all nodes by one time step (RK4)."""
        # RK4 needs the flow at the beginning, in the middle and at the end of the step.
        frozen = [self._flow.freeze(2 * self.step + k) for k in range(3)]
        total = self._at.shape[1]
        for start in range(0, total, SLICE):
            n = min(SLICE, total - start)
            at, velocity, sums = (row[: 2 * n].reshape(2, n) for row in self._work)
            field = self._field(n)
            origin = self._at[:, start : start + n]
            at[:] = origin
            # (frozen instant, weight of this slope, distance to the point of the next slope)
            for instant, weight, ahead in ((0, 1, 0.5), (1, 2, 0.5), (1, 2, 1.0), (2, 1, 0.0)):
                field.evaluate(frozen[instant], at, velocity)
                if instant == 0:
                    sums[:] = velocity
                else:
                    np.multiply(velocity, weight, out=at)  # `at` is free here: the next point overwrites it
                    sums += at
                np.multiply(velocity, ahead * self._dt, out=at)
                at += origin
            sums *= self._dt / 6
            origin += sums
        self.step += 1

    def quality(self) -> Array:
        """Compute the scaled Jacobian ``(rows, resolution)`` against +z: negative in tangled and inverted cells."""
        return scaled_jacobian(Quads(self.nodes, normal="up"))

    def channels(self, out: NDArray[np.float32]) -> None:
        """Write the current state to `out` ``(rows, resolution, 18)``; :data:`CHANNELS` has the order."""
        quads = Quads(self.nodes)
        out[..., 0], out[..., 1] = self._density_and_pressure()
        out[..., 2] = self._average_velocity()
        out[..., 3] = self.volume_fractions()
        for k, metric in enumerate(METRICS.values()):
            out[..., 4 + k] = metric(quads)

    def volume_fractions(self) -> Array:
        """Compute the fraction of each cell's initial area that the bubble fills, ``(rows, resolution)``.

        The fraction is constant in time, as matter does not leave a Lagrangian cell.
        """
        return bubble_fractions(self._flow.bubble, self._resolution, self._first, self._first + self._rows)

    def _density_and_pressure(self) -> tuple[Array, Array]:
        bubble, fraction = self._flow.bubble, self.volume_fractions()
        up = Quads(self.nodes, normal="up").corner_areas
        # The area of a cell is the mean of its corner Jacobians; here relative to the initial area.
        area = 0.25 * (up[0] + up[1] + up[2] + up[3]) * self._resolution**2
        compression = 1 / np.maximum(area, LEAST_AREA)
        density = (bubble.ambient + fraction * (bubble.density - bubble.ambient)) * compression
        gamma = bubble.ambient_gamma + fraction * (bubble.gamma - bubble.ambient_gamma)
        return density, INITIAL_PRESSURE * compression**gamma  # adiabatic

    def _average_velocity(self) -> Array:
        """Compute the mean of the x velocity [m/s] over the four nodes of each cell."""
        frozen, total = self._flow.freeze(2 * self.step), self._at.shape[1]
        u = np.empty(total)
        for start in range(0, total, SLICE):
            n = min(SLICE, total - start)
            at, velocity = (row[: 2 * n].reshape(2, n) for row in self._work[:2])
            at[:] = self._at[:, start : start + n]  # contiguous rows, for `evaluate`
            self._field(n).evaluate(frozen, at, velocity)
            u[start : start + n] = velocity[0]
        at_nodes = u.reshape(self._rows + 1, self._resolution + 1)
        return 0.25 * (at_nodes[:-1, :-1] + at_nodes[:-1, 1:] + at_nodes[1:, 1:] + at_nodes[1:, :-1])

    def _field(self, n: int) -> VelocityField:
        if n not in self._fields:  # at most two sizes: the last slice is shorter
            self._fields[n] = VelocityField(n)
        return self._fields[n]


def bubble_fractions(bubble: Bubble, resolution: int, first: int, last: int) -> Array:
    """Compute the fraction of each cell of rows ``[first, last)`` that the bubble fills initially.

    Cells that the circle may cross are sampled at 8 x 8 points.
    """
    centre = (np.arange(resolution) + 0.5) / resolution
    dx = centre[None, :] - bubble.x
    dy = centre[first:last, None] - bubble.y
    distance = np.sqrt(dx * dx + dy * dy)
    half_diagonal = np.sqrt(0.5) / resolution
    fraction = (distance < bubble.radius).astype(np.float64)
    # The circle may cross only cells whose center is within half a diagonal of it.
    i, j = np.nonzero(np.abs(distance - bubble.radius) <= half_diagonal)
    offsets = ((np.arange(SUBCELLS) + 0.5) / SUBCELLS - 0.5) / resolution
    x = dx[0, j][:, None, None] + offsets
    y = dy[i, 0][:, None, None] + offsets[:, None]
    fraction[i, j] = (x * x + y * y < bubble.radius**2).mean(axis=(1, 2))
    return fraction
