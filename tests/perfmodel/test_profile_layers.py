"""Tests of the measurement of single layers: set up as in an executor, timed and stored; and of the list to measure."""

from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

from halograd import layers as L
from halograd import measuring
from halograd.comm import Communicator
from halograd.kernels import get_backend
from halograd.layers import BatchNorm, Conv, Dropout, Input, MaxPool, Network, SoftmaxCrossEntropy, Strategy
from halograd.limits import Cores, usable_cores
from halograd.lowering.operations import Total
from halograd.models import build
from halograd.perfmodel.cost import simulate
from halograd.perfmodel.cost.network_costs import network_costs, works_of
from halograd.perfmodel.cuts import grids
from halograd.perfmodel.kernel_times import LayerTime, LayerWork, Recorded, RooflineTimes
from halograd.perfmodel.machine import Machine
from halograd.perfmodel.profile import cache
from halograd.perfmodel.profile import layers as layer_times
from halograd.perfmodel.profile.bound import BoundLayer
from halograd.perfmodel.profile.cache import Conditions, Oversubscription, TimeCache
from halograd.perfmodel.profile.layers import LayerTimer, measure_layers
from halograd.training import Executor
from tests.perfmodel.pricing import priced
from tests.support.fake_device import FakeBackend

MACHINE = Machine.load("lassen")
HERE = Conditions("a device", "numpy", "1")
MAP, VECTOR = (2, 8, 8, 4), (2, 12)
CASES = [
    (L.Conv(6, 3, padding=1, activation="relu"), [MAP]),
    (L.Conv(6, 3, 2, bias=False, groups=2), [MAP]),
    (L.ConvTranspose(6, 2, 2), [MAP]),
    (L.Dense(5), [VECTOR]),
    (L.BatchNorm(activation="relu"), [MAP]),
    (L.GroupNorm(2), [MAP]),
    (L.LayerNorm(), [MAP]),
    (L.ReLU(), [MAP]),
    (L.GELU(), [MAP]),
    (L.Softmax(), [VECTOR]),
    (L.Dropout(0.5), [MAP]),
    (L.Add(), [MAP, MAP]),
    (L.Concat(), [MAP, MAP]),
    (L.MaxPool(3, 2, padding=1), [MAP]),
    (L.AveragePool(2), [MAP]),
    (L.GlobalAveragePool(), [MAP]),
    (L.Flatten(), [MAP]),
    (L.Resize(scale=2, mode="bilinear"), [MAP]),
    (L.BinaryCrossEntropyWithLogits(), [MAP, MAP]),
    (L.MeanSquaredError(), [VECTOR, VECTOR]),
    (L.SoftmaxCrossEntropy(), [MAP, (2, 8, 8, 1)]),
    (L.SoftmaxCrossEntropy(), [VECTOR, (2, 1)]),
    (L.Dice(), [MAP, MAP]),
]


@pytest.fixture
def alone():
    with Communicator(MPI.COMM_SELF) as made:
        yield made


@pytest.fixture
def kernels():
    with get_backend("numpy") as made:
        yield made


@pytest.mark.parametrize(("layer", "shapes"), CASES, ids=lambda v: v.kind if isinstance(v, L.Layer) else "")
@pytest.mark.parametrize("flush", [0, 4096], ids=["in the cache", "flushed"])
def test_every_layer_can_be_timed(alone, kernels, layer, shapes, flush):
    timer = LayerTimer(kernels, alone, flush)
    time = timer.measure(LayerWork.of(layer, shapes))
    assert time.forward > 0 and time.backward_data >= 0
    has_weights = "w" in layer.parameters(*(s[1:] for s in shapes))
    assert (time.backward_filter > 0) is has_weights
    timer.close()


def test_the_second_instance_has_kernels_of_its_own(alone, kernels, monkeypatch):
    """Kernels are generated per shape: those of the timed layer must not be in the cache, as they are not in a step."""
    bound = []
    monkeypatch.setattr(layer_times, "BoundLayer", lambda *args, **kw: bound.append(args[1]) or BoundLayer(*args, **kw))
    timer = LayerTimer(kernels, alone, 4096)
    timer.measure(LayerWork.of(L.Add(), [MAP, MAP]))
    assert bound == [(MAP, MAP), ((3, *MAP[1:]), (3, *MAP[1:]))]
    timer.close()


