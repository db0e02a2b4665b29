"""The ranks that share the same samples: those over which sums "per sample" run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from halograd.comm import Communicator, Reduction
from halograd.dtensor import Box
from halograd.layers.groups import in_group

__all__ = ["sample_colors", "sample_sum", "shares"]


def sample_colors(boxes: Sequence[Box]) -> tuple[int | None, ...]:
    """Per rank, the number of its block of samples (and channels); None for a rank with nothing. Pure arithmetic.

    >>> nothing = Box((0, 0, 0), (0, 0, 3))
    >>> sample_colors([Box((0, 0, 0), (2, 4, 3)), Box((0, 4, 0), (2, 8, 3)), Box((2, 0, 0), (3, 8, 3)), nothing])
    (0, 0, 1, None)
    """
    blocks = sorted({(box.ranges[0], box.ranges[-1]) for box in boxes if box.size})
    return tuple(blocks.index((box.ranges[0], box.ranges[-1])) if box.size else None for box in boxes)


def shares(colors: Sequence[int | None]) -> bool:
    """Whether any two ranks have the same color. Pure arithmetic.

    >>> shares((0, 1, None, None)), shares((0, 1, 1, None))
    (False, True)
    """
    full = [c for c in colors if c is not None]
    return len(set(full)) < len(full)


def sample_sum(comm: Communicator, boxes: Sequence[Box], buffer: Any, name: str) -> Reduction | None:
    """A sum over the ranks that hold parts of the same samples as this one. Collective over `comm`.

    Parameters
    ----------
    boxes
        Box ``(N, *spatial, C)`` per rank; blocks of samples, and of channels, are equal or disjoint.
    buffer
        What is summed in place.
    name
        For the recorder.

    Returns
    -------
    None where no rank shares its samples, and on ranks with nothing.
    """
    colors = sample_colors(boxes)
    if not shares(colors):
        return None
    return in_group(comm, colors, lambda group: group.reduction(buffer, kind="statistics", name=name))
