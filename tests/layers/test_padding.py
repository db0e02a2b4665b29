"""Tests of padding: within networks, its arithmetic, rejected settings."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.layers import Conv, Input, Network, Pad, Roll, Slice, Sphere
from halograd.layers.padding import PadAxis
from halograd.testing import check_layer, random_array, run_layer
from tests.support.refusals import refusals

SHAPE = (7, 6, 3)
DATA = st.data()


@given(
    st.sampled_from(["reflect", "replicate", "circular"]),
    st.integers(1, 9),
    st.integers(0, 8),
    st.integers(0, 8),
    st.data(),
)
def test_pieces_show_the_rows_that_numpy_shows(mode, extent, low, high, data):
    most = {"reflect": extent - 1, "circular": extent}.get(mode, 8)
    low, high = min(low, most), min(high, most)
    names = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}
    want = np.pad(np.arange(extent), (low, high), names[mode])
    a = data.draw(st.integers(0, len(want) - 1))
    b = data.draw(st.integers(a + 1, len(want)))
    found = []
    for number, span in enumerate(PadAxis(0, low, high, mode).spans(extent)):
        first, last = max(a, span.rows[0]), min(b, span.rows[1])
        if last > first:
            shown = list(range(*span.source(first, last)))
            if mode == "reflect" and number != 1:
                shown.reverse()
            found += shown * (last - first) if mode == "replicate" and number != 1 else shown
    assert found == want[a:b].tolist()


def around_the_sphere(x, north, south, west, east, poles=False, sign=1.0):
    """Return x ``(N, H, W, C)`` padded across the poles and around the longitudes, element by element."""
    n, h, w, c = x.shape
    y = np.empty((n, north + h + south, west + w + east, c))
    for i, j in np.ndindex(y.shape[1:3]):
        row, column, factor = i - north, j - west, np.ones(c)
        if not 0 <= row < h:
            row = -row - 1 + poles if row < 0 else 2 * h - 1 - row - poles
            column, factor = column + w // 2, factor * sign
        y[:, i, j] = factor * x[:, row, column % w]
    return y


SPHERES = {
    "plain": (((3, 2), (2, 5)), Sphere()),
    "poles": (((6, 3), (0, 1)), Sphere(poles=True)),
    "vectors": (((1, 7), (6, 0)), Sphere(sign=(1, -1, -1))),
    "one sign": (((2, 0), (1, 1)), Sphere(poles=True, sign=-1)),
}


@pytest.mark.parametrize("name", SPHERES)
def test_a_sphere_element_by_element(ranks, name):
    (rows, columns), sphere = SPHERES[name]
    found = run_layer(lambda: Pad((rows, columns), sphere, name="p"), [SHAPE], ranks, {})
    want = around_the_sphere(random_array((2, *SHAPE), "x0"), *rows, *columns, sphere.poles, sphere.sign)
    if found is not None:
        np.testing.assert_array_equal(found["y"], want)


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["plain", "vectors"])
def test_a_sphere_is_exact_under_all_cuts(name):
    amounts, sphere = SPHERES[name]
    check_layer(lambda: Pad(amounts, sphere, name="p"), SHAPE, axes=("height", "width"))
    check_layer(lambda: Pad(amounts, sphere, name="p"), SHAPE, axes=("height", "channel"), gradient=False)


def test_axes_of_a_sphere():
    """Latitudes and longitudes are the last two axes, or those that modes per axis name."""
    x, turned = Input((4, 5, 6, 2), "x"), Input((6, 5, 2), "turned")
    assert Pad(1, Sphere(longitude=2))(x).shape == (6, 7, 8, 2)
    assert list(Network(Pad(1, "sphere", name="p")(x)).layers) == ["p_height", "p_width", "p"]
    assert Pad(1, "sphere")(x).shape == (6, 7, 8, 2)
    layers = Network(Pad(1, ("circular", Sphere(longitude=0)), name="p")(turned)).layers
    assert list(layers) == ["p_width", "p_height"]  # across the poles first


MODES = ["reflect", "replicate", "circular", "sphere", ("zeros", "circular"), ("sphere", "circular")]


@pytest.mark.mpi
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_convolutions_pad_in_modes(mode):
    """A convolution with a mode of padding is the convolution without padding after a Pad, and keeps its name."""
    given = tuple("constant" if one == "zeros" else one for one in mode) if isinstance(mode, tuple) else mode

    def parts():
        pad, conv = Pad(((1, 1), (2, 2)), given, name="c_pad"), Conv(4, (3, 5), activation="silu", name="c")
        return lambda x: conv(pad(x))

    make = lambda: Conv(4, (3, 5), 1, (1, 2), padding_mode=mode, activation="silu", name="c")  # noqa: E731
    check_layer(make, SHAPE, gradient=mode == "sphere", tolerance=256.0)
    with Communicator(MPI.COMM_SELF) as alone:
        found, want = (run_layer(layer, [SHAPE], alone, {}) for layer in (make, parts))
    assert found.keys() == want.keys()
    for key in found:
        np.testing.assert_array_equal(found[key], want[key])


def test_a_convolution_that_is_called_twice_shares_its_padding():
    conv = Conv(3, 3, padding="same", padding_mode=("zeros", "circular"), name="c")
    network = Network(conv(conv(Input(SHAPE))))
    assert {"c", "c#2", "c_pad_width", "c_pad_width#2"} <= set(network.layers)
    assert list(network.parameters()) == ["c/w", "c/b"]
    kept = Conv(3, 3, 2, padding=1, padding_mode=("zeros", "circular"))
    assert kept.stencil.padding == ((1, 1), 0) and kept(Input(SHAPE)).shape == (4, 3, 3)
    assert Conv(3, 3, padding=1, padding_mode="zeros")(Input(SHAPE)).inputs[0].layer.name == "x"


@pytest.mark.mpi
def test_a_shift_comes_back():
    def layers():
        there, back = Roll((2, -1), name="there"), Roll((-2, 1), name="back")
        return lambda x: back(there(x))

    check_layer(layers, SHAPE, gradient=False)
    with Communicator(MPI.COMM_SELF) as alone:
        there, back = (run_layer(make, [SHAPE], alone, {}) for make in (lambda: Roll((2, -1)), layers))
    x = random_array((2, *SHAPE), "x0")
    np.testing.assert_array_equal(there["y"], np.roll(x, (2, -1), (1, 2)))
    np.testing.assert_array_equal(back["y"], x)


def test_every_mode_but_the_constant_is_a_layer_per_axis():
    x = Input(SHAPE)
    layers = Network(Pad(((1, 0), (2, 2)), "reflect", name="p")(x)).layers
    assert list(layers) == ["p_height", "p_width"] and all(node.layer.kind == "Pad" for node in layers.values())
    assert Pad(0, "reflect")(x) is x
    assert Pad(1)(x).shape == (9, 8, 3) == Pad((1, 1))(x).shape


test_refusals = refusals(
    (lambda: Pad(1, "mirror"), "mode: expected one of constant, reflect, replicate, circular, sphere, got 'mirror'"),
    (lambda: Pad(1, ("reflect", "mirror")), "circular, sphere, got 'mirror'"),
    (lambda: Pad(1, ("sphere", "reflect")), 'expected "circular" along the longitudes, axis 1 of 2'),
    (lambda: Pad(1, ("reflect",))(Input(SHAPE)), "expected one, or one for each of 2 spatial axes"),
    (lambda: Pad(1, "sphere")(Input((6, 7, 2))), "expected an even number of longitudes, .* got 7"),
    (lambda: Pad(((8, 0), (1, 1)), "sphere")(Input(SHAPE)), r"at most 7 rows of 7 in the mode sphere, got \(8, 0\)"),
    (lambda: Pad(((0, 0), (7, 0)), "sphere")(Input(SHAPE)), "at most 6 rows of 6 in the mode circular"),
    (lambda: Pad(((7, 0), (0, 0)), Sphere(poles=True))(Input(SHAPE)), "at most 6 rows of 7 in the mode sphere"),
    (lambda: Pad(1, "sphere")(Input((6, 2))), "latitudes and longitudes as the last two of 1 spatial axes"),
    (lambda: Pad(1, Sphere(sign=(1, -1)))(Input(SHAPE)), "sign: expected one per channel, 3, got 2"),
    (lambda: Sphere(sign=2), "sign: expected 1 or -1"),
    (lambda: Conv(2, 3, padding=1, padding_mode="constant"), "one of zeros, reflect, .* got 'constant'"),
    (lambda: Conv(2, 3, padding=4, padding_mode="reflect")(Input((4, 5, 2))), "at most 3 rows of 4 in the mode"),
    (lambda: Roll(1.5)(Input(SHAPE)), "expected a number of rows, or one for each of 2 spatial axes, got 1.5"),
    (lambda: Roll((1, 2, 3))(Input(SHAPE)), "one for each of 2 spatial axes"),
    (lambda: Pad(7, "reflect")(Input(SHAPE)), r"expected at most 6 rows of 7 in the mode reflect, got \(7, 7\)"),
    (lambda: Pad(7, "circular")(Input(SHAPE)), "expected at most 6 rows of 6 in the mode circular"),
    (lambda: Pad(-1, "circular")(Input(SHAPE)), "expected numbers of rows >= 0 in the mode circular"),
    (lambda: Pad(-4)(Input(SHAPE)), r"expected at least one row of \(7, 6\) to remain, got \(-1, -2\)"),
    (lambda: Slice(2, 2), "expected first < last, both >= 0, got 2, 2"),
    (lambda: Slice(1, 4)(Input(SHAPE)), "expected at most 3, the channels of the input, got 4"),
    (lambda: Pad(((1, 1),))(Input(SHAPE)), "a pair for each of 2 spatial axes"),
)
