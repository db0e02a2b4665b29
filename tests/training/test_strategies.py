"""Tests that training under all cuts of samples, space, channels and single layers has the losses of one process."""

import functools
import math

import numpy as np
import pytest
from mpi4py import MPI

from halograd.cli.explaining import Explainer, _plan_request
from halograd.comm import Communicator
from halograd.errors import UserError
from halograd.kernels import get_backend
from halograd.layers import Add, Conv, Input, MeanSquaredError, Network
from halograd.layers.strategy import Strategy
from halograd.lowering.operations import Run, Transfer
from halograd.models import inception_v3, lenet5, mesh, resnet, unet, vgg_a
from halograd.perfmodel.plans import Plan
from halograd.perfmodel.small import suit_small_layers
from halograd.program.compiler import compile_program
from halograd.program.program import Target
from halograd.testing import random_array
from halograd.training import evaluate, load_config, train
from halograd.training import train as train_run
from halograd.training.build import fitting_cuts, make_network, make_strategy, other_cuts
from halograd.training.config import StrategyConfig
from halograd.training.evaluation import Evaluation
from halograd.training.executor import Executor
from halograd.training.log import read_log
from tests.layers.cuts import random_strategy
from tests.models.gated import gated
from tests.perfmodel.test_small import classifier
from tests.support.grids import grids_in_turn
from tests.training.runs import write_named, written
from tests.training.steps import BATCH, NETWORKS, RATE, bound, check_outcome, descend, fill, learned

STEPS = 3
#: Number of strategies by number of ranks; many layers make many exchanges, which take long to make on shared cores.
SHARES = {2: 12, 3: 10, 4: 8}
SHARES_OF_DEEP = {2: 4, 3: 3, 4: 2}

LAYERS_NETWORKS = {
    "mesh": lambda: mesh(resolution=(18, 14), channels=3, widths=(4, 6), convs=2, name="small mesh"),
    "mesh_decoder": lambda: mesh(resolution=16, channels=3, widths=(4, 6), convs=1, decoder=True, pos_weight=3.0),
    "resnet": lambda: resnet((1, 1), classes=5, resolution=24, width=4, name="small resnet"),
    "unet": lambda: unet((12, 16), channels=2, classes=3, width=4, levels=2, name="small unet"),
    "lenet": lambda: lenet5(classes=4, resolution=20),
    "vgg_a": lambda: vgg_a(classes=5, resolution=32, width=1 / 32),
    "inception_v3": lambda: inception_v3(classes=4, resolution=107, width=1 / 32),
    "gated": lambda: gated(12, 3, 4),
}
DEEP = ("inception_v3",)
#: Through 94 batch norms over a few numbers each, a rounding of the input grows 10^8-fold in three steps at the usual
#: rate, in one process as well. At this one it does not, and a wrong gradient would still show 10^6 times too large.
RATES = {"inception_v3": 1e-4}


@functools.cache
def layers_alone(name):
    """Return the outcome of one process."""
    with Communicator(MPI.COMM_SELF) as comm:
        found = descend(LAYERS_NETWORKS[name](), comm, Strategy(), steps=STEPS, rate=RATES.get(name, RATE))
    assert np.isfinite(found.losses).all()
    return found


def check_layers(name, comm, seed):
    network = LAYERS_NETWORKS[name]()
    strategy = random_strategy(network, comm.size, seed)
    found = descend(network, comm, strategy, steps=STEPS, rate=RATES.get(name, RATE))
    check_outcome(comm, found, layers_alone(name), bound(network, "float64", STEPS), f"{name}, strategy {seed}")


def seeds(name, size):
    """Return the seeds of the strategies to run on this number of ranks."""
    shares = SHARES_OF_DEEP if name in DEEP else SHARES
    first = sum(n for ranks, n in shares.items() if ranks < size)
    return range(first, first + shares[size])


def test_there_are_thirty_strategies_or_more_cuts_of_layers():
    layers = {name: len(make().layers) for name, make in LAYERS_NETWORKS.items()}
    for name in LAYERS_NETWORKS:
        drawn = [seed for size in (2, 3, 4) for seed in seeds(name, size)]
        assert drawn == list(range(len(drawn)))
        most = 30 * max(n for other, n in layers.items() if other not in DEEP)
        assert len(drawn) == 30 or len(drawn) * layers[name] > most


