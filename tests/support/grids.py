"""Grids of ranks for tests with many cases: where there are many grids, each case takes some of them, in turn."""

from collections.abc import Iterator, Sequence
from itertools import combinations

from halograd.testing import grids

__all__ = ["grids_in_turn", "pair_of"]


def pair_of(axes: Sequence[str], turn: int) -> tuple[str, ...]:
    """Return a pair of the axes, another one for each of consecutive turns; all axes if there are at most two."""
    pairs = list(combinations(axes, 2)) or [tuple(axes)]
    return pairs[turn % len(pairs)]


def grids_in_turn(size: int, axes: Sequence[str], turn: int) -> Iterator[dict[str, int]]:
    """Yield the ways to cut ranks into parts along the axes; of 4 ranks, only along the pair of axes of this turn.

    >>> [list(parts.values()) for parts in grids_in_turn(4, ("sample", "height", "width"), 1)]
    [[1, 1, 4], [2, 1, 2], [4, 1, 1]]
    """
    for parts in grids(size, pair_of(axes, turn) if size == 4 else axes):
        yield {axis: parts.get(axis, 1) for axis in axes}
