"""Tests of networks for samples of another size: same parameters, padding to what the layers divide, refusals."""

import pytest

import halograd as hg
from halograd.layers.resized import resized
from halograd.layers.settings import difference, fingerprint
from halograd.models import unet3d


def halving(edge=16, valid=False):
    """Return a network that halves its samples twice and doubles them again, with unnamed layers and two inputs."""
    x, coarse = hg.Input((edge, edge, 2), name="x"), hg.Input((edge // 2, edge // 2, 1), name="coarse")
    y = hg.Conv(3, 3, padding=1)(x)
    half = hg.Concat()(hg.MaxPool(2, 2)(y), coarse)
    up = hg.Resize(2)(hg.Conv(4, 3, padding=1)(hg.MaxPool(2, 2)(half)))
    y = hg.Conv(1, 3, padding=0 if valid else 1)(hg.Resize(2)(hg.Concat()(half, up)))
    loss = hg.MeanSquaredError()(y, hg.Input(y.shape, "target"), hg.Input((1, y.shape[1], 1), "weights"))
    return hg.Network({"prediction": y, "loss": loss}, frozen=["conv1"])


def shapes(network):
    return {name: node.shape for name, node in network.inputs.items()}


@pytest.mark.parametrize("extents, pads", [((24, 32), []), ((18, 16), ["pad/coarse", "pad/x"])])
def test_extents(extents, pads):
    old = halving()
    made = resized(old, extents)
    height, width = extents
    assert shapes(made) == {
        "x": (height, width, 2),
        "coarse": (height // 2, width // 2, 1),
        "target": (height, width, 1),
        "weights": (1, width, 1),
    }
    assert sorted(name for name in made.layers if name.startswith("pad/")) == pads
    assert made.outputs["prediction"].shape == (height, width, 1)
    assert made.outputs["loss"].inputs[0] is made.outputs["prediction"]
    assert made.frozen == old.frozen and fingerprint(made) == fingerprint(old)
    assert difference(fingerprint(halving(32)), fingerprint(made), extents=False) is None
    assert made.parameters().keys() == old.parameters().keys()


def test_valid_convolutions():
    assert shapes(resized(halving(valid=True), (20, 24)))["target"] == (18, 22, 1)


def test_a_model():
    made = resized(unet3d(resolution=16, channels=2, width=2), (13, 16, 21))
    assert shapes(made) == {"x": (13, 16, 21, 2), "target": (13, 16, 21, 1)}
    assert made.layers["pad/x"].shape == (16, 16, 24, 2)


def test_parameters_that_depend_on_the_extents():
    x = hg.Input((8, 8, 1), name="x")
    y = hg.Dense(2)(hg.Flatten()(x))
    network = hg.Network({"prediction": y, "loss": hg.MeanSquaredError()(y, hg.Input((2,), "target"))})
    with pytest.raises(ValueError, match=r"no samples of 8 x 16: its parameter dense1/w depends on their size"):
        resized(network, (8, 16))
    with pytest.raises(ValueError, match="expected an input of 3 spatial axes, got none"):
        resized(network, (8, 8, 8))


@pytest.mark.parametrize("make", [lambda: hg.Pad(1, "sphere"), lambda: hg.Roll((0, 1))], ids=["sphere", "roll"])
def test_axes_whose_ends_meet_are_not_padded(make):
    x = hg.Input((8, 8, 1), name="x")
    y = hg.Crop()(make()(hg.Concat()(x, hg.ConvTranspose(1, 2, 2)(hg.Conv(1, 2, stride=2)(x)))), x)
    with pytest.raises(ValueError, match="it is circular along an axis that would be"):
        resized(hg.Network({"y": y}), (8, 11))


def test_circular_axes_of_other_arrays_do_not_matter():
    """Tokens have an axis of their own, and a shift of two axes in a branch of images does not fit volumes."""
    x, tokens, image = hg.Input((8, 8, 8, 1), "x"), hg.Input((6, 1), "tokens"), hg.Input((4, 6, 1), "image")
    rolled = hg.GlobalAveragePool()(hg.Roll(1)(tokens)) + hg.GlobalAveragePool()(hg.Roll((1, 2))(image))
    y = hg.ConvTranspose(1, 2, 2)(hg.Conv(1, 2, 2)(x)) * rolled
    assert shapes(resized(hg.Network({"y": y}), (7, 8, 9))) == {"x": (7, 8, 9, 1), "tokens": (6, 1), "image": (4, 6, 1)}


def test_circular_axes_are_not_padded():
    x = hg.Input((16, 16, 1), name="x")
    y = hg.Conv(1, 3, stride=2, padding=(1, 0))(hg.Pad([(0, 0), (1, 1)], "circular")(x))
    network = hg.Network({"y": hg.ConvTranspose(1, 2, stride=2)(y)})
    assert shapes(resized(network, (17, 24))) == {"x": (17, 24, 1)}
    with pytest.raises(ValueError, match="takes no samples of 16 x 17: it is circular along an axis that would be"):
        resized(network, (16, 17))
