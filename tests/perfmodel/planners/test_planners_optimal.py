"""Tests of every planner against exhaustive search."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from halograd.errors import UserError
from halograd.perfmodel.planners import PLANNERS, Elimination, Exhaustive, NoneFits, Planner, Problem, Selection, prune

from .graphs import any_graph, line, priced, series_parallel

GRAPHS = {"line": line, "series-parallel": series_parallel, "any": any_graph}
KINDS = {
    "free": {},
    "ties": {"ties": True},
    "infinite": {"infinite": 0.2},
    "limit": {"limited": True},
    "limit and ties": {"limited": True, "ties": True},
    "limit, infinite, edges": {"limited": True, "infinite": 0.15, "edge_memory": True},
}
# 1e-12 of the total is what sums may differ by, with at most 8 layers and 28 edges of at most 4 s.
CLOSE = {"rel": 1e-11, "abs": 1e-11}


def outcome(planner: Planner, problem: Problem) -> Selection | str:
    try:
        return planner.plan(problem)
    except NoneFits as error:
        return str(error)


def same(found: Selection | str, best: Selection | str, problem: Problem) -> None:
    if isinstance(best, str) or isinstance(found, str):
        assert found == best
        return
    assert found.seconds == pytest.approx(best.seconds, **CLOSE)
    assert found.optimal and found.gap == 0.0
    assert problem.fits(found.indices)
    assert (found.seconds, found.memory) == (problem.seconds(found.indices), problem.bytes(found.indices))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("graph", GRAPHS)
def test_elimination_is_optimal(graph, kind):
    """Elimination is optimal on 200 graphs of each kind, in turn as it is, without pruning, and with split tables."""
    planners = [Elimination(), Elimination(pruning=False), Elimination(table_limit=4)]
    for seed in range(200):
        problem = priced(seed, GRAPHS[graph](np.random.default_rng(seed)), **KINDS[kind])
        same(outcome(planners[seed % 3], problem), outcome(Exhaustive(), problem), problem)


@pytest.mark.parametrize("kind", KINDS)
def test_shortest_path_is_optimal_on_lines(kind):
    for seed in range(200):
        problem = priced(seed, line(np.random.default_rng(seed)), **KINDS[kind])
        same(outcome(PLANNERS["shortest_path"](), problem), outcome(Exhaustive(), problem), problem)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("graph", GRAPHS)
def test_longest_path_first_is_never_faster_and_always_fits(graph, kind, record_property):
    ratios, stuck = [], 0
    for seed in range(200):
        problem = priced(seed, GRAPHS[graph](np.random.default_rng(seed)), **KINDS[kind])
        best = outcome(Exhaustive(), problem)
        try:
            found = outcome(PLANNERS["longest_path_first"](), problem)
        except UserError as error:
            assert "use planner elimination" in str(error) and isinstance(best, Selection)
            stuck += 1
            continue
        if isinstance(best, str) or isinstance(found, str):
            assert found == best
            continue
        assert problem.fits(found.indices)
        assert best.seconds * (1 + 1e-11) + 1e-11 >= found.seconds - found.gap
        if best.seconds > 0:
            ratios.append(found.seconds / best.seconds)
    assert min(ratios) >= 1 - 1e-11
    if graph == "line" and "limit" not in kind:
        assert max(ratios) <= 1 + 1e-11 and not stuck
    record_property("ratio", f"mean {np.mean(ratios):.3f}, worst {max(ratios):.3f}, no choice found {stuck} times")


def test_exhaustive_is_the_smallest_of_all():
    for seed in range(50):
        problem = priced(seed, any_graph(np.random.default_rng(seed)), limited=True, edge_memory=True, candidates=2)
        choices = itertools.product(*(range(size) for size in problem.sizes))
        times = [problem.seconds(c) for c in choices if problem.fits(c)]
        found = outcome(Exhaustive(), problem)
        assert (found.seconds if isinstance(found, Selection) else math.inf) == pytest.approx(
            min(times, default=math.inf)
        )


def test_exhaustive_refuses_too_many_choices():
    problem = priced(0, (8, []), candidates=4)
    with pytest.raises(UserError, match=r"expected at most 3 choices, got .*; use planner elimination"):
        Exhaustive(states=3).plan(problem)


@pytest.mark.parametrize("kind", KINDS)
def test_pruning_keeps_the_optimum(kind):
    removed = 0
    for seed in range(200):
        problem = priced(seed, any_graph(np.random.default_rng(seed)), **KINDS[kind])
        pruned = prune(problem)
        removed += pruned.removed
        assert pruned.removed == sum(problem.sizes) - sum(pruned.problem.sizes)
        best, found = outcome(Exhaustive(), problem), outcome(Exhaustive(), pruned.problem)
        if isinstance(best, Selection) and isinstance(found, Selection):
            assert found.seconds == pytest.approx(best.seconds, **CLOSE)
            assert problem.seconds(pruned.original(list(found.indices))) == found.seconds
        else:
            assert isinstance(best, str) and isinstance(found, str)
    assert removed > 100


def test_of_equal_candidates_one_stays():
    problem = Problem(("a", "b"), (np.ones(3), np.ones(4)), (np.ones(3), np.ones(4)), {(0, 1): np.zeros((3, 4))}, 2.0)
    assert prune(problem).problem.sizes == (1, 1)
    assert prune(problem, keep=1).problem.sizes == (1, 4)


def test_small_tables_first_then_large_ones(monkeypatch):
    """A first try with small tables may succeed or fail; in both cases the result is the optimum."""
    monkeypatch.setattr("halograd.perfmodel.planners.elimination.FIRST_LIMITS", (4, 16))
    monkeypatch.setattr("halograd.perfmodel.planners.elimination.FIRST_LABELS", 2)
    for seed in range(200):
        problem = priced(seed, any_graph(np.random.default_rng(seed)), limited=seed % 2 == 0, infinite=0.1)
        same(outcome(Elimination(), problem), outcome(Exhaustive(), problem), problem)


def test_a_search_that_is_cut_short_says_so():
    """A search with few partial choices gives a plan that fits; its stated gap contains the optimum."""
    short = 0
    for seed in range(100):
        problem = priced(seed, (8, [(v, v + 1) for v in range(7)]), limited=True, candidates=6)
        best = outcome(Elimination(), problem)
        if isinstance(best, str):
            continue
        found = Elimination(labels=1).plan(problem)
        assert problem.fits(found.indices)
        assert found.seconds - found.gap <= best.seconds * (1 + 1e-11) <= found.seconds * (1 + 2e-11)
        assert found.optimal == (found.gap == 0.0)
        short += not found.optimal
    assert short
