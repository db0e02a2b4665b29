"""Tests of candidate reduction schemes, and of their order by predicted time."""

import pytest

from halograd.layers import Strategy
from halograd.layers.reduction_scheme import Scheme
from halograd.models import alexnet, mesh, resnet50, vgg_a
from halograd.perfmodel.cost import NetworkModel, Pricing, Training, simulate
from halograd.perfmodel.kernel_times import RooflineTimes
from halograd.perfmodel.machine import Machine
from halograd.perfmodel.plan_candidates import candidate_schemes, first_chunks, rank_schemes, shortlist

VGG = vgg_a()
FOUR = Strategy({"sample": 4})


def test_first_chunks_of_vgg_a_are_those_of_the_paper():
    """The first chunks of VGG-A are those of Lee et al. 2017, Section IV-C4: 3, 6, 9 and 12 layers."""
    assert first_chunks(VGG) == [3, 6, 9, 12]


@pytest.mark.parametrize("network", [alexnet(), resnet50(), mesh(resolution=64)])
def test_first_chunks_of_networks_with_little_pooling(network):
    sizes = first_chunks(network)
    assert len(sizes) >= 3 and sizes == sorted(set(sizes)) and sizes[0] >= 1
    for k in sizes:  # all of them can be had
        Strategy({"sample": 4}, reduction=Scheme("two_chunks", first_layers=k)).validate(network, 4)


def test_candidates_vary_buckets_chunks_and_replicated_layers():
    schemes = candidate_schemes(VGG, FOUR, 256)
    assert schemes[0] == Scheme("bucketed") and len(set(schemes)) == len(schemes) == 5 * 4
    assert {s.replicated_dense for s in schemes} == {0, 1, 2, 3}
    assert {s.replicated_dense for s in candidate_schemes(VGG, Strategy({"sample": 1}), 256)} == {0}
    assert shortlist(schemes) == [
        Scheme("bucketed"),
        Scheme("two_chunks", first_layers=9),
        Scheme("bucketed", replicated_dense=3),
        Scheme("two_chunks", first_layers=9, replicated_dense=3),
    ]


def test_rank_orders_by_predicted_time():
    machine = Machine.load("cori-haswell")
    times = RooflineTimes(machine)
    schemes = candidate_schemes(VGG, FOUR, 256)[:6]
    ranked = rank_schemes(VGG, FOUR, 256, machine, times, schemes)
    assert sorted(map(str, ranked)) == sorted(map(str, schemes))
    assert list(ranked.values()) == sorted(ranked.values())
    for scheme, seconds in list(ranked.items())[:2]:
        strategy = Strategy({"sample": 4}, reduction=scheme)
        alone = simulate(VGG, strategy, 256, Pricing(NetworkModel(machine), times), account=False)
        assert seconds == pytest.approx(alone.step_seconds, rel=1e-12)


def test_the_shape_of_lee_et_al():
    """For VGG-A on 128 nodes of Cori, k = 9 and f = 2 are best, as in Lee et al. (Figures 6, 10 and 11).

    Their speedup with k = 9 and f = 2 is 62.97.
    """
    machine, strategy = Machine.load("cori-haswell"), Strategy({"sample": 128})
    times = RooflineTimes(machine)
    wanted = (
        [("two_chunks", k, 2) for k in (3, 6, 9, 12)] + [("two_chunks", 9, f) for f in (0, 3)] + [("blocking", 0, 0)]
    )
    schemes = [Scheme(name, first_layers=k, replicated_dense=f) for name, k, f in wanted]
    training = Training(slots=0)
    ranked = rank_schemes(VGG, strategy, 256, machine, times, schemes, training)
    seconds = {(scheme.first_layers, scheme.replicated_dense): time for scheme, time in ranked.items()}
    assert seconds[9, 2] < min(seconds[k, 2] for k in (3, 6, 12)) and seconds[9, 2] < min(seconds[9, 0], seconds[9, 3])
    assert list(ranked)[-1].name == "blocking"
    alone = simulate(VGG, Strategy(), 256, Pricing(NetworkModel(machine), times), training, account=False).step_seconds
    assert alone / seconds[9, 2] == pytest.approx(62.97, rel=0.1)
