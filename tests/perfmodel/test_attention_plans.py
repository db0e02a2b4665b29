"""Tests of plans with attention: the faster of gather and ring is taken, and its memory and traffic are predicted."""

from dataclasses import replace

import pytest

from halograd.layers import Attention, Conv, Input, MeanSquaredError, Network, Strategy
from halograd.perfmodel.cost import NetworkModel, Pricing, simulate
from halograd.perfmodel.kernel_times import LayerWork, RooflineTimes
from halograd.perfmodel.machine import Machine
from halograd.perfmodel.predict import plan_network
from tests.perfmodel.pricing import priced

LASSEN = Machine.load("lassen")


def network(extent=64, **settings):
    x = Input((extent, extent, 16), "x")
    q, k, v = (Conv(32, 3, padding=1, name=name)(x) for name in "qkv")
    y = Conv(1, 1, name="out")(Attention(4, name="attention", **settings)(q, k, v))
    return Network({"loss": MeanSquaredError()(y, Input(y.shape, "target"))})


def seconds(made, machine, halo):
    strategy = Strategy({"height": 4}, {"attention": {"halo": halo}})
    return simulate(made, strategy, 1, priced(machine), ranks=4)


@pytest.mark.parametrize(("slower", "faster"), [(1, "pad"), (40, "overlap")])
def test_the_faster_of_gather_and_ring_is_chosen(slower, faster):
    """A ring has more messages and smaller kernels; slow bytes travel while it computes."""
    links = {name: replace(link, beta=link.beta * slower) for name, link in LASSEN.links.items()}
    machine, made = replace(LASSEN, links=links), network(192)
    both = {halo: seconds(made, machine, halo) for halo in ("pad", "overlap")}
    assert min(both, key=lambda halo: both[halo].step_seconds) == faster
    best = Pricing(NetworkModel(machine), RooflineTimes(machine), best_halo=True)
    found = simulate(made, Strategy({"height": 4}), 1, best, ranks=4)
    record = next(r for r in found.layers if r.name == "attention")
    assert record.halo_algorithm == faster and found.step_seconds <= both[faster].step_seconds * (1 + 1e-9)
    assert found.memory_bytes == pytest.approx(both[faster].memory_bytes, rel=0.02)
    assert dict(found.traffic)["halo"][1] == both[faster].traffic["halo"][1]


@pytest.mark.parametrize("rule", [{"window": 4, "shift": 1}, {"neighborhood": 5}], ids=str)
def test_periodic_attention_is_priced_by_block(rule):
    """Blocks have any extents: they need not be whole windows, or longer than a neighborhood."""
    made = network(16, periodic=True, **rule)
    work = LayerWork.of(made.layers["attention"].layer, [(1, 3, 20, 32)] * 3, "float32", outputs=(3, 20))
    assert RooflineTimes(LASSEN).of_work(work).forward > 0 and work.output == (3, 20, 32)
    assert plan_network(made, 1, 4, LASSEN, RooflineTimes(LASSEN)).step_seconds > 0


def test_a_plan_names_the_algorithm_of_each_attention():
    machine = LASSEN.emulated(2e-5, 2e-9)
    plan = plan_network(network(32), 1, 4, machine, RooflineTimes(machine))
    again = simulate(network(32), plan.strategy, 1, priced(machine), ranks=4)
    assert again.step_seconds == pytest.approx(plan.step_seconds)
    assert again.memory_bytes == plan.prediction.memory_bytes
    assert all(plan.step_seconds <= other.step_seconds for other in plan.alternatives if other.fits)


def test_a_ring_holds_blocks_and_not_whole_samples():
    """The arena of a ring gets smaller with more ranks; messages, which have memory of their own, do not."""
    made = network()
    sizes = {
        (halo, ranks): simulate(made, Strategy({"height": ranks}, {"attention": {"halo": halo}}), 1, priced(LASSEN),
                                ranks=ranks).memory["transient"]
        for halo in ("pad", "overlap")
        for ranks in (4, 16)
    }  # fmt: skip
    assert sizes["overlap", 16] < sizes["overlap", 4] / 3 and sizes["pad", 16] > sizes["pad", 4] / 2


def test_times_are_those_of_the_pairs_that_are_read():
    """Windows of 8 x 8 read 64 keys per query, whole samples 4,096; a block of two of four heads costs half."""
    times, shape = RooflineTimes(LASSEN), (1, 64, 64, 128)
    whole, windows = (
        times.of_work(LayerWork.of(Attention(4, window=window, name="a"), [shape] * 3)) for window in (None, 8)
    )
    assert whole.forward > 5 * windows.forward and whole.backward > 2 * whole.forward
    half = LayerWork.of(Attention(4, name="a"), [(1, 64, 64, 64)] * 3, filters=2)
    assert whole.forward / 2 < times.of_work(half).forward < whole.forward / 1.5  # small kernels are slower
