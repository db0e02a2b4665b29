"""Clipping of gradients by their global norm."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from halograd.comm import Communicator
from halograd.kernels import Kernel
from halograd.training.pending import FetchedNumber, PendingLoss
from halograd.training.reduction import Reducer
from halograd.training.shards import is_sharded, owned
from halograd.training.store import Bucket, ParameterStore

__all__ = ["DeviceClip", "clip_scale", "gradient_norm"]


def gradient_norm(store: ParameterStore, comm: Communicator | None = None) -> float:
    """Euclidean norm of all summed gradients together.

    Collective over `comm` where parameters are cut or their gradients sharded, else local.
    """
    squares = [_square(store, bucket) for bucket in store.buckets]
    if comm is None or (store.whole and not any(is_sharded(store, b) for b in store.buckets)):
        return math.sqrt(sum(squares))
    shares = (square / _holders(store, b) for square, b in zip(squares, store.buckets))
    return math.sqrt(comm.allreduce_scalar(float(sum(shares))))


def _holders(store: ParameterStore, bucket: Bucket) -> int:
    """How often a square is counted: a block by each rank that holds it, for its share, a shard by its owner only."""
    return 1 if is_sharded(store, bucket) else bucket.holders.members_each


def _square(store: ParameterStore, bucket: Bucket) -> float:
    """Of the gradients in a bucket whose sum this rank has."""
    grads = bucket.grads[owned(store, bucket)]
    return float(np.dot(grads, grads))


def clip_scale(store: ParameterStore, reducer: Reducer, max_norm: float) -> tuple[float, float]:
    """Wait for all gradients; the factor that brings their norm down to `max_norm`, and the norm. Collective.

    The factor is ``min(1, max_norm / (norm + 1e-6))`` as in torch.nn.utils.clip_grad_norm_. It goes to
    ``Optimizer.begin_step``, so that no pass over the gradients is spent on it. The norm needs every
    gradient: the sums that travel are not hidden behind the next forward pass any more.
    """
    reducer.wait()
    norm = gradient_norm(store, reducer.comm)
    return min(1.0, max_norm / (norm + 1e-6)), norm


class DeviceClip:
    """Clipping on a device: the norm and the factor stay there, and nobody waits for them. Collective.

    Parameters
    ----------
    store
        Whose gradients.
    comm
        Of the ranks that share them.
    max_norm
        The norm to come down to.
    """

    def __init__(self, store: ParameterStore, comm: Communicator, max_norm: float) -> None:
        device, kernels = store.memory.device, store.memory.kernels
        self._store = store
        self._square, self._norm, self._factor = (device.zeros((1,), np.float64) for _ in range(3))
        self._fetched = FetchedNumber(device)
        self._sum = None if self._local else comm.reduction(self._square, kind="norm")
        inverse = None if store.loss_scale is None else store.loss_scale.inverse
        self._clip: Kernel = kernels.clip(self._square, inverse, max_norm, self._norm, self._factor)
        self._squares: Kernel | None = None
        self.bind()
        self.norm: PendingLoss | None = None

    @property
    def _local(self) -> bool:
        return self._store.whole and not self._store.scheme.kind.shards

    def bind(self) -> None:
        """Make the kernel for the buckets that the store has now. Local."""
        store = self._store
        if self._squares is not None:
            self._squares.close()
        if self._local:
            terms = [(flat.grads, 1.0) for flat in store.flats]
        else:
            terms = [(b.grads[owned(store, b)], 1.0 / _holders(store, b)) for b in store.buckets]
        self._squares = store.memory.kernels.sum_of_squares(terms, self._square)

    def scale(self, reducer: Reducer) -> Any:
        """Wait for the sums of all gradients; the factor, float64 ``(1,)`` on the device. Collective.

        `norm` becomes known one step later, as a loss does.
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
