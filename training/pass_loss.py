"""The loss of a pass: its sum over all ranks, copied from the device without a wait inside the pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..device import Device, Event

if TYPE_CHECKING:
    from ..comm import Communicator

__all__ = ["CHECKPOINT", "STOP", "VOTES", "FetchedNumber", "PassLoss", "PendingLoss", "mean_of"]


class FetchedNumber:
    """Scalar on a device that is copied to the host asynchronously. Local. Read it before the next fetch.

    `put` only enqueues a copy on the device, so it can be captured in a graph.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._number = device.zeros((1,), np.float64)
        self._pinned = device.pinned((1,), np.float64)
        self._copied: Event | None = None

    def put(self, value: Any) -> None:
        """Enqueue a copy of `value` (a number, or a device array of one element) for the next fetch."""
        np.copyto(self._number, value)

    def fetch(self) -> None:
        """Start the copy of the last number to the host. Does not wait."""
        self._device.download(self._number, self._pinned)
        self._copied = self._device.mark()

    def read(self) -> float:
        """Return the last fetched number. Waits for its copy, which is usually complete one step later."""
        if self._copied is not None:
            self._copied.wait()
            self._copied = None
        return float(self._pinned[0])


class PendingLoss:
    """Loss of a step that the device may not have computed yet. Until it is known, ``float()`` waits for it, and is
    collective.

    Attributes
    ----------
    value
        The loss once it is known, read without waiting; None before. It is known when the next step has begun.
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


def mean_of(losses: Sequence[float | PendingLoss]) -> float | PendingLoss:
    """Return the mean loss of equal parts of a batch; the mean is pending if one of the losses is. Local."""

    def mean() -> float:
        return sum(map(float, losses)) / len(losses)

    if len(losses) == 1:
        return losses[0]
    return PendingLoss(mean) if any(isinstance(loss, PendingLoss) for loss in losses) else mean()


#: Number of votes that are summed together with the loss of a pass, and their indices in `PassLoss.votes`.
VOTES = 2
STOP, CHECKPOINT = range(VOTES)


class PassLoss:
    """Sum over all ranks of the losses of their blocks, together with votes of the ranks.

    Call `begin` after every forward pass, and `finish` when the sum is needed; otherwise the next `begin` calls it.
    Creation and all methods except `put` are collective over `comm`.

    Parameters
    ----------
    part
        Loss of this rank's block, float64 ``(1,)``, on the device; None: the network has no loss.

    Attributes
    ----------
    votes
        ``(VOTES,)`` float64: this rank's votes in the next pass, for example that it received a signal. They are part
        of the sum of the loss, so they cost no message. They stay until they are changed.
    counted
        The votes of the last pass whose loss is complete, summed over all ranks. They are the same on all ranks after
        the same pass, so ranks may base decisions on them.
    pending
        On a device, the loss of the last pass; None on the host, and before the first pass.
    """

    def __init__(self, comm: Communicator, device: Device, part: Any | None) -> None:
        self._part = part
        self.votes, self.counted = np.zeros(VOTES), np.zeros(VOTES)
        self._sum = np.zeros(1 + VOTES)
        # A view: loss and votes are one message.
        self._votes_summed = self._sum[1:]
        self._reduction = comm.reduction(self._sum, kind="loss")
        self._under_way = False
        self._fetched = None if device.is_host else FetchedNumber(device)
        self.pending: PendingLoss | None = None

    def put(self) -> None:
        """Enqueue the copy of the loss out of the buffers of the step; no-op if the host computes. Local."""
        if self._part is not None and self._fetched is not None:
            self._fetched.put(self._part)

    def begin(self) -> None:
        """Finish the sum of the previous pass, and start the sum of this one; no-op without a loss.

        On a device, only the copy of the loss to the host starts here; `finish` sums it.
        """
        if self._part is None:
            return
        self.finish()
        # A copy: the sum is computed in place, and `votes` stay until they are changed.
        self._votes_summed[...] = self.votes
        if self._fetched is None:
            self._sum[0] = self._part[0]
            self._reduction.start()
        else:
            # A sum here would make the host wait for the device; a later `finish` sums what this copy fetches.
            self._fetched.fetch()
            self.pending = PendingLoss(self.finish)
        self._under_way = True

    def finish(self) -> float:
        """Wait for the loss of the last pass, and return it; 0 without a loss. On a device the ranks sum it here, not
        within the pass.
        """
        if self._under_way:
            self._under_way = False
            if self._fetched is not None:
                self._sum[0] = self._fetched.read()
                self._reduction.start()
            self._reduction.finish()
            # In place: executors of whole samples share this array.
            self.counted[...] = self._votes_summed
            if self.pending is not None:
                self.pending.value = float(self._sum[0])
        return float(self._sum[0])

    def close(self) -> None:
        """Free the reduction."""
        self._reduction.close()
