"""Tests of padding: within networks, its arithmetic, rejected settings."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halograd.layers import Concat, Conv, Input, Network, Pad, Slice
from halograd.layers.padding import PadAxis
from halograd.testing import check_layer
from tests.support.refusals import refusals

SHAPE = (7, 6, 3)
DATA = st.data()


@pytest.mark.mpi
def test_a_periodic_convolution():
    """A convolution with circular padding along one axis and replicated edges along the other is exact."""

    def layers():
        around, ends = Pad(((0, 0), (1, 1)), "circular", name="c"), Pad(((1, 1), (0, 0)), "replicate", name="r")
        conv = Conv(4, 3, activation="relu", name="conv")
        return lambda x: conv(ends(around(x)))

    check_layer(layers, SHAPE)


@pytest.mark.mpi
@pytest.mark.parametrize("axes", [("sample", "height"), ("sample", "width", "channel")])
def test_some_of_the_channels(axes):
    """Slices of the channels that are joined in reverse order are exact, also with cut channels."""

    def turned():
        first, rest, both = Slice(0, 2, "first"), Slice(2, 5, "rest"), Concat(name="both")
        return lambda x: both(rest(x), first(x))

    check_layer(turned, (5, 6, 5), axes=axes, gradient=axes[-1] != "channel")
    check_layer(lambda: Slice(1, 4), (5,), gradient=False)


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
    for number, (rows, source) in enumerate(PadAxis(0, low, high, mode).pieces(extent)):
        first, last = max(a, rows[0]), min(b, rows[1])
        if last > first:
            shown = list(range(*source(first, last)))
            if mode == "reflect" and number != 1:
                shown.reverse()
            found += shown * (last - first) if mode == "replicate" and number != 1 else shown
    assert found == want[a:b].tolist()


def test_every_mode_but_the_constant_is_a_layer_per_axis():
    x = Input(SHAPE)
    layers = Network(Pad(((1, 0), (2, 2)), "reflect", name="p")(x)).layers
    assert list(layers) == ["p_height", "p_width"] and all(node.layer.kind == "Pad" for node in layers.values())
    assert Pad(0, "reflect")(x) is x
    assert Pad(1)(x).shape == (9, 8, 3) == Pad((1, 1))(x).shape


test_refusals = refusals(
    (lambda: Pad(1, "mirror"), "mode: expected one of constant, reflect, replicate, circular, got 'mirror'"),
    (lambda: Pad(7, "reflect")(Input(SHAPE)), r"expected at most 6 rows of 7 in the mode reflect, got \(7, 7\)"),
    (lambda: Pad(7, "circular")(Input(SHAPE)), "expected at most 6 rows of 6 in the mode circular"),
    (lambda: Pad(-1, "circular")(Input(SHAPE)), "expected numbers of rows >= 0 in the mode circular"),
    (lambda: Pad(-4)(Input(SHAPE)), r"expected at least one row of \(7, 6\) to remain, got \(-1, -2\)"),
    (lambda: Slice(2, 2), "expected first < last, both >= 0, got 2, 2"),
    (lambda: Slice(1, 4)(Input(SHAPE)), "expected at most 3, the channels of the input, got 4"),
    (lambda: Pad(((1, 1),))(Input(SHAPE)), "a pair for each of 2 spatial axes"),
)
