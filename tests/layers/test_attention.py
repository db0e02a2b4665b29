"""Tests of attention: torch as oracle, every cut, ring and gather, periodic axes, dropout, memory, messages."""

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.kernels import get_backend
from halograd.layers import Attention, Conv, Input, MeanSquaredError, MultiHeadAttention, Network, Pad, Roll
from halograd.layers.resized import resized
from halograd.layers.strategy import Strategy, parameter_blocks
from halograd.perfmodel.cost import memory_of, program_of
from halograd.program.program import Target
from halograd.testing import check_layer, random_array, run_layer
from halograd.training.executor import Executor
from tests.layers.geometries import skew
from tests.layers.graphs import Graphs, run
from tests.layers.norms import close
from tests.layers.oracle import check_torch, torch
from tests.support.grids import grids_in_turn
from tests.support.refusals import refusals

#: Settings, and sample shapes of queries, keys and values.
CASES = {
    "everywhere": ({"heads": 2}, [(7, 5, 8)] * 3),
    "everywhere, relative": ({"heads": 2, "bias": "relative"}, [(9, 8)] * 3),
    "to other positions": ({"heads": 4}, [(7, 5, 16), (3, 4, 8), (3, 4, 6)]),
    "windows": ({"heads": 2, "window": (3, 2), "bias": "relative"}, [(7, 5, 4)] * 3),
    "shifted windows": ({"heads": 2, "window": 4, "shift": (2, 1), "bias": "relative"}, [(9, 6, 4)] * 3),
    "neighborhood": ({"heads": 2, "neighborhood": 3, "bias": "relative"}, [(7, 5, 4)] * 3),
    "dilated": ({"heads": 1, "neighborhood": (2, 3), "dilation": (3, 2), "scale": 0.7}, [(8, 7, 4)] * 3),
    "3-D windows": ({"heads": 2, "window": 2, "shift": (1, 0, 1), "bias": "relative"}, [(5, 3, 4, 4)] * 3),
    "grouped 1-D": ({"heads": 4, "window": 5}, [(11, 8), (11, 4), (11, 6)]),
    "heads that blocks cut": ({"heads": 3}, [(4, 3, 9), (4, 3, 9), (4, 3, 12)]),
}


@pytest.fixture
def alone():
    with Communicator(MPI.COMM_SELF) as made:
        yield made


EACH = pytest.mark.parametrize("case", CASES)


def attention(case, **more):
    settings, shapes = CASES[case]
    return lambda: Attention(**{**settings, **more}, name="attention"), shapes


