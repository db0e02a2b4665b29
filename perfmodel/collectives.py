"""What collectives cost among ranks that are joined by equal links.

p ranks, every message of n bytes takes ``alpha + beta * n`` [s], adding up costs `gamma` [s/B] per byte. Each
collective has several algorithms; without a name the cheapest for the size is taken, as MPI libraries do.
Groups that span nodes are priced by `halograd.perfmodel.hierarchy`.

=================== ============================================== ==================================================
algorithm           messages one after the other                   bytes through the slowest rank (p a power of two)
=================== ============================================== ==================================================
recursive_doubling  lg p                                           n lg p (all-reduce), n (p-1)/p (all-gather)
recursive_halving   lg p                                           n (p-1)/p
rabenseifner        2 lg p                                         2 n (p-1)/p
ring                p-1 (all-reduce: 2 (p-1))                      n (p-1)/p (all-reduce: twice that)
bruck               ceil(lg p)                                     n (p-1)/p (all-gather), n/2 lg p (all-to-all)
binomial            ceil(lg p)                                     n ceil(lg p)
scatter_allgather   lg p + those of the all-gather                 2 n (p-1)/p
pairwise            p-1                                            n (p-1)/p
=================== ============================================== ==================================================

References
----------
Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in MPICH", Sections 3 and 4.
What differs: all-to-all counts the share that a rank keeps as not sent, where the paper rounds (p-1)/p up to 1, and
Bruck's all-to-all counts its blocks exactly when p is not a power of two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

from halograd.perfmodel.machine import Link

__all__ = [
    "ALGORITHMS",
    "all_gather",
    "all_to_all",
    "allreduce",
    "broadcast",
    "point_to_point",
    "reduce",
    "reduce_scatter",
]

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


def _broadcast_binomial(n: float, p: int, link: Link, gamma: float) -> float:
    return _ceil_log(p) * link.seconds(n)


def _tree_scatter(n: float, p: int, link: Link) -> float:
    """Scatter (or, backwards, gather) along a binomial tree: half of what is left with every message."""
    return _ceil_log(p) * link.alpha + link.beta * _part(n, p)


def _broadcast_scatter(n: float, p: int, link: Link, gamma: float) -> float:
    return _tree_scatter(n, p, link) + all_gather(n, p, link)


def _reduce_binomial(n: float, p: int, link: Link, gamma: float) -> float:
    return _ceil_log(p) * (link.seconds(n) + gamma * n)


def _reduce_rabenseifner(n: float, p: int, link: Link, gamma: float) -> float:
    return reduce_scatter(n, p, link, gamma=gamma) + _tree_scatter(n, p, link)


def _exchange_pairwise(n: float, p: int, link: Link, gamma: float) -> float:
    return (p - 1) * link.alpha + link.beta * _part(n, p)


@lru_cache
def _bruck_blocks(ranks: int) -> int:
    """Blocks that a rank passes on: in step k those whose distance has bit k set."""
    return sum(bin(distance).count("1") for distance in range(ranks))


def _exchange_bruck(n: float, p: int, link: Link, gamma: float) -> float:
    return _ceil_log(p) * link.alpha + link.beta * n * _bruck_blocks(p) / p


#: Collective -> algorithm -> formula.
ALGORITHMS: Mapping[str, Mapping[str, Formula]] = {
    "allreduce": {"recursive_doubling": _reduce_doubling, "rabenseifner": _rabenseifner, "ring": _reduce_ring},
    "reduce_scatter": {"recursive_halving": _scatter_halving, "ring": _scatter_ring},
    "all_gather": {"recursive_doubling": _gather_doubling, "bruck": _gather_bruck, "ring": _gather_ring},
    "broadcast": {"binomial": _broadcast_binomial, "scatter_allgather": _broadcast_scatter},
    "reduce": {"binomial": _reduce_binomial, "rabenseifner": _reduce_rabenseifner},
    "all_to_all": {"pairwise": _exchange_pairwise, "bruck": _exchange_bruck},
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


def point_to_point(nbytes: float, link: Link) -> float:
    """One message of `nbytes` [B]: ``alpha + beta * nbytes`` [s]; 0 where nothing is sent."""
    return link.seconds(nbytes) if nbytes else 0.0


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


def broadcast(nbytes: float, ranks: int, link: Link, algorithm: str | None = None) -> float:
    """A vector of `nbytes` [B] from one rank to all [s].

    Algorithms: "binomial" (short), "scatter_allgather" (long; van de Geijn). The rest as `allreduce`.
    """
    return _seconds("broadcast", nbytes, ranks, link, algorithm, 0.0)


def reduce(nbytes: float, ranks: int, link: Link, algorithm: str | None = None, gamma: float = 0.0) -> float:
    """Sum of a vector of `nbytes` [B] over all ranks, on one of them [s].

    Algorithms: "binomial" (short), "rabenseifner" (long: reduce-scatter, then gather). The rest as `allreduce`.
    """
    return _seconds("reduce", nbytes, ranks, link, algorithm, gamma)


def all_to_all(nbytes: float, ranks: int, link: Link, algorithm: str | None = None) -> float:
    """Every rank has an equal part for every rank; `nbytes` [B] are all the parts of one, its own included [s].

    Algorithms: "bruck" (short), "pairwise" (long). The rest as `allreduce`.
    """
    return _seconds("all_to_all", nbytes, ranks, link, algorithm, 0.0)
