"""What collectives cost: among ranks that are joined by equal links, and of groups that span nodes.

p ranks, every message of n bytes takes ``alpha + beta * n`` [s], adding up costs `gamma` [s/B] per byte. Each
collective has several algorithms; without a name the cheapest for the size is taken, as MPI libraries do.

=================== ============================================== ==================================================
algorithm           messages one after the other                   bytes through the slowest rank (p a power of two)
=================== ============================================== ==================================================
recursive_doubling  lg p                                           n lg p (all-reduce), n (p-1)/p (all-gather)
recursive_halving   lg p                                           n (p-1)/p
rabenseifner        2 lg p                                         2 n (p-1)/p
ring                p-1 (all-reduce: 2 (p-1))                      n (p-1)/p (all-reduce: twice that)
bruck               ceil(lg p)                                     n (p-1)/p
=================== ============================================== ==================================================

A group that spans nodes is described by its stages, from the inside out (`Machine.stages`): devices of a node, nodes
of a switch, switches. An all-reduce is a reduce-scatter within the node, an all-reduce among the devices that hold the
same part on other nodes, and an all-gather within the node (as NCCL's and Aluminum's two-level algorithms do);
reduce-scatter and all-gather are done stage by stage. The devices of a node share its network adapters, so with one
adapter all their parts together, the whole vector, go through it; nodes of a switch have adapters of their own, so
behind that stage every node carries its own part only (a fat tree without contention). The flat ring over all ranks,
which passes each node's adapter once in either direction at the pace of the slowest link, is taken where it is cheaper.

References
----------
Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in MPICH", Sections 3 and 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from halograd.perfmodel.machine import GroupStage, Link

__all__ = ["ALGORITHMS", "GROUP_COLLECTIVES", "allreduce", "group_seconds"]

#: nbytes, ranks (at least 2), link, gamma -> seconds
Formula = Callable[[float, int, Link, float], float]


def _floor_log(ranks: int) -> int:
    return ranks.bit_length() - 1


def _ceil_log(ranks: int) -> int:
    return (ranks - 1).bit_length()


def _power_of_two(ranks: int) -> bool:
    return ranks & (ranks - 1) == 0


def _part(nbytes: float, ranks: int) -> float:
    """All but one rank's share."""
    return nbytes * (ranks - 1) / ranks


def _folded(nbytes: float, link: Link, gamma: float) -> float:
    """Ranks beyond a power of two hand their vector to a neighbor first and get the result back last."""
    return 2 * link.seconds(nbytes) + gamma * nbytes


def _gather_ring(n: float, p: int, link: Link, gamma: float) -> float:
    return (p - 1) * link.alpha + link.beta * _part(n, p)


def _gather_bruck(n: float, p: int, link: Link, gamma: float) -> float:
    return _ceil_log(p) * link.alpha + link.beta * _part(n, p)


def _gather_doubling(n: float, p: int, link: Link, gamma: float) -> float:
    # Where p is not a power of two, subtrees that lack data are served afterwards: at most twice the messages.
    steps = _floor_log(p) * (1 if _power_of_two(p) else 2)
    return steps * link.alpha + link.beta * _part(n, p)


def _scatter_ring(n: float, p: int, link: Link, gamma: float) -> float:
    return (p - 1) * link.alpha + (link.beta + gamma) * _part(n, p)


def _scatter_halving(n: float, p: int, link: Link, gamma: float) -> float:
    if _power_of_two(p):
        return _floor_log(p) * link.alpha + (link.beta + gamma) * _part(n, p)
    return (_floor_log(p) + 2) * link.alpha + 2 * link.beta * n + gamma * (n + _part(n, p))


def _reduce_ring(n: float, p: int, link: Link, gamma: float) -> float:
    return _scatter_ring(n, p, link, gamma) + _gather_ring(n, p, link, gamma)


def _reduce_doubling(n: float, p: int, link: Link, gamma: float) -> float:
    seconds = _floor_log(p) * (link.seconds(n) + gamma * n)
    return seconds if _power_of_two(p) else seconds + _folded(n, link, gamma)


def _rabenseifner(n: float, p: int, link: Link, gamma: float) -> float:
    q = 1 << _floor_log(p)
    seconds = _scatter_halving(n, q, link, gamma) + _gather_doubling(n, q, link, gamma)
    return seconds if p == q else seconds + _folded(n, link, gamma)


#: Collective -> algorithm -> formula.
ALGORITHMS: Mapping[str, Mapping[str, Formula]] = {
    "allreduce": {"recursive_doubling": _reduce_doubling, "rabenseifner": _rabenseifner, "ring": _reduce_ring},
    "reduce_scatter": {"recursive_halving": _scatter_halving, "ring": _scatter_ring},
    "all_gather": {"recursive_doubling": _gather_doubling, "bruck": _gather_bruck, "ring": _gather_ring},
}


