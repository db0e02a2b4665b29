"""Tests of parameters: their blocks over the ranks; weight normalization under every cut, against torch."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halograd.errors import UserError
from halograd.layers import BatchNorm, Conv, Dense, Flatten, GroupNorm, Input, Network
from halograd.layers.lowering import partial_boxes, read_boxes
from halograd.layers.parameter import block_channels
from halograd.layers.reduction_chunks import dense_layers
from halograd.layers.strategy import AXES, Strategy, layout_of, parameter_blocks
from halograd.testing import check_layer
from tests.layers.cuts import drawn_parts
from tests.layers.geometries import skew
from tests.layers.oracle import check_torch, torch

SPATIAL = (5, 4)


def network(made, read):
    x = Input((*SPATIAL, read), "x")
    y = GroupNorm(1, name="group")(BatchNorm(name="norm")(Conv(made, (3, 2), padding=1, name="conv")(x)))
    return Network(Dense(made, name="dense")(Flatten(name="flat")(y)))


@st.composite
def cases(draw):
    """Draw output channels, input channels, parts of a convolution, and number of idle ranks."""
    made, read = draw(st.integers(1, 9)), draw(st.integers(1, 7))
    return made, read, draw(drawn_parts(made, read)), draw(st.integers(0, 2))


def blocks_under(made, read, parts, idle):
    """Return network, blocks of all parameters, and number of ranks that are used."""
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
    """Return the number of the block of each rank."""
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
    """Each rank holds the parameters with which it computes: filters of its outputs, channels of its inputs."""
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
    """Parameters of a grouped convolution are not cut, because weights have fewer input channels than the input."""
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
def test_weight_norm_is_exact_on_every_grid(name):
    make, shape = LAYERS[name]
    check_layer(make, shape, batch=3)
    check_layer(make, shape, batch=3, options={"halo": "overlap"}, gradient=False)


@pytest.mark.many_ranks
@pytest.mark.parametrize("name", ["conv", "grouped"])
def test_weight_norm_is_exact_on_uneven_and_empty_blocks(name, monkeypatch):
    skew(monkeypatch)
    check_layer(*LAYERS[name], gradient=False)


@pytest.mark.torch
@pytest.mark.parametrize("name", LAYERS)
def test_weight_norm_as_torch(name):
    """Weight normalization equals torch's own parametrization of a module."""
    lib, (make, shape) = torch(), LAYERS[name]
    layer, f = make(), lib.nn.functional

    def normed(x, w, g, b=None):
        """Apply torch's `_weight_norm`, which its parametrization calls, over all axes except that of the filters."""
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


def test_channels_with_weight_norm_are_not_cut_and_the_gradient_is_not_replicated():
    x = Input((4, 4, 2))
    conv, dense = Conv(4, 3, weight_norm=True, name="c"), Dense(4, weight_norm=True, name="d")
    network = Network(Dense(2, name="plain")(dense(Flatten()(conv(x)))))
    for name in ("c", "d"):
        with pytest.raises(UserError, match=f"layer '{name}' .* cannot be cut along 'channel'"):
            Strategy({}, {name: {"channel": 2}}).validate(network, 2)
    assert list(dense_layers(network)) == ["plain"]
