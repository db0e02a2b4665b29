"""Cuts of small layers: which layers change, which never do, and the results."""

from dataclasses import replace

import pytest

from halograd.layers import BatchNorm, Conv, Dense, GlobalAveragePool, Input, Network, SoftmaxCrossEntropy, Strategy
from halograd.models import mesh_2k, resnet50
from halograd.perfmodel.cost import NetworkModel, Pricing, simulate
from halograd.perfmodel.kernel_times import RooflineTimes
from halograd.perfmodel.machine import Machine
from halograd.perfmodel.small import LEAST, MACHINE, WORTH, suit_small_layers


def classifier(statistics: str = "global") -> Network:
    """Return a network whose last layers have few positions and most of the weights."""
    y = Input((32, 32, 3), name="x")
    for i, width in enumerate((16, 256, 512, 256)):
        y = Conv(width, 3, 1 if i > 1 else 4, padding=1, bias=False, name=f"conv{i}")(y)
        y = BatchNorm(statistics=statistics, activation="relu", name=f"bn{i}")(y)
    y = Dense(10, name="dense")(GlobalAveragePool(name="pool")(y))
    loss = SoftmaxCrossEntropy(name="ce")(y, Input((1,), name="target", dtype="int32"))
    return Network({"prediction": y, "loss": loss}, name="classifier")


def changed(strategy: Strategy, batch: int = 1, ranks: int = 2, network: Network | None = None) -> tuple[str, ...]:
    return suit_small_layers(network or classifier(), strategy, batch, ranks).layers


def test_deep_layers_of_a_classifier_leave_the_common_cut() -> None:
    found = suit_small_layers(resnet50(), Strategy({"height": 2}), 1, 2)
    assert not any(name.startswith(("conv1", "conv2", "conv3")) for name in found.layers)
    deep = {name for name in resnet50().layers if name.startswith("conv5")}
    assert deep <= set(found.layers)
    assert all(found.strategy.parts_of(name)["height"] == 1 for name in found.layers)
    assert found.given_seconds - found.prediction.step_seconds > max(LEAST, WORTH * found.given_seconds)
    found.strategy.validate(resnet50(), 2)
    assert found.strategy.parts == {"height": 2} and set(found.strategy.layers) == set(found.layers)
    assert suit_small_layers(resnet50(), Strategy({"height": 2}), 1, 2).strategy == found.strategy


def test_large_blocks_keep_it() -> None:
    assert changed(Strategy({"height": 2, "width": 2}), ranks=4, network=mesh_2k(resolution=1024)) == ()


@pytest.mark.parametrize("parts", [{"height": 2}, {"height": 2, "width": 2}, {"sample": 2, "height": 2}])
def test_what_keeps_its_cut(parts: dict[str, int]) -> None:
    ranks = 2 * len(parts)
    assert "conv2" in changed(Strategy(parts), 2, ranks)
    assert not {"conv0", "ce"} & set(changed(Strategy(parts), 2, ranks))  # conv0 reads the sample
    assert changed(Strategy({"sample": ranks}), ranks, ranks) == ()
    own = Strategy(parts, {"conv2": parts, "bn2": {"halo": "pad"}})
    found = suit_small_layers(classifier(), own, 2, ranks)
    assert "conv2" not in found.layers and found.strategy.cuts_of("conv2") == own.cuts_of("conv2")
    assert found.layers and found.strategy.options_of("bn2") == {"halo": "pad"}


def test_shares_and_local_statistics() -> None:
    assert changed(Strategy({"height": [2, 1]})) == ()
    norms = {f"bn{i}" for i in range(4)}
    assert norms & set(changed(Strategy({"height": 2})))
    for found in (
        changed(Strategy({"height": 2}), network=classifier("local")),
        changed(Strategy({"height": 2}, options={"statistics": "sample"})),
    ):
        assert not norms & set(found)


def test_memory_does_not_grow() -> None:
    """Cuts on fewer ranks, which are fastest where only messages take time, are not chosen if they need more memory."""
    machine = Machine.load(MACHINE)
    machine = replace(machine, memory_bandwidth=1e15, peak_flops={"float32": 1e18}, launch=0.0)
    machine = replace(machine, links={level: replace(link, alpha=1e-3) for level, link in machine.links.items()})
    network, strategy = mesh_2k(resolution=128), Strategy({"height": 4})
    found = suit_small_layers(network, strategy, 1, 4, machine)
    pricing = Pricing(NetworkModel(machine), RooflineTimes(machine))
    before, after = (simulate(network, one, 1, pricing, ranks=4).memory_bytes for one in (strategy, found.strategy))
    assert found.layers and after <= 1.02 * before