def _seconds(collective: str, nbytes: float, ranks: int, link: Link, algorithm: str | None, gamma: float) -> float:
    formulas = ALGORITHMS[collective]
    if nbytes < 0 or ranks < 1:
        raise ValueError(f"{collective}: expected nbytes >= 0 and ranks >= 1, got {nbytes} and {ranks}")
    if algorithm is not None and algorithm not in formulas:
        raise ValueError(f"{collective}: expected an algorithm of {', '.join(formulas)}, got {algorithm!r}")
    if ranks == 1 or nbytes == 0:
        return 0.0
    if algorithm is not None:
        return formulas[algorithm](nbytes, ranks, link, gamma)
    return min(formula(nbytes, ranks, link, gamma) for formula in formulas.values())


def allreduce(nbytes: float, ranks: int, link: Link, algorithm: str | None = None, gamma: float = 0.0) -> float:
    """Sum of a vector over all ranks, known to all of them afterwards.

    Parameters
    ----------
    nbytes
        The vector [B]; nothing is sent, and it costs nothing, if that is 0.
    ranks
        How many take part; one alone pays nothing.
    link
        Between any two of them.
    algorithm
        "recursive_doubling" (short vectors), "rabenseifner" (long ones: recursive halving, then doubling) or
        "ring" (long ones where `ranks` is not a power of two); None takes the cheapest.
    gamma
        Adding up [s/B].

    Returns
    -------
    float
        [s]

    Raises
    ------
    ValueError
        Another algorithm, a negative size, no ranks.
    """
    return _seconds("allreduce", nbytes, ranks, link, algorithm, gamma)


def reduce_scatter(nbytes: float, ranks: int, link: Link, algorithm: str | None = None, gamma: float = 0.0) -> float:
    """Sum of a vector of `nbytes` [B] over all ranks, of which each keeps an equal part [s].

    Algorithms: "recursive_halving", "ring" (which costs what a pairwise exchange does). The rest as `allreduce`.
    """
    return _seconds("reduce_scatter", nbytes, ranks, link, algorithm, gamma)


def all_gather(nbytes: float, ranks: int, link: Link, algorithm: str | None = None) -> float:
    """Equal parts of all ranks, joined on every one of them; `nbytes` [B] is the joined size [s].

    Algorithms: "recursive_doubling", "bruck", "ring". The rest as `allreduce`.
    """
    return _seconds("all_gather", nbytes, ranks, link, algorithm, 0.0)


def group_seconds(collective: str, nbytes: float, stages: Sequence[GroupStage], gamma: float = 0.0) -> float:
    """What a collective of a group of ranks costs.

    Parameters
    ----------
    collective
        A key of `GROUP_COLLECTIVES`.
    nbytes
        Size [B], with the meaning that it has for the function of that name.
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
    if len(stages) == 1:
        return staged
    ranks = math.prod(stage.size for stage in stages)
    slowest = Link(max(stage.link.alpha for stage in stages), max(stage.link.beta for stage in stages))
    return min(staged, ALGORITHMS[collective]["ring"](nbytes, ranks, slowest, gamma))


Stages = tuple[GroupStage, ...]


def _beyond(nbytes: float, stage: GroupStage) -> float:
    """Of `nbytes` spread over the members of `stage`: what goes through one link of the next stage [B]."""
    return nbytes * stage.sharing / stage.size


def _group_allreduce(nbytes: float, stages: Stages, gamma: float) -> float:
    first, rest = stages[0], stages[1:]
    if not rest:
        return allreduce(nbytes, first.size, first.link, gamma=gamma)
    inside = reduce_scatter(nbytes, first.size, first.link, gamma=gamma)
    inside += all_gather(nbytes, first.size, first.link)
    return inside + _group_allreduce(_beyond(nbytes, first), rest, gamma)


def _group_reduce_scatter(nbytes: float, stages: Stages, gamma: float) -> float:
    if not stages:
        return 0.0
    first = stages[0]
    inside = reduce_scatter(nbytes, first.size, first.link, gamma=gamma)
    return inside + _group_reduce_scatter(_beyond(nbytes, first), stages[1:], gamma)


def _group_all_gather(nbytes: float, stages: Stages, gamma: float) -> float:
    if not stages:
        return 0.0
    first = stages[0]
    return all_gather(nbytes, first.size, first.link) + _group_all_gather(_beyond(nbytes, first), stages[1:], 0)


#: Collective -> its cost over stages.
GROUP_COLLECTIVES: Mapping[str, Callable[[float, Stages, float], float]] = {
    "allreduce": _group_allreduce,
    "reduce_scatter": _group_reduce_scatter,
    "all_gather": _group_all_gather,
}
