"""Tests of the order of features after Flatten: weights are written to a torch module and read back."""

from __future__ import annotations

import numpy as np
import pytest

import halograd as hg
from halograd.errors import UserError
from halograd.interchange import load_weights, save_weights
from halograd.interchange.feature_order import feature_orders, pieces
from halograd.interchange.weights import arrangements
from halograd.testing import random_array
from tests.interchange.support import as_module, first, predicted, samples, shake, torch

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
