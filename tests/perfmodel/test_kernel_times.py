"""Tests of layer times: keys, the roofline, and measured times."""

import json
import os
import subprocess
import sys
from fractions import Fraction

import pytest

import halograd as hg
from halograd.errors import UserError
from halograd.perfmodel.kernel_times import LayerTime, LayerWork, MeasuredTimes, RooflineTimes
from halograd.perfmodel.machine import LEVELS, Efficiency, Link, Machine
from halograd.perfmodel.profile.cache import Conditions, Oversubscription, TimeCache

RATE, BANDWIDTH, LAUNCH = 1e12, 1e11, 1e-6
HERE = Conditions("a device", "numpy", "1")


@pytest.fixture
def machine():
    return Machine(
        name="flat",
        source="this test",
        devices_per_node=1,
        nodes_per_switch=1,
        peak_flops={"float32": RATE, "float64": RATE / 2},
        memory_bandwidth=BANDWIDTH,
        memory=1 << 30,
        launch=LAUNCH,
        links={level: Link(1e-6, 1e-9) for level in LEVELS},
        efficiency=Efficiency(compute=1.0, half=0.0, least=1.0, memory=1.0),
    )


def kernel(flops, elements, itemsize=4, rate=RATE):
    return LAUNCH + max(flops / rate, elements * itemsize / BANDWIDTH)


# -- keys ---------------------------------------------------------------------------------------


def test_names_do_not_matter_and_settings_do():
    def key(layer, shape=(1, 8, 8, 4), **more):
        return LayerWork.of(layer, [shape], **more).key

    base = key(hg.Conv(4, 3, padding=1, name="a"))
    assert base == key(hg.Conv(4, 3, padding="same", name="b")), "the same padding, said in another way"
    others = [
        hg.Conv(8, 3, padding=1),
        hg.Conv(4, 3, padding=1, bias=False),
        hg.Conv(4, 3, padding=1, activation="relu"),
    ]
    others += [hg.Conv(4, 3), hg.Conv(4, 5, padding=1), hg.Conv(4, 3, padding=2, dilation=2), hg.ReLU()]
    keys = {base, *(key(layer) for layer in others), key(hg.Conv(4, 3, padding=1), dtype="float64")}
    keys |= {key(hg.Conv(4, 3, padding=1), (1, 8, 9, 4)), key(hg.Conv(4, 3, padding=1), trainable=False)}
    assert len(keys) == len(others) + 4


def test_a_block_with_fewer_filters_is_a_layer_with_fewer_filters():
    whole, shape = hg.Conv(8, 3, padding=1), [(1, 8, 8, 4)]
    assert LayerWork.of(whole, shape, filters=2).key == LayerWork.of(hg.Conv(2, 3, padding=1), shape).key
    assert whole.filters == 8, "the layer itself is left alone"
    assert LayerWork.of(hg.Dense(10), [(4, 6)], filters=5).key == LayerWork.of(hg.Dense(5), [(4, 6)]).key


