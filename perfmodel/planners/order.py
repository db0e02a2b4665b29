"""In which order to eliminate layers, and in which to decide them afterwards."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence

from .problem import Edge

__all__ = ["decision_order", "elimination_order", "neighbors_of"]


def neighbors_of(count: int, edges: Iterable[Edge]) -> list[set[int]]:
    """Per layer, those it shares an edge with."""
    neighbors: list[set[int]] = [set() for _ in range(count)]
    for u, v in edges:
        neighbors[u].add(v)
        neighbors[v].add(u)
    return neighbors


def elimination_order(sizes: Sequence[int], edges: Iterable[Edge], last: int | None = None) -> list[int]:
    """An order in which eliminating all layers makes small tables.

    Always the layer whose elimination costs least (its candidates times those of all its neighbors), of equal ones the
    one that joins the fewest pairs of neighbors, then the first. Layers with one neighbor go first, then those with
    two (node elimination of Jia et al. 2018), so series-parallel networks never need a table over three layers.

    Parameters
    ----------
    sizes
        Candidates per layer.
    last
        A layer to be eliminated last.
    """
    edges = list(edges)
    both = [_greedy(sizes, edges, last, by_fill) for by_fill in (False, True)]
    return min(both, key=lambda found: found[0])[1]


def _greedy(sizes: Sequence[int], edges: list[Edge], last: int | None, by_fill: bool) -> tuple[float, list[int]]:
    neighbors = neighbors_of(len(sizes), edges)
    total, order = 0.0, []

    def key(v: int) -> tuple[float, ...]:
        cost = sizes[v] * math.prod(float(sizes[u]) for u in neighbors[v])
        around = list(neighbors[v])
        fill = sum(b not in neighbors[a] for i, a in enumerate(around) for b in around[i + 1 :])
        return (v == last, *((fill, cost) if by_fill else (cost, fill)), v)

    keys = [key(v) for v in range(len(sizes))]
    heap = list(keys)
    heapq.heapify(heap)
    while heap:
        entry = heapq.heappop(heap)
        v = int(entry[-1])
        if keys[v] != entry:  # its neighbors have changed since
            continue
        total += entry[2] if by_fill else entry[1]
        order.append(v)
        keys[v] = ()
        touched = _eliminate(neighbors, v)
        for u in touched:
            if keys[u] and (new := key(u)) != keys[u]:
                keys[u] = new
                heapq.heappush(heap, new)
    return total, order


def _eliminate(neighbors: list[set[int]], v: int) -> set[int]:
    """Join the neighbors of ``v`` and remove it; returns all whose key may have changed."""
    around = neighbors[v]
    touched = set(around)
    filled = False
    for u in around:
        filled = filled or len(around - neighbors[u]) > 1
        neighbors[u] |= around
        neighbors[u] -= {u, v}
    if filled:  # common neighbors of two that were joined now see an edge more
        for u in around:
            touched |= neighbors[u]
    neighbors[v] = set()
    return touched


def decision_order(order: Sequence[int], scopes: Sequence[Sequence[int]]) -> list[int]:
    """An order to decide layers in, each after its scope, that keeps few layers open at a time.

    Reverse elimination would do, but leaves all blocks of a residual network open at once; here one block is decided
    before the next, as search over partial strategies needs it: two of them are compared only if they agree in all
    open layers.

    Parameters
    ----------
    order
        Elimination order.
    scopes
        Per layer, the layers its candidates depend on, all eliminated later.
    """
    position = {v: i for i, v in enumerate(order)}
    waiting = [len(scope) for scope in scopes]
    users: list[list[int]] = [[] for _ in scopes]  # per layer: those with it in their scope
    below = [1] * len(scopes)  # layers that hang below, itself included
    for v in order:
        for u in scopes[v]:
            users[u].append(v)
        if scopes[v]:
            below[min(scopes[v], key=lambda u: position[u])] += below[v]
    open_users = [len(u) for u in users]
    ready = {v for v in order if not waiting[v]}
    decided: list[int] = []

    def key(v: int) -> tuple[int, int, int]:
        growth = (open_users[v] > 0) - sum(open_users[u] == 1 for u in scopes[v])
        return growth, below[v], position[v]

    while ready:
        v = min(ready, key=key)
        ready.remove(v)
        decided.append(v)
        for u in scopes[v]:
            open_users[u] -= 1
        for w in users[v]:
            waiting[w] -= 1
            if not waiting[w]:
                ready.add(w)
    return decided
