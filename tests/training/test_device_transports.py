"""Tests of training steps with messages and sums by NCCL: exact, ordered, without waits of the host."""

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.kernels.numpy import NumpyBackend
from halograd.layers.strategy import Strategy
from halograd.training.executor import Executor
from halograd.training.optimizers import SGD
from halograd.training.schedules import Constant
from halograd.training.trainer import Trainer
from tests.support.gpu_ranks import gpu_ranks
from tests.training.device_steps import NETWORKS, STEPS, assert_near, own_layer, train
from tests.training.steps import advance, fill

CUTS = {2: {"mesh": {"height": 2}, "resnet": {"sample": 2}}, 4: {"mesh": {"height": 2, "width": 2}}}
SCHEMES = {
    "bucketed": {},
    "overlap": {"options": {"halo": "overlap"}},
    "repeated": {"options": {"recompute": "pointwise", "recompute_halo": "exchange"}},
    "sharded": {"reduction": {"name": "sharded"}},
    "ordered": {"reduction": {"deterministic": True}},
}


def compare(monkeypatch, transport, name, scheme=None, **options):
    """Compare training on the host with training on doubles; return the device counts and the kinds of NCCL calls."""
    network, reduction = NETWORKS[name](), SCHEMES[scheme or "bucketed"]
    size = MPI.COMM_WORLD.size
    with Communicator(MPI.COMM_WORLD) as comm:
        wanted = {key: value for key, value in options.items() if key != "graph"}
        expected, params, _ = train(network, comm, NumpyBackend(), CUTS[size][name], reduction=reduction, **wanted)
    with gpu_ranks(monkeypatch, transport) as r:
        found, ours, counts = train(network, r.comm, r.kernels, CUTS[size][name], reduction=reduction, **options)
        waits = [e.name for e in r.device.trace.entries if e.kind == "host wait"]
        kinds = {c[1] for e in r.device.trace.entries if e.nccl is not None for c in e.nccl[2]}
    assert_near(found, ours, expected, params, 1000 * np.finfo("float64").eps)
    assert counts["syncs"] == 0
    steps = options.get("steps", STEPS)
    assert counts["waits"] == (steps - 1) + (steps - 2), "the loss of the step before; numbers sent two steps ago"
    assert counts["idled"] == 0, "nothing was enqueued behind what was waited for"
    return waits, kinds


@pytest.mark.ranks(2, 4)
def test_steps_over_nccl_never_wait_but_for_the_loss_of_the_step_before(monkeypatch):
    _, kinds = compare(monkeypatch, "nccl", "mesh")
    assert {"allReduce", "send", "recv"} <= kinds


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("scheme", ["bucketed", "overlap", "repeated"])
def test_graphs_with_messages(scheme, monkeypatch):
    """Training by graphs that contain messages, in one order on all ranks, is exact."""
    compare(monkeypatch, "nccl", "mesh", scheme, graph=True, steps=6)


@pytest.mark.ranks(2)
def test_a_pass_over_nccl_is_one_graph_but_for_what_a_custom_layer_does(monkeypatch):
    with gpu_ranks(monkeypatch, "nccl") as r:
        for network, graphs in ((NETWORKS["mesh"](), (1, 1)), (own_layer(), (2, 2))):
            with Executor(network, r.comm, r.kernels, 4, Strategy({"height": 2}), "float64", graph=True) as executor:
                trainer = Trainer(executor, SGD(executor.store), Constant(0.0))
                advance(trainer, range(4))
                trainer.synchronize()
                assert tuple(graphed.graphs for graphed in executor.graphs) == graphs


@pytest.mark.ranks(2)
@pytest.mark.parametrize("ends", ["executor", "communicator", "abort"])
def test_graphs_are_gone_before_nccl_is_ended(ends, monkeypatch):
    """Graphs are freed before NCCL ends their communicator, which would otherwise wait forever."""
    made = []

    def run():
        with gpu_ranks(monkeypatch, "nccl") as r:
            made.append(Executor(NETWORKS["mesh"](), r.comm, r.kernels, 4, Strategy({"height": 2}), graph=True))
            (executor,) = made
            trainer = Trainer(executor, SGD(executor.store), Constant(0.0))
            advance(trainer, range(4))
            trainer.synchronize()
            graphs = [c.graphs for c in r.nccl.communicators]
            assert sum(map(len, graphs)) == 2, "forward and backward"
            made.append(r.nccl.communicators)
            if ends == "abort":
                raise ZeroDivisionError
            if ends == "executor":
                executor.close()
                assert not sum(map(len, graphs)), "whoever else holds the executor"

    if ends == "abort":
        with pytest.raises(ZeroDivisionError):
            run()
    else:
        run()
    assert not any(len(c.graphs) for c in made[1])
    assert {c.dead for c in made[1]} == {"aborted" if ends == "abort" else "destroyed"}


@pytest.mark.ranks(2)
def test_the_launch_of_a_graph_with_messages_is_watched(monkeypatch):
    """The watchdog watches the launch of a graph with messages, because events in a graph cannot be queried."""
    with gpu_ranks(monkeypatch, "nccl") as r:
        told = []
        monkeypatch.setattr(r.comm.devices._opened.watchdog, "under_way", lambda passage, label: told.append(label))
        with Executor(NETWORKS["mesh"](), r.comm, r.kernels, 4, Strategy({"height": 2}), graph=True) as executor:
            trainer = Trainer(executor, SGD(executor.store), Constant(0.0))
            for step in range(4):
                told.clear()
                fill(executor, step)
                trainer.step()
            trainer.synchronize()
        assert told.count("a graph with messages") == 2


@pytest.mark.ranks(2)
def test_batch_norm_over_nccl(monkeypatch):
    """Batch norm under a cut of samples sends only sums over NCCL: of statistics, gradients and the loss."""
    _, kinds = compare(monkeypatch, "nccl", "resnet")
    assert kinds == {"allReduce"}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("scheme", ["overlap", "sharded", "ordered"])
def test_schemes_over_nccl(scheme, monkeypatch):
    _, kinds = compare(monkeypatch, "nccl", "mesh", scheme)
    wanted = {"overlap": {"send", "recv"}, "sharded": {"reduce", "broadcast"}, "ordered": {"send", "broadcast"}}[scheme]
    assert wanted <= kinds
