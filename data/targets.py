"""Named rules that reduce a value per cell to a value per patch: a network with stride 64 predicts patches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..dtensor.box import Box
from .errors import DataError

__all__ = ["RULES", "TargetRange", "TargetReduction"]

Axes = tuple[int, ...]


class TargetRange(NamedTuple):
    """What a target may be: ``low .. high``, or `ignored`; `whole`: numbers of classes only."""

    low: float = -np.inf
    high: float = np.inf
    whole: bool = False
    ignored: float | None = None

    @property
    def bounded(self) -> bool:
        return self.low > -np.inf

    def allows(self, values: NDArray[Any]) -> NDArray[np.bool_]:
        """Which of these are finite numbers that a target may be."""
        # A comparison with NaN is false, so that NaN counts as wrong here.
        good = (values >= self.low) & (values <= self.high) & np.isfinite(values)
        if self.whole:
            good &= values == np.trunc(values)
        if self.ignored is not None:
            good |= values == self.ignored
        return good

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a finite number"
        if not self.bounded:
            return kind
        if self.high == np.inf:
            return f"{kind} >= {self.low:g}"
        ignored = "" if self.ignored is None else f", or {self.ignored:g}, which is ignored"
        return f"{'a whole number of ' if self.whole else ''}{self.low:g} .. {self.high:g}{ignored}"


def _center(cells: NDArray[Any], axes: Axes) -> NDArray[Any]:
    """The value of the cell in the middle of the patch (the lower one of two)."""
    for axis in sorted(axes, reverse=True):
        cells = np.take(cells, (cells.shape[axis] - 1) // 2, axis=axis)
    return cells


RULES: dict[str, Callable[[NDArray[Any], Axes], Any]] = {
    "any": lambda cells, axes: np.any(cells > 0.5, axis=axes),
    "all": lambda cells, axes: np.all(cells > 0.5, axis=axes),
    "majority": lambda cells, axes: (cells > 0.5).mean(axis=axes) > 0.5,
    "fraction": lambda cells, axes: cells.mean(axis=axes, dtype=np.float64),
    "max": lambda cells, axes: cells.max(axis=axes),
    "center": _center,
}
"""``any``, ``all``, ``majority`` (more than half) give 0 or 1; ``fraction`` the mean; ``max``; ``center`` one cell."""


@dataclass(frozen=True)
class TargetReduction:
    """A rule and the size of a patch.

    Attributes
    ----------
    rule : str
        Key of :data:`RULES`.
    factors : tuple of int
        Cells per patch, per spatial axis.

    >>> half = TargetReduction("any", (2, 2))
    >>> half.fine_box(Box((0, 1, 0, 0), (3, 2, 4, 1)))
    Box((0, 2, 0, 0), (3, 4, 8, 1))
    """

    rule: str
    factors: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise DataError(f"target rule: expected one of {', '.join(RULES)}, got {self.rule!r}")
        if not self.factors or any(f < 1 for f in self.factors):
            raise DataError(f"cells per patch: expected 1 or more on every spatial axis, got {self.factors}")

    def coarse_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """``(*spatial, C)`` of the patches, for cells of that shape; refuses a grid that does not divide."""
        *spatial, channels = shape
        if len(spatial) != len(self.factors) or any(n % f for n, f in zip(spatial, self.factors)):
            raise DataError(
                f"expected a grid of {len(self.factors)} axes divisible into patches of {self.factors}, got "
                f"{tuple(spatial)}; use another resolution or patch"
            )
        return (*(n // f for n, f in zip(spatial, self.factors)), channels)

    def fine_box(self, box: Box) -> Box:
        """The cells ``(N, *spatial, C)`` of a box of patches."""
        scale = (1, *self.factors, 1)
        return Box(tuple(a * s for a, s in zip(box.start, scale)), tuple(b * s for b, s in zip(box.stop, scale)))

    def apply(self, cells: NDArray[Any], out: NDArray[Any]) -> None:
        """out ``(N, *patches, C)`` <- cells ``(N, *spatial, C)`` reduced patch by patch. Local.

        A patch depends on its own cells only, so that any cut along patches gives the same values.
        """
        n, *patches, channels = out.shape
        if cells.shape != (n, *(p * f for p, f in zip(patches, self.factors)), channels):
            raise DataError(f"expected cells for patches {out.shape} of {self.factors}, got shape {cells.shape}")
        if out.size == 0:
            return
        split: list[int] = [n]
        for p, f in zip(patches, self.factors):
            split += [p, f]
        axes = tuple(2 + 2 * k for k in range(len(patches)))
        out[...] = RULES[self.rule](cells.reshape(*split, channels), axes)
