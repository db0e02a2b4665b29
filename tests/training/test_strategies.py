"""Tests that training with separate cuts per layer, also of channels and on fewer ranks, has the losses of one process.

Thirty random strategies per network are divided over 2, 3 and 4 ranks: most where a run takes least. A network of
many layers has fewer strategies, which cut more of them.
"""

import functools
import math

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.errors import UserError
from halograd.kernels import get_backend
from halograd.layers.strategy import Strategy
from halograd.models import inception_v3, lenet5, mesh, resnet, unet, vgg_a
from halograd.training import evaluate, load_config
from halograd.training import train as train_run
from halograd.training.build import fitting_cuts, make_network, make_strategy, other_cuts
from halograd.training.config import StrategyConfig
from halograd.training.evaluation import Evaluation
from halograd.training.executor import Executor
from halograd.training.log import read_log
from tests.layers.cuts import random_strategy
from tests.models.gated import gated
from tests.training.steps import RATE, bound, check_outcome, descend, fill

STEPS = 3
#: Number of strategies by number of ranks; many layers make many exchanges, which take long to make on shared cores.
SHARES = {2: 12, 3: 10, 4: 8}
SHARES_OF_DEEP = {2: 4, 3: 3, 4: 2}

NETWORKS = {
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
def alone(name):
    """Return the outcome of one process."""
    with Communicator(MPI.COMM_SELF) as comm:
        found = descend(NETWORKS[name](), comm, Strategy(), steps=STEPS, rate=RATES.get(name, RATE))
    assert np.isfinite(found.losses).all()
    return found


def check(name, comm, seed):
    network = NETWORKS[name]()
    strategy = random_strategy(network, comm.size, seed)
    found = descend(network, comm, strategy, steps=STEPS, rate=RATES.get(name, RATE))
    check_outcome(comm, found, alone(name), bound(network, "float64", STEPS), f"{name}, strategy {seed}")


def seeds(name, size):
    """Return the seeds of the strategies to run on this number of ranks."""
    shares = SHARES_OF_DEEP if name in DEEP else SHARES
    first = sum(n for ranks, n in shares.items() if ranks < size)
    return range(first, first + shares[size])


def test_there_are_thirty_strategies_or_more_cuts_of_layers():
    layers = {name: len(make().layers) for name, make in NETWORKS.items()}
    for name in NETWORKS:
        drawn = [seed for size in (2, 3, 4) for seed in seeds(name, size)]
        assert drawn == list(range(len(drawn)))
        most = 30 * max(n for other, n in layers.items() if other not in DEEP)
        assert len(drawn) == 30 or len(drawn) * layers[name] > most


def test_strategies_cut_channels_and_leave_ranks_out():
    """The drawn strategies of every network on 4 ranks include cut channels and unused ranks."""
    for name, make in NETWORKS.items():
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
@pytest.mark.parametrize("name", NETWORKS)
def test_training_under_random_strategies(name):
    # Shared windows take long to make where ranks share cores.
    transport = "auto" if MPI.COMM_WORLD.size < 4 else "mpi"
    with Communicator(MPI.COMM_WORLD, transport) as comm:
        for seed in seeds(name, comm.size):
            check(name, comm, seed)


@pytest.mark.ranks(2)
def test_operations_on_gradients_move_no_array():
    """The memory that is counted, predicted and shown is that which a run allocates."""
    with Communicator(MPI.COMM_WORLD) as comm:
        for seed in range(3):
            strategy = random_strategy(NETWORKS["unet"](), comm.size, seed)
            with Executor(NETWORKS["unet"](), comm, get_backend("numpy"), 4, strategy, "float64") as executor:
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
