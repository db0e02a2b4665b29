"""The cuts of a strategy as tuples of numbers, and the blocks that they make of an array. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from halograd.dtensor import Blocks, axis_names, intervals

__all__ = ["PARTS", "Parts", "cut", "grid_of", "parts_key"]

#: Axes of a strategy, in the order of the ranks.
PARTS = ("sample", "depth", "height", "width", "channel", "input_channel")
#: Parts per axis of a strategy, in that order.
Parts = tuple[int, ...]


def parts_key(parts: Mapping[str, Any]) -> Parts:
    """Parts per axis as a tuple in the order of `PARTS`.

    >>> parts_key({"height": 2})
    (1, 1, 2, 1, 1, 1)
    """
    return tuple(int(parts.get(axis, 1)) for axis in PARTS)


def grid_of(shape: Sequence[int], parts: Parts) -> tuple[int, ...]:
    """Parts per axis of an array ``(N, *spatial, C)``: what `layers.strategy.layout_of` makes of a strategy's.

    >>> grid_of((8, 32, 32, 3), (2, 1, 4, 1, 1, 1)), grid_of((8, 100), (2, 1, 4, 1, 3, 1))
    ((2, 4, 1, 1), (8, 3))
    """
    channels = parts[4] * parts[5]
    if len(shape) == 2:
        return (min(shape[0], math.prod(parts[:4])), channels)
    names = axis_names(len(shape))
    spatial = [parts[PARTS.index(name)] for name in names[1:-1]]
    return (parts[0], *spatial, channels)


@lru_cache(maxsize=65536)
def cut(shape: tuple[int, ...], parts: Parts) -> Blocks:
    """Balanced blocks of a global array ``(N, *spatial, C)`` under the parts of a strategy."""
    return Blocks(tuple(intervals(n, p) for n, p in zip(shape, grid_of(shape, parts))))
