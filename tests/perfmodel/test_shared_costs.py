"""Tests of results that searches share: of candidates of layers between numbers of ranks, of buckets and programs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halograd.comm.sums import largest_shard, shards
from halograd.layers import Strategy
from halograd.layers.reduction_scheme import Scheme
from halograd.models import mesh
from halograd.perfmodel.cost import Training
from halograd.perfmodel.cost.network_costs import network_costs
from halograd.perfmodel.cost.simulate import Simulation
from halograd.perfmodel.kernel_times import RooflineTimes
from halograd.perfmodel.machine import Machine
from halograd.perfmodel.plan_candidates import PlanCandidate, PlanCandidates
from halograd.perfmodel.predict import plan_network, quick_pricing
from tests.perfmodel.pricing import priced

LASSEN = Machine.load("lassen")


def small():
    return mesh(resolution=(64, 32), widths=(8, 16), convs=1)


def test_plans_for_several_ranks_share_the_costs_of_candidates(monkeypatch):
    network, times = small(), RooflineTimes(LASSEN)
    shared, rows = quick_pricing(LASSEN, times, "float32"), []
    monkeypatch.setattr("halograd.perfmodel.cost.network_costs.faster", lambda step, *_: rows.append(step.name) or step)
    counts = []
    for ranks in (4, 8):
        plans = []
        for quick in (None, shared):
            rows.clear()
            plans.append(replace(plan_network(network, 4, ranks, LASSEN, times, quick=quick), planning_seconds=0.0))
            counts.append(len(rows))
        assert plans[0] == plans[1]
    assert counts[0] == counts[1] > 0  # nothing to share yet
    assert 0 < counts[3] < 0.7 * counts[2]


def test_candidates_on_fewer_ranks_cost_the_same_whatever_the_number_of_ranks():
    few, many = (network_costs(small(), 4, ranks, quick_pricing(LASSEN, RooflineTimes(LASSEN), "float32"))
                 for ranks in (4, 16))  # fmt: skip
    for v, cuts in enumerate(few.candidates):
        shared = [(i, many.candidates[v].index(parts)) for i, parts in enumerate(cuts) if parts in many.candidates[v]]
        assert len(shared) > 3
        for i, j in shared:
            assert [t[v][i] for t in (few.times, few.sums, few.memory)] == [
                t[v][j] for t in (many.times, many.sums, many.memory)
            ]


def test_sizes_of_buckets_that_hold_the_same_gradients_are_simulated_once():
    network = small()
    sizes = [(Scheme("bucketed"), n) for n in (1 << 10, 1 << 20, 4 << 20)]
    plan_candidates = PlanCandidates(network, lambda strategy: sizes)
    simulation = Simulation(network, Strategy({"sample": 4}), 4, priced(LASSEN), Training(), 4)
    variants = plan_candidates.variants(plan_candidates.add(PlanCandidate("data", simulation)))
    assert {one.strategy.bucket_bytes for one in variants} == {1 << 10, 1 << 20}  # all gradients are below 1 MiB


@pytest.mark.parametrize(
    ("parts", "uniform"), [({"sample": 4}, 4), ({"sample": 2}, 2), ({"height": 4}, 0), ({"sample": 2, "width": 2}, 0)]
)
def test_uniform_programs_need_the_same_memory_on_all_ranks(parts, uniform):
    simulation = Simulation(small(), Strategy(parts), 4, priced(LASSEN), Training(), 4)
    assert simulation._uniform == uniform
    shared = [simulation._memory(rank) for rank in range(4)]
    simulation._known.uniform = 0
    simulation._known.memory.clear()
    assert shared == [simulation._memory(rank) for rank in range(4)]


def test_the_largest_shard():
    for size in (0, 1, 7, 8, 9, 63, 64, 65, 1000):
        for ranks in (1, 2, 3, 7, 8, 30):
            for itemsize in (1, 4, 8, 100):
                parts = [part.stop - part.start for part in shards(size, ranks, itemsize)]
                assert largest_shard(size, ranks, itemsize) == max(parts)
