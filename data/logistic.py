"""Logistic regression per cell: a baseline for networks on the same channels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["LogisticModel", "best_threshold", "fit", "predict"]

Array = NDArray[np.float64]
Blocks = Callable[[], Iterable[tuple[ArrayLike, ArrayLike]]]

THRESHOLDS = np.arange(1, 100) / 100


@dataclass(frozen=True)
class LogisticModel:
    """Weights of ``p = 1 / (1 + exp(-(x . weights + bias)))``.

    Attributes
    ----------
    weights : float64 array ``(C,)``
    bias : float
    loss : float
        Mean cross-entropy [nat] on the data of the fit, plus the penalty of the fit.
    iterations : int
        Newton steps taken.
    """

    weights: Array
    bias: float
    loss: float
    iterations: int


def fit(blocks: Blocks, ridge: float = 1e-6, iterations: int = 30, tolerance: float = 1e-8) -> LogisticModel:
    """Fit by maximum likelihood, with Newton's method (iteratively re-weighted least squares). Local.

    Parameters
    ----------
    blocks : callable
        Each call starts a pass over the data: an iterable of pairs ``(x, y)``, x ``(..., C)`` float and
        y ``(...)`` or ``(..., 1)`` in {0, 1}. One block at a time is in memory.
    ridge : float
        Penalty ``ridge / 2 |weights|^2`` on the mean loss; keeps collinear channels solvable.
    iterations : int
        Largest number of Newton steps.
    tolerance : float
        The fit stops when the loss falls by less than this fraction.

    Raises
    ------
    ValueError
        If there is no data.

    Reference
    ---------
    T. Hastie, R. Tibshirani, J. Friedman, *The Elements of Statistical Learning*, section 4.4.1; we halve a
    step as long as it does not lower the loss.
    """
    theta = np.zeros(_width(blocks))
    loss, gradient, hessian = _derivatives(blocks, theta, ridge)
    steps, converged = 0, False
    while steps < iterations and not converged:
        # Not `solve`: without a ridge on the bias, the Hessian is singular once all probabilities are 0 or 1.
        step = np.asarray(np.linalg.lstsq(hessian, gradient, rcond=None)[0], dtype=np.float64)
        new = _line_search(blocks, theta, step, loss, ridge)
        if new is None:  # the loss is at its minimum up to rounding
            break
        before, steps = loss, steps + 1
        theta, (loss, gradient, hessian) = new
        converged = before - loss <= tolerance * abs(before)
    return LogisticModel(theta[:-1], float(theta[-1]), float(loss), steps)


def predict(model: LogisticModel, x: ArrayLike) -> Array:
    """Compute the probability of a 1 for each cell: x ``(..., C)`` -> ``(...)``, float64. Local."""
    values = np.asarray(x, dtype=np.float64)
    if values.shape[-1] != len(model.weights):
        raise ValueError(
            f"expected {len(model.weights)} channels last, got shape {values.shape}; pass the channels of the fit"
        )
    return _sigmoid(values @ model.weights + model.bias)


def best_threshold(model: LogisticModel, blocks: Blocks) -> tuple[float, float]:
    """Return the threshold among 0.01, 0.02, ... 0.99 with the highest intersection over union, and that value.

    The intersection over union is ``|P & Y| / |P | Y|`` of the cells above the threshold and the true cells; 1 if both
    sets are empty.
    """
    both, positive, true = np.zeros(len(THRESHOLDS)), np.zeros(len(THRESHOLDS)), 0.0
    for x, y in blocks():
        probability = predict(model, x).ravel()
        mask = np.asarray(y).ravel() > 0.5
        # Count the cells above each threshold, for all thresholds at once.
        both += _counts_above(probability[mask])
        positive += _counts_above(probability)
        true += float(np.count_nonzero(mask))
    union = positive + true - both
    score = np.divide(both, union, out=np.ones_like(both), where=union > 0)
    best = int(np.argmax(score))
    return float(THRESHOLDS[best]), float(score[best])


def _counts_above(probability: Array) -> Array:
    # side="right": a probability equal to a threshold is not above it.
    return len(probability) - np.searchsorted(np.sort(probability), THRESHOLDS, side="right").astype(float)


def _width(blocks: Blocks) -> int:
    for x, _ in blocks():
        return np.shape(x)[-1] + 1  # one more for the bias
    raise ValueError("expected at least one block of data, got none; pass a dataset that is not empty")


def _line_search(
    blocks: Blocks, theta: Array, step: Array, loss: float, ridge: float
) -> tuple[Array, tuple[float, Array, Array]] | None:
    """Return the first of theta - step, theta - step / 2, ... (12 in all) whose loss is below `loss`, with its loss and
    derivatives; None if there is none.
    """
    for halvings in range(12):
        trial = theta - step * 0.5**halvings
        derivatives = _derivatives(blocks, trial, ridge)
        if derivatives[0] < loss:
            return trial, derivatives
    return None


def _derivatives(blocks: Blocks, theta: Array, ridge: float) -> tuple[float, Array, Array]:
    """Compute the mean cross-entropy plus the penalty, and its gradient and Hessian with respect to (weights, bias)."""
    loss, count = 0.0, 0
    gradient = np.zeros_like(theta)
    hessian = np.zeros((len(theta), len(theta)))
    for x, y in blocks():
        values = np.asarray(x, dtype=np.float64).reshape(-1, len(theta) - 1)
        values = np.concatenate([values, np.ones((len(values), 1))], axis=1)  # the bias is the weight of the ones
        true = np.asarray(y, dtype=np.float64).ravel()
        score = values @ theta
        p = _sigmoid(score)
        # -log p for true = 1, -log(1 - p) for 0, without overflow.
        loss += float(np.sum(np.logaddexp(0, score) - true * score))
        # Of the cross-entropy summed over cells: gradient X^T (p - y), Hessian X^T W X with W = diag(p (1 - p)).
        gradient += values.T @ (p - true)
        hessian += values.T @ (values * (p * (1 - p))[:, None])
        count += len(values)
    if not count:
        raise ValueError("expected at least one cell, got blocks of none; pass a dataset that is not empty")
    penalty = np.full(len(theta), ridge)
    penalty[-1] = 0.0  # the bias, which fits the frequency of ones, has no penalty
    loss = loss / count + 0.5 * float(np.sum(penalty * theta**2))
    return loss, gradient / count + penalty * theta, hessian / count + np.diag(penalty)


def _sigmoid(score: Array) -> Array:
    return 0.5 * (1 + np.tanh(0.5 * score))  # exp(-score) would overflow
