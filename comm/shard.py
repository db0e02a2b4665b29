"""Shards of a flat array: the part that each rank of a group sums, updates and passes on. Pure arithmetic."""

from __future__ import annotations

from itertools import pairwise

__all__ = ["shards"]

ALIGNMENT = 64  # [B]: a shard begins on a cache line if the array does


def shards(size: int, ranks: int, itemsize: int) -> list[slice]:
    """Per rank its part of `size` elements of `itemsize` [B]: about equal, whole cache lines but for the last. Local.

    >>> shards(100, 3, 8)
    [slice(0, 32, None), slice(32, 64, None), slice(64, 100, None)]
    >>> shards(5, 2, 8)
    [slice(0, 0, None), slice(0, 5, None)]
    """
    step = max(1, ALIGNMENT // itemsize)
    lines = -(-size // step)
    bounds = [min(size, lines * i // ranks * step) for i in range(ranks + 1)]
    return [slice(a, b) for a, b in pairwise(bounds)]
