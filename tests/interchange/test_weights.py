"""Tests of imported weights: files of weights alone, orders of features; saved again."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

import halograd as hg
from halograd import models
from halograd.errors import UserError
from halograd.interchange import load_weights, save_weights
from halograd.interchange.feature_order import feature_orders, pieces
from halograd.interchange.torch_module import state_for
from halograd.interchange.weights import Arrangement, arrangements, check_weights_path
from halograd.layers import Layer, Parameter
from halograd.testing import random_array
from tests.interchange.support import as_module, export, first, last, predicted, samples, shake, torch

pytest.importorskip("safetensors", reason="needs safetensors: pip install 'halograd[interchange]'")


def _network(units: int = 5) -> hg.Network:
    x = hg.Input((4, 6, 3), name="x")
    y = hg.Conv(4, 3, padding=1, groups=1, name="conv")(x)
    y = hg.BatchNorm(activation="relu", name="norm")(y)
    y = hg.ConvTranspose(2, 2, 2, name="up")(y)
    y = hg.BatchNorm(name="flat_norm")(hg.ReLU()(hg.Flatten()(y)))
    return hg.Network({"prediction": hg.Dense(units, name="head")(hg.Dropout(0.5)(y))})


def _arrays(network: hg.Network) -> dict[str, np.ndarray]:
    specs = {**network.parameters(), **network.state()}
    return {name: np.abs(random_array(spec.shape, name)) for name, spec in specs.items()}


@pytest.mark.torch
def test_torch_takes_them_and_computes_the_same(tmp_path):
    lib = torch()
    load_file = __import__("safetensors.torch").torch.load_file
    network = _network()
    save_weights(network, _arrays(network), tmp_path / "w.safetensors")
    nn = lib.nn
    module = nn.ModuleDict(
        {
            "conv": nn.Conv2d(3, 4, 3, padding=1),
            "norm": nn.BatchNorm2d(4),
            "up": nn.ConvTranspose2d(4, 2, 2, 2),
            "flat_norm": nn.BatchNorm1d(192),
            "head": nn.Linear(192, 5),
        }
    ).double()
    module.load_state_dict(load_file(tmp_path / "w.safetensors"))
    module.eval()
    x = samples(4, 6, 3)
    y = module["up"](nn.functional.relu(module["norm"](module["conv"](first(x)))))
    want = module["head"](module["flat_norm"](nn.functional.relu(y.flatten(1)))).detach().numpy()
    network.begin_with(load_weights(network, tmp_path / "w.safetensors"))
    np.testing.assert_allclose(predicted(network, x)["prediction"], want, rtol=1e-10)


def test_there_and_back(tmp_path):
    network = _network()
    arrays = _arrays(network)
    save_weights(network, arrays, tmp_path / "w.safetensors")
    found = load_weights(network, tmp_path / "w.safetensors")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
    part = load_weights(network, tmp_path / "w.safetensors", fresh=["head"])
    assert set(arrays) - set(part) == {"head/w", "head/b"}


@pytest.mark.torch
def test_an_imported_network_has_the_state_of_its_module(tmp_path):
    lib = torch()
    nn = lib.nn
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2)).double()
    shake(module)
    x = samples(6, 4, 3)
    network = hg.onnx.load(export(module, first(x), tmp_path / "m.onnx", "old", training=True))
    save_weights(network, None, tmp_path / "w.safetensors")
    found = __import__("safetensors.torch").torch.load_file(tmp_path / "w.safetensors")
    state = {key: value for key, value in module.state_dict().items() if "num_batches" not in key}
    assert found.keys() == state.keys()
    for key, value in state.items():
        np.testing.assert_array_equal(found[key].numpy(), value.numpy(), err_msg=key)
    module.load_state_dict(found)
    module.eval()
    (ours,) = predicted(network, x).values()
    np.testing.assert_allclose(ours, last(module(first(x))), rtol=1e-10)


def test_refusals_name_the_first_parameter_that_does_not_fit(tmp_path):
    network, path = _network(), tmp_path / "w.safetensors"
    save_weights(network, None, path)
    with pytest.raises(
        UserError, match=r"expected head/w as head.weight of shape \(7, 192\), got \(5, 192\); list the"
    ):
        load_weights(_network(7), path)
    assert "head/w" not in load_weights(_network(7), path, ["head"])
    with pytest.raises(
        UserError, match=r"expected conv1/w under the name conv1\.weight, got none; the file is of another"
    ):
        load_weights(models.build("resnet50", resolution=32), path)
    with pytest.raises(UserError, match="init_fresh: expected layers of network 'network', got 'hed'"):
        load_weights(network, path, ["hed"])
    with pytest.raises(UserError, match="expected a safetensors file, got none"):
        load_weights(network, tmp_path / "none.safetensors")
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(UserError, match="expected a safetensors file, got another"):
        load_weights(network, tmp_path / "text")
    with pytest.raises(UserError, match="expected no file there, or weights that halograd wrote"):
        check_weights_path(tmp_path / "text")
    check_weights_path(path)
    check_weights_path(tmp_path / "new.safetensors")
    with pytest.raises(UserError, match="parameters of network 'network': expected conv/b, got none; give all"):
        save_weights(network, {}, path)


def test_what_a_wrapper_puts_before_the_names_is_left_out(tmp_path):
    network, path = _network(), tmp_path / "w.safetensors"
    save_weights(network, None, path)
    numpy = __import__("safetensors.numpy").numpy
    plain, expected = numpy.load_file(path), load_weights(network, path)
    wrapped = {f"module.model.{key}": array for key, array in plain.items()}
    numpy.save_file({**wrapped, "module.step": np.zeros(1)}, tmp_path / "wrapped")
    actual = load_weights(network, tmp_path / "wrapped")
    assert actual.keys() == expected.keys() and all(np.array_equal(actual[key], expected[key]) for key in expected)
    with pytest.raises(UserError, match=r"expected head/w as module\.model\.head\.weight of shape \(7, 192\)"):
        load_weights(_network(7), tmp_path / "wrapped")
    averages = {f"averages.{key}": array for key, array in plain.items()}
    lacking = {key: array for key, array in wrapped.items() if not key.endswith("head.weight")}
    for several in ({**wrapped, **averages}, lacking):  # no choice is made for the user, and no part is taken
        numpy.save_file(several, tmp_path / "several")
        with pytest.raises(UserError, match=r"expected conv/w under the name conv\.weight, got none"):
            load_weights(network, tmp_path / "several")


#: Some parameters of torchvision 0.28, by our models; the program `zoo` checks all of them.
VISION = {
    "resnet50": {
        "conv1/w": ("conv1.weight", (64, 3, 7, 7)),
        "conv2_1s/w": ("layer1.0.downsample.0.weight", (256, 64, 1, 1)),
        "bn5_3c/var": ("layer4.2.bn3.running_var", (2048,)),
        "dense/b": ("fc.bias", (1000,)),
    },
    "vgg16": {
        "conv1_1/w": ("features.0.weight", (64, 3, 3, 3)),
        "conv5_3/b": ("features.28.bias", (512,)),
        "dense1/w": ("classifier.0.weight", (4096, 25088)),
        "dense3/w": ("classifier.6.weight", (1000, 4096)),
    },
    "vit_b_16": {
        "conv_proj/w": ("conv_proj.weight", (768, 3, 16, 16)),
        "class_token/w": ("class_token", (1, 1, 768)),
        "encoder.pos_embedding/w": ("encoder.pos_embedding", (1, 197, 768)),
        "encoder.layers.encoder_layer_3.ln_1/beta": ("encoder.layers.encoder_layer_3.ln_1.bias", (768,)),
        "encoder.layers.encoder_layer_3.self_attention.key/w": (
            "encoder.layers.encoder_layer_3.self_attention.in_proj_weight",
            (2304, 768),
        ),
        "encoder.layers.encoder_layer_3.self_attention.out/b": (
            "encoder.layers.encoder_layer_3.self_attention.out_proj.bias",
            (768,),
        ),
        "encoder.layers.encoder_layer_3.mlp.3/w": ("encoder.layers.encoder_layer_3.mlp.3.weight", (768, 3072)),
        "heads.head/w": ("heads.head.weight", (1000, 768)),
    },
    "swin_t": {
        "features.0.2/gamma": ("features.0.2.weight", (96,)),
        "features.5.1.attn.value/b": ("features.5.1.attn.qkv.bias", (1152,)),
        "features.5.1.attn.attention/bias": ("features.5.1.attn.relative_position_bias_table", (169, 12)),
        "features.5.1.attn.out/w": ("features.5.1.attn.proj.weight", (384, 384)),
        "features.2.reduction/w": ("features.2.reduction.weight", (192, 384)),
        "head/w": ("head.weight", (1000, 768)),
    },
    "inception_v3": {
        "conv1a/w": ("Conv2d_1a_3x3.conv.weight", (32, 3, 3, 3)),
        "bn5b_3x3_3/beta": ("Mixed_5b.branch3x3dbl_3.bn.bias", (96,)),
        "conv6e_double_5/w": ("Mixed_6e.branch7x7dbl_5.conv.weight", (192, 192, 1, 7)),
        "conv7a_7x7_4/w": ("Mixed_7a.branch7x7x3_4.conv.weight", (192, 192, 3, 3)),
        "conv7c_double_3x1/w": ("Mixed_7c.branch3x3dbl_3b.conv.weight", (384, 384, 3, 1)),
    },
}


@pytest.mark.parametrize("name", VISION)
def test_names_of_torchvision(name):
    found = arrangements(models.build(name))
    for key, (torch_name, shape) in VISION[name].items():
        assert (found[key].names[0], found[key].torch_shape) == (torch_name, shape)
    assert len({(one.names[0], getattr(one, "part", None)) for one in found.values()}) == len(found)
    if name in ("vit_b_16", "swin_t"):  # layers have the names of torch's
        return
    named = {one.names[0].rpartition(".")[0] for one in found.values()}
    assert not named & {key.rpartition("/")[0] for key in found} - {"conv1", "bn1"}, "every layer has a name of torch's"


def test_packed_projections_go_back_to_torch():
    """Queries, keys and values of a model of ours fill one array of torch, in files and in modules."""
    network = models.vit(depth=1, heads=2, width=8, hidden_width=16, patch=8, classes=3, resolution=16)
    arrays = {name: random_array(array.shape, name) for name, array in network.initial_values().items()}
    state = state_for(network, arrays)
    packed, there = state["encoder.layers.encoder_layer_0.self_attention.in_proj_weight"]
    parts = [
        arrays[f"encoder.layers.encoder_layer_0.self_attention.{part}/w"].reshape(8, 8)
        for part in ("query", "key", "value")
    ]
    np.testing.assert_array_equal(packed, np.concatenate(parts))
    assert there.all()
    assert {name: array.shape for name, (array, _) in state.items()} == {
        one.names[0]: one.torch_shape for one in arrangements(network).values()
    }


def test_orders_are_undone():
    flat = pieces((2, 3, 4))
    cases = [((4, 3, 2, 5), {}, 0), ((7, 24), {1: flat}, 0), ((24, 24), {0: flat, 1: flat}, 0), ((24,), {0: flat}, 1)]
    for shape, orders, ones in [*cases, ((3,), {}, 3)]:
        one, array = Arrangement(("w",), shape, orders, ones), random_array(shape, "w")
        np.testing.assert_array_equal(one.from_torch(one.to_torch(array)), array)
        assert one.to_torch(array).shape == one.torch_shape
    order = Arrangement(("w",), (6,), {0: pieces((1, 3, 2))}).to_torch(np.arange(6))  # two channels, three positions
    assert order.tolist() == [0, 2, 4, 1, 3, 5]


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", ["parametrizations", "function"])
def test_weight_norm_and_slopes_have_the_names_of_torch(kind, tmp_path):
    """Weight norm and PReLU are saved with names that torch loads strictly; names of the older function are read."""
    nn = torch().nn
    x = hg.Input((4, 5, 3), name="x")
    y = hg.PReLU("channel", name="slope")(hg.Conv(6, 3, weight_norm=True, name="conv")(x))
    y = hg.PReLU(name="one")(hg.Flatten()(y))
    network = hg.Network({"prediction": hg.Dense(36, weight_norm=True, name="dense")(y)})
    norm = nn.utils.parametrizations.weight_norm if kind == "parametrizations" else nn.utils.weight_norm
    layers = {"conv": norm(nn.Conv2d(3, 6, 3)), "slope": nn.PReLU(6), "flat": nn.Flatten(), "one": nn.PReLU()}
    module = nn.Sequential(OrderedDict(layers, dense=norm(nn.Linear(36, 36)))).double()
    shake(module)
    safetensors = __import__("safetensors.torch").torch
    safetensors.save_file(module.state_dict(), tmp_path / "theirs")
    arrays = load_weights(network, tmp_path / "theirs")
    network.begin_with(arrays)
    given = samples(4, 5, 3)
    want = module(first(given)).detach().numpy()
    np.testing.assert_allclose(predicted(network, given)["prediction"], want, rtol=0, atol=1e-12 * np.abs(want).max())
    if kind == "parametrizations":
        save_weights(network, arrays, tmp_path / "ours")
        module.load_state_dict(safetensors.load_file(tmp_path / "ours"))
        np.testing.assert_array_equal(module(first(given)).detach().numpy(), want)


class Both(Layer):
    """Layer with two parameters that torch would both call weight."""

    def parameters(self, *shapes):
        return {key: Parameter(shapes[0][-1:]) for key in ("w", "gamma", "b")}


def test_parameters_of_one_layer_have_different_names(tmp_path):
    network = hg.Network({"y": Both("own")(hg.Input((3,), name="x"))})
    names = {key: one.names for key, one in arrangements(network).items()}
    assert names == {"own/w": ("own.w",), "own/gamma": ("own.gamma",), "own/b": ("own.bias",)}


pytest.importorskip("safetensors", reason="needs safetensors: pip install 'halograd[interchange]'")

IMAGE, FEATURES = (3, 2, 4), 24
FLAT = pieces(IMAGE)


def _networks():
    """Return a dictionary by name: a function that builds our nodes from the input, and torch's layers and function."""
    nn = torch().nn
    dense = {"head": nn.Linear(FEATURES, 5)}

    def concat(m, x):
        return m.head(torch().cat([x.flatten(1), x.mean((2, 3)), m.conv(x).flatten(1)], 1))

    def chain(*layers):
        return lambda x: hg.Sequential(hg.Flatten(), *layers, hg.Dense(5, name="head"))(x)

    def halves(x):
        both = hg.Concat()(hg.Flatten()(hg.Conv(3, 1, name="conv")(x)), hg.GlobalAveragePool()(x))
        return hg.Dense(5, name="head")(hg.Slice(0, 20)(both))

    def gated(x):
        flat = hg.Flatten()(x)
        gate = hg.Dense(FEATURES, name="gate", activation="sigmoid")(flat)
        return hg.Dense(5, name="head")(flat * gate)

    def normed(layer):
        return lambda m, x: m.head(m.norm(x.flatten(1))), {"norm": layer, **dense}

    def plain(m, x):
        return m.head(x.flatten(1))

    return {
        "softmax": (chain(hg.Softmax()), lambda m, x: m.head(x.flatten(1).softmax(1)), dense),
        "log softmax": (chain(hg.LogSoftmax()), lambda m, x: m.head(x.flatten(1).log_softmax(1)), dense),
        "random depth": (chain(hg.StochasticDepth(0.5)), plain, dense),
        "flattened again": (chain(hg.Flatten()), plain, dense),
        "layer norm": (chain(hg.LayerNorm("channels", name="norm")), *normed(nn.LayerNorm(FEATURES))),
        "group norm of one": (chain(hg.GroupNorm(1, name="norm")), *normed(nn.GroupNorm(1, FEATURES))),
        "batch norm": (chain(hg.BatchNorm(name="norm")), *normed(nn.BatchNorm1d(FEATURES))),
        "slopes": (chain(hg.PReLU("channel", name="norm")), *normed(nn.PReLU(FEATURES))),
        "sum": (
            lambda x: hg.Dense(5, name="head")(hg.Flatten()(x) + hg.Flatten()(hg.Conv(4, 1, name="conv")(x))),
            lambda m, x: m.head(x.flatten(1) + m.conv(x).flatten(1)),
            {"conv": nn.Conv2d(4, 4, 1), **dense},
        ),
        "pieces": (
            lambda x: hg.Dense(5, name="head")(
                hg.Concat()(hg.Flatten()(x), hg.GlobalAveragePool()(x), hg.Flatten()(hg.Conv(2, 1, name="conv")(x)))
            ),
            concat,
            {"conv": nn.Conv2d(4, 2, 1), "head": nn.Linear(FEATURES + 4 + 12, 5)},
        ),
        "some pieces": (
            halves,
            lambda m, x: m.head(torch().cat([m.conv(x).flatten(1), x.mean((2, 3))], 1)[:, :20]),
            {"conv": nn.Conv2d(4, 3, 1), "head": nn.Linear(20, 5)},
        ),
        "gate": (
            gated,
            lambda m, x: m.head(x.flatten(1) * m.gate(x.flatten(1)).sigmoid()),
            {"gate": nn.Linear(FEATURES, FEATURES), **dense},
        ),
        "decoder": (
            lambda x: hg.Sequential(
                hg.GlobalAveragePool(),
                hg.Dense(FEATURES, name="dense"),
                hg.BatchNorm(activation="relu", name="norm"),
                hg.Reshape(IMAGE),
                hg.Conv(2, 1, name="conv"),
            )(x),
            lambda m, x: m.conv(m.norm(m.dense(x.mean((2, 3)))).relu().reshape(-1, 4, 3, 2)),
            {"dense": nn.Linear(4, FEATURES), "norm": nn.BatchNorm1d(FEATURES), "conv": nn.Conv2d(4, 2, 1)},
        ),
    }


