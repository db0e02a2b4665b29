"""Elimination of layers one after another, for any graph: variable elimination by clusters of tables.

Elimination replaces a layer, with all tables that depend on it, by one table over its neighbors: the cheapest
completion of each of their choices. With two neighbors this is the node elimination of Jia et al. 2018 (Section 5);
adding the new table to an existing table over the same pair is their edge elimination. More neighbors are handled in
the same way with larger tables (Dechter 1999, *Bucket elimination*), up to a limit. Beyond this limit a cluster is
split (Dechter and Rish 2003, *Mini-buckets*): each part is minimized separately; the result is a lower bound instead of
the optimum.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .problem import Array, Effort, Problem

__all__ = ["Cluster", "Clusters", "Costs", "Part", "PassResult"]

Table = Array | None  # None: zero everywhere

#: Number of entries of a block of output: with its scratch and operands it stays in the second-level cache.
BLOCK = 1 << 14
#: Entries of the largest stored table (128 MiB), and of the largest sum that is minimized.
TABLE_LIMIT, SUM_LIMIT = 1 << 24, 1 << 30


def aligned(table: Array, scope: Sequence[int], axes: Sequence[int]) -> Array:
    """Return a table over the layers ``scope`` as a table over the layers ``axes``; missing axes get length 1."""
    moved = table.transpose([scope.index(layer) for layer in axes if layer in scope])
    shape = iter(moved.shape)
    return np.ascontiguousarray(moved).reshape([next(shape) if layer in scope else 1 for layer in axes])


def minimum_of_sum(arrays: Sequence[Array]) -> Array:
    """Return the minimum over axis 0 of the sum of aligned tables: the cost of an eliminated layer (Jia et al. 2018,
    Eq. 2).

    Two tables ``A[c, u]`` and ``B[c, w]`` give the min-plus matrix product of node elimination. A sum of more than
    `BLOCK` entries, ``candidates`` times as many as those of the result, is not stored: results are computed in blocks
    that stay in cache. The arrays have the same number of axes, of equal lengths or 1.
    """
    arrays = absorbed(arrays)
    shape = np.broadcast_shapes(*(a.shape for a in arrays))
    if len(arrays) == 1 or np.prod(shape) <= BLOCK:
        return np.asarray(sum(arrays[1:], arrays[0]).min(axis=0))
    out = np.empty(shape[1:])
    # Rows of the output that have about `BLOCK` entries together.
    rows = max(1, BLOCK * shape[1] // out.size)
    for start in range(0, shape[1], rows):
        block = slice(start, start + rows)
        least, scratch = out[block], np.empty_like(out[block])
        pieces = [a if a.shape[1] == 1 else a[:, block] for a in arrays]
        for c in range(shape[0]):
            into = scratch if c else least
            terms = [a[c if len(a) > 1 else 0] for a in pieces]
            np.add(terms[0], terms[1], out=into)
            for term in terms[2:]:
                np.add(into, term, out=into)
            if c:
                np.minimum(least, scratch, out=least)
    return out


def absorbed(arrays: Sequence[Array]) -> list[Array]:
    """Return tables with the same sum, and fewer if possible: a table is added to one that has all its axes."""
    left = sorted(arrays, key=lambda a: a.size)
    kept: list[Array] = []
    for i, small in enumerate(left):
        for j in range(i + 1, len(left)):
            if np.broadcast_shapes(small.shape, left[j].shape) == left[j].shape:
                left[j] = left[j] + small
                break
        else:
            kept.append(small)
    return kept


class Costs:
    """Tables of layers, then of edges, for `Clusters.run`.

    Equal tables become one object, so that equal computations are recognized and done once. Networks repeat blocks (36
    equal ones in ResNet-152), so many tables are equal, and so are the tables computed from them.
    """

    def __init__(self, problem: Problem) -> None:
        by_content: dict[tuple[tuple[int, ...], bytes], Array] = {}
        by_id: dict[int, Array] = {}

        def single(table: Array) -> Array:
            """Return the first array with the same content as `table`."""
            # `id` is unique here, because the problem keeps its tables.
            if id(table) not in by_id:
                digest = hashlib.blake2b(table.data, digest_size=16).digest()
                by_id[id(table)] = by_content.setdefault((table.shape, digest), table)
            return by_id[id(table)]

        self._pairs: list[tuple[Array, Table]] = [(single(t), single(m)) for t, m in zip(problem.times, problem.memory)]
        for edge, table in problem.edges.items():
            extra = problem.edge_memory.get(edge)
            self._pairs.append((single(table), None if extra is None else single(extra)))

    def weighted(self, multiplier: float = 0.0) -> list[Table]:
        """Return the tables of ``time + multiplier * memory``, None for one of zeros; ``multiplier`` in [s/B]."""
        weighted: dict[tuple[int, int], Table] = {}
        for seconds, nbytes in self._pairs:
            key = (id(seconds), id(nbytes))
            if key not in weighted:
                table = seconds if nbytes is None or not multiplier else seconds + multiplier * nbytes
                weighted[key] = table if table.any() else None
        return [weighted[id(seconds), id(nbytes)] for seconds, nbytes in self._pairs]


def elimination_order(problem: Problem, last: int | None = None) -> list[int]:
    """Return an elimination order of all layers, `last` at the end, with small tables.

    The next layer is always the one whose elimination costs least (the product of the numbers of candidates of the
    layer and of all its neighbors); among equal ones, the one that joins the fewest pairs of neighbors, then the first.
    If all layers have equally many candidates, those with one neighbor come first, then those with two (node
    elimination of Jia et al. 2018), so series-parallel networks need no table over three layers. The order by pairs,
    then costs, is tried too; the order with the smaller sum of costs is returned.
    """
    return min((_greedy(problem, last, by_fill) for by_fill in (False, True)), key=lambda candidate: candidate[0])[1]


def _greedy(problem: Problem, last: int | None, by_fill: bool) -> tuple[float, list[int]]:
    sizes, neighbors = problem.sizes, [set(around) for around in problem.neighbors]
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
        if keys[v] != entry:  # its neighbors have changed after this entry
            continue
        # The cost: `by_fill` swaps the first two numbers of a key.
        total += entry[2] if by_fill else entry[1]
        order.append(v)
        keys[v] = ()
        for u in _eliminate(neighbors, v):
            if keys[u] and (new := key(u)) != keys[u]:
                keys[u] = new
                heapq.heappush(heap, new)
    return total, order


def _eliminate(neighbors: list[set[int]], v: int) -> set[int]:
    """Connect the neighbors of layer ``v`` and remove ``v``; return the layers whose priority may have changed."""
    around = neighbors[v]
    touched = set(around)
    filled = False
    for u in around:
        filled = filled or len(around - neighbors[u]) > 1
        neighbors[u] |= around
        neighbors[u] -= {u, v}
    if filled:  # common neighbors of two newly joined layers have one more edge between their neighbors
        for u in around:
            touched |= neighbors[u]
    neighbors[v] = set()
    return touched


def decision_order(order: Sequence[int], scopes: Sequence[Sequence[int]]) -> list[int]:
    """Return an order in which to decide layers, each after its scope, such that few layers are open at a time.

    The reverse elimination order would be valid, but would leave all blocks of a residual network open at once. This
    order decides one block before the next, because the search over partial strategies needs few open layers: it
    compares two partial strategies only if they agree in all open layers. The scope of a layer is the set of layers on
    which its candidates depend, all of them later in the elimination order.
    """
    position = {v: i for i, v in enumerate(order)}
    waiting = [len(scope) for scope in scopes]
    users: list[list[int]] = [[] for _ in scopes]  # per layer: the layers that have it in their scope
    below = [1] * len(scopes)  # number of layers below, including itself
    for v in order:
        for u in scopes[v]:
            users[u].append(v)
        if scopes[v]:
            # The parent in the tree of clusters: the layer of the scope that is eliminated first.
            below[min(scopes[v], key=lambda u: position[u])] += below[v]
    open_users = [len(u) for u in users]
    ready = {v for v in order if not waiting[v]}
    decided: list[int] = []

    def key(v: int) -> tuple[int, int, int]:
        # By how many the open layers grow: `v` may become open, and others lose their last user.
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


@dataclass(frozen=True)
class Part:
    """Factors of a cluster that are minimized together; the result, over ``scope``, is factor number ``message``."""

    factors: tuple[int, ...]
    scope: tuple[int, ...]
    message: int


@dataclass(frozen=True)
class Cluster:
    """All factors that depend on a layer when it is eliminated; ``scope`` holds the other layers of these factors."""

    layer: int
    parts: tuple[Part, ...]
    scope: tuple[int, ...]

    @property
    def factors(self) -> tuple[int, ...]:
        """Factors of all parts."""
        return tuple(f for part in self.parts for f in part.factors)


@dataclass(frozen=True)
class PassResult:
    """Result of a pass: a table per factor, and the sum of constant factors: the optimum or a lower bound."""

    tables: list[Table]
    value: float


class Clusters:
    """Elimination plan for a graph, with any costs: the order of layers, and the tables combined at each step.

    Factors are numbered: one per layer, one per edge (in the order of the problem), then messages.

    Parameters
    ----------
    problem
        Candidates per layer, and the edges.
    last
        Layer to eliminate last.
    table_limit, sum_limit
        Largest number of entries of a table, and of a sum that is minimized, before a cluster is split.

    Attributes
    ----------
    exact
        Whether no cluster was split, so that a pass gives the optimum.
    """

    def __init__(
        self, problem: Problem, table_limit: int = TABLE_LIMIT, sum_limit: int = SUM_LIMIT, last: int | None = None
    ) -> None:
        self.sizes = problem.sizes
        self.limits = (table_limit, sum_limit)
        self.scopes: list[tuple[int, ...]] = [*((v,) for v in range(len(self.sizes))), *problem.edges]
        self.clusters = self._fill(elimination_order(problem, last))
        self.exact = all(len(cluster.parts) == 1 for cluster in self.clusters)
        self.of = {cluster.layer: cluster for cluster in self.clusters}
        order = [cluster.layer for cluster in self.clusters]
        scopes = [self.of[v].scope for v in range(len(self.sizes))]
        self.decisions = [self.of[v] for v in decision_order(order, scopes)]

    def _fill(self, order: Sequence[int]) -> list[Cluster]:
        waiting: list[list[int]] = [[] for _ in self.sizes]
        position = {v: i for i, v in enumerate(order)}

        def put(factor: int) -> None:
            if self.scopes[factor]:
                # A factor belongs to the cluster of its layer that is eliminated first.
                waiting[min(self.scopes[factor], key=lambda v: position[v])].append(factor)

        for factor in range(len(self.scopes)):
            put(factor)
        clusters = []
        for v in order:
            parts = []
            for factors, scope in self._split(v, waiting[v]):
                parts.append(Part(tuple(factors), scope, len(self.scopes)))
                self.scopes.append(scope)
                put(parts[-1].message)
            union = sorted({u for part in parts for u in part.scope})
            clusters.append(Cluster(v, tuple(parts), tuple(union)))
        return clusters

    def _split(self, v: int, factors: list[int]) -> list[tuple[list[int], tuple[int, ...]]]:
        """Return groups of factors to minimize together, each with its scope, by first fit, the widest factor first."""
        parts: list[tuple[list[int], set[int]]] = []
        for factor in sorted(factors, key=lambda f: (-len(self.scopes[f]), f)):
            scope = set(self.scopes[factor]) - {v}
            for members, union in parts:
                entries = math.prod(self.sizes[u] for u in union | scope)
                # A factor over layers of the group makes neither its table nor its sum larger.
                if union >= scope or (entries <= self.limits[0] and entries * self.sizes[v] <= self.limits[1]):
                    members.append(factor)
                    union |= scope
                    break
            else:
                parts.append(([factor], scope))
        return [(sorted(members), tuple(sorted(union))) for members, union in parts]

    def run(self, tables: Sequence[Table]) -> PassResult:
        """Eliminate all layers, given the tables of layers, then of edges (`Costs`)."""
        filled: list[Table] = list(tables)
        known: dict[tuple, Array] = {}
        value = 0.0
        for cluster in self.clusters:
            for part in cluster.parts:
                axes = (cluster.layer, *part.scope)
                present = [(f, table) for f in part.factors if (table := filled[f]) is not None]
                # Equal work on equal tables is done once, because blocks of a network repeat. (`filled` keeps all
                # tables, so no `id` is used again.)
                key = (len(axes), *((id(table), tuple(axes.index(u) for u in self.scopes[f])) for f, table in present))
                if present and key not in known:
                    known[key] = minimum_of_sum([aligned(table, self.scopes[f], axes) for f, table in present])
                message = known[key] if present else None
                if message is not None and not part.scope:
                    value += float(message)
                filled.append(message)
        return PassResult(filled, value)

    def decide(self, messages: PassResult, fixed: Mapping[int, int] | None = None) -> list[int]:
        """Return the best candidate per layer, decided in the order of `decisions`; the choice is optimal if `exact`.

        ``fixed`` holds layers with a given candidate. If only the layer eliminated last is fixed, the result is still
        optimal among the choices with this candidate.
        """
        indices = [0] * len(self.sizes)
        for cluster in self.decisions:
            if fixed and cluster.layer in fixed:
                indices[cluster.layer] = fixed[cluster.layer]
                continue
            costs = np.zeros(self.sizes[cluster.layer])
            for f in cluster.factors:
                if (table := messages.tables[f]) is not None:
                    axes = zip(self.scopes[f], table.shape)
                    # A table of length 1 along a layer does not depend on the candidate of that layer.
                    at = (slice(None) if u == cluster.layer else indices[u] if size > 1 else 0 for u, size in axes)
                    costs += table[tuple(at)]
            indices[cluster.layer] = int(costs.argmin())
        return indices

    def work(self, passes: int = 1) -> Effort:
        """Return the effort of `passes` passes; it is an upper bound, because equal tables are processed once."""
        entries = (math.prod(self.sizes[u] for u in part.scope) for cluster in self.clusters for part in cluster.parts)
        return Effort(passes * len(self.clusters), max(entries, default=0))
