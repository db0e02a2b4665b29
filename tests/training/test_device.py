"""Tests of training steps on the double of a device: exact, without synchronization, loss and norm read later."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.errors import UserError
from halograd.kernels.numpy import NumpyBackend
from halograd.layers import Conv, Input, MeanSquaredError, Network, ReLU
from halograd.layers.strategy import Strategy
from halograd.lowering.operations import ForkEnd, Run, Transfer
from halograd.models import alexnet
from halograd.program.recording import Item
from halograd.training.executor import Executor
from halograd.training.graph import GraphedPass
from halograd.training.optimizers import SGD
from halograd.training.schedules import Constant
from halograd.training.timeline import Timeline
from halograd.training.trainer import Diverged, Trainer
from tests.support.stream_device import StreamBackend
from tests.training.device_steps import NETWORKS, OPTIMIZERS, STEPS, both, own_layer, train
from tests.training.steps import advance, assert_arrays, fill


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_on_one_rank_never_waits_but_for_the_loss_of_the_step_before(name):
    with Communicator(MPI.COMM_WORLD) as comm:
        counts = both(name, comm, {})
    assert counts["syncs"] == 0
    assert counts["waits"] == (STEPS - 1) + (STEPS - 2), "the loss of the step before; numbers sent two steps ago"
    assert counts["idled"] == 0, "nothing was enqueued behind a loss that was waited for"


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("name", "axis"), [("mesh", "width"), ("resnet", "height"), ("unet", "height"), ("lenet", "sample")]
)
def test_steps_on_several_ranks_wait_for_messages_only(name, axis):
    with Communicator(MPI.COMM_WORLD) as comm:
        assert both(name, comm, {axis: comm.size})["syncs"] == 0


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("clip", [None, 1e-3], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_steps_as_on_the_host(optimizer, clip):
    with Communicator(MPI.COMM_WORLD) as comm:
        counts = both("mesh", comm, {"height": comm.size}, optimizer=optimizer, clip=clip)
    assert counts["syncs"] == 0


@pytest.mark.ranks(1, 2)
def test_one_rank_updates_all_parameters_at_once(kernels):
    """Buckets hide sums behind the backward pass, and one rank has none: its update is one launch."""
    with Communicator(MPI.COMM_WORLD) as comm:
        cut = Strategy({"height": comm.size}, bucket_bytes=64)
        with Executor(NETWORKS["mesh"](), comm, kernels, 4, cut) as executor:
            assert (len(executor.store.buckets) == 1) == (comm.size == 1)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", ["unet", "lenet"])
def test_batches_in_parts(name):
    with Communicator(MPI.COMM_WORLD) as comm:
        counts = both(name, comm, {"height": comm.size}, split=3, clip=0.5)
        assert counts["idled"] == counts["syncs"] == 0 or comm.size > 1
        once, *_ = train(NETWORKS[name](), comm, NumpyBackend(), {"height": comm.size})
        parts, *_ = train(NETWORKS[name](), comm, NumpyBackend(), {"height": comm.size}, split=3)
        assert (abs(once - parts) > 1e-6).all(), "other samples"


@pytest.mark.ranks(2)
def test_float32_and_overlapped_halos():
    with Communicator(MPI.COMM_WORLD) as comm:
        options = {"options": {"halo": "overlap"}}
        assert both("mesh", comm, {"height": 2}, dtype="float32", reduction=options)["syncs"] == 0


@pytest.mark.ranks(1, 2)
def test_a_loss_that_is_not_finite_is_seen_one_step_later(kernels):
    with Communicator(MPI.COMM_WORLD) as comm:
        network, strategy = NETWORKS["lenet"](), Strategy({"sample": comm.size})
        with Executor(network, comm, kernels, 4, strategy, "float64") as executor:
            trainer = Trainer(executor, SGD(executor.store), Constant(0.01))
            fill(executor, 0)
            executor.device.assign(executor.input("x").array, np.full(executor.input("x").array.shape, np.inf))
            with np.errstate(all="ignore"):
                trainer.step()
                with pytest.raises(Diverged, match="the loss is nan"):
                    trainer.step()


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(
    ("name", "axis", "options"),
    [
        ("mesh", "height", {"halo": "overlap"}),
        ("resnet", "height", {}),
        ("unet", "width", {"halo": "pad"}),
        ("lenet", "sample", {}),
        ("alexnet", "sample", {}),
        ("own", "height", {}),
        ("lenet in parts", "sample", {}),
        ("unet in parts", "height", {}),
    ],
)
def test_graphs_repeat_what_the_steps_before_did(name, axis, options, kernels):
    """Replayed graphs give the same steps, also between messages of several ranks and around allocating layers."""
    name, split = name.split()[0], 3 if "parts" in name else 1
    network = {**NETWORKS, "alexnet": small_alexnet, "own": own_layer}[name]()
    with Communicator(MPI.COMM_WORLD) as comm:
        parts = {axis: comm.size}
        some = {"optimizer": "adam", "steps": 6, "reduction": {"options": options}, "split": split}
        expected, params, _ = train(network, comm, kernels, parts, **some)
        found, ours, counts = train(network, comm, kernels, parts, graph=True, **some)
    assert counts["syncs"] == 0
    np.testing.assert_array_equal(found, expected)
    assert_arrays(ours, params)


def convolved_twice():
    """Return a network in which two gradients of one filter are added up."""
    x, target, shared = Input((12, 8, 4), "x"), Input((12, 8, 4), "target"), Conv(4, 3, padding=1, bias=False, name="c")
    y = Conv(4, 3, padding=1, name="last")(shared(ReLU(name="relu")(shared(Conv(4, 3, padding=1, name="first")(x)))))
    return Network({"prediction": y, "loss": MeanSquaredError(name="mse")(y, target)}, "twice")


def small_alexnet():
    return alexnet(classes=3, resolution=67, width=0.1)


@pytest.mark.ranks(1, 2)
def test_how_many_graphs_a_pass_is(kernels):
    """A pass is one graph on one rank; on several ranks messages and complete buckets separate its graphs."""
    with Communicator(MPI.COMM_WORLD) as comm:
        cut = Strategy({"height": comm.size}, bucket_bytes=1 << 20)
        for network, alone in ((NETWORKS["mesh"](), (1, 1)), (own_layer(), (2, 2))):
            with Executor(network, comm, kernels, 4, cut, "float64", graph=True) as executor:
                trainer = Trainer(executor, SGD(executor.store), Constant(0.0))
                advance(trainer, range(4))
                found = tuple(graphed.graphs for graphed in executor.graphs)
                transfers = sum(isinstance(operation, Transfer) for operation in executor.program)
            assert found == alone if comm.size == 1 else sum(alone) <= sum(found) <= sum(alone) + transfers + 2


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("slow", ["host", "device"])
def test_graphs_where_a_measurement_shows_that_they_pay(slow, kernels, monkeypatch, caplog):
    """Graphs replace calls from the sixth step on, on all ranks, if the host of one takes long to enqueue a pass."""
    caplog.set_level("INFO", "halograd.training.graph")
    with Communicator(MPI.COMM_WORLD) as comm:
        seconds = 1e-6 if slow == "host" and comm.rank == 0 else 1e3
        monkeypatch.setattr(kernels.device, "seconds", lambda first, last: seconds)
        parts, network, losses = {"sample": comm.size}, NETWORKS["lenet"](), []
        expected, *_ = train(network, comm, kernels, parts, steps=7)
        cut = Strategy(parts, bucket_bytes=4096)
        with Executor(network, comm, kernels, 4, cut, "float64", seed=3, graph="auto") as executor:
            trainer = Trainer(executor, OPTIMIZERS["sgd"](executor.store), Constant(0.01))
            for step in range(7):
                fill(executor, step)
                losses.append(float(trainer.step()))
                graphs = min(graphed.graphs for graphed in executor.graphs)
                assert (graphs > 0) == (slow == "host" and step >= GraphedPass.DECIDES)
            trainer.synchronize()
            fill(executor, 0)
            executor.mode.valid = 3
            executor.forward(training=True)  # a short batch runs without graphs
        np.testing.assert_array_equal(losses, expected)
        assert [slow == "host"] * 2 * (comm.rank == 0) == [" with graphs" in line for line in caplog.messages]
        comm.instruments.recorder = Timeline(comm.rank)
        with Executor(network, comm, kernels, 4, cut, "float64", graph="auto") as executor:
            assert not executor.graphs  # events of layers cannot be in a graph


@pytest.mark.ranks(1)
@pytest.mark.parametrize("waits", [True, False])
def test_waits_between_graphs_do_not_count(waits, kernels, monkeypatch):
    """Calls that no graph contains wait for messages with graphs too: only the others decide if graphs pay."""
    clock = [0.0]
    monkeypatch.setattr("halograd.training.graph.time", SimpleNamespace(perf_counter=lambda: sum(clock)))
    monkeypatch.setattr(kernels.device, "seconds", lambda first, last: 1.0)
    slow, fast = partial(clock.append, 1.0), lambda: None
    items = [Item(fast, "a"), Item(fast if waits else slow, "a"), Item(slow if waits else fast, "b", held=False)]
    with Communicator(MPI.COMM_WORLD) as comm:
        graphed = GraphedPass(comm, kernels.device, items, lambda layer: None, measures=True)
        for _ in range(GraphedPass.DECIDES + 1):
            graphed()
        assert graphed.graphs == (not waits)
        graphed.close()


@pytest.mark.ranks(1, 2)
def test_a_pass_that_cannot_be_captured_goes_on_without_graphs(kernels, monkeypatch, caplog):
    """One rank goes on without graphs of sections that send nothing, and the others with theirs."""

    def refused(run):
        raise RuntimeError("operation not permitted when stream is capturing")

    with Communicator(MPI.COMM_WORLD) as comm:
        network, parts, fails = NETWORKS["mesh"](), {"height": comm.size}, comm.rank == comm.size - 1
        if fails:
            monkeypatch.setattr(kernels.device, "capture", refused)
        monkeypatch.setattr(kernels.device, "seconds", lambda first, last: 1e-9)  # the host is slower
        expected, *_ = train(network, comm, kernels, parts, steps=6)
        found, *_ = train(network, comm, kernels, parts, steps=6, graph="auto")
        np.testing.assert_array_equal(found, expected)
        lines = [line for line in caplog.messages if "cannot be captured (operation not permitted" in line]
        assert bool(lines) == fails
        if comm.size == 1:
            with pytest.raises(RuntimeError, match="not permitted"):
                train(network, comm, kernels, parts, graph=True)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(("name", "options"), [("mesh", {}), ("resnet", {"recompute": "pointwise"}), ("twice", {})])
def test_gradients_of_filters_on_a_second_stream(name, options, graph, kernels, monkeypatch):
    """They change no bit although the second stream runs as late as it may: what they read stays in use until then."""

    def losses(of, *passes):
        cut = Strategy({"height": comm.size}, options=options, passes=passes)
        network = {**NETWORKS, "twice": convolved_twice}[name]()
        with Executor(network, comm, of, 4, cut, "float64", seed=3, graph=graph) as executor:
            trainer, found = Trainer(executor, OPTIMIZERS["sgd"](executor.store), Constant(0.05)), []
            for step in range(4):
                fill(executor, step)
                found.append(float(trainer.step()))
            trainer.synchronize()
            for segment in executor.program.backward if passes else ():
                forked = [o.layer for o in segment.operations if isinstance(o, Run) and o.forked]
                joined = [o.layer for o in segment.operations if isinstance(o, ForkEnd)]
                assert forked == joined or comm.size == 1
            return found

    with Communicator(MPI.COMM_WORLD) as comm:
        if comm.size > 1:
            assert losses(kernels, "fork") == losses(kernels)
            return
        with StreamBackend(0) as late:
            assert losses(late, "fork") == losses(late)
            assert late.device.cuda.streams[late.device._beside.ptr].ran > 0
            monkeypatch.setattr(ForkEnd, "views", lambda self: iter(()))
            assert losses(late, "fork") != losses(late)


@pytest.mark.ranks(1)
def test_a_graph_writes_its_loss_where_it_is_read_also_after_a_validation(kernels):
    """A graph writes its loss to a fixed address, which is read also after a validation."""
    with Communicator(MPI.COMM_WORLD) as comm, Executor(NETWORKS["lenet"](), comm, kernels, 4, graph=True) as executor:
        place = executor.loss.data.ptr
        trainer = Trainer(executor, SGD(executor.store), Constant(0.0))
        fill(executor, 0)
        expected = [float(trainer.step()) for _ in range(4)]
        fill(executor, 1)
        executor.forward(training=False)
        assert executor.loss_value() != expected[0]
        fill(executor, 0)
        assert float(trainer.step()) == expected[0] == expected[-1]
        assert executor.loss.data.ptr == place and executor.loss.item() == pytest.approx(expected[0])


@pytest.mark.ranks(1, 2)
def test_what_cannot_be_in_a_graph_is_refused(kernels):
    with Communicator(MPI.COMM_WORLD) as comm:
        strategy = Strategy({"sample": comm.size})
        with pytest.raises(UserError, match=r"backend.graph: .*kernels = .cudnn."):
            Executor(NETWORKS["lenet"](), comm, NumpyBackend(), 4, strategy, graph=True)
        comm.instruments.recorder = Timeline(comm.rank)
        with pytest.raises(UserError, match=r"backend.graph: .*timeline"):
            Executor(NETWORKS["lenet"](), comm, kernels, 4, strategy, graph=True)


@pytest.mark.ranks(1, 2)
def test_graphs_beside_a_timeline_that_is_paused(kernels):
    """With a timeline, measured steps run layer by layer, and the others, while it is paused, by graphs."""
    with Communicator(MPI.COMM_WORLD) as comm:
        timeline = comm.instruments.recorder = Timeline(comm.rank)
        timeline.paused = True
        cut = Strategy({"height": comm.size})
        with Executor(NETWORKS["mesh"](), comm, kernels, 4, cut, "float64", graph=True) as executor:
            trainer = Trainer(executor, SGD(executor.store), Constant(0.01))
            for step in range(6):
                timeline.paused = step != 4
                fill(executor, step)
                trainer.step()
                names = {segment.name for segment in executor.program.forward}
                executor.spans.finish()
                assert (names <= {name for name, _ in timeline.phases}) == (step >= 4), step
            trainer.synchronize()
            assert min(graphed.graphs for graphed in executor.graphs) > 0


@pytest.mark.ranks(1)
def test_a_short_batch_is_refused_where_graphs_count_a_full_one(kernels):
    """A short training batch is an error with graphs, because the number of samples is recorded in them."""
    with Communicator(MPI.COMM_WORLD) as comm, Executor(NETWORKS["lenet"](), comm, kernels, 4, graph=True) as executor:
        fill(executor, 0)
        executor.mode.valid = 3
        executor.forward(training=False)
        with pytest.raises(ValueError, match=r"^mode.valid: .*4 .* graph=True, got 3"):
            executor.forward(training=True)
