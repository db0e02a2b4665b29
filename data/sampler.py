"""Order of samples, and samples that are held out by name: those of files, of simulations, or of years.

The order depends on seed and epoch only, so it is the same for every decomposition.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .disk import DataError

__all__ = [
    "KINDS",
    "Batch",
    "Batches",
    "Sampler",
    "Unit",
    "belonging_samples",
    "belonging_to",
    "held_out",
    "split",
    "years",
]

_log = logging.getLogger(__name__)

# Separates the random streams of split and shuffle.
_SPLIT, _SHUFFLE = 1, 2
_MANY = 5 * 10**7  # number of samples from which drawing their order takes seconds


@dataclass(frozen=True)
class Batch:
    """Samples of one global batch.

    Attributes
    ----------
    indices : tuple of int
        Dataset indices, one per sample of the global batch.
    valid : int
        Number of samples that count; the others repeat the last one to fill the batch.
    epoch, position : int
        Epoch of this batch, and its position in the epoch.
    augmented : bool
        Whether its samples are augmented, if the data set has rules for it.
    only : collection of str or None
        Names of the inputs to read; None: all of them.
    patches : tuple of int
        Number of the patch of each sample in its epoch; empty: all are 0.
    centered : tuple of bool
        Whether the window of each sample is placed around foreground; empty: none is.
    """

    indices: tuple[int, ...]
    valid: int
    epoch: int
    position: int
    augmented: bool = False
    only: frozenset[str] | None = None
    patches: tuple[int, ...] = ()
    centered: tuple[bool, ...] = ()

    def key(self, k: int) -> list[int]:
        """Return the numbers from which random changes of sample `k` are drawn: its epoch, index and patch."""
        patch = self.patches[k] if self.patches else 0
        return [self.epoch, self.indices[k], *([patch] if patch else [])]

    def parts(self, count: int) -> Iterator[Batch]:
        """Yield `count` equal parts of the batch, in order. Local."""
        size = len(self.indices) // count
        for first in range(0, size * count, size):
            indices, valid = self.indices[first : first + size], min(size, max(0, self.valid - first))
            patches, centered = self.patches[first : first + size], self.centered[first : first + size]
            yield replace(self, indices=indices, valid=valid, patches=patches, centered=centered)


def split(
    samples: int, fraction: float, seed: int = 0, groups: ArrayLike | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Divide samples into training and validation, by whole groups. Local, the same on every rank.

    Parameters
    ----------
    samples : int
    fraction : float
        Share of the groups that is held out, in [0, 1). If above 0, at least one group is held out and one remains.
        Without `groups`, every sample is a group.
    seed : int
    groups : int array ``(samples,)``, optional
        Group number of every sample; samples of one group stay together. See ``Hdf5Dataset.groups``, the simulations of
        the samples.

    Returns
    -------
    training, validation : sorted int64 arrays of dataset indices.

    >>> split(6, 0.3, groups=[0, 0, 1, 1, 2, 2])
    (array([0, 1, 2, 3]), array([4, 5]))
    """
    if not 0 <= fraction < 1:
        raise DataError(f"validation fraction: expected 0 or more and less than 1, got {fraction}")
    labels = None if groups is None else np.asarray(groups)
    if labels is not None and labels.shape != (samples,):
        raise DataError(f"groups: expected one per sample, shape ({samples},), got {labels.shape}")
    _announce(samples)
    names = None if labels is None else _distinct(labels)
    count = samples if names is None else len(names)
    held = 0 if fraction == 0 else min(max(1, round(fraction * count)), count - 1)
    if fraction > 0 and held < 1:
        what = "one sample" if labels is None else f"one group of samples (simulation or file) with all {samples}"
        raise DataError(
            f"data.validation: expected two or more, of which one is held out, got {what}; set data.validation = 0"
            + ("" if labels is None or samples < 2 else ', or data.split = "random"')
        )
    # A copy, because a view would keep the order of all samples in memory.
    chosen = np.random.default_rng([seed, _SPLIT]).permutation(samples if names is None else names)[:held].copy()
    if labels is None:
        out = np.zeros(samples, bool)
        out[chosen] = True
    else:
        out = np.isin(labels, chosen)
    return np.flatnonzero(~out), np.flatnonzero(out)


def _distinct(labels: NDArray[Any]) -> NDArray[Any]:
    """Return the distinct values, sorted. ``np.unique`` uses a hash table, which is slow for many values."""
    names = np.sort(labels)
    return names[np.concatenate(([True], names[1:] != names[:-1]))] if len(names) else names


def _announce(samples: int) -> None:
    """Log a warning before a long computation."""
    if samples >= _MANY:
        # About 16 B per sample: its int64 index, and that in a shuffled copy.
        _log.warning("drawing the order of %s samples, %.1f GB on every rank", f"{samples:,}", 16e-9 * samples)