CASES = [
    *("softmax", "random depth", "flattened again", "layer norm", "group norm of one", "batch norm", "slopes", "sum"),
    *("pieces", "some pieces", "gate", "decoder"),
]


@pytest.mark.torch
@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_the_module(name, tmp_path):
    """Weights of a torch module, read by our network, give the same outputs, and are written as the same arrays."""
    make, function, layers = _networks()[name]
    network, module = hg.Network({"y": make(hg.Input(IMAGE, name="x"))}), as_module(function, **layers).double()
    shake(module)
    state = {key: value for key, value in module.state_dict().items() if "num_batches" not in key}
    safetensors = __import__("safetensors.torch").torch
    safetensors.save_file(state, tmp_path / "theirs")
    arrays = load_weights(network, tmp_path / "theirs")
    network.begin_with(arrays)
    x = samples(*IMAGE)
    want = np.moveaxis(module.eval()(first(x)).detach().numpy(), 1, -1)
    found = predicted(network, x)["y"]
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-12 * max(1.0, np.abs(want).max()))
    save_weights(network, arrays, tmp_path / "ours")
    written = safetensors.load_file(tmp_path / "ours")
    assert written.keys() == state.keys()
    for key, value in state.items():
        np.testing.assert_array_equal(written[key].numpy(), value.numpy(), err_msg=key)


