"""Tests of robust plans: variations of machines, and the choice with the smallest largest regret."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halograd.errors import UserError
from halograd.layers import Conv, Strategy
from halograd.layers.reduction_scheme import Scheme
from halograd.models import mesh, vgg_a
from halograd.perfmodel.cost import NetworkModel, Pricing, Training, simulate
from halograd.perfmodel.cost.network_costs import mean_costs, network_costs, varied_costs
from halograd.perfmodel.cost.simulate import Simulation
from halograd.perfmodel.kernel_times import KernelTimes, LayerTime, RooflineTimes
from halograd.perfmodel.machine import Machine
from halograd.perfmodel.predict import Planning, plan_network, quick_pricing
from halograd.perfmodel.robust import VariedTimes, plan_robust, variations

LASSEN = Machine.load("lassen")
TIMES = RooflineTimes(LASSEN)


def small():
    return mesh(resolution=(128, 64), widths=(8, 16), convs=1)


class Measured(KernelTimes):
    def of_work(self, work):
        return LayerTime(3e-6, 5e-6)


def test_variations_differ_in_one_quantity():
    found = {one.name: one for one in variations(LASSEN, TIMES)}
    assert len(found) == 7 and found[""].machine is LASSEN
    latency = found["3 x the latency"].machine
    assert latency.links["across"] == replace(LASSEN.links["across"], alpha=3 * LASSEN.links["across"].alpha)
    ring, slow_ring = LASSEN.collectives["ring"], latency.collectives["ring"]
    hops = {"start": 3 * ring.start, "node": 3 * ring.node, "network": 3 * ring.network}
    assert ring.network and slow_ring == replace(ring, **hops) and set(latency.collectives) == set(LASSEN.collectives)
    assert latency.launch == LASSEN.launch and found["3 x the latency"].times is TIMES
    slow = found["1/3 of the compute rate"]
    assert slow.machine.peak_flops["float32"] == pytest.approx(LASSEN.peak_flops["float32"] / 3)
    layer, shape = Conv(256, 3, padding=1), [(8, 64, 64, 256)]
    assert slow.times.time(layer, shape).forward > 2.5 * TIMES.time(layer, shape).forward
    assert found["3 x the launch time"].times.time(layer, [(1, 1, 1, 256)]).forward > 2 * LASSEN.launch


def test_measured_times_vary_too():
    layer, shape = Conv(8, 3, padding=1), [(1, 4, 4, 8)]
    slower = VariedTimes(Measured(), 1e-6, 3e-6).time(layer, shape)
    faster = VariedTimes(Measured(), 1e-6, 1e-6, 2.0).time(layer, shape)
    assert (slower.forward, slower.backward_data, slower.backward_filter) == pytest.approx((5e-6, 7e-6, 0.0))
    assert (faster.forward, faster.backward_data) == pytest.approx((2e-6, 3e-6))
    assert {type(one.times) for one in variations(LASSEN, Measured())} == {Measured, VariedTimes}


def test_costs_on_several_machines_are_those_on_each():
    pricings = [quick_pricing(one.machine, one.times, "float32") for one in variations(LASSEN, TIMES)]
    some = (Training(), False, 4 << 20, ())
    together = varied_costs(small(), 2, 4, pricings, *some)
    for costs, one in zip(together, variations(LASSEN, TIMES), strict=True):
        alone = network_costs(small(), 2, 4, quick_pricing(one.machine, one.times, "float32"))
        for name in ("times", "sums", "memory"):
            assert all((a == b).all() for a, b in zip(getattr(costs, name), getattr(alone, name)))
        assert all((costs.edges[edge] == alone.edges[edge]).all() for edge in alone.edges)
    mean = mean_costs(together[:2], [0.25, 0.75])
    assert mean.times[0] == pytest.approx(0.25 * together[0].times[0] + 0.75 * together[1].times[0])


@pytest.mark.parametrize("halo", ["auto", "overlap"])
def test_a_simulation_on_another_machine_equals_a_new_one(halo):
    network, some = small(), list(variations(LASSEN, TIMES))
    layers = {name: {"height": 4, "halo": halo} for name in network.layers}
    pricings = [Pricing(NetworkModel(one.machine), one.times, best_halo=True) for one in some]
    first = Simulation(network, Strategy({}, layers), 2, pricings[0], Training())
    before = first.step_seconds, first.computing, first.memory
    for pricing in pricings[1:]:
        moved = first.with_reduction(Scheme("sharded")).on(pricing)
        new = Simulation(network, Strategy({}, layers), 2, pricing, Training()).with_reduction(Scheme("sharded"))
        assert (moved.step_seconds, moved.computing, moved.memory) == (new.step_seconds, new.computing, new.memory)
        assert moved.computing != first.computing
    assert (first.step_seconds, first.computing, first.memory) == before


def test_the_largest_regret_is_smaller_than_that_of_the_fastest_plan():
    network, ranks, batch = vgg_a(resolution=32, width=8, classes=10), 8, 8
    machine = Machine.load("dgx-h100")
    times = RooflineTimes(machine)
    found = plan_robust(network, batch, ranks, machine, times)
    fastest = plan_network(network, batch, ranks, machine, times).prediction.memory_bytes
    assert found.plan.prediction.memory_bytes > fastest  # so a limit may bind although the fastest plan fits
    lean = plan_robust(network, batch, ranks, machine, times, Planning(limit=fastest))
    assert lean.plan.prediction.memory_bytes <= fastest
    largest = max(found.regrets.values())
    assert found.worst and largest == found.regrets[found.worst] < 0.8 * max(found.fastest.values())
    for one in variations(machine, times):
        pricing = Pricing(NetworkModel(one.machine), one.times, best_halo=True)
        mine, best = (
            simulate(network, strategy, batch, pricing, ranks=ranks, account=False).step_seconds
            for strategy in (found.plan.strategy, found.others[one.name])
        )
        assert mine / best - 1 == pytest.approx(found.regrets[one.name], abs=0.005)


def test_a_robust_plan_keeps_the_limit_of_memory():
    free = plan_robust(small(), 2, 4, LASSEN, TIMES).plan
    limit = 0.8 * free.prediction.memory_bytes
    found = plan_robust(small(), 2, 4, LASSEN, TIMES, Planning(limit=limit))
    assert found.plan.prediction.memory_bytes <= limit and set(found.regrets) == set(found.fastest)


def test_a_baseline_is_not_robust():
    with pytest.raises(UserError, match="robust: expected a planner that chooses among strategies"):
        plan_robust(small(), 2, 4, LASSEN, TIMES, Planning("data"))
