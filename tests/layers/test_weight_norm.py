"""Weight normalization: exact under every cut of samples and space; torch; lengths; what it excludes; allocations."""

import math

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.errors import UserError
from halograd.layers import Conv, Dense, Flatten, Input, Network, Strategy
from halograd.layers.replication import dense_layers
from halograd.testing import check_layer
from tests.layers.geometries import skew
from tests.layers.oracle import check_torch, torch
from tests.layers.test_lean import compiled, step
from tests.support.lean import check_allocations

SHAPE = (7, 6, 4)
LAYERS = {
    "conv": (lambda: Conv(6, 3, 2, padding=1, activation="relu", weight_norm=True, name="l"), SHAPE),
    "grouped": (lambda: Conv(6, 3, padding=1, groups=2, bias=False, weight_norm=True, name="l"), SHAPE),
    "1-D, dilated": (lambda: Conv(3, 3, padding=4, dilation=4, weight_norm=True, name="l"), (17, 2)),
    "3-D": (lambda: Conv(3, 2, weight_norm=True, name="l"), (5, 4, 3, 2)),
    "dense": (lambda: Dense(5, weight_norm=True, name="l"), (9,)),
}


@pytest.mark.mpi
@pytest.mark.parametrize("name", LAYERS)
def test_exact_on_every_grid(name):
    make, shape = LAYERS[name]
    check_layer(make, shape, batch=3)
    check_layer(make, shape, batch=3, options={"halo": "overlap"}, gradient=False)


@pytest.mark.many_ranks
@pytest.mark.parametrize("name", ["conv", "grouped"])
def test_exact_on_uneven_and_empty_blocks(name, monkeypatch):
    skew(monkeypatch)
    check_layer(*LAYERS[name], gradient=False)


@pytest.mark.mpi
@pytest.mark.parametrize("backend", ["numpy", "onednn"])
def test_exact_in_a_chain_in_float32(backend):
    def chain():
        first, flat, last = LAYERS["conv"][0](), Flatten(), Dense(3, weight_norm=True, name="d")
        return lambda x: last(flat(first(x)))

    check_layer(chain, SHAPE, dtype="float32", backend=backend)


@pytest.mark.torch
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", LAYERS)
def test_as_torch(name):
    """By torch's own parametrization of a module."""
    lib, (make, shape) = torch(), LAYERS[name]
    layer, f = make(), lib.nn.functional

    def normed(x, w, g, b=None):
        """torch's `_weight_norm`, which its parametrization calls, over all axes but that of the filters."""
        made = lib._weight_norm(w, g.view(-1, *(1 for _ in shape)), 0)
        if name == "dense":
            return f.linear(x, made, b)
        (window, *_) = layer.windows(shape)
        conv = getattr(f, f"conv{len(shape) - 1}d")
        y = conv(x, made.movedim(-1, 1), b, window.stride, window.pad_lo, window.dilation, layer.groups)
        return f.relu(y) if layer.activation == "relu" else y

    check_torch(make, [shape], normed)


def test_lengths_begin_with_those_of_the_weights_on_average():
    specs = Conv(64, 3, weight_norm=True).parameters((8, 8, 32))
    assert list(specs) == ["w", "g", "b"] and specs["g"].shape == (64,)
    w, g = (specs[key].initial(f"l/{key}", 0) for key in ("w", "g"))
    lengths = np.sqrt(np.sum(w**2, axis=(1, 2, 3)))
    assert (g == math.sqrt(2)).all() and np.mean(lengths) == pytest.approx(math.sqrt(2), rel=0.02)
    assert list(Conv(4, 3).parameters((8, 8, 2))) == ["w", "b"] and not vars(Conv(4, 3)).get("weight_norm")


def test_its_channels_are_not_cut_and_its_gradient_is_not_replicated():
    x = Input((4, 4, 2))
    conv, dense = Conv(4, 3, weight_norm=True, name="c"), Dense(4, weight_norm=True, name="d")
    network = Network(Dense(2, name="plain")(dense(Flatten()(conv(x)))))
    for name in ("c", "d"):
        with pytest.raises(UserError, match=f"layer '{name}' .* cannot be cut along 'channel'"):
            Strategy({}, {name: {"channel": 2}}).validate(network, 2)
    assert list(dense_layers(network)) == ["plain"]


@pytest.mark.ranks(1, 2)
def test_a_step_allocates_no_array():
    with (
        Communicator(MPI.COMM_WORLD) as comm,
        compiled(
            lambda x: Conv(64, 5, 4, 2, weight_norm=True)(x), (64, 64, 16), comm, {"width": comm.size}
        ) as executor,
    ):
        step(executor)
        check_allocations(comm, lambda: step(executor), 192 * 1024)
