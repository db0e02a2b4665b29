"""Whether probabilities are how often they say: counts by bins of the predicted probability."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["BINS", "Calibration"]

BINS = 15
"""Number of bins, all of one width (Guo et al. 2017)."""
#: Probabilities are added up as whole numbers of this, so that sums do not depend on their order.
_UNIT = 2.0**-24


class Calibration:
    """Predicted probabilities against frequencies, in :data:`BINS` bins ``[k / 15, (k + 1) / 15)``; the last has 1 too.

    Of classifications by the largest channel that of the class that was chosen, and how often it is the true one; of
    those by a threshold that of "yes", and how often that is true.

    Attributes
    ----------
    counts
        ``(BINS, 3)`` int64: positions, the sum of their probabilities in units of ``2^-24``, and how many are true.

    References
    ----------
    Guo et al., "On calibration of modern neural networks", ICML 2017, Equations 2 and 3.
    """

    def __init__(self) -> None:
        self.counts = np.zeros((BINS, 3), np.int64)

    def add(self, probability: np.ndarray, true: np.ndarray) -> None:
        """Count positions with these probabilities, of which these are true, both ``(n,)``. Local."""
        where = np.clip((probability * BINS).astype(np.int64), 0, BINS - 1)
        units = np.rint(probability.astype(np.float64) / _UNIT)
        self.counts[:, 0] += np.bincount(where, minlength=BINS)
        # Whole numbers below 2^53: their sum is exact in any order.
        self.counts[:, 1] += np.bincount(where, units, BINS).astype(np.int64)
        self.counts[:, 2] += np.bincount(where[true], minlength=BINS)

    def result(self) -> dict[str, Any]:
        """``error``: the mean of ``|probability - frequency|`` over positions (expected calibration error), None of
        nothing; ``bins``: of each its limits, positions, mean probability and frequency."""
        found, error, total = [], 0.0, int(self.counts[:, 0].sum())
        for k, (count, units, true) in enumerate(self.counts.tolist()):
            probability, frequency = (units * _UNIT / count, true / count) if count else (None, None)
            row = {"from": k / BINS, "to": (k + 1) / BINS, "count": count}
            found.append({**row, "probability": probability, "frequency": frequency})
            error += abs(units * _UNIT - true)
        return {"error": error / total if total else None, "bins": found}