def expected(layer, shapes):
    """Return attention in torch with scores of all pairs: ``function(q, k, v, bias)`` on arrays with channels first."""
    lib, heads = torch(), layer.heads
    reaches = layer.reaches(shapes[0], shapes[1])
    positions = [np.indices(shape[:-1]).reshape(len(shape) - 1, -1) for shape in shapes[:2]]
    allowed = np.ones((positions[0].shape[1], positions[1].shape[1]), bool)
    index = []
    for reach, q, k in zip(reaches, *positions):
        allowed &= reach.allowed(q, k)
        index.append(np.clip((q[:, None] - k) // reach.dilation + reach.extent - 1, 0, reach.bias_extent - 1))

    def split(x, count):
        return x.flatten(2).unflatten(1, (count, -1)).transpose(2, 3)

    def function(q, k, v, bias=None):
        groups = shapes[1][-1] * heads // shapes[0][-1]
        mask = lib.zeros(allowed.shape, dtype=q.dtype).masked_fill(lib.tensor(~allowed), -np.inf)
        mask = mask if bias is None else mask + bias[(slice(None), *map(lib.tensor, index))]
        k, v = (split(x, groups).repeat_interleave(heads // groups, 1) for x in (k, v))
        y = lib.nn.functional.scaled_dot_product_attention(split(q, heads), k, v, mask, scale=layer.scale)
        return y.transpose(2, 3).flatten(1, 2).unflatten(2, shapes[0][:-1])

    return function


@EACH
@pytest.mark.parametrize(("backend", "dtype"), [("numpy", "float64"), ("onednn", "float32")])
def test_is_that_of_torch(case, backend, dtype):
    make, shapes = attention(case)
    function = expected(make(), shapes)

    def in_float64(*arrays, **params):
        return function(*(array.double() for array in arrays), **{k: p.double() for k, p in params.items()})

    check_torch(make, shapes, in_float64, dtype, backend)


@pytest.mark.mpi
@EACH
def test_every_cut(ranks, alone, turn, case):
    """Outputs and all gradients are those of one process, also with cut heads and with a ring."""
    make, shapes = attention(case)
    axes = ("sample", *("depth", "height", "width")[4 - len(shapes[0]) :], "channel")
    want = run_layer(make, shapes, alone, {}, batch=2)
    for parts in grids_in_turn(ranks.size, axes, turn):
        for how in ("gather", "ring"):
            found = run_layer(make, shapes, ranks, parts, batch=2, options={"attention": how})
            for key in want if found is not None else ():
                close(found[key], want[key])


@pytest.mark.mpi
@pytest.mark.parametrize("rule", [{"window": 2, "shift": 1}, {"neighborhood": 3, "dilation": 2}], ids=str)
def test_periodic_axes_continue(rule):
    """The result moves with the input along a periodic axis."""
    shape = (5, 10, 4)

    def attend(shift):
        x = np.roll(random_array((2, *shape), "x"), shift, 2)
        node = Input(shape, "x")
        y = MultiHeadAttention(2, periodic=(False, True), name="m", **rule)(node)
        network = Network({"y": y})
        with Communicator(MPI.COMM_WORLD) as comm:
            strategy = Strategy({"width": comm.size})
            with Executor(network, comm, get_backend("numpy"), 2, strategy, "float64", trainable=False) as executor:
                for name, array in executor.store.params.items():
                    array[...] = random_array(executor.store.shapes[name], name)[executor.store.box(name).slices()]
                executor.set_input("x", x)
                executor.forward(training=False)
                return executor.gather(network.names[y])

    moved, unmoved = attend(2), attend(0)
    if unmoved is not None:
        close(moved, np.roll(unmoved, 2, 2))


@pytest.mark.ranks(1, 2)
def test_periodic_windows_are_those_of_shifted_samples(ranks):
    """Windows that continue at the other end are whole windows of the sample shifted back, with the same biases."""
    x = Input((8, 6, 4), "x")
    settings = {"window": (4, 3), "bias": "relative"}
    periodic = Attention(2, shift=(1, 2), periodic=True, name="periodic", **settings)
    whole = Attention(2, name="whole", **settings)
    back = Roll((-1, -2))(x)
    network = Network({"found": periodic(x, x, x), "want": Roll((1, 2))(whole(back, back, back))})
    strategy = Strategy({"height": ranks.size})
    with Executor(network, ranks, get_backend("numpy"), 2, strategy, "float64", trainable=False) as executor:
        for array in executor.store.params.values():
            array[...] = random_array(array.shape, "bias")
        executor.set_input("x", random_array((2, 8, 6, 4), "x"))
        executor.forward(training=False)
        found, want = (executor.gather(network.names[network.outputs[name]]) for name in ("found", "want"))
    if want is not None:
        close(found, want)


def test_calls_of_a_periodic_layer_share_its_parameters():
    layer, x = Attention(2, window=4, shift=1, periodic=True, bias="relative", name="a"), Input((8, 4), "x")
    once = layer(x, x, x)
    assert list(Network({"y": layer(once, once, once)}).parameters()) == ["a/bias"]


@pytest.mark.parametrize("name", [None, "m"])
def test_calls_with_projections_share_all_parameters(name):
    attend, x = MultiHeadAttention(2, bias="relative", name=name), Input((5, 4), "x")
    once, twice = (Network({"y": y}).parameters() for y in (attend(x), attend(attend(x))))
    assert list(once) == list(twice)
    assert len(twice) == 9


@pytest.mark.parametrize("name", [None, "m"])
def test_calls_with_projections_take_one_number_of_channels(name):
    """A call that cannot share the projections of an earlier one is refused, whether the layers have names or not."""
    attend = MultiHeadAttention(2, name=name)
    attend(Input((5, 4), "x"))
    with pytest.raises(ValueError, match="query has 4 channels, as in an earlier call, got 8; make another"):
        attend(Input((5, 8), "z"))
    fixed = MultiHeadAttention(2, width=3, name=name)
    fixed(Input((5, 4), "x"))
    with pytest.raises(ValueError, match=r"out has 4 channels, as in an earlier call, got 8; .* width and channels"):
        fixed(Input((5, 8), "z"))


@pytest.mark.mpi
@pytest.mark.parametrize("case", ["everywhere", "dilated", "heads that blocks cut"])
def test_dropped_weights_are_the_same_under_every_cut(ranks, alone, turn, case):
    make, shapes = attention(case, dropout=0.4)
    want = run_layer(make, shapes, alone, {}, batch=2)
    plain = run_layer(attention(case)[0], shapes, alone, {}, batch=2)
    assert np.abs(want["y"] - plain["y"]).max() > 0.01
    for parts in grids_in_turn(ranks.size, ("sample", "height", "width", "channel"), turn):
        for how in ("gather", "ring"):
            found = run_layer(make, shapes, ranks, parts, batch=2, options={"attention": how}, steps=2)
            again = run_layer(make, shapes, alone, {}, batch=2, steps=2)
            for key in again if found is not None else ():
                close(found[key], again[key])


@pytest.mark.mpi
def test_samples_that_were_read_with_halos(monkeypatch):
    """Boxes of an input that other layers read are no parts of it: on three ranks rank 0 owns no row of six here, and
    reads the second one for its cropped output. The owned boxes are sent.
    """
    skew(monkeypatch)

    def block():
        attend, around, conv = Attention(2, name="a"), Pad(((1, 1), (0, 0)), "circular"), Conv(4, 5, name="wide")
        inner = Pad(((-1, -1), (0, 0)))
        return lambda x: Pad(((-1, -1), (0, 0)))(attend(x, x, x)) + inner(x) + Pad(((0, 0), (2, 2)))(conv(around(x)))

    check_layer(block, (6, 5, 4), backend="numpy")


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("seed", range(6))
def test_random_networks(ranks, alone, seed):
    graphs = Graphs(seed, attentions=8)
    network = graphs.network()
    strategy = graphs.recomputed(graphs.strategy(network, ranks.size))
    want = run(network, alone, graphs.batch, Strategy({}), (0, 3))
    found = run(network, ranks, graphs.batch, strategy, (0, 3))
    for key in want if found is not None else ():
        np.testing.assert_allclose(found[key], want[key], rtol=1e-9, atol=1e-10, err_msg=key)


def step_of(shape, heads, **settings):
    x = Input(shape, "x")
    y = Attention(heads, name="attention", **settings)(*(Conv(shape[-1], 1, name=n)(x) for n in "qkv"))
    return Network({"loss": MeanSquaredError()(y, Input(y.shape, "target"))})


@pytest.mark.mpi
@pytest.mark.parametrize("how", ["gather", "ring"])
def test_memory_is_as_predicted(ranks, how):
    made, dtype = step_of((12, 8, 16), 2), np.dtype("float32")
    strategy = Strategy({"height": ranks.size}, options={"attention": how})
    with Executor(made, ranks, get_backend("numpy"), 2, strategy, dtype) as executor:
        found, blocks = dict(executor.predicted_bytes), parameter_blocks(made, strategy, ranks.size)
        want = memory_of(program_of(made, strategy, Target(2, ranks.size, ranks.rank, dtype), blocks), blocks, 0)
        with ranks.agreement():
            for use in ("kernel workspace", "messages"):
                del found[use], want[use]
            assert found == want
            assert executor.program.placement.size == len(executor.runner.arena)


@pytest.mark.parametrize("backend", ["numpy", "onednn"])
def test_scores_are_never_stored(backend):
    """Attention over 16,384 positions holds less than four times its inputs and outputs (and never N x N)."""
    x = [Input((128, 128, 64), name) for name in "qkv"]
    made = Network({"loss": MeanSquaredError()(Attention(1, name="attention")(*x), Input((128, 128, 64), "target"))})
    options = {"probed": list("qkv")}
    with (
        Communicator(MPI.COMM_SELF) as alone,
        get_backend(backend) as kernels,
        Executor(made, alone, kernels, 1, Strategy({}), "float32", **options) as executor,
    ):
        arrays = 4 * 128 * 128 * 64 * 4  # q, k, v, y
        assert len(executor.runner.arena) + kernels.held_bytes <= 4 * arrays


# -- refusals ----------------------------------------------------------------------------------------


def called(*shapes, heads=2, **settings):
    return lambda: Attention(heads, **settings)(*(Input(shape, f"x{i}") for i, shape in enumerate(shapes)))


def periodic_windows():
    x = Input((8, 4), "x")
    return Network({"y": Attention(2, window=4, shift=1, periodic=True)(x, x, x)})


MAP = (6, 6, 4)
test_settings_that_do_not_match = refusals(
    (lambda: Attention(0), "number of heads >= 1"),
    (lambda: Attention(2, window=3, neighborhood=3), "a window or a neighborhood, got both"),
    (lambda: Attention(2, shift=1), "expected a window with a shift"),
    (lambda: Attention(2, dilation=2), "expected a neighborhood with a dilation"),
    (lambda: Attention(2, window=0), "extents of at least 1 as window"),
    (lambda: Attention(2, periodic=True), "periodic axes"),
    (lambda: Attention(2, bias="absolute"), "'relative' or None"),
    (lambda: Attention(2, dropout=1), r"dropout in \[0, 1\)"),
    (called(MAP, MAP), "expected 3 input"),
    (called(MAP, MAP, (6, 5, 4)), "keys and values of the same extents"),
    (called(MAP, (6, 4), (6, 4)), "as many spatial axes"),
    (called((4,), (4,), (4,)), "spatial axes"),
    (called(MAP, (3, 3, 4), (3, 3, 4), window=2), "queries and keys of the same extents"),
    (called(MAP, MAP, MAP, heads=3), "heads that divides 4"),
    (called(MAP, (6, 6, 3), MAP), "channels per head"),
    (called((6, 6, 8), (6, 6, 8), (6, 6, 9)), "values of a multiple of 2"),
    (called(MAP, MAP, MAP, window=4, shift=1, periodic=True), "periodic windows that divide 6"),
    (called(MAP, MAP, MAP, neighborhood=7, periodic=True), "periodic neighborhood of at most 6"),
    (called(MAP, MAP, MAP, window=(2, 2, 2)), "window"),
    (lambda: resized(periodic_windows(), (10,)), "periodic windows that divide 10"),
    (lambda: MultiHeadAttention(3)(Input(MAP, "x")), "heads that divides 4 channels"),
    (lambda: MultiHeadAttention(2, groups=0)(Input(MAP, "x")), r"filters \(0\) must be a positive multiple"),
    (lambda: MultiHeadAttention(2, channels=0)(Input(MAP, "x")), r"filters \(0\) must be a positive multiple"),
)
