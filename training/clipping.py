"""Clipping of gradients by their global norm."""

from __future__ import annotations

import math

import numpy as np

from halograd.comm import Communicator
from halograd.training.reduction import Reducer
from halograd.training.shards import is_sharded, owned
from halograd.training.store import Bucket, ParameterStore

__all__ = ["clip_scale", "gradient_norm"]


def gradient_norm(store: ParameterStore, comm: Communicator | None = None) -> float:
    """Euclidean norm of all summed gradients together.

    Collective over `comm` where parameters are cut or their gradients sharded, else local.
    """
    squares = [_square(store, bucket) for bucket in store.buckets]
    if comm is None or (store.whole and not any(is_sharded(store, b) for b in store.buckets)):
        return math.sqrt(sum(squares))
    # A block that several ranks hold is counted once: by each of them for its share, or for its shard.
    holders = (1 if is_sharded(store, b) else b.colors.count(b.colors[store.rank]) for b in store.buckets)
    return math.sqrt(comm.allreduce_scalar(float(sum(square / n for square, n in zip(squares, holders)))))


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
