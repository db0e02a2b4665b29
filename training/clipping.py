"""Clipping: the gradients of a step are scaled down if their global norm is too large."""

from __future__ import annotations

import numpy as np

from ..comm import Communicator
from ..kernels import Kernel
from .pass_loss import FetchedNumber, PendingLoss
from .store import ParameterStore

__all__ = ["Clip"]


class Clip:
    """Clipping of gradients by their global norm, computed on the device of the gradients without waiting. Collective.

    The factor is ``min(1, max_norm / (norm + 1e-6))`` as in torch.nn.utils.clip_grad_norm_. It is an argument of
    ``Optimizer.begin_step``, so its use costs no pass over the gradients. The norm needs every gradient, so the sums of
    gradients no longer overlap the next forward pass.

    Parameters
    ----------
    store
        Store of the gradients.
    comm
        Ranks that share the gradients.
    max_norm
        Norm above which gradients are scaled down to it.

    Attributes
    ----------
    norm
        Global norm in the last step; None before the first.
    factor
        Factor on the gradients of this step, float64 ``(1,)`` on their device.
    """

    def __init__(self, store: ParameterStore, comm: Communicator, max_norm: float) -> None:
        device, kernels = store.memory.device, store.memory.kernels
        self._store = store
        self._square, self._norm, self.factor = (device.zeros((1,), np.float64) for _ in range(3))
        self._fetched = FetchedNumber(device)
        # If so, every rank has the sums of all gradients.
        local = store.whole and not store.scheme.kind.shards
        self._sum = None if local else comm.reduction(self._square, kind="norm")
        # Gradients contain the factor of the loss scale; the norm and `max_norm` are without it.
        inverse = None if store.loss_scale is None else store.loss_scale.inverse
        self._clip: Kernel = kernels.clip(self._square, inverse, max_norm, self._norm, self.factor)
        self._squares: Kernel | None = None
        self.bind()
        self.norm: PendingLoss | None = None

    def bind(self) -> None:
        """Make the kernel that sums squares, for the current buckets of the store. Local."""
        store = self._store
        if self._squares is not None:
            self._squares.close()
        # Every rank that holds a block adds its squares to the sum, so they are divided by the number of these ranks.
        # Not where each rank adds only its shard, or where the ranks add nothing.
        once = [self._sum is None or store.is_sharded(bucket) for bucket in store.buckets]
        counts = [1 if alone else b.holders.members_each for alone, b in zip(once, store.buckets)]
        terms = [(b.grads[store.owned(b)], count) for b, count in zip(store.buckets, counts)]
        self._squares = store.memory.kernels.sum_of_squares(terms, self._square)

    @property
    def over_ranks(self) -> bool:
        """Whether the ranks sum the squares of their gradients."""
        return self._sum is not None

    def measure(self) -> None:
        """Compute the norm and the factor from summed gradients. Collective.

        On a device the host knows `norm` one step later, as it does a loss.
        """
        assert self._squares is not None
        self._squares()
        if self._sum is not None:
            self._sum.run()
        self._clip()
        # The next fetch overwrites the number on the host, so the norm of the step before is read first.
        if self.norm is not None and self.norm.value is None:
            self.norm.value = self._fetched.read()
        self._fetched.put(self._norm)
        self._fetched.fetch()
        self.norm = PendingLoss(self._fetched.read)
        if self._store.memory.device.is_host:
            self.norm.value = self._fetched.read()

    def close(self) -> None:
        """Free the kernels and the reduction. Collective where the ranks sum their squares."""
        for item in (self._squares, self._clip, self._sum):
            if item is not None:
                item.close()
