"""Order of samples. It depends on seed and epoch only, so it is the same for every decomposition."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .disk import DataError

__all__ = ["Batch", "Batches", "Sampler", "split"]

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
        Position of this batch in the sequence.
    augmented : bool
        Whether its samples are augmented, if the data set has rules for it.
    only : collection of str or None
        Names of the inputs to read; None: all of them.
    patches : tuple of int
        Number of the patch of each sample in its epoch; empty: all are 0.
    """

    indices: tuple[int, ...]
    valid: int
    epoch: int
    position: int
    augmented: bool = False
    only: frozenset[str] | None = None
    patches: tuple[int, ...] = ()

    def key(self, k: int) -> list[int]:
        """Return the numbers from which random changes of sample `k` are drawn: its epoch, index and patch."""
        patch = self.patches[k] if self.patches else 0
        return [self.epoch, self.indices[k], *([patch] if patch else [])]

    def parts(self, count: int) -> Iterator[Batch]:
        """Yield `count` equal parts of the batch, in order. Local."""
        size = len(self.indices) // count
        for first in range(0, size * count, size):
            some, valid = self.indices[first : first + size], min(size, max(0, self.valid - first))
            yield replace(self, indices=some, valid=valid, patches=self.patches[first : first + size])


def split(
    samples: int, fraction: float, seed: int = 0, groups: ArrayLike | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Divide samples into training and validation, by whole groups. Local, the same on every rank.

    Parameters
    ----------
    samples : int
    fraction : float
        Share of the groups held out, in [0, 1). If above 0, at least one group is held out and one remains.
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
    """

    def __init__(
        self, order: NDArray[np.int64], size: int, epoch: int, positions: range, augmented: bool = False
    ) -> None:
        self._order, self._size, self._epoch = order, size, epoch
        self._positions, self._augmented = positions, augmented

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
        part = [int(i) for i in self._order[position * self._size : (position + 1) * self._size]]
        filled = part + [part[-1]] * (self._size - len(part))
        return Batch(tuple(filled), len(part), self._epoch, position, self._augmented)


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
        A new order in every epoch, or the order of `indices`.
    remainder : {"drop", "fill"}
        Treatment of samples that do not fill a batch: left out (for training; each epoch leaves out others), or the
        batch is filled with copies of its last sample, which do not count (for evaluation).
    augmented : bool
        Whether samples are augmented, see :class:`Batch`.
    """

    def __init__(
        self,
        indices: Sequence[int] | NDArray[np.int64],
        batch: int,
        seed: int = 0,
        shuffle: Literal["epoch", "never"] = "epoch",
        remainder: Literal["drop", "fill"] = "drop",
        augmented: bool = False,
    ) -> None:
        if shuffle not in ("epoch", "never"):
            raise DataError(f"shuffle: expected 'epoch' or 'never', got {shuffle!r}")
        if remainder not in ("drop", "fill"):
            raise DataError(f"remainder: expected 'drop' or 'fill', got {remainder!r}")
        if batch < 1:
            raise DataError(f"batch: expected 1 or more samples, got {batch}")
        least = batch if remainder == "drop" else 1
        if len(indices) < least:
            raise DataError(f"batch of {batch}: expected at least {least} samples to draw from, got {len(indices)}")
        self._indices = np.asarray(indices, dtype=np.int64)
        self.batch, self.seed, self.shuffle, self.remainder = batch, seed, shuffle, remainder
        self.augmented = augmented
        self.epoch = 0
        self.position = 0
        #: Samples of the current epoch that were used in batches of another size, before a run was resumed.
        self.skipped = 0

    def __len__(self) -> int:
        """Return the number of batches per epoch."""
        return self._batches(len(self._indices))

    def _batches(self, n: int) -> int:
        """Return the number of batches of `n` samples."""
        return n // self.batch if self.remainder == "drop" else -(-n // self.batch)

    @property
    def _in_epoch(self) -> int:
        """Number of batches in the current epoch, without skipped samples."""
        return self._batches(len(self._indices) - self.skipped)

    @property
    def done(self) -> float:
        """Number of batches since the beginning; a fraction after samples that were used in batches of another size."""
        return self.epoch * len(self) + self.skipped / self.batch + self.position

    def left(self, epochs: int) -> int:
        """Return the number of batches until `epochs` epochs are complete."""
        return (epochs - self.epoch - 1) * len(self) + self._in_epoch - self.position if self.epoch < epochs else 0

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return all samples in the order of this epoch."""
        if self.shuffle == "never":
            return self._indices
        _announce(len(self._indices))
        return np.random.default_rng([self.seed, _SHUFFLE, epoch]).permutation(self._indices)

    def rest_of_epoch(self) -> Batches:
        """Return the remaining batches of the current epoch. Does not move the position."""
        rest = range(self.position, self._in_epoch)
        return Batches(self.order(self.epoch)[self.skipped :], self.batch, self.epoch, rest, self.augmented)

    def advance(self) -> None:
        """Record that the next batch was used; after the last one, the next epoch begins."""
        self.position += 1
        if self.position >= self._in_epoch:
            self.epoch, self.position, self.skipped = self.epoch + 1, 0, 0

    def __iter__(self) -> Iterator[Batch]:
        """Yield the remaining batches of the current epoch, and advance the position with each."""
        for batch in self.rest_of_epoch():
            self.advance()
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data, from which :meth:`load_state_dict` continues the same sequence."""
        found = {
            "epoch": self.epoch, "position": self.position, "seed": self.seed, "batch": self.batch,
            "samples": len(self._indices), "shuffle": self.shuffle,
        }  # fmt: skip
        return {**found, "skipped": self.skipped} if self.skipped else found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the sequence at `state`.

        If it is of batches of another size, the sequence continues after the samples that they used. If these leave no
        whole batch, the next epoch begins.

        Raises
        ------
        DataError
            The state is of another sequence: other seed, order or number of samples.
        """
        mine = self.state_dict()
        for key in ("seed", "samples", "shuffle"):
            if state.get(key) != mine[key]:
                raise DataError(
                    f"cannot continue the data sequence: checkpoint has {key} = {state.get(key)}, this run has "
                    f"{mine[key]}; use the settings of the checkpoint or start anew"
                )
        epoch, position = int(state["epoch"]), int(state["position"])
        batch, skipped = int(state.get("batch", self.batch)), int(state.get("skipped", 0))
        if batch != self.batch:
            position, skipped = 0, skipped + position * batch
        most = self._batches(len(self._indices) - skipped)
        if epoch < 0 or skipped < 0 or not 0 <= position < max(1, most):
            raise DataError(f"expected an epoch >= 0 and a position in 0 .. {most - 1}, got {epoch}, {position}")
        self.epoch, self.position, self.skipped = epoch, position, skipped
        if not most:
            self.epoch, self.skipped = epoch + 1, 0
