"""Tests of runs whose configuration computes outputs again: the same losses; cost and memory as predicted."""

import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.errors import UserError
from halograd.kernels import get_backend
from halograd.layers.strategy import Strategy
from halograd.perfmodel.cost import Pricing, Wires, count_step, simulate
from halograd.perfmodel.kernel_times import RooflineTimes
from halograd.perfmodel.machine import Machine
from halograd.training import build, train
from halograd.training.executor import Executor
from tests.training.steps import NETWORKS


@pytest.mark.ranks(1, 2)
def test_a_run_has_the_same_losses(config, shared):
    found = [
        train(config, [f"strategy.recompute={rule}", f"output.directory={shared / rule}"], comm=MPI.COMM_WORLD)
        for rule in ("none", "pointwise", "block")
    ]
    for one in found[1:]:
        assert (one["loss"], one["validation"]) == (found[0]["loss"], found[0]["validation"])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rule", ["pointwise", "block"])
def test_it_is_priced_counted_and_allocated(rule):
    machine = Machine.load("lassen")
    strategies = [Strategy({"height": 2}, options={"recompute": one}) for one in ("none", rule)]
    for name in ("mesh", "unet"):
        network = NETWORKS[name]()
        kept, again = (
            simulate(network, strategy, 4, Pricing(Wires(machine), RooflineTimes(machine)), ranks=2)
            for strategy in strategies
        )
        pairs = list(zip(kept.layers, again.layers, strict=True))
        assert all(a.forward == pytest.approx(b.forward) for a, b in pairs), "repeated kernels are in the backward pass"
        if rule == "pointwise":  # with all layers of these networks again, the arena would not be smaller
            assert sum(b.backward for _, b in pairs) > sum(a.backward for a, _ in pairs)
            assert kept.step_seconds < again.step_seconds
        counts = [count_step(network, strategy, 4, 2) for strategy in strategies]
        assert repr(counts[0]) == repr(counts[1])
        with Communicator(MPI.COMM_WORLD) as comm, Executor(
            network, comm, get_backend("numpy"), 4, strategies[1], "float32"
        ) as executor:
            assert executor.program.placement.size == len(executor.runner.arena)


@pytest.mark.ranks(1, 2)
def test_a_network_that_does_not_fit_names_the_rule_with_which_it_fits(config, monkeypatch):
    """The message is the same on all ranks, and the run that it proposes is trained."""

    def needed(rule):
        found = []
        monkeypatch.setattr(build, "bytes_text", lambda n: found.append(n) or str(n))
        monkeypatch.setattr(build, "memory_size", lambda ranks: 1)
        with pytest.raises(UserError, match="within the 1 of memory of a node") as caught:
            train(config, [f"strategy.recompute={rule}"], comm=MPI.COMM_WORLD)
        assert "strategy.recompute" not in str(caught.value), "one byte is enough for no rule"
        return found[1]

    kept, again = needed("none"), needed("pointwise")
    assert again < kept
    monkeypatch.setattr(build, "memory_size", lambda ranks: (kept + again) // 2)
    with pytest.raises(UserError, match=r"; set strategy.recompute = .pointwise., with which it fits, or use"):
        train(config, comm=MPI.COMM_WORLD)
    assert train(config, ["strategy.recompute=pointwise"], comm=MPI.COMM_WORLD)["steps"] > 0
