"""Collectives of groups that span nodes: inside the node first, then across.

A group is described by its stages, from the inside out (`Machine.stages`): devices of a node, nodes of a switch,
switches. A collective is done stage by stage, with the algorithms of `halograd.perfmodel.collectives` in each:

* all-reduce: reduce-scatter within the node, all-reduce among the devices that hold the same part on other nodes,
  all-gather within the node (as NCCL's and Aluminum's two-level algorithms do);
* reduce-scatter and reduce: from the inside out; all-gather and broadcast: from the outside in;
* all-to-all: swap within the node by the device of the target, then between nodes.

The devices of a node share its network adapters, so with one adapter all their parts together, the whole vector, go
through it; nodes of a switch have adapters of their own, so behind that stage every node carries its own part only
(a fat tree without contention). The flat ring over all ranks, which passes each node's adapter once in either
direction at the pace of the slowest link, is taken where it is cheaper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from halograd.perfmodel import collectives
from halograd.perfmodel.machine import Link, Stage

__all__ = ["GROUP_COLLECTIVES", "group_seconds"]


def group_seconds(collective: str, nbytes: float, stages: Sequence[Stage], gamma: float = 0.0) -> float:
    """What a collective of a group of ranks costs.

    Parameters
    ----------
    collective
        A key of `GROUP_COLLECTIVES`.
    nbytes
        Size [B], with the meaning that it has for the function of that name in `halograd.perfmodel.collectives`.
    stages
        Of the group: ``machine.stages(ranks)``; none for a group of one, which pays nothing.
    gamma
        Adding up [s/B]; of no effect where nothing is added.

    Returns
    -------
    float
        [s]

    Raises
    ------
    ValueError
        Another collective.
    """
    if collective not in GROUP_COLLECTIVES:
        raise ValueError(f"expected a collective of {', '.join(GROUP_COLLECTIVES)}, got {collective!r}")
    if not stages or nbytes == 0:
        return 0.0
    staged = GROUP_COLLECTIVES[collective](nbytes, tuple(stages), gamma)
    if len(stages) == 1 or "ring" not in collectives.ALGORITHMS[collective]:
        return staged
    ranks = math.prod(stage.size for stage in stages)
    slowest = Link(max(stage.link.alpha for stage in stages), max(stage.link.beta for stage in stages))
    return min(staged, collectives.ALGORITHMS[collective]["ring"](nbytes, ranks, slowest, gamma))


Stages = tuple[Stage, ...]


def _beyond(nbytes: float, stage: Stage) -> float:
    """Of `nbytes` spread over the members of `stage`: what goes through one link of the next stage [B]."""
    return nbytes * stage.sharing / stage.size


def _allreduce(nbytes: float, stages: Stages, gamma: float) -> float:
    first, rest = stages[0], stages[1:]
    if not rest:
        return collectives.allreduce(nbytes, first.size, first.link, gamma=gamma)
    inside = collectives.reduce_scatter(nbytes, first.size, first.link, gamma=gamma)
    inside += collectives.all_gather(nbytes, first.size, first.link)
    return inside + _allreduce(_beyond(nbytes, first), rest, gamma)


def _reduce_scatter(nbytes: float, stages: Stages, gamma: float) -> float:
    if not stages:
        return 0.0
    first = stages[0]
    inside = collectives.reduce_scatter(nbytes, first.size, first.link, gamma=gamma)
    return inside + _reduce_scatter(_beyond(nbytes, first), stages[1:], gamma)


def _all_gather(nbytes: float, stages: Stages, gamma: float) -> float:
    if not stages:
        return 0.0
    first = stages[0]
    return collectives.all_gather(nbytes, first.size, first.link) + _all_gather(_beyond(nbytes, first), stages[1:], 0)


def _broadcast(nbytes: float, stages: Stages, gamma: float) -> float:
    return sum(collectives.broadcast(nbytes, stage.size, stage.link) for stage in stages)


def _reduce(nbytes: float, stages: Stages, gamma: float) -> float:
    return sum(collectives.reduce(nbytes, stage.size, stage.link, gamma=gamma) for stage in stages)


def _all_to_all(nbytes: float, stages: Stages, gamma: float) -> float:
    total, through = 0.0, nbytes
    for stage in stages:
        total += collectives.all_to_all(through, stage.size, stage.link)
        through *= stage.sharing  # everyone on a node sends all that it holds through the same few adapters
    return total


#: Collective -> its cost over stages.
GROUP_COLLECTIVES: Mapping[str, Callable[[float, Stages, float], float]] = {
    "allreduce": _allreduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_to_all": _all_to_all,
}
