"""Tests of runs whose configuration computes outputs again: the same losses; cost and memory as predicted."""

import json

import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.errors import UserError
from halograd.kernels import get_backend
from halograd.layers.strategy import Strategy
from halograd.lowering.operations import Transfer
from halograd.perfmodel.cost import NetworkModel, Pricing, count_step, simulate
from halograd.perfmodel.kernel_times import RooflineTimes
from halograd.perfmodel.machine import Machine
from halograd.training import build, load_config, train
from halograd.training.executor import Executor
from halograd.training.step_times import StepTimes
from halograd.training.timeline import Timeline
from tests.training.steps import NETWORKS, fill


@pytest.mark.ranks(1, 2)
def test_a_run_has_the_same_losses(config, shared):
    found = [
        train(config, [f"strategy.recompute={rule}", f"output.directory={shared / rule}"], comm=MPI.COMM_WORLD)
        for rule in ("none", "pointwise", "block")
    ]
    for one in found[1:]:
        assert (one["loss"], one["validation"]) == (found[0]["loss"], found[0]["validation"])


@pytest.mark.ranks(2)
def test_a_run_that_exchanges_halos_again_has_the_same_losses(config, shared):
    found = {}
    for halo in ("keep", "exchange"):
        changes = ["strategy.width=2", "strategy.recompute=pointwise", f"strategy.recompute_halo={halo}"]
        found[halo] = train(config, [*changes, f"output.directory={shared / halo}"], comm=MPI.COMM_WORLD)
    assert found["keep"]["loss"] == found["exchange"]["loss"]
    lines = [json.loads((shared / halo / "log.jsonl").read_text().splitlines()[0])["config"] for halo in found]
    assert [line["strategy"]["recompute_halo"] for line in lines] == ["keep", "exchange"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("halo", ["keep", "exchange"])
def test_repeated_operations_use_what_they_declare(halo):
    network = NETWORKS["unet"]()
    strategy = Strategy({"width": 2}, options={"recompute": "pointwise", "recompute_halo": halo})
    with Communicator(MPI.COMM_WORLD) as comm, Executor(
        network, comm, get_backend("numpy"), 4, strategy, "float64", debug=True
    ) as executor:
        repeated = [o for segment in executor.program.backward if segment.again for o in segment.operations]
        assert any(isinstance(o, Transfer) for o in repeated) == (halo == "exchange")
        for step in range(2):
            fill(executor, step)
            executor.forward()
            executor.backward()
            executor.reducer.finish()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rule", ["pointwise", "block"])
def test_it_is_priced_counted_and_allocated(rule):
    machine = Machine.load("lassen")
    strategies = [Strategy({"height": 2}, options={"recompute": one}) for one in ("none", rule)]
    for name in ("mesh", "unet"):
        network = NETWORKS[name]()
        kept, again = (
            simulate(network, strategy, 4, Pricing(NetworkModel(machine), RooflineTimes(machine)), ranks=2)
            for strategy in strategies
        )
        pairs = list(zip(kept.layers, again.layers, strict=True))
        for term in ("forward", "backward", "halo", "halo_exposed"):
            assert all(getattr(a, term) == pytest.approx(getattr(b, term)) for a, b in pairs), "repetition is apart"
        assert not kept.total("again")
        if rule == "pointwise":  # with all layers of these networks again, the arena would not be smaller
            assert again.step_seconds - kept.step_seconds == pytest.approx(again.total("again"), rel=0.01)
            assert kept.step_seconds < again.step_seconds
        counts = [count_step(network, strategy, 4, 2) for strategy in strategies]
        assert repr(counts[0]) == repr(counts[1])
        with Communicator(MPI.COMM_WORLD) as comm, Executor(
            network, comm, get_backend("numpy"), 4, strategies[1], "float32"
        ) as executor:
            assert executor.program.placement.size == len(executor.runner.arena)


def test_boundary_strips_that_are_repeated_are_not_part_of_the_forward_pass():
    machine, network = Machine.load("lassen"), NETWORKS["mesh"]()
    first = next(name for name in network.layers if name.startswith("conv"))
    kept, again = (
        simulate(network, Strategy({"height": 4}, layers, {"halo": "overlap"}), 4, pricing, ranks=4)
        for layers in ({}, {first: {"recompute": "block"}})
        for pricing in [Pricing(NetworkModel(machine), RooflineTimes(machine))]
    )
    pairs = list(zip(kept.layers, again.layers, strict=True))
    assert all(a.forward == pytest.approx(b.forward) for a, b in pairs)
    assert [b.name for _, b in pairs if b.again] == [first]


def test_times_of_repeated_operations_are_recorded_apart():
    timeline = Timeline()
    with Communicator(MPI.COMM_SELF) as comm:
        comm.instruments.recorder = timeline
        strategy = Strategy({}, options={"recompute": "pointwise"})
        with Executor(NETWORKS["mesh"](), comm, get_backend("numpy"), 4, strategy) as executor:
            times = StepTimes(executor, timeline, 0, 1)
            fill(executor, 0)
            times.begin(0)
            executor.forward()
            executor.backward()
            times.end(0, 1.0, 0.0)
            repeated = {segment.name for segment in executor.program.backward if segment.again}
    spans = {name for name, category in timeline.phases if category == "again"}
    assert repeated and spans == repeated and "again" in timeline.table()
    assert timeline.summary()["again"]["seconds"] == pytest.approx(timeline.seconds("again"))
    layers = times.result().layers
    assert {f"{name} (again)" for name, (*_, again) in layers.items() if again} == repeated
    assert sum(again for *_, again in layers.values()) == pytest.approx(timeline.seconds("again"))


@pytest.mark.ranks(1, 2)
def test_a_network_that_does_not_fit_names_the_rule_with_which_it_fits(config, monkeypatch):
    """The message is the same on all ranks, and the run that it proposes is trained."""

    def needed(rule, limit=1):
        found = []
        monkeypatch.setattr(build, "bytes_text", lambda n: found.append(n) or str(n))
        monkeypatch.setattr(build, "memory_size", lambda ranks: limit)
        with pytest.raises(UserError, match=f"within the {limit} of memory of a node") as caught:
            train(config, [f"strategy.recompute={rule}"], comm=MPI.COMM_WORLD)
        assert limit > 1 or "strategy.recompute" not in str(caught.value), "one byte is enough for no rule"
        return found[1]

    kept, again = needed("none"), needed("pointwise")
    assert again < kept
    workspaces = needed("none", kept) - kept  # known when the kernels are made
    assert workspaces > 0
    monkeypatch.setattr(build, "memory_size", lambda ranks: (kept + again) // 2 + workspaces)
    with pytest.raises(UserError, match=r"; set strategy.recompute = .pointwise."):
        train(config, comm=MPI.COMM_WORLD)
    assert train(config, ["strategy.recompute=pointwise"], comm=MPI.COMM_WORLD)["steps"] > 0


@pytest.mark.ranks(1, 2)
def test_a_run_computes_again_as_little_as_fits(config, shared):
    """With ``recompute = "auto"`` and a limit, the losses are those of a run that keeps everything."""
    comm, loaded = MPI.COMM_WORLD, load_config(config)
    with Communicator(comm) as ranks:
        network = build.make_network(loaded)
        strategy = build.make_strategy(loaded.strategy, comm.size, network, loaded.training.at_once)
        own = build.needs_of(loaded, ranks, network, strategy, True, None)
    needed, arena = max(comm.allgather(sum(own.values()))), own["transient"]
    found = {
        memory: train(
            config,
            ["strategy.recompute=auto", f"strategy.memory={memory} B", f"output.directory={shared / str(memory)}"],
            comm=comm,
        )
        for memory in (needed, needed - arena // 5)
    }
    assert found[needed]["loss"] == found[needed - arena // 5]["loss"]
    begun = {memory: json.loads((shared / str(memory) / "log.jsonl").read_text().splitlines()[0]) for memory in found}
    assert [bool(begun[memory]["recomputed"]) for memory in found] == [False, True]
    with pytest.raises(UserError, match=r"strategy.recompute: .* within .*needs"):
        train(config, ["strategy.recompute=auto", f"strategy.memory={needed - arena} B"], comm=comm)