def test_first_layers_and_evaluation_do_less(alone, kernels):
    timer, conv = LayerTimer(kernels, alone, 0), L.Conv(6, 3)
    assert timer.measure(LayerWork.of(conv, [MAP], trainable=False)).backward == 0
    with BoundLayer(conv, [MAP], "float32", kernels, alone, input_gradient=False) as first:
        timings = [run.timing.phase for segment in first.program.backward for run in segment.operations]
        assert timings == ["backward_filter"]
    timer.close()


@pytest.fixture
def device_clock(monkeypatch):
    """A backend with a queue, and the readings of the clock for which the queue was not empty."""
    with FakeBackend() as backend:
        device, readings = backend.device, []
        ended = [0]
        monkeypatch.setattr(device, "synchronized", lambda why: ended.append(device.number))

        def clock(self):
            readings.append(device.number - ended[-1])
            return float(len(readings))

        monkeypatch.setattr(Oversubscription, "clock", clock)
        yield backend, readings


@pytest.mark.parametrize("input_gradient", [False, True])
def test_times_on_a_device_contain_no_work_enqueued_before(alone, device_clock, input_gradient):
    """Nothing is written before a first layer, so that nothing else would wait for the flush of the cache."""
    backend, readings = device_clock
    timer = LayerTimer(backend, alone, 4096)
    timer.measure(LayerWork.of(L.Conv(6, 3, padding=1, activation="relu"), [MAP], input_gradient=input_gradient))
    timer.close()
    assert readings and not any(readings)


def test_overheads_on_a_device_contain_all_work(alone, device_clock):
    backend, readings = device_clock
    measuring.measure_overheads(alone, backend, MACHINE)
    assert readings and not any(readings)


def test_a_bound_layer_computes_what_the_executor_does(alone, kernels):
    x = Input(MAP[1:])
    network = Network(L.Conv(6, 3, padding=1, name="layer")(x))
    with (
        Executor(network, alone, kernels, 2, dtype="float64", trainable=False) as executor,
        BoundLayer(L.Conv(6, 3, padding=1), [MAP], "float64", kernels, alone) as bound,
    ):
        executor.set_input("x", bound.inputs[0])
        for name, array in bound.arrays["params"].items():
            executor.store.params[f"layer/{name}"][...] = array
        executor.forward()
        bound.run()
        np.testing.assert_array_equal(executor.gather("layer"), bound.output)


def test_kernels_around_sums_compute_the_same_norm(alone, kernels):
    results = []
    for spread in (False, True):
        with BoundLayer(L.BatchNorm(), [MAP], "float32", kernels, alone, spread=spread) as bound:
            sums = [run for run in bound.program if isinstance(run, Total)]
            assert bool(sums) is spread
            bound.run()
            dx = bound.runner.view(bound.program.values["x0"].contributions[0])
            results.append((bound.output.copy(), dx.copy()))
    for one, two in zip(*results):
        np.testing.assert_allclose(one, two, atol=1e-5)


# -- what is measured -----------------------------------------------------------------------------


def conv_net():
    x = Input((12, 8, 3))
    y = L.Conv(5, 3, 2, padding=1)(L.ReLU()(L.Conv(4, 5)(x)))
    return Network({"loss": L.MeanSquaredError()(y, Input(y.shape, name="target"))})


def works(batch=4, ranks=2):
    """Return the works of every cut of the small network, by key."""
    return works_of(conv_net(), batch, ranks, MACHINE, full=True)


@pytest.mark.parametrize("full", [False, True])
def test_works_cover_the_uncut_network(full):
    network, times = conv_net(), Recorded(RooflineTimes(MACHINE))
    found = works_of(network, 4, 2, MACHINE, full=full)
    simulate(network, Strategy(), 4, priced(MACHINE, times))
    assert times.requested.keys() <= found.keys()
    for node in list(network.layers.values())[:-1]:
        first = isinstance(node.inputs[0], Input)
        assert LayerWork.of(node.layer, [(4, *n.shape) for n in node.inputs], input_gradient=not first).key in found
    assert all(work.key == key for key, work in found.items())


