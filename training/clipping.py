"""Clipping of gradients by their global norm."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..comm import Communicator
from ..kernels import Kernel
from .pending import FetchedNumber, PendingLoss
from .reduction import Reducer
from .shards import is_sharded, owned
from .store import Bucket, ParameterStore

__all__ = ["Clip"]


class Clip:
    """Norm and factor where the gradients are; nothing waits for them. Collective.

    The factor is ``min(1, max_norm / (norm + 1e-6))`` as in torch.nn.utils.clip_grad_norm_. It goes to
    ``Optimizer.begin_step``, so that no pass over the gradients is spent on it. The norm needs every
    gradient: the sums that travel are not hidden behind the next forward pass any more.

    Parameters
    ----------
    store
        Whose gradients.
    comm
        Of the ranks that share them.
    max_norm
        The norm to come down to.

    Attributes
    ----------
    norm
        Of the last step; None before.
    """

    def __init__(self, store: ParameterStore, comm: Communicator, max_norm: float) -> None:
        device, kernels = store.memory.device, store.memory.kernels
        self._store = store
        self._square, self._norm, self._factor = (device.zeros((1,), np.float64) for _ in range(3))
        self._fetched = FetchedNumber(device)
        local = store.whole and store.scheme.name != "sharded"
        self._sum = None if local else comm.reduction(self._square, kind="norm")
        inverse = None if store.loss_scale is None else store.loss_scale.inverse
        self._clip: Kernel = kernels.clip(self._square, inverse, max_norm, self._norm, self._factor)
        self._squares: Kernel | None = None
        self.bind()
        self.norm: PendingLoss | None = None

    def bind(self) -> None:
        """Make the kernel for the buckets that the store has now. Local."""
        store = self._store
        if self._squares is not None:
            self._squares.close()
        terms = [(b.grads[owned(store, b)], self._holders(b)) for b in store.buckets]
        self._squares = store.memory.kernels.sum_of_squares(terms, self._square)

    def _holders(self, bucket: Bucket) -> int:
        """How often a square is counted: a block by each rank that holds it, for its share, a shard by its owner."""
        return 1 if self._sum is None or is_sharded(self._store, bucket) else bucket.holders.members_each

    def scale(self, reducer: Reducer) -> Any:
        """Wait for the sums of all gradients; the factor, float64 ``(1,)`` where they are. Collective.

        `norm` becomes known one step later on a device, as a loss does.
        """
        reducer.wait()
        assert self._squares is not None
        self._squares()
        if self._sum is not None:
            self._sum.run()
        self._clip()
        if self.norm is not None and self.norm.value is None:
            self.norm.value = self._fetched.read()
        self._fetched.put(self._norm)
        self._fetched.fetch()
        self.norm = PendingLoss(self._fetched.read)
        return self._factor
