"""Tests of candidates: they are legal, balanced and few, and include a single rank."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halograd.errors import UserError
from halograd.layers import AveragePool, Conv, Dense, Flatten, GlobalAveragePool, Network, ReLU, Softmax, Strategy
from halograd.layers import Input as Placeholder
from halograd.layers.strategy import AXES
from halograd.models import build
from halograd.perfmodel.cuts import CHANNELS, UNEVEN, candidates, divisors, grids
from tests.perfmodel.pricing import cut

LAYERS = {
    "conv": lambda: Conv(24, 3, padding=1),
    "grouped": lambda: Conv(24, 3, padding=1, groups=2),
    "pool": lambda: AveragePool(2),
    "relu": ReLU,
    "softmax": Softmax,
    "flatten": Flatten,
}
SHAPE = (12, 10, 16)


def of(layer, batch, ranks, full=False, shape=SHAPE):
    return candidates(layer, [shape], layer.output_shape(shape), batch, ranks, full)


def legal(layer, batch, parts):
    """Return whether a layer can be cut into these parts, each with elements."""
    try:
        Strategy(dict(zip(AXES, parts))).validate(Network(layer(Placeholder(SHAPE))), math.prod(parts))
    except UserError:
        return False
    blocks = [cut((batch, *shape), parts) for shape in (SHAPE, layer.output_shape(SHAPE))]
    return all(extents.min() for some in blocks for extents in some.extents)


@pytest.mark.parametrize("name", LAYERS)
@given(st.integers(1, 9), st.integers(1, 24))
def test_every_candidate_is_legal_and_balanced(name, batch, ranks):
    layer = LAYERS[name]()
    some = of(layer, batch, ranks)
    assert some[0] == (1,) * 6 and len(set(some)) == len(some)
    for parts in some:
        used = math.prod(parts)
        assert ranks % used == 0
        assert legal(LAYERS[name](), batch, parts)
        blocks = cut((batch, *SHAPE), parts)
        for axis, (extents, count) in enumerate(zip(blocks.extents[:-1], blocks.grid)):
            size = (batch, *SHAPE)[axis]
            assert extents.max() * count <= UNEVEN * size
        assert parts[4] * parts[5] * CHANNELS <= 24 or parts[4] * parts[5] == 1


@given(st.integers(1, 6), st.sampled_from([1, 2, 3, 4, 6, 8]))
def test_the_full_set_is_every_legal_factorization(batch, ranks):
    layer = LAYERS["conv"]()
    found = set(of(layer, batch, ranks, full=True))
    every = itertools.product(divisors(ranks), repeat=6)
    want = {p for p in every if ranks % math.prod(p) == 0 and legal(LAYERS["conv"](), batch, p)}
    assert found == want and set(of(layer, batch, ranks)) <= found


def test_axes_that_a_layer_does_not_have_are_not_cut():
    dense = candidates(Dense(64), [(32,)], (64,), 8, 8)
    assert all(p[1:4] == (1, 1, 1) for p in dense) and any(p[5] > 1 for p in dense) and any(p[4] > 1 for p in dense)
    assert all(p[4:] == (1, 1) for p in of(Softmax(), 8, 8))
    assert all(p[5] == 1 for p in of(ReLU(), 8, 8))
    assert all(p[1] == 1 for p in of(LAYERS["conv"](), 8, 8))


def test_layers_that_lack_axes_of_the_network_are_cut_like_the_others():
    """The parts of a layer between arrays of different numbers of axes fit both; grids fit every input."""
    x, t = Placeholder((4, 6, 8), "x"), Placeholder((5, 8), "t")
    some = candidates(Conv(8, 1), [x.shape], (5, 8), 1, 8, full=True)
    assert (1, 1, 2, 2, 1, 1) in some and (1, 1, 2, 4, 1, 1) not in some and (1, 1, 4, 2, 1, 1) not in some
    network = Network(GlobalAveragePool()(x) + GlobalAveragePool()(t))
    assert grids(network, 1, 4) == [(1, 1, 1, 4, 1, 1), (1, 1, 2, 2, 1, 1), (1, 1, 4, 1, 1, 1)]
    assert grids(network, 1, 6) == [], "tokens have 5 positions"
    for parts in grids(network, 2, 4):
        Strategy(dict(zip(AXES, parts))).validate(network, 4)


@pytest.mark.parametrize("name", ["inception_v3", "mesh_2k", "unet3d"])
def test_their_number_grows_slowly_to_a_thousand_ranks(name):
    network = build(name)
    for node in network.layers.values():
        some = candidates(node.layer, [n.shape for n in node.inputs], node.shape, 1024, 1024)
        assert 1 <= len(some) <= 160


def test_no_ranks():
    with pytest.raises(ValueError, match="expected at least one rank, got 0"):
        of(ReLU(), 1, 0)