def test_strategies_cut_channels_and_leave_ranks_out():
    """The drawn strategies of every network on 4 ranks include cut channels and unused ranks."""
    for name, make in LAYERS_NETWORKS.items():
        network = make()
        drawn = [random_strategy(network, 4, seed) for seed in range(30)]
        for strategy in drawn:
            strategy.validate(network, 4)
        parts = [s.parts_of(layer) for s in drawn for layer in network.layers]
        for axis in ("sample", "height", "width", "channel"):
            assert sum(p[axis] > 1 for p in parts) > len(parts) / 20, (name, axis)
        # Only layers with a kernel over input channels are cut along them.
        contracts = [name for name, node in network.layers.items() if node.layer.cuts_channels == "contracts"]
        sums = [s.parts_of(layer) for s in drawn for layer in contracts]
        assert sum(p["input_channel"] > 1 for p in sums) > len(sums) / 20, name
        assert sum(math.prod(p.values()) < 4 for p in parts) > len(parts) / 10


def test_shares_in_a_configuration():
    strategy = make_strategy(StrategyConfig(height=(2, 1)), 4)
    assert strategy == Strategy({"sample": 2, "height": (2, 1)}, options={"halo": "auto"})
    with pytest.raises(UserError, match=r"2 spatial parts .* 3 ranks"):
        make_strategy(StrategyConfig(height=(2, 1)), 3)
    with pytest.raises(UserError, match=r"2:1 height x 3 sample .* 6 ranks, .* 4"):
        make_strategy(StrategyConfig(sample=3, height=(2, 1)), 4)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", LAYERS_NETWORKS)
def test_training_under_random_strategies(name):
    # Shared windows take long to make where ranks share cores.
    transport = "auto" if MPI.COMM_WORLD.size < 4 else "mpi"
    with Communicator(MPI.COMM_WORLD, transport) as comm:
        for seed in seeds(name, comm.size):
            check_layers(name, comm, seed)


@pytest.mark.ranks(2)
def test_operations_on_gradients_move_no_array():
    """The memory that is counted, predicted and shown is that which a run allocates."""
    with Communicator(MPI.COMM_WORLD) as comm:
        for seed in range(3):
            strategy = random_strategy(LAYERS_NETWORKS["unet"](), comm.size, seed)
            with Executor(LAYERS_NETWORKS["unet"](), comm, get_backend("numpy"), 4, strategy, "float64") as executor:
                held = len(executor.runner.arena)
                comm.agree(None if executor.program.placement.size == held else AssertionError(f"strategy {seed}"))
                uses = executor.program.placement.uses
                assert sum(uses.values()) == held


def metrics(comm, strategy):
    """Return the scores of one evaluated batch. Collective."""
    with Executor(gated(), comm, get_backend("numpy"), 4, strategy, "float64", seed=3) as executor:
        evaluation = Evaluation(executor)
        evaluation.begin()
        fill(executor, 0)
        executor.forward(training=False)
        evaluation.add()
        return evaluation.finish()


@pytest.mark.ranks(2, 3, 4)
def test_metrics_of_several_tasks_that_are_cut_otherwise_than_their_losses():
    """Metrics are right if losses and predictions have different cuts."""
    with Communicator(MPI.COMM_SELF) as alone:
        wanted = metrics(alone, Strategy())
    with Communicator(MPI.COMM_WORLD, "mpi") as comm:
        for seed in range(6):
            found = metrics(comm, random_strategy(gated(), comm.size, seed))
            wrong = found != pytest.approx(wanted, rel=1e-12)
            comm.agree(AssertionError(f"strategy {seed}: {found}, one process {wanted}") if wrong else None)


@pytest.mark.ranks(2, 3)
def test_a_run_that_follows_a_file(config):
    """`halograd train` follows a strategy file with the first layer on fewer ranks, and is resumed by one rank."""
    with Communicator(MPI.COMM_WORLD) as comm:
        folder = config.parent
        if comm.rank == 0:
            network = make_network(load_config(config))
            strategy = random_strategy(network, comm.size, 1)
            first = next(iter(network.layers))
            layers = {**strategy.layers, first: {"height": comm.size - 1}}
            Strategy(strategy.parts, layers).save(folder / "strategy.json")
        comm.barrier()
        common = ["training.clip_norm=0.5", "output.checkpoint_steps=5", "output.keep=9"]
        by_file = f"strategy={{file = '{folder / 'strategy.json'}'}}"
        train_run(config, [*common, by_file, f"output.directory={folder / 'cut'}"], comm=MPI.COMM_WORLD)
        if comm.rank == 0:
            alone = train_run(config, [*common, f"output.directory={folder / 'alone'}"], comm=MPI.COMM_SELF)
            judged = evaluate(folder / "cut", ["strategy={}"], comm=MPI.COMM_SELF)
            found, wanted = ([e["loss"] for e in read_log(folder / d / "log.jsonl", "step")] for d in ("cut", "alone"))
            assert found == pytest.approx(wanted, rel=1e-9) and len(wanted) == 9
            assert judged["loss"] == pytest.approx(alone["validation"]["loss"], rel=1e-9)


