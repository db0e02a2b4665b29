"""Networks are written as ONNX, executed by onnxruntime, and read again."""

from __future__ import annotations

import numpy as np
import pytest

import halograd as hg
from halograd import models
from halograd.data import ChannelStatistics
from halograd.errors import UserError
from halograd.layers import Layer
from halograd.testing import random_array
from tests.interchange.support import predicted, samples

pytest.importorskip("onnx", reason="needs onnx: pip install 'halograd[interchange]'")

IMAGE = (8, 7, 4)
#: By name: layers in sequence, and the shape of a sample.
LAYERS = {
    "conv": (lambda: [hg.Conv(6, (3, 2), (2, 1), ((1, 2), (0, 1)), (1, 2), activation="relu")], IMAGE),
    "conv in groups": (lambda: [hg.Conv(6, 3, groups=2, bias=False, padding="same")], IMAGE),
    "conv 1d": (lambda: [hg.Conv(3, 3, 2)], (9, 4)),
    "conv 3d": (lambda: [hg.Conv(3, 2)], (4, 5, 3, 2)),
    "conv transposed": (lambda: [hg.ConvTranspose(6, 3, 2, 1, output_padding=1)], IMAGE),
    "conv transposed, same": (lambda: [hg.ConvTranspose(6, 2, 3, "same", bias=False)], IMAGE),
    "batch norm": (lambda: [hg.BatchNorm(momentum=0.3, eps=1e-3, activation="relu")], IMAGE),
    "batch norm without parameters": (lambda: [hg.BatchNorm(affine=False)], IMAGE),
    "group norm": (lambda: [hg.GroupNorm(2, activation="relu")], IMAGE),
    "activations inside": (
        lambda: [
            hg.Conv(6, 3, activation=hg.LeakyReLU(0.2)),
            *(hg.GroupNorm(2, activation=kind) for kind in ("silu", "mish", "elu", hg.GELU("tanh"), "hard_swish")),
        ],
        IMAGE,
    ),
    "norms of modules": (lambda: [hg.GroupNorm(2, name="a.0"), hg.InstanceNorm(affine=False, name="a.1")], IMAGE),
    "group norm of vectors": (lambda: [hg.GroupNorm(2)], (4,)),
    "instance norm": (lambda: [hg.InstanceNorm(affine=False)], IMAGE),
    "layer norm": (lambda: [hg.LayerNorm()], IMAGE),
    "layer norm of channels": (lambda: [hg.LayerNorm("channels")], IMAGE),
    "local response norm": (lambda: [hg.LocalResponseNorm(3)], IMAGE),
    "max pool": (lambda: [hg.MaxPool(3, 2, ((0, 1), (1, 1)))], IMAGE),
    "average pool": (lambda: [hg.AveragePool(3, 2, 1)], IMAGE),
    "average pool of what is there": (lambda: [hg.AveragePool(3, 2, 1, count_include_pad=False)], IMAGE),
    "nearest": (lambda: [hg.Resize(scale=2)], IMAGE),
    "nearest by a fraction": (lambda: [hg.Resize(scale=1.7)], IMAGE),
    "exact nearest": (lambda: [hg.Resize(size=(5, 11), mode="nearest-exact")], IMAGE),
    "linear": (lambda: [hg.Resize(size=(5, 11), mode="bilinear")], IMAGE),
    "dense": (lambda: [hg.Flatten(), hg.Dense(5), hg.ReLU(), hg.Dropout(0.5), hg.Dense(2, bias=False)], IMAGE),
    "global pool": (lambda: [hg.GlobalAveragePool(), hg.Dense(3), hg.Softmax()], IMAGE),
    "pad": (lambda: [hg.Pad(((1, -2), (0, 3)), value=0.5)], IMAGE),
    "reflect": (lambda: [hg.Pad(((1, 2), (0, 3)), "reflect")], IMAGE),
    "replicate": (lambda: [hg.Pad(2, "replicate")], IMAGE),
    "circular": (lambda: [hg.Pad(((1, 0), (2, 2)), "circular")], IMAGE),
    "slice": (lambda: [hg.Slice(1, 3)], IMAGE),
    "channel pad": (lambda: [hg.ChannelPad(1, 2)], IMAGE),
    "activations": (
        lambda: [
            hg.LeakyReLU(0.2),
            hg.ELU(0.7),
            hg.GELU(),
            hg.GELU("tanh"),
            hg.SiLU(),
            hg.HardSwish(),
            hg.HardSigmoid(),
            hg.Tanh(),
        ],
        IMAGE,
    ),
    "max pool, rounded up": (lambda: [hg.MaxPool(3, 2, ceil_mode=True)], IMAGE),
    "average pool, rounded up": (lambda: [hg.AveragePool(3, 2, 1, count_include_pad=False, ceil_mode=True)], IMAGE),
    "average pool of padding, rounded up": (lambda: [hg.AveragePool(3, 2, 1, ceil_mode=True)], IMAGE),
    "global maximum": (lambda: [hg.GlobalMaxPool()], IMAGE),
    "adaptive maxima": (lambda: [hg.AdaptiveMaxPool((4, 7))], IMAGE),
    "cubic": (lambda: [hg.Resize(scale=2, mode="bicubic")], IMAGE),
    "linear, corners aligned": (lambda: [hg.Resize(size=(5, 11), mode="bilinear", align_corners=True)], IMAGE),
    "scale": (lambda: [hg.Scale(0.3, bias=True), hg.Scale()], IMAGE),
    "positions": (lambda: [hg.Embedding(name="pos"), hg.Embedding(("height", "width")), hg.Embedding(())], IMAGE),
    "positions 1d": (lambda: [hg.Embedding(name="prediction")], (5, 4)),
    "embedding of vectors": (lambda: [hg.Embedding(name="pos")], (4,)),
    "masks": (lambda: [hg.Scale(axes=("width",)), hg.Scale(axes=(), bias=True)], IMAGE),
    "masks 3d": (lambda: [hg.Scale(axes=("depth", "channel"), bias=True)], (2, 3, 2, 4)),
    "constant arrays": (
        lambda: [hg.Embedding(trained=False), hg.Scale(axes=("height", "width"), bias=True, trained=False)],
        IMAGE,
    ),
    "learned slopes": (lambda: [hg.PReLU(), hg.PReLU("channel")], IMAGE),
    "clamp": (lambda: [hg.Clamp(-0.5, 0.7), hg.Clamp(-np.inf, 0.5)], IMAGE),
    "sigmoid": (lambda: [hg.Sigmoid()], IMAGE),
    "softmax": (lambda: [hg.Softmax()], IMAGE),
    "log softmax": (lambda: [hg.LogSoftmax()], IMAGE),
    "softplus": (lambda: [hg.Softplus()], IMAGE),
    "numbers": (lambda: [hg.Affine(-0.5, 0.7), hg.ReLU(), hg.Affine(1, 0.3)], IMAGE),
    "channel shuffle": (lambda: [hg.ChannelShuffle(2)], IMAGE),
    "channel shuffle 1d": (lambda: [hg.ChannelShuffle(3)], (9, 6)),
    "pixel unshuffle 1d": (lambda: [hg.PixelUnshuffle(3)], (9, 2)),
    "pixel unshuffle": (lambda: [hg.PixelUnshuffle(2)], (8, 6, 3)),
    "pixel shuffle 3d": (lambda: [hg.PixelShuffle(2)], (2, 3, 2, 16)),
    "pixel shuffle": (lambda: [hg.PixelShuffle(2)], IMAGE),
    "functions": (
        lambda: [hg.Abs(), hg.Affine(1, 1), hg.Log(), hg.Exp(), *map(hg.Power, (0.5, 2, -1, -0.5, 1.7))],
        IMAGE,
    ),
    "flip": (lambda: [hg.Flip("width", "channel")], IMAGE),
    "mean of channels": (lambda: [hg.ChannelMean()], IMAGE),
    "maximum of channels": (lambda: [hg.ChannelMax()], IMAGE),
}
#: Layers that become other layers when their ONNX operators are read again.
WRITTEN = {
    "conv of directions and lengths": (lambda: [hg.Conv(6, 3, padding=1, weight_norm=True)], IMAGE),
    "dense of directions and lengths": (lambda: [hg.Dense(3, weight_norm=True, activation="silu")], (4,)),
    "mish": (lambda: [hg.Mish()], IMAGE),
    "rms norm": (lambda: [hg.RMSNorm(activation="silu"), hg.RMSNorm(1e-3, affine=False)], IMAGE),
    "rms norm of vectors": (lambda: [hg.RMSNorm()], (4,)),
    "sphere": (lambda: [hg.Pad(((8, 2), (1, 3)), hg.Sphere(longitude=1), name="p")], (8, 6, 3)),
    "sphere of vectors": (lambda: [hg.Pad(((0, 2), (1, 3)), hg.Sphere(poles=True, sign=(1, -1)))], (4, 6, 2)),
    "padded as a sphere": (lambda: [hg.Conv(3, 3, padding=1, padding_mode="sphere")], (4, 6, 2)),
    "roll": (lambda: [hg.Roll((3, -2))], IMAGE),
    "patches": (lambda: [hg.PatchEmbedding((2, 1), 5), hg.PatchMerging()], IMAGE),
    "adaptive means": (lambda: [hg.AdaptiveAveragePool((3, 5))], IMAGE),
    "adaptive means to one": (lambda: [hg.AdaptiveAveragePool(1)], IMAGE),
    "area": (lambda: [hg.Resize(size=(5, 2, 3), mode="area")], (6, 4, 3, 2)),
    "attention": (lambda: [hg.MultiHeadAttention(2, width=3, groups=1)], IMAGE),
    "attention to windows": (
        lambda: [hg.MultiHeadAttention(2, window=(3, 2), shift=(1, 1), bias="relative", name="m")],
        IMAGE,
    ),
    "attention to neighborhoods": (
        lambda: [hg.MultiHeadAttention(2, neighborhood=3, dilation=(1, 2), bias="relative", scale=0.3)],
        IMAGE,
    ),
    "attention of tokens": (
        lambda: [hg.Token(1), hg.MultiHeadAttention(2, bias="relative"), hg.Dropout(0.1)],
        (5, 4),
    ),
    "periodic windows": (lambda: [hg.MultiHeadAttention(1, window=2, shift=1, periodic=True)], (2, 4, 4, 2)),
    "rows": (lambda: [hg.Slice(2, 5, axis="height")], IMAGE),
    "class tokens": (lambda: [hg.Token(2), hg.Token(name="class")], (5, 4)),
    "reshape": (lambda: [hg.Dense(30), hg.Reshape((2, 3, 5)), hg.Conv(2, 1)], (4,)),
    "joined rows": (lambda: [lambda x: hg.Concat(axis="width")(x, hg.ReLU()(x))], IMAGE),
    "tokens": (lambda: [hg.Reshape((-1, 4)), hg.Conv(6, 3), hg.Reshape((5, 2, -1))], (3, 4, 4)),
    "random depth": (lambda: [hg.StochasticDepth(0.5), hg.ChannelDropout(0.5)], IMAGE),
}


