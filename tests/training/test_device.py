"""Tests of steps and runs on the double of a device: exact, without synchronization, uploads ahead, transports."""

import itertools
import json
from functools import partial
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.errors import UserError
from halograd.kernels.cudnn.graphs import Arithmetic
from halograd.kernels.numpy import NumpyBackend
from halograd.layers import Conv, Input, MeanSquaredError, Network, ReLU
from halograd.layers.strategy import Strategy
from halograd.lowering.operations import ForkEnd, Run, Transfer
from halograd.models import alexnet
from halograd.program.recording import Item
from halograd.training import checkpoints, session
from halograd.training.backend import open_kernels
from halograd.training.config import parse_config
from halograd.training.executor import Executor
from halograd.training.graph import GraphedPass
from halograd.training.inputs import DeviceFeed
from halograd.training.log import RunLog, read_log
from halograd.training.memory import Memory
from halograd.training.optimizers import SGD
from halograd.training.run import train as train_run
from halograd.training.schedules import Constant
from halograd.training.timeline import Timeline
from halograd.training.trained import apply, evaluate
from halograd.training.trainer import Diverged, Trainer
from tests.support.fake_device import FakeBackend
from tests.support.gpu_ranks import gpu_ranks
from tests.support.stream_device import StreamBackend
from tests.training.device_steps import NETWORKS, OPTIMIZERS, STEPS, assert_near, both, own_layer, train
from tests.training.runs import CONFIG, EDGE, write_config
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


@pytest.mark.ranks(1)
def test_sections_that_cannot_be_captured_are_no_graphs(kernels, monkeypatch):
    def capture(run, plain=kernels.device.capture):
        if captured.append(run) or len(captured) == 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return plain(run)

    captured, call = [], lambda: None
    monkeypatch.setattr(kernels.device, "capture", capture)
    monkeypatch.setattr(kernels.device, "seconds", lambda first, last: 1e-9)
    items = [Item(call, "a"), Item(call, "a"), Item(call, "b", held=False), Item(call, "c"), Item(call, "c")]
    with Communicator(MPI.COMM_WORLD) as comm:
        graphed = GraphedPass(comm, kernels.device, items, lambda layer: None, measures=True)
        for _ in range(GraphedPass.DECIDES + 2):
            graphed()
        assert (len(captured), graphed.graphs) == (2, 1)
        graphed.close()
        assert graphed.graphs == 0


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


CONSTANT = ['schedule={kind="constant", learning_rate=0.01}']


@pytest.fixture
def on_device(monkeypatch):
    """Return a function that selects whether runs open the double of a device; it returns the opened ones."""
    opened = []

    def switch(on):
        def fake(config, comm):
            opened.append(FakeBackend())
            return opened[-1]

        monkeypatch.setattr(session, "open_kernels", fake if on else open_kernels)
        return opened

    return switch


def run(path, out, epochs, resume=False, more=()):
    overrides = [f"output.directory={out}", f"training.epochs={epochs}", *CONSTANT, *more]
    return train_run(path, overrides, resume=resume, comm=MPI.COMM_SELF)


def weights(out):
    with h5py.File(sorted((out / "checkpoints").glob("step-*.h5"))[-1]) as file:
        found = {}
        file["params"].visititems(
            lambda name, item: found.update({name: item[...]}) if hasattr(item, "shape") else None
        )
        return found


def test_a_run_goes_from_the_host_to_the_device_and_back(tmp_path, on_device):
    path = write_config(tmp_path)
    expected = run(path, tmp_path / "host", 3)
    run(path, tmp_path / "moving", 1)
    opened = on_device(True)
    run(path, tmp_path / "moving", 2, resume=True)
    on_device(False)
    found = run(path, tmp_path / "moving", 3, resume=True)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-12)
    assert found["validation"] == pytest.approx(expected["validation"], rel=1e-12)
    for name, array in weights(tmp_path / "host").items():
        np.testing.assert_allclose(weights(tmp_path / "moving")[name], array, rtol=0, atol=1e-12, err_msg=name)
    assert opened and opened[0].device.waits > 0


