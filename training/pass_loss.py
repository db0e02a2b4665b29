"""The loss of a pass: every rank has a part, and all shall know the sum, without a wait in the pass itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..comm import Communicator
from ..device import Device
from .pending import FetchedNumber, PendingLoss

__all__ = ["CHECKPOINT", "STOP", "VOTES", "PassLoss"]

#: Numbers that travel with the loss of a pass, and what they are for: see `PassLoss.votes`.
VOTES = 2
STOP, CHECKPOINT = range(VOTES)


class PassLoss:
    """The sum over all ranks of the losses of their blocks, and of what they have to say to one another.

    `begin` is called behind every forward pass, `settle` when the sum is wanted, at the latest by the next `begin`.
    Collective over `comm`, to make and to run.

    Parameters
    ----------
    part
        Loss of this rank's block, float64 ``(1,)``, on the device; None: there is none, and nothing is summed.

    Attributes
    ----------
    votes
        ``(VOTES,)`` float64: what this rank has to say to all others in the next pass; it travels with the loss, so
        it costs no message. Kept until changed.
    counted
        The same, summed over all ranks, of the last pass whose loss was waited for: all ranks see the same numbers
        after the same pass, and may decide by them.
    pending
        On a device, the loss of the last pass; None on the host.
    """

    def __init__(self, comm: Communicator, device: Device, part: Any | None) -> None:
        self._part = part
        self.votes, self.counted = np.zeros(VOTES), np.zeros(VOTES)
        self._sum = np.zeros(1 + VOTES)
        self._votes_summed = self._sum[1:]
        self._reduction = comm.reduction(self._sum, kind="loss")
        self._under_way = False
        self._fetched = None if device.is_host else FetchedNumber(device)
        self.pending: PendingLoss | None = None

    def put(self) -> None:
        """Enqueue the copy of the loss to the host; where the host computes there is nothing to do. Local."""
        if self._part is not None and self._fetched is not None:
            self._fetched.put(self._part)

    def begin(self) -> None:
        """Settle the sum of the pass before, and begin that of this one."""
        if self._part is None:
            return
        self.settle()
        self._votes_summed[...] = self.votes
        if self._fetched is None:
            self._sum[0] = self._part[0]
            self._reduction.start()
        else:
            self._fetched.fetch()
            self.pending = PendingLoss(self.settle)
        self._under_way = True

    def settle(self) -> float:
        """Wait for the loss of the last pass. On a device its sum is made here: the pass did not wait for it."""
        if self._under_way:
            self._under_way = False
            if self._fetched is not None:
                self._sum[0] = self._fetched.read()
                self._reduction.start()
            self._reduction.finish()
            self.counted[...] = self._votes_summed
            if self.pending is not None:
                self.pending.value = float(self._sum[0])
        return float(self._sum[0])

    def close(self) -> None:
        """Free the reduction."""
        self._reduction.close()