def _chain(layers, shape) -> hg.Network:
    y = hg.Input(shape, name="x")
    for layer in layers:
        y = layer(y)
    return hg.Network({"prediction": y})


def _shaken(network: hg.Network) -> hg.Network:
    """Return the network with random parameters and statistics that reveal errors."""
    specs = {**network.parameters(), **network.state()}
    drawn = {name: 0.5 * random_array(spec.shape, name) for name, spec in specs.items()}
    network.begin_with({name: 0.5 + np.abs(a) if name.endswith("/var") else a for name, a in drawn.items()})
    return network


def _run(path, x: np.ndarray) -> dict[str, np.ndarray]:
    """Return the outputs of onnxruntime by name, with channels last."""
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install 'halograd[interchange]'")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    given = {one.name: np.moveaxis(x, -1, 1).astype(np.float32) for one in session.get_inputs()}
    names = [one.name for one in session.get_outputs()]
    return {name: np.moveaxis(y, 1, -1) for name, y in zip(names, session.run(names, given))}


def _check(network: hg.Network, path, x: np.ndarray) -> None:
    """Check that onnxruntime agrees within 1e-4 in float32, and that the network read again agrees in float64."""
    want = predicted(network, x)
    hg.onnx.save(network, None, path)
    found = _run(path, x)
    hg.onnx.save(network, None, path, dtype="float64")
    read = hg.onnx.load(path)
    assert read.parameter_count == network.parameter_count
    again = predicted(read, x)
    assert set(found) == set(want) - {"loss"} == set(again)
    for name, y in found.items():
        largest = max(1.0, np.abs(want[name]).max())
        np.testing.assert_allclose(y, want[name], rtol=0, atol=1e-4 * largest)
        np.testing.assert_allclose(again[name], want[name], rtol=0, atol=1e-11 * largest)


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, tmp_path):
    make, shape = LAYERS[name]
    _check(_shaken(_chain(make(), shape)), tmp_path / "m.onnx", samples(*shape))


