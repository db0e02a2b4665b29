"""Results of a profile: fits of ``alpha + beta * bytes``, a machine file, and a record of the data that are not in it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np

from halograd.documents import read_json, shown_path, write_whole, writing
from halograd.errors import UserError
from halograd.schema import STRICT, Count, NotNegative, build

from ..machine import Link, Machine, Overheads

__all__ = ["Fit", "Profile", "fit_line", "fit_sums", "record_path"]

#: Residuals above this multiple of their median get less weight, so that a disturbed measurement does not dominate.
_HUBER = 1.5
_ROUNDS = 20


@dataclass(frozen=True)
class Fit:
    """Line fitted to measured times, and its error.

    Attributes
    ----------
    alpha, beta
        Parameters of the line [s] and [s/B], neither negative.
    error
        Root mean square of the relative residuals.
    bytes, seconds
        Measured sizes [B] and times [s].
    short
        Second line, which holds for few bytes, where it gives less time; None: there is only one.
    """

    __pydantic_config__ = STRICT

    alpha: NotNegative
    beta: NotNegative
    error: NotNegative
    bytes: tuple[NotNegative, ...] = field(default=(), repr=False)
    seconds: tuple[NotNegative, ...] = field(default=(), repr=False)
    short: Fit | None = None

    def at(self, nbytes: float) -> float:
        """Return the time of `nbytes` bytes [s]."""
        seconds = self.alpha + self.beta * nbytes
        return seconds if self.short is None else min(seconds, self.short.at(nbytes))

    def link(self, what: str, shared: bool = False, emulated: bool = False) -> Link:
        """Return the line as a link of a machine, with `what` and the error in its note.

        `shared` and `emulated` as in :class:`Link`. The second line, `short`, is left out.
        """
        return Link(self.alpha, self.beta, f"{what}; fit within {self.error:.0%}", shared, emulated)

    def to_dict(self) -> dict[str, Any]:
        """Return the fit as plain data, for JSON."""
        return asdict(self)


def fit_line(nbytes: Sequence[float], seconds: Sequence[float] | np.ndarray) -> Fit:
    """Fit the line ``alpha + beta * n`` with the least relative error to points.

    The error is relative because sizes span six orders of magnitude: in absolute terms the largest size would dominate.
    The fit is robust, by iterated weights (Huber 1964), and neither parameter is negative.

    Parameters
    ----------
    nbytes, seconds
        Sizes [B] and positive times [s]; at least two different sizes.

    Raises
    ------
    ValueError
        For fewer than two different sizes, not one time per size, or times that are not positive.

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
        # Divided by the times, so that residuals are relative.
        alpha, beta = _solve(n / t, 1 / t, weights)
        residuals = np.abs((alpha + beta * n) / t - 1)
        limit = _HUBER * max(float(np.median(residuals)), 1e-12)
        # The lower limits prevent a division of 0 by 0 if the fit is exact.
        weights = np.minimum(1.0, limit / np.maximum(residuals, 1e-300))
    error = float(np.sqrt(np.mean(residuals**2)))
    return Fit(alpha, beta, error, tuple(n.tolist()), tuple(t.tolist()))


def fit_sums(nbytes: Sequence[float], seconds: Sequence[float] | np.ndarray) -> Fit:
    """Fit a line to the times of sums, or the minimum of two lines if this more than halves the error.

    Libraries of collectives sum few bytes with few messages, by recursive doubling or a tree, and many bytes by a ring
    or by recursive halving, which send each byte fewer times (Thakur et al. 2005, Section 4.5).

    Parameters
    ----------
    nbytes, seconds
        Increasing sizes [B] and positive times [s].

    Raises
    ------
    ValueError
        As `fit_line`.

    Examples
    --------
    >>> sizes = [0, 1e3, 1e6, 4e6]
    >>> line = fit_sums(sizes, [min(1e-6 + 2e-9 * n, 5e-6 + 1e-9 * n) for n in sizes])
    >>> round(line.alpha * 1e6, 6), round(line.short.alpha * 1e6, 6)
    (5.0, 1.0)
    """
    line = best = fit_line(nbytes, seconds)
    # Each of the two lines needs at least two points.
    for k in range(2, len(nbytes) - 1):
        short, long = fit_line(nbytes[:k], seconds[:k]), fit_line(nbytes[k:], seconds[k:])
        # Only then is the line of few bytes the lower one for few bytes.
        if short.alpha < long.alpha and short.beta > long.beta:
            fit = replace(long, bytes=line.bytes, seconds=line.seconds, short=short)
            error = math.sqrt(fmean((fit.at(n) / t - 1) ** 2 for n, t in zip(line.bytes, line.seconds)))
            best = min(best, replace(fit, error=error), key=lambda fit: fit.error)
    return best if best.error < line.error / 2 else line


