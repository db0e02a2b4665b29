"""Which elements of a bucket this rank updates: all of them, or its shard where the scheme is ``sharded``."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

from ..comm import shards
from ..dtensor import group_of
from .store import Bucket, ParameterStore

if TYPE_CHECKING:
    from ..comm import Communicator

__all__ = ["gather_shards", "is_sharded", "owned"]


def is_sharded(store: ParameterStore, bucket: Bucket) -> bool:
    """Whether every rank that holds the bucket updates a shard of it only. Local."""
    return store.scheme.kind.shards and not bucket.replicated


def owned(store: ParameterStore, bucket: Bucket) -> slice:
    """The elements of a bucket whose sum this rank gets, and which it updates. Local."""
    size = bucket.params.size
    color = bucket.holders.color(store.rank)
    if color is None or not is_sharded(store, bucket):
        return slice(0, size)
    holders = bucket.holders.members(color)
    return shards(size, len(holders), store.dtype.itemsize)[holders.index(store.rank)]


def gather_shards(comm: Communicator, store: ParameterStore, bucket: Bucket, shard: Any) -> Any:
    """An array as long as a bucket, of which the ranks have the elements that they own. Collective over `comm`.

    Returns
    -------
    The array, ``(bucket,)``, on the first rank that holds the bucket; elsewhere one that holds nothing.
    """
    group = group_of(comm, bucket.holders)
    if group is None:
        return store.memory.device.empty((0,), store.dtype)
    whole = store.memory.device.zeros((bucket.params.size,), store.dtype)
    whole[owned(store, bucket)] = shard
    with closing(group.reduction(whole, kind="gather", method="all_gather")) as gather:
        gather.run()
    return whole[:0] if group.rank else whole