def test_a_run_goes_from_float32_on_the_host_to_bfloat16_on_the_device_and_back(tmp_path, on_device):
    """A run continues between float32 on the host and bfloat16 on a device; checkpoints are in float32."""
    path, single = write_config(tmp_path), ['training.dtype="float32"']
    expected = run(path, tmp_path / "host", 3, more=single)
    run(path, tmp_path / "moving", 1, more=single)
    on_device(True)
    run(path, tmp_path / "moving", 2, resume=True, more=['training.dtype="bfloat16"'])
    middle = weights(tmp_path / "moving")
    on_device(False)
    found = run(path, tmp_path / "moving", 3, resume=True, more=single)
    assert {array.dtype for array in middle.values()} == {np.dtype(np.float32)}
    assert found["loss"] == pytest.approx(expected["loss"], rel=0.05)
    moved = weights(tmp_path / "moving")
    assert any((moved[name] != array).any() for name, array in middle.items())
    for name, array in weights(tmp_path / "host").items():
        bound = 0.05 * max(1.0, np.abs(array).max())
        np.testing.assert_allclose(moved[name], array, rtol=0, atol=bound, err_msg=name)


def test_evaluation_and_predictions_of_bfloat16(tmp_path, on_device):
    path, low = write_config(tmp_path), ['training.dtype="bfloat16"']
    on_device(True)
    run(path, tmp_path / "low", 1, more=low)
    result = evaluate(tmp_path / "low", comm=MPI.COMM_SELF, predictions=tmp_path / "p.h5")
    apply(tmp_path / "low", [str(tmp_path / "data.h5")], tmp_path / "a.h5", what="probabilities", comm=MPI.COMM_SELF)
    data, window = [str(tmp_path / "data.h5")], (EDGE, EDGE)  # one window per sample
    apply(tmp_path / "low", data, tmp_path / "w.h5", window=window, comm=MPI.COMM_SELF)
    on_device(False)
    single = evaluate(tmp_path / "low", ['training.dtype="float32"'], comm=MPI.COMM_SELF, predictions=tmp_path / "q.h5")
    assert result["loss"] == pytest.approx(single["loss"], rel=0.02)
    with h5py.File(tmp_path / "p.h5") as low_file, h5py.File(tmp_path / "q.h5") as file:
        assert low_file["prediction"].dtype == np.float32
        np.testing.assert_array_equal(low_file["target"][...], file["target"][...])
        with h5py.File(tmp_path / "a.h5") as applied:
            order = np.argsort(low_file["sample"])
            want = 1 / (1 + np.exp(-low_file["prediction"][...][order]))
            np.testing.assert_allclose(applied["prediction"][low_file["sample"][...][order]], want, rtol=1e-6)
        with h5py.File(tmp_path / "w.h5") as windows:
            found = windows["prediction"][low_file["sample"][...][order]]
            np.testing.assert_allclose(found, low_file["prediction"][...][order], rtol=1e-6)
        largest = np.abs(file["prediction"][...]).max()
        assert np.abs(low_file["prediction"][...] - file["prediction"][...]).max() < 0.05 * largest


def test_bfloat16_on_the_cpu_is_refused_in_one_line(tmp_path):
    path = write_config(tmp_path)
    with pytest.raises(UserError, match=r'training.dtype: .*"numpy".*, got "bfloat16"'):
        run(path, tmp_path / "out", 1, more=['training.dtype="bfloat16"'])
    emulated = ['training.dtype="bfloat16"', "backend.emulate=true"]
    found = run(path, tmp_path / "emulated", 1, more=emulated)
    assert found["loss"] == pytest.approx(run(path, tmp_path / "wide", 1)["loss"], rel=0.05)


