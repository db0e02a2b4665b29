"""Tests of the gradient reduction benchmark: the models of the papers' machines, the emulated device, tables."""

import time
from dataclasses import replace

import pytest
from mpi4py import MPI

from benchmarks.gradient_reduction import NETWORKS, schemes_of
from benchmarks.gradient_reduction_ranks import EmulatedMachine, PlanCandidate
from benchmarks.gradient_reduction_tables import tables
from benchmarks.paced_executor import Clock
from benchmarks.paper_machines import PAPERS, Part
from halograd.layers.reduction_scheme import Scheme
from halograd.layers.strategy import Strategy


@pytest.mark.parametrize("name", NETWORKS)
def test_ranks_stand_for_the_machine_of_the_paper(name):
    """Sums, rows and layers of the shrunken network take the time of the paper's machine; every scheme is available."""
    part = Part(PAPERS[name], 4)
    s, alpha_beta = part.setting, part.links
    whole = 4 * sum(spec.size for spec in part.paper.network.parameters().values())
    network_model, narrow = part.paper.pricing.network_model, part.simulation().pricing.network_model
    there = network_model.sum(whole, range(s.nodes)) if s.beta is None else s.beta * whole
    assert narrow.sum(whole * part.shrunk, range(4)) == pytest.approx(s.slow * there, rel=0.02) and min(alpha_beta) >= 0
    assert part.shrunk == pytest.approx((1 / 16) ** 2, rel=0.1)
    assert sum(t.total for t in part.pace.values()) == pytest.approx(
        s.slow * (s.alone or sum(c.forward_seconds + c.backward_seconds for c in part.paper.costs.values()))
    )
    assert set(part.network.layers) <= set(part.pace)
    for entry in schemes_of(name):
        Strategy({"sample": 4}, reduction=entry["scheme"]).validate(part.network, 4)


def test_rows_of_replicated_layers_shrink_as_weights_do():
    part = Part(PAPERS["vgg_a"], 4)
    kept = Scheme("two_chunks", first_layers=9, replicated_dense=2)
    model = part.simulation().with_reduction(kept).prediction(account=False)
    paper = part.paper.with_reduction(kept).prediction(account=False)
    slow = part.setting.slow
    assert model.allreduce_seconds / slow == pytest.approx(paper.allreduce_seconds, rel=0.02)
    assert model.step_seconds / slow == pytest.approx(paper.step_seconds, rel=0.02)


def test_a_device_does_not_wait_for_who_sleeps_too_long():
    clock = Clock()
    begin = clock.done
    clock.compute(2e-3)
    time.sleep(5e-3)  # the host is late
    clock.compute(2e-3)
    assert clock.done == pytest.approx(begin + 4e-3)
    clock.idle(1e-3)
    assert clock.done == pytest.approx(begin + 5e-3)


@pytest.mark.mpi(min_size=2)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("dense", [0, 1])
def test_a_step_takes_what_layers_take_and_sends_what_is_predicted(dense):
    part = Part(replace(PAPERS["alexnet"], slow=0.2), MPI.COMM_WORLD.size)
    schemes = [Scheme("blocking", replicated_dense=dense), Scheme("host_accumulate", chunk=2, replicated_dense=dense)]
    machine = EmulatedMachine(part, schemes[0])
    plan_candidates = [PlanCandidate(machine, scheme) for scheme in schemes]
    for plan_candidate in plan_candidates:
        plan_candidate.run(3)
    rows = [plan_candidate.record() for plan_candidate in plan_candidates]
    machine.close()
    if MPI.COMM_WORLD.rank == 0:
        for row in rows:
            assert row["as_predicted"] and row["steps"] == 2
            assert row["step"] > sum(t.total for n, t in part.pace.items() if n not in part.whole)
            assert 0 <= row["exposed"] < row["step"] and row["communication"] > 0


def row(step, scheme, **settings):
    plain = {"name": scheme, "first_layers": 0, "chunk": 1, "replicated_dense": 0, "payload": "float32"}
    numbers = dict.fromkeys(("exposed", "predicted_exposed", "communication"), 0.01)
    settings = {**plain, "deterministic": False, **settings}
    return {
        **numbers, "scheme": scheme, "settings": settings, "node": 1, "step": step, "predicted": step,
        "overlap": 90.0, "bytes": 10**6, "as_predicted": scheme != "blocking",
    }  # fmt: skip


def test_tables_stand_beside_the_papers():
    setting = {"paper": "Lee", "batch": 256, "nodes": 128, "machine": "cori-haswell", "slow": 2.0}
    best = row(0.1, "two_chunks", first_layers=9, replicated_dense=2)
    result = {"network": "vgg_a", "setting": setting, "ranks": 4, "alone": 3.0, "compute": 0.1}
    text = "\n".join(tables({**result, "schemes": [row(0.2, "blocking"), best]}))
    assert "1.0 !" in text and "2.000, predicted 2.000 (+0.0 %); theirs 3.16" in text
    (line,) = [line for line in text.splitlines() if line.startswith("k = 9, f = 2")]
    assert line.split()[-4:] == ["60.0", "60.0", "90.0", "62.97"]
    search = {
        "layers": 20, "intervals": 8, "chosen": 3, "tried": {}, "fixed": {"1": 0.25, "3": 0.204, "9": 0.2},
        "predicted": {"1": 0.25, "3": 0.2, "9": 0.2},
    }  # fmt: skip
    le = {**result, "network": "vgg16", "setting": {**setting, "paper": "Le", "slow": 1.0}, "search": search}
    text = "\n".join(tables({**le, "schemes": [row(0.3, "blocking"), row(0.25, "host_accumulate")]}))
    assert "chose 3 after 8 intervals, 204.0 ms, 2.0 % more than the best size, 9" in text
    assert "chunk 1 over blocking: 1.200; chosen over blocking: 1.471" in text and "369.1" in text
