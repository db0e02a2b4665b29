"""Which dense layers may be replicated, and how it is refused."""

import pytest

from halograd.errors import UserError
from halograd.layers import Strategy
from halograd.layers.replication import replicable_layers, saves_traffic
from halograd.models import resnet50, vgg_a

VGG = vgg_a()


def test_traffic_of_vgg_a_as_in_the_paper():
    """Lee et al., Section III-C2: 102,760,448 gradients against 7,471,104 activations and errors of 256 images."""
    (features,), (units,) = VGG.layers["dense1"].inputs[0].shape, VGG.layers["dense1"].shape
    assert (features * units, (features + units) * 256) == (102_760_448, 7_471_104)
    assert saves_traffic(VGG.layers["dense1"], 256) and not saves_traffic(VGG.layers["dense3"], 1024)


@pytest.mark.parametrize(
    "strategy, batch, names",
    [
        (Strategy({"sample": 4}), 256, ["dense1", "dense2", "dense3"]),
        (Strategy({"sample": 4}), 1024, ["dense1", "dense2"]),
        (Strategy({"sample": 4}), 4096, []),
        (Strategy({"height": 2, "width": 2}), 256, ["dense1", "dense2", "dense3"]),
        (Strategy({"sample": 1}), 256, []),
        (Strategy({"sample": 4}, {"dense2": {"channel": 4}}), 256, ["dense1"]),
        (Strategy({"sample": 4}, {"dense1": {"input_channel": 4}}), 256, []),
        (Strategy({"sample": 4}, {"dense1": {"sample": 1}}), 256, []),
    ],
)
def test_first_layers_that_save_traffic(strategy, batch, names):
    assert replicable_layers(strategy, VGG, batch) == names


@pytest.mark.parametrize(
    "layers, count, text",
    [
        ({"dense1": {"channel": 4}}, 1, "'dense1' in 4 blocks of channels; use no replicated_dense"),
        (
            {"dense2": {"channel": 2, "input_channel": 2}},
            3,
            "'dense2' in 4 blocks of channels; use replicated_dense = 1",
        ),
        ({}, 4, "expected at most the 3 dense layers of 'vgg_a', got 4"),
    ],
)
def test_refused(layers, count, text):
    strategy = Strategy({"sample": 4}, layers, reduction={"replicated_dense": count})
    with pytest.raises(UserError, match=r"^reduction\.replicated_dense: expected") as refused:
        strategy.validate(VGG, 4)
    assert text in str(refused.value) and "\n" not in str(refused.value)


def test_a_cut_layer_behind_the_replicated_ones_is_fine():
    Strategy({"sample": 4}, {"dense3": {"channel": 4}}, reduction={"replicated_dense": 2}).validate(VGG, 4)


def test_a_network_with_one_dense_layer():
    with pytest.raises(UserError, match="at most the 1 dense layers"):
        Strategy({"sample": 4}, reduction={"replicated_dense": 2}).validate(resnet50(), 4)


def test_auto_chooses_the_layers_itself():
    with pytest.raises(UserError, match='expected none with name = "auto", which chooses it, got 1'):
        Strategy(reduction={"name": "auto", "replicated_dense": 1})
