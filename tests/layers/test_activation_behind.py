"""Tests of activations as a setting of other layers, fused or as a separate layer: names, settings, exact results."""

import pytest

import halograd as hg
from halograd.dtensor import axis_names
from halograd.kernels import FusedActivation
from halograd.layers.activation import _KINDS
from halograd.layers.activation import fused as fused_in
from halograd.layers.settings import fingerprint, settings_of
from halograd.testing import check_layer
from tests.layers.geometries import skew
from tests.layers.oracle import check_torch, torch
from tests.support.grids import axes_in_turn

SHAPE = (7, 6, 4)
LAYERS = {
    "Conv": lambda activation, name="l": hg.Conv(4, 3, padding=1, activation=activation, name=name),
    "ConvTranspose": lambda activation, name="l": hg.ConvTranspose(4, 3, padding=1, activation=activation, name=name),
    "Dense": lambda activation, name="l": hg.Dense(4, activation=activation, name=name),
    "BatchNorm": lambda activation, name="l": hg.BatchNorm(activation=activation, name=name),
    "GroupNorm": lambda activation, name="l": hg.GroupNorm(2, activation=activation, name=name),
    "InstanceNorm": lambda activation, name="l": hg.InstanceNorm(activation=activation, name=name),
    "LayerNorm": lambda activation, name="l": hg.LayerNorm("channels", activation=activation, name=name),
    "Add": lambda activation, name="l": hg.Add(activation, name),
}
#: Layers that compute any activation, and those whose gradient follows from its output.
NORMS = {"BatchNorm", "GroupNorm", "InstanceNorm", "LayerNorm"}
BY_OUTPUT = NORMS | {"Conv", "Add"}
KINDS = {
    **{name: kind for name, kind in _KINDS.items() if name != "softmax"},
    **{
        "leaky_relu down": lambda: hg.LeakyReLU(-0.3),
        "elu 0.3": lambda: hg.ELU(0.3),
        "gelu_tanh": lambda: hg.GELU("tanh"),
    },
}


def layers_of(made, shape=SHAPE):
    return hg.Network(made(hg.Input(shape))).layers


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", _KINDS)
def test_what_kernels_have_is_no_layer(kind, name):
    shape = (5,) if kind == "Dense" else SHAPE
    by_output = name in ("relu", "leaky_relu")
    fused = name != "softmax" and kind in (BY_OUTPUT if by_output else NORMS)
    for given in (name, _KINDS[name]()):
        made = LAYERS[kind](given)
        found = list(layers_of(made, shape))
        assert found[0] == "l" and len(found) == (1 if fused else 2) and fused == (fused_in(made) is not None)
    assert list(layers_of(LAYERS[kind](None), shape)) == ["l"]
    assert list(layers_of(LAYERS[kind](hg.ReLU("own")), shape)) == ["l", "own"]


def test_parameters_of_an_activation():
    assert fused_in(hg.Conv(4, 3, activation="leaky_relu")) == FusedActivation("leaky_relu", 0.01)
    assert fused_in(hg.Add(hg.LeakyReLU(0.3))) == FusedActivation("leaky_relu", 0.3)
    assert fused_in(hg.Add(hg.ELU(0.3))) is None and fused_in(hg.BatchNorm(activation=hg.ELU(0.3))).alpha == 0.3
    assert fused_in(hg.BatchNorm(activation=hg.GELU("tanh"))) == FusedActivation("gelu_tanh")
    assert fused_in(hg.BatchNorm(activation=hg.LeakyReLU(-1))) == FusedActivation("leaky_relu", -1)
    assert fused_in(hg.Conv(4, 3, activation=hg.LeakyReLU(-1))) is None


@pytest.mark.parametrize("kind", LAYERS)
def test_others_are_layers_behind(kind):
    shape = (5,) if kind == "Dense" else SHAPE
    found = layers_of(LAYERS[kind]("softmax"), shape)
    assert [(name, node.layer.kind) for name, node in found.items()] == [("l", kind), ("l_softmax", "Softmax")]
    assert [node.layer.kind for node in layers_of(LAYERS[kind](hg.PReLU("channel")), shape).values()] == [kind, "PReLU"]
    unnamed = list(layers_of(LAYERS[kind]("softmax", None), shape))
    assert unnamed == [f"{kind.lower()}1", "softmax1"]


@pytest.mark.parametrize("name", _KINDS)
def test_every_name_has_its_layer(name):
    first, behind = layers_of(hg.ConvTranspose(4, 3, activation=name)).values()
    assert first.layer.kind == "ConvTranspose" and behind.layer.kind.lower() == name.replace("_", "")


