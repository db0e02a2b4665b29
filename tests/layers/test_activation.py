"""Tests of activations, also as a setting of other layers, and of dropout: extremes, names, settings, exact results."""

from functools import partial

import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.dtensor import Box, axis_names
from halograd.kernels import FusedActivation, get_backend
from halograd.kernels.numpy.pointwise import global_counters, mix64, mix64_inplace
from halograd.layers import ChannelDropout, Dropout, Input, Network, StochasticDepth
from halograd.layers.activation import _KINDS
from halograd.layers.activation import fused as fused_in
from halograd.layers.settings import fingerprint, settings_of
from halograd.layers.strategy import Strategy
from halograd.testing import check_layer, random_array, run_layer
from halograd.training.executor import Executor
from tests.layers.cases import ACTIVATIONS
from tests.layers.geometries import skew
from tests.layers.graphs import run
from tests.layers.oracle import check_torch, torch
from tests.support.grids import axes_in_turn
from tests.support.refusals import refusals


def test_softmax_of_large_values_is_finite():
    from mpi4py import MPI

    x = np.array([[[1e4, 1e4, -1e4]]]).repeat(2, axis=0)
    with Communicator(MPI.COMM_SELF) as alone:
        y = run_layer(hg.Softmax, [(1, 3)], alone, {}, shift={"x0": x - random_array(x.shape, "x0")})["y"]
    assert np.allclose(y, [0.5, 0.5, 0.0])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_log_softmax_of_large_values_keeps_its_digits(dtype):
    from mpi4py import MPI

    x = np.array([[[1e4, 1e4 - 1, -1e4]]]).repeat(2, axis=0)
    with Communicator(MPI.COMM_SELF) as alone:
        drawn = random_array(x.shape, "x0")
        y = run_layer(hg.LogSoftmax, [(1, 3)], alone, {}, dtype=dtype, shift={"x0": x - drawn})["y"]
    small = np.log1p(np.exp(-1))
    np.testing.assert_allclose(y, [[[-small, -1 - small, -2e4 - small]]] * 2, rtol=1e-6)


def test_a_cross_entropy_takes_logarithms_of_probabilities_as_logits():
    from mpi4py import MPI

    def found(end):
        x, t = hg.Input((5, 3), "x"), hg.Input((5, 1), "t", "int32")
        loss = hg.SoftmaxCrossEntropy(name="ce")(end(hg.Conv(3, 1, name="c")(x)), t)
        with Communicator(MPI.COMM_SELF) as alone:
            return run(hg.Network({"loss": loss}), alone, 2, Strategy({}), [0])

    plain, behind = found(lambda y: y), found(hg.LogSoftmax())
    for key in ("loss", "dx", "dc/w", "dc/b"):
        np.testing.assert_allclose(behind[key], plain[key], rtol=1e-12, atol=1e-15)


def test_shape_is_kept():
    for make in ACTIVATIONS.values():
        assert make()(hg.Input((4, 5, 2))).shape == (4, 5, 2)
    assert hg.ReLU().flops((4, 5, 2)) == 40


def test_an_unknown_approximation_is_refused():
    with pytest.raises(ValueError, match=r"GELU: approximate: expected 'none' or 'tanh', got 'name'"):
        hg.GELU("name")


def test_a_clamp_without_room_is_refused():
    with pytest.raises(ValueError, match=r"Clamp: expected low < high, got 6, 0"):
        hg.Clamp(6, 0)


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


GOLDEN = 0x9E3779B97F4A7C15


def masks(step=0, seed=0, rate=0.3, training=True, shape=(20, 20, 5)):
    """Return the output of dropout for an input of ones."""
    network = Network(Dropout(rate, "drop")(Input(shape)))
    with (
        Communicator(MPI.COMM_SELF) as alone,
        get_backend("numpy") as kernels,
        Executor(network, alone, kernels, 2, dtype="float64", seed=seed, trainable=False) as executor,
    ):
        executor.mode.step = step
        executor.set_input("x", np.ones((2, *shape)))
        executor.forward(training=training)
        return executor.gather("drop")


def test_rate_and_scale():
    y = masks()
    assert set(np.unique(y)) == {0.0, 1 / 0.7}
    # Binomial with 4000 draws: five standard deviations are 0.036.
    assert abs(np.mean(y == 0) - 0.3) < 0.036
    # Neighbors are independent: both dropped with probability 0.09, five standard deviations are 0.023.
    for axis in range(4):
        both = (np.delete(y, 0, axis) == 0) & (np.delete(y, -1, axis) == 0)
        assert abs(np.mean(both) - 0.09) < 5 * np.sqrt(0.09 * 0.91 / both.size) * 1.5