@pytest.mark.parametrize("model", ["lenet5", "resnet50", "unet2d"])
def test_works_are_what_a_plan_asks_for_and_few(model):
    """The listed works are those that planners request, and few, because many layers and cuts compute the same."""
    network = build(model)
    times = Recorded(RooflineTimes(MACHINE))
    network_costs(network, 4, 4, priced(MACHINE, times, quick=True), grids=grids(network, 4, 4))
    found, every = (works_of(network, 4, 4, MACHINE, full=full) for full in (False, True))
    assert found.keys() == times.requested.keys() <= every.keys()
    assert 0 < len(every) < 16 * len(network.layers)


def test_overheads_compare_typical_steps_with_typical_layers(alone, kernels, monkeypatch):
    """The fastest step may take less than the mean times of its layers, and would hide the overhead."""
    layers = SimpleNamespace(measure=lambda work: LayerTime(1e-3, 0.0, 0.0), close=lambda: None)
    monkeypatch.setattr(measuring, "LayerTimer", lambda *args: layers)
    monkeypatch.setattr(measuring, "_times", lambda *args, **kw: [3.0, 1e-9, 2.0])
    update, overhead = measuring.measure_overheads(alone, kernels, MACHINE)
    network = measuring._small_network()
    works = works_of(network, 1, 1, MACHINE)
    assert overhead == pytest.approx((2.0 - 1e-3 * len(works)) / (2 * len(network.layers)))
    assert update == pytest.approx(2.0 / (4 << 20))


class FakeTimer:
    """Timer that takes no time, and can be interrupted."""

    def __init__(self, comm, interrupt_after=None):
        self.comm, self.interrupt_after, self.keys = comm, interrupt_after, []

    def measure(self, work):
        if len(self.keys) == self.interrupt_after:
            raise KeyboardInterrupt
        self.keys.append(work.key)
        return LayerTime(float(len(self.keys)), 0.0, 0.0)


def test_an_interrupted_profile_goes_on(tmp_path, alone):
    some, path = works(), tmp_path / "t.jsonl"
    first = FakeTimer(alone, interrupt_after=3)
    with pytest.raises(KeyboardInterrupt):
        measure_layers(some.values(), first, TimeCache(path, every=100), HERE)
    told = []
    second = FakeTimer(alone)
    state = measure_layers(some.values(), second, TimeCache(path), HERE, progress=lambda *done: told.append(done))
    assert (state.known, state.measured, state.left) == (3, len(some) - 3, 0)
    assert not set(first.keys) & set(second.keys)
    assert told[0] == (0, len(some)) and told[-1] == (len(some), len(some))
    third = FakeTimer(alone)
    assert measure_layers(some.values(), third, TimeCache(path), HERE).known == len(some)
    assert not third.keys


def test_what_is_measured_again_is_averaged(alone):
    some, cache = list(works().values()), TimeCache(None)
    measure_layers(some, FakeTimer(alone), cache, HERE)  # 1, 2, 3, ... seconds
    state = measure_layers(some[1:2], FakeTimer(alone), cache, HERE, again=True)
    assert (state.known, state.measured) == (0, 1)
    assert [cache.get(HERE, w.key)[0] for w in some[:3]] == [1.0, 1.5, 3.0]


def test_a_budget_leaves_layers(alone):
    some = works()
    state = measure_layers(some.values(), FakeTimer(alone), TimeCache(None), HERE, budget=0.0)
    assert (state.measured, state.left) == (0, len(some))


