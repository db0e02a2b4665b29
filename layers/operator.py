"""Operators: layers bound to the arrays of one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Mode", "Operator"]


@dataclass
class Mode:
    """What may change from step to step; shared by all operators of an executor.

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
        On a device, `seed` and `step` there: uint64 ``(2,)``, written before every pass.
    loss_scale
        With float16, what gradients of the loss are multiplied by: float64 ``(1,)`` on the device; else None.
    """

    training: bool = True
    step: int = 0
    seed: int = 0
    valid: int = 0
    state: Any = None
    loss_scale: Any = None


class Operator:
    """One layer on one rank. Built once; `forward` and `backward` then only run. Collective to build and run.

    `bind_backward` is called in reverse order of computation, when the gradient of the output has
    its place; until then an operator can only compute forward.

    An operator that only moves data may part each pass in two, so that others compute meanwhile: `launch` is called
    as soon as the input is there, `forward` when the output is needed; `backward` as soon as the gradient of the output
    is there, `settle` when that of the input is needed.
    """

    def launch(self) -> None:
        """Begin what `forward` finishes. The input may be overwritten afterwards."""
        return

    def settle(self) -> None:
        """Finish what `backward` has begun."""
        return

    def forward(self) -> None:
        """Compute the owned box of the output."""
        raise NotImplementedError

    def bind_backward(self) -> None:
        """Make everything that `backward` needs."""
        raise NotImplementedError

    def backward(self) -> None:
        """Compute the gradients of the inputs and, locally, of the parameters."""
        raise NotImplementedError

    def close(self) -> None:
        """Free kernels and channels. Local."""
        for item in vars(self).values():
            if item is not None and hasattr(item, "close"):
                item.close()
