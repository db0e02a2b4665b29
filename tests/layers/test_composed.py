"""What makes several layers at a call: sequences, pieces of the channels, crops."""

import doctest

import pytest

from halograd.layers import (
    BatchNorm,
    Concat,
    Conv,
    Crop,
    Input,
    Layer,
    MaxPool,
    Network,
    ReLU,
    Sequential,
    Split,
    composed,
)
from halograd.testing import check_layer
from tests.layers.oracle import check_torch, torch
from tests.support.refusals import refusals

SHAPE = (7, 6, 5)


def names(node):
    return list(Network(node).layers)


def test_a_sequence_makes_the_nodes_of_its_layers_in_order():
    def chained(x):
        return ReLU()(Conv(4, 3, name="c")(BatchNorm()(x)))

    sequence = Sequential(BatchNorm(), Conv(4, 3, name="c"), ReLU())
    assert names(sequence(Input(SHAPE))) == names(chained(Input(SHAPE))) == ["batchnorm1", "c", "relu1"]
    assert not isinstance(sequence, Layer)
    nested = Sequential(Sequential(Conv(4, 3), ReLU()), lambda x: x + x, MaxPool(2))
    assert nested(Input(SHAPE)).shape == (2, 2, 4)
    assert Sequential(Concat(), ReLU())(Input(SHAPE), Input(SHAPE, "z")).shape == (7, 6, 10)


def test_a_sequence_that_is_called_again_has_the_same_parameters():
    sequence = Sequential(Conv(SHAPE[-1], 1, name="c"), ReLU())
    made = Network(sequence(sequence(Input(SHAPE))))
    assert list(made.layers) == ["c", "relu1", "c#2", "relu1#2"] and set(made.parameters()) == {"c/w", "c/b"}


@pytest.mark.mpi
@pytest.mark.parametrize("sizes", [5, (2, 1, 2)], ids=str)
def test_pieces_of_all_channels(sizes):
    """Put together again in another order."""

    def turned():
        split, both = Split(sizes, "s"), Concat(name="both")
        return lambda x: both(*reversed(split(x)))

    check_layer(turned, SHAPE)
    check_layer(turned, SHAPE, axes=("height", "channel"), gradient=False)


def test_names_of_pieces():
    assert names(Concat(name="c")(*Split((2, 3), "s")(Input(SHAPE)))) == ["s_0", "s_1", "c"]


@pytest.mark.mpi
def test_a_skip_connection_of_convolutions_without_padding():
    def joined():
        conv, crop, both = Conv(2, 3, name="c"), Crop(name="crop"), Concat(name="both")

        def call(x):
            small = conv(x)
            return both(crop(x, small), small)

        return call

    check_layer(joined, SHAPE)


@pytest.mark.torch
@pytest.mark.ranks(1, 2)
def test_as_torch():
    concat = torch().cat
    turned = lambda: Called(lambda x: Concat(name="c")(*reversed(Split((2, 3), "s")(x))))  # noqa: E731
    check_torch(turned, [SHAPE], lambda x: concat(tuple(reversed(x.split((2, 3), 1))), 1))
    check_torch(lambda: Called(Crop(((1, 2), (0, 3)), "p")), [SHAPE], lambda x: x[:, :, 1:-2, :-3])


class Called:
    """Layers without parameters, for the oracle."""

    name = "composed"

    def __init__(self, call):
        self.call = call

    def __call__(self, x):
        return self.call(x)

    def parameters(self, *shapes):
        return {}


def test_examples():
    assert doctest.testmod(composed).failed == 0


test_refusals_of_other_types = refusals(
    (lambda x: Sequential(), "Sequential: expected one or more layers, got none"),
    (lambda x: Sequential(ReLU(), 3), "Sequential: expected one or more layers, got 3"),
    call=lambda make: make(Input(SHAPE)),
    error=TypeError,
)
test_refusals = refusals(
    (lambda x: Split(2)(x), "expected a number of pieces that divides 5 channels, got 2"),
    (lambda x: Split((2, 2))(x), r"expected pieces of 5 channels, got \(2, 2\)"),
    (lambda x: Split((5, 0))(x), r"expected pieces of 5 channels, got \(5, 0\)"),
    (lambda x: Crop()(x), "Crop: expected amounts, or a second node for its extent, got none"),
    (lambda x: Crop(1)(x, x), "a second node for its extent, got both"),
    (lambda x: Crop(-1)(x), r"expected rows to take away of \(7, 6\), got"),
    (lambda x: Crop()(x, Input((8, 6, 1))), "use Pad to add some"),
    (lambda x: Crop()(x, Input((8, 1))), "expected two nodes of as many axes"),
    call=lambda make: make(Input(SHAPE)),
)
