"""Tests of planners: rejected problems, messages, effort, and the next best choice."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from halograd.errors import UserError
from halograd.perfmodel.planners import (
    PLANNERS,
    Elimination,
    Exhaustive,
    NoneFits,
    Planner,
    Problem,
    Selection,
    next_best,
)
from halograd.perfmodel.planners.paths import path_order
from tests.support.refusals import refusals

from .graphs import any_graph, line, priced, series_parallel

MIB = 2.0**20


#: Planners of a problem, without the rules for networks.
SEARCHING = [name for name in PLANNERS.names if issubclass(PLANNERS[name], Planner)]


def two(edge: np.ndarray | None = None, **options) -> Problem:
    times, memory = (np.array([1.0, 2.0]), np.array([3.0, 1.0])), (np.array([4, 2]) * MIB, np.array([8, 3]) * MIB)
    return Problem(("conv1", "conv2"), times, memory, {} if edge is None else {(0, 1): edge}, **options)


@pytest.mark.parametrize("name", SEARCHING)
def test_what_every_planner_returns(name):
    choice = PLANNERS[name]().plan(two(np.array([[0.0, 9.0], [0.0, 0.5]])))
    assert choice == Selection((1, 1), 3.5, 5 * MIB, choice.optimal, choice.gap, choice.work)
    assert choice.work.seconds > 0 and str(choice.work).startswith(f"{choice.work.seconds:.3g} s")


@pytest.mark.parametrize("name", SEARCHING)
def test_no_layers_and_one_layer(name):
    assert PLANNERS[name]().plan(Problem((), (), ())).indices == ()
    choice = PLANNERS[name]().plan(Problem(("only",), (np.array([2.0, 1.0, 1.0]),), (np.zeros(3),)))
    assert choice.indices == (1,) and choice.seconds == 1.0


@pytest.mark.parametrize("name", SEARCHING)
def test_a_limit_too_small_says_by_how_much(name):
    assert PLANNERS[name]().plan(two(limit=5 * MIB)).memory == 5 * MIB
    with pytest.raises(NoneFits) as error:
        PLANNERS[name]().plan(two(limit=3.5 * MIB))
    assert str(error.value) == (
        "planner: expected a choice within the memory limit of 3.5 MiB per rank, but the smallest needs 5 MiB, "
        "1.5 MiB too much; use fewer samples per step, more ranks, or a limit of at least 5 MiB"
    )


@pytest.mark.parametrize("name", SEARCHING)
def test_nothing_allowed(name):
    with pytest.raises(NoneFits, match="each one has an infinite layer or edge; add candidates"):
        PLANNERS[name]().plan(two(np.full((2, 2), np.inf)))
    nothing = Problem(("conv1",), (np.array([np.inf]),), (np.zeros(1),))
    with pytest.raises(NoneFits, match="layer conv1: expected a candidate of finite time, got none"):
        PLANNERS[name]().plan(nothing)


def test_shortest_path_refuses_branches():
    problem = priced(0, (4, [(0, 1), (1, 2), (1, 3), (2, 3)]))
    with pytest.raises(UserError, match=r"layer layer1 reads or feeds .*; use planner elimination \(optimal\)"):
        PLANNERS["shortest_path"]().plan(problem)


def test_longest_path_first_gets_stuck_where_elimination_does_not():
    """The planner `longest_path_first` fails if the best choice for a long path leaves none for another layer."""
    edges = {(0, 1): np.array([[0.0], [5.0]]), (0, 2): np.array([[np.inf], [0.0]])}
    times = (np.zeros(2), np.array([9.0]), np.array([1.0]))
    problem = Problem(("a", "b", "c"), times, (np.zeros(2), np.zeros(1), np.zeros(1)), edges)
    assert Elimination().plan(problem).seconds == 15.0
    with pytest.raises(UserError, match="choices of the first paths leave none; use planner elimination"):
        PLANNERS["longest_path_first"]().plan(problem)


def test_order_of_paths():
    """Paths are in the order of their length: the long branch, an isolated layer, then the short branch."""
    times = tuple(np.array([t, t + 1.0]) for t in (1.0, 2.0, 2.0, 3.0, 1.0, 1.0))
    edges = {e: np.zeros((2, 2)) for e in [(0, 1), (1, 2), (2, 4), (0, 3), (3, 4)]}
    problem = Problem(tuple("abcdef"), times, tuple(np.zeros(2) for _ in times), edges)
    assert path_order(problem) == [[0, 1, 2, 4], [5], [0, 3, 4]]


test_bad_problems = refusals(
    ((("a",), (), ()), "expected times and memory for each of 1 layers, got 0 and 0"),
    ((("a",), ([],), ([],)), "layer a: expected as many times as memory sizes, at least 1"),
    ((("a",), ([1.0],), ([1.0, 2.0],)), "layer a: expected as many times as memory sizes, at least 1"),
    ((("a",), ([math.nan],), ([1.0],)), "layer a: times: expected seconds, or inf .*; got nan"),
    ((("a",), ([1.0],), ([math.inf],)), "layer a: memory: expected finite numbers of bytes, got inf"),
    ((("a", "b"), ([1.0], [1.0]), ([1.0], [1.0]), {(1, 0): [[0.0]]}), "expected 0 <= u < v < 2"),
    ((("a", "b"), ([1.0], [1.0]), ([1.0], [1.0]), {(0, 1): [[0.0, 1.0]]}), r"edge a -> b: expected shape \(1, 1\)"),
    ((("a",), ([1.0],), ([1.0],), {}, None, {(0, 1): [[0.0]]}), "expected keys of edges"),
    ((("a",), ([1.0],), ([1.0],), {}, math.nan), "memory limit: expected a number of bytes or None"),
    call=lambda arguments: Problem(*arguments),
    error=UserError,
)


@pytest.mark.parametrize("graph", [line, series_parallel, any_graph])
@pytest.mark.parametrize("options", [{}, {"limited": True, "edge_memory": True}, {"infinite": 0.2}])
@pytest.mark.parametrize("table_limit", [1 << 20, 4])
def test_next_best_is_exact(graph, options, table_limit):
    """The next best total of each candidate equals exhaustive search with only this candidate."""
    for seed in range(25):
        problem = priced(seed, graph(np.random.default_rng(seed)), **options)
        try:
            choice = Exhaustive().plan(problem)
        except NoneFits:
            continue
        layer = seed % len(problem.names)
        found = next_best(problem, layer, Elimination(table_limit=table_limit))
        assert found[choice.indices[layer]] == pytest.approx(choice.seconds, rel=1e-11, abs=1e-11)
        for c, seconds in enumerate(found):
            kept = [np.arange(size) for size in problem.sizes]
            kept[layer] = np.array([c])
            try:
                expected = Exhaustive().plan(problem.restricted(kept)).seconds
            except NoneFits:
                expected = math.inf
            assert seconds == pytest.approx(expected, rel=1e-11, abs=1e-11)


def test_large_networks_are_planned_at_once():
    """A large residual network is planned fast: the largest table has two layers, equal blocks are processed once."""
    random = np.random.default_rng(0)
    edge, skip, times = random.random((60, 60)), random.random((60, 60)), random.random(60)
    count = 1 + 5 * 80
    edges = {(v, v + 1): edge for v in range(count - 1)} | {(v, v + 5): skip for v in range(0, count - 5, 5)}
    names = tuple(str(v) for v in range(count))
    memory = random.integers(1, 1000, 60).astype(float)
    problem = Problem(names, (times,) * count, (memory,) * count, edges)
    choice = Elimination().plan(problem)
    assert choice.optimal and choice.work.largest_table <= 60**2
    bound = replace(problem, limit=math.floor(0.8 * choice.memory))
    limited = Elimination().plan(bound)
    assert limited.optimal and bound.fits(limited.indices) and limited.seconds > choice.seconds
    assert limited.seconds <= PLANNERS["longest_path_first"]().plan(bound).seconds


def test_the_example_in_the_documentation(capsys):
    page = Path(__file__).resolve().parents[3] / "docs" / "planners.md"
    code, own = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    exec(compile(code, page.name, "exec"), {})
    exec(compile(own, page.name, "exec"), {"__name__": "own"})
    assert capsys.readouterr().out.startswith("(1, 1) 0.003 1000000000.0 True")
