"""Elimination of layers one after the other, for any graph: variable elimination in buckets.

Eliminating a layer replaces it, with all tables that depend on it, by one table over its neighbors: the cheapest
way to complete whatever they choose. With two neighbors this is the node elimination of Jia et al. 2018 (Section 5);
adding the new table to one over the same pair is their edge elimination. More neighbors are handled in the same way
with larger tables (Dechter 1999, *Bucket elimination*), up to a limit; beyond it a bucket is split (Dechter and Rish
2003, *Mini-buckets*): each part is minimized alone, which gives a lower bound instead of the optimum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .order import decision_order, elimination_order
from .problem import Array, Edge, Work
from .tables import aligned, minimum_of_sum

__all__ = ["Bucket", "Buckets", "Messages", "Part"]

#: Entries of the largest table that is kept (128 MiB), and of the largest sum that is minimized over.
TABLE_LIMIT = 1 << 24
SUM_LIMIT = 1 << 30

Table = Array | None  # None: zero everywhere


@dataclass(frozen=True)
class Part:
    """Factors minimized over together; the result, over ``scope``, is factor number ``message``."""

    factors: tuple[int, ...]
    scope: tuple[int, ...]
    message: int


@dataclass(frozen=True)
class Bucket:
    """All factors that depend on a layer when it is eliminated; ``scope``: the other layers they depend on."""

    layer: int
    parts: tuple[Part, ...]
    scope: tuple[int, ...]

    @property
    def factors(self) -> tuple[int, ...]:
        """Of all parts."""
        return tuple(f for part in self.parts for f in part.factors)


@dataclass(frozen=True)
class Messages:
    """Result of a pass: a table for every factor, and the sum of those over no layer: the optimum or a bound below."""

    tables: list[Table]
    value: float


class Buckets:
    """Who is eliminated when and what comes together then; holds for any costs on the same graph.

    Factors are numbered: one per layer, one per edge (in the order of ``edges``), then messages.

    Parameters
    ----------
    sizes
        Candidates per layer.
    edges
        Pairs of layers.
    last
        Layer to be eliminated last.
    table_limit, sum_limit
        Entries a table, and a sum that is minimized over, may have before a bucket is split.

    Attributes
    ----------
    exact
        No bucket was split: a pass gives the optimum.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        edges: Sequence[Edge],
        last: int | None = None,
        table_limit: int = TABLE_LIMIT,
        sum_limit: int = SUM_LIMIT,
    ) -> None:
        self.sizes = tuple(sizes)
        self.limits = (table_limit, sum_limit)
        self.scopes: list[tuple[int, ...]] = [(v,) for v in range(len(sizes))] + [tuple(sorted(e)) for e in edges]
        self.order = elimination_order(sizes, edges, last)
        self.buckets = self._fill()
        self.exact = all(len(bucket.parts) == 1 for bucket in self.buckets)
        scopes: list[tuple[int, ...]] = [()] * len(sizes)
        for bucket in self.buckets:
            scopes[bucket.layer] = bucket.scope
        self.of = {bucket.layer: bucket for bucket in self.buckets}
        self.decisions = [self.of[v] for v in decision_order(self.order, scopes)]

    def _fill(self) -> list[Bucket]:
        waiting: list[list[int]] = [[] for _ in self.sizes]
        position = {v: i for i, v in enumerate(self.order)}

        def put(factor: int) -> None:
            if self.scopes[factor]:
                waiting[min(self.scopes[factor], key=lambda v: position[v])].append(factor)

        for factor in range(len(self.scopes)):
            put(factor)
        buckets = []
        for v in self.order:
            parts = []
            for factors, scope in self._split(v, waiting[v]):
                parts.append(Part(tuple(factors), scope, len(self.scopes)))
                self.scopes.append(scope)
                put(parts[-1].message)
            union = sorted({u for part in parts for u in part.scope})
            buckets.append(Bucket(v, tuple(parts), tuple(union)))
        return buckets

    def _split(self, v: int, factors: list[int]) -> list[tuple[list[int], tuple[int, ...]]]:
        """Factors that are minimized together, by first fit, the widest first."""
        parts: list[tuple[list[int], set[int]]] = []
        for factor in sorted(factors, key=lambda f: (-len(self.scopes[f]), f)):
            scope = set(self.scopes[factor]) - {v}
            for members, union in parts:
                if union >= scope or self._small(v, union | scope):
                    members.append(factor)
                    union |= scope
                    break
            else:
                parts.append(([factor], scope))
        return [(sorted(members), tuple(sorted(union))) for members, union in parts]

    def _small(self, v: int, scope: set[int]) -> bool:
        entries = math.prod(self.sizes[u] for u in scope)
        return entries <= self.limits[0] and entries * self.sizes[v] <= self.limits[1]

    def run(self, tables: Sequence[Table]) -> Messages:
        """Eliminate all layers.

        Parameters
        ----------
        tables
            Costs of layers, then of edges ``[candidates of the first, of the second]``. Axes may have length 1 where
            nothing depends on the layer.
        """
        filled: list[Table] = list(tables)
        known: dict[tuple, Array] = {}
        value = 0.0
        for bucket in self.buckets:
            for part in bucket.parts:
                message = self._message(bucket.layer, part, filled, known)
                if message is not None and not part.scope:
                    value += float(message)
                filled.append(message)
        return Messages(filled, value)

    def _message(self, v: int, part: Part, tables: list[Table], known: dict[tuple, Array]) -> Table:
        present = [(f, table) for f in part.factors if (table := tables[f]) is not None]
        if not present:
            return None
        axes = (v, *part.scope)
        # Equal work on equal tables is done once: blocks of a network repeat.
        key = (len(axes), *((id(table), tuple(axes.index(u) for u in self.scopes[f])) for f, table in present))
        if key not in known:
            known[key] = minimum_of_sum([aligned(table, self.scopes[f], v, part.scope) for f, table in present])
        return known[key]

    def decide(self, messages: Messages, fixed: Mapping[int, int] | None = None) -> list[int]:
        """Candidate per layer, each the best given those decided before: the optimum, if `exact`.

        ``fixed``: layers whose candidate is given. If it is the one eliminated last, the result is still the best.
        """
        indices = [0] * len(self.sizes)
        for bucket in self.decisions:
            if fixed and bucket.layer in fixed:
                indices[bucket.layer] = fixed[bucket.layer]
                continue
            costs = np.zeros(self.sizes[bucket.layer])
            for f in bucket.factors:
                table = messages.tables[f]
                if table is not None:
                    costs += self._row(table, self.scopes[f], bucket.layer, indices)
            indices[bucket.layer] = int(costs.argmin())
        return indices

    def _row(self, table: Array, scope: tuple[int, ...], layer: int, indices: Sequence[int]) -> Array:
        at = tuple(
            slice(None) if u == layer else (indices[u] if size > 1 else 0) for u, size in zip(scope, table.shape)
        )
        return table[at]

    def work(self, passes: int = 1) -> Work:
        """What this many passes cost at most (equal tables are worked on once)."""
        parts = [(bucket, part) for bucket in self.buckets for part in bucket.parts]
        entries = [math.prod(self.sizes[u] for u in part.scope) for _, part in parts]
        operations = sum(n * self.sizes[bucket.layer] for n, (bucket, _) in zip(entries, parts))
        return Work(passes * len(self.buckets), passes * operations, max(entries, default=0))
