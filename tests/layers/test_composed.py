"""Tests of functions that create several layers: sequences, splits of the channels, crops."""

import doctest

import pytest

import halograd as hg
from halograd.layers import composed
from tests.layers.oracle import check_torch, torch
from tests.support.refusals import refusals

SHAPE = (7, 6, 5)


def names(node):
    return list(hg.Network(node).layers)


def test_a_sequence_makes_the_nodes_of_its_layers_in_order():
    def chained(x):
        return hg.ReLU()(hg.Conv(4, 3, name="c")(hg.BatchNorm()(x)))

    sequence = hg.Sequential(hg.BatchNorm(), hg.Conv(4, 3, name="c"), hg.ReLU())
    assert names(sequence(hg.Input(SHAPE))) == names(chained(hg.Input(SHAPE))) == ["batchnorm1", "c", "relu1"]
    assert not isinstance(sequence, hg.Layer)
    nested = hg.Sequential(hg.Sequential(hg.Conv(4, 3), hg.ReLU()), lambda x: x + x, hg.MaxPool(2))
    assert nested(hg.Input(SHAPE)).shape == (2, 2, 4)
    assert hg.Sequential(hg.Concat(), hg.ReLU())(hg.Input(SHAPE), hg.Input(SHAPE, "z")).shape == (7, 6, 10)


def test_a_sequence_that_is_called_again_has_the_same_parameters():
    sequence = hg.Sequential(hg.Conv(SHAPE[-1], 1, name="c"), hg.ReLU())
    made = hg.Network(sequence(sequence(hg.Input(SHAPE))))
    assert list(made.layers) == ["c", "relu1", "c#2", "relu1#2"] and set(made.parameters()) == {"c/w", "c/b"}


def test_names_of_pieces():
    assert names(hg.Concat(name="c")(*hg.Split((2, 3), "s")(hg.Input(SHAPE)))) == ["s_0", "s_1", "c"]


@pytest.mark.torch
def test_as_torch():
    concat = torch().cat
    turned = lambda: Called(lambda x: hg.Concat(name="c")(*reversed(hg.Split((2, 3), "s")(x))))  # noqa: E731
    check_torch(turned, [SHAPE], lambda x: concat(tuple(reversed(x.split((2, 3), 1))), 1))
    check_torch(lambda: Called(hg.Crop(((1, 2), (0, 3)), "p")), [SHAPE], lambda x: x[:, :, 1:-2, :-3])


class Called:
    """Layers without parameters, as `check_torch` needs them."""

    name = "composed"

    def __init__(self, call):
        self.call = call

    def __call__(self, x):
        return self.call(x)

    def parameters(self, *shapes):
        return {}


def test_patches_are_merged_by_named_layers():
    network = hg.Network(hg.PatchMerging(name="m")(hg.Input((5, 6, 3), name="x")))
    assert list(network.layers) == ["m.pad", "m.patches", "m.norm", "m.reduction"]
    assert {name: spec.shape for name, spec in network.parameters().items()} == {
        "m.norm/gamma": (12,),
        "m.norm/beta": (12,),
        "m.reduction/w": (6, 1, 1, 12),
    }


def test_examples():
    assert doctest.testmod(composed).failed == 0


test_refusals_of_other_types = refusals(
    (lambda x: hg.Sequential(), "Sequential: expected one or more layers, got none"),
    (lambda x: hg.Sequential(hg.ReLU(), 3), "Sequential: expected one or more layers, got 3"),
    call=lambda make: make(hg.Input(SHAPE)),
    error=TypeError,
)
test_refusals = refusals(
    (lambda x: hg.Split(2)(x), "expected a number of pieces that divides 5 channels, got 2"),
    (lambda x: hg.Split((2, 2))(x), r"expected pieces of 5 channels, got \(2, 2\)"),
    (lambda x: hg.Split((5, 0))(x), r"expected pieces of 5 channels, got \(5, 0\)"),
    (lambda x: hg.Crop()(x), "Crop: expected .* got none"),
    (lambda x: hg.Crop(1)(x, x), "a second node for its extent, got both"),
    (lambda x: hg.Crop(-1)(x), r"expected rows to remove from \(7, 6\), got"),
    (lambda x: hg.Crop()(x, hg.Input((8, 6, 1))), "use Pad to add some"),
    (lambda x: hg.Crop()(x, hg.Input((8, 1))), "expected two nodes of as many axes"),
    (lambda x: hg.PatchEmbedding((7, 4), 2)(x), r"multiples of the patch \(7, 4\), got \(7, 6\)"),
    (lambda x: hg.PixelUnshuffle(2, order="torch"), "order: expected 'channel' or 'position', got 'torch'"),
    call=lambda make: make(hg.Input(SHAPE)),
)


def test_merging_that_is_called_twice_has_one_set_of_parameters():
    """Also for other extents, one of which is odd."""
    merge, x = hg.PatchMerging(name="m"), hg.Input((5, 6, 3), name="x")
    first, second = merge(x), merge(hg.Pad(((0, 1), (0, 0)))(x))
    network = hg.Network({"y": hg.Add()(first, second)})
    assert list(network.parameters()) == ["m.norm/gamma", "m.norm/beta", "m.reduction/w"]