@pytest.mark.parametrize(
    ("ranks", "threads", "expected"),
    [
        ([("a", {0, 1})] * 2, 1, Oversubscription(2, 0)),
        ([("a", {0, 1})] * 4, 1, Oversubscription(4, 2)),
        ([("a", {0, 1})] * 2, 2, Oversubscription(2, 2)),
        ([("a", {0}), ("a", {1})], 1, Oversubscription(2, 0)),
        ([("a", {0}), ("a", {0})], 1, Oversubscription(2, 1)),
        ([("a", {0, 1}), ("b", {0, 1}), ("b", {0, 1}), ("b", {0, 1})], 1, Oversubscription(3, 2)),
        ([("a", {0, 1, 2, 3})] * 3 + [("b", {0})], 1, Oversubscription(3, 0)),
        ([("a", set())] * 4, 1, Oversubscription(4, 0)),
    ],
)
def test_ranks_share_cores_if_they_are_more_than_the_cores(ranks, threads, expected):
    found = [(host, Cores(frozenset(cores)) if cores else None) for host, cores in ranks]
    assert Oversubscription.among(found, threads) == expected


def test_ranks_in_turn_are_timed_by_what_they_compute(monkeypatch):
    wall, processor = 100.0, 8.0
    monkeypatch.setattr(cache, "time", SimpleNamespace(perf_counter=lambda: wall, process_time=lambda: processor))
    assert Oversubscription(2).clock() == wall
    assert Oversubscription(4, cores=2).clock() == 2 * processor
    assert Oversubscription(5, cores=1).clock() == 5 * processor


def test_the_host_has_cores_for_those_that_work_on_a_device():
    on_device = SimpleNamespace(threads=1, device=SimpleNamespace(is_host=False))
    assert Oversubscription.here(10_000, on_device) == Oversubscription(10_000)
    on_host = SimpleNamespace(threads=1, device=SimpleNamespace(is_host=True))
    assert Oversubscription.here(10_000, on_host).cores == Cores.together([usable_cores()] * 10_000)


@pytest.mark.ranks(2)
def test_ranks_measure_together(comm, tmp_path):
    with Communicator(comm) as both, get_backend("numpy") as kernels:
        cache = TimeCache(tmp_path / "t.jsonl" if comm.rank == 0 else None)
        timer = LayerTimer(kernels, both, 0)
        times = timer.measure(LayerWork.of(L.Conv(6, 3), [MAP]))
        assert both.allgather_objects(times) == [times] * 2
        some = works(batch=2)
        state = measure_layers(some.values(), timer, cache, HERE)
        assert state.measured == len(some)
        assert len(cache) == (len(some) if comm.rank == 0 else 0)
        assert measure_layers(some.values(), timer, cache, HERE).known == len(some)
        timer.close()


LAYERS = {
    "conv": (Conv(4, 3, padding=1), [(2, 8, 8, 3)]),
    "batch norm": (BatchNorm(), [(2, 8, 8, 3)]),
    "max pool": (MaxPool(2), [(2, 8, 8, 3)]),
    "dropout": (Dropout(0.5), [(2, 8, 8, 3)]),
    "resize": (L.Resize(1.5, mode="cubic"), [(2, 8, 8, 3)]),
    "weight norm": (L.Conv(4, 3, weight_norm=True), [(2, 8, 8, 3)]),
    "scale": (L.Scale(bias=True), [(2, 8, 8, 3)]),
    "slopes": (L.PReLU("channel"), [(2, 8, 8, 3)]),
    "stochastic depth": (L.StochasticDepth(0.5), [(2, 8, 8, 3)]),
    "global max pool": (L.GlobalMaxPool(), [(2, 8, 8, 3)]),
    "adaptive max pool": (L.AdaptiveMaxPool(3), [(2, 8, 8, 3)]),
    "pixel shuffle": (L.PixelShuffle(2), [(2, 8, 8, 12)]),
    "loss": (SoftmaxCrossEntropy(), [(2, 5), (2, 1)]),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_measured_there_too(name):
    layer, inputs = LAYERS[name]
    kernels = FakeBackend()
    with Communicator(MPI.COMM_SELF) as comm, BoundLayer(layer, inputs, "float32", kernels, comm) as bound:
        before = len(kernels.device.synchronizations)
        bound.forward()
        bound.backward(lambda call: call())
        assert len(kernels.device.synchronizations) == before
    kernels.close()