def test_cuts_that_fit():
    network = mesh(resolution=16, channels=3, widths=(4, 6), convs=1)
    wanted = {"height": 2, "width": 2}
    assert fitting_cuts(network, 2, 4, wanted)[0] in (
        {**dict.fromkeys(("sample", "depth", "width"), 1), "height": 2},
        {**dict.fromkeys(("sample", "depth", "height"), 1), "width": 2},
    )
    assert all(parts["sample"] <= 4 and parts["depth"] == 1 for parts in fitting_cuts(network, 24, 4, wanted))
    assert fitting_cuts(network, 17, 4, wanted) == []
    config = StrategyConfig(height=2, width=2)
    assert other_cuts(config, 17, network, 4) == "; for 17 ranks: `--set strategy=auto`"
    assert other_cuts(config, 1, network, 4) == (
        "; for 1 rank: `--set strategy.height=1 --set strategy.width=1` or `--set strategy=auto`"
    )
    assert other_cuts(config, 2, None, None) == ""


@functools.cache
def exact_alone(name, dtype, backend):
    """Return the outcome of one process."""
    with Communicator(MPI.COMM_SELF) as comm:
        return learned(descend(NETWORKS[name](), comm, Strategy(bucket_bytes=4096), dtype, backend))


def check_exact(turn, name, dtype, backend="numpy", **options):
    """Compare training under the cuts of samples, height and width of this turn with one process."""
    network, want = NETWORKS[name](), exact_alone(name, dtype, backend)
    with Communicator(MPI.COMM_WORLD) as comm:
        for parts in grids_in_turn(comm.size, ("sample", "height", "width"), turn):
            found = descend(network, comm, Strategy(parts, options=options, bucket_bytes=4096), dtype, backend)
            check_outcome(comm, found, want, bound(network, dtype), f"{name} under {parts}")


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", NETWORKS)
def test_losses_of_ten_steps_are_those_of_one_process(turn, name, dtype):
    check_exact(turn, name, dtype)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["mesh", "unet"])
def test_overlapped_halos_give_the_same_losses(turn, name):
    check_exact(turn, name, "float64", halo="overlap")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["mesh", "resnet"])
def test_onednn_gives_the_losses_of_one_process(turn, name):
    check_exact(turn, name, "float32", backend="onednn")


@pytest.mark.ranks(6)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", ["mesh", "resnet", "unet"])
def test_losses_on_grids_of_six_ranks(turn, name, dtype):
    check_exact(turn, name, dtype)


REDISTRIBUTION_BATCH = 2


def branches() -> Network:
    """Return a network with a left branch of two layers, cut along height, and a right one, cut along width."""
    x, target = Input((8, 8, 2), name="x"), Input((8, 8, 3), name="target")
    stem = Conv(3, 3, padding=1, name="stem")(x)
    left = Conv(3, 3, padding=1, name="left2")(Conv(3, 3, padding=1, name="left1")(stem))
    right = Conv(3, 3, padding=1, name="right")(stem)
    y = Add(name="add")(left, right)
    return Network({"prediction": y, "loss": MeanSquaredError(name="mse")(y, target)})


def build(comm, strategy):
    executor = Executor(
        branches(), comm, get_backend("numpy"), REDISTRIBUTION_BATCH, strategy, "float64", seed=1, probed=["x"]
    )
    for name, node in executor.network.inputs.items():
        executor.set_input(name, random_array((REDISTRIBUTION_BATCH, *node.shape), name))
    return executor


def test_redistributions_travel_behind_other_branches():
    strategy = Strategy({"height": 2}, {"right": {"height": 1, "width": 2}})
    program = compile_program(branches(), strategy, Target(REDISTRIBUTION_BATCH, 2, 0))
    moved = "stem->width=2"

    def order(segments):
        found = []
        for operation in (o for segment in segments for o in segment.operations):
            if isinstance(operation, Transfer) and operation.exchange.kind == "redistribute":
                found.append(f"{operation.layer} {operation.end}")
            elif isinstance(operation, Run):
                found.append(operation.layer)
        return found

    log = order(program.forward)
    start, end = log.index(f"{moved} start"), log.index(f"{moved} finish")
    assert log.index("stem") < start < log.index("left1") < log.index("left2") < end < log.index("right")
    # Backward: the right branch first, whose gradient travels while the left one computes.
    log = order(program.backward)
    start, end = log.index(f"{moved} start"), log.index(f"{moved} finish")
    assert log.index("right") < start < log.index("left1") < end < log.index("stem")


class Spans:
    def __init__(self):
        self.seen = []

    def span(self, name, category, t0, t1):
        self.seen.append((name, category))


