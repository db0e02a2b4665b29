"""Tests of flatten, reshape, pixel and channel shuffle: exact, within networks, and rejected inputs."""

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.dtensor import axis_names
from halograd.layers import (
    Concat,
    Conv,
    Dense,
    Embedding,
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
