"""Grids of ranks for tests with many cases: where there are many grids, each case takes some of them, in turn."""

from collections.abc import Iterator, Sequence
from itertools import combinations

from halograd.testing import grids

__all__ = ["axes_in_turn", "grids_in_turn"]


def axes_in_turn(size: int, axes: Sequence[str], turn: int) -> tuple[str, ...]:
    """Return the axes along which a case is cut: on 2, 3, 4 and 6 ranks a pair of them, on other numbers all.

    Consecutive turns have different pairs, and so have consecutive numbers of ranks: a case with three axes is cut
    along each of them. No more than two axes are cut by any grid of these numbers of ranks.
    """
    pairs = list(combinations(axes, 2))
    return pairs[(turn + size) % len(pairs)] if pairs and size in (2, 3, 4, 6) else tuple(axes)


def grids_in_turn(size: int, axes: Sequence[str], turn: int) -> Iterator[dict[str, int]]:
    """Yield the ways to cut ranks into parts along the axes of this turn.

    >>> [list(parts.values()) for parts in grids_in_turn(4, ("sample", "height", "width"), 0)]
    [[1, 1, 4], [2, 1, 2], [4, 1, 1]]
    """
    for parts in grids(size, axes_in_turn(size, axes, turn)):
        yield {axis: parts.get(axis, 1) for axis in axes}