def test_mask_depends_on_step_and_seed():
    assert np.array_equal(masks(), masks())
    assert not np.array_equal(masks(), masks(step=1))
    assert not np.array_equal(masks(), masks(seed=1))


def test_identity_in_evaluation_and_for_rate_zero():
    assert np.array_equal(masks(training=False), np.ones((2, 20, 20, 5)))
    assert np.array_equal(masks(rate=0.0), np.ones((2, 20, 20, 5)))


@pytest.mark.parametrize("shape", [(3, 4), (2, 5, 3), (2, 5, 4, 3), (2, 3, 4, 2, 3)])
def test_counters_are_those_of_the_global_index(shape):
    index = np.arange(np.prod(shape), dtype=np.uint64).reshape(shape)
    box = Box(tuple(n // 3 for n in shape), tuple(n - n // 4 for n in shape))
    outer, inner = global_counters(shape, box.start, box.shape)
    with np.errstate(over="ignore"):
        want = index[box.slices()] * np.uint64(GOLDEN)
    assert np.array_equal((outer[:, None] + inner).reshape(box.shape), want)


def test_hash_is_splitmix64():
    """The hash gives the first values of the published splitmix64 generator for seed 0."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [mix64(k * GOLDEN) for k in range(3)] == published
    z = np.array([(k + 1) * GOLDEN % 2**64 for k in range(3)], np.uint64)
    mix64_inplace(z, np.empty_like(z))
    assert [int(v) for v in z] == published


test_refuses_rates_outside = refusals(
    *((partial(Dropout, rate), r"Dropout: expected a rate in \[0, 1\), got") for rate in (-0.1, 1.0, 1.5)),
    *((partial(StochasticDepth, rate), r"StochasticDepth: expected a rate in \[0, 1\), got") for rate in (-0.1, 1.0)),
    (partial(ChannelDropout, 1.0), r"ChannelDropout: expected a rate in \[0, 1\), got"),
)


DEPTH_SHAPES = [(7, 6, 3), (9, 2), (5, 4, 3, 2), (4,)]


def dropped(step=0, seed=0, rate=0.4, training=True, name="drop", samples=400, kind=StochasticDepth):
    """Return the factor by which the layer multiplies each sample, or each of its two channels."""
    network = Network(kind(rate, name)(Input((2, 3, 2))))
    with (
        Communicator(MPI.COMM_SELF) as alone,
        get_backend("numpy") as kernels,
        Executor(network, alone, kernels, samples, dtype="float64", seed=seed, trainable=False) as executor,
    ):
        executor.mode.step = step
        executor.set_input("x", np.ones((samples, 2, 3, 2)))
        executor.forward(training=training)
        y = executor.gather(name).reshape(samples, 6, 2)
    assert (y == y[:, :1]).all(), "a channel is dropped whole"
    if kind is ChannelDropout:
        return y[:, 0]
    assert (y == y[..., :1]).all(), "a sample is dropped whole"
    return y[:, 0, 0]


def test_channels_are_dropped_independently():
    factors = dropped(samples=200, kind=ChannelDropout)
    first, second = factors.T == 0
    # Five standard deviations: 0.122 of 400 draws at 0.4, 0.13 of 200 at 0.16.
    assert set(factors.ravel()) == {0.0, 1 / 0.6} and abs(np.mean(factors == 0) - 0.4) < 0.122
    assert abs(np.mean(first & second) - 0.16) < 0.13
    assert (dropped(training=False, kind=ChannelDropout) == 1).all()


def test_rate_and_scale_of_depth():
    factors = dropped()
    assert set(factors) == {0.0, 1 / 0.6}
    # Binomial with 400 draws: five standard deviations are 0.122.
    assert abs(np.mean(factors == 0) - 0.4) < 0.122


def test_what_is_dropped_depends_on_step_seed_and_name_but_not_on_the_batch():
    assert np.array_equal(dropped(), dropped())
    assert np.array_equal(dropped()[:10], dropped(samples=10))
    for other in ({"step": 1}, {"seed": 1}, {"name": "other"}):
        assert not np.array_equal(dropped(), dropped(**other))


def test_depth_is_identity_in_evaluation_and_for_rate_zero():
    assert (dropped(training=False) == 1).all() and (dropped(rate=0.0) == 1).all()
