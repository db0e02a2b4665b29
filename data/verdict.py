"""Quality of quadrilateral cells by the definitions of the Verdict library, vectorised over a mesh.

Everything is computed in float64 from node positions; thresholds and clamps follow the Verdict that
VTK 9.7 ships, so that the tests can compare value by value:

- a length, area or Jacobian below :data:`~.quads.TINY` (of the cell scaled by its bounding-box diagonal)
  counts as zero;
- results are clamped to +-:data:`HUGE`;
- a quad whose nodes 2 and 3 coincide is measured as a triangle where Verdict does so.

Verdict measures a cell against its *own* normal: a cell turned inside out as a whole looks perfect.
A mesh in the plane knows better; ``Quads(nodes, normal="up")`` measures against +z, and
:func:`scaled_jacobian` is then negative for an inverted cell.

References
----------
C. J. Stimpson et al., *The Verdict Geometric Quality Library*, SAND2007-1751, chapter 4 (quads). We
differ in one thing: where Verdict returns NaN (distortion of a cell shrunk to a point), we return 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .quads import TINY, Quads, maximum, minimum, unit

__all__ = ["HUGE", "METRICS", "TINY", "Quads", "quad_metrics"]

Array = NDArray[np.float64]

HUGE = 1e30
"""VERDICT_DBL_MAX."""

_GAUSS = 1 / np.sqrt(3.0)


def aspect_ratio(q: Quads) -> Array:
    """Longest edge times perimeter over the sum of the corner Jacobians; 1 for a square."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return _clamp(maximum(q.lengths) * sum(q.lengths) / sum(q.areas))


def condition_number(q: Quads) -> Array:
    """Largest condition number of the Jacobian matrix at the corners; 1 for a square."""
    worst = np.zeros_like(q.scale)
    for k in range(4):
        flat = q.areas[k] < TINY
        value = (q.lengths_squared[k] + q.lengths_squared[k - 1]) / np.where(flat, 1.0, q.areas[k])
        worst = np.fmax(worst, np.where(flat, HUGE, value))
    result = np.where(worst >= HUGE, HUGE, worst / 2)
    if q.collapsed.any():
        (a, b, c), twice = q.triangle
        # v1.v1 + v2.v2 - v1.v2 with v1.v2 from the law of cosines.
        value = (a + c - (a + c - b) / 2) / (np.where(twice == 0, 1.0, twice) * np.sqrt(3.0))
        result[q.collapsed] = np.where(twice == 0, HUGE, np.fmin(value, HUGE))
    return result


def distortion(q: Quads) -> Array:
    """Smallest Jacobian over the corners and 2x2 Gauss points times parent area over area; 1 for a square."""
    corner = [c / 4 for c in q.cross]
    units = [unit(c) for c in corner]
    face = _face_sign([unit(c) for c in q.cross])
    least = np.full_like(q.scale, np.inf)
    area = np.zeros_like(least)
    for weights in _gauss_weights():
        jacobian = sum(w * c for w, c in zip(weights, corner))
        area += np.abs(jacobian)
        least = np.minimum(least, sum(w * s for w, s in zip(weights, units)) * jacobian)
    for c, s in zip(corner, units):
        least = np.minimum(least, np.where(face * c > 0, 1.0, -1.0) * s * c)
    result = np.where(area > 0, 4 * least / np.where(area > 0, area, 1.0), 0.0)
    if q.collapsed.any():
        result[q.collapsed] = np.where(q.triangle[1] > 0, 2.0, 0.0)
    return result


def jacobian(q: Quads) -> Array:
    """Smallest Jacobian at the corners [m^2]."""
    result = _clamp(minimum(q.corner_areas))
    if q.collapsed.any():
        result[q.collapsed] = q.triangle[1]
    return result


