"""What may change from step to step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Mode"]


@dataclass
class Mode:
    """What may change from step to step; shared by all kernels of an executor.

    Attributes
    ----------
    training
        Batch statistics and dropout on; off: running statistics, no dropout.
    step
        Number of the training step: with `seed` the state of all random numbers.
    seed
        Seed of the run.
    valid
        Samples of the batch that count (the last batch of an epoch may be short).
    part
        Of a batch that is computed in parts, one after the other: which one this is.
    size
        Samples of a part, so that the first one of this part is number ``part * size`` of the batch.
    state
        `seed`, `step` and the number of the first sample, where the kernels run: uint64 ``(3,)``, written by
        :meth:`tell` before every pass.
    loss_scale
        With float16, what gradients of the loss are multiplied by: float64 ``(1,)`` on the device; else None.
    """

    training: bool = True
    step: int = 0
    seed: int = 0
    valid: int = 0
    part: int = 0
    size: int = 0
    state: Any = None
    loss_scale: Any = None
    _told: int = 0

    def tell(self) -> None:
        """Write what changes from pass to pass to `state`. Enqueued."""
        self.state[1:2].fill(self.step)
        if self._told != self.part:
            self.state[2:].fill(self.part * self.size)
            self._told = self.part
