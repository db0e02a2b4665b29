"""Tests of arrays with spatial extents: exact under every cut, and refused where extents do not fit."""

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
from halograd.layers import Network, Strategy
from halograd.layers.parameter import Parameter
from halograd.layers.resized import resized
from halograd.layers.strategy import layout_of, parameter_blocks
from halograd.perfmodel.cuts import baseline, shared_candidates
from halograd.testing import check_layer, random_array, run_layer
from tests.layers.geometries import skew
from tests.layers.norms import executing, step
from tests.layers.oracle import check_torch, torch
from tests.support.grids import axes_in_turn
from tests.support.lean import check_allocations
from tests.support.refusals import refusals

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