def largest_angle(q: Quads) -> Array:
    """Largest included angle [degree], above 180 where a corner is reflex."""
    angle = np.degrees(np.arccos(minimum(q.cosines)))
    angle = np.where(minimum(q.corner_areas) < 0, 360 - angle, angle)
    return _angles(q, np.where(q.short, 0.0, angle), np.minimum)


def smallest_angle(q: Quads) -> Array:
    """Smallest included angle [degree]."""
    angle = np.degrees(np.arccos(maximum(q.cosines)))
    return _angles(q, np.where(q.short, 360.0, angle), np.maximum)


def oddy(q: Quads) -> Array:
    """General distortion from the left Cauchy-Green tensor, worst corner; 0 for a square."""
    worst = np.zeros_like(q.scale)
    square = q.scale * q.scale
    for k in range(4):
        g11, g22 = q.lengths_squared[k], q.lengths_squared[k - 1]
        g12 = -(q.ex[k] * q.ex[k - 1] + q.ey[k] * q.ey[k - 1]) / square
        # det g = g11 g22 - g12^2, but as the squared cross product it does not cancel in flat cells.
        g = (q.cross[k] / square) ** 2
        flat = g < TINY
        value = ((g11 - g22) ** 2 + 4 * g12 * g12) / 2 / np.where(flat, 1.0, g)
        worst = np.fmax(worst, np.where(flat, HUGE, value))
    return _clamp(worst)


def scaled_jacobian(q: Quads) -> Array:
    """Smallest corner Jacobian over the lengths of its two edges: the sine of the angle; 1 for a square."""
    with np.errstate(divide="ignore", invalid="ignore"):
        least = minimum([q.areas[k] / (q.lengths[k] * q.lengths[k - 1]) for k in range(4)])
    result = np.where(minimum(q.lengths) < TINY, 0.0, _clamp(least))
    if q.collapsed.any():
        (a, b, c), twice = q.triangle
        product = np.sqrt(np.maximum(np.maximum(a * b, b * c), a * c))
        value = 2 / np.sqrt(3.0) * twice / np.where(product < TINY, 1.0, product)
        result[q.collapsed] = np.where(product < TINY, 0.0, value)
    return result


def shape(q: Quads) -> Array:
    """2 over the condition number of the weighted Jacobian matrix, worst corner; 1 for a square."""
    with np.errstate(divide="ignore", invalid="ignore"):
        s = q.lengths_squared
        least = 2 * minimum([q.areas[k] / (s[k] + s[k - 1]) for k in range(4)])
    return np.where((minimum(s) <= TINY) | (least < TINY), 0.0, least)


def shear(q: Quads) -> Array:
    """The scaled Jacobian where it is positive, else 0."""
    value = scaled_jacobian(q)
    return np.where(value <= TINY, 0.0, value)


def skew(q: Quads) -> Array:
    """Cosine of the angle between the principal axes, as absolute value; 0 for a rectangle."""
    x1, y1, x2, y2 = q.axes
    first, second = np.hypot(x1, y1), np.hypot(x2, y2)
    flat = (first <= 2 * TINY) | (second <= 2 * TINY)
    return np.where(flat, 0.0, np.abs(x1 * x2 + y1 * y2) / np.where(flat, 1.0, first * second))


def stretch(q: Quads) -> Array:
    """sqrt(2) times the shortest edge over the longest diagonal; 1 for a square."""
    square = q.scale * q.scale
    diagonal = [(q.x[k + 2] - q.x[k]) ** 2 + (q.y[k + 2] - q.y[k]) ** 2 for k in range(2)]
    longest = np.maximum(*diagonal) / square
    flat = longest < TINY
    return np.where(flat, HUGE, np.sqrt(2 * minimum(q.lengths_squared) / np.where(flat, 1.0, longest)))


