"""Tests of the invariants of plans: on random problems, and on problems that violated one."""

from __future__ import annotations

import pytest

from halograd.errors import UserError
from halograd.layers import Conv, Dense, Input, MeanSquaredError, Network, Strategy
from halograd.perfmodel import predict
from halograd.perfmodel.cost import simulate
from halograd.perfmodel.cuts import grids
from halograd.perfmodel.kernel_times import RooflineTimes
from halograd.perfmodel.machine import Machine
from halograd.perfmodel.predict import Planning, StrategySearch, plan_network
from tests.perfmodel.invariants import drawn, violations
from tests.perfmodel.pricing import priced
from tests.perfmodel.problems import FAMILIES

SLOW = Machine.load("lassen").emulated(1e-4, 1e-9)


#: One problem of each family on which a dozen plans take seconds: with equal links and others, with limits of memory
#: that are kept and that are refused.
SEEDS = dict(zip(FAMILIES, (0, 25, 10, 11, 12, 5, 6, 7)))


@pytest.mark.parametrize(
    ("family", "contention"), [(family, False) for family in FAMILIES] + [(FAMILIES[1], True), (FAMILIES[5], True)]
)
def test_promises_are_kept(family, contention):
    problem = drawn(SEEDS[family], contention)
    assert problem.family == family
    assert not violations(problem)


@pytest.mark.parametrize("seed", [56, 60])
def test_a_plan_that_only_fits_with_wide_values_is_found_again(seed):
    """Wide values make room for messages superfluous (56), and other strategies faster than the fastest plain one."""
    problem = drawn(seed, contention=True)
    network, times = problem.network(), RooflineTimes(problem.machine)
    some = network, problem.batch, problem.ranks, problem.machine, times
    plan = plan_network(*some, Planning("grid", recompute="none"))
    again = plan_network(*some, Planning("grid", plan.prediction.memory_bytes, recompute="none"))
    assert plan.strategy.widens and again.strategy == plan.strategy


@pytest.mark.parametrize("seed", [3, 159])
def test_the_least_memory_found_is_enough(seed):
    """Arenas smaller than their estimates count too, also where no choice is searched for them (3)."""
    problem = drawn(seed)
    some = problem.network(), problem.batch, problem.ranks, problem.machine, RooflineTimes(problem.machine)
    search = StrategySearch(*some, Planning("grid", limit=1.0))
    with pytest.raises(UserError, match="expected a strategy within 1 B per rank"):
        search.run()
    least = search.plan_candidates.leanest().memory_bytes
    plan = plan_network(*some, Planning("grid", limit=least))
    assert plan.prediction.memory_bytes == least and plan.strategy.recomputes
    again = plan_network(*some, Planning("grid", limit=least * 1.001))
    assert again.step_seconds <= plan.step_seconds


def test_a_limit_below_all_bounds_is_refused_without_candidates(monkeypatch):
    """Costs of candidates on 3,000 ranks take minutes."""

    def unexpected(*arguments):
        raise AssertionError("costs of candidates")

    problem = drawn(SEEDS[FAMILIES[0]])
    some = problem.network(), problem.batch, problem.ranks, problem.machine, RooflineTimes(problem.machine)
    free = StrategySearch(*some, Planning())
    free.run()
    monkeypatch.setattr(predict, "varied_costs", unexpected)
    with pytest.raises(UserError, match="expected a strategy within 1000 B per rank"):
        plan_network(*some, Planning(limit=1000))
    # A limit that a strategy keeps is searched.
    with pytest.raises(AssertionError, match="costs of candidates"):
        plan_network(*some, Planning(limit=free.plan_candidates.leanest().memory_bytes))


def strip(*extents: int) -> Network:
    """Return a network for a long and narrow sample."""
    y = Input((*extents, 8))
    for filters in (16, 16, 32, 32):
        y = Conv(filters, 3, padding=1, activation="relu")(y)
    return Network({"loss": MeanSquaredError()(y, Input(y.shape, name="target"))})


def test_a_strip_is_cut_along_its_length_whichever_axis_that_is():
    seconds = {}
    for axis, extents in (("width", (8, 4096)), ("height", (4096, 8))):
        network = strip(*extents)
        plan = plan_network(network, 1, 16, SLOW, RooflineTimes(SLOW))
        grid = simulate(network, Strategy({axis: 16}), 1, priced(SLOW), ranks=16)
        assert plan.step_seconds <= grid.step_seconds * (1 + 1e-9)
        seconds[axis] = plan.step_seconds
    assert seconds["width"] == pytest.approx(seconds["height"])


def test_more_ranks_than_a_grid_has_parts_for():
    y = Dense(16)(Input((8,)))
    network = Network({"loss": MeanSquaredError()(y, Input(y.shape, name="target"))})
    assert grids(network, 2, 8) == []
    plan = plan_network(network, 2, 8, SLOW, RooflineTimes(SLOW))
    assert "grid" not in [a.name for a in plan.alternatives]
    with pytest.raises(UserError, match="planner grid: expected inputs with samples, rows and columns for 8 parts"):
        plan_network(network, 2, 8, SLOW, RooflineTimes(SLOW), Planning("grid"))


def test_grids_are_all_cuts_that_inputs_have_room_for():
    network = strip(4, 64)
    assert (2, 1, 2, 4, 1, 1) in grids(network, 2, 16)
    assert all(p[0] <= 2 and p[1] == 1 and p[2] <= 4 for p in grids(network, 2, 16))
