"""The ranks that share the same samples: those over which sums "per sample" run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from halograd.dtensor import Blocks, Groups
from halograd.layers.groups import in_group

if TYPE_CHECKING:
    from halograd.comm import Communicator, Reduction

__all__ = ["sample_groups", "sum_over"]


def sample_groups(boxes: Blocks) -> Groups:
    """Ranks with boxes ``(N, *spatial, C)`` of the same samples and channels. Pure arithmetic.

    >>> groups = sample_groups(Blocks((((0, 2), (2, 3)), ((0, 4), (4, 8)), ((0, 3),)), 5))
    >>> [groups.color(rank) for rank in range(5)]
    [0, 0, 1, 1, None]
    """
    return Groups.agreeing(boxes.grid, (0, len(boxes.grid) - 1), boxes.size)


def sum_over(comm: Communicator, groups: Groups, buffer: Any, kind: str, name: str) -> Reduction | None:
    """A sum in place over the ranks of a group. Collective over `comm`.

    Parameters
    ----------
    kind, name
        Under which `comm.counters` books it, and for the recorder.

    Returns
    -------
    None where every rank is alone, and on ranks of no group.
    """
    if groups.members_each == 1:
        return None
    return in_group(comm, groups, lambda group: group.reduction(buffer, kind=kind, name=name))
