"""Tests of simulation and plans: sums of parts, memory limits, baselines, files and rejected files."""

import math

import numpy as np
import pytest

from halograd.device import as_dtype
from halograd.errors import UserError
from halograd.kernels import BACKENDS, get_backend
from halograd.layers import Strategy
from halograd.layers.reduction_scheme import Scheme
from halograd.layers.strategy import parameter_blocks
from halograd.models import build, lenet5, mesh, resnet, unet
from halograd.perfmodel import predict
from halograd.perfmodel.cost import NetworkModel, Pricing, Training, simulate
from halograd.perfmodel.cost import network_costs as problem_module
from halograd.perfmodel.cost.account import memory_of, program_of
from halograd.perfmodel.cost.network_costs import network_costs
from halograd.perfmodel.cost.simulate import Simulation
from halograd.perfmodel.cuts import BASELINES, baseline
from halograd.perfmodel.kernel_times import RooflineTimes
from halograd.perfmodel.machine import Machine
from halograd.perfmodel.plan_candidates import planned_schemes
from halograd.perfmodel.planners import PLANNERS
from halograd.perfmodel.plans import Plan
from halograd.perfmodel.predict import Planning, plan_network
from halograd.program.compiler import compile_program
from halograd.program.program import Target
from halograd.program.traffic import messages_of
from halograd.training.memory import Memory
from halograd.training.store import ParameterStore
from tests.layers.cuts import random_strategy
from tests.models.gated import gated
from tests.perfmodel.counted import CASES
from tests.perfmodel.pricing import priced

LASSEN = Machine.load("lassen")
SLOW = LASSEN.emulated(2e-4, 1e-9)
NETWORKS = {
    "mesh": lambda: mesh(resolution=256, widths=(16, 32), convs=2),
    "resnet": lambda: resnet((1, 1), classes=10, resolution=64, width=16),
    "unet": lambda: unet((64, 64), width=8, levels=2),
    "lenet": lenet5,
    "gated": lambda: gated(32, 20, 16),
}


def times(machine=LASSEN):
    return RooflineTimes(machine)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("machine", [LASSEN, SLOW], ids=["lassen", "slow network"])
def test_a_step_is_the_sum_of_its_layers(name, machine):
    network = NETWORKS[name]()
    for which in BASELINES:
        found = simulate(network, baseline(which, network, 8, 8), 8, priced(machine), ranks=8)
        assert found.step_seconds == pytest.approx(
            found.forward_seconds + found.backward_seconds + found.allreduce_exposed + found.update_seconds
        )
        layers = sum(record.seconds for record in found.layers)
        assert layers == pytest.approx(found.step_seconds - found.update_seconds)
        assert found.total("allreduce") == pytest.approx(found.allreduce_seconds)
        assert found.total("halo_exposed") <= found.total("halo") + 1e-15
        assert [record.name for record in found.layers] == list(network.layers)


@pytest.mark.parametrize("name", NETWORKS)
def test_messages_of_records_are_those_of_operations(name):
    """Simulated messages per layer are those of the operations of the rank that sends most."""
    network = NETWORKS[name]()
    cuts = [baseline(which, network, 8, 8) for which in BASELINES]
    for strategy in [*cuts, *(random_strategy(network, 8, seed) for seed in range(3))]:
        found = simulate(network, strategy, 8, priced(LASSEN), ranks=8)
        program = program_of(network, strategy, Target(8, 8))
        sent = np.zeros((2, len(program.steps), 8), int)
        places = {step.name: k for k, step in enumerate(program.steps)}
        layers = [(layer, item) for layer, item in messages_of(program) if layer is not None]
        for layer, item in layers:
            one = item.sent(8)
            sent[:, places[layer]] += one.messages, one.bytes
        assert found.sender == sent[1].sum(axis=0).argmax()
        ends = [places[record.name] + 1 for record in found.layers]
        want = [sent[:, a:b, found.sender].sum(axis=1).tolist() for a, b in zip([0, *ends], ends)]
        assert [[record.messages, record.sent] for record in found.layers] == want
        kinds = {item.kind for _, item in layers} & found.traffic.keys() - {"loss"}
        assert all(found.total("sent") >= found.traffic[kind][1] > 0 for kind in kinds)
        for record in found.layers:
            output = program.values[record.name]
            assert record.output == output.layout.boxes.fullest * output.dtype.itemsize
    assert found.total("sent") > 0, "otherwise this shows nothing"