def test_lengths_of_a_dense_layer_are_in_the_order_of_its_units():
    """Weight-norm lengths are in the order of the dense layer's units, although it has as many input features."""
    y = hg.Dense(FEATURES, weight_norm=True, name="head")(hg.Flatten()(hg.Input(IMAGE, name="x")))
    found = arrangements(hg.Network({"y": y}))
    assert found["head/w"].orders == {1: FLAT}
    assert not found["head/g"].orders and not found["head/b"].orders
    lengths = random_array((FEATURES,), "g")
    np.testing.assert_array_equal(found["head/g"].to_torch(lengths), lengths[:, None])


class Shifted(hg.Layer):
    """Layer that moves each feature to the next position."""


def _mixed(kind: str) -> hg.Node:
    x = hg.Input(IMAGE, name="x")
    flat = hg.Flatten()(x)
    if kind == "own":
        return hg.Dense(5, name="head")(hg.ReLU()(Shifted("mix")(flat)))
    if kind == "norm":
        return hg.GroupNorm(2, name="mix")(flat)
    if kind == "part":
        return hg.Dense(5, name="head")(hg.Slice(1, 9, name="mix")(flat))
    if kind == "sum":
        return hg.Dense(5, name="head")(hg.Add(name="mix")(flat, hg.Input((FEATURES,), name="vector")))
    if kind == "map":
        return hg.Conv(5, 1, name="head")(hg.Reshape((2, 3, 4), name="mix")(flat))
    head = hg.Dense(FEATURES, name="head")
    return head(hg.Softmax()(head(flat)))