def test_settings_are_those_of_two_layers():
    """A layer with an activation has the settings and the fingerprint of two separate layers, so checkpoints fit."""
    plain, behind = hg.Conv(4, 3, name="c"), hg.Conv(4, 3, activation="silu", name="c")
    assert settings_of(plain, SHAPE) == settings_of(behind, SHAPE)
    from halograd.layers import SiLU

    written = hg.Network(SiLU("c_silu")(plain(hg.Input(SHAPE))))
    assert fingerprint(written) == fingerprint(hg.Network(behind(hg.Input(SHAPE))))


@pytest.mark.mpi
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("activation", ["leaky_relu", "silu"])
def test_exact_on_every_grid(comm, turn, kind, activation):
    shape = (5,) if kind == "Dense" else SHAPE
    given = hg.LeakyReLU(0.1) if activation == "leaky_relu" else activation
    axes = axes_in_turn(comm.size, axis_names(len(shape) + 1)[:-1], turn)
    gradient = kind != "BatchNorm" and comm.size == 1
    check_layer(lambda: LAYERS[kind](given), shape, gradient=gradient, tolerance=256.0, axes=axes)


@pytest.mark.torch
def test_as_torch():
    f = torch().nn.functional
    convolved = lambda x, w, b: f.silu(f.conv2d(x, w.movedim(-1, 1), b, padding=1))  # noqa: E731
    check_torch(lambda: LAYERS["Conv"]("silu"), [SHAPE], convolved)
    check_torch(lambda: LAYERS["Dense"]("relu"), [(5,)], lambda x, w, b: f.relu(f.linear(x, w, b)))


@pytest.mark.torch
@pytest.mark.parametrize(("backend", "dtype"), [("numpy", "float64"), ("onednn", "float32")])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("kind", ["Conv", "Add", "BatchNorm", "residual", "GroupNorm", "LayerNorm"])
def test_every_activation_as_torch(kind, name, backend, dtype):
    """A layer with an activation equals torch's separate layers; other tests compare the functions with torch."""
    f, given = torch().nn.functional, KINDS[name]()
    functions = {"leaky_relu down": lambda x: f.leaky_relu(x, -0.3), "elu 0.3": lambda x: f.elu(x, 0.3)}
    functions |= {"gelu_tanh": lambda x: f.gelu(x, approximate="tanh"), "hard_sigmoid": lambda x: f.relu6(x + 3) / 6}
    act = functions.get(name) or getattr(f, name.replace("_sw", "sw"))
    normed = lambda x, gamma, beta: f.batch_norm(x, None, None, gamma, beta, True)  # noqa: E731
    layers = {
        "Conv": lambda x, w, b: f.conv2d(x, w.movedim(-1, 1), b, padding=1),
        "Add": lambda x, r: x + r,
        "BatchNorm": normed,
        "residual": lambda x, r, gamma, beta: normed(x, gamma, beta) + r,
        "GroupNorm": lambda x, gamma, beta: f.group_norm(x, 2, gamma, beta),
        "LayerNorm": lambda x, gamma, beta: f.layer_norm(x.movedim(1, -1), (16,), gamma, beta).movedim(-1, 1),
    }
    shape = (7, 6, 16)
    make = LAYERS["BatchNorm" if kind == "residual" else kind]
    if kind == "Conv":
        make = lambda activation: hg.Conv(16, 3, padding=1, activation=activation, name="l")  # noqa: E731
    if not fused_in(make(given)):
        return  # a layer of its own, everywhere
    shapes = [shape] * (2 if kind in ("Add", "residual") else 1)
    check_torch(lambda: make(given), shapes, lambda *xs, **p: act(layers[kind](*xs, **p)), dtype, backend)


@pytest.mark.parametrize("name", ["relu", "tanh", "silu"])
def test_a_norm_with_a_residual_has_a_relu_in_its_kernels_only(name):
    x, layer = hg.Input(SHAPE, "x"), hg.BatchNorm(activation=name, name="l")
    assert list(hg.Network(layer(x)).layers) == ["l"]
    assert list(hg.Network(layer(x, x)).layers) == (["l"] if name == "relu" else ["l", f"l_{name}"])


@pytest.mark.mpi
@pytest.mark.parametrize("activation", ["relu", "sigmoid", "gelu"])
def test_on_blocks_that_do_not_divide(activation, monkeypatch):
    """A norm with an activation is exact on uneven blocks, some of them empty."""
    skew(monkeypatch)
    check_layer(lambda: LAYERS["BatchNorm"](activation), (7, 6, 5), batch=3, gradient=False, tolerance=256.0)
    check_layer(lambda: LAYERS["GroupNorm"](activation), (7, 6, 4), batch=3, tolerance=256.0)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("activation", ["swoosh", 3])
def test_refusals(kind, activation):
    message = f"activation: expected None, one of relu, leaky_relu, .*, or a layer, got {activation!r}; choose one"
    with pytest.raises(ValueError, match=message):
        LAYERS[kind](activation)
