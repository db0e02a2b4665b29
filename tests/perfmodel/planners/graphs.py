"""Random problems for the planners: chains, series-parallel graphs and arbitrary graphs, drawn by seed."""

from __future__ import annotations

import numpy as np

from halograd.perfmodel.planners import Problem

Edges = list[tuple[int, int]]


def line(random: np.random.Generator) -> tuple[int, Edges]:
    n = int(random.integers(1, 9))
    return n, [(v, v + 1) for v in range(n - 1)]


def series_parallel(random: np.random.Generator) -> tuple[int, Edges]:
    """Return a graph grown from one edge: edges are replaced by two in series, or get a parallel path."""
    n = int(random.integers(3, 9))
    edges, count = [(0, 1)], 2
    while count < n:
        u, v = edges[int(random.integers(len(edges)))]
        if random.random() < 0.5:
            edges.remove((u, v))
        edges += [(u, count), (count, v)]
        count += 1
    return renumbered(count, sorted(set(edges)))


def any_graph(random: np.random.Generator) -> tuple[int, Edges]:
    """Return a graph whose edges have equal probability; this includes complete graphs and single layers."""
    n, share = int(random.integers(1, 9)), random.random()
    return n, [(u, v) for u in range(n) for v in range(u + 1, n) if random.random() < share]


def renumbered(count: int, edges: Edges) -> tuple[int, Edges]:
    """Return the graph with layers in order of computation, so that every edge points to a higher number."""
    left, order = set(range(count)), []
    while left:
        free = min(v for v in left if not any(w == v and u in left for u, w in edges))
        order.append(free)
        left.remove(free)
    place = {v: i for i, v in enumerate(order)}
    return count, [(place[u], place[v]) for u, v in edges]


def priced(
    seed: int,
    graph: tuple[int, Edges],
    limited: bool = False,
    ties: bool = False,
    infinite: float = 0.0,
    edge_memory: bool = False,
    candidates: int = 4,
) -> Problem:
    """Return a problem with random costs: integers with `ties`, some infinite, and a memory limit that often binds."""
    random = np.random.default_rng([seed, 1])
    n, edges = graph
    sizes = random.integers(1, candidates + 1, n)

    def draw(*shape: int) -> np.ndarray:
        values = random.integers(0, 4, shape).astype(float) if ties else random.random(shape)
        values[random.random(shape) < infinite] = np.inf
        return values

    times = tuple(draw(k) for k in sizes)
    memory = tuple(random.integers(0, 20, k).astype(float) for k in sizes)
    between = {(u, v): draw(sizes[u], sizes[v]) for u, v in edges}
    kept = {e: random.integers(0, 5, t.shape).astype(float) for e, t in between.items()} if edge_memory else {}
    least, most = sum(m.min() for m in memory), sum(m.max() for m in memory)
    limit = float(np.floor(least + (most - least) * random.uniform(0, 0.8))) if limited else None
    return Problem(tuple(f"layer{v}" for v in range(n)), times, memory, between, limit, kept)
