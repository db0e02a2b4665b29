"""Interface of all planners: arrays of costs as input, one candidate per layer as output; and removal of candidates
that no optimum needs.

`prune` removes a candidate only if it is impossible (infinite, alone or with every candidate of a neighbor; or too
large even if all other layers use the least memory), or if another candidate of the same layer is never worse: for all
choices of the neighbors, the replacement costs no more time and no more memory (the *dead-end elimination* of Desmet
et al. 1992, here with a resource). So the best time and the minimum memory do not change.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from halograd.documents import bytes_text
from halograd.errors import UserError

__all__ = [
    "Array",
    "Chooser",
    "Edge",
    "Effort",
    "NoneFits",
    "PlanSearch",
    "Planner",
    "Problem",
    "Pruned",
    "Selection",
    "memory_problem",
    "prune",
]

Array = NDArray[np.float64]
Edge = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Problem:
    """Optimization problem: one candidate per layer such that the sum of all times is minimal.

    ``seconds(x) = sum_v times[v][x_v] + sum_(u,v) edges[u, v][x_u, x_v]``, subject to
    ``memory(x) = sum_v memory[v][x_v] + sum_(u,v) edge_memory[u, v][x_u, x_v] <= limit``.
    Planners get no other information on layers.

    Parameters
    ----------
    names
        Layers in order of computation.
    times
        Per layer ``[candidates]``, [s]. ``inf``: not allowed.
    memory
        Per layer ``[candidates]``, memory of the candidate on the fullest rank [B]; finite.
    edges
        ``(u, v)`` with ``u < v`` -> time to transfer the result of ``u`` to ``v``,
        ``[candidates of u, candidates of v]``, [s]. ``inf``: not allowed. One array may be used for many edges: equal
        arrays are processed once.
    limit
        Largest sum of memory [B]; None: no limit.
    edge_memory
        Memory of edges [B], with shapes and keys as in ``edges``.

    Raises
    ------
    UserError
        For inconsistent shapes or keys, edges that run backwards or to unknown layers, NaN or -inf, or infinite memory.
    """

    names: tuple[str, ...]
    times: tuple[Array, ...]
    memory: tuple[Array, ...]
    edges: Mapping[Edge, Array] = field(default_factory=dict)
    limit: float | None = None
    edge_memory: Mapping[Edge, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # One dictionary for all fields: an array object that occurs several times stays one object.
        converted: dict[int, Array] = {}
        for name in ("times", "memory"):
            values = tuple(_floats(a, converted) for a in getattr(self, name))
            object.__setattr__(self, name, values)
        for name in ("edges", "edge_memory"):
            tables = {edge: _floats(a, converted) for edge, a in getattr(self, name).items()}
            object.__setattr__(self, name, tables)
        _check(self)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of candidates per layer."""
        return tuple(len(t) for t in self.times)

    def seconds(self, indices: Sequence[int]) -> float:
        """Return the total time of one candidate per layer [s]."""
        total = sum(float(t[i]) for t, i in zip(self.times, indices))
        return total + sum(float(table[indices[u], indices[v]]) for (u, v), table in self.edges.items())

    def bytes(self, indices: Sequence[int]) -> float:
        """Return the total memory of one candidate per layer [B]."""
        total = sum(float(m[i]) for m, i in zip(self.memory, indices))
        return total + sum(float(table[indices[u], indices[v]]) for (u, v), table in self.edge_memory.items())

    def fits(self, indices: Sequence[int]) -> bool:
        """Return whether the memory of one candidate per layer is within the limit."""
        return self.limit is None or self.bytes(indices) <= self.limit

    @cached_property
    def neighbors(self) -> tuple[tuple[int, ...], ...]:
        """Neighbors of each layer: the layers that share an edge with it."""
        neighbors: tuple[list[int], ...] = tuple([] for _ in self.names)
        for u, v in self.edges:
            neighbors[u].append(v)
            neighbors[v].append(u)
        return tuple(map(tuple, neighbors))

    def choice(
        self, indices: Sequence[int], optimal: bool, gap: float = 0.0, work: Effort | None = None
    ) -> Selection:
        """Return the selection of the candidates `indices`, with its total time and memory."""
        # Indices may be NumPy's integers, which JSON does not accept.
        whole = tuple(int(i) for i in indices)
        return Selection(whole, self.seconds(whole), self.bytes(whole), optimal, gap, work or Effort())

    def no_choice(self, smallest: float) -> NoneFits:
        """Return the error for a problem without a choice, with the reason.

        `smallest` is the minimum memory of all choices [B]; ``inf``: each choice has an infinite time.
        """
        if self.limit is not None and smallest < np.inf:
            mebibytes = int(-(-smallest // 2**20))  # rounded up
            enough = f"{mebibytes} MiB" if mebibytes > 1 else f"{int(np.ceil(smallest))} B"
            return NoneFits(
                f"planner: expected a choice within the memory limit of {bytes_text(self.limit)} per rank, but the "
                f"smallest needs {bytes_text(smallest)}, {bytes_text(smallest - self.limit)} too much; use fewer "
                f"samples per step, more ranks, or a limit of at least {enough}"
            )
        for name, times in zip(self.names, self.times):
            if not np.isfinite(times).any():
                return NoneFits(f"planner: layer {name}: expected a candidate of finite time, got none")
        return NoneFits(
            "planner: expected a choice of finite time, but each one has an infinite layer or edge; "
            "add candidates that are possible for adjacent layers"
        )

    def restricted(self, kept: Sequence[NDArray[np.intp]]) -> Problem:
        """Return the same problem with fewer candidates: for layer ``v`` those at ``kept[v]``, in that order."""
        if all(len(k) == size and np.array_equal(k, np.arange(size)) for k, size in zip(kept, self.sizes)):
            return self
        restricted: dict[tuple[int, bytes, bytes], Array] = {}

        def cut(tables: Mapping[Edge, Array]) -> dict[Edge, Array]:
            result = {}
            for (u, v), table in tables.items():
                # A table that several edges share remains one object where the same candidates are kept.
                key = (id(table), kept[u].tobytes(), kept[v].tobytes())
                if key not in restricted:
                    restricted[key] = table[np.ix_(kept[u], kept[v])]
                result[u, v] = restricted[key]
            return result

        return replace(
            self,
            times=tuple(t[k] for t, k in zip(self.times, kept)),
            memory=tuple(m[k] for m, k in zip(self.memory, kept)),
            edges=cut(self.edges),
            edge_memory=cut(self.edge_memory),
        )


@dataclass(frozen=True)
class Effort:
    """Effort of a search.

    Attributes
    ----------
    eliminations
        Number of eliminated layers, summed over all passes.
    largest_table
        Entries of the largest stored table.
    states
        Number of examined partial or whole choices.
    pruned
        Number of candidates that were proved unnecessary and removed before the search.
    seconds
        Wall time [s].
    """

    eliminations: int = 0
    largest_table: int = 0
    states: int = 0
    pruned: int = 0
    seconds: float = 0.0

    def __add__(self, other: Effort) -> Effort:
        return Effort(
            self.eliminations + other.eliminations,
            max(self.largest_table, other.largest_table),
            self.states + other.states,
            self.pruned + other.pruned,
            self.seconds + other.seconds,
        )

    def __str__(self) -> str:
        parts = [f"{self.seconds:.3g} s"]
        parts += [f"{self.eliminations} eliminations"] if self.eliminations else []
        parts += [f"largest table {self.largest_table} entries"] if self.largest_table else []
        parts += [f"{self.states} states"] if self.states else []
        parts += [f"{self.pruned} candidates pruned"] if self.pruned else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Selection:
    """Choice of one candidate per layer.

    Attributes
    ----------
    indices
        Candidate per layer.
    seconds
        Total time [s].
    memory
        Total memory [B].
    optimal
        Whether it is proved that no choice that fits is faster (up to rounding of the sums).
    gap
        If not optimal: upper bound on how much faster another choice may be [s]; ``inf``: unknown.
    work
        Effort of the search.
    """

    indices: tuple[int, ...]
    seconds: float
    memory: float
    optimal: bool
    gap: float = 0.0
    work: Effort = Effort()


def _floats(values: Any, converted: dict[int, Array]) -> Array:
    """Convert values to packed float64; for the same array object, the result is the same object."""
    if isinstance(values, np.ndarray) and values.dtype == np.float64 and values.flags.c_contiguous:
        return values
    if not isinstance(values, np.ndarray):
        return np.ascontiguousarray(values, dtype=np.float64)
    return converted.setdefault(id(values), np.ascontiguousarray(values, dtype=np.float64))


def _check(problem: Problem) -> None:
    names, sizes, n = problem.names, problem.sizes, len(problem.names)
    if not (len(problem.times) == len(problem.memory) == n):
        got = f"{len(problem.times)} and {len(problem.memory)}"
        raise UserError(f"planner: expected times and memory for each of {n} layers, got {got}")
    seen: set[tuple[int, bool]] = set()

    def check_entries(table: Array, what: str, finite: bool = False) -> None:
        # Repeated blocks of a network share their tables.
        if (id(table), finite) in seen:
            return
        seen.add((id(table), finite))
        if finite and not np.isfinite(table).all():
            wrong = table[~np.isfinite(table)][0]
            raise UserError(f"planner: {what}: expected finite numbers of bytes, got {wrong}")
        smallest = table.min()  # NaN if an entry is NaN
        # `not >`, which is true for NaN too.
        if not smallest > -np.inf:
            raise UserError(f"planner: {what}: expected seconds, or inf for illegal candidates; got {smallest}")

    for name, size, times, memory in zip(names, sizes, problem.times, problem.memory):
        if times.ndim != 1 or not size or memory.shape != (size,):
            got = f"times {times.shape}, memory {memory.shape}"
            raise UserError(f"planner: layer {name}: expected as many times as memory sizes, at least 1; got {got}")
        check_entries(times, f"layer {name}: times")
        check_entries(memory, f"layer {name}: memory", finite=True)
    if unknown := problem.edge_memory.keys() - problem.edges:
        raise UserError(f"planner: edge_memory {min(unknown)}: expected keys of edges, which has no such edge")
    for tables, finite in ((problem.edges, False), (problem.edge_memory, True)):
        for (u, v), table in tables.items():
            if not 0 <= u < v < n:
                raise UserError(f"planner: edge {(u, v)}: expected 0 <= u < v < {n}, layers in order of computation")
            what = f"{'memory of ' if finite else ''}edge {names[u]} -> {names[v]}"
            if table.shape != (sizes[u], sizes[v]):
                expected = f"{sizes[u], sizes[v]} (candidates of both layers)"
                raise UserError(f"planner: {what}: expected shape {expected}, got {table.shape}")
            check_entries(table, what, finite)
    if problem.limit is not None and np.isnan(problem.limit):
        raise UserError("planner: memory limit: expected a number of bytes or None, got nan")


class NoneFits(UserError):
    """Error: no choice is within the memory limit, or none is allowed at all."""


class PlanSearch(Protocol):
    """Protocol of a search for a plan, with the methods that choosers call; see :mod:`halograd.perfmodel.predict`."""

    def explore(self, planner: Planner) -> NoneFits | None:
        """Simulate a planner's choices and improvements of them, the baselines, and strategies with one grid for all
        layers. Return the error of a planner that finds no choice; else None.
        """

    def compare(self, name: str, cut: Callable[..., Any]) -> None:
        """Simulate the strategy of the baseline `name`, ``cut(network, batch, ranks, bucket_bytes)``."""

    def compare_grids(self) -> None:
        """Simulate strategies with one grid for all layers."""


class Chooser(ABC):
    """Base class of the choices of ``strategy.planner`` and ``--planner``: a chooser decides which strategies to
    simulate, and the fastest that fits is the plan.

    A user's class derives from :class:`Planner`, or from :class:`halograd.perfmodel.cuts.Baseline`.
    """

    name: ClassVar[str]
    #: Whether the chooser compares its choices with the baselines and the grids; a run then also times
    #: those that are predicted to be nearly as fast.
    searches: ClassVar[bool] = False
    #: Whether layers of its choice may become wide (:mod:`halograd.perfmodel.widening`).
    widens: ClassVar[bool] = True

    @abstractmethod
    def look(self, search: PlanSearch) -> NoneFits | None:
        """Simulate the strategies of this chooser; return the error of a planner that finds no choice, else None."""


class Planner(Chooser):
    """Planner of a `Problem`; one object can plan any number of problems."""

    searches = True

    def look(self, search: PlanSearch) -> NoneFits | None:
        return search.explore(self)

    def plan(self, problem: Problem) -> Selection:
        """Return the best choice that this planner finds within the memory limit.

        Raises
        ------
        NoneFits
            If no choice is within the memory limit (the message states the excess), or none is allowed.
        UserError
            If this planner does not support the problem.
        """
        start = time.perf_counter()
        # Without layers there is one choice, the empty one.
        if not problem.names:
            return Selection((), 0.0, 0.0, optimal=True)
        choice = self._search(problem)
        return replace(choice, work=replace(choice.work, seconds=time.perf_counter() - start))

    @abstractmethod
    def _search(self, problem: Problem) -> Selection:
        """Return the selection; :meth:`plan` adds the wall time."""


def memory_problem(problem: Problem) -> Problem:
    """Return the problem with memory [B] in place of finite times, whose fastest choice needs the least memory.

    It has no limit. Infinite times stay: these candidates are not allowed.
    """
    tables: dict[tuple[int, int], Array] = {}

    def nbytes(seconds: Array, memory: Array | None) -> Array:
        key = id(seconds), id(memory)  # equal edges stay one object
        if key not in tables:
            tables[key] = np.where(np.isinf(seconds), np.inf, 0.0 if memory is None else memory)
        return tables[key]

    times = tuple(map(nbytes, problem.times, problem.memory))
    edges = {edge: nbytes(table, problem.edge_memory.get(edge)) for edge, table in problem.edges.items()}
    return Problem(problem.names, times, problem.memory, edges)


Kept = NDArray[np.intp]


@dataclass(frozen=True)
class Pruned:
    """Problem with ``removed`` fewer candidates; ``kept`` holds, per layer, the original indices of the others."""

    problem: Problem
    kept: tuple[Kept, ...]
    removed: int

    def original(self, indices: Sequence[int]) -> list[int]:
        """Return the indices of candidates in the original problem."""
        return [int(k[i]) for k, i in zip(self.kept, indices)]


def prune(problem: Problem, keep: int | None = None, rounds: int = 3) -> Pruned:
    """Remove candidates without losing the optimum.

    Parameters
    ----------
    keep
        Layer whose candidates are all kept, however bad (to compute the best choice with each of them).
    rounds
        Maximum number of repetitions; removed candidates may make others removable.
    """
    kept: tuple[Kept, ...] = tuple(np.arange(size) for size in problem.sizes)
    smaller = problem
    for _ in range(rounds):
        alive = _alive(smaller, keep)
        # None: no choice is possible, which the planner finds and reports.
        if alive is None or all(a.all() for a in alive):
            break
        chosen = [np.flatnonzero(a) for a in alive]
        kept = tuple(k[c] for k, c in zip(kept, chosen))
        smaller = smaller.restricted(chosen)
    return Pruned(smaller, kept, sum(problem.sizes) - sum(smaller.sizes))


def _alive(problem: Problem, keep: int | None) -> list[NDArray[np.bool_]] | None:
    """Return, per layer and candidate, whether it may be needed; None if a layer has no possible candidate."""
    known: dict[tuple[int, int], tuple[Array, Array]] = {}

    def extremes(layer: int, own: Array, tables: Mapping[Edge, Array]) -> tuple[Array, Array]:
        """Return, per candidate, the minimum and the maximum of its cost with all its edges."""
        least, most = own.copy(), own.copy()
        for other in problem.neighbors[layer]:
            table, axis = tables.get((min(layer, other), max(layer, other))), int(layer < other)
            if table is None:
                continue
            key = (id(table), axis)
            if key not in known:
                known[key] = (table.min(axis=axis), table.max(axis=axis))
            least += known[key][0]
            most += known[key][1]
        return least, most

    capacity = np.inf  # memory that is left if every layer and edge uses its minimum [B]
    if problem.limit is not None:
        smallest = (float(table.min()) for table in (*problem.memory, *problem.edge_memory.values()))
        capacity = problem.limit - sum(smallest)
    alive = []
    for v, (times, memory) in enumerate(zip(problem.times, problem.memory)):
        least, most = extremes(v, times, problem.edges)
        good = np.isfinite(least)
        if problem.limit is not None:
            small, large = extremes(v, memory, problem.edge_memory)
            # More than the layer's minimum: the capacity is what remains after that.
            good &= memory - memory.min() <= capacity
        if not good.any():
            return None
        if v == keep:
            alive.append(np.ones_like(good))
            continue
        # never_worse[a, b]: b never costs more than a; of equal candidates the first stays.
        never_worse = most[None, :] <= least[:, None]
        if problem.limit is not None:
            never_worse &= large[None, :] <= small[:, None]
        first = np.tri(len(times), k=-1, dtype=bool)
        never_worse &= ~never_worse.T | first
        np.fill_diagonal(never_worse, False)
        alive.append(good & ~(never_worse & good[None, :]).any(axis=1))
    return alive
