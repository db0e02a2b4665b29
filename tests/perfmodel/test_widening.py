"""Tests of the choice of wide values in plans: taken where the step is faster by a margin, and nowhere else."""

import pytest

import halograd as hg
from halograd.layers.strategy import Strategy
from halograd.models import mesh
from halograd.perfmodel.cost import NetworkModel, Pricing, simulate
from halograd.perfmodel.kernel_times import RooflineTimes
from halograd.perfmodel.machine import Machine
from halograd.perfmodel.predict import Planning, plan_network
from halograd.perfmodel.widening import MARGIN, RUNS, wider

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


def test_the_fastest_of_the_simulated_runs_is_taken():
    pricing, network = Pricing(NetworkModel(SLOW), RooflineTimes(SLOW), best_halo=True), NETWORKS["small"]
    grid, found = Strategy({"height": 2, "width": 2}), []

    def simulated(strategy):
        made = simulate(network, strategy, 1, pricing, account=False)
        found.append((made.step_seconds, strategy))
        return made

    chosen = wider(grid, simulate(network, grid, 1, pricing, account=False), simulated)
    assert chosen[0] is min(found, key=lambda one: one[0])[1] and len(chosen) > 1
    assert len(RUNS) - 2 <= len(found) <= len(RUNS) + 1


def test_norms_alone_are_tried_as_wide():
    """A halo that travels during a sum of statistics is neither exposed nor computed twice."""
    pricing, network, grid = Pricing(NetworkModel(SLOW), RooflineTimes(SLOW)), NETWORKS["mesh"], Strategy({"height": 4})
    plain, tried = simulate(network, grid, 1, pricing), []

    def simulated(strategy):
        tried.append(strategy)
        return simulate(network, strategy, 1, pricing)

    wider(grid, plain, simulated)
    made = simulate(network, tried[0], 1, pricing)
    norms = {name for name, node in network.layers.items() if node.layer.kind == "BatchNorm"}
    assert {name for name, options in tried[0].layers.items() if options.get("wide")} == norms
    assert made.traffic["halo"] == plain.traffic["halo"] and made.step_seconds < plain.step_seconds


def test_a_limit_of_memory_counts_margins(tmp_path):
    machine, network, times = SLOW, NETWORKS["small"], RooflineTimes(SLOW)
    wide = plan_network(network, 1, 4, machine, times, Planning("grid"))
    wide.strategy.save(tmp_path / "wide.json")
    assert Strategy.load(tmp_path / "wide.json") == wide.strategy
    limit = wide.prediction.memory_bytes - 1
    less = plan_network(network, 1, 4, machine, times, Planning("grid", limit, recompute="none"))
    assert wide.strategy.widens and less.prediction.memory_bytes <= limit
    assert less.step_seconds > wide.step_seconds