def memory_of_every_rank(made):
    """Return the memory of each rank [B]."""
    what = made.blocks, made.training.slots, made.pricing.network_model.per_node
    return [sum(memory_of(made._program(rank), *what).values()) for rank in range(made.ranks)]


@pytest.mark.parametrize("name", NETWORKS)
def test_memory_is_that_of_the_fullest_rank(name):
    """Simulated memory is that of the rank with most: for any cut of few ranks, and one cut of all layers on many."""
    network = NETWORKS[name]()
    cuts = [(random_strategy(network, 4, seed), 4) for seed in range(3)]
    if name != "lenet":
        cuts.append((Strategy({"height": 4, "width": 4}), 16))
    for strategy, ranks in cuts:
        made = Simulation(network, strategy, 4, priced(LASSEN), Training(), ranks)
        found, most = sum(made.memory.values()), max(memory_of_every_rank(made))
        assert found == most or (name == "gated" and ranks > 4 and 0.9 * most <= found <= most)


@pytest.mark.parametrize("name", NETWORKS)
def test_all_kernels_of_a_layer_are_priced(name):
    """The simulated time of a layer on one rank includes all its kernels, also the mask of a ReLU."""
    network = NETWORKS[name]()
    made = Simulation(network, Strategy(), 2, priced(LASSEN), Training())
    program = compile_program(network, Strategy(), Target(2))
    trained = {segment.name for segment in program.backward}
    for step in program.steps:
        if step.layer.kind in (
            "Flatten",
            "Reshape",
            "Pad",
            "ChannelPad",
            "Slice",
        ):  # no kernel on one rank; copies of what they show only
            continue
        gradient = any(value.trainable for value in step.inputs)
        shapes = [value.layout.shape for value in step.inputs]
        alone = times().time(step.layer, shapes, "float32", step.name in trained, input_gradient=gradient)
        terms = made.costs[step.name].terms
        kernels = sum(terms.get(phase, 0.0) for phase in ("forward", "boundary", "backward_data", "backward_filter"))
        assert kernels >= alone.total * (1 - 1e-9), step.name


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("which", BASELINES)
@pytest.mark.parametrize("ranks", [1, 3, 4, 16])
def test_baselines_are_legal(name, which, ranks):
    network = NETWORKS[name]()
    strategy = baseline(which, network, 6, ranks)
    assert strategy.ranks <= ranks
    strategy.validate(network, strategy.ranks)


def test_what_baselines_are():
    network = build("alexnet")
    data, owt = (baseline(name, network, 64, 4) for name in ("data", "owt"))
    assert all(data.parts_of(name)["sample"] == 4 for name in network.layers)
    dense = [name for name, node in network.layers.items() if node.layer.kind == "Dense"]
    assert all(owt.parts_of(name)["channel"] == 4 for name in dense)
    assert owt.parts_of("conv1")["sample"] == 4
    assert baseline("model", network, 64, 4).parts_of("conv2")["channel"] == 4
    spatial = baseline("spatial", mesh(resolution=64), 2, 4).parts_of("conv1_1")
    assert (spatial["height"], spatial["width"], spatial["sample"]) == (2, 2, 1)
    with pytest.raises(UserError, match=r"baseline: expected .*data, spatial, model, owt.*, got 'best'"):
        baseline("best", network, 64, 4)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("ranks", [1, 2, 4, 6])
def test_a_plan_is_never_slower_than_a_baseline_and_is_legal(name, ranks):
    network = NETWORKS[name]()
    plan = plan_network(network, 8, ranks, SLOW, times(SLOW))
    plan.strategy.validate(network, plan.strategy.ranks)
    assert plan.strategy.ranks <= ranks
    assert all(plan.step_seconds <= other.step_seconds for other in plan.alternatives if other.fits)
    again = simulate(network, plan.strategy, 8, priced(SLOW), ranks=ranks)
    assert again.step_seconds == pytest.approx(plan.step_seconds)


def test_a_descent_from_the_best_grid_finds_faster_plans(monkeypatch):
    network, machine = build("mesh_1k", resolution=512), Machine.load("p100-cluster")
    arguments = (network, 4, 64, machine, RooflineTimes(machine))
    near_grid = predict.StrategySearch(*arguments, Planning()).best().seconds
    monkeypatch.setattr(predict, "NEAR_GRID", 0)
    assert near_grid < 0.98 * predict.StrategySearch(*arguments, Planning()).best().seconds