@pytest.mark.parametrize(
    "layer", [hg.Conv(2, 5), hg.MaxPool(3, 2), hg.Conv(2, 3, 2, padding=1), hg.Conv(2, 3, padding=1)]
)
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_block_makes_the_outputs_it_is_asked_for(layer, parts):
    size = 24
    wanted = -(-layer.output_shape((size, size, 2))[0] // parts)
    work = LayerWork.of(
        layer, [(1, -(-size // parts), size, 2)], outputs=(wanted, layer.output_shape((size,) * 2 + (2,))[1])
    )
    assert work.layer.output_shape(*work.shapes)[0] == wanted


def test_a_resize_to_a_size_is_one_to_the_size_of_the_block():
    work = LayerWork.of(hg.Resize(size=(8, 8)), [(1, 2, 4, 3)], outputs=(4, 8))
    assert work.layer.output_shape(*work.shapes) == (4, 8, 3)


def test_statistics_over_ranks_have_other_kernels():
    shape = [(2, 8, 8, 4)]
    alone, spread = LayerWork.of(hg.BatchNorm(), shape), LayerWork.of(hg.BatchNorm(), shape, options={})
    assert spread.spread and not alone.spread and alone.key != spread.key
    assert alone.key == LayerWork.of(hg.BatchNorm("local"), shape, options={}).key
    assert alone.key == LayerWork.of(hg.BatchNorm(), shape, options={"statistics": "local"}).key


def test_scales_that_are_fractions_have_keys_of_their_own():
    half, third = (LayerWork.of(hg.Resize([Fraction(1, n)] * 2), [(1, 6, 6, 3)]).key for n in (2, 3))
    assert half != third


def test_keys_are_the_same_in_every_process():
    code = (
        "import numpy as np; from halograd.layers import *; from halograd.perfmodel.kernel_times import LayerWork;"
        "print(LayerWork.of(SoftmaxCrossEntropy(np.arange(3.0)), [(2, 4, 3), (2, 4, 1)]).key);"
        "print(LayerWork.of(Conv(4, 3, padding='same'), [(2, 8, 8, 3)]).key)"
    )
    texts = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]
    assert texts[0] == texts[1]
    assert len(texts[0].splitlines()) == 2


# -- roofline -----------------------------------------------------------------------------------


def test_a_convolution_takes_three_kernels(machine):
    x, y, w = 2 * 16 * 16 * 8, 2 * 16 * 16 * 32, 32 * 9 * 8
    flops = 2 * w * 2 * 16 * 16
    found = RooflineTimes(machine).time(hg.Conv(32, 3, padding=1, bias=False), [(2, 16, 16, 8)])
    one = kernel(flops, x + y + w)
    assert found == LayerTime(pytest.approx(one), pytest.approx(one), pytest.approx(one))
    assert found.backward == pytest.approx(2 * one) and found.total == pytest.approx(3 * one)


def test_the_first_layer_has_no_data_gradient_but_its_mask(machine):
    times, shape = RooflineTimes(machine), [(1, 8, 8, 3)]
    assert times.time(hg.Conv(4, 3), shape, input_gradient=False).backward_data == 0
    masked = times.time(hg.Conv(4, 3, activation="relu"), shape, input_gradient=False)
    assert masked.backward_data == pytest.approx(kernel(0, 3 * 6 * 6 * 4))


def test_small_rates_of_float64_count(machine):
    found = RooflineTimes(machine).time(hg.Dense(4096, bias=False), [(4096, 4096)], "float64")
    assert found.forward == pytest.approx(kernel(2 * 4096**3, 0, rate=RATE / 2))


def test_layers_without_arithmetic_are_priced_by_their_bytes(machine):
    times, n = RooflineTimes(machine), 4 * 64 * 64 * 16
    shape = (4, 64, 64, 16)
    assert times.time(hg.ReLU(), [shape]) == LayerTime(pytest.approx(kernel(0, 2 * n)), pytest.approx(kernel(0, 3 * n)))
    norm = times.time(hg.BatchNorm(), [shape])
    assert norm.forward == pytest.approx(kernel(7 * n, 3 * n + 32))
    assert norm.backward_data == pytest.approx(kernel(7 * n, 5 * n + 32))
    assert norm.backward_filter == 0
    added = times.time(hg.Add(), [shape, shape])
    assert added == LayerTime(pytest.approx(kernel(n, 3 * n)))


def test_what_takes_no_time(machine):
    """Backward passes of losses and of evaluation take no time; a rank without elements takes none at all."""
    times, conv = RooflineTimes(machine), hg.Conv(4, 3)
    found = times.time(hg.BinaryCrossEntropyWithLogits(), [(1, 8, 8, 1)] * 2)
    assert found.backward == 0 < found.forward
    assert times.time(conv, [(1, 8, 8, 3)], trainable=False).backward == 0
    assert times.time(conv, [(0, 8, 8, 3)]).total == 0


def test_a_layer_of_your_own_is_priced_too(machine):
    class Mine(hg.Layer):
        def flops(self, *shapes):
            return 10**9

    found = RooflineTimes(machine).time(Mine(), [(2, 4, 4, 1)])
    assert found.forward == found.backward_data == pytest.approx(LAUNCH + 2e-3)


def test_what_is_asked_twice_is_the_same_object(machine):
    times, layer = RooflineTimes(machine), hg.Conv(4, 3)
    assert times.time(layer, [(1, 8, 8, 3)]) is times.time(layer, [(1, 8, 8, 3)])
    assert times.time(layer, [(1, 8, 8, 3)]) is not times.time(layer, [(2, 8, 8, 3)])


# -- measured -----------------------------------------------------------------------------------


def test_measured_times_are_used(tmp_path):
    cache = TimeCache(tmp_path / "times.jsonl")
    work = LayerWork.of(hg.Conv(4, 3), [(1, 8, 8, 3)])
    cache.put(HERE, work.key, (1.0, 2.0, 3.0))
    again = MeasuredTimes(TimeCache(tmp_path / "times.jsonl"), HERE)
    assert again.time(hg.Conv(4, 3, name="other"), [(1, 8, 8, 3)]) == LayerTime(1, 2, 3)
    assert not again.missing


def test_times_of_other_conditions_are_not(tmp_path, machine):
    cache = TimeCache(None)
    work = LayerWork.of(hg.Conv(4, 3), [(1, 8, 8, 3)])
    cache.put(HERE, work.key, (1.0, 2.0, 3.0))
    roofline = RooflineTimes(machine)
    times = MeasuredTimes(cache, Conditions("a device", "numpy", "1", threads=2), roofline)
    assert times.time(work.layer, work.inputs) == roofline.time(work.layer, work.inputs)
    assert list(times.missing) == [work.key]
    assert times.missing[work.key].inputs == work.inputs


def test_a_fallback_is_asked_for_the_same_work(machine):
    roofline = RooflineTimes(machine)
    times = MeasuredTimes(TimeCache(None), HERE, roofline)
    for layer, more in (
        (hg.Conv(8, 3), {"filters": 2}),
        (hg.BatchNorm(), {"options": {}}),
        (hg.Conv(8, 5), {"outputs": (8, 8)}),
    ):
        assert times.time(layer, [(1, 8, 8, 4)], **more) == roofline.time(layer, [(1, 8, 8, 4)], **more)


def test_without_a_fallback_the_remedy_is_said(tmp_path):
    times = MeasuredTimes(TimeCache(tmp_path / "t.jsonl"), HERE)
    with pytest.raises(UserError, match=r"expected a measured time of Conv on .*got none; run `halograd profile`"):
        times.time(hg.Conv(4, 3), [(1, 8, 8, 3)])


def test_what_is_measured_on_demand_is_kept():
    calls = []

    def measure(work):
        calls.append(work)
        return LayerTime(1.0, 2.0, 0.0)

    cache = TimeCache(None)
    times = MeasuredTimes(cache, HERE, measure=measure)
    for _ in range(2):
        assert times.time(hg.Conv(4, 3), [(1, 8, 8, 3)]) == LayerTime(1.0, 2.0, 0.0)
    assert len(calls) == 1 and len(cache) == 1
    times.forget()
    assert times.time(hg.Conv(4, 3), [(1, 8, 8, 3)]).forward == 1.0
    assert len(calls) == 1


def test_conditions_say_what_matters():
    class Kernels:
        name, version, threads = "numpy", "2", 3

    told = json.loads(Conditions.here(Kernels(), Oversubscription(2, 4), flush=8).text)
    assert told["threads"] == 3 and (told["ranks"], told["cores"]) == (2, 4) and told["flush"] == 8 and told["device"]
    assert told["version"].startswith("2, halograd ")
    assert Conditions.here(Kernels()).text == Conditions.here(Kernels()).text