@pytest.mark.ranks(2)
def test_both_parts_of_a_redistribution_are_timed():
    strategy, spans = Strategy({"height": 2}, {"right": {"height": 1, "width": 2}}), Spans()
    with Communicator(MPI.COMM_WORLD) as comm:
        comm.instruments.recorder = spans
        with build(comm, strategy) as executor:
            executor.forward()
            executor.loss_value()
        (moved,) = (step.name for step in executor.program.steps if step.name.startswith("stem->"))
    stem, left = (spans.seen.index((name, "forward")) for name in ("stem", "left1"))
    assert spans.seen.count((moved, "forward")) == 2 and stem < spans.seen.index((moved, "forward")) < left


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("transport", ["auto", "emulated:alpha=1e-4,beta=1e-9"])
def test_the_result_is_that_of_one_process(transport):
    with Communicator(MPI.COMM_SELF) as alone, build(alone, Strategy()) as executor:
        executor.forward()
        loss = executor.loss_value()
        executor.backward()
        executor.reducer.finish()
        expected = executor.gather("x", gradient=True)
    with Communicator(MPI.COMM_WORLD, transport) as comm:
        parts = {"height": comm.size}
        strategy = Strategy(parts, {"right": {"height": 1, "width": comm.size}, "left2": {"height": 1, "sample": 1}})
        with build(comm, strategy) as executor:
            for _ in range(2):  # both slots of the channels
                executor.forward()
                assert executor.loss_value() == pytest.approx(loss, rel=1e-12)
                executor.backward()
                executor.reducer.finish()
            found = executor.gather("x", gradient=True)
            if comm.rank == 0:
                np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-14)


NETWORK = """
from halograd.layers import BatchNorm, Conv, Dense, GlobalAveragePool, Input, Network, SoftmaxCrossEntropy

def build():
    y = Input((16, 16, 3), name="x")
    for i, width in enumerate((8, 64, 256, 256)):
        y = Conv(width, 3, 1 if i > 1 else 2, padding=1, bias=False, name=f"conv{i}")(y)
        y = BatchNorm(activation="relu", name=f"bn{i}")(y)
    y = Dense(10, name="dense")(GlobalAveragePool(name="pool")(y))
    loss = SoftmaxCrossEntropy(name="ce")(y, Input((1,), name="target", dtype="int32"))
    return Network({"prediction": y, "loss": loss})
"""
DATA = """inputs = "x"
targets = "label"
"""


@written
def small_layers(folder):
    draw = np.random.default_rng(3)
    arrays = {"x": draw.standard_normal((6, 16, 16, 3), np.float32), "label": draw.integers(0, 10, 6).astype(np.int32)}
    write_named(folder, NETWORK, DATA, arrays, x="NHWC")


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("turn", [0, 1])
def test_results_are_those_of_one_process(turn):
    with Communicator(MPI.COMM_WORLD) as comm, Communicator(MPI.COMM_SELF) as alone:
        network, ranks = classifier(), comm.size
        cuts = [{"height": ranks}, {"sample": 2, "height": 2} if ranks == 4 else {"width": ranks}]
        found = suit_small_layers(network, Strategy(cuts[turn]), BATCH, ranks)
        losses, want, _ = descend(classifier(), alone, Strategy(), steps=2)
        ours, params, places = descend(network, comm, found.strategy, steps=2)
        with comm.agreement():
            assert found.layers
            np.testing.assert_allclose(ours, losses, rtol=1e-9)
            for key, array in params.items():
                np.testing.assert_allclose(array, want[key][places[key]], rtol=0, atol=1e-9, err_msg=key)


@pytest.mark.ranks(2)
def test_a_run(small_layers, shared):
    found = {}
    for small in ("auto", "keep"):
        changes = ["training.epochs=1", "strategy.height=2", f"strategy.small={small}"]
        found[small] = train(small_layers, [*changes, f"output.directory={shared / small}"], comm=MPI.COMM_WORLD)
    assert found["auto"]["loss"] == pytest.approx(found["keep"]["loss"], rel=1e-9)
    begin = {small: read_log(shared / small / "log.jsonl", "begin")[0] for small in found}
    assert begin["keep"]["small_layers"] == {} and not (shared / "keep" / "small.json").exists()
    layers = begin["auto"]["small_layers"]
    assert layers["conv3"] in ("2 channel", "2 input_channel") and "conv0" not in layers
    plan = Plan.load(shared / "auto" / "small.json")
    assert {name for name, own in plan.strategy.layers.items() if own} == set(layers)
    if MPI.COMM_WORLD.rank == 0:
        explainer = Explainer(plan, _plan_request(plan, shared / "auto" / "small.json", None))
        assert explainer.chosen.step_seconds == pytest.approx(plan.step_seconds, rel=0.02)
        assert any(line.startswith("conv3") for line in explainer.text(["conv3"], False))
