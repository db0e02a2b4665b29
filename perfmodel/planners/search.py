"""Search among all choices (the oracle of the other planners), or among those whose cost is close to a lower bound.

The second search decides layers one after another, in a fixed order. A *label* is a partial choice with two numbers:
how much it already exceeds the lower bounds of the cost and of the memory, whatever is decided later. Both bounds come
from the messages of an elimination (`Clusters.run`). The decision of a layer raises them by the *regret*, the
difference between the cost of its factors and the message of its cluster, and never lowers them. Labels beyond the
allowed excess are dropped. Of two labels that agree in all open layers, one that is both slower and larger is dropped
(label setting with dominance).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from halograd.errors import UserError

from .clusters import Cluster, Clusters, PassResult
from .problem import Array, Effort, Planner, Problem, Selection

__all__ = ["Bounds", "Exhaustive", "search"]

Index = NDArray[np.intp]

#: Number of entries of the blocks in which labels are extended, and of choices that are enumerated at once.
BLOCK, STATES = 1 << 21, 1 << 16


@dataclass(frozen=True)
class Bounds:
    """Bounds of a search."""

    excess: float  # largest excess of the cost ``time + multiplier * memory`` over its lower bound [s]
    capacity: float  # largest excess of the memory over its lower bound [B]
    multiplier: float  # price of memory in the cost [s/B]
    rounding: float  # difference below which times count as equal [s]
    labels: int  # largest number of labels per layer; the best are kept, and the loss is reported


@dataclass(frozen=True)
class Found:
    """Result of a search."""

    indices: list[int] | None  # the fastest choice found; None if there is none within the bounds
    proved: float  # smallest excess of unseen choices over the lower bound [s]
    states: int  # number of created labels


@dataclass
class _Labels:
    layers: list[int]  # still open
    states: NDArray[np.int32]  # [labels, open layers]: their candidates
    cost: Array  # [labels]: excess [s]
    weight: Array  # [labels]: excess [B]

    def take(self, rows: Index) -> _Labels:
        return _Labels(self.layers, self.states[rows], self.cost[rows], self.weight[rows])


def search(clusters: Clusters, cost: PassResult, weight: PassResult | None, bounds: Bounds) -> Found:
    """Return the fastest choice found within the bounds, and how close to the lower bound all others were examined.

    Parameters
    ----------
    cost, weight
        Messages of an elimination with the tables of the cost, and with those of the memory; None: no memory limit.
    """
    labels = _Labels([], np.zeros((1, 0), dtype=np.int32), np.zeros(1), np.zeros(1))
    trail: list[tuple[int, NDArray[np.int32], NDArray[np.int32]]] = []
    users = Counter(u for cluster in clusters.clusters for u in cluster.scope)  # undecided layers that depend on one
    proved, created = bounds.excess, 0
    for cluster in clusters.decisions:
        rows, candidates, costs, weights = _extend(clusters, cluster, cost, weight, labels, bounds)
        users.subtract(cluster.scope)
        still = [i for i, u in enumerate(labels.layers) if users[u]]
        states, layers = labels.states[rows][:, still], [labels.layers[i] for i in still]
        if users[cluster.layer]:
            states = np.column_stack([states, candidates]).astype(np.int32)
            layers.append(cluster.layer)
        labels = _Labels(layers, states, costs, weights)
        kept = _undominated(labels, bounds)
        if len(kept) > bounds.labels:
            # Only choices from the excess of the cheapest dropped label on may be lost.
            by_cost = kept[np.argsort(labels.cost[kept], kind="stable")]
            proved = min(proved, float(labels.cost[by_cost[bounds.labels]]))
            kept = by_cost[: bounds.labels]
        labels = labels.take(kept)
        created += len(kept)
        trail.append((cluster.layer, rows[kept].astype(np.int32), candidates[kept].astype(np.int32)))
        # No choice is within the bounds, except for labels that were dropped.
        if not len(kept):
            return Found(None, proved, created)
    # The cost contains the price of the memory; the fastest choice is the one with the least time.
    row = int((labels.cost - bounds.multiplier * labels.weight).argmin())
    indices = [0] * len(trail)
    for layer, origin, chosen in reversed(trail):  # from the best label back to the first
        indices[layer] = int(chosen[row])
        row = int(origin[row])
    return Found(indices, proved, created)


def _extend(
    clusters: Clusters, cluster: Cluster, cost: PassResult, weight: PassResult | None, labels: _Labels, bounds: Bounds
) -> tuple[Index, Index, Array, Array]:
    """Extend labels by one more layer; return row, candidate, cost and weight of each result within the bounds."""
    chunks = []
    step = max(1, BLOCK // clusters.sizes[cluster.layer])
    for start in range(0, len(labels.cost), step):
        block = labels.take(np.arange(start, min(start + step, len(labels.cost))))
        costs = block.cost[:, None] + _regret(clusters, cluster, cost, block)
        # Infinite costs mean that a candidate is not allowed, also if the excess is unlimited.
        good = (costs <= bounds.excess) & (costs < np.inf)
        weights = block.weight[:, None]
        if weight is not None:
            weights = weights + _regret(clusters, cluster, weight, block)
            good &= (weights <= bounds.capacity) & (weights < np.inf)
        rows, candidates = np.nonzero(good)
        weights = np.broadcast_to(weights, costs.shape)
        chunks.append((rows + start, candidates, costs[rows, candidates], weights[rows, candidates]))
    rows, candidates, costs, weights = (np.concatenate(parts) for parts in zip(*chunks))
    return rows, candidates, costs, weights


def _regret(clusters: Clusters, cluster: Cluster, messages: PassResult, labels: _Labels) -> Array:
    """Return the excess of each candidate over the message of its cluster, ``[labels, candidates]``; never below 0."""
    columns = {u: labels.states[:, i].astype(np.intp) for i, u in enumerate(labels.layers)}
    total = np.zeros((len(labels.cost), clusters.sizes[cluster.layer]))
    for f in cluster.factors:
        table = messages.tables[f]
        if table is not None:
            total += _lookup(table, clusters.scopes[f], cluster.layer, columns)
    for part in cluster.parts:
        table = messages.tables[part.message]
        if table is not None:
            total -= _lookup(table, part.scope, None, columns)
    return total


def _lookup(table: Array, scope: Sequence[int], layer: int | None, columns: dict[int, Index]) -> Array:
    """Return the entries of a table for the candidates of labels, ``[labels or 1, candidates of layer or 1]``."""
    others = [u for u in scope if u != layer]
    sizes = [table.shape[scope.index(u)] for u in others]
    table = table[..., None] if layer is None else np.moveaxis(table, scope.index(layer), -1)
    at = tuple(columns[u] if size > 1 else 0 for u, size in zip(others, sizes))
    return np.atleast_2d(table[at])


def _undominated(labels: _Labels, bounds: Bounds) -> Index:
    """Return the labels that are not dominated by one that agrees in all open layers and is neither slower nor larger.
    """
    if not len(labels.cost):
        return np.zeros(0, dtype=np.intp)
    group = _groups(labels.states)
    seconds = labels.cost - bounds.multiplier * labels.weight
    # Times that differ by less than the rounding count as equal, so that the memory decides.
    if bounds.rounding > 0:
        seconds = np.round(seconds / bounds.rounding)
    sizes = np.unique(labels.weight, return_inverse=True)[1].reshape(-1)
    order = np.lexsort((sizes, seconds, group))
    # Later groups are shifted below all earlier ones, so that one running minimum is enough for all groups.
    rank = sizes[order] - group[order] * (len(order) + 1)
    smallest = np.minimum.accumulate(rank)
    kept = np.ones(len(order), dtype=bool)
    kept[1:] = rank[1:] < smallest[:-1]
    return np.sort(order[kept])


def _groups(states: NDArray[np.int32]) -> Index:
    """Return group numbers of the rows: equal rows have equal numbers."""
    group = np.zeros(len(states), dtype=np.intp)
    for column in states.T:
        # Renumbered after every column, so that the numbers do not overflow.
        group = np.unique(group * (int(column.max()) + 1) + column, return_inverse=True)[1].reshape(-1)
    return group


class Exhaustive(Planner):
    """Planner that enumerates all choices, in blocks; ties go to the first choice in lexicographic order.

    Parameters
    ----------
    states
        Maximum number of choices.
    """

    name = "exhaustive"

    def __init__(self, states: int = 20_000_000) -> None:
        self.states = states

    def _search(self, problem: Problem) -> Selection:
        total = math.prod(problem.sizes)
        if total > self.states:
            raise UserError(
                f"planner exhaustive: expected at most {self.states} choices, got {float(total):.3g}; "
                "use planner elimination, which finds the same optimum"
            )
        best, chosen, smallest = math.inf, None, math.inf
        for first in range(0, total, STATES):
            indices = _numbered(np.arange(first, min(first + STATES, total)), problem.sizes)
            seconds, nbytes = np.zeros(len(indices[0])), np.zeros(len(indices[0]))
            for v, i in enumerate(indices):
                seconds += problem.times[v][i]
                nbytes += problem.memory[v][i]
            for (u, v), table in problem.edges.items():
                seconds += table[indices[u], indices[v]]
            for (u, v), table in problem.edge_memory.items():
                nbytes += table[indices[u], indices[v]]
            allowed = np.isfinite(seconds)
            # The error states the least memory of an allowed choice.
            smallest = min(smallest, float(nbytes[allowed].min(initial=math.inf)))
            if problem.limit is not None:
                seconds[nbytes > problem.limit] = math.inf
            at = int(seconds.argmin())
            if seconds[at] < best:
                best, chosen = float(seconds[at]), [int(i[at]) for i in indices]
        if chosen is None:
            raise problem.no_choice(smallest)
        return problem.choice(chosen, optimal=True, work=Effort(states=total))


def _numbered(states: NDArray[np.int64], sizes: Sequence[int]) -> list[NDArray[np.int64]]:
    """Return, per layer, its candidates in the choices with the numbers `states`.

    This is `numpy.unravel_index`, for any number of layers.
    """
    index = []
    for size in reversed(sizes):
        states, candidate = np.divmod(states, size)
        index.append(candidate)
    return index[::-1]
