"""Tests of flatten, reshape, shuffles, dense layers and functions that create several layers: exact, errors."""

import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.dtensor import axis_names
from halograd.layers import (
    Concat,
    Conv,
    Dense,
    Embedding,
    Flatten,
    GlobalAveragePool,
    Input,
    MeanSquaredError,
    Network,
    Pad,
    PixelShuffle,
    PixelUnshuffle,
    Reshape,
    Token,
)
from halograd.layers.strategy import Strategy, layout_of
from halograd.lowering.operations import Transfer
from halograd.program.compiler import compile_program
from halograd.program.program import Target
from halograd.testing import check_layer, random_array, run_layer
from tests.layers.oracle import Called, check_torch, torch
from tests.support.refusals import refusals

AXES = ("sample", "height", "width")

#: Shapes of samples before and after.
SHAPES = {
    "tokens": ((6, 4, 3), (-1, 3)),
    "map": ((24, 3), (6, 4, 3)),
    "3-D to tokens": ((3, 2, 4, 2), (24, 2)),
    "tokens to 3-D": ((24, 2), (2, 3, 4, 2)),
    "an axis stays": ((3, 2, 4, 2), (3, -1, 2)),
    "rows to channels": ((5, 3, 4), (5, 12)),
    "channels to rows": ((5, 8), (5, 2, 4)),
    "cells": ((4, 4, 3), (2, 2, 12)),
    "other rows": ((5, 6, 2), (6, 5, 2)),
    "one row": ((8, 2), (1, 8, 2)),
    "nothing in common": ((6, 4), (3, 8)),
    "the same": ((7, 2), (7, 2)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_elements_are_in_the_order_of_numpy(name):
    before, after = SHAPES[name]
    with Communicator(MPI.COMM_SELF) as comm:
        found = run_layer(lambda: Reshape(after), [before], comm, {})
    x = random_array((2, *before), "x0")
    g = random_array(found["y"].shape, "g")
    assert np.array_equal(found["y"], x.reshape(2, *after)) and np.array_equal(found["dx0"], g.reshape(x.shape))


@pytest.mark.many_ranks
@pytest.mark.parametrize("name", sorted(SHAPES.keys() - {"the same", "3-D to tokens", "other rows"}))
def test_exact_between_maps(name):
    """Every cut of samples, space and channels, with blocks that do not match and ranks without elements."""
    before, after = SHAPES[name]
    spatial = axis_names(max(len(before), len(after)) + 1)[1:-1]
    check_layer(lambda: Reshape(after), before, axes=("sample", *spatial, "channel"), gradient=False)


@pytest.mark.mpi
def test_exact_as_a_vision_transformer_does():
    """A class token before tokens of patches, positions, tokens joined behind, and the class token as a vector."""

    def chain():
        patches, each, last = Conv(4, 2, 2, name="patches"), Conv(4, 3, padding=1, name="each"), Dense(3, name="last")
        first, positions, pool = Token(name="first"), Embedding(name="positions"), GlobalAveragePool(name="pool")

        def network(x):
            tokens = Reshape((-1, 4), name="tokens")(patches(x))
            tokens = positions(first(tokens))
            tokens = Concat(name="both", axis="width")(each(tokens), tokens)
            return last(pool(Pad([(0, 1 - tokens.shape[0])], name="one")(tokens)))

        return network

    check_layer(chain, (6, 4, 2), axes=AXES, gradient=False, batch=3)


@pytest.mark.parametrize("cut", [{"sample": 4}, {"height": 4}, {"sample": 2, "height": 2}, {"height": 2, "channel": 2}])
def test_no_message_where_blocks_of_the_first_axis_match(cut):
    x = Input((8, 6, 4), "x")
    y = Reshape((8, 6, 4), name="map")(Reshape((48, 4), name="tokens")(x))
    network = Network({"y": y, "loss": MeanSquaredError()(y, Input(y.shape, "target"))})
    strategy = Strategy({"sample": 4}, {"tokens": cut, "map": cut})
    program = compile_program(network, strategy, Target(4, 4, probed=frozenset({"x"})))
    operations = [one for segment in program.forward + program.backward for one in segment.operations]
    own = [one for one in operations if one.layer in ("tokens", "map")]
    assert len(own) == 4 and not any(isinstance(one, Transfer) for one in own)


def test_parts_along_other_axes_gather_the_rows_of_their_elements():
    """Under 2 x 2, blocks of 12 tokens are 2 rows of 6 columns, of which a rank owns one half or nothing."""
    x, cuts = Input((8, 6, 4), "x"), {"height": 2, "width": 2}
    node = Reshape((48, 4))(x)
    layouts = [layout_of((1, *one.shape), cuts, 4) for one in (x, node)]
    needed = node.layer.needed_blocks(0, layouts[:1], layouts[1])
    assert [box.ranges[1:] for box in needed] == [((a, a + 2), (0, 6), (0, 4)) for a in (0, 2, 4, 6)]


def test_minus_one_follows_the_samples():
    assert Reshape((-1, 6))(Input((4, 3, 2))).shape == (4, 6)
    assert Reshape((3, -1))(Input((12,))).shape == (3, 4)


test_refusals = refusals(
    (lambda: Reshape((4,)), r"expected \(\*spatial, C\) with 1 to 3 spatial axes, all at least 1, .* got \(4,\)"),
    (lambda: Reshape((4, 0)), r"all at least 1, but one may be -1, got \(4, 0\)"),
    (lambda: Reshape((-1, 2, -1)), r"one may be -1, got \(-1, 2, -1\)"),
    (lambda: Reshape((2, 2, 2, 2, 2)), r"with 1 to 3 spatial axes"),
    (lambda: Reshape((2, 3))(Input((7,))), r"expected 6 elements for \(2, 3\), got 7"),
    (lambda: Reshape((2, 3))(Input((7, 2))), r"expected 6 elements for \(2, 3\), got 7 x 2"),
    (lambda: Reshape((-1, 3))(Input((5, 2))), r"expected a multiple of 3 elements for \(-1, 3\), got 5 x 2"),
)


test_refusals_of_shuffles = refusals(
    (lambda: PixelShuffle(0), "PixelShuffle: expected a factor of at least 1, got 0"),
    (lambda: PixelShuffle(2)(Input((4, 4, 6))), "expected channels that are a multiple of 4, got 6"),
    (lambda: PixelUnshuffle(2)(Input((4, 5, 6))), r"expected extents that are multiples of 2, got \(4, 5\)"),
    (lambda: PixelShuffle(2)(Input((4,))), r"expected samples with spatial axes .* got \(4,\)"),
)


def test_shapes_parameters_and_flops():
    assert Flatten().output_shape((3, 4, 5)) == (60,)
    layer = Dense(4)
    assert layer.output_shape((6,)) == (4,)
    assert {k: p.shape for k, p in layer.parameters((6,)).items()} == {"w": (4, 6), "b": (4,)}
    assert layer.flops((6,)) == 48


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match=r"Dense: expected .* got \(4, 4, 2\)"):
        Dense(3)(Input((4, 4, 2)))
    with pytest.raises(ValueError, match="units must be at least 1, got 0"):
        Dense(0)


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


def test_patches_are_merged_by_named_layers():
    network = hg.Network(hg.PatchMerging(name="m")(hg.Input((5, 6, 3), name="x")))
    assert list(network.layers) == ["m.pad", "m.patches", "m.norm", "m.reduction"]
    assert {name: spec.shape for name, spec in network.parameters().items()} == {
        "m.norm/gamma": (12,),
        "m.norm/beta": (12,),
        "m.reduction/w": (6, 1, 1, 12),
    }


test_refusals_of_other_types = refusals(
    (lambda x: hg.Sequential(), "Sequential: expected one or more layers, got none"),
    (lambda x: hg.Sequential(hg.ReLU(), 3), "Sequential: expected one or more layers, got 3"),
    call=lambda make: make(hg.Input(SHAPE)),
    error=TypeError,
)
test_composed_refusals = refusals(
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
