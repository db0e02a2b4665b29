"""The ranks that share the same samples: those over which sums "per sample" run."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from halograd.comm import Communicator
from halograd.dtensor import Box

__all__ = ["sample_colors", "sample_group"]

_made: WeakKeyDictionary[Communicator, dict[tuple[int | None, ...], Communicator | None]] = WeakKeyDictionary()


def sample_colors(boxes: Sequence[Box]) -> tuple[int | None, ...]:
    """Per rank, the number of its block of samples; None for a rank with nothing. Pure arithmetic.

    >>> nothing = Box((0, 0), (0, 0))
    >>> sample_colors([Box((0, 0), (2, 4)), Box((0, 4), (2, 8)), Box((2, 0), (3, 8)), nothing])
    (0, 0, 1, None)
    """
    blocks = sorted({box.ranges[0] for box in boxes if box.size})
    return tuple(blocks.index(box.ranges[0]) if box.size else None for box in boxes)


def sample_group(comm: Communicator, boxes: Sequence[Box]) -> Communicator | None:
    """The ranks that hold parts of the same samples as this one. Collective over `comm`.

    Parameters
    ----------
    boxes
        Box ``(N, *spatial, C)`` per rank; blocks of samples are equal or disjoint.

    Returns
    -------
    None where no rank shares its samples, and on ranks with nothing; `comm` itself if all ranks share them.
    Made once per communicator and cut: layers cut alike use the same one. `comm` closes it.
    """
    colors = sample_colors(boxes)
    full = [c for c in colors if c is not None]
    if len(set(full)) == len(full):
        return None
    if len(set(colors)) == 1:
        return comm
    groups = _made.setdefault(comm, {})
    if colors not in groups:
        groups[colors] = comm.split(colors[comm.rank])
    return groups[colors]
