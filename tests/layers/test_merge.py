"""Tests of layers of two inputs or single elements: products, sums, Concat, powers, means: exact, gradients, errors."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.device import as_dtype
from halograd.dtensor import Box, Layout
from halograd.layers import Add, Affine, BroadcastAdd, Concat, Conv, Input, Multiply, PReLU, Scale, Sigmoid
from halograd.layers.parameter import Parameter
from halograd.layers.resized import resized
from halograd.testing import check_layer, compare, run_layer
from tests.layers.cases import GATES
from tests.support.grids import axes_in_turn
from tests.support.refusals import refusals

MERGE_SHAPE = (7, 6, 3)


CUT = ("sample", "width", "channel")


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_concat_reads_what_its_channels_are_made_of(channels, data):
    low = data.draw(st.integers(0, sum(channels)))
    high = data.draw(st.integers(low, sum(channels)))
    boxes = Concat().input_boxes(Box((0, 2, low), (3, 4, high)), *[(6, c) for c in channels])
    origin = [(i, c) for i, n in enumerate(channels) for c in range(n)]
    read = [(i, c) for i, box in enumerate(boxes) for c in range(*box.ranges[-1])]
    assert read == origin[low:high]
    assert all(box.ranges[:-1] == ((0, 3), (2, 4)) and box.start[-1] <= box.stop[-1] for box in boxes)


@pytest.mark.ranks(3)
def test_concat_of_values_on_different_ranks():
    """Concat is exact for inputs from layers with different cuts, on different ranks."""
    make = lambda: lambda a, b: Concat(name="c")(Conv(4, 1, name="v")(a), b)  # noqa: E731
    with Communicator(MPI.COMM_SELF) as alone, Communicator(MPI.COMM_WORLD) as comm:
        for parts in ({"channel": 3}, {"channel": 2}, {"width": 3}):
            found = run_layer(make, [(5, 6, 3), (5, 6, 2)], comm, parts)
            fault = None
            if found is not None:
                want = run_layer(make, [(5, 6, 3), (5, 6, 2)], alone, {})
                fault = compare(found, want, 64.0, "float64", str(parts))
                assert np.isfinite(found["y"]).all()
            comm.agree(fault)


def residual(x):
    """Return the output of sums and Concat whose inputs all have several readers, so their gradients must not mix."""
    a = Conv(3, 3, padding=1, name="a")(x)
    b = Conv(3, 3, padding=1, name="b")(x)
    s = Add("relu")(a, b)
    t = Add()(s, a, b, s)
    return Concat()(t, a, Add()(t, b))


@pytest.mark.mpi
@pytest.mark.parametrize("backend, dtype", [("numpy", "float64"), ("onednn", "float32")])
def test_exact_where_gradients_meet(backend, dtype):
    check_layer(lambda: residual, MERGE_SHAPE, gradient=False, backend=backend, dtype=dtype)


def test_gradients_that_meet_are_the_derivative():
    check_layer(lambda: residual, MERGE_SHAPE)


def test_shapes_and_flops():
    assert Concat().output_shape((4, 5, 2), (4, 5, 3)) == (4, 5, 5)
    assert Concat(axis="height").output_shape((4, 5, 2), (1, 5, 2)) == (5, 5, 2)
    assert Add().output_shape((4, 5, 2), (4, 5, 2)) == (4, 5, 2)
    assert Add().flops((4, 5, 2), (4, 5, 2), (4, 5, 2)) == 80


A, B = Input((4, 4, 2), "a"), Input((5, 4, 2), "b")
test_errors_name_what_is_wrong = refusals(
    (lambda: Add()(A, B), r"Add: expected .* got \(4, 4, 2\), \(5, 4, 2\)"),
    (lambda: Concat()(A, B), r"Concat: expected .* got \(4, 4, 2\), \(5, 4, 2\)"),
    (lambda: Concat()(), r"Concat: .* got no input"),
    (lambda: Concat(axis="width")(A, B), r"Concat: expected .* got \(4, 4, 2\)"),
    (lambda: Concat(axis="depth")(A, B), r"Concat: axis: expected .* got 'depth'"),
    (lambda: Add("tan"), r"activation: expected .* got 'tan'"),
)


MULTIPLY_SHAPE = (7, 6, 3)


KINDS = pytest.mark.parametrize("kind", [Multiply, BroadcastAdd])


def test_needed_blocks_are_what_is_multiplied():
    """`needed_blocks` gives the elements of a broadcast factor that a block of the product reads."""
    for gate in GATES.values():
        for parts in ({"sample": 2, "height": 3}, {"height": 2, "width": 2}, {"channel": 3}, {"sample": 5}):
            size = math.prod(parts.values())
            output = Layout.blocks((3, *MULTIPLY_SHAPE), parts, size)
            read = Multiply().needed_blocks(1, [output, Layout.blocks((3, *gate), {}, size)], output)
            number = np.arange(3 * math.prod(gate)).reshape(3, *(1,) * (4 - 1 - len(gate)), *gate)
            spread = np.broadcast_to(number, (3, *MULTIPLY_SHAPE))
            for rank in range(size):
                box: Box = output.boxes[rank]
                want = set(spread[box.slices()].ravel().tolist())
                have = number.reshape(3, *gate)[read[rank].slices()] if read[rank].size else np.empty(0, int)
                assert set(have.ravel().tolist()) == want, (gate, parts, rank)


def test_operators_are_layers():
    x, gate = Input(MULTIPLY_SHAPE, "x"), Input((3,), "gate")
    assert isinstance((x * gate).layer, Multiply) and isinstance((x + x).layer, Add)
    assert isinstance((x + gate).layer, BroadcastAdd)
    assert (gate * x).inputs == (gate + x).inputs == (x, gate), "the larger one first, whatever the order"


def test_numbers_are_layers():
    x = Input(MULTIPLY_SHAPE, "x")
    cases = {
        (2.0, 0.0): [2 * x, x * 2, np.float32(2) * x, x / 0.5],
        (1.0, -3.0): [x - 3, x + -3, -3 + x],
        (-1.0, 3.0): [3 - x],
        (-1.0, 0.0): [-x],
    }
    for numbers, nodes in cases.items():
        for node in nodes:
            assert isinstance(node.layer, Affine) and (node.layer.factor, node.layer.shift) == numbers
    assert x + 0 is x and 1 * x is x and x / 1 is x, "what does nothing is no layer"
    added = sum([x, x])
    assert isinstance(added.layer, Add) and added.inputs == (x, x)
    difference = x - Sigmoid()(x)
    assert isinstance(difference.layer, Add) and isinstance(difference.inputs[1].layer, Affine)


test_multiply_refusals = refusals(
    (lambda x: Multiply()(x), "expected two inputs, got 1"),
    (lambda x: Multiply()(x, Input((7, 5, 3))), r"with 1 for any of its extents, or \(3,\), got \(7, 5, 3\)"),
    (lambda x: Multiply()(x, Input((7,))), r"got \(7,\)"),
    (lambda x: x + Input((7, 5, 3)), r"BroadcastAdd: expected a second input of the shape \(7, 6, 3\)"),
    (lambda x: x * float("nan"), "Affine: expected two finite numbers, got nan, 0.0"),
    call=lambda make: make(Input(MULTIPLY_SHAPE)),
)
test_refusals_of_other_types = refusals(
    (lambda x: x * "2", "product: expected .* got str"),
    (lambda x: x * True, "product: expected .* got bool"),
    (lambda x: x + "1", "Add: expected the outputs of other layers, got str"),
    (lambda x: x / 0, "quotient: expected a number other than 0 as divisor, got 0"),
    (lambda x: x / x, "quotient: expected a number other than 0 as divisor, got <"),
    (lambda x: 1 / x, "unsupported operand"),
    call=lambda make: make(Input(MULTIPLY_SHAPE)),
    error=TypeError,
)


POINTWISE_SHAPE = (7, 6, 4)


def _functions(x):
    """Return a node that depends on every function, with inputs far from their singularities."""
    positive = hg.Affine(1, 0.5)(hg.Power(2)(x))
    found = [hg.Exp()(x), hg.Log()(positive), hg.Abs()(hg.Affine(1, 3.0)(x))]
    return hg.Add()(*found, *(hg.Power(p)(positive) for p in (0.5, -0.5, -1, 3, 1.7)))


CASES = {
    "functions": _functions,
    "flips": lambda x: hg.Add()(hg.Flip("height")(x), hg.Flip("width", "channel")(x)),
    "rows": lambda x: hg.Slice(2, 5, axis="height")(x),
    "channels": lambda x: hg.Concat()(hg.ChannelMax()(x), hg.ChannelMean()(x)),
}


@pytest.mark.mpi
@pytest.mark.parametrize("name", CASES)
def test_exact(comm, turn, name):
    """Between convolutions; channels are cut where the layer allows it."""

    def chain():
        return lambda x: hg.Conv(2, 1, name="behind")(CASES[name](hg.Conv(4, 1, name="before")(x)))

    cut = ("sample", "height", "width") if name == "channels" else ("height", "width", "channel")
    check_layer(chain, POINTWISE_SHAPE, batch=2, gradient=comm.size == 1, axes=axes_in_turn(comm.size, cut, turn))


def test_the_first_token_is_selected_at_other_extents():
    tokens = hg.Conv(3, 1, name="c")(hg.Input((8, 3), name="x"))
    network = hg.Network(hg.Slice(0, 1, axis="width")(hg.Token(1, name="t")(tokens)))
    assert resized(network, (12,)).outputs["output"].shape == (1, 3)


def test_the_first_of_equal_maxima_receives_the_gradient():
    from mpi4py import MPI

    from halograd.comm import Communicator
    from halograd.testing import random_array, run_layer

    x = np.array([[[1.0, 2.0, 2.0]], [[-1.0, -1.0, -1.0]]])
    with Communicator(MPI.COMM_SELF) as alone:
        found = run_layer(hg.ChannelMax, [(1, 3)], alone, {}, shift={"x0": x - random_array(x.shape, "x0")})
    np.testing.assert_allclose(found["y"], [[[2.0]], [[-1.0]]])
    np.testing.assert_array_equal(found["dx0"] != 0, [[[False, True, False]], [[True, False, False]]])


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda x: hg.Power(0)(x), r"Power: expected a finite exponent other than 0, got 0"),
        (lambda x: hg.Flip("depth")(x), r"Flip: expected some of height, width, channel, the axes of .*'depth'"),
        (lambda x: hg.Slice(0, 1, axis="depth")(x), r"Slice: axis: expected one of height, width, channel, .*'depth'"),
        (lambda x: hg.Slice(0, 8, axis="height")(x), r"Slice: expected at most 7, the rows of the input, got 8"),
        (lambda x: hg.Flip()(x), r"Flip: expected some of height, width, channel"),
    ],
)
def test_settings_that_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make(hg.Input(POINTWISE_SHAPE))


@pytest.mark.parametrize("exponent", [0.5, 0.25, 0.9])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_slope_of_a_root_is_limited_only_below_the_smallest_normal_number(dtype, exponent):
    """bfloat16 has the exponents of float32: small numbers keep their slopes."""
    dtype = as_dtype(dtype)
    smallest = 2.0**-14 if dtype.name == "float16" else 1e-30
    x = np.array([0, smallest, 4 * smallest], dtype)
    slopes = np.empty_like(x)
    hg.Power(exponent).slopes(x, slopes)
    assert np.isfinite(slopes).all()
    exact = exponent * x[1:].astype(float) ** (exponent - 1)
    np.testing.assert_allclose(slopes[1:].astype(float), exact, rtol=0.02)


SCALE_SHAPE = (7, 6, 5)


def test_initial_values():
    (gamma,) = Scale(1e-6).parameters((4, 4, 3)).values()
    assert np.array_equal(gamma.initial("l/gamma", 0), np.full(3, 1e-6)) and not gamma.decay
    assert list(Scale(bias=True).parameters((4, 4, 3))) == ["gamma", "beta"]
    assert PReLU().parameters((4, 4, 3))["slope"].initial("l/slope", 0).tolist() == [0.25]
    assert PReLU("channel", 0.5).parameters((4, 4, 3))["slope"].initial("l/slope", 0).tolist() == [0.5] * 3


test_scale_refusals = refusals(
    (lambda: Scale(float("nan")), "Scale: init: expected a finite number, got nan"),
    (lambda: PReLU("all"), "slopes: expected 'one' or 'channel', got 'all'"),
    (lambda: PReLU(init=float("inf")), "PReLU: init: expected a finite number, got inf"),
    (lambda: Parameter((2,), "orthogonal"), "init: expected 'he', .* or a number, got 'orthogonal'"),
)