def _solve(slope: np.ndarray, constant: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """Return alpha, beta >= 0 with the least ``sum weights * (alpha * constant + beta * slope - 1)^2``."""
    aa, ab = float(weights @ (constant * constant)), float(weights @ (constant * slope))
    bb, a1, b1 = float(weights @ (slope * slope)), float(weights @ constant), float(weights @ slope)
    determinant = aa * bb - ab * ab
    if determinant > 0:
        alpha, beta = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
        if alpha >= 0 and beta >= 0:
            return alpha, beta
    # One of them is 0: the choice with the smaller residual.
    only_alpha, only_beta = a1 / aa, b1 / bb
    # With the best single parameter, the weighted sum of squares is smaller by its gain than with none.
    gain_alpha, gain_beta = a1 * only_alpha, b1 * only_beta
    return (only_alpha, 0.0) if gain_alpha >= gain_beta else (0.0, only_beta)


def record_path(machine_file: str | Path) -> Path:
    """Return the path of the record for a machine file: ``machine.toml`` -> ``machine.profile.json``."""
    return Path(machine_file).with_suffix(".profile.json")


@dataclass(frozen=True, kw_only=True)
class ProfileRecord:
    """The part of a profile that is not in the machine file; it has its own JSON file.

    Attributes
    ----------
    version
        Version of the file.
    ranks, transport
        Number of ranks and transport of the measuring run.
    channel
        Level ("node", "across") -> messages in both directions between pairs, without packing.
    face, strided
        Level -> exchanges of faces, packed and unpacked: contiguous rows, and columns.
    copy
        Copies within memory.
    reduction
        Ranks -> blocking all-reduce.
    reduction_behind
        Ranks -> all-reduce during computation, from start to arrival; equal to `reduction` if the transport does not
        overlap.
    reduction_exposed
        Ranks -> time of ``finish`` after a long computation since ``start``.
    update
        Time of the optimizer (SGD with momentum) per byte of parameters [s/B].
    layer_overhead
        Additional time of each forward or backward of a layer within a step, for the loop and for code not in the cache
        [s].
    autotune
        Whether the algorithms of convolutions were chosen by measurement, which is a condition of the layer times.
    """

    __pydantic_config__ = STRICT

    version: Literal[1]
    ranks: Count
    transport: str
    channel: Mapping[str, Fit]
    face: Mapping[str, Fit]
    strided: Mapping[str, Fit]
    copy: Fit | None
    reduction: Mapping[Count, Fit]
    reduction_behind: Mapping[Count, Fit]
    reduction_exposed: Mapping[Count, Fit]
    update: NotNegative
    layer_overhead: NotNegative
    autotune: bool = False


@dataclass(frozen=True, kw_only=True)
class Profile(ProfileRecord):
    """Measured times of messages and overheads of the library; `machine` is the machine with these values."""

    machine: Machine

    def with_overheads(self, update: float, layer_overhead: float) -> Profile:
        """Return the profile with the overheads of the executor and the measured sums in its machine.

        Parameters
        ----------
        update, layer_overhead
            As the attributes of this class [s/B], [s].
        """
        sums = {ranks: fit.link("all-reduce") for ranks, fit in self.reduction.items()}
        short = {n: fit.short.link("all-reduce of few bytes") for n, fit in self.reduction.items() if fit.short}
        work = {ranks: fit.link("summed during the wait for it") for ranks, fit in self.reduction_exposed.items()}
        # `packed`: links include packing, except those of the emulated network (`_links` in device.py).
        runtime = Overheads(update, layer_overhead, packed=True, sums=sums, short_sums=short, work=work)
        machine = replace(self.machine, runtime=runtime)
        return replace(self, machine=machine, update=update, layer_overhead=layer_overhead)

    def save(self, path: str | Path) -> None:
        """Write the machine file `path` and the record next to it.

        Raises
        ------
        UserError
            If they cannot be written.
        """
        with writing(f"--out {path}"):
            self.machine.save(path)
            write_whole(record_path(path), json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, machine_file: str | Path) -> Profile:
        """Read a profile that `save` wrote.

        Raises
        ------
        UserError
            If there is no machine file or no record next to it, or one of them is damaged.
        """
        machine, path = Machine.load(machine_file), record_path(machine_file)
        try:
            record = build(ProfileRecord, read_json(path, "profile"), f"profile {shown_path(path)}")
        except UserError as error:
            raise UserError(f"{error}; run `halograd profile` again") from None
        # `vars`, because `asdict` would convert the fits to plain data.
        return cls(machine=machine, **vars(record))

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain data, for JSON."""
        return {key: value for key, value in asdict(self).items() if key != "machine"}
