"""Activations by name or as layers: what the kernels compute, what is made behind; names, settings, exact results."""

import pytest

from halograd.layers import (
    Add,
    BatchNorm,
    Conv,
    ConvTranspose,
    Dense,
    Flatten,
    GroupNorm,
    Input,
    InstanceNorm,
    LayerNorm,
    LeakyReLU,
    Network,
    PReLU,
)
from halograd.layers.activation import _KINDS
from halograd.layers.settings import fingerprint, settings_of
from halograd.testing import check_layer
from tests.layers.oracle import check_torch, torch

SHAPE = (7, 6, 4)
LAYERS = {
    "Conv": lambda activation, name="l": Conv(4, 3, padding=1, activation=activation, name=name),
    "ConvTranspose": lambda activation, name="l": ConvTranspose(4, 3, padding=1, activation=activation, name=name),
    "Dense": lambda activation, name="l": Dense(4, activation=activation, name=name),
    "BatchNorm": lambda activation, name="l": BatchNorm(activation=activation, name=name),
    "GroupNorm": lambda activation, name="l": GroupNorm(2, activation=activation, name=name),
    "InstanceNorm": lambda activation, name="l": InstanceNorm(activation=activation, name=name),
    "LayerNorm": lambda activation, name="l": LayerNorm("channels", activation=activation, name=name),
    "Add": lambda activation, name="l": Add(activation, name),
}
FUSED = set(LAYERS) - {"ConvTranspose", "Dense"}


def layers_of(made, shape=SHAPE):
    return Network(made(Input(shape))).layers


@pytest.mark.parametrize("kind", LAYERS)
def test_relu_is_fused_where_kernels_have_it(kind):
    shape = (5,) if kind == "Dense" else SHAPE
    found = layers_of(LAYERS[kind]("relu"), shape)
    assert list(found) == (["l"] if kind in FUSED else ["l", "l_relu"])
    assert list(layers_of(LAYERS[kind](None), shape)) == ["l"]


@pytest.mark.parametrize("kind", LAYERS)
def test_others_are_layers_behind(kind):
    shape = (5,) if kind == "Dense" else SHAPE
    found = layers_of(LAYERS[kind]("silu"), shape)
    assert [(name, node.layer.kind) for name, node in found.items()] == [("l", kind), ("l_silu", "SiLU")]
    assert [node.layer.kind for node in layers_of(LAYERS[kind](PReLU("channel")), shape).values()] == [kind, "PReLU"]
    unnamed = list(layers_of(LAYERS[kind]("gelu", None), shape))
    assert unnamed == [f"{kind.lower()}1", "gelu1"]


@pytest.mark.parametrize("name", _KINDS)
def test_every_name_has_its_layer(name):
    first, *behind = layers_of(Conv(4, 3, activation=name)).values()
    assert first.layer.kind == "Conv" and [node.layer.kind.lower() for node in behind] == (
        [] if name == "relu" else [name.replace("_", "")]
    )


def test_settings_are_those_of_two_layers():
    """So that a layer takes the time that was measured of it, and checkpoints of networks written out fit."""
    plain, behind = Conv(4, 3, name="c"), Conv(4, 3, activation="silu", name="c")
    assert settings_of(plain, SHAPE) == settings_of(behind, SHAPE)
    from halograd.layers import SiLU

    written = Network(SiLU("c_silu")(plain(Input(SHAPE))))
    assert fingerprint(written) == fingerprint(Network(behind(Input(SHAPE))))


@pytest.mark.mpi
@pytest.mark.parametrize("kind", LAYERS)
def test_exact_on_every_grid(kind):
    shape = (5,) if kind == "Dense" else SHAPE
    check_layer(lambda: LAYERS[kind](LeakyReLU(0.1)), shape, gradient=kind != "BatchNorm", tolerance=256.0)


@pytest.mark.mpi
def test_a_head_as_one_writes_it():
    def head():
        conv, flat, dense = Conv(3, 3, activation="gelu", name="c"), Flatten(), Dense(6, activation="tanh", name="d")
        return lambda x: dense(flat(conv(x)))

    check_layer(head, SHAPE, gradient=False)


@pytest.mark.torch
@pytest.mark.ranks(1, 2)
def test_as_torch():
    f = torch().nn.functional
    convolved = lambda x, w, b: f.silu(f.conv2d(x, w.movedim(-1, 1), b, padding=1))  # noqa: E731
    check_torch(lambda: LAYERS["Conv"]("silu"), [SHAPE], convolved)
    check_torch(lambda: LAYERS["Dense"]("relu"), [(5,)], lambda x, w, b: f.relu(f.linear(x, w, b)))


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("activation", ["swoosh", 3])
def test_refusals(kind, activation):
    message = f"activation: expected None, one of relu, leaky_relu, .*, or a layer, got {activation!r}; choose one"
    with pytest.raises(ValueError, match=message):
        LAYERS[kind](activation)