def test_additive_costs_are_those_of_simulation_where_nothing_overlaps():
    """Without overlap, the simulated step of a chain takes at most 2 % longer than a planner's additive costs."""
    network, training = mesh(resolution=128, widths=(8, 16), convs=2), Training(barrier=True)
    costs = network_costs(network, 4, 4, priced(SLOW, quick=True), training, bucket_bytes=1)
    choice = PLANNERS["elimination"]().plan(costs.problem(1.0))
    pricing = Pricing(NetworkModel(SLOW), times(SLOW), best_halo=True)
    strategy = costs.strategy(choice.indices, 1)
    found = simulate(network, strategy, 4, pricing, training, 4)
    plain = found.forward_seconds + found.backward_seconds + found.update_seconds
    assert plain <= choice.seconds * 1.02
    assert costs.indices(strategy) == list(choice.indices)


def test_a_memory_limit_is_kept_or_refused_with_what_is_missing():
    network = mesh(resolution=512, widths=(16, 32), convs=2)
    free = plan_network(network, 8, 4, SLOW, times(SLOW))
    least = min([free.prediction.memory_bytes, *(a.memory_bytes for a in free.alternatives)])
    limit = (least + free.prediction.memory_bytes) / 2 if least < free.prediction.memory_bytes else least
    tight = plan_network(network, 8, 4, SLOW, times(SLOW), Planning(limit=limit))
    assert tight.prediction.memory_bytes <= limit
    message = r"plan: expected a strategy within 1 MiB per rank, .* too much; use more ranks"
    with pytest.raises(UserError, match=message):
        plan_network(network, 8, 4, SLOW, times(SLOW), Planning(limit=2**20))


def test_planners_by_name():
    network = lenet5()
    found = {name: plan_network(network, 32, 4, SLOW, times(SLOW), Planning(name)) for name in ("elimination", "data")}
    assert found["data"].planner == "data" and found["elimination"].step_seconds <= found["data"].step_seconds
    line = plan_network(network, 32, 4, SLOW, times(SLOW), Planning("shortest_path"))
    assert line.step_seconds == pytest.approx(found["elimination"].step_seconds)
    with pytest.raises(UserError, match=r"planner: expected .*elimination.*owt, grid, .* got 'luck'"):
        plan_network(network, 32, 4, SLOW, times(SLOW), Planning("luck"))


def test_plans_are_files_for_one_network_batch_and_number_of_ranks(tmp_path):
    network = NETWORKS["unet"]()
    plan = plan_network(network, 4, 4, SLOW, times(SLOW))
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan
    again.check(network, 4, 4)
    with pytest.raises(UserError, match=r"plan: expected network 'unet' .* got 'lenet5'"):
        again.check(lenet5(), 4)
    with pytest.raises(UserError, match="plan: expected 4 ranks, which it was made for, got 8; start 4 ranks"):
        again.check(network, 8)
    with pytest.raises(UserError, match="plan: expected a batch of 4 samples, which it was made for, got 5"):
        again.check(network, 4, 5)
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(
        UserError, match=r"plan.json: expected a file of `halograd plan -o`, got JSON with nothing; run"
    ):
        Plan.load(tmp_path / "plan.json")


def test_strategies_are_predicted_for_more_ranks_than_they_use():
    network = NETWORKS["mesh"]()
    few, many = (simulate(network, Strategy({"sample": 2}), 8, priced(SLOW), ranks=n) for n in (2, 8))
    assert few.step_seconds == many.step_seconds and many.ranks == 8


@pytest.mark.parametrize("name", ["lenet5", "alexnet", "vgg16", "resnet50", "inception_v3"])
def test_problems_are_small_and_nothing_is_priced_twice(name, monkeypatch):
    """Planning problems have few candidates; equal layers share costs, and pairs of layers tables."""
    network, layers, tables = build(name), [], []
    price_layer, edge_seconds = problem_module.price_layer, problem_module.edge_seconds

    def price(step, forward, backward, pricing):
        flags = [(value.read, value.trainable, value.dtype) for value in step.inputs]
        layers.append(repr((pricing.signature(step), flags, bool(backward), sorted(step.parts.items()))))
        return price_layer(step, forward, backward, pricing)

    def tabulate(shape, makers, readers, *more):
        tables.append((shape, makers, readers))
        return edge_seconds(shape, makers, readers, *more)

    monkeypatch.setattr(problem_module, "price_layer", price)
    monkeypatch.setattr(problem_module, "edge_seconds", tabulate)
    problem = network_costs(network, 2048, 64, priced(LASSEN, quick=True)).problem()
    assert len(layers) == len(set(layers)) and len(tables) == len(set(map(repr, tables)))
    assert max(len(t) for t in problem.times) < 100
    assert all(math.isfinite(float(t.min())) for t in problem.times)
    assert problem.names == tuple(network.layers)


