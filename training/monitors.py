"""Monitors of a run: divergence of the loss, the best validation and early stopping, callbacks of the user."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsFloat, TypeGuard

import numpy as np

from halograd.documents import score_text
from halograd.errors import UserError

__all__ = ["FACTOR", "BestScore", "Callback", "LossWatch", "SamplePredictions", "is_defined"]

FACTOR = 1000.0
"""Ratio to the usual size of the loss (:class:`LossWatch`) above which a loss has diverged."""


class LossWatch:
    """Detection of divergence from the losses of a run, epoch by epoch. Local; the same on ranks with the same losses.

    A loss may diverge but still be finite; a run whose loss is not finite ends with
    :class:`halograd.training.trainer.Diverged`. The mean loss of the steps of an epoch, or a validation loss, has
    diverged if it is above `FACTOR` times the larger of

    - the absolute value of the loss of the first step, with the initial parameters;
    - in a regression, the loss of predicting zero: the targets of the first batch may be small by chance.

    For any data, the loss of a classification starts near 1 and that of a regression near the loss of predicting zero;
    training reduces both.

    Parameters
    ----------
    scale
        Loss of a regression for the prediction zero; 0 for classes.

    Attributes
    ----------
    first
        Loss of the first step of the run; nan until it is known.
    diverged
        Message about the divergence in the last epoch; None if the loss did not diverge.
    """

    def __init__(self, scale: float = 0.0) -> None:
        self._scale = scale
        self.first = math.nan
        self.diverged: str | None = None
        self._sum, self._steps = 0.0, 0
        self._last: SupportsFloat = math.nan

    def add(self, loss: SupportsFloat) -> None:
        """Add the loss of a step. It is read at the next call: a device has usually computed it by then."""
        self._count()
        self._last = loss

    def _count(self) -> None:
        # NaN: no loss is pending, so that none is added twice.
        loss, self._last = float(self._last), math.nan
        # Nothing to add yet, or a loss that ends the run (`Diverged`).
        if not math.isfinite(loss):
            return
        if math.isnan(self.first):
            self.first = loss
        self._sum += loss
        self._steps += 1

    @property
    def mean(self) -> float:
        """Mean of the losses read so far in this epoch; nan before the first. Does not wait."""
        return self._sum / self._steps if self._steps else math.nan

    def end_epoch(self) -> float:
        """Return the mean of the finite losses of this epoch; nan without any. Waits for the last one."""
        self._count()
        return self.mean

    def check_epoch(self, validation: float | None) -> str | None:
        """End an epoch: return a message if a loss has diverged in it, else None; reset the sums.

        Parameters
        ----------
        validation
            Loss of the validation after the epoch; None without one.
        """
        mean = self.end_epoch()
        self._sum, self._steps = 0.0, 0
        usual = max(abs(self.first), self._scale)  # a negative log-likelihood of densities may be negative
        self.diverged = None
        losses = (("mean loss", mean), ("validation loss", validation))
        diverged = [(name, x) for name, x in losses if x is not None and x > FACTOR * usual > 0]  # not nan
        if diverged:
            name, value = max(diverged, key=lambda item: item[1])
            self.diverged = (
                f"the {name} is {value:.3g}, expected less than {FACTOR:g} times {usual:.3g}, its first size"
            )
        return self.diverged


def is_defined(score: float | None) -> TypeGuard[float]:
    """Return whether a score is a number: neither None nor NaN."""
    return score is not None and not math.isnan(score)


class BestScore:
    """The best validation by one score, and early stopping. Local; the same on all ranks, because validations are.

    A validation with an undefined score (None or NaN) is ignored: it is neither better nor worse.

    Parameters
    ----------
    name
        Name of the score, one of `names`; ``"none"``: no validation counts as the best.
    names
        Names of the scores of a validation, and whether "lower" or "higher" is better (None: not declared); empty: no
        samples are held out.
    patience
        Number of validations without improvement after which training ends; 0: training does not end early.

    Raises
    ------
    UserError
        If the name is unknown, if its direction is not declared, or if `patience` is set without validations or
        without a score.
    """

    def __init__(self, name: str, names: Mapping[str, str | None], patience: int = 0) -> None:
        if names and name not in (*names, "none"):
            raise UserError(f"output.best: expected one of {', '.join([*names, 'none'])}, got {name!r}")
        if names and name != "none" and names[name] is None:
            raise UserError(
                f"output.best: expected a score whose better direction is known, got {name!r}; declare it in the class "
                'of its metric: better = {"NAME": "lower"}, or "higher"'
            )
        if patience and (not names or name == "none"):
            wrong = "none" if names else "data.validation = 0"
            raise UserError(
                f"training.patience: expected held-out samples and a score (output.best), got {wrong}"
            )
        self.name, self.patience = name, patience
        self._lower = names.get(name) == "lower"
        self.value, self.step, self.waited = math.nan, 0, 0

    def update(self, scores: Mapping[str, float | None], step: int) -> bool:
        """Record the scores of the validation after update number `step`; return whether it is the best so far."""
        value = scores.get(self.name)
        if self.name == "none" or not is_defined(value):
            return False
        self.waited += 1
        # The first defined score is the best so far.
        if not (math.isnan(self.value) or (value < self.value if self._lower else value > self.value)):
            return False
        self.value, self.step, self.waited = value, step, 0
        return True

    @property
    def exhausted(self) -> bool:
        """Whether training ends early: `patience` > 0, and the last `patience` validations were no better than the best
        one.
        """
        return bool(self.patience) and self.waited >= self.patience

    def describe(self) -> str:
        """Return a string about the best validation; empty if there is none."""
        return "" if math.isnan(self.value) else f"best {self.name} {score_text(self.value)} at step {self.step}"

    def state_dict(self) -> dict[str, Any]:
        """Return plain data for :meth:`load_state_dict`."""
        # JSON has no NaN.
        value = None if math.isnan(self.value) else self.value
        return {"name": self.name, "value": value, "step": self.step, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of the same score; ignore a state of another score."""
        if state.get("name") == self.name:
            value = state["value"]
            self.value = math.nan if value is None else float(value)
            self.step, self.waited = int(state["step"]), int(state["waited"])


