"""Changes of a choice that may make a step faster: of one layer, of two adjacent layers, of a region with the same cut.

The additive costs of :mod:`halograd.perfmodel.cost.network_costs` estimate the gain, once if computation hides all
gradient sums, and once if it hides none. The caller simulates the changes, the most promising first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .cost.network_costs import NetworkCosts

__all__ = ["Change", "Changes"]

Floats = NDArray[np.float64]

#: Number of changes per pair of adjacent layers, and number of changes of the first layers per region.
PAIRS, BEGINNINGS = 4, 32


@dataclass(frozen=True)
class Change:
    """Change of the cuts of some layers.

    Attributes
    ----------
    gain
        Estimated reduction of the step time [s].
    memory
        Estimated growth of the memory [B].
    indices
        Candidate per layer in the changed choice.
    """

    gain: float
    memory: float
    indices: tuple[int, ...]


class Changes:
    """Generator of the changes of a choice among the candidates of a network. Pure arithmetic."""

    def __init__(self, costs: NetworkCosts) -> None:
        self.costs = costs
        self._of: list[list[tuple[int, int]]] = [[] for _ in costs.names]
        for u, v in costs.edges:
            self._of[u].append((u, v))
            self._of[v].append((u, v))
        self._numbers = [{parts: i for i, parts in enumerate(candidates)} for candidates in costs.candidates]

    def of(self, indices: Sequence[int], least: float) -> list[Change]:
        """Return the changes with an estimated gain above `least` [s], the most promising first; each choice once."""
        result: dict[tuple[int, ...], Change] = {}
        for changes, hidden, waited in self._changes(indices):
            gain = max(hidden, waited)
            if gain > least:
                new = list(indices)
                for layer, candidate in changes:
                    new[layer] = candidate
                key = tuple(new)
                if key not in result or result[key].gain < gain:
                    result[key] = Change(gain, self._memory(indices, new, [layer for layer, _ in changes]), key)
        # A region's present cut, or one that none of its first layers has as a candidate, changes nothing.
        result.pop(tuple(indices), None)
        return sorted(result.values(), key=lambda change: -change.gain)

    def _changes(self, x: Sequence[int]) -> Iterator[tuple[list[tuple[int, int]], float, float]]:
        """Yield changes, as pairs of layer and candidate, with two gains [s]: sums of gradients hidden, and exposed."""
        own = [self._own(v, x) for v in range(len(x))]
        sums = [s[i] - s for s, i in zip(self.costs.sums, x)]
        for v, costs in enumerate(own):
            gains = costs[x[v]] - costs
            # Candidates that are not allowed have infinite costs.
            for c in np.flatnonzero(np.isfinite(gains)):
                yield [(v, int(c))], gains[c], gains[c] + sums[v][c]
        for (u, v), table in self.costs.edges.items():
            # The own costs count the edge between u and v with the other layer's present candidate; here both are new.
            joint = own[u][:, None] - table[:, x[v]][:, None] + own[v][None, :] - table[x[u]][None, :] + table
            hidden = joint[x[u], x[v]] - joint
            hidden[x[u]], hidden[:, x[v]] = -np.inf, -np.inf  # changes of one layer
            waited = hidden + sums[u][:, None] + sums[v][None, :]
            for a, b in _largest(hidden, waited, PAIRS):
                yield [(u, a), (v, b)], hidden[a, b], waited[a, b]
        for region in self._regions(x):
            # A region may adopt another cut from either end.
            yield from self._beginnings(region, x)
            yield from self._beginnings(region[::-1], x)

    def _own(self, v: int, x: Sequence[int]) -> Floats:
        """Return, per candidate of a layer, its cost with all its edges; other layers keep their candidates [s]."""
        total = self.costs.times[v].copy()
        for a, b in self._of[v]:
            table = self.costs.edges[a, b]
            total += table[:, x[b]] if a == v else table[x[a]]
        return total

    def _regions(self, x: Sequence[int]) -> list[list[int]]:
        """Return the connected regions of at least three layers with the same cut."""
        cuts = [self.costs.candidates[v][i] for v, i in enumerate(x)]
        seen: set[int] = set()
        regions = []
        for first in range(len(x)):
            if first in seen:
                continue
            seen.add(first)
            region, waiting = [], [first]
            while waiting:
                v = waiting.pop()
                region.append(v)
                for w in (w for edge in self._of[v] for w in edge if w not in seen and cuts[w] == cuts[first]):
                    seen.add(w)
                    waiting.append(w)
            # Changes of one layer and of pairs cover smaller regions.
            if len(region) > 2:
                regions.append(sorted(region))
        return regions

    def _beginnings(
        self, region: Sequence[int], x: Sequence[int]
    ) -> Iterator[tuple[list[tuple[int, int]], float, float]]:
        """Yield changes of the first 1, 2, ... layers of a region to another cut; layers that do not have it as a
        candidate keep their cut. Only the `BEGINNINGS` changes with the largest gains are yielded.
        """
        cuts = list(dict.fromkeys(parts for v in region for parts in self.costs.candidates[v]))
        new = np.array([[self._numbers[v].get(parts, x[v]) for parts in cuts] for v in region])
        index_of = {v: i for i, v in enumerate(region)}
        gained, sums = np.zeros(new.shape), np.zeros(new.shape)
        for i, v in enumerate(region):
            gained[i] += self.costs.times[v][x[v]] - self.costs.times[v][new[i]]
            sums[i] += self.costs.sums[v][x[v]] - self.costs.sums[v][new[i]]
            for a, b in self._of[v]:
                other, table = (b, self.costs.edges[a, b]) if a == v else (a, self.costs.edges[a, b].T)
                j = index_of.get(other)
                if j is not None and j < i:  # counted with the other layer
                    continue
                before, between = table[x[v], x[other]], table[new[i], x[other]]
                gained[i] += before - between
                if j is not None:  # applies as soon as both layers have changed
                    gained[j] += between - table[new[i], new[j]]
        hidden = gained.cumsum(axis=0)
        waited = hidden + sums.cumsum(axis=0)
        for last, c in _largest(hidden, waited, BEGINNINGS):
            yield list(zip(region, new[: last + 1, c].tolist())), hidden[last, c], waited[last, c]

    def _memory(self, old: Sequence[int], new: Sequence[int], layers: Sequence[int]) -> float:
        """Return the growth of the memory if `layers` change from `old` to `new` [B]."""
        grown = sum(self.costs.memory[v][new[v]] - self.costs.memory[v][old[v]] for v in layers)
        # A set, so that an edge between two changed layers counts once.
        for edge in {edge for v in layers for edge in self._of[v]}:
            table = self.costs.edge_memory.get(edge)
            if table is not None:
                u, v = edge
                grown += table[new[u], new[v]] - table[old[u], old[v]]
        return float(grown)


def _largest(hidden: Floats, waited: Floats, count: int) -> Iterator[tuple[int, int]]:
    """Yield row and column of the `count` largest gains; changes to an infinite time are left out."""
    best = np.where(np.isfinite(hidden), np.maximum(hidden, waited), -np.inf)
    for at in np.argpartition(best.ravel(), -min(count, best.size))[-count:]:
        if best.flat[at] > -np.inf:
            yield divmod(int(at), best.shape[1])