def test_the_scheme_of_gradient_reduction_is_part_of_the_plan(tmp_path):
    """A plan for VGG-A on many nodes includes the sharded reduction scheme, and so does its file."""
    network, machine = build("vgg_a"), Machine.load("cori-haswell")
    planning = Planning("data", bucket_bytes=4 << 20)
    plan = plan_network(network, 256, 128, machine, times(machine), planning)
    scheme = plan.strategy.reduction
    assert scheme.name == "sharded"
    plain = Strategy({"sample": 128}, bucket_bytes=4 << 20)
    assert plan.step_seconds < 0.99 * simulate(network, plain, 256, priced(machine)).step_seconds
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").strategy.reduction == scheme


def test_schemes_that_a_run_cannot_have_are_not_planned():
    """Planned schemes exclude hierarchical ones if a node has one device, and explicitly excluded ones."""
    lenet, eight = build("lenet5"), Strategy({"sample": 8})
    names = [
        {s.name for s in planned_schemes(lenet, eight, 64, machine, without)}
        for machine, without in ((LASSEN, ()), (LASSEN, {"sharded"}), (Machine.load("cori-haswell"), ()))
    ]
    assert names[0] - names[1] == {"sharded"} and names[0] - names[2] == {"hierarchical", "host_accumulate"}
    assert {"bucketed", "two_chunks", "per_layer"} <= names[1]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_memory_of_parameters_is_that_of_the_store(name, dtype):
    """Predicted memory of parameters equals that of the store, with copies and gradients in 16 bits."""
    network, strategy = CASES[name](), Strategy()
    blocks = parameter_blocks(network, strategy, 1)
    store = ParameterStore(network, Memory(get_backend("numpy")), as_dtype(dtype), blocks=blocks)
    found = memory_of(program_of(network, strategy, Target(4, dtype=as_dtype(dtype)), blocks), blocks)
    for use in ("parameter", "parameter gradient"):
        assert found[use] == store.memory.bytes[use] > 0, use


def test_machines_say_whether_gradients_are_rounded():
    """Plans count gradients in 16 bits as the backends do: on GPUs, not on processors."""
    network, found = lenet5(classes=4, resolution=28), []
    for machine, backend in ((Machine.load("dgx-h100"), "cudnn"), (Machine.load("cpu-core"), "onednn")):
        assert machine.rounds_gradients == BACKENDS[backend].rounds_gradients
        assert Machine.parse(machine.to_toml()) == machine
        pricing = Pricing(NetworkModel(machine), RooflineTimes(machine), "bfloat16")
        found.append(Simulation(network, Strategy(), 4, pricing, Training("bfloat16")).memory["parameter gradient"])
    store = ParameterStore(
        network, Memory(get_backend("numpy")), as_dtype("bfloat16"), blocks=parameter_blocks(network, Strategy(), 1)
    )
    assert found[0] == store.memory.bytes["parameter gradient"] > found[1]


@pytest.mark.parametrize("scheme", ["bucketed", "sharded"])
def test_clipping_waits_for_all_sums(scheme):
    """Clipping makes the update wait for all sums; only ranks with shards of gradients send a message for the norm."""
    network = lenet5(classes=4, resolution=28)
    strategy = Strategy({"sample": 8}, bucket_bytes=4096, reduction=Scheme(scheme))
    plain, clipped = (simulate(network, strategy, 8, priced(LASSEN), Training(clips=clips)) for clips in (False, True))
    assert clipped.step_seconds > plain.step_seconds and clipped.update_seconds == plain.update_seconds
    assert clipped.traffic == plain.traffic | ({"norm": (1, 8)} if scheme == "sharded" else {})


def test_memory_under_another_scheme_is_that_of_a_simulation_of_its_own():
    """Memory after `with_reduction` equals that of a new simulation, in any order of schemes."""
    network, plain = lenet5(classes=4, resolution=28), Strategy({"sample": 4}, bucket_bytes=4096)
    schemes = [Scheme(), Scheme("auto"), Scheme("sharded"), Scheme("host_accumulate", replicated_dense=1)]
    made = Simulation(network, plain, 4, priced(LASSEN), Training())
    for scheme in (*schemes, *reversed(schemes)):
        alone = Simulation(network, plain.with_reduction(scheme, 4096), 4, priced(LASSEN), Training())
        assert made.with_reduction(scheme, 4096).memory == alone.memory, scheme
