"""Blocks of parameters: all elements are held, those who share agree, owners hold each element once."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halograd.layers import BatchNorm, Conv, Dense, Flatten, GroupNorm, Input, Network
from halograd.layers.contraction import partial_boxes, read_boxes
from halograd.layers.parameter_blocks import block_channels, parameter_blocks
from halograd.layers.strategy import AXES, Strategy, layout_of
from tests.layers.cuts import drawn_parts

SPATIAL = (5, 4)


def network(made, read):
    x = Input((*SPATIAL, read), "x")
    y = GroupNorm(1, name="group")(BatchNorm(name="norm")(Conv(made, (3, 2), padding=1, name="conv")(x)))
    return Network(Dense(made, name="dense")(Flatten(name="flat")(y)))


@st.composite
def cases(draw):
    """Output channels, input channels, parts of a contraction, idle ranks."""
    made, read = draw(st.integers(1, 9)), draw(st.integers(1, 7))
    return made, read, draw(drawn_parts(made, read)), draw(st.integers(0, 2))


def blocks_under(made, read, parts, idle):
    """Blocks of all parameters, and ranks that take part."""
    channelwise = {**parts, "input_channel": 1, "sample": parts["sample"] * parts["input_channel"]}
    whole = {"sample": math.prod(parts.values())}
    layers = {"conv": parts, "norm": channelwise, "group": whole, "flat": whole, "dense": parts}
    used = math.prod(parts.values())
    net = network(made, read)
    return net, parameter_blocks(net, Strategy({"sample": used + idle}, layers), used + idle), used


@given(cases())
def test_every_element_is_held_and_owned_once(case):
    net, blocks, used = blocks_under(*case)
    shapes = {name: p.shape for name, p in {**net.parameters(), **net.state()}.items()}
    assert set(blocks) == set(shapes)
    for name, shape in shapes.items():
        held, owned = np.zeros(shape, int), np.zeros(shape, int)
        for rank, box in enumerate(blocks[name].boxes):
            held[box.slices()] += 1
            if blocks[name].holders.leads(rank):
                owned[box.slices()] += 1
            assert box.size == 0 or blocks[name].holders.color(rank) is not None
        assert (held > 0).all() and (owned == 1).all(), name
        assert blocks[name].largest == max(box.size for box in blocks[name].boxes)
        assert not any(box.size for box in blocks[name].boxes[used:])
        assert not any(colors(blocks[name])[used:])


def colors(found):
    """Per rank, the number of its block."""
    return [found.holders.color(rank) for rank in range(found.holders.size)]


@given(cases())
def test_ranks_of_one_color_hold_the_same_block_and_others_none_of_it(case):
    _, blocks, _ = blocks_under(*case)
    for found in blocks.values():
        for (a, c), (b, d) in itertools.combinations(zip(found.boxes, colors(found)), 2):
            if c == d:
                assert a == b or not (a.size or b.size)
            elif c is not None and d is not None:
                assert not (a & b).size


@given(cases())
def test_blocks_are_those_the_layer_computes_with(case):
    """Filters are those of the partial sums, input channels those that are read; norms follow their output."""
    _, read, parts, idle = case
    net, blocks, used = blocks_under(*case)
    size = used + idle
    output = layout_of((9, *net.layers["conv"].shape), parts, size)
    partial = partial_boxes(output, parts)
    whole = read_boxes(partial, read, parts)
    for rank in range(used):
        if not partial[rank].size:
            continue
        w = blocks["conv/w"].boxes[rank].ranges
        assert (w[0], w[-1]) == (partial[rank].ranges[-1], whole[rank].ranges[-1])
        bias = blocks["conv/b"]
        first = rank % parts["input_channel"] == 0
        assert bias.boxes[rank].ranges == (w[0],) if first else bias.boxes[rank].size == 0
        assert (bias.holders.color(rank) is None) == (not first)
    channelwise = {**parts, "input_channel": 1, "sample": parts["sample"] * parts["input_channel"]}
    boxes = layout_of((9, *net.layers["norm"].shape), channelwise, size).boxes
    for key in ("gamma", "beta", "mean", "var"):
        held = blocks[f"norm/{key}"].boxes
        assert all(held[r].ranges == (boxes[r].ranges[-1],) for r in range(used) if boxes[r].size)


@given(cases())
def test_ranks_that_share_a_block_are_those_with_other_samples_or_positions(case):
    _, _, parts, _ = case
    _, blocks, used = blocks_under(*case)
    channels = parts["channel"] * parts["input_channel"]
    for key in ("conv/w", "dense/w"):
        assert blocks[key].holders.members_each == used // channels
        assert colors(blocks[key])[:used] == [r % channels for r in range(used)]
    assert colors(blocks["group/gamma"]).count(0) == used


@given(cases())
def test_whole_is_what_all_ranks_hold(case):
    _, _, parts, idle = case
    _, blocks, _ = blocks_under(*case)
    assert blocks["conv/w"].whole == (not idle and parts["channel"] * parts["input_channel"] == 1)
    assert blocks["group/gamma"].whole == (not idle)


@given(st.integers(1, 40), st.data())
def test_block_channels_are_whole_blocks_of_the_output(channels, data):
    inner = data.draw(st.integers(1, channels))
    outer = data.draw(st.integers(1, channels // inner))
    found = block_channels(channels, {"channel": outer, "input_channel": inner})
    cuts = [a for a, _ in found] + [channels]
    assert cuts[0] == 0 and [b for _, b in found] == cuts[1:]
    layout = layout_of((1, channels), {"channel": outer, "input_channel": inner}, outer * inner)
    for rank, box in enumerate(layout.boxes):
        low, high = found[rank // inner]
        assert low <= box.start[1] and box.stop[1] <= high and box.size


def test_grouped_convolutions_are_whole():
    """Their weights have fewer input channels than the input: nothing of them is cut."""
    net = Network(Conv(4, 3, groups=2, name="conv")(Input((5, 5, 4), "x")))
    blocks = parameter_blocks(net, Strategy({"sample": 3}), 3)
    assert blocks["conv/w"].whole and blocks["conv/b"].whole


@pytest.mark.parametrize(("axis", "shape"), [("channel", [(3, 3, 3, 4), (2, 3, 3, 4)]), ("input_channel", None)])
def test_by_hand(axis, shape):
    net = Network(Conv(5, 3, name="conv")(Input((6, 6, 4), "x")))
    blocks = parameter_blocks(net, Strategy({"sample": 3}, {"conv": {axis: 2}}), 3)
    shapes = [box.shape for box in blocks["conv/w"].boxes]
    assert shapes == [*(shape or [(5, 3, 3, 2)] * 2), (0, 3, 3, 4)]
    assert colors(blocks["conv/w"]) == [0, 1, None]
    assert colors(blocks["conv/b"]) == ([0, 1, None] if axis == "channel" else [0, None, None])
    assert [box.size for box in blocks["conv/b"].boxes] == ([3, 2, 0] if axis == "channel" else [5, 0, 0])
    assert set(AXES) >= {axis}
