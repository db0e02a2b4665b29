"""The mean loss of samples that are computed batch by batch."""

from __future__ import annotations

import numpy as np

from .executor import Executor

__all__ = ["MeanLoss"]


class MeanLoss:
    """Adds up losses of batches, so that their mean does not depend on how samples are put into batches.

    A loss is a mean over samples, which batches of fewer samples count less in. Terms that are divided by a sum of
    weights are the quotient of both sums over all batches: a batch without weight does not count. Losses that are no
    means (Dice of a batch) are averaged over the batches.

    Communication: one sum of 16 B per divided term in :meth:`result`.
    """

    def __init__(self, executor: Executor) -> None:
        view, self._to_host = executor.runner.view, executor.device.to_host
        self._divided = [(view(value), view(divisor)) for value, divisor in executor.program.divided]
        #: Of every divided term this rank's part, times the samples of a batch, and times what it was divided by.
        self._own = np.zeros((len(self._divided), 2))
        self._sum = executor.comm.reduction(self._own, kind="metrics") if self._divided else None
        self.begin()

    def begin(self) -> None:
        """Forget what was added. Local."""
        self._total, self._samples = 0.0, 0
        self._own[...] = 0
        self._divisors = np.zeros(len(self._divided))

    def add(self, loss: float, samples: int) -> None:
        """A batch was computed, with this loss, of so many samples that count. Local."""
        self._total += loss * samples
        self._samples += samples
        for k, arrays in enumerate(self._divided):
            value, divisor = (float(self._to_host(array)[0]) for array in arrays)
            self._own[k] += value * samples, value * divisor
            self._divisors[k] += divisor

    def result(self) -> float | None:
        """The mean, the same on all ranks; None without samples. Collective; once after :meth:`begin`."""
        if self._sum is not None:
            self._sum.run()
        if not self._samples:
            return None
        quotients = [total / divisor for (_, total), divisor in zip(self._own, self._divisors) if divisor > 0]
        return (self._total - float(self._own[:, 0].sum())) / self._samples + float(sum(quotients))

    def close(self) -> None:
        """Free the sum. Collective."""
        if self._sum is not None:
            self._sum.close()
