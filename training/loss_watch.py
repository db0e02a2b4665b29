"""Losses that have diverged and are still finite numbers: said in words, because nothing else stops such a run.

A run whose loss is not finite any more is ended by :class:`halograd.training.trainer.Diverged`.
"""

from __future__ import annotations

import math
from typing import SupportsFloat

__all__ = ["FACTOR", "LossWatch"]

FACTOR = 1000.0
"""A loss so many times the first one has diverged."""


class LossWatch:
    """Judges the losses of a run, epoch by epoch. Local; all ranks that see the same losses judge alike.

    The mean loss of the steps of an epoch, or a validation loss, has diverged if it is above `FACTOR` times the larger
    of

    - the loss of the first step, with the parameters as they are drawn;
    - in a regression, the loss of predicting zero: the targets of the first batch may be small by chance.

    Whatever the data are, losses of classes begin near one and those of a regression near the second number, and
    training makes them smaller.

    Parameters
    ----------
    scale
        Loss of a regression if zero is predicted; 0 for classes.

    Attributes
    ----------
    first
        Loss of the first step of the run; nan until it is known.
    diverged
        What the epoch judged last was like, in words; None for a sound one.
    """

    def __init__(self, scale: float = 0.0) -> None:
        self._scale = scale
        self.first = math.nan
        self.diverged: str | None = None
        self._sum, self._steps = 0.0, 0
        self._last: SupportsFloat = math.nan

    def add(self, loss: SupportsFloat) -> None:
        """Count the loss of a step, once the next one has begun: by then a device has computed it."""
        self._count()
        self._last = loss

    def _count(self) -> None:
        loss, self._last = float(self._last), math.nan
        if not math.isfinite(loss):
            return
        if math.isnan(self.first):
            self.first = loss
        self._sum += loss
        self._steps += 1

    @property
    def mean(self) -> float:
        """Mean loss of the steps counted in this epoch; nan before the first. Waits for nothing."""
        return self._sum / self._steps if self._steps else math.nan

    def end_epoch(self) -> float:
        """Mean loss of all steps of this epoch. Waits for the last one."""
        self._count()
        return self.mean

    def judge(self, validation: float | None) -> str | None:
        """End an epoch: what has diverged in it, in words, or None. Forgets its losses.

        Parameters
        ----------
        validation
            Loss of the validation after the epoch; None without.
        """
        mean = self.end_epoch()
        self._sum, self._steps = 0.0, 0
        usual = max(abs(self.first), self._scale)  # a likelihood of densities may be negative
        self.diverged = None
        losses = (("mean loss", mean), ("validation loss", validation))
        found = [(name, value) for name, value in losses if value is not None and value > FACTOR * usual > 0]  # not nan
        if found:
            name, value = max(found, key=lambda item: item[1])
            self.diverged = (
                f"the {name} is {value:.3g}, expected less than {FACTOR:g} times {usual:.3g}, its first size"
            )
        return self.diverged
