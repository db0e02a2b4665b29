"""Tests of convolution: random geometries, chains of layers, arithmetic, rejected settings."""

import numpy as np
import pytest
from hypothesis import given, settings

from halograd.dtensor import Box, Window
from halograd.layers import Conv, Input, Layer, Network, Strategy
from halograd.layers.convolution import boundary_boxes, local_geometry
from halograd.layers.parameter import Parameter
from halograd.layers.strategy import parameter_blocks
from halograd.testing import check_layer
from tests.layers.cases import conv
from tests.layers.geometries import drawn, every
from tests.support.refusals import refusals


@pytest.mark.mpi
@pytest.mark.parametrize("halo", ["pad", "overlap"])
@settings(max_examples=10)
@given(geometry=drawn())
def test_exact_on_drawn_geometries(geometry, halo):
    spatial, *rest = geometry
    check_layer(conv(rest), (*spatial, 2), gradient=False, batch=1, options={"halo": halo})


@pytest.mark.mpi
@settings(max_examples=4)
@given(geometry=drawn(axes=3, largest=8))
def test_exact_on_drawn_geometries_in_3d(geometry):
    spatial, *rest = geometry
    check_layer(conv(rest, 2), (*spatial, 1), gradient=False, batch=1)


# -- arithmetic --------------------------------------------------------------------------------------


def test_boundary_boxes_are_the_outputs_that_need_a_halo():
    windows = (Window(3, 2, 1, 1), Window(4, 1, 1, 2, 1))
    shape = (1, 12, 9, 2)
    outs = [w.output_size(n) for w, n in zip(windows, shape[1:])]
    owned = Box((0, 4, 3, 0), (1, 8, 6, 2))
    out = Box((0, 1, 2, 0), (1, 5, 7, 3))
    assert all(b <= m for b, m in zip(out.stop[1:3], outs))
    boxes = boundary_boxes(windows, out, owned, shape)
    for position in every(out.ranges[1:3]):
        need = [w.input_range(o, o + 1) for w, o in zip(windows, position)]
        inside = all(
            max(0, lo) >= a and min(n, hi) <= b for (lo, hi), (a, b), n in zip(need, owned.ranges[1:3], shape[1:3])
        )
        holding = [box for box in boxes if all(a <= o < b for o, (a, b) in zip(position, box.ranges[1:3]))]
        assert len(holding) == (0 if inside else 1)


def test_local_geometry_keeps_padding_at_the_ends_of_the_array_only():
    windows = (Window(3, 1, 1, 1),)
    first = local_geometry(windows, Box((0, 0, 0), (1, 5, 2)), Box((0, 0, 0), (1, 4, 3)))
    inner = local_geometry(windows, Box((0, 3, 0), (1, 9, 2)), Box((0, 4, 0), (1, 8, 3)))
    last = local_geometry(windows, Box((0, 7, 0), (1, 12, 2)), Box((0, 8, 0), (1, 12, 3)))
    assert [made().padding for made in (first, inner, last)] == [((1, 0),), ((0, 0),), ((0, 1),)]


# -- description -------------------------------------------------------------------------------------


def test_shapes_parameters_and_flops():
    layer = Conv(8, (3, 5), (2, 1), ((1, 1), (2, 2)), groups=2)
    assert layer.output_shape((9, 8, 6)) == (5, 8, 8)
    params = layer.parameters((9, 8, 6))
    assert params["w"].shape == (8, 3, 5, 3) and params["b"].shape == (8,)
    assert params["w"].fan_in == 3 * 5 * 3
    assert params["w"].decay and not params["b"].decay
    assert layer.flops((9, 8, 6)) == 2 * (3 * 5 * 3) * 8 * (5 * 8)
    assert "b" not in Conv(8, 3, bias=False).parameters((9, 8, 6))


def test_windows_may_be_given_as_lists_and_arrays():
    """Settings may be lists and arrays of NumPy integers; the layer still is a hashable key of cached results."""
    plain = Conv(8, (3, 5), (2, 1), ((1, 1), (2, 2)), dilation=(1, 2))
    for kind in (list, np.array):
        layer = Conv(8, kind([3, 5]), kind([2, 1]), kind([[1, 1], [2, 2]]), dilation=kind([1, 2]))
        assert layer.output_shape((9, 12, 6)) == plain.output_shape((9, 12, 6)) == (5, 8, 8)
    assert Conv(8, np.int64(3), padding=np.int64(1)).output_shape((9, 8, 6)) == (9, 8, 8)


def test_parameters_may_have_shapes_that_are_lists():
    """Parameters of a custom layer may have lists as shapes; their blocks are found by shape."""

    class Scale(Layer):
        def output_shape(self, shape):
            return shape

        def parameters(self, shape):
            return {"s": Parameter([shape[-1]], "ones", channel_axis=0)}

    network = Network(Scale(name="own")(Input((4, 3))))
    (block,) = parameter_blocks(network, Strategy({"sample": 2}), 2).values()
    assert block.boxes[1].shape == (3,)


def test_flops_and_shape_are_in_the_table():
    x = Input((8, 8, 4), "x")
    network = Network(Conv(6, 3, padding=1, name="first")(x))
    rows = {row[0]: row for row in network.rows()}
    assert rows["first"] == ("first", "Conv", (8, 8, 6), 6 * 9 * 4 + 6, 2 * 6 * 9 * 4 * 64, 8 * 8 * 6)
    assert "first" in network.summary() and "8x8x6" in network.summary()


def test_initial_weights_have_the_variance_of_he():
    w = Conv(64, 3).parameters((8, 8, 32))["w"].initial("conv/w", 1)
    assert np.var(w) == pytest.approx(2 / (9 * 32), rel=0.1)


test_errors_name_what_is_wrong = refusals(
    (lambda: Conv(4, 3, activation="tan"), r"activation: expected None, one of relu, .*, or a layer, got 'tan'"),
    (lambda: Conv(4, 3, groups=3), r"filters \(4\) must be a positive multiple of groups \(3\)"),
    (lambda: Conv(0, 3), r"filters \(0\) must be a positive multiple"),
    (lambda: Conv(4, 9)(Input((8, 8, 4))), r"Conv: a window of extent \[9, 9\] does not fit into \(8, 8\)"),
    (lambda: Conv(4, 3, groups=2)(Input((8, 8, 3))), r"3 input channels are not a multiple of groups \(2\)"),
    (lambda: Conv(4, (3, 3, 3))(Input((8, 8, 3))), r"kernel: expected one number or 2, got \(3, 3, 3\)"),
    (lambda: Conv(4, 3, padding="valid")(Input((8, 8, 3))), r"padding: expected 'same', numbers or .*'valid'"),
    (lambda: Conv(4, 3, padding=(1, 1, 1))(Input((8, 8, 3))), r"padding: expected one entry for each of 2"),
    (lambda: Conv(4, 3, padding=-1)(Input((8, 8, 3))), r"padding before the first element must be >= 0, got -1"),
    (lambda: Conv(4, 3, stride=0)(Input((8, 8, 3))), r"must be at least 1, got 3, 0, 1"),
    (lambda: Conv(4, 3)(np.zeros((8, 8, 3))), r"Conv: expected .* got ndarray"),
    error=(ValueError, TypeError),
)
