"""Tests of parameters: blocks over the ranks, weight normalization, arrays with spatial extents."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.errors import UserError
from halograd.layers import BatchNorm, Conv, Dense, Flatten, GroupNorm, Input, Network
from halograd.layers.lowering import partial_boxes, read_boxes
from halograd.layers.parameter import Parameter, block_channels
from halograd.layers.reduction_chunks import dense_layers
from halograd.layers.resized import resized
from halograd.layers.strategy import AXES, Strategy, layout_of, parameter_blocks
from halograd.perfmodel.cuts import baseline, shared_candidates
from halograd.testing import check_layer, random_array, run_layer
from tests.layers.cuts import drawn_parts
from tests.layers.geometries import skew
from tests.layers.norms import executing, step
from tests.layers.oracle import check_torch, torch
from tests.support.grids import axes_in_turn
from tests.support.lean import check_allocations
from tests.support.refusals import refusals

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


SPACE = {2: ("width",), 3: ("height", "width"), 4: ("depth", "height", "width")}
CASES = {
    "positions": (partial(hg.Embedding, name="l"), (7, 6, 4)),
    "positions, 1-D": (partial(hg.Embedding, name="l"), (3, 4)),
    "positions, 3-D": (partial(hg.Embedding, name="l"), (5, 4, 3, 4)),
    "vectors": (partial(hg.Embedding, name="l"), (4,)),
    "per cell": (partial(hg.Embedding, ("height", "width"), name="l"), (7, 6, 4)),
    "per row": (partial(hg.Embedding, ("height", "channel"), name="l"), (5, 6, 4)),
    "per column": (partial(hg.Embedding, ("width",), name="l"), (5, 6, 4)),
    "gain per cell": (partial(hg.Scale, 0.5, True, "l", axes=("height", "width")), (5, 6, 4)),
    "mask of planes": (partial(hg.Scale, axes=("depth", "width", "channel"), name="l"), (3, 2, 4, 4)),
    "one number": (partial(hg.Scale, axes=(), name="l"), (5, 6, 4)),
    "constants": (partial(hg.Embedding, ("height", "width"), name="l", trained=False), (5, 6, 4)),
    "constant factors": (partial(hg.Scale, 0.5, True, "l", axes=("width", "channel"), trained=False), (5, 6, 4)),
    "token": (partial(hg.Token, name="l"), (5, 4)),
    "tokens": (partial(hg.Token, 3, name="l"), (2, 4)),
}


@pytest.mark.mpi
@pytest.mark.parametrize("name", CASES)
def test_exact_on_every_grid(ranks, name):
    make, shape = CASES[name]
    axes = ("sample", *SPACE.get(len(shape), ()), "channel")
    check_layer(make, shape, batch=3, axes=axes_in_turn(ranks.size, axes, list(CASES).index(name)))


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", ["positions", "per row", "gain per cell", "tokens"])
def test_exact_on_uneven_and_empty_blocks(name, monkeypatch):
    skew(monkeypatch)
    check_layer(*CASES[name], gradient=False)


@pytest.mark.torch
def test_are_those_of_torch():
    lib = torch()
    check_torch(*[CASES["per row"][0], [CASES["per row"][1]]], lambda x, w: x + w.movedim(-1, 0))
    check_torch(
        CASES["gain per cell"][0], [(5, 6, 4)], lambda x, gamma, beta: x * gamma.movedim(-1, 0) + beta.movedim(-1, 0)
    )
    check_torch(CASES["tokens"][0], [(2, 4)], lambda x, w: lib.cat([w.T.expand(len(x), 4, 3), x], dim=2))


@st.composite
def cuts(draw):
    """Draw a shape, the axes of its array, parts and shares of its axes, and a number of idle ranks."""
    spatial = draw(st.integers(1, 3))
    shape = (*(draw(st.integers(1, 7)) for _ in range(spatial)), draw(st.integers(3, 6)))
    names = (*("depth", "height", "width")[3 - spatial :], "channel")
    axes = draw(st.sets(st.sampled_from(names), min_size=1))
    parts = {"sample": draw(st.integers(1, 3)), "channel": draw(st.integers(1, 3))}
    for axis in names[:-1]:
        shares = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        parts[axis] = shares if len(set(shares)) > 1 else len(shares)
    return shape, [axis for axis in names if axis in axes], parts, draw(st.integers(0, 2))


@given(cuts())
def test_a_rank_holds_the_box_of_its_output_block(case):
    """Blocks and groups equal those that follow from the box of each rank."""
    shape, axes, parts, idle = case
    net = Network(hg.Embedding(axes, name="l")(hg.Input(shape)))
    used = Strategy(parts).ranks
    strategy = Strategy({}, {"l": parts}) if idle else Strategy(parts)
    blocks = parameter_blocks(net, strategy, used + idle)["l/w"]
    extents = net.parameters()["l/w"].shape
    output = layout_of((9, *shape), strategy.cuts_of("l"), used + idle).boxes
    groups = {}
    for rank, box in enumerate(output):
        color, held = blocks.holders.color(rank), blocks.boxes[rank]
        if rank >= used:
            assert color is None and not held.size
            continue
        mine = [(0, 1) if n == 1 else part for n, part in zip(extents, box.ranges[1:])]
        assert list(held.ranges) == mine
        place = [c for n, c in zip(extents, output.coordinates(rank)[1:]) if n > 1]
        assert groups.setdefault(color, place) == place
        assert rank in blocks.holders.members(color) and blocks.sizes[color] == held.size
    assert len(groups) == blocks.holders.count == len(set(map(tuple, groups.values())))
    covered = np.zeros(extents)
    for box in blocks.boxes:
        covered[box.slices()] += 1
    assert (covered > 0).all() and blocks.largest == max(box.size for box in blocks.boxes)


def test_initial_values():
    (w,) = hg.Embedding(std=0.5).parameters((40, 30, 4)).values()
    assert w.shape == (40, 30, 4) and not w.decay
    assert np.std(w.initial("l/w", 0)) == pytest.approx(0.5, rel=0.05)
    assert not hg.Token(2, std=0).parameters((5, 3))["w"].initial("l/w", 0).any()
    assert hg.Token(2)(hg.Input((5, 3))).shape == (7, 3)


def shared(layer):
    x = hg.Input((8, 8, 4))
    return Network({"y": layer(hg.Conv(4, 1, name="c")(layer(x)))})


def test_calls_of_one_layer_have_one_cut():
    net = shared(hg.Embedding(name="l"))
    cuts = {"l": {"height": 2}, "l#2": {"width": 2}}
    with pytest.raises(UserError, match=r"expected 'l#2', which has the parameters of 'l', .* got 2 width after 2 h"):
        Strategy({"sample": 2}, cuts).validate(net, 2)
    Strategy({"sample": 2}, {"l": {"height": 2}, "l#2": {"height": 2}}).validate(net, 2)
    Strategy({"sample": 2}, cuts).validate(shared(hg.Scale(name="l")), 2)  # which every rank holds whole
    every = [(1, 1, 1, 1, 1, 1), (2, 1, 1, 1, 1, 1), (1, 1, 2, 1, 1, 1)]
    assert shared_candidates(net, dict.fromkeys(net.layers, tuple(every)))["l#2"] == (every[1],)
    assert len({tuple(baseline("spatial", net, 2, 2).cuts_of(one).items()) for one in ("l", "l#2")}) == 1


def test_other_sizes():
    x = hg.Input((6, 6, 4))
    net = Network(hg.Embedding(("height",), name="rows")(x))
    assert resized(net, (6, 9)).parameters()["rows/w"].shape == (6, 1, 1)
    with pytest.raises(ValueError, match="takes no samples of 9 x 6: its parameter rows/w depends on their size"):
        resized(net, (9, 6))


class Misshapen(hg.Layer):
    def parameters(self, *shapes):
        return {"w": Parameter((3, 4), spatial_axes=(0, 1))}

    def forward(self, inputs, params, box):
        return inputs[0]


test_refusals = refusals(
    (
        lambda: Network(hg.Embedding(("row",))(hg.Input((4, 4, 2)))),
        r"Embedding: axes: expected some of height, width, channel, the axes of \(4, 4, 2\), each once, got \('row',\)",
    ),
    (lambda: Network(hg.Embedding(("depth",))(hg.Input((4, 2)))), "expected some of width, channel, the axes of"),
    (lambda: Network(hg.Scale(axes=["width"] * 2)(hg.Input((4, 2)))), "Scale: axes: expected some of width, channel"),
    (lambda: hg.Embedding(std=math.nan), "Embedding: std: expected a finite number >= 0, got nan"),
    (lambda: hg.Token(0), "Token: count: expected a whole number of at least 1, got 0"),
    (lambda: hg.Token()(hg.Input((4, 4, 2))), r"Token: expected samples \(L, C\), got \(4, 4, 2\)"),
    (
        lambda: Network(Misshapen(name="l")(hg.Input((4, 4, 2)))),
        r"expected extents \(4, 4\), those of the output, or 1 in spatial_axes of l/w, got \(3, 4\)",
    ),
    (lambda: Parameter((3, 4), spatial_axes=(1, 0)), r"expected spatial_axes, channel_axis and input_axis in rising"),
)


def test_a_step_with_sines_allocates_no_array():
    with (
        Communicator(MPI.COMM_SELF) as alone,
        executing(lambda: hg.SinusoidalEmbedding(256), (1,), alone, {}, batch=2048) as executor,
    ):
        step(executor)
        check_allocations(alone, lambda: step(executor), 192 * 1024)


@pytest.mark.mpi
def test_sines_of_a_number_per_sample():
    check_layer(lambda: hg.SinusoidalEmbedding(6, 100.0, "s"), (1,), batch=5)
    with Communicator(MPI.COMM_SELF) as alone:
        found = run_layer(lambda: hg.SinusoidalEmbedding(6, 100.0, "s"), [(1,)], alone, {})
    phase = random_array((2, 1), "x0") * 100.0 ** (-np.arange(3) / 3)
    np.testing.assert_allclose(found["y"], np.concatenate([np.cos(phase), np.sin(phase)], 1), rtol=1e-14)