def taper(q: Quads) -> Array:
    """Cross derivative over the shorter principal axis; 0 for a parallelogram."""
    x1, y1, x2, y2 = q.axes
    shortest = np.minimum(np.hypot(x1, y1), np.hypot(x2, y2))
    cross = np.hypot(q.ex[0] + q.ex[2], q.ey[0] + q.ey[2]) / q.scale
    flat = shortest < TINY
    return np.where(flat, HUGE, np.fmin(cross / np.where(flat, 1.0, shortest), HUGE))


def volume(q: Quads) -> Array:
    """Area of the cell [m^2]: the mean of its corner Jacobians."""
    a = q.corner_areas
    return _clamp(0.25 * (a[0] + a[1] + a[2] + a[3]))


METRICS: dict[str, Callable[[Quads], Array]] = {
    "aspectRatio": aspect_ratio,
    "conditionNumber": condition_number,
    "distortion": distortion,
    "jacobian": jacobian,
    "largestAngle": largest_angle,
    "oddy": oddy,
    "scaledJacobian": scaled_jacobian,
    "shape": shape,
    "shear": shear,
    "skew": skew,
    "smallestAngle": smallest_angle,
    "stretch": stretch,
    "taper": taper,
    "volume": volume,
}
"""Metrics by the channel names of the mesh-tangling samples, in channel order."""


def quad_metrics(nodes: ArrayLike, names: Sequence[str] = tuple(METRICS)) -> dict[str, Array]:
    """Metrics of all cells of a mesh. Local.

    Parameters
    ----------
    nodes : array, ``(rows + 1, cols + 1, 2)``, host
        Node positions (x, y) [m].
    names : sequence of str
        Keys of :data:`METRICS`.

    Returns
    -------
    dict of float64 arrays ``(rows, cols)``, finite, within +-:data:`HUGE`.

    >>> quad_metrics([[(0, 0), (2, 0)], [(0, 1), (2, 1)]], ["volume", "aspectRatio"])
    {'aspectRatio': array([[1.5]]), 'volume': array([[2.]])}
    """
    unknown = [n for n in names if n not in METRICS]
    if unknown:
        raise ValueError(f"expected metrics out of {', '.join(METRICS)}, got {unknown}")
    quads = Quads(nodes)
    return {name: METRICS[name](quads) for name in METRICS if name in names}


def _clamp(value: Array) -> Array:
    # fmin and fmax drop a NaN as C's do: 0/0 (a point) becomes -HUGE, as in Verdict.
    return np.where(value > 0, np.fmin(value, HUGE), np.fmax(value, -HUGE))


def _face_sign(corner: Sequence[Array]) -> Array:
    """Orientation by majority of corners 0, 2 and, where these disagree, 1."""
    zero, one, two = corner[0], corner[1], corner[2]
    return np.where((zero * two > 0) | (zero * one > 0), zero, np.sign(one + two))


def _gauss_weights() -> list[list[float]]:
    """Bilinear weights of the four corners at each of the 2x2 Gauss points."""
    signs = ((-1, -1), (1, -1), (1, 1), (-1, 1))
    points = [(a * _GAUSS, b * _GAUSS) for a, b in signs]
    return [[(1 + a * xi) * (1 + b * eta) / 4 for a, b in signs] for xi, eta in points]


def _angles(q: Quads, angle: Array, extreme: Callable[[Array, Array], Array]) -> Array:
    """`angle`, with the collapsed cells replaced by their triangle's; `extreme` acts on cosines."""
    if q.collapsed.any():
        (a, b, c), _ = q.triangle
        empty = (a == 0) | (b == 0) | (c == 0)
        safe = [np.where(empty, 1.0, s) for s in (a, b, c)]
        cosines = [
            np.clip((safe[k] + safe[k - 1] - safe[k - 2]) / (2 * np.sqrt(safe[k] * safe[k - 1])), -1, 1)
            for k in range(3)
        ]
        value = np.degrees(np.arccos(extreme(extreme(cosines[0], cosines[1]), cosines[2])))
        angle[q.collapsed] = np.where(empty, 0.0, value)
    return angle