@dataclass(frozen=True)
class SamplePredictions:
    """Predictions of chosen samples, whole arrays ``(n, *spatial, C)``; on ranks other than 0 there are no arrays.

    Attributes
    ----------
    samples
        Indices of the samples in the data set, in the order of the arrays.
    outputs
        Outputs of the network by name (logits of classes).
    inputs
        Inputs of the network by name, as it reads them (normalized), and the targets. Normalized targets and their
        predictions are in the units of the data.
    """

    samples: tuple[int, ...]
    outputs: Mapping[str, np.ndarray]
    inputs: Mapping[str, np.ndarray]


class Callback:
    """Base class of callbacks of a run: override its methods for loggers or monitors of your own.

    Every method is called on all ranks, at the same point of the run. So a method may be collective over the ranks of
    the run; a method that communicates must do so on all ranks. Write files only on rank 0. An exception on any rank
    ends the job, as an exception in a layer does.

    Attributes
    ----------
    samples
        Indices, in the data set, of the samples whose predictions :meth:`on_predictions` gets; by default none. All
        ranks set the same.
    every
        Number of epochs from one call of :meth:`on_predictions` to the next; it is also called after the last epoch.
    """

    samples: Sequence[int] = ()
    every: int = 1

    def on_step(self, step: int, loss: SupportsFloat, learning_rate: float) -> None:
        """Act after an update.

        Parameters
        ----------
        step
            Number of updates.
        loss
            Loss of the batch, before the update. A device may still be computing it: ``float(loss)`` then waits for
            it, and is collective.
        learning_rate
            Learning rate of the update.
        """

    def on_epoch(self, epoch: int, scores: Mapping[str, float | None]) -> None:
        """Act after an epoch and its validation. Epochs count from 0.

        Parameters
        ----------
        scores
            Scores of the last validation as printed, with the mean ``loss`` first; empty without one. None: undefined.
        """

    def on_predictions(self, epoch: int, predictions: SamplePredictions) -> None:
        """Act on predictions of :attr:`samples`, after `on_epoch`. They are those of a validation: with averaged
        parameters if there are any, without augmentation; of the middle windows if training takes windows.
        """

    def on_checkpoint(self, step: int, path: Path, best: bool) -> None:
        """Act after a checkpoint is written; `best`: whether its validation is the best so far."""