@pytest.mark.parametrize("name", WRITTEN)
def test_layers_that_are_written_only(name, tmp_path):
    make, shape = WRITTEN[name]
    network, x = _shaken(_chain(make(), shape)), samples(*shape)
    want = predicted(network, x)
    hg.onnx.save(network, None, tmp_path / "m.onnx")
    ((name, found),) = _run(tmp_path / "m.onnx", x).items()
    np.testing.assert_allclose(found, want[name], rtol=0, atol=1e-4 * max(1.0, np.abs(want[name]).max()))


def test_layers_that_cannot_be_written(tmp_path):
    with pytest.raises(UserError, match=r"expected a number of outputs that divides \(8, 7\), got \(3, 5\)"):
        hg.onnx.save(_chain([hg.AdaptiveMaxPool((3, 5))], IMAGE), None, tmp_path / "m.onnx")


def test_layers_of_several_inputs(tmp_path):
    x = hg.Input(IMAGE, name="x")
    y = hg.Add(activation="relu")(hg.Conv(4, 1)(x), hg.Conv(4, 1)(x), x)
    y = hg.BatchNorm(activation="relu")(y, hg.Conv(4, 1)(x))
    y = y * hg.Sigmoid()(hg.GlobalAveragePool()(x)) * hg.Conv(1, 1)(x)
    z = hg.GlobalAveragePool()(x) + (y - hg.Conv(1, 1)(x))
    network = hg.Network({"joined": hg.Concat()(x, y, x), "gated": y, "shifted": z})
    _check(_shaken(network), tmp_path / "m.onnx", samples(*IMAGE))