def test_log_timeline_and_evaluation(tmp_path, on_device):
    path = write_config(tmp_path)
    host = run(path, tmp_path / "host", 2)
    on_device(True)
    device = run(path, tmp_path / "device", 2, more=["output.timeline=true", "training.clip_norm=1.0"])
    clipped = run(path, tmp_path / "clipped", 2, more=["training.clip_norm=1000.0"])
    assert clipped["loss"] == pytest.approx(host["loss"], rel=1e-9)
    assert np.isfinite(device["loss"])
    steps = [json.loads(line) for line in (tmp_path / "device" / "log.jsonl").read_text().splitlines()]
    steps = [entry for entry in steps if entry.get("event", entry.get("kind")) == "step"]
    assert steps and all(np.isfinite([entry["loss"], entry["gradient_norm"]]).all() for entry in steps)
    events = json.loads((tmp_path / "device" / "timeline.json").read_text())["traceEvents"]
    assert {"forward", "backward", "update"} <= {event.get("cat") for event in events}
    result = evaluate(tmp_path / "clipped", comm=MPI.COMM_SELF, predictions=tmp_path / "p.h5")
    assert result["loss"] == pytest.approx(clipped["validation"]["loss"], rel=1e-12)
    with h5py.File(tmp_path / "p.h5") as file:
        assert np.isfinite(file["prediction"][...]).all()


@pytest.mark.parametrize(("dtype", "says"), [("float32", True), ("bfloat16", False)])
def test_the_first_line_says_whether_float32_takes_tensor_cores(tmp_path, on_device, monkeypatch, dtype, says):
    lines = []
    monkeypatch.setattr(RunLog, "print", lambda log, text: lines.append(text))
    monkeypatch.setattr(FakeBackend, "describe_arithmetic", lambda kernels, dtype: Arithmetic().describe(dtype))
    on_device(True)
    run(write_config(tmp_path), tmp_path / "out", 1, more=[f'training.dtype="{dtype}"'])
    (begin,) = read_log(tmp_path / "out" / "log.jsonl", "begin")
    for line in (lines[0], begin["kernels"]):
        assert ('per rank, float32 without tensor cores (backend.precision = "tf32"' in line) == says


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
def test_one_checkpoint_per_interval(tmp_path, on_device, monkeypatch, device):
    """Each interval has one checkpoint, although votes arrive a step later on a device."""
    clock = itertools.count()
    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    on_device(device)
    more = ["output.log_steps=1000", "output.checkpoint_epochs=0", f"output.checkpoint_minutes={4 / 60}"]
    total = run(write_config(tmp_path), tmp_path / "out", 6, more=more)["steps"]
    steps = [entry["step"] for entry in read_log(tmp_path / "out" / "log.jsonl", "checkpoint")]
    assert len(steps) > 2 and steps[-1] == total
    assert min(np.diff(steps[:-1])) > 2, steps


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("device = 1", 'backend.device: expected kernels = "cudnn" with it, got "numpy"; remove device'),
        ("graph = true", 'backend.graph: expected kernels = "cudnn" with it, got "numpy"; remove graph'),
        ('precision = "tf32"', "backend.kernels: expected precision strict for the backend numpy, got 'tf32'"),
    ],
)
def test_what_needs_a_gpu_is_refused_without(tmp_path, keys, message):
    path = write_config(tmp_path)
    path.write_text(path.read_text().replace('kernels = "numpy"', f'kernels = "numpy"\n{keys}'))
    with pytest.raises(UserError) as caught:
        train_run(path, [f"output.directory={tmp_path / 'out'}"], comm=MPI.COMM_SELF)
    assert message in str(caught.value)


def test_keys_of_the_backend():
    text = CONFIG.format(edge=4, channels=1, data="d.h5", out="out")
    found = parse_config(text.replace('kernels = "numpy"', 'kernels = "cudnn"\ndevice = [1, 0]\ndeterministic = true'))
    assert (found.backend.device, found.backend.deterministic, found.backend.precision) == ([1, 0], True, "strict")


def test_the_first_upload_comes_behind_the_zeros_of_its_target(monkeypatch):
    kernels, after = FakeBackend(), []
    monkeypatch.setattr(kernels.device, "upload_ahead", lambda pairs, ticket: after.append(ticket))
    x, target = (kernels.zeros(shape, "float32") for shape in ((2, 3), (2, 1)))
    inputs = {"x": x, "target": target}
    feed = DeviceFeed(Memory(kernels), inputs, 2, np.dtype("float32"))
    for slot in range(2):
        feed.after_fill(slot, {name: np.ones(array.shape, "float32") for name, array in inputs.items()})
    assert [ticket.number for ticket in after] == [kernels.device.number] * 2
    kernels.close()


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
