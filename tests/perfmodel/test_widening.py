"""Tests of the choice of wide values in plans: taken where the step is faster by a margin, and nowhere else."""

import math

import pytest

import halograd as hg
from halograd.layers.strategy import Strategy
from halograd.models import mesh
from halograd.perfmodel.cost import NetworkModel, Pricing, simulate
from halograd.perfmodel.cost.simulate import Simulation, Training
from halograd.perfmodel.kernel_times import RooflineTimes
from halograd.perfmodel.machine import Machine
from halograd.perfmodel.predict import Planning, plan_network
from halograd.perfmodel.robust import plan_robust
from halograd.perfmodel.widening import MARGIN, RUNS, wider
from tests.perfmodel.invariants import drawn

LASSEN = Machine.load("lassen")
SLOW = LASSEN.emulated(2e-4, 1e-10)


def convolutions(extent):
    y = hg.Input((extent, extent, 16), name="x")
    for i in range(6):
        y = hg.Conv(32, 3, 1 + (i == 3), padding=1, activation="relu", name=f"conv{i}")(y)
    return hg.Network({"loss": hg.MeanSquaredError(name="loss")(y, hg.Input(y.shape, name="target"))})


NETWORKS = {
    "small": convolutions(64),
    "large": convolutions(1024),
    "mesh": mesh(128, channels=4, widths=(16, 32), convs=3),
}
#: Latency and inverse bandwidth [s, s/B]; None: the machine's own links.
LINKS = {"own": None, "slow": (2e-4, 1e-10), "narrow": (1e-6, 1e-8), "fast": (1e-7, 1e-12)}


@pytest.mark.parametrize("links", LINKS)
@pytest.mark.parametrize("name", NETWORKS)
def test_wide_values_are_chosen_only_where_the_step_is_faster_by_the_margin(name, links):
    machine = LASSEN if LINKS[links] is None else LASSEN.emulated(*LINKS[links])
    network, times = NETWORKS[name], RooflineTimes(machine)
    plan = plan_network(network, 1, 4, machine, times, Planning("grid"))
    pricing = Pricing(NetworkModel(machine), times, best_halo=True)
    plain = simulate(network, plan.strategy.exchanging_all, 1, pricing, ranks=4)
    if plan.strategy.widens:
        assert plan.step_seconds < (1 - MARGIN) * plain.step_seconds
        assert plan.prediction.traffic["halo"][0] < plain.traffic["halo"][0]
    else:
        assert plan.step_seconds == pytest.approx(plain.step_seconds)
    if (name, links) in (("small", "slow"), ("mesh", "slow")):
        assert plan.strategy.widens
    if (name, links) in (("large", "fast"), ("large", "own")):
        assert not plan.strategy.widens


def simulations(network, strategy, pricing, part=math.inf):
    """Return the simulation of a strategy, and what `wider` simulates and returns below a part of its step."""
    tried = []

    def simulated(strategy):
        tried.append(Simulation(network, strategy, 1, pricing, Training()))
        return tried[-1]

    plain = Simulation(network, strategy, 1, pricing, Training())
    return plain, tried, wider(strategy, plain.prediction(account=False), simulated, part * plain.step_seconds)


def test_the_fastest_of_the_simulated_runs_is_taken():
    pricing = Pricing(NetworkModel(SLOW), RooflineTimes(SLOW), best_halo=True)
    _, tried, chosen = simulations(NETWORKS["small"], Strategy({"height": 2, "width": 2}), pricing)
    assert chosen[0] is min(tried, key=lambda one: one.step_seconds) and len(chosen) > 1
    assert len(RUNS) - 2 <= len(tried) <= len(RUNS) + 1


def test_runs_that_cannot_become_fast_enough_are_not_simulated():
    pricing = Pricing(NetworkModel(SLOW), RooflineTimes(SLOW), best_halo=True)
    arguments = NETWORKS["small"], Strategy({"height": 2, "width": 2}), pricing
    plain, _, chosen = simulations(*arguments)
    fastest = chosen[0].step_seconds / plain.step_seconds
    assert simulations(*arguments, fastest * 1.001)[2][0].strategy == chosen[0].strategy
    assert 0 < len(simulations(*arguments, fastest * 0.8)[1]) < len(RUNS) - 2
    assert not simulations(*arguments, 0.01)[1]


def test_norms_alone_are_tried_as_wide():
    """A halo that travels during a sum of statistics is neither exposed nor computed twice."""
    pricing, network = Pricing(NetworkModel(SLOW), RooflineTimes(SLOW)), NETWORKS["mesh"]
    plain, (wide, *_), _ = simulations(network, Strategy({"height": 4}), pricing)
    norms = {name for name, node in network.layers.items() if node.layer.kind == "BatchNorm"}
    assert {name for name, options in wide.strategy.layers.items() if options.get("wide")} == norms
    assert wide.prediction().traffic["halo"] == plain.prediction().traffic["halo"]
    assert wide.step_seconds < plain.step_seconds


def test_a_slower_plain_strategy_may_become_the_fastest_wide_one():
    """Plans for a network and its mirror image differ if only the fastest plain strategy becomes wide."""
    problem = drawn(60)
    plans = []
    for turned in (False, True):
        network, times = problem.network(turned), RooflineTimes(problem.machine)
        plans.append(plan_network(network, problem.batch, problem.ranks, problem.machine, times))
    assert plans[0].strategy.widens and plans[1].strategy.widens
    assert plans[0].step_seconds == pytest.approx(plans[1].step_seconds, rel=0.05)


def test_robust_plans_have_wide_values_where_they_are_good_on_all_machines():
    machine = Machine.load("p100-cluster")
    found = plan_robust(convolutions(256), 1, 8, machine, RooflineTimes(machine))
    assert found.plan.strategy.widens and max(found.regrets.values()) < MARGIN < max(found.fastest.values())


def test_a_limit_of_memory_counts_margins(tmp_path):
    machine, network, times = SLOW, NETWORKS["small"], RooflineTimes(SLOW)
    wide = plan_network(network, 1, 4, machine, times, Planning("grid"))
    wide.strategy.save(tmp_path / "wide.json")
    assert Strategy.load(tmp_path / "wide.json") == wide.strategy
    limit = wide.prediction.memory_bytes - 1
    less = plan_network(network, 1, 4, machine, times, Planning("grid", limit, recompute="none"))
    assert wide.strategy.widens and less.prediction.memory_bytes <= limit
    assert less.step_seconds > wide.step_seconds