def _twice(layer, between, shape=IMAGE) -> hg.Network:
    return _shaken(hg.Network({"y": layer(between(layer(hg.Input(shape, name="x"))))}))


SHARED = {
    "conv": (lambda: hg.Conv(4, 3, padding=1, activation="relu", name="c"), IMAGE, {"c.weight", "c.bias"}),
    "conv transposed": (lambda: hg.ConvTranspose(4, 2, 2, bias=False, name="c"), IMAGE, {"c.weight"}),
    "dense": (lambda: hg.Dense(4, name="c"), (4,), {"c.weight", "c.bias"}),
    "group norm": (lambda: hg.GroupNorm(2, name="c"), IMAGE, {"c.weight", "c.bias"}),
    "slopes": (lambda: hg.PReLU("channel", name="c"), IMAGE, {"c.weight"}),
    "positions": (lambda: hg.Embedding(name="c"), IMAGE, {"c"}),
}


def _parameters_of(path) -> set[str]:
    import onnx

    return {one.name for one in onnx.load(path).graph.initializer if "::" not in one.name}


@pytest.mark.parametrize("name", SHARED)
def test_a_layer_that_is_called_twice_is_written_and_read_as_one(name, tmp_path):
    make, shape, wanted = SHARED[name]
    network = _twice(make(), hg.Tanh(), shape)
    _check(network, tmp_path / "m.onnx", samples(*shape))
    assert _parameters_of(tmp_path / "m.onnx") == wanted
    assert {"c", "c#2"} <= hg.onnx.load(tmp_path / "m.onnx").layers.keys()


@pytest.mark.parametrize(
    ("make", "behind", "wanted", "atol"),
    [
        (lambda: hg.Scale(0.3, bias=True, name="c"), hg.Tanh, {"c.weight", "c.bias"}, 1e-4),
        (lambda: hg.LayerNorm("channels", name="c"), hg.Tanh, {"c.weight", "c.bias"}, 1e-4),
        # Arrays of different shapes: maps and vectors.
        (lambda: hg.PReLU("channel", name="c"), hg.GlobalAveragePool, {"c.weight", "c#2.weight"}, 1e-5),
    ],
)
def test_a_layer_that_is_called_twice_is_written_once(make, behind, wanted, atol, tmp_path):
    network, x = _twice(make(), behind()), samples(*IMAGE)
    hg.onnx.save(network, None, tmp_path / "m.onnx")
    assert _parameters_of(tmp_path / "m.onnx") == wanted
    np.testing.assert_allclose(_run(tmp_path / "m.onnx", x)["y"], predicted(network, x)["y"], rtol=0, atol=atol)


