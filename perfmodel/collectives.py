"""Costs of collectives among ranks with equal links, and in groups that span nodes.

There are p ranks, and every message of n bytes takes ``alpha + beta * n`` [s]; additions cost nothing. Each collective
has several algorithms; by default the cheapest one for the size is used, as in MPI libraries.

=================== ============================================== ==================================================
algorithm           consecutive messages                           bytes through the slowest rank (p a power of two)
=================== ============================================== ==================================================
recursive_doubling  lg p                                           n lg p (all-reduce), n (p-1)/p (all-gather)
recursive_halving   lg p                                           n (p-1)/p
rabenseifner        2 lg p                                         2 n (p-1)/p
ring                p-1 (all-reduce: 2 (p-1))                      n (p-1)/p (all-reduce: twice that)
bruck               ceil(lg p)                                     n (p-1)/p
=================== ============================================== ==================================================

A group that spans nodes is described by its stages, from the inside out (`Machine.stages`): devices of a node, nodes
of a switch, switches. An all-reduce is a reduce-scatter within the node, an all-reduce among the devices that hold the
same part on other nodes, and an all-gather within the node (as in NCCL's and Aluminum's two-level algorithms).
Reduce-scatter and all-gather proceed stage by stage. The devices of a node share its network adapters: with one
adapter, all their parts, that is, the whole vector, go through it. Nodes of a switch have adapters of their own, so
after that stage every node carries only its own part; in a tapered tree, nodes share the links between switches. The
flat ring over all ranks passes each node's adapter once in either direction at the speed of the slowest link; it is
used if it is cheaper.

A machine file may instead describe the all-reduces of a library of collectives (`library_seconds`).

References
----------
Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in MPICH", Sections 3 and 4.
The difference: the term ``gamma * n`` of the additions is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from .machine import GroupStage, Link, Protocol

__all__ = ["ALGORITHMS", "chunk_bytes", "group_seconds", "library_seconds", "seconds"]

#: Function of nbytes, ranks (at least 2) and link that returns seconds.
Formula = Callable[[float, int, Link], float]


def _log(ranks: int) -> int:
    return ranks.bit_length() - 1


def _power_of_two(ranks: int) -> bool:
    return ranks & (ranks - 1) == 0


def _spread(messages: int, n: float, p: int, link: Link) -> float:
    """Return the time of `messages` messages, in which each rank transfers ``(p - 1) / p`` of `n` bytes in all [s]."""
    return messages * link.alpha + link.beta * (n * (p - 1) / p)


def _ring(n: float, p: int, link: Link) -> float:
    return _spread(p - 1, n, p, link)


def _gather_bruck(n: float, p: int, link: Link) -> float:
    # `_log` rounds down, so this is ceil(lg p) messages.
    return _spread(_log(p - 1) + 1, n, p, link)


def _gather_doubling(n: float, p: int, link: Link) -> float:
    # If p is not a power of two, subtrees that lack data get them afterwards: at most twice the messages.
    return _spread(_log(p) * (1 if _power_of_two(p) else 2), n, p, link)


def _scatter_halving(n: float, p: int, link: Link) -> float:
    if _power_of_two(p):
        return _spread(_log(p), n, p, link)
    # Each surplus rank first sends its whole vector to a neighbor, which returns its part (Thakur et al. 2005).
    return (_log(p) + 2) * link.alpha + 2 * link.beta * n


def _reduce_ring(n: float, p: int, link: Link) -> float:
    return 2 * _ring(n, p, link)


def _folded(n: float, p: int, link: Link) -> float:
    # If p is not a power of two, the surplus ranks first send their vector to a neighbor, and finally get the result.
    return 0.0 if _power_of_two(p) else 2 * link.seconds(n)


def _reduce_doubling(n: float, p: int, link: Link) -> float:
    return _log(p) * link.seconds(n) + _folded(n, p, link)


def _rabenseifner(n: float, p: int, link: Link) -> float:
    # Only the largest power of two of ranks takes part in the halving and the doubling.
    return 2 * _spread(_log(p), n, 1 << _log(p), link) + _folded(n, p, link)


#: Collective -> algorithm -> formula.
ALGORITHMS: Mapping[str, Mapping[str, Formula]] = {
    "allreduce": {"recursive_doubling": _reduce_doubling, "rabenseifner": _rabenseifner, "ring": _reduce_ring},
    "reduce_scatter": {"recursive_halving": _scatter_halving, "ring": _ring},
    "all_gather": {"recursive_doubling": _gather_doubling, "bruck": _gather_bruck, "ring": _ring},
}


def seconds(collective: str, nbytes: float, ranks: int, link: Link, algorithm: str | None = None) -> float:
    """Return the time of a collective.

    Parameters
    ----------
    collective
        ``"allreduce"``: all ranks get the sum of a vector; ``"reduce_scatter"``: each rank gets an equal part of the
        sum; ``"all_gather"``: all ranks get the joined parts of all ranks.
    nbytes
        Size of the vector, or of all parts together [B]; the time of an empty one is 0.
    ranks
        Number of ranks; the time of a single rank is 0.
    link
        Link between any two ranks.
    algorithm
        A key of ``ALGORITHMS[collective]``; None: the cheapest one. For an all-reduce, "recursive_doubling" suits short
        vectors, "rabenseifner" (recursive halving, then doubling) long ones, and "ring" long ones if `ranks` is not a
        power of two.

    Returns
    -------
    float
        Time [s].

    Raises
    ------
    ValueError
        For an unknown collective or algorithm, a negative size, or no ranks.
    """
    formulas = ALGORITHMS.get(collective, {})
    if not formulas:
        raise ValueError(f"expected a collective of {', '.join(ALGORITHMS)}, got {collective!r}")
    if nbytes < 0 or ranks < 1:
        raise ValueError(f"{collective}: expected nbytes >= 0 and ranks >= 1, got {nbytes} and {ranks}")
    if algorithm is not None and algorithm not in formulas:
        raise ValueError(f"{collective}: expected an algorithm of {', '.join(formulas)}, got {algorithm!r}")
    if ranks == 1 or nbytes == 0:
        return 0.0
    chosen = formulas.values() if algorithm is None else [formulas[algorithm]]
    return min(formula(nbytes, ranks, link) for formula in chosen)


def group_seconds(collective: str, nbytes: float, stages: Sequence[GroupStage]) -> float:
    """Return the time of a collective of a group of ranks.

    Parameters
    ----------
    collective, nbytes
        As for `seconds`.
    stages
        Stages of the group: ``machine.stages(ranks)``; empty for a single rank, whose time is 0.

    Returns
    -------
    float
        Time [s].

    Raises
    ------
    ValueError
        For an unknown collective or a negative size, if there are stages.
    """
    if not stages or nbytes == 0:
        return 0.0
    staged = _staged(collective, nbytes, stages)
    # With equal links, the ring is among the algorithms of the stage.
    if len(stages) == 1:
        return staged
    # By the largest counts of all nodes and switches: for an uneven group, this may be more than its number of ranks.
    ranks = math.prod(stage.size for stage in stages)
    slowest = Link(max(stage.link.alpha for stage in stages), max(stage.link.beta for stage in stages))
    return min(staged, seconds(collective, nbytes, ranks, slowest, "ring"))


def library_seconds(
    collective: str, nbytes: float, ranks: int, nodes: int, protocols: Iterable[Protocol], groups: int = 1
) -> tuple[float, float] | None:
    """Return the time of a collective of a library, by its fastest protocol for the size.

    Parameters
    ----------
    collective, nbytes, ranks
        As for `seconds`; here, at least one byte and two ranks.
    nodes
        Number of nodes of the ranks.
    protocols
        Protocols of all-reduces. A reduce-scatter or all-gather has half the hops and bytes of an all-reduce on a ring.
    groups
        Number of such groups of ranks on a node that communicate at the same time.

    Returns
    -------
    (float, float) or None
        Time, and the part of it in which bytes are transferred [s]; None if no protocol is valid for the collective and
        size.
    """
    if collective == "allreduce":
        # `most` = 0: the protocol has no limit.
        valid, part = [protocol for protocol in protocols if not 0 < protocol.most < nbytes], 1.0
    else:
        rings = [protocol for protocol in protocols if protocol.algorithm == "ring"]
        valid, part = [protocol for protocol in rings if not 0 < protocol.most < nbytes], 0.5
    times = [_protocol_seconds(protocol, part * nbytes, ranks, nodes, groups, part) for protocol in valid]
    if not times:
        return None
    # A library chooses by its own estimate, which does not contain the time of the chunks.
    (seconds, transfer), chosen = min(zip(times, valid), key=lambda pair: pair[0])
    return seconds + _pipeline_seconds(chosen, nbytes, ranks, nodes, groups), transfer


def _protocol_seconds(
    protocol: Protocol, nbytes: float, ranks: int, nodes: int, groups: int, part: float
) -> tuple[float, float]:
    transfer = groups * nbytes / (protocol.bandwidth if nodes > 1 else protocol.node_bandwidth)
    if protocol.algorithm == "tree":
        inside, between = _hops(ranks, nodes)
        hops = inside * protocol.node + between * protocol.network
    else:
        hops = (ranks - 1) * (protocol.network if nodes > 1 else protocol.node)
        transfer *= 2 * (ranks - 1) / ranks
    # An all-reduce passes all hops twice: up and down a tree, or around a ring for the sums and for the results.
    return protocol.start + part * 2 * hops + transfer, transfer


def _hops(ranks: int, nodes: int) -> tuple[int, int]:
    """Return the numbers of hops from a leaf of a tree to its root: within a node, and between nodes."""
    # Within a node the tree is a chain of its ranks; only between nodes it is binary.
    return -(-ranks // nodes) - 1, _log(nodes)


def _pipeline_seconds(protocol: Protocol, nbytes: float, ranks: int, nodes: int, groups: int) -> float:
    """Return the time until the first chunk of a tree has passed all hops but the first, upwards and downwards [s].

    It is 0 for a ring, and for a tree without chunks.
    """
    if protocol.algorithm != "tree" or not protocol.chunk:
        return 0.0
    inside, between = _hops(ranks, nodes)
    # All channels of all groups pass a chunk on at the same time, over the same links.
    chunks = groups * protocol.channels * chunk_bytes(protocol, nbytes, inside + between)
    # The first hop, which is left out, is within the node, if the node has several ranks.
    first = min(inside, 1)
    # The bandwidths are those of both directions together.
    return chunks * ((inside - first) / protocol.node_bandwidth + (between - 1 + first) / protocol.bandwidth)


def chunk_bytes(protocol: Protocol, nbytes: float, hops: int) -> float:
    """Return the size of the chunks of a tree [B], by the rule of NCCL 2.4 (`computeColl` in its src/enqueue.cu).

    A chunk is halved as long as a channel has fewer than 8 chunks for each of the ``hops + 1`` levels of the tree and
    the chunk exceeds 4 times its least size; then as long as there are fewer than 4 and it exceeds twice that size;
    then as long as there is fewer than one and it exceeds that size. The part of a channel that is smaller than a chunk
    is one chunk. `nbytes` is the size of the whole vector [B].

    >>> from halograd.perfmodel.machine import Protocol
    >>> tree = Protocol("tree", 0.0, 0.0, 1.0, 1.0, channels=2, chunk=512, least_chunk=32)
    >>> [chunk_bytes(tree, nbytes, hops=9) for nbytes in (1 << 20, 1 << 14, 1 << 12, 1 << 5)]
    [512, 128.0, 64.0, 16.0]
    """
    chunk: float = protocol.chunk
    for most, least in ((8, 4), (4, 2), (1, 1)):
        while nbytes < protocol.channels * chunk * most * (hops + 1) and chunk > least * protocol.least_chunk:
            chunk /= 2
    # The part of a channel may be smaller than the smallest chunk.
    return min(chunk, nbytes / protocol.channels)


def _staged(collective: str, nbytes: float, stages: Sequence[GroupStage]) -> float:
    """Return the time of a collective that proceeds stage by stage.

    An all-reduce is a reduce-scatter on the way out and an all-gather on the way in, except in the last stage.
    """
    first, *rest = stages
    if not rest:
        return seconds(collective, nbytes, first.size, first.link)
    parts = ("reduce_scatter", "all_gather") if collective == "allreduce" else (collective,)
    inside = sum(seconds(part, nbytes, first.size, first.link) for part in parts)
    # The data of all members of a stage go through one link of the next stage.
    return inside + _staged(collective, nbytes * first.sharing / first.size, rest)
