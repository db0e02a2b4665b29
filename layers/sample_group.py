"""The ranks that share the same samples: those over which sums "per sample" run."""

from __future__ import annotations

from collections.abc import Sequence

from halograd.comm import Communicator
from halograd.dtensor import Box
from halograd.layers.groups import group_of

__all__ = ["sample_colors", "sample_group"]


def sample_colors(boxes: Sequence[Box]) -> tuple[int | None, ...]:
    """Per rank, the number of its block of samples (and channels); None for a rank with nothing. Pure arithmetic.

    >>> nothing = Box((0, 0, 0), (0, 0, 3))
    >>> sample_colors([Box((0, 0, 0), (2, 4, 3)), Box((0, 4, 0), (2, 8, 3)), Box((2, 0, 0), (3, 8, 3)), nothing])
    (0, 0, 1, None)
    """
    blocks = sorted({(box.ranges[0], box.ranges[-1]) for box in boxes if box.size})
    return tuple(blocks.index((box.ranges[0], box.ranges[-1])) if box.size else None for box in boxes)


def sample_group(comm: Communicator, boxes: Sequence[Box]) -> Communicator | None:
    """The ranks that hold parts of the same samples as this one. Collective over `comm`.

    Parameters
    ----------
    boxes
        Box ``(N, *spatial, C)`` per rank; blocks of samples, and of channels, are equal or disjoint.

    Returns
    -------
    None where no rank shares its samples, and on ranks with nothing; `comm` itself if all ranks share them.
    Made once per communicator and cut: layers cut alike use the same one. `comm` closes it.
    """
    colors = sample_colors(boxes)
    full = [c for c in colors if c is not None]
    if len(set(full)) == len(full):
        return None
    return group_of(comm, colors)
