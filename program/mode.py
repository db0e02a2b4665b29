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
    state
        `seed` and `step` where the kernels run: uint64 ``(2,)``, written before every pass.
    loss_scale
        With float16, what gradients of the loss are multiplied by: float64 ``(1,)`` on the device; else None.
    """

    training: bool = True
    step: int = 0
    seed: int = 0
    valid: int = 0
    state: Any = None
    loss_scale: Any = None
