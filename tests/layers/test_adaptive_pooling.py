"""Adaptive pooling: exact under every cut; windows and ties as torch; one output is made by global pools; refusals."""

import pytest

from halograd.layers import AdaptiveAveragePool, AdaptiveMaxPool, Conv, Input, Network, Pad
from halograd.testing import check_layer
from tests.layers.geometries import skew
from tests.layers.oracle import check_torch, torch

POOLS = {"average": AdaptiveAveragePool, "max": AdaptiveMaxPool}
#: spatial shape, size
CASES = {
    "divides": ((8, 6), (4, 3)),
    "overlaps": ((7, 10), (5, 4)),
    "one row": ((9, 7), (1, 3)),
    "one": ((7, 6), 1),
    "more than there are": ((4, 7), (6, 9)),
    "as many": ((6, 7), (6, 7)),
    "1-D": ((13,), 5),
    "3-D": ((6, 7, 8), (2, 3, 5)),
}


@pytest.mark.mpi
@pytest.mark.parametrize("kind", POOLS)
@pytest.mark.parametrize("name", CASES)
def test_exact_on_every_grid(kind, name):
    spatial, size = CASES[name]
    check_layer(lambda: POOLS[kind](size), (*spatial, 2))


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("kind", POOLS)
def test_exact_with_channels_cut(kind):
    check_layer(lambda: POOLS[kind]((3, 4)), (7, 6, 5), axes=("sample", "height", "channel"), gradient=False)


@pytest.mark.many_ranks
@pytest.mark.parametrize("kind", POOLS)
@pytest.mark.parametrize("name", ["overlaps", "one", "one row"])
def test_exact_on_uneven_and_empty_blocks(kind, name, monkeypatch):
    skew(monkeypatch)
    spatial, size = CASES[name]
    check_layer(lambda: POOLS[kind](size), (*spatial, 2), gradient=False)


@pytest.mark.mpi
@pytest.mark.parametrize("kind", POOLS)
def test_exact_between_convolutions_with_equal_elements(kind):
    def chain():
        before, behind = Conv(3, 3, padding=1, activation="relu", name="b"), Conv(2, 3, padding=1, name="c")
        return lambda x: behind(POOLS[kind]((5, 4))(Pad(3, "circular", name="p")(before(x))))

    check_layer(chain, (7, 6, 2), gradient=False)


@pytest.mark.torch
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", POOLS)
@pytest.mark.parametrize("name", CASES)
def test_as_torch(kind, name):
    spatial, size = CASES[name]
    pool = getattr(torch().nn.functional, f"adaptive_{'max' if kind == 'max' else 'avg'}_pool{len(spatial)}d")
    check_torch(lambda: POOLS[kind](size, "p"), [(*spatial, 3)], lambda x: pool(x, size))


@pytest.mark.parametrize("kind", POOLS)
def test_one_output_is_made_where_the_input_is(kind):
    layers = Network(POOLS[kind](1, "p")(Input((4, 6, 3)))).layers
    kinds = {"average": "GlobalAveragePool", "max": "GlobalMaxPool"}
    assert [(name, node.layer.kind, node.shape) for name, node in layers.items()] == [
        ("p_global", kinds[kind], (3,)),
        ("p", "Reshape", (1, 1, 3)),
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdaptiveMaxPool((2, 2, 2))(Input((4, 4, 2))), r"AdaptiveMaxPool: expected one number or 2, got"),
        (lambda: AdaptiveMaxPool(0)(Input((4, 4, 2))), r"AdaptiveMaxPool: nothing would be left of \(4, 4\): \(0, 0\)"),
        (lambda: AdaptiveAveragePool(2)(Input((4,))), "AdaptiveAveragePool: .* does not fit 0 spatial axes"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()
