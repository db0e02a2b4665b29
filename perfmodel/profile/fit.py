"""Fits of ``alpha + beta * bytes`` to measured times. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from halograd.perfmodel.machine import Link
from halograd.schema import STRICT, NotNegative

__all__ = ["Fit", "fit_line"]

#: Residuals above this many times their median count less: a disturbed measurement does not bend the line.
_HUBER = 1.5
_ROUNDS = 20


@dataclass(frozen=True)
class Fit:
    """A line through measured times, and how well it fits.

    Attributes
    ----------
    alpha, beta
        [s] and [s/B], neither negative.
    error
        Root mean square of the relative residuals.
    nbytes, seconds
        What was measured: sizes [B] and times [s].
    """

    __pydantic_config__ = STRICT

    alpha: NotNegative
    beta: NotNegative
    error: NotNegative
    nbytes: Annotated[tuple[NotNegative, ...], Field(alias="bytes")] = field(default=(), repr=False)
    seconds: tuple[NotNegative, ...] = field(default=(), repr=False)

    def at(self, nbytes: float) -> float:
        """Time of so many bytes [s]."""
        return self.alpha + self.beta * nbytes

    def link(self, what: str) -> Link:
        """As a link of a machine; `what` and the error go into its note."""
        return Link(self.alpha, self.beta, f"{what}; fit within {self.error:.0%}")

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        values = {"alpha": self.alpha, "beta": self.beta, "error": self.error}
        return {**values, "bytes": list(self.nbytes), "seconds": list(self.seconds)}


def fit_line(nbytes: Sequence[float], seconds: Sequence[float] | np.ndarray) -> Fit:
    """The line ``alpha + beta * n`` of least relative error through the points.

    Relative, because sizes span six orders of magnitude: in absolute terms the largest would decide alone.
    Robust, by iterated weights (Huber 1964), and with neither number negative.

    Parameters
    ----------
    nbytes, seconds
        Sizes [B] and positive times [s]; at least two different sizes.

    Raises
    ------
    ValueError
        For fewer points, or times that are not positive.

    Examples
    --------
    >>> line = fit_line([0, 1e3, 1e6], [1e-6, 2e-6, 1.001e-3])
    >>> round(line.alpha * 1e6, 6), round(line.beta * 1e9, 6)
    (1.0, 1.0)
    """
    n, t = np.asarray(nbytes, np.float64), np.asarray(seconds, np.float64)
    if len(np.unique(n)) < 2 or n.shape != t.shape or not np.all(t > 0):
        raise ValueError(f"fit_line: expected positive times of at least two sizes, got {list(t)} for {list(n)}")
    weights = np.ones_like(t)
    for _ in range(_ROUNDS):
        alpha, beta = _solve(n / t, 1 / t, weights)
        residuals = np.abs((alpha + beta * n) / t - 1)
        limit = _HUBER * max(float(np.median(residuals)), 1e-12)
        weights = np.minimum(1.0, limit / np.maximum(residuals, 1e-300))
    error = float(np.sqrt(np.mean(residuals**2)))
    return Fit(alpha, beta, error, tuple(n.tolist()), tuple(t.tolist()))


def _solve(slope: np.ndarray, constant: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """alpha, beta >= 0 of least ``sum weights * (alpha * constant + beta * slope - 1)^2``."""
    aa, ab = float(weights @ (constant * constant)), float(weights @ (constant * slope))
    bb, a1, b1 = float(weights @ (slope * slope)), float(weights @ constant), float(weights @ slope)
    determinant = aa * bb - ab * ab
    if determinant > 0:
        alpha, beta = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
        if alpha >= 0 and beta >= 0:
            return alpha, beta
    # One of them is 0: whichever leaves less.
    only_alpha, only_beta = a1 / aa, b1 / bb
    gain_alpha, gain_beta = a1 * only_alpha, b1 * only_beta
    return (only_alpha, 0.0) if gain_alpha >= gain_beta else (0.0, only_beta)
