"""Interface of all planners: arrays of costs as input, one candidate per layer as output."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    "Selection",
    "choice_of",
    "no_fit",
    "not_allowed",
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
        For inconsistent shapes, edges that run backwards or to unknown layers, NaN or -inf, or infinite memory.
    """

    names: tuple[str, ...]
    times: tuple[Array, ...]
    memory: tuple[Array, ...]
    edges: Mapping[Edge, Array] = field(default_factory=dict)
    limit: float | None = None
    edge_memory: Mapping[Edge, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
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

    def with_limit(self, limit: float | None) -> Problem:
        """Return the same problem under another memory limit [B]."""
        return Problem(self.names, self.times, self.memory, self.edges, limit, self.edge_memory)

    def restricted(self, kept: Sequence[NDArray[np.intp]]) -> Problem:
        """Return the same problem with only some candidates: of layer ``v`` those at ``kept[v]``, in that order."""
        if all(len(k) == size and np.array_equal(k, np.arange(size)) for k, size in zip(kept, self.sizes)):
            return self
        made: dict[tuple[int, bytes, bytes], Array] = {}

        def cut(tables: Mapping[Edge, Array]) -> dict[Edge, Array]:
            found = {}
            for (u, v), table in tables.items():
                key = (id(table), kept[u].tobytes(), kept[v].tobytes())
                if key not in made:
                    made[key] = table[np.ix_(kept[u], kept[v])]
                found[u, v] = made[key]
            return found

        times = tuple(t[k] for t, k in zip(self.times, kept))
        memory = tuple(m[k] for m, k in zip(self.memory, kept))
        return Problem(self.names, times, memory, cut(self.edges), self.limit, cut(self.edge_memory))


@dataclass(frozen=True)
class Effort:
    """Effort of a search.

    Attributes
    ----------
    eliminations
        Number of eliminated layers, summed over all passes.
    operations
        Approximate number of additions of table entries: the total size of all minimized sums.
    largest_table
        Entries of the largest stored table.
    states
        Number of examined partial or whole strategies.
    pruned
        Number of candidates that were proved unnecessary and removed before the search.
    seconds
        Wall time [s].
    """

    eliminations: int = 0
    operations: int = 0
    largest_table: int = 0
    states: int = 0
    pruned: int = 0
    seconds: float = 0.0

    def __add__(self, other: Effort) -> Effort:
        return Effort(
            self.eliminations + other.eliminations,
            self.operations + other.operations,
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
    """Convert arrays to packed float64; arrays that are one object stay one object."""
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
    seen: set[int] = set()
    for v, name in enumerate(names):
        if problem.times[v].ndim != 1 or not sizes[v] or problem.memory[v].shape != (sizes[v],):
            got = f"times {problem.times[v].shape}, memory {problem.memory[v].shape}"
            raise UserError(f"planner: layer {name}: expected as many times as memory sizes, at least 1; got {got}")
        _check_numbers(problem.times[v], f"layer {name}: times", seen)
        _check_finite(problem.memory[v], f"layer {name}: memory")
    for (u, v), table in problem.edges.items():
        if not 0 <= u < v < n:
            raise UserError(f"planner: edge {(u, v)}: expected 0 <= u < v < {n}, layers in order of computation")
        _check_shape(table, (sizes[u], sizes[v]), f"edge {names[u]} -> {names[v]}")
        _check_numbers(table, f"edge {names[u]} -> {names[v]}", seen)
    for (u, v), table in problem.edge_memory.items():
        if (u, v) not in problem.edges:
            raise UserError(f"planner: edge_memory {(u, v)}: expected keys of edges, which has no such edge")
        _check_shape(table, (sizes[u], sizes[v]), f"memory of edge {names[u]} -> {names[v]}")
        _check_finite(table, f"memory of edge {names[u]} -> {names[v]}")
    if problem.limit is not None and np.isnan(problem.limit):
        raise UserError("planner: memory limit: expected a number of bytes or None, got nan")


def _check_shape(table: Array, shape: tuple[int, int], what: str) -> None:
    if table.shape != shape:
        raise UserError(f"planner: {what}: expected shape {shape} (candidates of both layers), got {table.shape}")


def _check_numbers(values: Array, what: str, seen: set[int]) -> None:
    if id(values) in seen:
        return
    seen.add(id(values))
    smallest = values.min()  # NaN if an entry is NaN
    if not smallest > -np.inf:
        raise UserError(f"planner: {what}: expected seconds, or inf for illegal candidates; got {smallest}")


def _check_finite(values: Array, what: str) -> None:
    if not np.isfinite(values).all():
        raise UserError(f"planner: {what}: expected finite numbers of bytes, got {values[~np.isfinite(values)][0]}")


class NoneFits(UserError):
    """No choice is within the memory limit, or none is allowed at all."""


class PlanSearch(Protocol):
    """Protocol of the simulations for a plan; see :mod:`halograd.perfmodel.predict`."""

    def explore(self, planner: Planner) -> NoneFits | None:
        """Simulate the choices of a planner, their improvements, the baselines and the grids."""

    def compare(self, name: str, cut: Callable[..., Any]) -> None:
        """Simulate a strategy: ``cut(network, batch, ranks, bucket_bytes)``."""

    def compare_grids(self) -> None:
        """Simulate the grids that are the same for all layers."""


class Chooser(ABC):
    """Base class of the choices of ``strategy.planner`` and ``--planner``: a chooser decides which strategies to
    simulate, and the fastest that fits is the plan.

    A user's class derives from :class:`Planner`, or from :class:`halograd.perfmodel.cuts.Baseline`.
    """

    name: ClassVar[str]
    #: Whether the chooser compares its choices with the baselines and the grids; a run then also tries close ones.
    searches: ClassVar[bool] = False

    @abstractmethod
    def look(self, search: PlanSearch) -> NoneFits | None:
        """Simulate the strategies of this chooser; return the error if none fits."""


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
            If no choice is within the memory limit (the text gives the excess), or none is allowed.
            UserError
            If this planner does not support the problem.
        """
        start = time.perf_counter()
        if not problem.names:
            return Selection((), 0.0, 0.0, optimal=True)
        choice = self._search(problem)
        return replace(choice, work=replace(choice.work, seconds=time.perf_counter() - start))

    @abstractmethod
    def _search(self, problem: Problem) -> Selection:
        """Return the choice, without wall time."""


def choice_of(
    problem: Problem, indices: Sequence[int], optimal: bool, gap: float = 0.0, work: Effort | None = None
) -> Selection:
    """Return the choice of these candidates, with its sums from the problem itself."""
    whole = tuple(int(i) for i in indices)
    return Selection(whole, problem.seconds(whole), problem.bytes(whole), optimal, gap, work or Effort())


def no_fit(problem: Problem, smallest: float) -> NoneFits:
    """Return the error that even ``smallest`` [B], the minimum memory of all choices, exceeds the limit."""
    assert problem.limit is not None
    over = smallest - problem.limit
    return NoneFits(
        f"planner: expected a choice within the memory limit of {bytes_text(problem.limit)} per rank, but the "
        f"smallest needs {bytes_text(smallest)}, {bytes_text(over)} too much; use fewer samples per step, more ranks, "
        f"or a limit of at least {_rounded_up(smallest)}"
    )


def not_allowed(problem: Problem) -> NoneFits:
    """Return the error that every choice has an infinite time."""
    for v, times in enumerate(problem.times):
        if not np.isfinite(times).any():
            return NoneFits(f"planner: layer {problem.names[v]}: expected a candidate of finite time, got none")
    return NoneFits(
        "planner: expected a choice of finite time, but each one has an infinite layer or edge; "
        "add candidates that are possible for adjacent layers"
    )


def _rounded_up(nbytes: float) -> str:
    """Return the number as `bytes_text`, but rounded up."""
    mebibytes = int(-(-nbytes // 2**20))
    return f"{mebibytes} MiB" if mebibytes > 1 else f"{int(np.ceil(nbytes))} B"