@pytest.mark.parametrize("kind", ["own", "norm", "part", "sum", "map", "twice"])
def test_what_torch_has_no_counterpart_of_is_refused(kind, tmp_path):
    network = hg.Network({"y": _mixed(kind)})
    got = r"features that 'mix' \(\w+\) mixes by position" if kind != "twice" else "another order than at 'head'"
    layer = {"norm": "mix", "twice": "head#2"}.get(kind, "head")
    with pytest.raises(UserError, match=rf"layer '{layer}' \(\w+\): expected features that torch has .* got {got}"):
        save_weights(network, None, tmp_path / "w.safetensors")
    assert not any(name.startswith(layer) for name in arrangements(network, fresh=["head", "mix"]))


def test_what_has_no_parameters_is_not_refused():
    """A layer that mixes features is permitted if no parameter depends on their order, as before a new dense layer."""
    y = hg.Dense(3, name="next")(hg.Dense(5, name="head")(Shifted("mix")(hg.Flatten()(hg.Input(IMAGE, name="x")))))
    assert set(arrangements(hg.Network({"y": y}), fresh=["head"])) == {"next/w", "next/b"}


def test_orders_of_nodes():
    x = hg.Input(IMAGE, name="x")
    flat = hg.Flatten()(x)
    free, joined = hg.Dense(FEATURES)(flat), hg.Concat()(flat, hg.GlobalAveragePool()(x))
    total = hg.ReLU()(free) + flat
    orders, mixed = feature_orders(hg.Network({"a": total, "b": joined, "c": hg.Dense(2)(joined)}))
    assert [orders[node] for node in (x, flat, free, total)] == [((4,),), FLAT, FLAT, FLAT]
    assert orders[joined] == (IMAGE, (4,)) and not mixed
