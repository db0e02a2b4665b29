"""Losses that are still on a device: fetched by an asynchronous copy, read when it is complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..device import Device, Ticket

__all__ = ["FetchedNumber", "PendingLoss", "mean_of"]


class FetchedNumber:
    """A number on a device, copied to the host asynchronously. Local. One at a time: read it before the next fetch.

    `put` only enqueues a copy on the device, so it can be in a graph.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._number = device.zeros((1,), np.float64)
        self._pinned = device.pinned((1,), np.float64)
        self._ticket: Ticket | None = None

    def put(self, value: Any) -> None:
        """Keep `value`, an array of no axes on the device or a number, for the next fetch. Enqueued."""
        np.copyto(self._number, value)

    def fetch(self) -> None:
        """Begin to copy what was put last. Does not wait."""
        self._device.download(self._number, self._pinned)
        self._ticket = self._device.mark()

    def read(self) -> float:
        """The number that was fetched last. Waits for what was enqueued before it, which is done a step later."""
        if self._ticket is not None:
            self._ticket.wait()
            self._ticket = None
        return float(self._pinned[0])


class PendingLoss:
    """The loss of a step that the device may not have computed yet. ``float()`` waits for it, on all ranks together.

    Attributes
    ----------
    value
        The loss once it is known, without waiting; None before. Known at the latest when the next step has begun.
    """

    def __init__(self, read: Callable[[], float]) -> None:
        self.value: float | None = None
        self._read = read

    def __float__(self) -> float:
        return self._read() if self.value is None else self.value

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)

    def __repr__(self) -> str:
        return "<loss, still on the device>" if self.value is None else repr(self.value)


def mean_of(losses: Sequence[PendingLoss]) -> PendingLoss:
    """The mean loss of equal parts of a batch. Local."""
    if len(losses) == 1:
        return losses[0]
    return PendingLoss(lambda: sum(map(float, losses)) / len(losses))