class Batches(Sequence[Batch]):
    """Batches of samples in a given order, each created on access.

    Parameters
    ----------
    order : int64 array
        Dataset indices.
    size : int
        Samples per batch; copies of its last sample, which do not count, fill the last batch.
    epoch : int
    positions : range
        Positions of the batches in that epoch.
    augmented : bool
        Whether their samples are augmented.
    samples : int, optional
        Number of samples of an epoch in several patches: `order` lists patch 0 of all of them, then patch 1, and so on;
        by default the length of `order`.
    skipped : int
        Number of elements of `order` before position 0.
    foreground : float
        Share of the elements of `order` that are placed around foreground; it holds for every prefix of `order`.
    """

    def __init__(
        self,
        order: NDArray[np.int64],
        size: int,
        epoch: int,
        positions: range,
        augmented: bool = False,
        samples: int | None = None,
        skipped: int = 0,
        foreground: float = 0.0,
    ) -> None:
        self._order, self._size, self._epoch = order, size, epoch
        self._positions, self._augmented = positions, augmented
        # Without a number of samples, all of `order` is patch 0.
        self._samples, self._skipped, self._foreground = samples or len(order), skipped, foreground

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, key: int) -> Batch: ...

    @overload
    def __getitem__(self, key: slice) -> list[Batch]: ...

    def __getitem__(self, key: int | slice) -> Batch | list[Batch]:
        if isinstance(key, slice):
            return [self._cut(position) for position in self._positions[key]]
        return self._cut(self._positions[key])

    def _cut(self, position: int) -> Batch:
        first = self._skipped + position * self._size
        part = [int(i) for i in self._order[first : first + self._size]]
        filled = part + [part[-1]] * (self._size - len(part))
        patches, centered, share = tuple[int, ...](), tuple[bool, ...](), self._foreground
        if len(self._order) > self._samples:
            patches = tuple((first + k) // self._samples for k in range(self._size))
        if share:
            # A product such as 100 x 0.29 is rounded up to the whole number that it misses by rounding.
            counts = [int((first + k) * share + 1e-9) for k in range(self._size + 1)]
            centered = tuple(before < after for before, after in itertools.pairwise(counts))
        return Batch(tuple(filled), len(part), self._epoch, position, self._augmented, None, patches, centered)


class Sampler:
    """Global batches of a list of samples, epoch after epoch; resumable at any batch.

    Parameters
    ----------
    indices : sequence of int
        Dataset indices to draw from.
    batch : int
        Samples per global batch.
    seed : int
    shuffle : {"epoch", "never"}
        Whether every epoch has a new order, or all have that of `indices`.
    remainder : {"drop", "fill"}
        Treatment of samples that do not fill a batch: left out (for training; if shuffled, each epoch leaves out
        others), or the batch is filled with copies of its last sample, which do not count (for evaluation).
    augmented : bool
        Whether samples are augmented, see :class:`Batch`.
    patches : int
        Number of times that an epoch has each sample: all samples once, then all once more, and so on.
    steps : int
        Number of batches of an epoch, whatever the number of samples and patches; 0: as many as all patches fill.
    foreground : float
        Share of the patches that are placed around foreground.
    """

    def __init__(
        self,
        indices: Sequence[int] | NDArray[np.int64],
        batch: int,
        seed: int = 0,
        shuffle: Literal["epoch", "never"] = "epoch",
        remainder: Literal["drop", "fill"] = "drop",
        augmented: bool = False,
        patches: int = 1,
        steps: int = 0,
        foreground: float = 0.0,
    ) -> None:
        if shuffle not in ("epoch", "never"):
            raise DataError(f"shuffle: expected 'epoch' or 'never', got {shuffle!r}")
        if remainder not in ("drop", "fill"):
            raise DataError(f"remainder: expected 'drop' or 'fill', got {remainder!r}")
        if batch < 1:
            raise DataError(f"batch: expected 1 or more samples, got {batch}")
        # With a number of steps, samples are repeated until the batches are full.
        least = batch if remainder == "drop" and not steps else 1
        if len(indices) * patches < least:
            raise DataError(f"batch of {batch}: expected at least {least} samples to draw from, got {len(indices)}")
        self._indices = np.asarray(indices, dtype=np.int64)
        self.batch, self.seed, self.shuffle, self.remainder = batch, seed, shuffle, remainder
        self.augmented, self.patches, self.steps, self.foreground = augmented, patches, steps, foreground
        self.epoch = 0
        self.position = 0
        #: Samples of the current epoch that were used in batches of another size, before a run was resumed.
        self.skipped = 0

    def __len__(self) -> int:
        """Return the number of batches per epoch."""
        return self._batches(self._count)

    @property
    def _count(self) -> int:
        """Number of samples of an epoch, counted once per patch."""
        return self.steps * self.batch or len(self._indices) * self.patches

    def _batches(self, n: int) -> int:
        """Return the number of batches of `n` samples."""
        return n // self.batch if self.remainder == "drop" else -(-n // self.batch)

    @property
    def _in_epoch(self) -> int:
        """Number of batches in the current epoch, without skipped samples."""
        return self._batches(self._count - self.skipped)

    @property
    def done(self) -> float:
        """Number of batches used so far; samples that were used in batches of another size count as fractions."""
        return self.epoch * len(self) + self.skipped / self.batch + self.position

    def left(self, epochs: int) -> int:
        """Return the number of batches until `epochs` epochs are complete; 0 if they are."""
        # The whole epochs after this one, and the rest of this one.
        return (epochs - self.epoch - 1) * len(self) + self._in_epoch - self.position if self.epoch < epochs else 0

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the samples in the order of this epoch: all once per patch, or as many as its steps need."""
        rounds = -(-self._count // len(self._indices))
        if self.shuffle == "never":
            return np.tile(self._indices, rounds)[: self._count] if rounds > 1 else self._indices[: self._count]
        _announce(self._count)
        draw = np.random.default_rng([self.seed, _SHUFFLE, epoch])
        order = [draw.permutation(self._indices) for _ in range(rounds)]
        return (np.concatenate(order) if rounds > 1 else order[0])[: self._count]

    def rest_of_epoch(self) -> Batches:
        """Return the remaining batches of the current epoch. Does not move the position."""
        rest = range(self.position, self._in_epoch)
        return Batches(
            self.order(self.epoch), self.batch, self.epoch, rest, self.augmented, len(self._indices), self.skipped,
            self.foreground,
        )  # fmt: skip

    def advance(self) -> None:
        """Record that the next batch was used; after the last one, the next epoch begins."""
        self.position += 1
        if self.position >= self._in_epoch:
            self.epoch, self.position, self.skipped = self.epoch + 1, 0, 0

    def __iter__(self) -> Iterator[Batch]:
        """Yield the remaining batches of the current epoch, and advance the position with each."""
        for batch in self.rest_of_epoch():
            # Before `yield`: a state that the body of the loop saves continues after this batch.
            self.advance()
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data, from which :meth:`load_state_dict` continues the same sequence."""
        state = {
            "epoch": self.epoch, "position": self.position, "seed": self.seed, "batch": self.batch,
            "samples": len(self._indices), "shuffle": self.shuffle,
        }  # fmt: skip
        # Left out by default: checkpoints of older versions have no such keys.
        if self.patches > 1 or self.steps:
            state |= {"patches": self.patches, "steps": self.steps}
        return {**state, "skipped": self.skipped} if self.skipped else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the sequence at `state`.

        If the state is one of batches of another size, the sequence continues after the samples of these batches. If
        the epoch has too few other samples for a batch, the next epoch begins.

        Raises
        ------
        DataError
            The state is one of another sequence: with another seed, order, or number of samples, patches or steps.
        """
        mine, default = self.state_dict(), {"patches": 1, "steps": 0}
        for key in ("seed", "samples", "shuffle", "patches", "steps"):
            there, here = (settings.get(key, default.get(key)) for settings in (state, mine))
            if there != here:
                raise DataError(
                    f"cannot continue the data sequence: checkpoint has {key} = {there}, this run has "
                    f"{here}; use the settings of the checkpoint or start anew"
                )
        epoch, position = int(state["epoch"]), int(state["position"])
        batch, skipped = int(state.get("batch", self.batch)), int(state.get("skipped", 0))
        # Samples in place of batches: those that are used do not come twice in this epoch.
        if batch != self.batch:
            position, skipped = 0, skipped + position * batch
        most = max(0, self._batches(self._count - skipped))
        if epoch < 0 or skipped < 0 or not 0 <= position < max(1, most):
            raise DataError(f"expected an epoch >= 0 and a position in 0 .. {most - 1}, got {epoch}, {position}")
        self.epoch, self.position, self.skipped = epoch, position, skipped
        # The rest of the epoch is smaller than one batch.
        if not most:
            self.epoch, self.skipped = epoch + 1, 0


Unit = Literal["file", "simulation", "year"]
KINDS: tuple[Unit, ...] = ("file", "simulation", "year")
"""Meanings of a name, in the order in which they are tried."""
# Units of time, in seconds; months and years have no fixed length.
_SECONDS = {"second": 1, "sec": 1, "s": 1, "minute": 60, "min": 60, "hour": 3600, "hr": 3600, "h": 3600, "day": 86400}
_SINCE = re.compile(r"\s*([a-zA-Z]+?)s?\s+since\s+(\d+)-(\d+)-(\d+)(?:[T\s]+(\d+):(\d+)(?::(\d+))?)?")
#: Lengths of the months of calendars of CF whose years all have one length.
_MONTHS = {"noleap": [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31], "360_day": [30] * 12}
_MONTHS["all_leap"] = [31, 29, *_MONTHS["noleap"][2:]]
_SAME = {"365_day": "noleap", "366_day": "all_leap"}
_GREGORIAN = ("standard", "gregorian", "proleptic_gregorian")
_NAMED = 8  # files that a message names


def held_out(dataset: Any, names: Sequence[str]) -> NDArray[np.bool_]:
    """Return which samples belong to one of the names, ``(N,)``. Local, the same on every rank.

    A name is that of a file, else a value of the dataset ``simulation``, else a year (:func:`belonging_to`).

    Raises
    ------
    DataError
        A name belongs to no sample, or all samples are held out.
    """
    mask = np.zeros(len(dataset), np.bool_)
    for name in names:
        for kind in KINDS:
            own = belonging_samples(dataset, kind, name)
            if own.any():
                break
        else:
            files = getattr(dataset, "names", [])
            listed = f"; files: {', '.join(files[:_NAMED])}{', ...' if len(files) > _NAMED else ''}" if files else ""
            raise DataError(
                f"{dataset.path}: data.validation: expected names of files, values of the dataset 'simulation', or "
                f"years of the coordinate of time, got {name!r}, to which no sample belongs{listed}"
            )
        mask |= own
    if mask.all():
        raise DataError(
            f"{dataset.path}: data.validation: expected some of the {len(dataset)} samples, got all of them by "
            f"{', '.join(map(repr, names))}; leave some for training"
        )
    return mask


def belonging_samples(dataset: Any, kind: Unit, name: str) -> NDArray[np.bool_]:
    """Return which samples belong to the file, simulation or year `name`, by `kind`: ``(N,)``. Local.

    Of data sets without a method `belonging`, only groups (``"simulation"``) have names.
    """
    if hasattr(dataset, "belonging"):
        return dataset.belonging(kind, name)
    if kind == "simulation" and dataset.groups is not None:
        return np.asarray(dataset.groups).astype(str) == name
    return np.zeros(len(dataset), np.bool_)


def belonging_to(kind: Unit, name: str, texts: Sequence[str], structure: Any) -> NDArray[np.bool_]:
    """Return which samples of a file belong to a name, ``(N,)``. Local.

    Parameters
    ----------
    kind
        Meaning of `name`.
    name
        Name of a file, which may be a pattern (``*``), number of a simulation, or year.
    texts
        Names of the file, of which one must match: its path, its name, and the name without its suffix.
    structure : Structure
        Structure of the file.
    """
    if kind == "file":
        # Equality too, because a name with brackets does not match itself as a pattern.
        return np.full(structure.samples, any(fnmatchcase(text, name) or text == name for text in texts))
    if kind == "simulation":
        values = None if structure.groups is None else structure.groups.astype(str)
    else:
        of_time = None if structure.times is None else years(structure.times, structure.time_units, structure.calendar)
        values = None if of_time is None else of_time.astype(str)
    return np.zeros(structure.samples, np.bool_) if values is None else values == name


def years(times: NDArray[np.float64], units: str, calendar: str = "standard") -> NDArray[np.int64] | None:
    """Return the year of each time; None if a time is not finite, or if units or calendar are unknown. Local.

    >>> years(np.array([0.0, 364.5, 365.0]), "days since 2001-01-01").tolist()
    [2001, 2001, 2002]
    >>> years(np.array([0.0, 359.0, 360.0]), "days since 2001-01-01", "360_day").tolist()
    [2001, 2001, 2002]
    """
    match, calendar = _SINCE.match(units), _SAME.get(calendar.lower(), calendar.lower())
    seconds = _SECONDS.get(match[1].lower()) if match else None
    if match is None or seconds is None or not np.isfinite(times).all():
        return None
    year, month, day, *clock = (int(text or 0) for text in match.groups()[1:])
    # Rounded to seconds: a float number of days is not exact, and a year begins at a whole second.
    first = clock[0] * 3600 + clock[1] * 60 + clock[2] + np.rint(times * seconds)
    if calendar in _GREGORIAN:
        try:
            begin = np.datetime64(f"{year:04}-{month:02}-{day:02}", "s")
        except ValueError:  # no such day, as in "days since 0000-00-00"
            return None
        return (begin + first.astype("timedelta64[s]")).astype("datetime64[Y]").astype(np.int64) + 1970
    months = _MONTHS.get(calendar)
    if months is None or not 1 <= month <= 12:
        return None
    # Days since the beginning of `year`; all years have the same length.
    days = sum(months[: month - 1]) + day - 1 + np.floor(first / 86400)
    return year + np.floor_divide(days, sum(months)).astype(np.int64)