def test_one_value_under_several_names(tmp_path):
    x = hg.Input(IMAGE, name="x")
    y = hg.Conv(2, 1)(x)
    network = hg.Network({"a": y, "b": y, "behind": hg.Tanh()(y), "c": y})
    _check(_shaken(network), tmp_path / "m.onnx", samples(*IMAGE))


def test_targets_and_weights_are_not_written(tmp_path):
    import onnx

    x = hg.Input(IMAGE, name="x")
    y = hg.Conv(2, 1, name="logits")(x)
    loss = hg.SoftmaxCrossEntropy()(y, hg.Input((*IMAGE[:-1], 1), "t", "int32"), hg.Input((1,), "w"))
    network = _shaken(hg.Network({"prediction": y, "loss": loss}))
    hg.onnx.save(network, None, tmp_path / "m.onnx")
    assert [given.name for given in onnx.load(tmp_path / "m.onnx").graph.input] == ["x"]


SMALL = {
    "lenet5": {},
    "alexnet": {"resolution": 67, "width": 0.05, "classes": 5},
    "vgg_a": {"resolution": 32, "width": 0.05, "classes": 5},
    "googlenet": {"resolution": 64, "width": 0.1, "classes": 5},
    "inception_v3": {"resolution": 75, "width": 0.05, "classes": 5},
    "resnet50": {"resolution": 32, "width": 4, "classes": 5},
    "mesh": {"resolution": 32, "channels": 3, "widths": [4, 6], "convs": 1, "decoder": True},
    "unet2d": {"resolution": 16, "width": 4, "levels": 2},
    "unet3d": {"resolution": 8, "width": 4, "levels": 2},
}


@pytest.mark.parametrize("name", SMALL)
def test_models(name, tmp_path):
    network = _shaken(models.build(name, **SMALL[name]))
    shape = network.inputs["x"].shape
    loss = network.outputs["loss"]
    bare = hg.Network({key: node for key, node in network.outputs.items() if node is not loss})
    _check(bare, tmp_path / "m.onnx", samples(*shape))
    hg.onnx.save(network, None, tmp_path / "whole.onnx")
    assert (tmp_path / "whole.onnx").read_bytes() == _written(bare, tmp_path, network.name)


def _written(network: hg.Network, folder, name: str) -> bytes:
    network.name = name
    hg.onnx.save(network, None, folder / "bare.onnx")
    return (folder / "bare.onnx").read_bytes()


def test_normalization_is_a_part_of_the_graph(tmp_path):
    network = _chain([hg.ReLU()], (5, 4, 6))
    rules = ("none", "log", "asinh", "clip", "none", "metric")
    mean, std = np.array([1.0, 0.5, -1.0, 0.0, 2.0, 1.0]), np.array([2.0, 1.0, 3.0, 0.1, 0.0, 2.0])
    statistics = ChannelStatistics(mean, std, rules, 10)
    x = 10 * samples(5, 4, 6)
    x[0, 0, 0] = 1e7
    hg.onnx.save(network, None, tmp_path / "m.onnx", {"x": statistics})
    want = x.copy()
    statistics.apply(want)
    np.testing.assert_allclose(_run(tmp_path / "m.onnx", x)["prediction"], np.maximum(want, 0), rtol=1e-5, atol=1e-5)


class Own(Layer):
    """Layer without an ONNX operator."""


def test_refusals(tmp_path):
    path = tmp_path / "m.onnx"
    with pytest.raises(UserError, match=r"layer 'mine' \(Own\): expected a layer of halograd with ONNX operators"):
        hg.onnx.save(_chain([Own("mine")], IMAGE), None, path)
    with pytest.raises(UserError, match=r"layer 'n' \(LocalResponseNorm\): expected windows of an odd number .* got 4"):
        hg.onnx.save(_chain([hg.LocalResponseNorm(4, name="n")], IMAGE), None, path)
    with pytest.raises(UserError, match=r"expected c/w of shape \(2, 1, 1, 4\), got none; give whole arrays"):
        hg.onnx.save(_chain([hg.Conv(2, 1, name="c")], IMAGE), {}, path)
    x, t = hg.Input((4,), "x"), hg.Input((4,), "t")
    with pytest.raises(UserError, match="expected another output than the loss, got none; name a prediction"):
        hg.onnx.save(hg.Network({"loss": hg.MeanSquaredError()(x, t)}), None, path)
    assert not path.exists()
